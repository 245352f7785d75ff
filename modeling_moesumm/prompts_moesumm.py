# SPDX-License-Identifier: Apache-2.0
"""The sequences of a decoder: a document, the prompt for its summary, and the summary."""

from dataclasses import dataclass

import torch

from .configuration_moesumm import SUMMARY_PROMPT

PLAIN = {"add_special_tokens": False, "split_special_tokens": True}  # the name of a special token is plain text


def format_prompt(document: str, config=None) -> str:
    """The prompt for a document, by the `summary_prompt` of a model's configuration: tokenise it, and `generate` the summary."""
    return f"{document.strip()}{summary_prompt(config)}"


def summary_prompt(config) -> str:
    """A configuration's `summary_prompt`; the default for a stock model's, which has none."""
    return getattr(config, "summary_prompt", None) or SUMMARY_PROMPT


@dataclass
class PromptFormat:
    """The token ids around a document: BOS, if the tokenizer adds it, then the document, then the prompt for the summary. The
    summary follows, and EOS.
    """

    prefix: list[int]
    suffix: list[int]
    eos: int

    @classmethod
    def of(cls, tokenizer, config) -> "PromptFormat":
        """That of a tokenizer and a configuration. Raises a `ValueError` for a tokenizer without EOS."""
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"The tokenizer has eos_token={tokenizer.eos_token!r}, but summaries end with EOS. Set tokenizer.eos_token."
            )
        suffix = tokenizer(summary_prompt(config), **PLAIN)["input_ids"]
        return cls(leading_tokens(tokenizer), suffix, tokenizer.eos_token_id)

    def __len__(self) -> int:
        return len(self.prefix) + len(self.suffix)

    def join(self, document: list[int]) -> list[int]:
        """The prompt of a document's token ids."""
        return [*self.prefix, *document, *self.suffix]


def leading_tokens(tokenizer) -> list[int]:
    """The special tokens that a tokenizer puts before a text, such as BOS."""
    ids, plain = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
    starts = (start for start in range(len(ids)) if ids[start : start + len(plain)] == plain)
    return ids[: next(starts, 0)]


def pad_left(rows: list[list[int]], filler: int, multiple: int | None = None) -> torch.Tensor:
    """Rows of up to T numbers as `(B, T)`, filled on the left; T is a multiple of `multiple`."""
    T = max(map(len, rows))
    T += -T % (multiple or 1)
    return torch.tensor([[filler] * (T - len(row)) + list(row) for row in rows])


def pad_prompts(rows: list[list[int]], tokenizer, multiple: int | None = None) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` `(B, T)` of rows of token ids, padded on the left, as `generate` needs them."""
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    mask = pad_left([[1] * len(row) for row in rows], 0, multiple)
    return {"input_ids": pad_left(rows, padding, multiple), "attention_mask": mask}
