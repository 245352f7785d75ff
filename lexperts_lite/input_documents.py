# SPDX-License-Identifier: Apache-2.0
"""Input documents of the pipeline: the text that the model reads, and the mapping of its offsets to the user's fields."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from .clean_text import CleanText, clean
from .words import join_title, split_words

KEYS = ("title", "text")  # of a document that is a mapping
CHARACTERS = 2_000  # per document of a block, on average; blocks of longer documents contain fewer


class InputDocument:
    """A document that is split into words.

    Attributes:
        title: the cleaned title, or `None`.
        text: the cleaned text from which keyphrases are extracted.
        words: of `text`, as (word, start, end).
    """

    def __init__(self, title: str | None, source: CleanText, words: list[tuple[str, int, int]], fields=None):
        self.title, self.text, self.words = title, source.text, words
        self._source, self._fields = source, fields

    def to_source(self, start: int, end: int) -> dict[str, str | int]:
        """Maps a span of `text` to `{"field", "start", "end"}` in the user's string; without a title there is no `"field"`."""
        start, end = self._source.source_span(start, end)
        if self._fields is None:
            return {"start": start, "end": end}
        field, shift = next((field, shift) for field, begin, shift in self._fields if start >= begin)
        return {"field": field, "start": start + shift, "end": end + shift}

    def in_one_field(self, start: int, end: int) -> bool:
        """Whether the words from `start` to `end` are all in the title, or all in the text."""
        fields = [self.to_source(*self.words[i][1:]).get("field") for i in (start, end - 1)]
        return fields[0] == fields[1]

    def no_place(self) -> dict[str, None]:
        """What `to_source` returns, with `None` for each value."""
        return dict.fromkeys(("start", "end") if self._fields is None else ("field", "start", "end"))

    def phrase_to_source(self, phrase: dict) -> dict:
        """Maps the offsets of a phrase of `ranking.rank_phrases` to the user's fields."""
        mentions = [self.to_source(m["start"], m["end"]) | {"score": m["score"]} for m in phrase["mentions"]]
        first = self.to_source(phrase["start"], phrase["end"])
        return {"keyphrase": phrase["keyphrase"], "score": phrase["score"], **first, "mentions": mentions}


def read_document(document, number: int, split: bool, join: bool) -> InputDocument:
    """Checks and cleans a document, and splits it into words.

    Args:
        document: a text (with `split`, a list of words), or a mapping with "text" and optionally "title".
        number: the document's index, for error messages.
        split: texts are lists of words.
        join: put the title before the text.

    Raises:
        TypeError: for a document of another type or with other keys.
    """
    title, text = None, document
    if isinstance(document, Mapping):
        unknown = [key for key in document if key not in KEYS]
        if unknown or "text" not in document:
            problem = f"has unknown keys {', '.join(map(repr, unknown))}" if unknown else "has no 'text'"
            raise TypeError(
                f"Document {number} {problem}. Pass a document with a title as {{'title': ..., 'text': ...}}."
            )
        title, text = document.get("title"), document["text"]
        if title is not None and not isinstance(title, str):
            raise TypeError(
                f"The title of document {number} must be a string or None, got a {type(title).__name__}: {title!r:.60}."
            )
    if split and not is_words(text):
        raise TypeError(
            f"Document {number} must be a list of strings with is_split_into_words=True, got {text!r:.60}. "
            "For texts leave out is_split_into_words."
        )
    if not split and not isinstance(text, str):
        raise TypeError(
            f"Document {number} must be a string, got a {type(text).__name__}: {text!r:.60}. "
            "For lists of words pass is_split_into_words=True."
        )
    words = None
    if split:
        ends = list(accumulate(map(len, text), lambda end, length: end + 1 + length))
        words = [(word, end - len(word), end) for word, end in zip(text, ends, strict=True)]
        text = " ".join(text)
    has_title = bool((title or "").strip())
    if has_title and join:
        return _joined(title, text, words)
    source = CleanText(text) if words is None else CleanText(text, end=0)
    words = split_words(source.text) if words is None else words
    if not has_title:
        return InputDocument(None, source, words)
    return InputDocument(clean(title), source, words, [("text", 0, 0)])


def _joined(title: str, text: str, words: list[tuple[str, int, int]] | None) -> InputDocument:
    """A document whose title and text are joined; `words` are the text's if the user has split it."""
    joined = join_title(title, text)
    begin = len(joined) - len(text.strip())
    blanks = [len(part) - len(part.lstrip()) for part in (title, text)]  # leading blanks, which joining removes
    fields = [("text", begin, blanks[1] - begin), ("title", 0, blanks[0])]
    if words is None:
        source = CleanText(joined)
        all_words = split_words(source.text)
    else:
        source = CleanText(joined, end=begin)
        shift, length = begin + len(source.text) - len(joined), len(source.text)
        shifted = [
            (word, max(start - blanks[1], 0) + shift, min(end - blanks[1] + shift, length))
            for word, start, end in words
        ]
        all_words = split_words(source.text[:shift]) + [word for word in shifted if word[0].strip()]
    if begin == len(title.strip()) + 2:
        _cut_at(begin - 2, all_words, source)
    return InputDocument(clean(title), source, all_words, fields)


def _cut_at(stop: int, words: list[tuple[str, int, int]], source: CleanText) -> None:
    """Takes the full stop that joining has added from a word that ends with it, as "U.S." does after the title "... of the U.S"."""
    for number, (word, start, end) in enumerate(words):
        first, last = source.source_span(start, end)
        if last > stop:
            if first < stop:
                words[number] = word[:-1], start, end - 1
            return


def is_words(document) -> bool:
    """Whether a document is a list or tuple of strings."""
    return isinstance(document, (list, tuple)) and all(isinstance(word, str) for word in document)


def split_into_blocks(documents: Iterable, max_documents: int) -> Iterator[Sequence]:
    """Splits documents into blocks that are sorted by length and read together; blocks of long documents are smaller."""
    block, characters = [], 0
    for document in documents:
        block.append(document)
        text = document.get("text") if isinstance(document, Mapping) else document
        characters += len(text) if isinstance(text, str) else sum(map(len, text)) if is_words(text) else 0
        if len(block) == max_documents or characters >= CHARACTERS * max_documents:
            yield block
            block, characters = [], 0
    if block:
        yield block
