"""Takes over a model that was trained over SmolLM2 into a package: what training has added, in 8 bits, and no weight of SmolLM2.

python models/pack_smollm2.py lexicon-smollm2 runs/lexicon-smollm2/steps/mixture-*/out
"""

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
from pack import HUB_ONLY, MODELS, order_metadata
from safetensors import safe_open
from safetensors.numpy import save_file

from merge_tools.low_rank import decompose, spectrum
from run_tools.packaged import KEY_MAPPING, TOKENIZER, TRAINED, WEIGHTS, find_packaged

BACKBONE, TOKENIZER_CONFIG = "smollm2", "tokenizer_config.json"
# names in a mixture with experts of low rank -> in a Llama
BASE = re.compile(r"(.*)\.block_sparse_moe\.base\.(w[123])\.weight")
DENSE = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
OF_LLAMA = {rf"\.mlp\.{dense}\.weight$": f".block_sparse_moe.base.{short}.weight" for short, dense in DENSE.items()}
PREFIX = "backbone."  # of SmolLM2's tensors in a model that has it as a part
AS_PART = {r"^(?=model\.)": PREFIX}
IN_8_BITS = re.compile(r"\.(A|B|lora_A|lora_B)\.weight$|\.experts\.(up|down)_proj$")
# tokens of a window of a long text: more and fewer were worse (benchmarks/log/summaries.md)
LENGTHS = {"moesumm-smollm2": 2048}
NEGLIGIBLE = 1e-5  # of the largest singular value
MOST = 64  # of the rank of an adapter


def read(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file in float32."""
    import torch

    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name).to(torch.float32).numpy() for name in file.keys()}  # noqa: SIM118  (not a mapping)


def added(model: dict[str, np.ndarray], backbone: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], int]:
    """What a model has beyond its backbone, and the rank of what its experts share. Raises a `SystemExit` for other changed weights."""
    new, rank = {}, 0
    for name, tensor in model.items():
        if match := BASE.fullmatch(name):
            layer, short = match.groups()
            difference = (tensor - backbone[f"{layer}.mlp.{DENSE[short]}.weight"]).astype(np.float64)
            squares, _ = spectrum(difference)
            own = int((squares > NEGLIGIBLE**2 * squares.max()).sum()) if squares.max() > 0 else 0
            rank = max(rank, own)
            new[f"{layer}.block_sparse_moe.experts.*.{short}"] = difference
        elif (original := name.removeprefix(PREFIX)) not in backbone:
            new[name] = tensor
        elif not (tensor == backbone[original]).all():
            new |= factors(name, (tensor - backbone[original]).astype(np.float64))
    for name in [name for name in new if name.endswith(tuple(DENSE))]:
        a, b, _ = decompose(new.pop(name), rank) if rank else (None, None, None)
        if rank:
            new |= {f"{name}.A.weight": a.astype(np.float32), f"{name}.B.weight": b.astype(np.float32)}
    return new, rank


def factors(name: str, difference: np.ndarray) -> dict[str, np.ndarray]:
    """The factors of an adapter that was added to a weight. Raises a `SystemExit` for another change of it."""
    squares = spectrum(difference)[0] if difference.ndim == 2 and name.endswith("_proj.weight") else np.ones(MOST + 1)
    rank = int((squares > NEGLIGIBLE**2 * squares.max()).sum())
    if rank > MOST:
        raise SystemExit(f"{name} was changed, which the package cannot hold. Train MLPs, deputies or adapters only.")
    a, b, _ = decompose(difference, rank)
    return {name.replace(".weight", f".lora_{x}.weight"): m.astype(np.float32) for x, m in (("A", a), ("B", b))}


def quantize(factor: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Thin matrices of floats (..., m, n) -> int8 (..., m, n), and one scale for each of the rank's dimensions, (..., m, 1) or
    (..., 1, n), float16.
    """
    longer = -1 if factor.shape[-2] < factor.shape[-1] else -2
    scale = (np.abs(factor).max(longer, keepdims=True) / 127).astype(np.float16)
    steps = np.divide(factor, scale, out=np.zeros(factor.shape, np.float32), where=scale > 0, dtype=np.float32)
    return np.clip(np.rint(steps), -127, 127).astype(np.int8), scale


def limit_length(original: Path, length: int, folder: Path) -> None:
    """Writes SmolLM2's tokenizer configuration with the number of tokens by which texts are split."""
    settings = json.loads(original.read_text(encoding="utf-8")) | {"model_max_length": length}
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def pack(run: Path, folder: Path) -> None:
    """Writes the files of a package: `trained.safetensors`, the configurations, and the tokenizer if it differs from SmolLM2's."""
    weights = Path(find_packaged(BACKBONE), WEIGHTS)
    new, shared = added(read(run / "model.safetensors"), read(weights))
    tensors = {}
    for name, tensor in new.items():
        if IN_8_BITS.search(name):
            tensors[name], tensors[f"{name}.scale"] = quantize(tensor)
        else:
            tensors[name] = tensor.astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    is_part, is_adapter = (any(part in name for name in new) for part in (PREFIX, ".lora_A."))
    mapping = AS_PART if is_part else {} if is_adapter else OF_LLAMA
    metadata = {"backbone": BACKBONE, KEY_MAPPING: json.dumps(mapping), "format": "pt"}
    save_file(tensors, folder / TRAINED, metadata)
    order_metadata(folder / TRAINED, tuple(metadata))
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    # in bfloat16 a text has another answer alone than in a batch, whose products are rounded otherwise
    config = {name: value for name, value in config.items() if name not in HUB_ONLY} | {"dtype": "float32"}
    if "expert_rank" in config:
        config["expert_rank"] += shared
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    # transformers' Trainer switches the cache off in config.json; `generate` reads this file
    names, vocabulary = ["generation_config.json"], run / "tokenizer.json"
    if vocabulary.exists() and vocabulary.read_bytes() != weights.with_name(vocabulary.name).read_bytes():
        names += [path.name for path in run.iterdir() if path.name.startswith(TOKENIZER)]
    for name in names:
        shutil.copyfile(run / name, folder / name)
    if (length := LENGTHS.get(folder.parent.name)) is not None:
        limit_length(weights.with_name(TOKENIZER_CONFIG), length, folder)
    size = (folder / TRAINED).stat().st_size / 1e6
    experts = f"; experts of rank {config['expert_rank']}, {shared} of it shared" if "expert_rank" in config else ""
    print(f"{len(new)} tensors, {size:.1f} MB{experts}")


if __name__ == "__main__":
    pack(Path(sys.argv[2]), MODELS / sys.argv[1] / f"lexperts_{sys.argv[1].replace('-', '_')}")
