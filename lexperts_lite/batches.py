# SPDX-License-Identifier: Apache-2.0
"""Blocks of documents, and batches of their windows: how many fit, how they are padded, and what is prepared ahead of an accelerator."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from .candidates import Spans
from .diversity import WordStates
from .input_documents import InputDocument
from .titles import MASKS
from .windows import Window, WordProbabilities

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_BATCH_GROWTH = 4  # a batch of short windows has at most 4 times as many rows as one of long windows


@dataclass
class Block:
    """Documents that are sorted by length and read together, with what the model computes for their words.

    Attributes:
        documents: cleaned and split into words.
        windows: of all documents.
        max_length: sub-tokens per window.
        probabilities: of the words of each document.
        first: the index of the first document, for error messages.
        style_id: the row of the model's style embedding, 0 for none.
        mentions: of the candidates in each document, if there are candidates.
        states: the words' hidden states, if they are collected.
        gates: if they are collected, for each document with windows the router's probabilities `(W, E)` of E experts, nan for a word
            that begins no sub-token.
    """

    documents: list[InputDocument]
    windows: list[Window]
    max_length: int
    probabilities: WordProbabilities
    first: int = 0
    style_id: int = 0
    mentions: list[dict[str, Spans]] | None = None
    states: WordStates | None = None
    gates: dict[int, np.ndarray] = field(default_factory=dict)

    def add(self, window: Window, values: dict[str, np.ndarray]) -> None:
        """Adds what the model has computed for a window.

        Args:
            values: `probabilities` `(S, 3)`, and if they were computed `tags` `(S,)`, `classes` `(S, 3)`, `states` `(S, d)` and
                `gates` `(S, E)`.

        Raises:
            ValueError: if a probability is NaN.
        """
        number = window.document
        if np.isnan(values["probabilities"]).any():
            raise ValueError(
                f"The model's probabilities of document {self.first + number} are NaN. Check its weights, or open it with dtype='float32'."
            )
        words, tokens = self.probabilities.add(
            window, values["probabilities"], values.get("tags"), values.get("classes")
        )
        if self.states is not None:
            self.states.add(number, words, {name: of_window[tokens] for name, of_window in values.items()})
        if "gates" in values:
            shape = len(self.documents[number].words), values["gates"].shape[-1]
            self.gates.setdefault(number, np.full(shape, np.nan))[words] = values["gates"][tokens]


def split_windows(windows: list[Window], batch_size: int, same_number: bool = False) -> Iterator[list[Window]]:
    """Splits windows, longest first, into batches that need no more memory, padded, than `batch_size` of the longest.

    Args:
        same_number: no batch has more than `batch_size` windows, as for a model whose generated weights take the same memory for
            windows of any length.
    """
    largest = batch_size if same_number else MAX_BATCH_GROWTH * batch_size
    room, start = batch_size * len(windows[0].word_starts) if windows else 0, 0
    while start < len(windows):
        count = min(max(batch_size, room // max(1, len(windows[start].word_starts))), largest)
        yield windows[start : start + count]
        start += count


def pad_windows(windows: list[Window], tokenizer, names: Collection[str]) -> dict[str, np.ndarray]:
    """Pads n windows on the right to arrays `(n, S)`, with the masks among `names`, the arguments of the model's forward."""
    lengths = [len(window.word_starts) for window in windows]
    kept = [name for name in windows[0].inputs if name not in MASKS or name in names]
    rows = {"attention_mask": [[1] * length for length in lengths]}
    rows |= {name: [window.inputs[name] for window in windows] for name in kept}
    if "word_start_mask" in names:
        rows["word_start_mask"] = [window.word_starts >= 0 for window in windows]
    padding = {"input_ids": tokenizer.pad_token_id or 0, "token_type_ids": tokenizer.pad_token_type_id}
    batch = {}
    for name, of_windows in rows.items():
        padded = np.full((len(windows), max(lengths)), padding.get(name, 0), dtype=np.int64)
        for target, row in zip(padded, of_windows, strict=True):
            target[: len(row)] = row
        batch[name] = padded
    return batch


def prepare_ahead(items: Iterable[Item], prepare: Callable[[Item], Result]) -> Iterator[Result]:
    """Yields `prepare(item)` for each item, in order. A thread prepares one while the caller works on the one before.

    Items are read by the caller's thread. An error of the items or of `prepare` is raised where its item is due.
    """
    items, due, failure = iter(items), deque(), None
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="prepare") as thread:
        while failure is None or due:
            try:
                due.append(thread.submit(prepare, next(items)))
            except Exception as error:  # the item before it comes first
                failure = failure or error
            if due and (failure or len(due) > 1):
                yield due.popleft().result()
    if not isinstance(failure, StopIteration):
        raise failure
