# SPDX-License-Identifier: Apache-2.0
"""Input documents of the pipeline: the text that the model reads, and the mapping of its offsets to the user's fields."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

from .clean import CleanText, clean
from .words import join_title, split_words

logger = logging.getLogger(__name__)

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


def read_document(document, number: int, join: bool) -> InputDocument:
    """Cleans a document and splits it into words. One whose text is missing has none, with a warning.

    Args:
        document: a text, or a mapping with "text" and optionally "title".
        number: the document's index, for error messages.
        join: put the title before the text.

    Raises:
        TypeError: for a document of another type or with other keys.
    """
    title, text = None, document
    if isinstance(document, Mapping):
        if unknown := [key for key in document if key not in KEYS]:
            raise TypeError(f"Document {number} has the key {unknown[0]!r}; its keys are 'title' and 'text'.")
        if "text" not in document:
            raise TypeError(f"The text of document {number} is missing; its keys are {', '.join(map(repr, document))}.")
        title, text = document.get("title"), document["text"]
    title = None if is_missing(title) else title
    if is_missing(text):
        logger.warning(f"The text of document {number} is {text}: it has no keyphrases.")
        title, text = None, ""
    for name, value in (("title", title or ""), ("text", text)):
        if not isinstance(value, str):
            raise TypeError(f"The {name} of document {number} is {value!r:.60} ({type(value).__name__}), not a string.")
    if not (title or "").strip():
        source = CleanText(text)
        return InputDocument(None, source, split_words(source.text))
    if not join:
        source = CleanText(text)
        return InputDocument(clean(title), source, split_words(source.text), [("text", 0, 0)])
    joined = join_title(title, text)
    begin = len(joined) - len(text.strip())
    source = CleanText(joined, title=begin)
    words = split_words(source.text)
    blanks = [len(part) - len(part.lstrip()) for part in (title, text)]  # leading blanks, which joining removes
    if begin == len(title.strip()) + 2:
        _cut_at(begin - 2, words, source)
    return InputDocument(clean(title), source, words, [("text", begin, blanks[1] - begin), ("title", 0, blanks[0])])


def is_missing(value) -> bool:
    """Whether a value is `None`, or NaN, NA or NaT, by which pandas marks missing ones."""
    is_nan = isinstance(value, float) and value != value
    return value is None or is_nan or type(value).__name__ in ("NAType", "NaTType")


def _cut_at(stop: int, words: list[tuple[str, int, int]], source: CleanText) -> None:
    """Takes the full stop that joining has added from a word that ends with it, as "U.S." does after the title "... of the U.S"."""
    for number, (word, start, end) in enumerate(words):
        first, last = source.source_span(start, end)
        if last > stop:
            if first < stop:
                words[number] = word[:-1], start, end - 1
            return


def split_into_blocks(documents: Iterable, max_documents: int) -> Iterator[Sequence]:
    """Splits documents into blocks that are sorted by length and read together; blocks of long documents are smaller."""
    block, characters = [], 0
    for document in documents:
        block.append(document)
        text = document.get("text") if isinstance(document, Mapping) else document
        characters += len(text) if isinstance(text, str) else 0
        if len(block) == max_documents or characters >= CHARACTERS * max_documents:
            yield block
            block, characters = [], 0
    if block:
        yield block
