# SPDX-License-Identifier: Apache-2.0
"""Exported token classifiers: an ONNX or OpenVINO graph that the keyphrase pipeline calls like a PyTorch model.

`export.export_model` writes them. Their configuration names the graphs in `exported`, and holds everything else that the pipeline
needs; the code and the weights of the PyTorch model are not loaded.
"""

import hashlib
import platform
import shutil
import threading
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import torch
from huggingface_hub import snapshot_download
from torch import nn
from transformers import AutoConfig
from transformers.modeling_outputs import TokenClassifierOutput

try:
    from run_tools.fingerprints import hash_tokenizer
except ImportError:  # code of a checkpoint, on a machine without Lexperts: tokenizers are not compared
    hash_tokenizer = None  # type: ignore[assignment]

BACKENDS = ("onnx", "openvino")


def graph_file(backend: str, precision: str) -> str:
    """The path of a graph in its folder, as optimum and sentence-transformers have it: "onnx/model_int8.onnx"."""
    name, suffix = {"onnx": ("model", "onnx"), "openvino": ("openvino_model", "xml")}[backend]
    return f"{backend}/{name}{'' if precision == 'fp32' else '_' + precision}.{suffix}"


class ExportedModel(nn.Module):
    """A graph in a folder or on the Hub. The graph is opened by `open`.

    Args:
        name: folder or Hub id.
        hub: arguments of `from_pretrained` that locate a checkpoint, such as `revision` and `token`.
    """

    hf_device_map = None
    input_modalities = "text"
    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, name: str, **hub):
        super().__init__()
        subfolder, folder = hub.pop("subfolder", None) or "", Path(name)
        if not folder.is_dir():
            wanted = f"{subfolder}/*" if subfolder else None
            folder = Path(snapshot_download(name, allow_patterns=wanted, ignore_patterns=["*.safetensors"], **hub))
        self.folder = folder / subfolder
        self.config = AutoConfig.from_pretrained(self.folder, trust_remote_code=False)
        self.backend: str | None = None
        if not getattr(self.config, "exported", None):
            raise ValueError(f"{name} holds no exported graph. Write one with `lexperts keyphrases export {name} OUT`.")

    def open(self, backend: str | None = None, tokenizer=None) -> "ExportedModel":
        """Opens the graph.

        Args:
            backend: "onnx" or "openvino"; may be left out if there is one graph.
            tokenizer: is compared with the one that the graph was exported with.

        Raises:
            ImportError: if the backend is not installed.
            ValueError: if the backend is unknown or has no graph here, if there are graphs of both and none is named, or if the
                tokenizer differs.
        """
        exported = self.config.exported
        if backend is None and len(exported) > 1:
            raise ValueError(
                f"{self.folder} holds graphs for {' and '.join(exported)}. Pass backend={list(exported)[0]!r}."
            )
        backend = backend or next(iter(exported))
        if backend not in exported:
            raise ValueError(f"backend={backend!r} has no graph in {self.folder}, which has {', '.join(exported)}.")
        graph = exported[backend]
        if None not in (tokenizer, hash_tokenizer) and hash_tokenizer(tokenizer) != graph["tokenizer"]:
            raise ValueError(
                f"The tokenizer of {self.folder} is not the one that the graph was exported with. Export the model again."
            )
        path = self.folder / graph_file(backend, graph["precision"])
        self.backend, self._path = backend, path
        self._start()
        if graph["precision"] == "int8" and has_vnni() is False:
            warnings.warn(
                f"{path.name} works on this processor, but without AVX512-VNNI or AVX-VNNI it is slower than elsewhere. Compare "
                "its speed with that of fp32.",
                stacklevel=2,
            )
        with open(path.with_suffix(".bin") if backend == "openvino" else path, "rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").digest()
        self.register_buffer("digest", torch.tensor(list(digest), dtype=torch.uint8))  # for `fingerprints.hash_weights`
        return self

    def _start(self) -> None:
        """Opens the graph's file.

        Raises:
            ImportError: if the backend is not installed.
            OSError: if the file is missing or damaged, or needs a later version of the backend.
        """
        backend, path = self.backend, self._path
        try:
            start = (
                open_onnx
                if backend == "onnx"
                else partial(open_openvino, precision=self.config.exported[backend]["precision"])
            )
            self._run, self._inputs = start(path)
        except ImportError:
            raise
        except Exception as error:  # the backends' errors have no common class
            cause, opset = " ".join(str(error).split()), self.config.exported[backend].get("opset")
            raise OSError(
                f"{path} cannot be opened: {cause:.300} Its ONNX opset is {opset}. Upgrade with `pip install -U lexperts[{backend}]`, "
                "or if the file is incomplete, copy or export it again."
            ) from error

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "_run"}  # a session cannot be pickled

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        if self.backend is not None:
            self._start()

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
        style_ids: torch.Tensor | None = None,
        output_hidden_states: bool = False,
    ) -> TokenClassifierOutput:
        """Runs the graph.

        Args:
            input_ids, attention_mask, token_type_ids (`(B, S)`): as for the PyTorch model.
            style_ids (`(B,)`): the styles of the rows, 0 for none.
            output_hidden_states: also return the backbone's last states.

        Returns:
            `logits` (`(B, S, C)`) and, if asked for, `hidden_states`, a tuple of the last states `(B, S, d)`.
        """
        values = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids,
            "style_ids": input_ids.new_zeros(len(input_ids)) if style_ids is None else style_ids,
        }
        logits, states = self._run({name: values[name].numpy() for name in self._inputs}, output_hidden_states)
        hidden = (torch.from_numpy(states),) if output_hidden_states else None
        return TokenClassifierOutput(logits=torch.from_numpy(logits), hidden_states=hidden)

    def can_generate(self) -> bool:
        """False: it classifies."""
        return False

    def to(self, *args, **kwargs):
        """Graphs stay on the CPU.

        Raises:
            ValueError: for any other device.
        """
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        if device is not None and device.type != "cpu":
            raise ValueError(
                f"device={str(device)!r}: exported graphs run on the CPU. Leave the device out, or pass 'cpu'."
            )
        return self

    def save_pretrained(self, save_directory, **_):
        """Copies the folder's graphs and writes the configuration."""
        for backend in self.config.exported:
            shutil.copytree(self.folder / backend, Path(save_directory) / backend, dirs_exist_ok=True)
        self.config.save_pretrained(save_directory)


