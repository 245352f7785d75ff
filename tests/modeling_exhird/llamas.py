"""Tiny stock decoders that write keyphrases, and their tokenizer."""

import functools

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from modeling_exhird import DataCollatorForPrompts, tokenize_prompts
from modeling_exhird.prompts_exhird import PromptFormat

from .conftest import DOCUMENTS, VOCABULARY

BACKBONES = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "head_dim": 8, "initializer_range": 0.1,
}  # fmt: skip


@functools.cache
def llama_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE in which `" ;"` and `" |"` are tokens, as in SmolLM2's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=380, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*VOCABULARY, *DOCUMENTS["text"], " ; | ; |" * 50], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=256
    )


def llama_config(kind: str = "llama", **changes):
    """The configuration of a tiny decoder that writes keyphrases."""
    tokenizer = llama_tokenizer()
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    limits = {"max_source_length": 128, "max_phrases": 5, "max_tokens_per_phrase": 12}
    own = {"vocab_size": len(tokenizer), "keyphrase_generation": limits, **SIZES, **ids}
    return BACKBONES[kind](**{**own, **changes})


def tiny_llama(kind: str = "llama", **changes):
    """A new model in eval mode, always the same weights."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(llama_config(kind, **changes)).eval()


def prompt_format(model) -> PromptFormat:
    return PromptFormat(llama_tokenizer(), model.config)


def prompt_rows(**options) -> list[dict]:
    columns = tokenize_prompts(DOCUMENTS, llama_tokenizer(), llama_config(), **options)
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


@functools.cache
def fitted():
    """A model that has seen the documents, so that phrases end; tests may not change it."""
    model, batch = tiny_llama(), DataCollatorForPrompts(llama_tokenizer())(prompt_rows())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def documents() -> list[dict]:
    return [{"title": t, "text": x} for t, x in zip(DOCUMENTS["title"], DOCUMENTS["text"], strict=True)]
