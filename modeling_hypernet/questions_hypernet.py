"""Questions and texts of any length as windows, for training and for the pipeline (Duan et al. 2021, Sect. 3.2).

Letters: S tokens of a window.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from transformers.utils import logging

from .data_hypernet import cut_titles, segment_masks

logger = logging.get_logger(__name__)

ON_LONG = ("window", "error", "truncate")


@dataclass
class QuestionWindow:
    """One row for the model.

    Attributes:
        example: which of the questions it is of.
        inputs: what the tokenizer gave, with `meta_mask` and `main_mask`; each value a list of length S.
        offsets (`(S, 2)`): where each token stands in the text.
    """

    example: int
    inputs: dict[str, list[int]]
    offsets: np.ndarray

    @property
    def in_text(self) -> np.ndarray:
        """(S,): whether a token is one of the text's."""
        return np.asarray(self.inputs["main_mask"], dtype=bool)


def question_windows(
    questions: Sequence[str],
    contexts: Sequence[str],
    tokenizer,
    *,
    max_length: int = 384,
    stride: int = 128,
    max_question_length: int = 64,
    on_long: str = "window",
    first: int = 0,
) -> list[QuestionWindow]:
    """Each question with its text, cut into windows that overlap by `stride` tokens; in the questions' order.

    Args:
        tokenizer: a fast one.
        max_length: tokens of a window, question and special tokens included.
        max_question_length: tokens of a question; the rest is cut, and how many were is in the log.
        on_long: `"window"` reads a long text in several windows, `"truncate"` in its first only, `"error"` refuses it.
        first: the number of the first question, for messages.

    Raises:
        ValueError: for an empty question or text, an unknown `on_long`, a stride that leaves no room, a long text under "error".
    """
    if on_long not in ON_LONG:
        raise ValueError(f"on_long={on_long!r} is not known. Use one of {', '.join(map(repr, ON_LONG))}.")
    for what, values in (("question", questions), ("context", contexts)):
        empty = [i for i, value in enumerate(values) if not (value or "").strip()]
        if empty:
            raise ValueError(
                f"The {what} of example {first + empty[0]} is empty. Every example needs a question and a context."
            )
    questions = cut_titles(questions, tokenizer, max_question_length, "questions")
    longest = max((len(ids) for ids in tokenizer(questions, add_special_tokens=False)["input_ids"]), default=0)
    room = max_length - longest - tokenizer.num_special_tokens_to_add(pair=True)
    if room <= stride:
        raise ValueError(
            f"max_length={max_length} leaves {room} tokens for the text beside a question of {longest}, and windows overlap "
            f"by stride={stride}: they must move on. Use a smaller stride or max_question_length, or a larger max_length."
        )
    encoded = (
        tokenizer(
            questions,
            list(contexts),
            truncation="only_second",
            max_length=max_length,
            stride=stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        if questions
        else {"overflow_to_sample_mapping": [], "offset_mapping": []}
    )
    examples, offsets = encoded.pop("overflow_to_sample_mapping"), encoded.pop("offset_mapping")
    windows: list[QuestionWindow] = []
    for row, example in enumerate(examples):
        is_later = bool(windows) and windows[-1].example == example
        if is_later and on_long == "error":
            raise ValueError(
                f"The text of example {first + example} ({len(contexts[example]):,} characters) is longer than a window of "
                f"{max_length} tokens. Use on_long='window' to read it in windows, or on_long='truncate' to cut it."
            )
        if is_later and on_long == "truncate":
            continue
        inputs = {name: values[row] for name, values in encoded.items()}
        inputs |= segment_masks(encoded.sequence_ids(row))
        windows.append(QuestionWindow(example, inputs, np.asarray(offsets[row])))
    return windows


def encode_questions(
    batch: Mapping[str, Sequence],
    tokenizer,
    *,
    max_length: int = 384,
    stride: int = 128,
    max_question_length: int = 64,
) -> dict[str, list]:
    """SQuAD's columns -> rows for training, for `dataset.map(encode_questions, batched=True, remove_columns=...)`.

    Args:
        batch: `question`, `context`, `answers` (`{"text": [...], "answer_start": [...]}`, empty for no answer; the first
            is learnt) and, where there is one, `id`, for messages.
        tokenizer, max_length, stride, max_question_length: as in `question_windows`.

    Returns:
        What the tokenizer gives, `meta_mask`, `main_mask`, and `start_positions`, `end_positions`: the answer's tokens, or
        the first token in a window that does not hold the whole answer.

    Raises:
        ValueError: for an answer that does not stand at its place in the text; the example is named.
    """
    spans = [answer_span(batch, i) for i in range(len(batch["question"]))]
    windows = question_windows(
        batch["question"],
        batch["context"],
        tokenizer,
        max_length=max_length,
        stride=stride,
        max_question_length=max_question_length,
    )
    rows: dict[str, list] = {}
    whole = set()
    for window in windows:
        start, end = answer_tokens(window, spans[window.example])
        if end:
            whole.add(window.example)
        for name, values in {**window.inputs, "start_positions": start, "end_positions": end}.items():
            rows.setdefault(name, []).append(values)
    lost = sum(span is not None for span in spans) - len(whole)
    if lost:
        logger.warning(f"{lost} of {len(spans)} answers stand whole in no window and count as no answer there.")
    return rows


def answer_span(batch: Mapping[str, Sequence], i: int) -> tuple[int, int] | None:
    """The characters of an example's first answer, `None` without one."""
    answers = batch["answers"][i] or {"text": []}
    if not len(answers["text"]):
        return None
    text, start = answers["text"][0], answers["answer_start"][0]
    found = batch["context"][i][start : start + len(text)]
    if found != text or not text:
        name = batch["id"][i] if "id" in batch else i
        raise ValueError(
            f"Example {name}: the answer {text!r:.60} does not stand at character {start} of its context; there stands "
            f"{found!r:.60}. Correct answer_start, or leave the example out."
        )
    return start, start + len(text)


def answer_tokens(window: QuestionWindow, span: tuple[int, int] | None) -> tuple[int, int]:
    """The first and the last token of an answer; 0, 0 where the window does not hold it whole."""
    if span is None:
        return 0, 0
    begin, end = window.offsets.T
    inside = np.flatnonzero(window.in_text & (begin < span[1]) & (end > span[0]))
    text = np.flatnonzero(window.in_text)
    if not len(inside) or begin[text[0]] > span[0] or end[text[-1]] < span[1]:
        return 0, 0
    return int(inside[0]), int(inside[-1])
