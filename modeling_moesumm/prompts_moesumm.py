# SPDX-License-Identifier: Apache-2.0
"""The inputs of a model: a document between special tokens, before a decoder's prompt for the summary; and its positions."""

from dataclasses import dataclass

import torch

from .configuration_moesumm import SUMMARY_PROMPT
from .sentences_moesumm import replace_surrogates

NO_LIMIT = 1_000_000  # tokenizers without a limit report a huge one, such as 1e30


def format_prompt(document: str, config=None) -> str:
    """The prompt for a document, by the `summary_prompt` of a model's configuration: tokenise it, and `generate` the summary."""
    return f"{document.strip()}{summary_prompt(config)}"


def summary_prompt(config) -> str:
    """A configuration's `summary_prompt`; the default for a stock model's, which has none."""
    return getattr(config, "summary_prompt", None) or SUMMARY_PROMPT


def is_decoder_only(config) -> bool:
    """Whether a model continues prompts, and has no encoder."""
    return getattr(config, "is_encoder_decoder", True) is False


@dataclass
class InputFormat:
    """The token ids around a document: the special tokens that the tokenizer adds; after that of a decoder the prompt, the
    summary, and EOS.
    """

    prefix: list[int]
    suffix: list[int]

    @classmethod
    def of(cls, tokenizer, config) -> "InputFormat":
        """That of a tokenizer and a configuration. Raises a `ValueError` for a decoder's tokenizer without EOS."""
        ids, plain = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
        start = next((i for i in range(len(ids)) if ids[i : i + len(plain)] == plain), 0)
        if not is_decoder_only(config):
            return cls(ids[:start], ids[start + len(plain) :])
        if tokenizer.eos_token_id is None:
            raise ValueError("The tokenizer has eos_token=None, but summaries end with it. Set tokenizer.eos_token.")
        return cls(ids[:start], tokenize(tokenizer, [summary_prompt(config)])[0])

    def __len__(self) -> int:
        return len(self.prefix) + len(self.suffix)

    def join(self, document: list[int]) -> list[int]:
        """The input for a document's token ids."""
        return [*self.prefix, *document, *self.suffix]


def tokenize(tokenizer, texts: list[str]) -> list[list[int]]:
    """The token ids of each text without special tokens: the name of one is plain text."""
    if not texts:
        return []
    options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    return tokenizer([replace_surrogates(text) for text in texts], **options)["input_ids"]


def pad_rows(rows: list[list[int]], filler: int, side: str) -> torch.Tensor:
    """Rows of up to T numbers as `(B, T)`, filled on a side."""
    T = max(map(len, rows))
    fillers = [[filler] * (T - len(row)) for row in rows]
    return torch.tensor([more + row if side == "left" else row + more for row, more in zip(rows, fillers, strict=True)])


def pad_inputs(rows: list[list[int]], tokenizer, config) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` `(B, T)`, padded on the left for a decoder, as `generate` needs it, and on the right for
    an encoder, whose positions are counted from the beginning of the row.
    """
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    side = "left" if is_decoder_only(config) else "right"
    mask = pad_rows([[1] * len(row) for row in rows], 0, side)
    return {"input_ids": pad_rows(rows, padding, side), "attention_mask": mask}


def max_positions(config, part: str) -> int:
    """The maximum number of tokens of a part, "encoder" or "decoder"."""
    names = (f"max_{part}_position_embeddings", "max_position_embeddings")
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), NO_LIMIT)


def source_limit(model, tokenizer) -> int:
    """The maximum number of tokens of an input, including special tokens. 512 if neither the model nor the tokenizer has a
    limit, as for T5's relative positions.
    """
    limit = min(max_positions(model.config, "encoder"), tokenizer.model_max_length, NO_LIMIT)
    return limit if limit < NO_LIMIT else 512


def check_on_long(on_long: str, choices: tuple[str, ...]):
    """Raises a `ValueError` for an unknown value."""
    if on_long not in choices:
        raise ValueError(f"on_long={on_long!r} is not known. Use one of {', '.join(map(repr, choices))}.")
