# SPDX-License-Identifier: Apache-2.0
"""Exported token classifiers: an ONNX or OpenVINO graph that the keyphrase pipeline calls like a PyTorch model.

`export.export_model` writes them. Their configuration names the graphs in `exported`, and holds everything else that the pipeline
needs; the code and the weights of the PyTorch model are not loaded.
"""

import shutil
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from torch import nn
from transformers import AutoConfig
from transformers.modeling_outputs import TokenClassifierOutput

from lexperts_lite.graphs import choose_backend, open_graph


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

    def open(self, backend: str | None = None) -> "ExportedModel":
        """Opens the graph.

        Args:
            backend: "onnx" or "openvino"; may be left out if there is one graph.

        Raises:
            ImportError: if the backend is not installed.
            ValueError: if the backend is unknown or has no graph here, or if there are graphs of both and none is named.
        """
        self.backend = choose_backend(self.folder, self.config.exported, backend)
        self._start()
        return self

    def _start(self) -> None:
        """Opens the graph's file; see `graphs.open_graph`."""
        self._run, self._inputs = open_graph(self.folder, self.config, str(self.backend), torch.get_num_threads())

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
