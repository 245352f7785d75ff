# SPDX-License-Identifier: Apache-2.0
"""Graphs of ONNX and OpenVINO: their files, and functions that run them on numpy arrays."""

import os
import platform
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

BACKENDS = ("onnx", "openvino")
PRECISIONS = ("fp32", "int8")
PACKAGES = {"onnx": "onnxruntime", "openvino": "openvino"}
AGAIN = "Upgrade Lexperts, or export the model again with this version."


def graph_file(backend: str, precision: str) -> str:
    """The path of a graph in its folder, as optimum and sentence-transformers have it: "onnx/model_int8.onnx"."""
    name, suffix = {"onnx": ("model", "onnx"), "openvino": ("openvino_model", "xml")}[backend]
    return f"{backend}/{name}{'' if precision == 'fp32' else '_' + precision}.{suffix}"


def choose_backend(folder: Path, exported: Mapping, backend: str | None) -> str:
    """The backend of a graph in a folder.

    Args:
        folder: for messages.
        exported: the configuration's `exported`: for each backend an entry with `precision`, `opset`, ...
        backend: the one that is asked for, if any.

    Raises:
        ValueError: if it has no graph, there are several and none is asked for, or its entry is of an unknown version.
    """
    if not isinstance(exported, Mapping):
        raise ValueError(f"{folder}: exported={exported!r:.80} in config.json names no graphs. {AGAIN}")
    if backend is None and len(exported) > 1:
        raise ValueError(f"{folder} holds graphs for {' and '.join(exported)}. Pass backend={list(exported)[0]!r}.")
    backend = backend or next(iter(exported))
    if backend not in exported:
        raise ValueError(f"backend={backend!r} has no graph in {folder}, which has {', '.join(exported)}.")
    entry = exported[backend]
    precision = entry.get("precision") if isinstance(entry, Mapping) else None
    if backend not in BACKENDS or precision not in PRECISIONS:
        raise ValueError(
            f"{folder}: backend={backend!r} with precision={precision!r} in config.json is unknown. {AGAIN}"
        )
    return backend


def open_graph(folder: Path, config, backend: str, threads: int):
    """A function that runs a graph, `run(values, with_states)` -> logits and last hidden states, and the names of its inputs. Warns
    of int8 on a processor that has no instructions for it.

    Args:
        folder: of the model.
        config: its configuration; `exported` has the backend, as `choose_backend` returns it.
        threads: that the graph may use.

    Raises:
        ImportError: if the backend is not installed.
        OSError: if the file is missing or damaged, or needs a later version of the backend.
        ValueError: if the graph is not the configuration's, see `check_graph`.
    """
    entry = config.exported[backend]
    path = folder / graph_file(backend, entry["precision"])
    try:
        opened = {"onnx": open_onnx, "openvino": open_openvino}[backend](path, threads, entry["precision"])
    except ImportError:
        raise
    except Exception as error:  # the backends' errors have no common class
        cause = " ".join(str(error).split())
        raise OSError(
            f"{path} cannot be opened: {cause:.300} Its ONNX opset is {entry.get('opset')}. Upgrade with `pip install -U {PACKAGES[backend]}`, "
            "or if the file is incomplete, copy or export it again."
        ) from error
    if entry["precision"] == "int8" and has_vnni() is False:
        warnings.warn(
            f"{path.name} works on this processor, but without AVX512-VNNI or AVX-VNNI it is slower than elsewhere. Compare "
            "its speed with that of fp32.",
            stacklevel=3,
        )
    check_graph(path, *opened, config)
    return opened


def check_graph(path: Path, run: Callable, inputs: Sequence[str], config) -> None:
    """Runs a graph on one row. Raises a `ValueError` if it cannot be run, or its labels or styles are not the configuration's."""
    row, styles = np.ones((1, 2), dtype=np.int64), getattr(config, "styles", None) or []
    values = {"input_ids": row, "attention_mask": row, "token_type_ids": 0 * row, "style_ids": len(styles) * row[:, 0]}
    problem = f"has no input for the styles {', '.join(styles)}" if styles and "style_ids" not in inputs else ""
    if unknown := [name for name in inputs if name not in values]:
        problem = f"has an unknown input {unknown[0]!r}"
    elif not problem:
        try:
            logits = run({name: values[name] for name in inputs}, True)[0]
        except Exception as error:  # the backends' errors have no common class
            problem = f"cannot be run with {len(styles)} styles: {' '.join(str(error).split()):.300}"
        else:
            if logits.shape[-1] != (labels := len(config.id2label)):
                problem = f"has {logits.shape[-1]} labels, but config.json has {labels}"
    if problem:
        raise ValueError(f"{path} {problem}. {AGAIN}")


def open_onnx(path: Path, threads: int, precision: str):
    """A function that runs an ONNX graph, and the names of its inputs.

    An int8 graph reads one row at a time, without its padding: onnxruntime chooses the range of activations for all that it reads at
    once, and a text would not have the same answer alone and in a batch.
    """
    disable_telemetry()
    try:
        import onnxruntime
    except ImportError as error:
        raise ImportError("backend='onnx' needs onnxruntime. Install it with: pip install 'lexperts[onnx]'") from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4  # errors are raised, and not also printed
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(values: dict[str, np.ndarray], with_states: bool) -> tuple:
        names = ["logits", "last_hidden_state"] if with_states else ["logits"]
        return (*session.run(names, values), None)[:2]

    return (one_by_one(run) if precision == "int8" else run), [value.name for value in session.get_inputs()]


def disable_telemetry() -> None:
    """To be called before onnxruntime is imported: from 1.29 on, it sends statistics of its use to Microsoft unless this variable is
    set. Its function `disable_telemetry_events` does not stop that. A value that is set already stays.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def one_by_one(run: Callable[[dict[str, np.ndarray], bool], tuple]):
    """A function that runs a graph on one row after the other without their padding, where the outputs are 0."""

    def run_rows(values: dict[str, np.ndarray], with_states: bool) -> tuple:
        mask = values["attention_mask"] != 0  # (B, S)
        found: list = [None, None]
        for row in np.flatnonzero(mask.any(1)):
            real = mask[row]
            one = {name: of[row : row + 1] if of.ndim == 1 else of[row : row + 1, real] for name, of in values.items()}
            for i, output in enumerate(run(one, with_states)):
                if output is not None:
                    if found[i] is None:
                        found[i] = np.zeros((*mask.shape, output.shape[-1]), dtype=output.dtype)
                    found[i][row, real] = output[0]
        return tuple(found)

    return run_rows


def open_openvino(path: Path, threads: int, precision: str):
    """A function that runs an OpenVINO graph, and the names of its inputs.

    What an int8 graph does not compute in int8, it computes in bfloat16 if the processor can.
    """
    try:
        import openvino
    except ImportError as error:
        raise ImportError(
            "backend='openvino' needs openvino. Install it with: pip install 'lexperts[openvino]', or beside lexperts-lite: pip "
            "install openvino"
        ) from error
    options: dict = {"INFERENCE_NUM_THREADS": threads}
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
