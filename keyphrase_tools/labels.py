"""Labels for training: finds a document's keyphrases in its text, and builds the rows that a token classifier learns from.

There are two sets of rules. "lexperts": a keyphrase occurs wherever its words, in the normal form and Porter-stemmed, are adjacent
and in one unit of layout (see `words.normal_form` and `layout`). The longest match is labelled first, then the leftmost; a match that
overlaps a labelled word is skipped, so the order of the keyphrases does not matter. What decoding never returns is not labelled: a
phrase with punctuation, and a match that begins or ends inside a term (see `layout`). "seke": the reference's preprocessing with its
quirks (a match on the last word is missed, later matches overwrite earlier ones, an empty keyphrase counts as present).
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from lexperts_lite.clean import clean
from lexperts_lite.decoding import B, I, O, tag_spans
from lexperts_lite.layout import continued_words, in_one_unit, is_whole, unit_numbers
from lexperts_lite.windows import Window, encode_windows
from lexperts_lite.words import is_phrase, join_title, split_phrase, split_words, stem

from .phrase_lists import read_phrases

RULES = ("lexperts", "seke")
TITLE_AS = ("text", "meta", "both")
Words = Sequence[str] | Sequence[tuple[str, int, int]]


def find_keyphrases(
    words: Words, keyphrases: Sequence[str] | str, *, rules: str = "lexperts", language: str | None = "english"
) -> list[list[tuple[int, int]]]:
    """For each keyphrase, the spans of words `(start, end)` where it occurs, from left to right.

    Args:
        words: as `split_words` returns them, or only the strings.
        keyphrases: in the forms of `phrase_lists.read_phrases`, without offsets.
        rules: `"lexperts"` or `"seke"`.
        language: of the stems, see `words.stem`.
    """
    stems = [stem(w if isinstance(w, str) else w[0], language) for w in words]
    positions = defaultdict(list)
    for i, s in enumerate(stems):
        positions[s].append(i)
    last = len(stems) - 1 if _checked(rules) == "seke" else len(stems)  # the reference stops one word early
    spans = []
    for phrase in _phrases(keyphrases, rules):
        phrase_stems, n = [stem(w, language) for w in phrase], len(phrase)
        starts = positions[phrase_stems[0]] if phrase_stems else ()
        spans.append([(i, i + n) for i in starts if i + n <= last and stems[i : i + n] == phrase_stems])
    if rules == "seke":
        return spans
    units = unit_numbers(words)
    return [[span for span in of_phrase if in_one_unit(units, *span)] for of_phrase in spans]


def tag_words(
    words: Words, keyphrases: Sequence[str] | str, *, rules: str = "lexperts", language: str | None = "english"
) -> list[int]:
    """Labels each word of a document: 0 (O), 1 (B, begins a keyphrase) or 2 (I, continues it).

    >>> tag_words(["graph", "cuts", "work"], ["graph cut"])
    [1, 2, 0]
    """
    return label_spans(find_keyphrases(words, keyphrases, rules=rules, language=language), words, rules=rules)


def label_spans(keyphrase_spans: list[list[tuple[int, int]]], words: Words, *, rules: str = "lexperts") -> list[int]:
    """Labels each word, given the spans that `find_keyphrases` returns."""
    labels = [O] * len(words)
    spans = [span for spans in keyphrase_spans for span in spans]
    if rules == "seke":
        # by position, then in the list's order: later matches overwrite earlier ones
        for start, end in sorted(spans, key=lambda span: span[0]):
            labels[start:end] = [B] + [I] * (end - start - 1)
        return labels
    continued = continued_words(words)
    for start, end in sorted(spans, key=lambda span: (span[0] - span[1], span[0])):
        if any(labels[start:end]) or not is_whole(continued, start, end):
            continue
        if is_phrase([w if isinstance(w, str) else w[0] for w in words[start:end]]):
            labels[start:end] = [B] + [I] * (end - start - 1)
    return labels


def count_returnable(keyphrase_spans: list[list[tuple[int, int]]], words: Words, labels: Sequence[int]) -> int:
    """The number of keyphrases that decoding returns if the labels are those of `label_spans`."""
    returned = {
        span
        for span in tag_spans(labels, unit_numbers(words))
        if is_phrase([w if isinstance(w, str) else w[0] for w in words[slice(*span)]])
    }
    return sum(not returned.isdisjoint(spans) for spans in keyphrase_spans)


def present_keyphrases(
    words: Words, keyphrases: Sequence[str] | str, *, rules: str = "lexperts", language: str | None = "english"
) -> list[str]:
    """The keyphrases that occur in the text (the gold of extraction), each once, as words joined by spaces.

    "seke" keeps the reference's empty keyphrase (`""`, from an empty field or a trailing `;`); "lexperts" drops it.
    """
    phrases = _phrases(keyphrases, rules)
    spans = find_keyphrases(words, keyphrases, rules=rules, language=language)
    kept = [
        " ".join(p) for p, spans_of_p in zip(phrases, spans, strict=True) if spans_of_p or (not p and rules == "seke")
    ]
    return list(dict.fromkeys(kept))


def tokenize_documents(
    batch: Mapping[str, Sequence],
    tokenizer,
    *,
    text_column: str = "text",
    title_column: str | None = "title",
    keyphrases_column: str = "keyphrases",
    rules: str = "lexperts",
    title_as: str = "text",
    language: str | None = "english",
    **windows,
) -> dict[str, list]:
    """Tokenizes and labels documents: `dataset.map(tokenize_documents, batched=True, fn_kwargs={"tokenizer": tokenizer}, ...)`.

    Args:
        batch: columns of texts, of keyphrases (in the forms of `phrase_lists.read_phrases`) and optionally of titles. A text may
            be a list of words. Texts and titles are cleaned as in the pipeline, see `lexperts_lite.clean`.
        tokenizer: a fast tokenizer.
        text_column, title_column, keyphrases_column: column names; `title_column=None` ignores titles.
        rules: how keyphrases are matched to the text, `"lexperts"` or `"seke"`.
        title_as: `"text"` joins titles to the texts (see `join_title`); `"meta"` passes them as meta-text, and only the texts
            are labelled; `"both"` does both, for models with `title_in_main`.
        language: of the stems by which keyphrases are found, see `words.stem`.
        windows: `max_length`, `overlap` and `max_title_length` of the rows, see `lexperts_lite.windows.encode_windows`.

    Returns:
        `input_ids`, `attention_mask` and the tokenizer's other outputs; `labels`, the label of each word on its first
        sub-token and -100 elsewhere; `document`, its index in the batch; `num_keyphrases` and `num_present` (those that the labels
        give back when they are decoded), counts of the document on its first row and 0 on the others, so that they can be summed.
        Unless `title_as="text"`, also
        `meta_mask` (1 on the first special token and the title), `main_mask` (1 on the text) and `word_start_mask` (1 on
        each word's first sub-token in the text); a collator must pad them with 0.

    Raises:
        ValueError: for a missing column, keyphrases in another form, or an unknown `rules` or `title_as`.
    """
    if title_as not in TITLE_AS:
        raise ValueError(f"title_as={title_as!r} is not known. Use one of {', '.join(map(repr, TITLE_AS))}.")
    if title_column == "title" and "title" not in batch:
        title_column = None
    for column in filter(None, (text_column, keyphrases_column, title_column)):
        if column not in batch:
            raise ValueError(
                f"The column {column!r} is missing; the columns are {', '.join(map(repr, batch))}. "
                "Set the names with text_column=, keyphrases_column= and title_column=."
            )
    keyphrases = [
        read_phrases(value, text if isinstance(text, str) else None, f"{keyphrases_column} of document {i}")
        for i, (value, text) in enumerate(zip(batch[keyphrases_column], batch[text_column], strict=True))
    ]
    texts = [text if isinstance(text, str) else " ".join(text) for text in batch[text_column]]
    titles = batch[title_column] if title_column else [None] * len(texts)
    if title_column and title_as != "meta":
        texts = [join_title(title, text) for title, text in zip(titles, texts, strict=True)]
    texts, titles = [clean(text) for text in texts], [title and clean(title) for title in titles]
    words = [split_words(text) for text in texts]
    spans = [[(start, end) for _, start, end in document] for document in words]
    encoded = encode_windows(texts, spans, tokenizer, titles=None if title_as == "text" else titles, **windows)
    return label_windows(encoded, words, keyphrases, rules=rules, language=language)


def label_windows(
    windows: Sequence[Window],
    words: Sequence[Words],
    keyphrases: Sequence[Sequence[str] | str],
    *,
    rules: str = "lexperts",
    language: str | None = "english",
) -> dict[str, list]:
    """Builds the rows of `tokenize_documents` from windows of documents, their words and their keyphrases."""
    keyphrase_spans = [
        find_keyphrases(w, k, rules=rules, language=language) for w, k in zip(words, keyphrases, strict=True)
    ]
    tags = [label_spans(spans, w, rules=rules) for spans, w in zip(keyphrase_spans, words, strict=True)]
    rows: dict[str, list] = defaultdict(list)
    for window, before in zip(windows, [None, *windows], strict=False):
        for name, values in window.inputs.items():
            rows[name].append(values)
        document = window.document
        is_first = before is None or before.document != document
        if "meta_mask" in window.inputs:
            rows["word_start_mask"].append([int(w >= 0) for w in window.word_starts])
        rows["labels"].append([-100 if w < 0 else tags[document][w] for w in window.word_starts])
        rows["document"].append(document)
        rows["num_keyphrases"].append(len(keyphrase_spans[document]) if is_first else 0)
        present = count_returnable(keyphrase_spans[document], words[document], tags[document]) if is_first else 0
        rows["num_present"].append(present)
    return dict(rows)


def _phrases(keyphrases: Iterable[str] | str, rules: str) -> list[list[str]]:
    """The words of each keyphrase; "lexperts" drops empty ones."""
    if _checked(rules) == "seke":
        joined = ";".join(read_phrases(keyphrases))
        for joiner in "-/\u2217":
            joined = joined.replace(joiner, " ")
        return [phrase.split() for phrase in joined.lower().split(";")]
    return [words for words in map(split_phrase, read_phrases(keyphrases)) if words]


def _checked(rules: str) -> str:
    if rules not in RULES:
        raise ValueError(f"rules={rules!r} is not known. Use rules='lexperts' or rules='seke'.")
    return rules
