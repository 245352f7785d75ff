"""What `merge_speed.py` measures: experts with random weights, and the command of each candidate."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from common import check_same_settings
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PEERS = {"mergekit": "0.1.5", "mergoo": "0.0.10"}
CANDIDATES = ("floor", "base", "no-verify", "mean", "ties", "mergekit", "mergoo", "check", "hidden", "mergekit-hidden")
VOCABULARY, SPECIAL = 128256, 256
# Two prompts for each expert, for gates from hidden states.
PROMPTS = (
    ("A patient presents with fever and", "The chest radiograph shows"),
    ("The court held that the defendant", "Pursuant to section 4 of the act"),
    ("def main():\n    import sys", "How do I sort a list in Python?"),
    ("Once upon a time there was a fox", "The knight drew his sword and"),
)
# SmolLM2-135M's shape, for experts made from its weights; Llama-3.2-1B's shape; Llama-3-8B's width with 2 layers, so that 8 experts
# fit on a disk of 25 GB; a small one. All have tied heads.
SHAPES = {
    "smollm2": {"hidden": 576, "intermediate": 1536, "layers": 30, "head_dim": 64, "kv_heads": 3, "vocabulary": 49152, "experts": 4},
    "1b": {"hidden": 2048, "intermediate": 8192, "layers": 16, "head_dim": 64, "experts": 4},
    "8b-wide": {"hidden": 4096, "intermediate": 14336, "layers": 2, "head_dim": 128, "experts": 8},
    "small": {"hidden": 2048, "intermediate": 8192, "layers": 2, "head_dim": 64, "experts": 4},
}  # fmt: skip
# only copies the bytes: a lower bound for any merge on this disk
FLOOR = """
import os, sys
target = os.open(sys.argv[1], os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
left = int(sys.argv[2])
for path in sys.argv[3:]:
    source = os.open(path, os.O_RDONLY)
    while left and (copied := os.copy_file_range(source, target, left)):
        left -= copied
os.fsync(target)
sys.exit(left > 0)
"""
COMPOSE_BY_MERGOO = """
import sys, torch
from mergoo.compose_experts import ComposeExperts
out, *paths = sys.argv[1:]
experts = [{"expert_name": f"expert_{i}", "model_id": path} for i, path in enumerate(paths)]
config = {"model_type": "llama", "num_experts_per_tok": 2, "experts": experts}
composer = ComposeExperts(config | {"router_layers": ["gate_proj", "up_proj", "down_proj"]}, torch_dtype=torch.bfloat16)
composer.compose()
composer.save_checkpoint(out)
"""


def config_of(shape: dict) -> LlamaConfig:
    """A Llama of this shape."""
    return LlamaConfig(
        hidden_size=shape["hidden"],
        intermediate_size=shape["intermediate"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["hidden"] // shape["head_dim"],
        num_key_value_heads=shape.get("kv_heads", 8),
        head_dim=shape["head_dim"],
        vocab_size=shape.get("vocabulary", VOCABULARY),
        bos_token_id=VOCABULARY - SPECIAL,
        eos_token_id=VOCABULARY - SPECIAL + 1,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )


def bytes_of(shape: dict, experts: int) -> int:
    """Bytes of a mixture's tensors in bf16; of one expert's for experts=1."""
    with torch.device("meta"):
        sizes = {name: 2 * p.numel() for name, p in LlamaForCausalLM(config_of(shape)).named_parameters()}
    routed = sum(count for name, count in sizes.items() if ".mlp." in name)
    gates = 2 * experts * shape["hidden"] * shape["layers"] if experts > 1 else 0
    return sum(sizes.values()) + (experts - 1) * routed + gates


def write_tokenizer(folder: Path):
    """A tokenizer as large as Llama 3's: 128,000 tokens of one to three bytes with their merges, and 256 special tokens."""
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in signs for b in signs]
    triples = [(a + b, c) for a, b in pairs for c in signs[:1]]
    merges = (pairs + triples)[: VOCABULARY - SPECIAL - len(signs)]
    pieces = signs + [a + b for a, b in merges]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_{i}|>" for i in range(SPECIAL - 2))]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[1])
    if len(fast) != VOCABULARY:
        raise RuntimeError(f"The tokenizer has {len(fast)} tokens and the model {VOCABULARY}.")
    fast.save_pretrained(folder)
    # in the older spelling, which mergoo's transformers reads too
    for name in ("tokenizer_config.json", "tokenizer.json"):
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        if name == "tokenizer.json":
            content["model"]["merges"] = [" ".join(merge) for merge in merges]
        else:
            content["tokenizer_class"] = "PreTrainedTokenizerFast"
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_perturbed(folder: Path, source: Path, seed: int):
    """The model of a folder in bf16, with noise of a fiftieth of their deviation on the weights of its MLPs, and its other files."""
    generator, state = torch.Generator().manual_seed(seed), {}
    for name, weight in load_file(source / "model.safetensors").items():
        if ".mlp." in name:
            weight = weight.float() + 0.02 * weight.float().std() * torch.randn(weight.shape, generator=generator)
        state[name] = weight.bfloat16()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    for file in source.iterdir():
        if file.name != "model.safetensors":
            shutil.copy(file, folder)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}, indent=2) + "\n", encoding="utf-8")


