"""Documents as a caller gives them -> the text that the model reads, and where each piece of it is in the caller's fields."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from .clean_text import CleanText, clean
from .words import join_title, split_words

KEYS = ("title", "text")  # of a document that is a mapping
CHARACTERS = 2_000  # of a document, on average: longer ones are read with fewer others


class InputDocument:
    """A document whose words are known.

    Attributes:
        title: cleaned, `None` if there is none.
        text: the text in which keyphrases are sought, cleaned.
        words: of `text`, as (word, start, end).
    """

    def __init__(self, title: str | None, source: CleanText, words: list[tuple[str, int, int]], fields=None):
        self.title, self.text, self.words = title, source.text, words
        self._source, self._fields = source, fields

    def place(self, start: int, end: int) -> dict[str, str | int]:
        """A span of `text` -> `{"field", "start", "end"}` in the caller's own string; without a title there is no `"field"`."""
        start, end = self._source.source_span(start, end)
        if self._fields is None:
            return {"start": start, "end": end}
        field, moved = next((field, moved) for field, begin, moved in self._fields if start >= begin)
        return {"field": field, "start": start + moved, "end": end + moved}

    def placed(self, phrase: dict) -> dict:
        """A phrase of `decoding.rank_phrases` with its places in the caller's fields."""
        mentions = [self.place(m["start"], m["end"]) | {"score": m["score"]} for m in phrase["mentions"]]
        first = {name: value for name, value in mentions[0].items() if name != "score"}
        return {"keyphrase": phrase["keyphrase"], "score": phrase["score"], **first, "mentions": mentions}


def read_document(document, number: int, split: bool, join: bool) -> InputDocument:
    """A document -> its title, if any, the text in which keyphrases are sought, and its words with their places.

    Args:
        document: a text (with `split` a list of words), or a mapping with a "text" and perhaps a "title".
        number: its number, for messages.
        join: put the title before the text.

    Raises:
        TypeError: for anything else.
    """
    if not isinstance(document, Mapping):
        return InputDocument(None, *read_text(document, number, split))
    unknown = [key for key in document if key not in KEYS]
    if unknown or "text" not in document:
        wrong = f"has {', '.join(map(repr, unknown))}" if unknown else "has no 'text'"
        raise TypeError(f"Document {number} {wrong}. A document with a title is {{'title': ..., 'text': ...}}.")
    title = document.get("title")
    if title is not None and not isinstance(title, str):
        raise TypeError(
            f"The title of document {number} is a {type(title).__name__}, not a string: {title!r:.60}. Pass a string, or "
            "None for no title."
        )
    source, words = read_text(document["text"], number, split)
    if not (title or "").strip():
        return InputDocument(None, source, words)
    if not join:
        return InputDocument(clean(title), source, words, [("text", 0, 0)])
    text = " ".join(document["text"]) if split else document["text"]
    return _joined(title, text, words if split else None)


def _joined(title: str, text: str, words: list[tuple[str, int, int]] | None) -> InputDocument:
    """A document whose title and text are read as one; `words` are the text's, where the caller has split it."""
    joined = join_title(title, text)
    begin = len(joined) - len(text.strip())
    blanks = [len(part) - len(part.lstrip()) for part in (title, text)]  # before each, which joining leaves out
    fields = [("text", begin, blanks[1] - begin), ("title", 0, blanks[0])]
    if words is None:
        source = CleanText(joined)
        found = split_words(source.text)
    else:
        source = CleanText(joined, end=begin)
        shift, length = begin + len(source.text) - len(joined), len(source.text)
        moved = [
            (word, max(start - blanks[1], 0) + shift, min(end - blanks[1] + shift, length))
            for word, start, end in words
        ]
        found = split_words(source.text[:shift]) + [word for word in moved if word[0].strip()]
    return InputDocument(clean(title), source, found, fields)


def read_text(text, number: int, split: bool) -> tuple[CleanText, list[tuple[str, int, int]]]:
    """A text, or with `split` a list of words -> the cleaned text, or the words as they are with blanks between; its words."""
    if not split:
        if not isinstance(text, str):
            raise TypeError(
                f"Document {number} is a {type(text).__name__}, not a text: {text!r:.60}. "
                "Pass strings, or lists of words with is_split_into_words=True."
            )
        source = CleanText(text)
        return source, split_words(source.text)
    if not is_words(text):
        raise TypeError(
            f"Document {number} is not a list of words: {text!r:.60}. With is_split_into_words=True pass lists of "
            "strings; leave it out for texts."
        )
    words, place = [], 0
    for word in text:
        words.append((word, place, place + len(word)))
        place += len(word) + 1
    return CleanText(" ".join(text), end=0), words


def is_words(document) -> bool:
    return isinstance(document, (list, tuple)) and all(isinstance(word, str) for word in document)


def blocks(documents: Iterable, most: int) -> Iterator[Sequence]:
    """Documents -> lists of at most so many, and of fewer long ones, to be sorted by length and read together."""
    block, characters = [], 0
    for document in documents:
        block.append(document)
        text = document.get("text") if isinstance(document, Mapping) else document
        characters += len(text) if isinstance(text, str) else sum(map(len, text)) if is_words(text) else 0
        if len(block) == most or characters >= CHARACTERS * most:
            yield block
            block, characters = [], 0
    if block:
        yield block
