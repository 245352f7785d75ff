"""Mixtures of every family in every engine: the largest difference of logits, and mergekit's mixtures before and after repair.

Each engine runs in a Python of its own, named on the command line; what is not named is left out:

    python -m venv tf4 && tf4/bin/pip install torch==2.13.0 && tf4/bin/pip install transformers==4.57.6
    python -m venv llama && llama/bin/pip install llama-cpp-python==0.3.36
    python -m venv mergekit && mergekit/bin/pip install mergekit==0.1.5
    python benchmarks/merge_engines.py --transformers4 tf4/bin/python --llama-cpp llama/bin/python \
        --mergekit mergekit/bin/python --converter llama.cpp/convert_hf_to_gguf.py

The models are tiny, with random weights in bfloat16 that are opened in float32: what is compared is what the engines compute.
"""

import importlib.metadata
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import yaml
from common import make_parser, write
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from merge_tools import MergeError, compose, export, split_fused_experts
from merge_tools.families import FAMILIES, MIXTURES

# name -> (model_type, fields of its configuration)
MODELS = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral with a window": ("mistral", {"sliding_window": 8}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3 with biases": ("qwen3", {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
    "olmo2": ("olmo2", {}),
}
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# of the experts that mergekit merges with `gate_mode: cheap_embed`
PROMPTS = {
    "hermes": ["<|im_start|>user\nHello, who are you?<|im_end|>", "<|im_start|>user\nI need help with"],
    "medicine": ["As a doctor of medicine,"],
    "adventure": ["[Genres: Science Fiction]\n[Tags: humor, old school, sci fi]", "> get ye flask"],
    "german": ["<|im_start|>user\nWie geht es dir?<|im_end|>", "Das ist ein Satz auf Deutsch."],
}
FUSED = (
    "llama, embeddings"  # the case of mergekit; tests/merge_tools/test_mergekit_differential.py compares more recipes
)
IDS = [(7 * i) % 250 + 3 for i in range(40)]
STEPS = 30
# Each runs in another Python: the cases and ids as JSON in, a row for each case as JSON out.
TRANSFORMERS_4 = """
import json, sys, torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
cases, ids, steps = json.load(sys.stdin)
for name, folder in cases.items():
    try:
        model, info = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32, output_loading_info=True)
        with torch.no_grad():
            row = {"logits": model.eval()(torch.tensor([ids])).logits[0].tolist()}
        row["missing"] = sum(len(info[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    except Exception as error:
        row = {"error": " ".join(str(error).split())[:120]}
    try:
        row["tokenizer"] = type(AutoTokenizer.from_pretrained(folder)).__name__
    except Exception as error:
        row["tokenizer"] = "error: " + " ".join(str(error).split())[:120]
    print("row", json.dumps([name, {"version": transformers.__version__, **row}]))
"""
LLAMA_CPP = """
import json, sys, llama_cpp
cases, ids, steps = json.load(sys.stdin)
for name, path in cases.items():
    options = {"n_ctx": 128, "n_threads": 1, "verbose": False, "type_k": 0, "type_v": 0}  # 0: float32
    try:
        model, generated = llama_cpp.Llama(path, logits_all=True, **options), []
        model.eval(ids)
        row = {"logits": model.scores[: len(ids)].tolist()}
        for _ in range(steps):
            generated.append(int(model.scores[model.n_tokens - 1].argmax()))
            model.eval(generated[-1:])
        row["generated"] = generated
    except Exception as error:
        row = {"error": " ".join(str(error).split())[:120]}
    print("row", json.dumps([name, {"version": llama_cpp.__version__, **row}]))
"""
MERGEKIT = """
import importlib.metadata, json, sys
from mergekit.scripts.moe import main
cases, ids, steps = json.load(sys.stdin)
for name, folder in cases.items():
    flags = ["--device", "cpu", "--i-understand-this-is-not-useful-without-training"]
    main([folder + "/recipe.yml", folder + "/fused", *flags], standalone_mode=False)
    print("row", json.dumps([name, {"version": importlib.metadata.version("mergekit")}]))
"""


def run(python: Path | None, script: str, cases: dict[str, Path]) -> dict[str, dict]:
    """The rows that a script prints in another Python; none without one."""
    if python is None:
        return {}
    text = json.dumps([{name: str(path) for name, path in cases.items()}, IDS, STEPS])
    ran = subprocess.run([str(python), "-c", script], input=text, capture_output=True, text=True)
    rows = dict(json.loads(line[4:]) for line in ran.stdout.splitlines() if line.startswith("row "))
    if ran.returncode or rows.keys() != cases.keys():
        raise SystemExit(f"{python} failed: {ran.stderr[-2000:]}")
    return rows


def difference(logits, expected: torch.Tensor) -> float:
    """The largest difference of logits; NaN if there is one."""
    return float((torch.as_tensor(logits) - expected).abs().max())


def save_tokenizer(folder: Path) -> int:
    """A BPE with byte fallback, as transformers converts SentencePiece's; returns the size of its vocabulary."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        "▁",
        *map(chr, range(ord("a"), ord("z") + 1)),
    ]
    tokenizer = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokens = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens).save_pretrained(folder)
    return len(pieces)


def save_expert(folder: Path, name: str, seed: int) -> Path:
    """Saves a tiny model of a family in bfloat16, all of its weights random, and a tokenizer."""
    model_type, options = MODELS[name]
    config = CONFIG_MAPPING[model_type](**SIZES, vocab_size=save_tokenizer(folder), **options)
    model, generator = AutoModelForCausalLM.from_config(config), torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        p.data = torch.randn(p.shape, generator=generator) * (0.2 if p.dim() > 1 else 0.1) + ("norm" in name)
    model.bfloat16().save_pretrained(folder)
    return folder


def save_recipe(folder: Path) -> Path:
    """Saves a recipe that mergekit reads too, with its models in the same folder."""
    experts = [
        {"source_model": str(save_expert(folder / name, "llama", seed)), "positive_prompts": prompts}
        for seed, (name, prompts) in enumerate(PROMPTS.items())
    ]
    base, path = save_expert(folder / "base", "llama", 10), folder / "recipe.yml"
    recipe = {"base_model": str(base), "experts": experts, "gate_mode": "cheap_embed"}
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def open_model(folder: Path):
    """The model in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logits_of(model) -> torch.Tensor:
    """Logits of IDS, (tokens, vocabulary)."""
    return model(torch.tensor([IDS])).logits[0]


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def compose_family(folder: Path, name: str) -> dict:
    """Composes a mixture of other experts and one of equal experts; returns a row, with the reference logits."""
    experts = [str(save_expert(folder / f"expert {seed}", name, seed)) for seed in range(4)]
    compose({"experts": [{"source_model": expert} for expert in experts]}, folder / "mixture")
    equal = [{"source_model": experts[0], "name": f"copy {i}"} for i in range(4)]
    compose({"experts": equal}, folder / "equal")
    dense, same, model = (open_model(folder / sub) for sub in ("expert 0", "equal", "mixture"))
    expected, options = logits_of(model), {"do_sample": False, "min_new_tokens": STEPS, "max_new_tokens": STEPS}
    model.generation_config.eos_token_id = None
    generated = model.generate(torch.tensor([IDS]), pad_token_id=0, **options)[0, len(IDS) :].tolist()
    row = {"class": type(model).__name__, "largest_logit": float(expected.abs().max())}
    row["equal_experts"] = difference(logits_of(same).tolist(), logits_of(dense))
    return {"row": row, "expected": expected, "generated": generated}


def measure_families(work: Path, options) -> dict[str, dict]:
    """One row per family: what the engines compute for the same mixture."""
    found = {name: compose_family(work / name, name) for name in MODELS}
    files, rows = {}, {name: item["row"] for name, item in found.items()}
    for name in MODELS:
        try:
            export(work / name / "mixture", work / name / "mixture.gguf", "gguf")
            files[name] = work / name / "mixture.gguf"
        except MergeError as error:
            rows[name]["llama_cpp"] = {"refused": str(error).rpartition(": ")[2]}
    folders = {name: work / name / "mixture" for name in MODELS}
    for engine, results in (
        ("transformers_4", run(options.transformers4, TRANSFORMERS_4, folders)),
        ("llama_cpp", run(options.llama_cpp, LLAMA_CPP, files)),
    ):
        for name, row in results.items():
            if "logits" in row:
                row["difference"] = difference(row.pop("logits"), found[name]["expected"])
            if "generated" in row:
                row["equal_tokens"] = sum(
                    a == b for a, b in zip(row.pop("generated"), found[name]["generated"], strict=True)
                )
            rows[name][engine] = row
    return rows


def measure_mergekit(folder: Path, options) -> dict[str, dict]:
    """mergekit's mixture beside ours, before and after its repair, in transformers 4 and llama.cpp's converter."""
    if not options.mergekit:
        return {}
    folder.mkdir()
    compose(save_recipe(folder), folder / "ours")
    row = run(options.mergekit, MERGEKIT, {FUSED: folder})[FUSED]
    split_fused_experts(folder / "fused", folder / "repaired")
    ours, theirs = read_tensors(folder / "ours"), read_tensors(folder / "repaired")
    gates = [key for key in ours if key.endswith("gate.weight")]
    row["same_names"] = ours.keys() == theirs.keys()
    row["equal_tensors"] = all(torch.equal(ours[key], theirs[key]) for key in ours if key not in gates)
    row["gates"] = max(difference(ours[key].float(), theirs[key].float()) for key in gates)
    variants, expected = (
        {key: folder / key for key in ("fused", "repaired")},
        logits_of(open_model(folder / "repaired")),
    )
    for key, opened in run(options.transformers4, TRANSFORMERS_4, variants).items():
        if "logits" in opened:
            opened["difference"] = difference(opened.pop("logits"), expected)
        row[f"transformers_4_{key}"] = opened
    for key, variant in variants.items() if options.converter else ():
        command = [sys.executable, options.converter, variant, "--outfile", folder / f"{key}.gguf"]
        ran = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        row[f"llama_cpp_{key}"] = "converted" if ran.returncode == 0 else ran.stderr.strip().splitlines()[-1][:120]
    return {FUSED: row}


def main():
    parser = make_parser(__doc__, "merge_engines")
    for name in ("transformers4", "llama-cpp", "mergekit"):
        parser.add_argument(f"--{name}", type=Path, metavar="PYTHON")
    parser.add_argument("--converter", type=Path, metavar="convert_hf_to_gguf.py")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        results = {
            "families": measure_families(Path(work), options),
            "mergekit": measure_mergekit(Path(work, "mergekit"), options),
        }
    for name, row in {**results["families"], **results["mergekit"]}.items():
        print(f"{name:45}", json.dumps(row))
    classes = {name: MIXTURES[FAMILIES[kind].mixture].architecture for name, (kind, _) in MODELS.items()}
    settings = {"ids": len(IDS), "steps": STEPS, "classes": classes, "gguf": importlib.metadata.version("gguf")}
    write(options.name, results, **settings)


if __name__ == "__main__":
    main()