def make_experts(folder: Path, shape: dict, overwrite: bool, source: Path | None = None) -> list[Path]:
    """Creates the missing experts, each under another name until it is complete. Returns their folders.

    With a `source` they are that model with other MLPs, otherwise random.

    Raises:
        SettingsMismatchError: if existing experts were made with another shape or other versions.
    """
    experts = [folder / f"expert_{i}" for i in range(shape["experts"])]
    folder.mkdir(parents=True, exist_ok=True)
    for seed, expert in enumerate(experts):
        origin = {"source": source} if source else {"config": config_of(shape).to_dict()}
        check_same_settings(expert, {**origin, "seed": seed}, overwrite)
    missing = {seed: expert for seed, expert in enumerate(experts) if not expert.exists()}
    needed, free = len(missing) * bytes_of(shape, 1) + bytes_of(shape, len(experts)), shutil.disk_usage(folder).free
    if free < 1.05 * needed:
        raise SystemExit(f"{folder} has {free / 1e9:.1f} GB free of {needed / 1e9:.1f} GB. Use another --work folder.")
    for seed, expert in missing.items():
        print(f"making {expert.name}, {bytes_of(shape, 1) / 1e9:.2f} GB", flush=True)
        unfinished = folder / f"unfinished_{seed}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        if source:
            write_perturbed(unfinished, source, seed)
        else:
            torch.manual_seed(seed)
            model = LlamaForCausalLM._from_config(config_of(shape), dtype=torch.bfloat16)
            model.save_pretrained(unfinished, max_shard_size="100GB")
            write_tokenizer(unfinished)
        unfinished.rename(expert)
    return experts


def linked(experts: list[Path], count: int) -> list[Path]:
    """`count` experts: the given ones, and hard links to their files under other names."""
    more = [experts[0].parent / f"linked_{i}" for i in range(count - len(experts))]
    for i, folder in enumerate(more):
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier run
        shutil.copytree(experts[i % len(experts)], folder, copy_function=os.link)
    return experts + more


# Candidates


def recipe(experts: list[Path], path: Path, **more) -> Path:
    """Writes a recipe that both mergekit and merge-experts read (JSON is YAML)."""
    sources: list[dict] = [{"source_model": str(expert)} for expert in experts]
    if more.get("gate_mode") == "hidden":
        sources = [{**s, "positive_prompts": list(PROMPTS[i % len(PROMPTS)])} for i, s in enumerate(sources)]
    settings = {"gate_mode": "random", "experts_per_token": 2, "dtype": "bfloat16", **more}
    path.write_text(
        json.dumps({"base_model": str(experts[0]), "experts": sources, **settings}, indent=1), encoding="utf-8"
    )
    return path


def versions_of(package: str, folder: Path) -> dict[str, str]:
    """Versions of what matters in a virtual environment.

    Raises:
        SystemExit: if it has another version of the package or of torch than expected.
    """
    names = (package, "torch", "transformers", "safetensors")
    show = f"import json; from importlib.metadata import version; print(json.dumps({{n: version(n) for n in {names}}}))"
    versions = json.loads(subprocess.check_output([folder / "bin" / "python", "-c", show], text=True))
    for name, expected in ((package, PEERS[package]), ("torch", torch.__version__)):
        if versions[name].split("+")[0] != expected.split("+")[0]:
            raise SystemExit(f"{folder} has {name} {versions[name]}, not {expected}. Use another folder.")
    return versions


def commands(names: list[str], experts: list[Path], folder: Path, shape: dict, peers: dict[str, Path]) -> dict:
    """The command of each candidate; all but `check` write folder/out."""
    out, ours = folder / "out", [sys.executable, "-m", "lexperts", "merge"]

    def compose(name: str, *flags, **options) -> list:
        return [*ours, "compose", recipe(experts, folder / f"{name}.yml", **options), out, *flags]

    def mergekit(name: str, **options) -> list:
        return [peers["mergekit"] / "bin" / "mergekit-moe", recipe(experts, folder / f"{name}.yml", **options), out]

    weights = [expert / "model.safetensors" for expert in experts]
    candidates = {
        "floor": lambda name: [sys.executable, "-c", FLOOR, out, bytes_of(shape, len(experts)), *weights],
        "no-verify": lambda name: compose(name, "--no-verify", average="base"),
        "hidden": lambda name: compose(name, average="base", gate_mode="hidden"),
        "check": lambda name: [*ours, "check", recipe(linked(experts, 8), folder / "check.yml")],
        "mergekit": mergekit,
        "mergekit-hidden": lambda name: mergekit(name, gate_mode="hidden"),
        "mergoo": lambda name: [peers["mergoo"] / "bin" / "python", "-c", COMPOSE_BY_MERGOO, out, *experts],
    }
    average = lambda name: compose(name, average=name)  # noqa: E731
    return {name: list(map(str, candidates.get(name, average)(name))) for name in names}
