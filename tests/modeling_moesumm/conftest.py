"""Tiny MoeSumm models over every kind of backbone, those backbones themselves, and a batch of two datasets."""

import re

import pytest
import torch
import transformers

from modeling_moesumm import MoeSummConfig, MoeSummForCausalLM, MoeSummForConditionalGeneration
from modeling_moesumm.prompts_moesumm import pad_rows

# the names of the classes in transformers, and own options
BACKBONES = {
    "bart": ("Bart", {"pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}),
    "pegasus": ("Pegasus", {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}),
}
DECODERS = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
}
DATASETS = ["news", "letters", "papers"]
V = 64
each_backbone = pytest.mark.parametrize("backbone", BACKBONES)
each_kind = pytest.mark.parametrize("backbone", [*BACKBONES, *DECODERS])
one_of_each = pytest.mark.parametrize("backbone", ["bart", "llama"])

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
    name, own = {**BACKBONES, **DECODERS}[backbone]
    sizes = DECODER_SIZES if backbone in DECODERS else SIZES
    return getattr(transformers, f"{name}Config")(**{**sizes, **own, **changes})


def tiny_backbone(backbone="bart", seed=0, **changes):
    """A new stock model in eval mode, always the same weights."""
    torch.manual_seed(seed)
    config = backbone_config(backbone, **changes)
    auto = transformers.AutoModelForCausalLM if backbone in DECODERS else transformers.AutoModelForSeq2SeqLM
    return randomise(auto.from_config(config).eval(), r"(bias|norm.*weight)$")


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


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def without(batch, *names):
    return {name: value for name, value in batch.items() if name not in names}


def for_backbone(batch, backbone, side="right"):
    """The batch for a backbone: of a decoder, rows of text and summary, padded on this side, with labels for the summary."""
    if backbone not in DECODERS:
        return batch
    texts = [ids[mask.bool()].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    summaries = [[y for y in row if y != -100] for row in batch.get("labels", torch.empty(4, 0)).tolist()]
    rows = [text + summary for text, summary in zip(texts, summaries, strict=True)]
    targets = [[-100] * len(text) + summary for text, summary in zip(texts, summaries, strict=True)]
    joined = {"input_ids": pad_rows(rows, 1, side), "dataset_ids": batch["dataset_ids"]}
    joined["attention_mask"] = pad_rows([[1] * len(row) for row in rows], 0, side)
    return joined | ({"labels": pad_rows(targets, -100, side)} if "labels" in batch else {})


@pytest.fixture(scope="session")
def batch():
    """Four texts of 9, 6, 9 and 4 tokens, two of them of no or another dataset; summaries of 5, 3, 6 and 4."""
    torch.manual_seed(7)
    ids, labels = torch.randint(4, V, (4, 9)), torch.randint(4, V, (4, 6))
    mask = torch.ones_like(ids)
    for row, (source, target) in enumerate(((9, 5), (6, 3), (9, 6), (4, 4))):
        mask[row, source:] = 0
        labels[row, target:] = -100
    ids, datasets = ids.masked_fill(mask == 0, 1), torch.tensor([0, 2, -1, 1])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "dataset_ids": datasets}


@pytest.fixture(scope="session")
def texts(batch):
    """The batch without its labels."""
    return without(batch, "labels")


@pytest.fixture(scope="module")
def tokenizer():
    from .summaries import small_tokenizer  # imports this module

    return small_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    """A model whose summaries differ between texts and datasets."""
    from .summaries import writing_moesumm

    return writing_moesumm(tokenizer)
