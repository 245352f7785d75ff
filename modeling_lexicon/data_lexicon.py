# SPDX-License-Identifier: Apache-2.0
"""Rows of term, context and definition as token ids whose loss is on the definition alone (LM-Lexicon, Eq. 1-2)."""

import re

from .shared_lexicon import IGNORED

PLAIN = {"add_special_tokens": False, "split_special_tokens": True}  # the name of a special token is plain text


def format_prompt(term: str, context: str) -> str:
    """The prompt without its first and last token: `tokenize_definitions` puts BOS before it and EOS after it."""
    return replace_surrogates(f'"{context}" What is the definition of "{term}"?')


def replace_surrogates(text: str) -> str:
    """The text with each lone surrogate replaced by U+FFFD; tokenizers do not accept them."""
    return text if text.isascii() else re.sub("[\ud800-\udfff]", "\ufffd", text)


def tokenize_definitions(batch: dict[str, list], tokenizer, max_length: int) -> dict[str, list]:
    """Tokenises rows for training; also for `datasets.Dataset.map(batched=True)`. `DataCollatorForSeq2Seq` makes batches of them.

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
