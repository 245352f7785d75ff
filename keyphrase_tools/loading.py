"""Opens what extracts keyphrases by the options --model, --device and --dtype: on PyTorch, or an exported graph on onnxruntime."""

import os
from pathlib import Path

from lexperts_lite.runtime import MODELS, KeyphraseExtractor
from run_tools.errors import UserError
from run_tools.packaged import locate_model

GPUS = ("/dev/nvidia0", "/dev/dxg", "/dev/kfd")  # asking PyTorch takes seconds


def locate_extractor(model: str | os.PathLike | None = None, device: str | None = None, dtype: str = "float32") -> str:
    """The folder of a model: of default and tiny on a CPU the graph in int8, which takes half of the time; else the weights."""
    on_cpu = device == "cpu" or (device is None and not any(map(os.path.exists, GPUS)))
    name = str(model or "default")
    if name in MODELS and on_cpu and dtype == "float32" and not (model and os.path.isdir(name)):
        return str(MODELS[name])
    return locate_model(model)


def open_extractor(model: str | None = None, *, device: str | None = None, dtype: str = "float32", **options):
    """The keyphrase pipeline of a model, or a `lexperts_lite.KeyphraseExtractor` of a folder with a graph and no weights.

    Args:
        model: folder or Hub id of a token classifier, a folder that `export_model` wrote, or default (if there is none) or tiny.
        device: such as "cuda:0"; by default a GPU if there is one.
        dtype: the name of a data type, such as "bfloat16".
        options: of `pipeline`, such as `trust_remote_code`.

    Raises:
        OSError: if the model cannot be opened.
        ValueError: for a device or data type that is not available.
    """
    import torch

    name = locate_extractor(model, device, dtype)
    if Path(name, "onnx").is_dir() and not any(Path(name).glob("*.safetensors")):
        if device not in (None, "cpu") or dtype != "float32":
            raise UserError(
                f"device={device!r}, dtype={dtype!r}: a graph runs on the CPU, in the precision of its export."
            )
        return KeyphraseExtractor(name, num_threads=torch.get_num_threads())
    from run_tools.loading import open_pipeline

    options |= {"dtype": dtype} | ({} if device is None else {"device": torch.device(device)})
    return open_pipeline("keyphrase-extraction", name, **options)