def open_onnx(path: Path):
    """A function that runs an ONNX graph, and the names of its inputs."""
    try:
        import onnxruntime
    except ImportError as error:
        raise ImportError("backend='onnx' needs onnxruntime. Install it with: pip install lexperts[onnx]") from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(values: dict[str, np.ndarray], with_states: bool) -> tuple:
        names = ["logits", "last_hidden_state"] if with_states else ["logits"]
        return (*session.run(names, values), None)[:2]

    return run, [value.name for value in session.get_inputs()]


def open_openvino(path: Path, precision: str):
    """A function that runs an OpenVINO graph, and the names of its inputs.

    What an int8 graph does not compute in int8, it computes in bfloat16 if the processor can.
    """
    try:
        import openvino
    except ImportError as error:
        raise ImportError(
            "backend='openvino' needs openvino. Install it with: pip install lexperts[openvino]"
        ) from error
    options: dict = {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
    if precision == "fp32":
        options["INFERENCE_PRECISION_HINT"] = "f32"
    compiled = openvino.Core().compile_model(str(path), "CPU", options)
    of_thread = threading.local()  # an InferRequest is not reentrant: one per thread

    def run(values: dict[str, np.ndarray], with_states: bool) -> tuple:
        if not hasattr(of_thread, "request"):
            of_thread.request = compiled.create_infer_request()
        outputs = of_thread.request.infer(values)
        return outputs["logits"].copy(), outputs["last_hidden_state"].copy()

    return run, [value.any_name for value in compiled.inputs]


def has_vnni() -> bool | None:
    """Whether the processor has instructions for sums of int8 products; `None` where this is not known."""
    file = Path("/proc/cpuinfo")
    if platform.machine() not in ("x86_64", "AMD64") or not file.exists():
        return None
    flags = file.read_text(encoding="utf-8").partition("flags")[2].partition("\n")[0].split()
    return any("vnni" in flag for flag in flags)
