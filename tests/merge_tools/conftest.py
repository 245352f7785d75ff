"""Tiny Llamas on disk, each with its tokenizer, as experts for tests.

    experts(3)                                          three folders, nothing in common but their shape
    experts(3, dtype="bfloat16", rope="llama3", tied=True)
    experts(3, same_shared=True)                        one base: they differ in their MLPs alone
    experts(3, same_shared=("q_proj", "up_proj"))       they differ in these linears alone
    experts(3, identical=True)                          the same weights under three names
    make_expert(tmp_path / "mine", seed=7, hidden_size=64)

`experts` writes each folder once in a session: treat what it returns as read-only, or copy it.
"""

import json
import string
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import modeling_lexicon  # noqa: F401  (registers LexiconForCausalLM)

NAMES = ("birds", "ships", "tools", "plants", "music", "stars", "cloth", "games")
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
MERGES = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a"), ("i", "n"), ("i", "s"), ("▁", "is"), ("o", "f")]
MLP = ("gate_proj", "up_proj", "down_proj")
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
# Weights large enough that experts, routes and texts differ visibly.
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def run_python(*arguments, code=0, **options):
    """The result of a Python process that ends with this exit status."""
    options |= {} if "input" in options else {"stdin": subprocess.DEVNULL}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == code, done.stderr[-3000:]
    return done


def tiny_tokenizer(extra=()):
    """A Llama-like BPE that reads any lower-case ASCII text, puts <s> in front, with `extra` tokens at its end."""
    pieces = [*SPECIAL.values(), "▁", *string.ascii_lowercase, *'"?.,;-', *("".join(pair) for pair in MERGES)]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, MERGES, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **SPECIAL)
    tokenizer.add_tokens(list(extra))
    return tokenizer


def randomize(model, seed, names=None):
    """Draws new values for all parameters, or for those whose names contain one of `names`; norms and biases too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            value = torch.randn(p.shape, generator=generator) * (0.2 if p.dim() > 1 else 0.1) + ("norm" in name)
            if names is None or any(part in name for part in names):
                p.copy_(value)
    return model


def save_expert(
    folder, seed, *, own=None, own_seed=None, dtype="float32", rope="default", tied=False, extra_tokens=(), **changes
) -> Path:
    """Saves a Llama with weights drawn by `seed`; those whose names contain one of `own` are drawn by `own_seed`.

    Args:
        dtype, rope, tied: name of a dtype; key of ROPES, or the settings themselves; whether embeddings are tied.
        extra_tokens: at the end of the tokenizer, each with a row in the embeddings.
        changes: fields of LlamaConfig.
    """
    tokenizer = tiny_tokenizer(extra_tokens)
    rope = ROPES[rope] if isinstance(rope, str) else rope
    options = {**SIZES, "vocab_size": len(tokenizer), "rope_parameters": dict(rope), "tie_word_embeddings": tied}
    model = randomize(LlamaForCausalLM(LlamaConfig(**{**options, **changes})), seed)
    if own:
        randomize(model, own_seed, own)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


def save_adapter(folder, over, rank=4, seed=0, **config):
    """A LoRA adapter of gate_proj in layer 0, as peft saves it."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    prefix = "base_model.model.model.layers.0.mlp.gate_proj"
    halves = {
        f"{prefix}.lora_A.weight": torch.randn(rank, 32, generator=generator),
        f"{prefix}.lora_B.weight": torch.randn(64, rank, generator=generator),
    }
    save_file(halves, folder / "adapter_model.safetensors")
    known = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "base_model_name_or_path": str(over), **config}
    (folder / "adapter_config.json").write_text(json.dumps(known))
    return folder


def edit_json(path, **changes):
    """Replaces keys of a JSON file; a value of None removes the key."""
    content = {**json.loads(Path(path).read_text()), **changes}
    Path(path).write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def old_spelling(folder):
    """The configuration as transformers 4 wrote it."""
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    (folder / "config.json").write_text(json.dumps(config))
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    edit_json(
        folder / "config.json",
        rope_theta=rope["rope_theta"],
        rope_scaling=None if rope["rope_type"] == "default" else scaling,
    )


@pytest.fixture(scope="session")
def make_expert():
    """make_expert(folder, seed, **options of save_expert) -> the folder."""
    return save_expert


@pytest.fixture(scope="session")
def experts(tmp_path_factory):
    """experts(count, same_shared=False, identical=False, **options of save_expert) -> folders, the same for the same call."""
    known = {}

    def make(count, *, same_shared=False, identical=False, **options):
        key = json.dumps([same_shared, identical, options], sort_keys=True)
        folders = known.setdefault(key, [])
        if not folders:
            folders.append(tmp_path_factory.mktemp("experts"))
        root = folders[0]
        own = MLP if same_shared is True else tuple(same_shared or ())
        for number in range(len(folders) - 1, count):
            seed = 0 if identical or same_shared else 100 + number
            parts = {"own": own, "own_seed": 200 + number} if own else {}
            folders.append(save_expert(root / NAMES[number], seed, **parts, **options))
        return folders[1 : count + 1]

    return make


def recipe_of(folders, **options):
    """A recipe with these experts, which may also be mappings."""
    return {"experts": [e if isinstance(e, dict) else {"source_model": str(e)} for e in folders], **options}


def read_tensors(folder):
    """Every tensor in the files of a checkpoint, by name."""
    return {name: t for file in sorted(Path(folder).glob("*.safetensors")) for name, t in load_file(file).items()}


def contents(folder):
    """Every file of a folder, by name, as bytes."""
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def open_model(folder, **options):
    """Opens a model in eval mode."""
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def logits_of(model, ids=None, **inputs):
    with torch.no_grad():
        return model(**({} if ids is None else {"input_ids": ids}), **inputs).logits.float()
