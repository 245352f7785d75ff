"""Tiny MoeSumm models over every kind of backbone, those backbones themselves, and a batch of two datasets."""

import re

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PegasusConfig,
    PegasusForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from modeling_moesumm import MoeSummConfig, MoeSummForCausalLM, MoeSummForConditionalGeneration

BACKBONES = {
    "bart": (BartConfig, BartForConditionalGeneration, {"pad_token_id": 1, "eos_token_id": 2}),
    "pegasus": (PegasusConfig, PegasusForConditionalGeneration, {"pad_token_id": 0, "eos_token_id": 1}),
}
DECODERS = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
}
DATASETS = ["news", "letters", "papers"]
V = 64
each_backbone = pytest.mark.parametrize("backbone", BACKBONES)
each_kind = pytest.mark.parametrize("backbone", [*BACKBONES, *DECODERS])

# Weights large enough that deputies, datasets and texts differ visibly.
SIZES = {
    "vocab_size": V, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 32, "max_position_embeddings": 40,
    "init_std": 0.3, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
}  # fmt: skip
DECODER_SIZES = {
    "vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "intermediate_size": 48, "max_position_embeddings": 64, "initializer_range": 0.2,
    "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def class_for(backbone):
    return MoeSummForCausalLM if backbone in DECODERS else MoeSummForConditionalGeneration


def backbone_config(backbone="bart", **changes):
    if backbone in DECODERS:
        kind, _, special = DECODERS[backbone]
        return kind(**{**DECODER_SIZES, **special, **changes})
    kind, _, special = BACKBONES[backbone]
    return kind(**{**SIZES, **special, "decoder_start_token_id": 2 if backbone == "bart" else 0, **changes})


def tiny_backbone(backbone="bart", seed=0, **changes):
    """A new stock model in eval mode, always the same weights."""
    torch.manual_seed(seed)
    model = {**BACKBONES, **DECODERS}[backbone][1](backbone_config(backbone, **changes)).eval()
    return randomise(model, r"(bias|norm.*weight)$")


def tiny_moesumm(backbone="bart", seed=0, changes=None, **options):
    """A new MoeSumm in eval mode over `tiny_backbone(backbone, seed)`."""
    torch.manual_seed(seed + 100)
    options = {"datasets": list(DATASETS), "num_deputies": 3, "deputy_init_std": 0.3, **options}
    if options.get("main_expert", True):
        options = {"deputy_intermediate_size": 20, **options}
    config = MoeSummConfig(text_config=backbone_config(backbone, **(changes or {})), **options)
    model = class_for(backbone)(config).eval()
    pretrained = tiny_backbone(backbone, seed, **(changes or {}))
    model.backbone.load_state_dict(pretrained.state_dict(), strict=False)
    if not config.main_expert:
        model._copy_backbone_weights(pretrained)
    return randomise(model, r"(up_bias|selectors\.weight)$")


def randomise(model, names):
    with torch.no_grad():
        for name, p in model.named_parameters():
            if re.search(names, name):
                p.add_(torch.randn_like(p) * 0.5)
    return model


def surer(model):
    """Larger logits, and so larger margins."""
    decoder = model.get_decoder()
    names = [name for name in ("layer_norm", "norm") if hasattr(decoder, name)]
    norm = getattr(decoder, names[0]) if names else decoder.layers[-1].final_layer_norm
    norm.weight.data.mul_(4)
    return model


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def without(batch, *names):
    return {name: value for name, value in batch.items() if name not in names}


def for_backbone(batch, backbone, side="right"):
    """The batch for a backbone: of a decoder, rows of text and summary, padded on this side, with labels for the summary."""
    if backbone not in DECODERS:
        return batch
    rows, targets = [], []
    for row, (ids, mask) in enumerate(zip(batch["input_ids"], batch["attention_mask"], strict=True)):
        text = ids[mask.bool()].tolist()
        summary = [y for y in batch["labels"][row].tolist() if y != -100] if "labels" in batch else []
        rows.append(text + summary)
        targets.append([-100] * len(text) + summary)
    T = max(map(len, rows))

    def pad(values, filler):
        fillers = [[filler] * (T - len(row)) for row in values]
        pairs = zip(values, fillers, strict=True)
        return torch.tensor([row + filler if side == "right" else filler + row for row, filler in pairs])

    joined = {"input_ids": pad(rows, 1), "attention_mask": pad([[1] * len(row) for row in rows], 0)}
    if "labels" in batch:
        joined["labels"] = pad(targets, -100)
    return joined | {"dataset_ids": batch["dataset_ids"]}


@pytest.fixture(scope="session")
def batch():
    """Four texts of 9, 6, 9 and 4 tokens, two of them of no or another dataset; summaries of 5, 3, 6 and 4."""
    torch.manual_seed(7)
    ids, labels = torch.randint(4, V, (4, 9)), torch.randint(4, V, (4, 6))
    mask = torch.ones_like(ids)
    for row, (source, target) in enumerate(((9, 5), (6, 3), (9, 6), (4, 4))):
        mask[row, source:] = 0
        labels[row, target:] = -100
    return {
        "input_ids": ids.masked_fill(mask == 0, 1),
        "attention_mask": mask,
        "labels": labels,
        "dataset_ids": torch.tensor([0, 2, -1, 1]),
    }


@pytest.fixture(scope="session")
def texts(batch):
    """The batch without its labels."""
    return {name: batch[name] for name in ("input_ids", "attention_mask", "dataset_ids")}


@pytest.fixture(scope="module")
def tokenizer():
    from .summaries import small_tokenizer  # imports this module

    return small_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    """A model whose summaries differ between texts and datasets."""
    from .summaries import writing_moesumm

    return writing_moesumm(tokenizer)
