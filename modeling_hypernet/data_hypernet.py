# SPDX-License-Identifier: Apache-2.0
"""Tokenised rows of pairs (title and text, question and context), and their collator.

Letters: B rows of a batch, S tokens of a row or window.
"""

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.utils import logging

logger = logging.get_logger(__name__)


def truncate_titles(titles: Sequence[str | None], tokenizer, max_title_length: int, what: str = "titles") -> list[str]:
    """Titles of at most `max_title_length` tokens, "" for none. Logs the number of truncated ones."""
    stripped = [replace_surrogates(title or "").strip() for title in titles]
    encoded = tokenizer(stripped, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    truncated = [
        title[: offsets[max_title_length - 1][1]] if len(offsets) > max_title_length else title
        for title, offsets in zip(stripped, encoded["offset_mapping"], strict=True)
    ]
    count = sum(len(offsets) > max_title_length for offsets in encoded["offset_mapping"])
    if count:
        logger.warning(f"{count} of {len(titles)} {what} exceed {max_title_length} tokens and were truncated.")
    return truncated


def replace_surrogates(text: str) -> str:
    """The text with each lone surrogate replaced by U+FFFD; tokenizers do not accept them."""
    return text if text.isascii() else re.sub("[\ud800-\udfff]", "\ufffd", text)


def segment_masks(sequence_ids: Sequence[int | None], main: int) -> dict[str, list[int]]:
    """Segment of each token, `None` for special tokens, and that of the main text -> masks of H^u and H^v.

    >>> segment_masks([None, 0, None, 1, None], 1)  # [CLS] u [SEP] v [SEP]
    {'meta_mask': [1, 1, 0, 0, 0], 'main_mask': [0, 0, 0, 1, 0]}
    """
    meta = [int(i is not None and i < main) for i in sequence_ids]
    if sequence_ids[0] is None:
        meta[0] = 1
    return {"meta_mask": meta, "main_mask": [int(i == main) for i in sequence_ids]}


def tokenize_pairs(
    titles: Sequence[str | None],
    texts: Sequence[str],
    tokenizer,
    *,
    max_length: int | None = None,
    max_title_length: int = 64,
) -> dict[str, list]:
    """Tokenises titles with texts. A text without a title is tokenised alone.

    Args:
        titles: titles; `None` or "" for none.
        texts: texts, as many as titles.
        tokenizer: a fast tokenizer.
        max_length: tokens of a pair; the tokenizer's `model_max_length` by default. The text is truncated, with a warning.
        max_title_length: tokens of a title, which is truncated first, with a warning.

    Returns:
        Columns of the tokenizer, `meta_mask` and `main_mask`.

    Raises:
        ValueError: for a text without tokens.

    Example:

    ```python
    >>> rows = dataset.map(lambda batch: tokenize_pairs(batch["title"], batch["text"], tokenizer), batched=True)
    ```
    """
    rows: dict[str, list] = defaultdict(list)
    num_truncated = 0
    for i, (title, text) in enumerate(zip(truncate_titles(titles, tokenizer, max_title_length), texts, strict=True)):
        pair, main = [*([title] if title else []), replace_surrogates(text or "")], int(bool(title))
        encoded = tokenizer(*pair, truncation="only_second" if title else True, max_length=max_length)
        if main not in encoded.sequence_ids(0):
            raise ValueError(f"Text {i} has no tokens: {text!r:.60}. Remove such rows.")
        num_truncated += len(encoded.encodings[0].overflowing) > 0
        for name, values in {**encoded, **segment_masks(encoded.sequence_ids(0), main)}.items():
            rows[name].append(values)
    if num_truncated:
        logger.warning(f"{num_truncated} of {len(texts)} texts exceed max_length and were truncated.")
    return dict(rows)


@dataclass
class QuestionWindow:
    """A question with a window of its text: one row for the model.

    Attributes:
        example: index of the question.
        inputs: columns of the tokenizer, `meta_mask` and `main_mask`; each value a list of length S.
        offsets (`(S, 2)`): character offsets of each token.
    """

    example: int
    inputs: dict[str, list[int]]
    offsets: np.ndarray

    @property
    def in_text(self) -> np.ndarray:
        """(S,): whether a token belongs to the text."""
        return np.asarray(self.inputs["main_mask"], dtype=bool)


def question_windows(
    questions: Sequence[str],
    contexts: Sequence[str],
    tokenizer,
    *,
    max_seq_len: int = 384,
    doc_stride: int | None = None,
    max_question_len: int = 64,
) -> list[QuestionWindow]:
    """Questions with windows of their texts, in the order of the questions. A text without tokens, such as a zero-width space,
    has no window.

    Args:
        questions, contexts: questions and as many texts.
        tokenizer: a fast tokenizer.
        max_seq_len: tokens of a window, including question and special tokens.
        doc_stride: tokens by which neighbouring windows overlap; by default 128, or a third of a window.
        max_question_len: tokens of a question. Longer ones are truncated and their number is logged.

    Raises:
        ValueError: for a `doc_stride` that leaves no room for new tokens.
    """
    doc_stride = min(128, max_seq_len // 3) if doc_stride is None else doc_stride
    questions = truncate_titles(questions, tokenizer, max_question_len, "questions")
    longest = max(len(ids) for ids in tokenizer(questions, add_special_tokens=False)["input_ids"])
    room = max_seq_len - longest - tokenizer.num_special_tokens_to_add(pair=True)
    if room <= doc_stride:
        raise ValueError(
            f"max_seq_len={max_seq_len} leaves {room} tokens for the text beside a question of {longest}: not more than "
            f"doc_stride={doc_stride}."
        )
    encoded = tokenizer(
        questions,
        [replace_surrogates(context) for context in contexts],
        truncation="only_second",
        max_length=max_seq_len,
        stride=doc_stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    examples, offsets = encoded.pop("overflow_to_sample_mapping"), encoded.pop("offset_mapping")
    windows = []
    for row, example in enumerate(examples):
        segments = encoded.sequence_ids(row)
        if 1 in segments:
            inputs = {name: values[row] for name, values in encoded.items()} | segment_masks(segments, 1)
            windows.append(QuestionWindow(example, inputs, np.asarray(offsets[row])))
    return windows


def tokenize_questions(batch: Mapping[str, Sequence], tokenizer, **options) -> dict[str, list]:
    """Training rows from SQuAD's columns, for `dataset.map(tokenize_questions, batched=True, remove_columns=...)`.

    Args:
        batch: `question`, `context`, `answers` (`{"text": [...], "answer_start": [...]}`; the first is used, empty lists
            mean no answer) and optionally `id`, for error messages.
        tokenizer, options: as in `question_windows`.

    Returns:
        Columns of the tokenizer, `meta_mask`, `main_mask`, `start_positions` and `end_positions`: the answer's first and
        last token, or the row's first token if the window does not contain the whole answer.

    Raises:
        ValueError: for an answer that does not occur at its `answer_start`.
    """
    spans = [answer_span(batch, i) for i in range(len(batch["question"]))]
    rows: dict[str, list] = defaultdict(list)
    complete = set()
    for window in question_windows(batch["question"], batch["context"], tokenizer, **options):
        start, end = answer_tokens(window, spans[window.example])
        if end:
            complete.add(window.example)
        for name, values in {**window.inputs, "start_positions": start, "end_positions": end}.items():
            rows[name].append(values)
    lost = sum(span is not None for span in spans) - len(complete)
    if lost:
        logger.warning(f"{lost} of {len(spans)} answers are cut by every window and count as no answer.")
    return dict(rows)


def answer_span(batch: Mapping[str, Sequence], i: int) -> tuple[int, int] | None:
    """Character span of the first answer of example i; `None` without an answer."""
    answers = batch["answers"][i] or {"text": []}
    if not len(answers["text"]):
        return None
    text, start = answers["text"][0], answers["answer_start"][0]
    found = batch["context"][i][start : start + len(text)]
    if found != text or not text:
        name = batch["id"][i] if "id" in batch else i
        raise ValueError(f"Example {name}: its context has {found!r:.60} at answer_start={start}, not {text!r:.60}.")
    return start, start + len(text)


def answer_tokens(window: QuestionWindow, span: tuple[int, int] | None) -> tuple[int, int]:
    """First and last token of an answer; 0, 0 if the window does not contain the whole answer."""
    if span is None:
        return 0, 0
    starts, ends = window.offsets.T
    inside = np.flatnonzero(window.in_text & (starts < span[1]) & (ends > span[0]))
    text = np.flatnonzero(window.in_text)
    if not len(inside) or starts[text[0]] > span[0] or ends[text[-1]] < span[1]:
        return 0, 0
    return int(inside[0]), int(inside[-1])


def pad_column(name: str, values: Sequence, tokenizer, side: str) -> torch.Tensor:
    """The values of a column, one (S,) or (S, d) per row -> (B, S) or (B, S, d), padded on a side."""
    fill = {"input_ids": tokenizer.pad_token_id, "token_type_ids": tokenizer.pad_token_type_id, "labels": -100}
    tensors = [torch.as_tensor(value) for value in values]
    return pad_sequence(tensors, batch_first=True, padding_value=fill.get(name, 0), padding_side=side)


class DataCollatorForTextPairs:
    """Pads rows of `tokenize_pairs`, `tokenize_questions` or `keyphrase_tools.labels.tokenize_documents`.

    Args:
        tokenizer: its padding token and padding side are used.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __call__(self, rows: Sequence[Mapping]) -> dict[str, torch.Tensor]:
        """Rows -> a batch; columns of strings are dropped."""
        lengths, side, batch = [len(row["input_ids"]) for row in rows], self.tokenizer.padding_side, {}
        for name, values in ((name, [row[name] for row in rows]) for name in rows[0]):
            if np.ndim(values[0]):
                batch[name] = pad_column(name, values, self.tokenizer, side)
            elif not isinstance(values[0], str):
                batch[name] = torch.as_tensor(values)
            if name.endswith("_positions") and side == "left":
                batch[name] += torch.tensor([max(lengths) - length for length in lengths])
        return batch


def add_states(rows, model, collator: DataCollatorForTextPairs, file: str):
    """A `Dataset` with the states of the frozen backbone, 4 d bytes per token, which are computed once and read from a file."""
    from datasets import Array2D, Features

    def encode(columns: dict[str, list]) -> dict[str, list]:
        batch = collator([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])
        inputs = {name: batch[name].to(model.device) for name in collator.tokenizer.model_input_names}
        with torch.no_grad():
            states = model.base_model.backbone(**inputs).last_hidden_state.float().cpu()
        real = batch["attention_mask"].bool()
        return {"encoder_hidden_states": [x[mask].numpy() for x, mask in zip(states, real, strict=True)]}

    column = {"encoder_hidden_states": Array2D((None, model.config.input_size), "float32")}
    features = Features({**rows.features, **column})
    rows = rows.map(encode, batched=True, batch_size=16, features=features, cache_file_name=os.path.abspath(file))
    return rows.with_format("torch", columns=list(column), output_all_columns=True)
