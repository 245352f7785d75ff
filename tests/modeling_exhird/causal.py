"""Tiny decoders that write keyphrases, and their tokenizer."""

import functools

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, MistralConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen3Config

from modeling_exhird import DataCollatorForPrompts, ExhirdCausalConfig, ExhirdForCausalLM, tokenize_prompts

from .conftest import DOCUMENTS, VOCABULARY

BACKBONES = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "head_dim": 8, "initializer_range": 0.1,
}  # fmt: skip


@functools.cache
def causal_tokenizer() -> PreTrainedTokenizerFast:
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


def backbone_config(kind: str = "llama", **changes):
    tokenizer = causal_tokenizer()
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    return BACKBONES[kind](**{"vocab_size": len(tokenizer), **SIZES, **ids, **changes})


def tiny_causal(kind: str = "llama", changes: dict | None = None, **options) -> ExhirdForCausalLM:
    """A new model in eval mode, always the same weights."""
    torch.manual_seed(0)
    marks = ExhirdCausalConfig.marks_of(causal_tokenizer())
    limits = {"max_source_length": 128, "max_phrases": 5, "max_tokens_per_phrase": 12}
    backbone = backbone_config(kind, **(changes or {}))
    return ExhirdForCausalLM(ExhirdCausalConfig(text_config=backbone, **{**marks, **limits, **options})).eval()


def causal_rows(**options) -> list[dict]:
    columns = tokenize_prompts(DOCUMENTS, causal_tokenizer(), tiny_causal().config, **options)
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def fit(model: ExhirdForCausalLM, steps: int = 60) -> ExhirdForCausalLM:
    """Trains on the documents, so that phrases end."""
    batch = DataCollatorForPrompts(causal_tokenizer(), answers_only=True)(causal_rows())
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@functools.cache
def fitted() -> ExhirdForCausalLM:
    """A model that has seen the documents; tests may not change it."""
    return fit(tiny_causal())


def padded(prompts: list[list[int]], side: str = "left") -> dict[str, torch.Tensor]:
    width = max(map(len, prompts))
    fill = [[0] * (width - len(prompt)) for prompt in prompts]
    ids = [f + p if side == "left" else p + f for f, p in zip(fill, prompts, strict=True)]
    mask = [[0] * len(f) + [1] * len(p) if side == "left" else [1] * len(p) + [0] * len(f)
            for f, p in zip(fill, prompts, strict=True)]  # fmt: skip
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
