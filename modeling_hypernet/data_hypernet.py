# SPDX-License-Identifier: Apache-2.0
"""Tokenised rows of pairs (title and text, question and context), and their collator.

Letters: B rows of a batch, S tokens of a row or window.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers.utils import logging

from .crf_hypernet import allowed_transitions

logger = logging.get_logger(__name__)

PADDING = {"attention_mask": 0, "meta_mask": 0, "main_mask": 0, "word_start_mask": 0, "labels": -100}
POSITIONS = ("start_positions", "end_positions")
ON_LONG = ("window", "error", "truncate")


def truncate_titles(titles: Sequence[str | None], tokenizer, max_title_length: int, what: str = "titles") -> list[str]:
    """Titles of at most `max_title_length` tokens, "" for none. Logs the number of truncated ones."""
    stripped = [replace_surrogates(title or "").strip() for title in titles]
    if not stripped:
        return []
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


def segment_masks(sequence_ids: Sequence[int | None]) -> dict[str, list[int]]:
    """Segment of each token, None for special tokens -> meta_mask and main_mask, for H^u and H^v.

    >>> segment_masks([None, 0, None, 1, None])  # [CLS] u [SEP] v [SEP]
    {'meta_mask': [1, 1, 0, 0, 0], 'main_mask': [0, 0, 0, 1, 0]}
    """
    main = 1 if 1 in sequence_ids else 0
    meta = [int(main == 1 and i == 0) for i in sequence_ids]
    if sequence_ids and sequence_ids[0] is None:
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

    Titles are truncated to `max_title_length` tokens, then texts to the rest of `max_length`; the numbers of truncated
    ones are logged.

    Args:
        titles: titles; `None` or "" for none.
        texts: texts, as many as titles.
        tokenizer: a fast tokenizer.
        max_length: tokens of a pair; the tokenizer's `model_max_length` by default.
        max_title_length: tokens of a title.

    Returns:
        Columns of the tokenizer, `meta_mask` and `main_mask`.

    Raises:
        ValueError: for an empty text, and for one of which the tokenizer keeps nothing.

    Example:

    ```python
    >>> rows = dataset.map(lambda batch: tokenize_pairs(batch["title"], batch["text"], tokenizer), batched=True)
    ```
    """
    empty = [i for i, text in enumerate(texts) if not (text or "").strip()]
    if empty:
        raise ValueError(f"Text {empty[0]} is empty, so its title would be used as the text. Remove such rows.")
    titles = truncate_titles(titles, tokenizer, max_title_length)
    rows: dict[str, list] = {}
    num_truncated = 0
    for title, text in zip(titles, texts, strict=True):
        pair = (title, replace_surrogates(text)) if title else (replace_surrogates(text),)
        encoded = tokenizer(*pair, truncation="only_second" if title else True, max_length=max_length)
        if title and 1 not in encoded.sequence_ids(0):
            raise ValueError(
                f"Text {text!r:.60} has no tokens, so its title would be used as the text. Remove such rows."
            )
        num_truncated += len(encoded.encodings[0].overflowing) > 0
        for name, values in {**encoded, **segment_masks(encoded.sequence_ids(0))}.items():
            rows.setdefault(name, []).append(values)
    if num_truncated:
        logger.warning(f"{num_truncated} of {len(texts)} texts exceed max_length and were truncated.")
    return rows


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
    doc_stride: int = 128,
    max_question_len: int = 64,
    on_long: str = "window",
    first: int = 0,
) -> list[QuestionWindow]:
    """Questions with windows of their texts, in the order of the questions. A text without tokens, such as a zero-width space,
    has no window.

    Args:
        questions: questions.
        contexts: texts, as many as questions.
        tokenizer: a fast tokenizer.
        max_seq_len: tokens of a window, including question and special tokens.
        doc_stride: tokens by which neighbouring windows overlap.
        max_question_len: tokens of a question. Longer ones are truncated and their number is logged.
        on_long: for texts longer than a window: `"window"` makes several windows, `"truncate"` only the first, `"error"`
            raises.
        first: number of the first question, for error messages.

    Raises:
        ValueError: for an empty question or text, an unknown `on_long`, a `doc_stride` that leaves no room for new tokens,
            and a long text with `on_long="error"`.
    """
    if on_long not in ON_LONG:
        raise ValueError(f"on_long={on_long!r} is not known. Use one of {', '.join(map(repr, ON_LONG))}.")
    for name, values in (("question", questions), ("context", contexts)):
        empty = [i for i, value in enumerate(values) if not (value or "").strip()]
        if empty:
            raise ValueError(
                f"The {name} of example {first + empty[0]} is empty. Every example needs a question and a context."
            )
    if not questions:
        return []
    questions = truncate_titles(questions, tokenizer, max_question_len, "questions")
    longest = max(len(ids) for ids in tokenizer(questions, add_special_tokens=False)["input_ids"])
    room = max_seq_len - longest - tokenizer.num_special_tokens_to_add(pair=True)
    if room <= doc_stride:
        raise ValueError(
            f"max_seq_len={max_seq_len} leaves {room} tokens for the text beside a question of {longest}, which must exceed "
            f"doc_stride={doc_stride}. Use a smaller doc_stride or max_question_len, or a larger max_seq_len."
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
    windows: list[QuestionWindow] = []
    for row, example in enumerate(examples):
        if 1 not in encoded.sequence_ids(row):
            continue
        is_later = bool(windows) and windows[-1].example == example
        if is_later and on_long == "error":
            raise ValueError(
                f"The text of example {first + example} ({len(contexts[example]):,} characters) exceeds a window of "
                f"max_seq_len={max_seq_len} tokens. Use on_long='window' to split it into windows, or on_long='truncate'."
            )
        if is_later and on_long == "truncate":
            continue
        inputs = {name: values[row] for name, values in encoded.items()}
        inputs |= segment_masks(encoded.sequence_ids(row))
        windows.append(QuestionWindow(example, inputs, np.asarray(offsets[row])))
    return windows


def tokenize_questions(
    batch: Mapping[str, Sequence],
    tokenizer,
    *,
    max_seq_len: int = 384,
    doc_stride: int = 128,
    max_question_len: int = 64,
) -> dict[str, list]:
    """Training rows from SQuAD's columns, for `dataset.map(tokenize_questions, batched=True, remove_columns=...)`.

    Args:
        batch: `question`, `context`, `answers` (`{"text": [...], "answer_start": [...]}`; the first is used, empty lists
            mean no answer) and optionally `id`, for error messages.
        tokenizer, max_seq_len, doc_stride, max_question_len: as in `question_windows`.

    Returns:
        Columns of the tokenizer, `meta_mask`, `main_mask`, `start_positions` and `end_positions`: the answer's first and
        last token, or the row's first token if the window does not contain the whole answer.

    Raises:
        ValueError: for an answer that does not occur at its `answer_start`.
    """
    spans = [answer_span(batch, i) for i in range(len(batch["question"]))]
    windows = question_windows(
        batch["question"], batch["context"], tokenizer, max_seq_len=max_seq_len, doc_stride=doc_stride,
        max_question_len=max_question_len,
    )  # fmt: skip
    rows: dict[str, list] = {}
    complete = set()
    for window in windows:
        start, end = answer_tokens(window, spans[window.example])
        if end:
            complete.add(window.example)
        for name, values in {**window.inputs, "start_positions": start, "end_positions": end}.items():
            rows.setdefault(name, []).append(values)
    lost = sum(span is not None for span in spans) - len(complete)
    if lost:
        logger.warning(f"{lost} of {len(spans)} answers are cut by every window and count as no answer.")
    return rows


def answer_span(batch: Mapping[str, Sequence], i: int) -> tuple[int, int] | None:
    """Character span of the first answer of example i; `None` without an answer."""
    answers = batch["answers"][i] or {"text": []}
    if not len(answers["text"]):
        return None
    text, start = answers["text"][0], answers["answer_start"][0]
    at_start = batch["context"][i][start : start + len(text)]
    if at_start != text or not text:
        name = batch["id"][i] if "id" in batch else i
        raise ValueError(
            f"Example {name}: the answer {text!r:.60} does not occur at answer_start={start} of its context, which has "
            f"{at_start!r:.60}. Correct answer_start, or remove the example."
        )
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


class DataCollatorForTextPairs:
    """Pads and validates rows of `tokenize_pairs`, `tokenize_questions` or `keyphrase_tools.labels.tokenize_documents`.

    Args:
        tokenizer: its padding token and padding side are used.
        pad_to_multiple_of: pads the length to a multiple of it.
        id2label: `model.config.id2label` of a model for token classification; labels are then validated.

    Raises:
        ValueError: for an answer that is neither in the main text nor at the first token; with `id2label`, for a label that
            does not exist and for an I that does not follow a B or I of its type.
    """

    def __init__(self, tokenizer, pad_to_multiple_of: int | None = None, id2label: Mapping[int, str] | None = None):
        self.tokenizer, self.pad_to_multiple_of, self.id2label = tokenizer, pad_to_multiple_of, id2label

    def __call__(self, rows: Sequence[Mapping]) -> dict[str, torch.Tensor]:
        """Rows -> a batch; columns of strings are dropped."""
        length = max(len(row["input_ids"]) for row in rows)
        if self.pad_to_multiple_of:
            length += -length % self.pad_to_multiple_of
        names = [name for name, value in rows[0].items() if not isinstance(value, str)]
        batch = {name: self._stack(name, [row[name] for row in rows], length) for name in names}
        if self.tokenizer.padding_side == "left":
            shift = torch.tensor([length - len(row["input_ids"]) for row in rows])
            batch |= {name: batch[name] + shift for name in POSITIONS if name in batch}
        self._validate(batch)
        return batch

    def _validate(self, batch: dict[str, torch.Tensor]):
        """On the CPU; in the model each check would wait for the device."""
        real = batch["attention_mask"] != 0 if "attention_mask" in batch else torch.ones_like(batch["input_ids"]) != 0
        main = batch["main_mask"] != 0 if "main_mask" in batch else real
        for name in POSITIONS:
            if name in batch:
                validate_positions(batch[name], main, real)
        if self.id2label is not None and "labels" in batch and batch["labels"].shape == real.shape:
            validate_labels(batch["labels"], main & (batch["labels"] != -100), self.id2label)

    def _stack(self, name: str, values: list, length: int) -> torch.Tensor:
        """One column: labels of whole texts and positions are stacked, columns with a value per token are padded."""
        tensors = [torch.as_tensor(value) for value in values]
        if tensors[0].dim() == 0 or (name == "labels" and tensors[0].is_floating_point()):
            return torch.stack(tensors)
        return torch.stack([self._pad(name, tensor, length) for tensor in tensors])

    def _pad(self, name: str, x: torch.Tensor, length: int) -> torch.Tensor:
        fill = {"input_ids": self.tokenizer.pad_token_id, "token_type_ids": self.tokenizer.pad_token_type_id}
        padding = x.new_full((length - len(x), *x.shape[1:]), (fill | PADDING).get(name, 0))
        return torch.cat([x, padding] if self.tokenizer.padding_side == "right" else [padding, x])


def validate_labels(labels: torch.Tensor, labelled: torch.Tensor, id2label: Mapping[int, str]):
    """Validates labels (B, S) at the tokens of a mask (B, S). A row may begin with an I: windows may split a keyphrase.
    Raises a `ValueError` for an id outside `id2label`, and for an I after an O or after another type.
    """
    unknown = labelled & ((labels < 0) | (labels >= len(id2label)))
    if unknown.any():
        row, token = unknown.nonzero()[0].tolist()
        raise ValueError(
            f"Row {row} has the label {int(labels[row, token])} at token {token}, but the labels are "
            f"{', '.join(f'{i} {name}' for i, name in sorted(id2label.items()))}. Use -100 for tokens without a label."
        )
    follows = allowed_transitions(id2label)[1].to(labels.device)
    row, token = labelled.nonzero(as_tuple=True)
    if not len(row):
        return
    label = labels[row, token]
    invalid = (row[1:] == row[:-1]) & ~follows[label[:-1], label[1:]]
    if invalid.any():
        i = int(invalid.int().argmax())
        previous, current = (id2label[int(label[j])] for j in (i, i + 1))
        raise ValueError(
            f"Row {int(row[i + 1])} has {current!r} at token {int(token[i + 1])} after {previous!r}, which is invalid BIO: I-X "
            "must follow B-X or I-X. Begin each phrase with a B."
        )


def validate_positions(positions: torch.Tensor, main: torch.Tensor, real: torch.Tensor):
    """Validates starts or ends of answers (B,); masks of the main text and of all real tokens (B, S). Raises a `ValueError`
    for a position that is neither in the main text nor the row's first token.
    """
    S = real.shape[1]
    allowed = main | (real & (real.cumsum(1) == 1))
    inside = (positions >= 0) & (positions < S)
    valid = inside & allowed.gather(1, positions.clamp(0, S - 1)[:, None]).squeeze(1)
    if not valid.all():
        row = int((~valid).int().argmax())
        raise ValueError(
            f"The answer of row {row} is at token {int(positions[row])}, which is neither in the text nor the first token. "
            "Use the first token for no answer and for an answer that is cut off."
        )
