# SPDX-License-Identifier: Apache-2.0
"""Splits documents into windows of sub-tokens, and aligns sub-tokens with words.

The text is tokenized as a whole, not word by word. A fine-tuned model therefore gets the same input in the stock
token-classification pipeline as in training, and the backbone sees hyphens although they are not words.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .titles import MAX_TITLE_LENGTH, title_masks, truncate_titles

FAR = np.iinfo(np.int64).max  # the distance from an edge at which the document continues, where neither edge is one
NO_LIMIT = 1_000_000  # model_max_length of tokenizers without a limit is about 1e30


@dataclass
class Window:
    """One input row of the model, with S sub-tokens.

    Attributes:
        document: index of the document.
        number: index of the window within the document.
        inputs: outputs of the tokenizer without padding, each a list of length S. If titles are read as meta-text, also
            `meta_mask` (1 on the first special token and the title) and `main_mask` (1 on the text).
        word_starts (`(S,)`): for each sub-token, the index of the word that begins there, else -1 (special tokens, later
            sub-tokens of a word, sub-tokens without a word, titles).
        edge_distance (`(S,)`): for each sub-token, the number of sub-tokens to the nearer edge of the window at which the
            document continues. In a pair of title and text it is -1 outside the text.
        joined: words that share a sub-token with the previous word, so that no sub-token begins with them.
    """

    document: int
    inputs: dict[str, list[int]]
    word_starts: np.ndarray
    edge_distance: np.ndarray
    joined: Sequence[int] = ()
    number: int = 0


def encode_windows(
    texts: Sequence[str],
    word_spans: Sequence[Sequence[tuple[int, int]]],
    tokenizer,
    *,
    max_length: int | None = None,
    overlap: int | None = None,
    titles: Sequence[str | None] | None = None,
    max_title_length: int = MAX_TITLE_LENGTH,
) -> list[Window]:
    """Tokenizes each text and splits it into overlapping windows.

    Args:
        texts: the documents.
        word_spans: for each document, the (start, end) of its words, in order.
        tokenizer: a fast tokenizer.
        max_length: sub-tokens per window, including special tokens; by default the tokenizer's `model_max_length`.
        overlap: sub-tokens that neighbouring windows share; by default a quarter of `max_length`.
        titles: titles that are read as meta-text, one per document: each window is the pair of the whole title and a part
            of the text. `None` or blank for a document without a title, whose windows contain its text only.
        max_title_length: sub-tokens of a title, at most a quarter of a window; longer titles are truncated, with a warning.

    Raises:
        ValueError: for a slow tokenizer, a tokenizer without a limit, and an overlap that leaves no room.
    """
    masked = titles is not None
    max_title_length = min(max_title_length, (max_length or tokenizer.model_max_length) // 4)
    max_length, overlap = check_window(tokenizer, max_length, overlap, max_title_length if masked else 0)
    if not texts:
        return []
    texts = [text if text.isascii() else replace_surrogates(text) for text in texts]
    titles = [replace_surrogates(title or "") for title in titles or [""] * len(texts)]
    if masked:
        titles = truncate_titles(titles, tokenizer, max_title_length)
    spans = [np.array(of_document, dtype=np.int64).reshape(-1, 2) for of_document in word_spans]
    for text, of_document in zip(texts, spans, strict=True):
        if ".net" in text.lower():  # a model labels the N of ".NET"
            of_document[:, 0] += [end - start > 1 and text[start] == "." for start, end in of_document]
    windows = defaultdict(list)
    for paired in (False, True):  # one call of the tokenizer takes either pairs or texts
        documents = [document for document, title in enumerate(titles) if bool(title) == paired]
        sides = [[side[document] for document in documents] for side in ((titles, texts) if paired else (texts,))]
        encoded = _tokenize(tokenizer, sides, max_length, overlap) if documents else {"overflow_to_sample_mapping": ()}
        sources = encoded.pop("overflow_to_sample_mapping")
        for row, source in enumerate(sources):
            document = documents[source]
            is_first, is_last = source not in sources[row - 1 : row], source not in sources[row + 1 : row + 2]
            number = len(windows[document])
            window = _window(encoded, row, document, number, spans[document], is_first, is_last, paired, masked)
            windows[document].append(window)
    return [window for document in range(len(texts)) for window in windows[document]]


def _tokenize(tokenizer, sides: list[list[str]], max_length: int, overlap: int):
    """Tokenizes texts, or pairs of titles and texts, into windows; only the text of a pair is split."""
    side = tokenizer.truncation_side
    tokenizer.truncation_side = "right"  # with "left" the windows come in reverse order
    try:
        return tokenizer(
            *sides,
            truncation="only_second" if len(sides) == 2 else True,
            max_length=max_length,
            stride=overlap,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
        )
    finally:
        tokenizer.truncation_side = side


def _window(encoded, row, document, number, spans, is_first, is_last, paired, masked) -> Window:
    """The window of one row of the tokenizer's output; `spans` `(W, 2)` are those of the document's words."""
    not_inputs = ("offset_mapping", "special_tokens_mask")
    offsets, special = (np.asarray(encoded[name][row]) for name in not_inputs)
    special = special.astype(bool)
    inputs = {name: values[row] for name, values in encoded.items() if name not in not_inputs}
    main = ~special
    if masked:
        meta, main = title_masks(encoded.sequence_ids(row), special, paired=paired)
        inputs |= {"meta_mask": meta.astype(int).tolist(), "main_mask": main.astype(int).tolist()}
    real = np.flatnonzero(main)
    starts = find_word_starts(offsets, real, spans, is_first=is_first)
    distance, index = np.full(len(offsets), FAR), np.arange(len(offsets))
    if len(real) and not is_first:
        distance = index - real[0]
    if len(real) and not is_last:
        distance = np.minimum(distance, real[-1] - index)
    if paired:
        distance[~main] = -1
    begin, end = offsets[real].reshape(-1, 2).T
    first = np.searchsorted(spans[:, 1], begin, side="right")  # first word that ends later
    last = np.searchsorted(spans[:, 0], end, side="left")  # first word that begins later
    joined = [w for t in np.flatnonzero(last - first > 1) for w in range(first[t] + 1, last[t])]
    return Window(document, inputs, starts, distance, joined, number)


def find_word_starts(offsets: np.ndarray, real: np.ndarray, spans: np.ndarray, *, is_first: bool) -> np.ndarray:
    """For each sub-token, the index of the word that it begins, or -1; an array `(S,)`.

    A sub-token belongs to the first word that it overlaps, and begins it if the previous sub-token belongs to another word.
    The first sub-token of a later window may lie inside a word: it begins the word only if it covers its first character.

    Args:
        offsets (`(S, 2)`): of the sub-tokens.
        real: indices of the sub-tokens that are not special.
        spans (`(W, 2)`): of the words.
        is_first: this is the document's first window.
    """
    starts = np.full(len(offsets), -1)
    if len(real) == 0 or len(spans) == 0:
        return starts
    begin, end = offsets[real].T
    word = np.searchsorted(spans[:, 1], begin, side="right").clip(max=len(spans) - 1)  # first word that ends later
    touches = (spans[word, 0] < end) & (spans[word, 1] > begin) & (end > begin)
    word = np.where(touches, word, -1)
    begins = (word >= 0) & (word != np.concatenate(([-1], word[:-1])))
    if not is_first and begins[0]:
        begins[0] = begin[0] <= spans[word[0], 0]
    starts[real[begins]] = word[begins]
    return starts


class WordProbabilities:
    """Collects a model's probabilities for each word of some documents, window by window.

    A word's probabilities are those of the window in which it is furthest from an edge at which the document was split, and
    of the earlier one if two are equal. The order in which windows are added does not matter.

    Args:
        lengths: the number of words of each document.
    """

    def __init__(self, lengths: Sequence[int]):
        self._probabilities = [np.tile(np.array([1.0, 0.0, 0.0]), (length, 1)) for length in lengths]
        self._tags: list[Any] = [None] * len(lengths)  # (W,) for documents with decoded labels
        self._classes = [np.zeros((length, 3), dtype=np.float32) for length in lengths]
        self._distance = [np.full(length, -1) for length in lengths]
        self._window = [np.full(length, FAR) for length in lengths]
        self._joined = [set() for _ in lengths]

    def add(
        self,
        window: Window,
        probabilities: np.ndarray,
        tags: np.ndarray | None = None,
        classes: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Adds the outputs for a window, without padding.

        Args:
            window: the window.
            probabilities (`(S, 3)`): of O, B and I for its sub-tokens.
            tags (`(S,)`): 0, 1 or 2, chosen by a model that decodes a sequence, such as a CRF. Pass them for all windows or
                for none.
            classes (`(S, 3)`): probabilities of the `features.CLASSES`; for all windows or for none.

        Returns:
            The words `(n,)` whose values are now those of this window, and the sub-tokens `(n,)` that have these values.
        """
        number = window.document
        self._joined[number].update(window.joined)
        begins = np.flatnonzero(window.word_starts >= 0)
        words, distance = window.word_starts[begins], window.edge_distance[begins]
        best, window_of = self._distance[number], self._window[number]
        closer = (distance > best[words]) | ((distance == best[words]) & (window.number < window_of[words]))
        words, begins = words[closer], begins[closer]
        best[words], window_of[words] = distance[closer], window.number
        self._probabilities[number][words] = probabilities[begins]
        if tags is not None:
            if self._tags[number] is None:
                self._tags[number] = np.zeros(len(best), dtype=np.int64)
            self._tags[number][words] = tags[begins]
        if classes is not None:
            self._classes[number][words] = classes[begins]
        return words, begins

    def document(self, number: int) -> np.ndarray:
        """Probabilities `(W, 3)`. A word that shares a sub-token continues the previous word; one in no window is O."""
        p = self._probabilities[number]
        for w in self._continuations(number) if self._joined[number] else ():
            p[w] = p[w - 1][0], 0.0, p[w - 1][1:].max()
        return p

    def tags(self, number: int) -> np.ndarray | None:
        """Tags `(W,)`, by the same rule; `None` if none were added."""
        tags = self._tags[number]
        if tags is not None:
            for w in self._continuations(number):
                tags[w] = 2 if tags[w - 1] else 0
        return tags

    def classes(self, number: int) -> np.ndarray:
        """Probabilities of classes `(W, 3)`, by the same rule; a word in no window has zeros."""
        classes = self._classes[number]
        for w in self._continuations(number) if self._joined[number] else ():
            classes[w] = classes[w - 1]
        return classes

    def _continuations(self, number: int) -> list[int]:
        """Words that begin at no sub-token in any window, but share one with the previous word."""
        return [w for w in sorted(self._joined[number]) if self._distance[number][w] < 0]


def check_window(tokenizer, max_length: int | None, overlap: int | None, title_length: int) -> tuple[int, int]:
    """Returns `max_length` and `overlap` with their defaults filled in. Raises a `ValueError` for values that cannot work.

    Args:
        title_length: sub-tokens of the longest title that is part of each window, 0 without titles.
    """
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} is a slow tokenizer, which does not return offsets.")
    max_length = max_length or tokenizer.model_max_length
    if max_length > NO_LIMIT:
        raise ValueError("The tokenizer has no model_max_length. Pass max_length, such as 512.")
    pair = {"pair": True} if title_length else {}
    room = max_length - title_length - tokenizer.num_special_tokens_to_add(**pair)
    overlap = min(max_length // 4, room - 1) if overlap is None else overlap
    if not 0 <= overlap < room:
        raise ValueError(
            f"overlap={overlap} does not fit into windows of max_length={max_length}, which have room for {room}."
        )
    return max_length, overlap


def replace_surrogates(text: str) -> str:
    """Replaces each lone surrogate, which tokenizers reject, by U+FFFD; offsets do not change."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)
    return text
