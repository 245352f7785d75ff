"""Keyphrases as rows of a target: present ones in the order of the text, then absent ones.

A row is `<p_start>` or `<a_start>`, a phrase's words, `;`, and a last row is `</s>`. Words outside the vocabulary that
stand in the source have their extended ids (see `Source`), so that they can be learnt by copying.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from nltk.stem.porter import PorterStemmer
from transformers.utils import logging

from .tokenization_exhird import DIGIT, MARKS, TITLE_END, ExHirdTokenizer, Source

logger = logging.get_logger(__name__)

ON_LONG = ("drop", "truncate", "keep", "error")
_NO_WORDS = frozenset(MARKS) - {DIGIT}
_porter = PorterStemmer()


@lru_cache(maxsize=1 << 18)
def stem(word: str) -> str:
    """One word -> its lower-cased Porter stem."""
    return _porter.stem(word)


def clean_keyphrases(
    keyphrases: Sequence[str] | str | None, tokenizer: ExHirdTokenizer, max_words: int | None = 6
) -> list[list[str]]:
    """Keyphrases -> their words, without `?` and what is in parentheses; a `;` parts phrases.

    Phrases of more than `max_words` words, and those without a letter or digit, are left out.

    >>> clean_keyphrases("Graph cuts (GC); min-cut?;", tokenizer)
    [['graph', 'cuts'], ['min', 'cut']]
    """
    listed = [keyphrases] if isinstance(keyphrases, str) else keyphrases or ()
    phrases = []
    for text in listed:
        text, before = (text or "").replace("?", ""), None
        while text != before:
            text, before = re.sub(r"\([^()]*\)", " ", text), text
        for part in text.split(";"):
            words = [word for word, _, _ in tokenizer.words(part) if word not in _NO_WORDS]
            if has_words(words) and (max_words is None or len(words) <= max_words):
                phrases.append(words)
    return phrases


def has_words(words: Iterable[str]) -> bool:
    """Whether there is more than punctuation and marks."""
    return any(word not in _NO_WORDS and any(map(str.isalnum, word)) for word in words)


def find_phrase(stems: Sequence[str], phrase: Sequence[str]) -> int | None:
    """Where a phrase's words, once stemmed, first stand in a row among a source's stems; `<eot>` matches nothing."""
    wanted, start = [stem(word) for word in phrase], 0
    if not wanted or TITLE_END in wanted:
        return None
    while True:
        try:
            start = stems.index(wanted[0], start)
        except ValueError:
            return None
        if list(stems[start : start + len(wanted)]) == wanted:
            return start
        start += 1


def present_and_absent(
    source_words: Sequence[str], phrases: Sequence[Sequence[str]]
) -> tuple[list[list[str]], list[list[str]]]:
    """Phrases that stand in the source, by place, at one place the shorter first; and the others as they are listed.

    Words are the same when their stems are. Of phrases that are the same, the first is kept.

    >>> present_and_absent(["deep", "graph", "cuts"], [["trees"], ["graph", "cut"], ["tree"], ["deep"]])
    ([['deep'], ['graph', 'cut']], [['trees']])
    """
    stems = [stem(word) for word in source_words]
    present, absent, seen = [], [], set()
    for phrase in map(list, phrases):
        key = tuple(map(stem, phrase))
        if key in seen:
            continue
        seen.add(key)
        place = find_phrase(stems, phrase)
        if place is None:
            absent.append(phrase)
        else:
            present.append((place, len(phrase), phrase))
    return [phrase for _, _, phrase in sorted(present, key=lambda found: found[:2])], absent


def drop_unknown(
    absent: Sequence[Sequence[str]], source_words: Sequence[str], tokenizer: ExHirdTokenizer
) -> list[list[str]]:
    """Absent phrases that can be learnt: with a word of the vocabulary or of the source."""
    known, written = tokenizer.backend_tokenizer.token_to_id, set(source_words)
    return [list(phrase) for phrase in absent if any(known(word) is not None or word in written for word in phrase)]


def target_rows(
    present: Sequence[Sequence[str]],
    absent: Sequence[Sequence[str]],
    source: Source,
    tokenizer: ExHirdTokenizer,
    *,
    max_phrases: int | None = None,
) -> list[list[int]]:
    """Labels as extended ids: a row `[<p_start> or <a_start>, words, ;]` a phrase, and `[</s>]`.

    A word that neither the vocabulary nor the source has is `<unk>`. Beyond `max_phrases`, the last are left out.
    """
    size, unknown = len(tokenizer), tokenizer.unk_token_id
    own = {word: size + k for k, word in enumerate(source.oov_words)}
    end, rows = tokenizer.end_phrase_token_id, []
    for start, phrases in ((tokenizer.present_token_id, present), (tokenizer.absent_token_id, absent)):
        for phrase in phrases:
            known = ((word, tokenizer.backend_tokenizer.token_to_id(word)) for word in phrase)
            rows.append([start, *(own.get(word, unknown) if i is None else i for word, i in known), end])
    return [*rows[:max_phrases], [tokenizer.eos_token_id]]


class Limits(NamedTuple):
    """What `encode` leaves out or cuts, see there."""

    max_source: int | None = 400
    max_target: int | None = 80
    on_long: str = "drop"
    max_words: int | None = 6
    max_phrases: int | None = None


def encode(
    batch: Mapping[str, Sequence],
    tokenizer: ExHirdTokenizer,
    *,
    text_column: str = "text",
    title_column: str | None = "title",
    keyphrases_column: str | None = "keyphrases",
    max_source: int | None = 400,
    max_target: int | None = 80,
    on_long: str = "drop",
    max_words: int | None = 6,
    max_phrases: int | None = None,
) -> dict[str, list]:
    """Documents -> rows for training. Those whose text has no words, and those without a keyphrase that could be
    learnt, are left out; how many, and how many keyphrases, is in the log.

    ```python
    >>> dataset.map(encode, batched=True, fn_kwargs={"tokenizer": tokenizer}, remove_columns=dataset.column_names)
    ```

    Args:
        batch: columns of texts, of lists of keyphrases (or `;`-joined strings) and, where there is one, of titles. A
            text may also be a list of words.
        keyphrases_column: `None` for documents without, to predict them; their rows have no labels.
        max_source: words of title and text, `<eot>` included. `None` for no limit.
        max_target: words of all keyphrases, with each one's start and `;`. `None` for no limit.
        on_long: documents beyond these are left out (`"drop"`), cut (`"truncate"`: the source's end, then the last
            whole phrases), read in full (`"keep"`), or refused (`"error"`).
        max_words: longer keyphrases are left out. `None` for no limit.
        max_phrases: of a document, present ones first. `None` for no limit.

    Returns:
        `input_ids`, `copy_ids`, `labels` (a document's rows) and, with a second tokenizer, what `read_pieces` gives.

    Raises:
        ValueError: for a missing column (the ones that are there are named), an unknown `on_long`, or a document
            that is too long where that is an error.
    """
    if on_long not in ON_LONG:
        raise ValueError(f"on_long={on_long!r} is not known. Use one of {', '.join(map(repr, ON_LONG))}.")
    if title_column == "title" and "title" not in batch:
        title_column = None
    for column in filter(None, (text_column, keyphrases_column, title_column)):
        if column not in batch:
            raise ValueError(
                f"There is no column {column!r}; the columns are {', '.join(map(repr, batch))}. "
                "Name yours with text_column=, keyphrases_column= and title_column=."
            )
    limits, counts = Limits(max_source, max_target, on_long, max_words, max_phrases), Counter()
    rows = []
    for place, text in enumerate(batch[text_column]):
        title = batch[title_column][place] if title_column else None
        keyphrases = (batch[keyphrases_column][place] or ()) if keyphrases_column else None
        rows.append(encode_document(joined(text), joined(title), keyphrases, tokenizer, limits, counts))
    report(counts, limits)
    names = ["input_ids", "copy_ids", *(["labels"] if keyphrases_column else [])]
    names += [] if tokenizer.pieces is None else ["piece_ids", "piece_mask", "piece_words"]
    return {name: [row[name] for row in rows if row is not None] for name in names}


def joined(text: str | Sequence[str] | None) -> str:
    return text if isinstance(text, str) else " ".join(text or ())


def encode_document(
    text: str, title: str, keyphrases: Sequence[str] | str | None, tokenizer, limits: Limits, counts: Counter
) -> dict | None:
    """One document's row, or `None` and the reason in `counts`."""
    counts["documents"] += 1
    source = tokenizer.read_source(text, title)
    if not has_words(word for word, at in zip(source.words, source.places, strict=True) if at and at[0] == "text"):
        counts["wordless"] += 1
        return None
    length, max_source, max_target = len(source.words), limits.max_source, limits.max_target
    long = max_source is not None and length > max_source
    if long and limits.on_long == "truncate":
        source = cut(source, max_source, len(tokenizer))
    row, target = {"input_ids": source.input_ids, "copy_ids": source.copy_ids}, 0
    if keyphrases is not None:
        labels = row["labels"] = labels_of(keyphrases, source, tokenizer, limits, counts)
        target = sum(map(len, labels[:-1]))
        while limits.on_long == "truncate" and max_target is not None and sum(map(len, labels[:-1])) > max_target:
            del labels[-2]
        if len(labels) == 1:
            counts["bare"] += 1
            return None
    if long or (max_target is not None and target > max_target):
        counts["long"] += 1
        if limits.on_long == "error":
            raise ValueError(
                f"Document {counts['documents'] - 1} of the batch has {length:,} words and {target:,} target words; "
                f"max_source={max_source}, max_target={max_target}. Raise them, or pass on_long='truncate' or 'drop'."
            )
        if limits.on_long == "drop":
            return None
    return row if tokenizer.pieces is None else row | tokenizer.read_pieces(text, title, source=source)


def labels_of(keyphrases, source: Source, tokenizer, limits: Limits, counts: Counter) -> list[list[int]]:
    """A document's rows, before the limit on their words; too long phrases are counted."""
    every = clean_keyphrases(keyphrases, tokenizer, None)
    phrases = [phrase for phrase in every if limits.max_words is None or len(phrase) <= limits.max_words]
    counts["phrases"] += len(every)
    counts["long phrases"] += len(every) - len(phrases)
    present, absent = present_and_absent(source.words, phrases)
    absent = drop_unknown(absent, source.words, tokenizer)
    return target_rows(present, absent, source, tokenizer, max_phrases=limits.max_phrases)


def cut(source: Source, length: int, size: int) -> Source:
    """The first words of a source, of a vocabulary of `size`."""
    words, ids, copies, oov_words, places = source
    own = max((i - size + 1 for i in copies[:length]), default=0)
    return Source(words[:length], ids[:length], copies[:length], oov_words[: max(own, 0)], places[:length])


def report(counts: Counter, limits: Limits):
    """What was left out or cut, as warnings."""
    longest = ((limits.max_source, "words"), (limits.max_target, "target words"))
    named = " or ".join(f"{limit:,} {what}" for limit, what in longest if limit is not None)
    done = "cut" if limits.on_long == "truncate" else "left out"
    for reason, what, of, end in (
        ("wordless", "documents have no words in their text", "documents", "left out"),
        ("long phrases", f"keyphrases have more than {limits.max_words} words", "phrases", "left out"),
        ("bare", "documents have no keyphrase that could be learnt", "documents", "left out"),
        ("long", f"documents are longer than {named}", "documents", done),
    ):
        if counts[reason] and not (reason == "long" and limits.on_long == "keep"):
            logger.warning(f"{counts[reason]:,} of {counts[of]:,} {what} and were {end}.")
