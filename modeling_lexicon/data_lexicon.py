# SPDX-License-Identifier: Apache-2.0
"""Rows of term, context and definition as token ids whose loss is on the definition alone (LM-Lexicon, Eq. 1-2).

Letters: B rows, T tokens.
"""

import re

import torch

from .shared_lexicon import IGNORED, score_answers_only

PLAIN = {"add_special_tokens": False, "split_special_tokens": True}  # the name of a special token is plain text


def format_prompt(term: str, context: str) -> str:
    """The prompt without its first and last token: `tokenize_definitions` puts BOS before it and EOS after it."""
    return replace_surrogates(f'"{context}" What is the definition of "{term}"?')


def replace_surrogates(text: str) -> str:
    """The text with each lone surrogate replaced by U+FFFD; tokenizers do not accept them."""
    return text if text.isascii() else re.sub("[\ud800-\udfff]", "\ufffd", text)


def tokenize_definitions(batch: dict[str, list], tokenizer, max_length: int) -> dict[str, list]:
    """Tokenises rows for training; also for `datasets.Dataset.map(batched=True)`.

    The ids of a row are BOS prompt EOS definition EOS. The labels are those of the definition and its EOS, else -100. The
    two parts are tokenised separately: no token crosses the boundary. Rows longer than `max_length` tokens are left out, not
    truncated: a prompt without its question, or a definition without its end, would teach the wrong thing.

    Args:
        batch: columns `term`, `context`, `definition`, and optionally `domain` (the index of each row's expert).
        tokenizer: with a BOS and an EOS token.
        max_length: maximum number of tokens per row.

    Returns:
        Columns `input_ids` and `labels` of the rows that fit, and `row`, their indices in the batch; with a column `domain`
        also `domain_ids`.

    Raises:
        ValueError: for a tokenizer without BOS or EOS.
    """
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if bos is None or eos is None:
        raise ValueError(
            f"The tokenizer has bos_token={tokenizer.bos_token!r} and eos_token={tokenizer.eos_token!r}. Set both: a prompt starts "
            "with BOS and ends with EOS."
        )
    columns: dict[str, list] = {"input_ids": [], "labels": [], "row": []}
    if not batch["term"]:
        return columns
    questions = [format_prompt(term, context) for term, context in zip(batch["term"], batch["context"], strict=True)]
    prompts = tokenizer(questions, **PLAIN)["input_ids"]
    definitions = tokenizer([replace_surrogates(text) for text in batch["definition"]], **PLAIN)["input_ids"]
    for i, (question, answer) in enumerate(zip(prompts, definitions, strict=True)):
        start, end = [bos, *question, eos], [*answer, eos]
        if len(start) + len(end) <= max_length:
            columns["input_ids"].append(start + end)
            columns["labels"].append([IGNORED] * len(start) + end)
            columns["row"].append(i)
    if "domain" in batch:
        columns["domain_ids"] = [batch["domain"][i] for i in columns["row"]]
    return columns


class DataCollatorForDefinitions:
    """Pads the rows of a batch on the right: ids with the padding token, labels with -100, the attention mask with 0.

    Args:
        tokenizer: names the padding token.
        answers_only: see `score_answers_only`. Not for models that find the prompt by the labels.
    """

    def __init__(self, tokenizer, answers_only: bool = False):
        self.padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.answers_only = answers_only

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor | int]:
        """Rows of `tokenize_definitions` -> `input_ids`, `labels`, `attention_mask` (B, T) and, if given, `domain_ids` (B,); with
        `answers_only` the labels are (B, K), and `logits_to_keep` is K.
        """
        T = max(len(row["input_ids"]) for row in rows)
        pad = lambda name, filler: torch.tensor([[*row[name], *[filler] * (T - len(row[name]))] for row in rows])  # noqa: E731
        batch = {"input_ids": pad("input_ids", self.padding), "labels": pad("labels", IGNORED)}  # (B, T)
        lengths = torch.tensor([len(row["input_ids"]) for row in rows])
        batch["attention_mask"] = (torch.arange(T) < lengths[:, None]).long()
        if "domain_ids" in rows[0]:
            batch["domain_ids"] = torch.tensor([row["domain_ids"] for row in rows])  # (B,)
        return score_answers_only(batch) if self.answers_only else batch
