"""From keyphrases to labels: where a document's keyphrases stand, and the rows a token classifier learns from.

Two rules. "lexperts": a keyphrase stands wherever its words, lower-cased and Porter-stemmed, stand in a row; the longest
match is labelled first, then the leftmost, and a match that touches a labelled word is skipped, so that the order of the
keyphrases does not matter. "seke": the reference's preprocessing, quirks and all (a match on the last word is missed,
later matches overwrite earlier ones, an empty keyphrase counts as present).
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from .clean_text import clean
from .stemming import stem
from .titles import MAX_TITLE_LENGTH
from .windows import Window, encode_windows
from .words import join_title, split_words

O, B, I = range(3)
RULES = ("lexperts", "seke")
TITLE_AS = ("text", "meta", "both")
Words = Sequence[str] | Sequence[tuple[str, int, int]]


def find(words: Words, keyphrases: Sequence[str] | str, *, rules: str = "lexperts") -> list[list[tuple[int, int]]]:
    """For each keyphrase, the spans of words `(start, end)` where it stands, from left to right.

    Args:
        words: of `split_words`, or only the strings.
        keyphrases: a list, or one string with `;` between them.
        rules: `"lexperts"` or `"seke"`.
    """
    stems = [stem(w if isinstance(w, str) else w[0]) for w in words]
    positions = defaultdict(list)
    for i, s in enumerate(stems):
        positions[s].append(i)
    last = len(stems) - 1 if _checked(rules) == "seke" else len(stems)  # the reference stops one word early
    found = []
    for phrase in _phrases(keyphrases, rules):
        wanted, n = [stem(w) for w in phrase], len(phrase)
        starts = positions[wanted[0]] if wanted else ()
        found.append([(i, i + n) for i in starts if i + n <= last and stems[i : i + n] == wanted])
    return found


def tag(words: Words, keyphrases: Sequence[str] | str, *, rules: str = "lexperts") -> list[int]:
    """A document's words and keyphrases -> a label for each word: 0 (O), 1 (B, begins a keyphrase), 2 (I, goes on).

    >>> tag(["graph", "cuts", "work"], ["graph cut"])
    [1, 2, 0]
    """
    return label_spans(find(words, keyphrases, rules=rules), len(words), rules=rules)


def label_spans(found: list[list[tuple[int, int]]], length: int, *, rules: str = "lexperts") -> list[int]:
    """Where the keyphrases of a document of `length` words stand, as `find` gives it -> a label for each word."""
    labels = [O] * length
    spans = [span for spans in found for span in spans]
    if rules == "seke":
        # position by position, and at each in the list's order: whatever comes later overwrites
        for start, end in sorted(spans, key=lambda span: span[0]):
            labels[start:end] = [B] + [I] * (end - start - 1)
        return labels
    for start, end in sorted(spans, key=lambda span: (span[0] - span[1], span[0])):
        if not any(labels[start:end]):
            labels[start:end] = [B] + [I] * (end - start - 1)
    return labels


def present(words: Words, keyphrases: Sequence[str] | str, *, rules: str = "lexperts") -> list[str]:
    """The keyphrases that stand in the text, each once, as words joined by spaces: the gold of extraction.

    "seke" keeps the reference's empty keyphrase (`""`, of an empty field or a trailing `;`); "lexperts" drops it.
    """
    phrases = _phrases(keyphrases, rules)
    found = find(words, keyphrases, rules=rules)
    kept = [" ".join(p) for p, spans in zip(phrases, found, strict=True) if spans or (not p and rules == "seke")]
    return list(dict.fromkeys(kept))


def encode(
    batch: Mapping[str, Sequence],
    tokenizer,
    *,
    text_column: str = "text",
    title_column: str | None = "title",
    keyphrases_column: str = "keyphrases",
    max_length: int | None = None,
    overlap: int | None = None,
    on_long: str = "window",
    rules: str = "lexperts",
    title_as: str = "text",
    max_title_length: int = MAX_TITLE_LENGTH,
) -> dict[str, list]:
    """Documents -> rows for training, for `dataset.map(encode, batched=True, remove_columns=dataset.column_names)`.

    Args:
        batch: columns of texts, of lists of keyphrases (or `;`-joined strings) and, where there is one, of titles, which
            are read as `title_as` says (`title_column=None` leaves them out). A text may also be a list of words. They are
            cleaned as the pipeline does it, see `clean_text`.
        tokenizer: a fast tokenizer.
        max_length: sub-tokens a row, special ones included; by default the tokenizer's `model_max_length`.
        overlap: sub-tokens that neighbouring rows of a long document share; by default a quarter of a row.
        on_long: `"window"` reads a long document in several rows, `"truncate"` in its first only, `"error"` refuses it.
        rules: `"lexperts"` or `"seke"`.
        title_as: `"text"` joins titles to the texts as `join_title` does; `"meta"` reads them as meta-text, beside the texts
            that alone are labelled; `"both"` does both, for models with `title_in_main`.
        max_title_length: sub-tokens of a title that is meta-text; longer ones are cut, with a warning.

    Returns:
        `input_ids`, `attention_mask` and what else the tokenizer gives; `labels`, the label of each word on its first
        sub-token and -100 elsewhere; `document`, its place in the batch; `num_keyphrases` and `num_present`, the
        document's counts on its first row and 0 on the others, so that their sums are those of the data set. Unless titles
        are text, also `meta_mask`, 1 on the first special token and the title, `main_mask`, 1 on the text, and
        `word_start_mask`, 1 on each word's first sub-token in it; a collator has to pad them with 0.

    Raises:
        ValueError: for a missing column (the ones that are there are named), or an unknown `rules` or `title_as`.
    """
    if title_as not in TITLE_AS:
        raise ValueError(f"title_as={title_as!r} is not known. Use one of {', '.join(map(repr, TITLE_AS))}.")
    if title_column == "title" and "title" not in batch:
        title_column = None
    for column in filter(None, (text_column, keyphrases_column, title_column)):
        if column not in batch:
            raise ValueError(
                f"There is no column {column!r}; the columns are {', '.join(map(repr, batch))}. "
                "Name yours with text_column=, keyphrases_column= and title_column=."
            )
    texts = [text if isinstance(text, str) else " ".join(text) for text in batch[text_column]]
    titles = batch[title_column] if title_column else [None] * len(texts)
    if title_column and title_as != "meta":
        texts = [join_title(title, text) for title, text in zip(titles, texts, strict=True)]
    texts, titles = [clean(text) for text in texts], [title and clean(title) for title in titles]
    words = [split_words(text) for text in texts]
    spans = [[(start, end) for _, start, end in document] for document in words]
    windows = encode_windows(
        texts,
        spans,
        tokenizer,
        max_length=max_length,
        overlap=overlap,
        on_long=on_long,
        titles=None if title_as == "text" else titles,
        max_title_length=max_title_length,
    )
    return label_windows(windows, words, batch[keyphrases_column], rules=rules)


def label_windows(
    windows: Sequence[Window],
    words: Sequence[Words],
    keyphrases: Sequence[Sequence[str] | str],
    *,
    rules: str = "lexperts",
) -> dict[str, list]:
    """Windows of documents, their words and their keyphrases -> the rows that `encode` returns."""
    found = [find(w, k, rules=rules) for w, k in zip(words, keyphrases, strict=True)]
    tags = [label_spans(spans, len(w), rules=rules) for spans, w in zip(found, words, strict=True)]
    rows = defaultdict(list)
    for window, before in zip(windows, [None, *windows], strict=False):
        for name, values in window.inputs.items():
            rows[name].append(values)
        document = window.document
        is_first = before is None or before.document != document
        if "meta_mask" in window.inputs:
            rows["word_start_mask"].append([int(w >= 0) for w in window.word_starts])
        rows["labels"].append([-100 if w < 0 else tags[document][w] for w in window.word_starts])
        rows["document"].append(document)
        rows["num_keyphrases"].append(len(found[document]) if is_first else 0)
        rows["num_present"].append(sum(map(bool, found[document])) if is_first else 0)
    return dict(rows)


def _phrases(keyphrases: Iterable[str] | str, rules: str) -> list[list[str]]:
    """Each keyphrase as its words; under "lexperts" without the empty ones."""
    if _checked(rules) == "seke":
        joined = keyphrases if isinstance(keyphrases, str) else ";".join(keyphrases)
        for joiner in "-/\u2217":
            joined = joined.replace(joiner, " ")
        return [phrase.split() for phrase in joined.lower().split(";")]
    listed = keyphrases.split(";") if isinstance(keyphrases, str) else keyphrases
    phrases = [[word.lower() for word, _, _ in split_words(phrase)] for phrase in listed]
    return [phrase for phrase in phrases if phrase]


def _checked(rules: str) -> str:
    if rules not in RULES:
        raise ValueError(f"rules={rules!r} is not known. Use rules='lexperts' or rules='seke'.")
    return rules
