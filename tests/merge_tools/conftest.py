"""Tiny models on disk, each with its tokenizer, as experts for tests: experts(3), experts(2, "qwen3", torch.bfloat16).

`experts` writes each folder once in a session: treat what it returns as read-only, or copy it.
"""

import json
import string
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import modeling_lexicon  # noqa: F401  (registers LexiconForCausalLM)

NAMES = ("birds", "ships", "tools", "plants", "music", "stars", "cloth", "games")
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
MERGES = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a"), ("i", "n"), ("i", "s"), ("▁", "is"), ("o", "f")]
ROPES = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32},
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
# name -> (model_type, fields of its configuration)
MODELS = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral with a window": ("mistral", {"sliding_window": 8}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3 with biases": ("qwen3", {"head_dim": 8, "attention_bias": True}),
    "olmo2": ("olmo2", {}),
}


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


def save_expert(folder, seed, name="llama", dtype=torch.float32, extra_tokens=(), **changes) -> Path:
    """Saves a tiny model of a family, all of whose weights are drawn by `seed`, and its tokenizer.

    Args:
        name: key of MODELS.
        extra_tokens: at the end of the tokenizer, each with a row in the embeddings.
        changes: fields of its configuration.
    """
    tokenizer, (model_type, options) = tiny_tokenizer(extra_tokens), MODELS[name]
    config = CONFIG_MAPPING[model_type](**{**SIZES, "vocab_size": len(tokenizer), **options, **changes})
    randomize(AutoModelForCausalLM.from_config(config), seed).to(dtype).save_pretrained(folder)
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


def edit_tensors(folder, change, file="model.safetensors"):
    """Calls `change` on the tensors of a file by name, and writes them back."""
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, {"format": "pt"})


@pytest.fixture(scope="session")
def experts(tmp_path_factory):
    """experts(count, **options of save_expert) -> folders, the same for the same call."""
    known = {}

    def make(count, *given, **options):
        folders = known.setdefault(repr((given, options)), [tmp_path_factory.mktemp("experts")])
        for number in range(len(folders) - 1, count):
            folders.append(save_expert(folders[0] / NAMES[number], 100 + number, *given, **options))
        return folders[1 : count + 1]

    return make


def recipe_of(folders, **options):
    """A recipe with these experts, which may also be mappings."""
    return {"experts": [e if isinstance(e, dict) else {"source_model": str(e)} for e in folders], **options}


def same_tensors(one, other):
    """Whether two folders have the same tensors under the same names."""
    ours, theirs = read_tensors(one), read_tensors(other)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


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
