"""Tiny stock decoders that write keyphrases, and their tokenizer."""

import functools

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from modeling_exhird import DataCollatorForPrompts, tokenize_prompts
from modeling_exhird.prompts_exhird import PromptFormat
from tests.tools import as_rows, train_tokenizer

from .conftest import DOCUMENTS, VOCABULARY

BACKBONES = ("llama", "mistral", "qwen2", "qwen3")
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "head_dim": 8, "initializer_range": 0.1,
}  # fmt: skip


@functools.cache
def llama_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE in which `" ;"` and `" |"` are tokens, as in SmolLM2's."""
    return train_tokenizer([*VOCABULARY, *DOCUMENTS["text"], " ; | ; |" * 50], 380)


def llama_config(kind: str = "llama", **changes):
    """The configuration of a tiny decoder that writes keyphrases."""
    tokenizer = llama_tokenizer()
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    limits = {"max_source_length": 128, "max_phrases": 5, "max_tokens_per_phrase": 12}
    own = {"vocab_size": len(tokenizer), "keyphrase_generation": limits, **SIZES, **ids}
    return AutoConfig.for_model(kind, **{**own, **changes})


def tiny_llama(kind: str = "llama", **changes):
    """A new model in eval mode, always the same weights."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(llama_config(kind, **changes)).eval()


def prompt_format(model) -> PromptFormat:
    return PromptFormat(llama_tokenizer(), model.config)


def prompt_rows(**options) -> list[dict]:
    return as_rows(tokenize_prompts(DOCUMENTS, llama_tokenizer(), llama_config(), **options))


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
