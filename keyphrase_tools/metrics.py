"""F1@k of keyphrases under two conventions: SEKE's (Martinc et al. 2025) and ExHiRD's (Chen et al. 2020).

For one document with n predictions, of which c among the first k are correct, and g gold phrases:

    P@k = c / min(k, n)  (flexible)  or  c / k  (fixed)        R@k = c / g        F1@k = 2 P R / (P + R)

and 0 if a denominator is 0. k is a number, "k" (the document's g) or "M" (all n). P and R are averaged over the
documents; the reported F1 is that of the two averages. Papers differ in everything else, so each difference is a
switch, and a convention is a named setting of all switches:

    switch                    seke          exhird        what it does
    denominator               "flexible"    "fixed"       of P@k: min(k, n), or always k
    deduplicate               False         True          predicted and gold phrases with equal stems count once
    documents_without_gold    "drop"        "keep"        left out of the averages, or counted as zeros
    aggregate                 "f1_of_means" "f1_of_means" or "mean_of_f1": the average of the documents' F1
    round_f1                  4             False         decimals of f1@k, False for all; P and R are never rounded
    stem                      True          True          compare stems; False: exact words, case-sensitive
    language                  "english"     "english"     of the stems, Porter's for English, see `words.stem`
    references_stemmed        False         False         True: gold phrases are already stemmed (SemEval)
    split_phrases             False         True          split phrases at ; / <p_start> <p_end> <a_start> <a_end>
                                                          <absent_end>, delete <eokp> <blank>, drop empty ones
    drop_unknown              False         True          drop predictions that contain <unk>
    max_predictions           None          None          keep the first n predictions, before any other step; None: all
    max_one_word_predictions  None          None          keep the first n one-word predictions, with repeats; None: all
"""

import math
import re
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from .words import check_language, stem, stem_phrase

PhraseList = Sequence[str] | str
Cut = int | str

CUTS = (1, 3, 5, 10, "k", "M")
PARTS = ("total", "present", "absent")
EVALUATE_MODULE = str(Path(__file__).resolve().parent / "keyphrase_f1")  # evaluate.load(EVALUATE_MODULE)

NO_GOLD = (
    "None of the {documents:,} documents has a gold keyphrase that can be scored. Check the column of keyphrases, and that texts "
    "and keyphrases have the same language and order."
)

_CHOICES = {
    "denominator": ("flexible", "fixed"),
    "documents_without_gold": ("drop", "keep"),
    "aggregate": ("f1_of_means", "mean_of_f1"),
    **dict.fromkeys(("deduplicate", "stem", "references_stemmed", "split_phrases", "drop_unknown"), (True, False)),
}
_SEPARATOR = re.compile(r"[;/]|<[pa]_(?:start|end)>|<absent_end>")
_FILLER = re.compile(r"<eokp>|<blank>")
_short = reprlib.Repr()
_short.maxstring = 80


@dataclass(frozen=True)
class Convention:
    """A setting of the switches in the table above; the defaults are SEKE's. Raises a `ValueError` for invalid values."""

    denominator: str = "flexible"
    deduplicate: bool = False
    documents_without_gold: str = "drop"
    aggregate: str = "f1_of_means"
    round_f1: int | bool = 4
    stem: bool = True
    language: str | None = "english"
    references_stemmed: bool = False
    split_phrases: bool = False
    drop_unknown: bool = False
    max_predictions: int | None = None
    max_one_word_predictions: int | None = None

    def __post_init__(self):
        check_language(self.language)
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(
                    f"{name}={value!r} is invalid. Use {' or '.join(map(repr, choices))}, "
                    f"or leave {name} out for the convention's default."
                )
        for name, off in (("round_f1", False), ("max_predictions", None), ("max_one_word_predictions", None)):
            value = getattr(self, name)
            if value is not off and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise ValueError(f"{name}={value!r} must be a non-negative integer, or {off} to disable it.")


CONVENTIONS = {
    "seke": Convention(),
    "exhird": Convention(
        denominator="fixed",
        deduplicate=True,
        documents_without_gold="keep",
        round_f1=False,
        split_phrases=True,
        drop_unknown=True,
    ),
}


def keyphrase_f1(
    predictions: Sequence[PhraseList],
    references: Sequence[PhraseList],
    *,
    convention: str = "seke",
    sources: Sequence[str] | None = None,
    k: Cut | Sequence[Cut] = CUTS,
    **switches,
) -> dict:
    """Score the predicted keyphrases of some documents against their gold keyphrases.

    Args:
        predictions: one list of phrases per document, best first. If phrases are split (exhird), also one string per
            document, such as "<p_start> neural network ; <a_start> graph cut".
        references: the gold phrases, in the same form.
        convention: "seke" or "exhird".
        sources: one text per document. A phrase is present if its stems are adjacent in the text, whose words are
            separated by white space only ("network." is not "network"), and absent otherwise.
        k: cutoffs, any of 1, 2, ..., "k" (the document's number of gold phrases) and "M" (no cutoff).
        switches: of the module's table, such as `denominator="fixed"`; `None` is the convention's value, but for `language`, where it
            means words without stemming.

    Returns:
        For each k, precision@k, recall@k and f1@k, mean_f1@k (the mean of the documents' F1, never rounded) and correct@k
        (a count); then sum_preds, sum_targets, avg_num_preds and documents, all over the documents that are kept.
        With sources: three such dictionaries, "total", "present" and "absent", in which documents are kept or dropped by
        their gold phrases of that kind; averages of a kind are `None` if no document is kept. (SEKE's own scorer does not
        separate present and absent phrases; ExHiRD's f1@k is called std_F1 in its logs.)

    Raises:
        ValueError: if lengths differ, if no document is kept, so that there is nothing to average, or for an unknown
            convention, cutoff or value of a switch.
        TypeError: if a document is not a list of strings.

    >>> scores = keyphrase_f1([["neural networks"]], [["neural network", "graph cut"]], k=5)
    >>> scores["precision@5"], scores["recall@5"], scores["f1@5"]
    (1.0, 0.5, 0.6667)
    """
    rules = _rules(convention, **switches)
    cuts = check_cuts(k)
    rows = _score_documents(predictions, references, sources, cuts, rules)
    if not rows["total"] or (
        rules.documents_without_gold == "drop" and not any(r["num_targets"] for r in rows["total"])
    ):
        raise ValueError(NO_GOLD.format(documents=len(references)))
    if sources is None:
        return _average(rows["total"], cuts, rules)
    return {part: _average(rows[part], cuts, rules) for part in PARTS}


def keyphrase_f1_by_document(
    predictions: Sequence[PhraseList],
    references: Sequence[PhraseList],
    *,
    convention: str = "seke",
    sources: Sequence[str] | None = None,
    k: Cut | Sequence[Cut] = CUTS,
    **switches,
) -> list[dict] | dict[str, list[dict]]:
    """The scores of each document that `keyphrase_f1` averages, including documents without gold phrases.

    Args:
        predictions, references, convention, sources, k, switches: as in `keyphrase_f1`, with the same errors.

    Returns:
        For each document: matched (1 or 0 for each scored prediction, in order), num_preds, num_targets and, for each k,
        precision@k, recall@k, f1@k and correct@k. With sources: three such lists, "total", "present" and "absent".
    """
    rules = _rules(convention, **switches)
    rows = _score_documents(predictions, references, sources, check_cuts(k), rules)
    return rows["total"] if sources is None else rows


def _rules(convention: str, **switches) -> Convention:
    if convention not in CONVENTIONS:
        choices = " or ".join(f"convention={name!r}" for name in CONVENTIONS)
        raise ValueError(f"convention={convention!r} is not known. Use {choices}.")
    names = [field.name for field in fields(Convention)]
    for name in switches:
        if name not in names:
            raise TypeError(f"unexpected argument {name!r}. Valid switches: {', '.join(names)}.")
    given = {name: value for name, value in switches.items() if value is not None or name == "language"}
    return replace(CONVENTIONS[convention], **given)


def check_gold(gold: Sequence[Sequence[str]], where: str = "") -> None:
    """Raises a `ValueError` unless at least one document has a gold phrase with words; `where` is prepended to the message."""
    if not any(phrase.strip() for phrases in gold for phrase in phrases):
        raise ValueError((f"{where}: " if where else "") + NO_GOLD.format(documents=len(gold)))


def check_cuts(k: Cut | Sequence[Cut]) -> tuple[Cut, ...]:
    """The cutoffs of `keyphrase_f1`; raises a `ValueError` for another value, or none."""
    cuts = tuple(k) if isinstance(k, Iterable) and not isinstance(k, str) else (k,)
    for cut in cuts or [k]:
        if cut not in ("k", "M") and (isinstance(cut, bool) or not isinstance(cut, int) or cut < 1):
            raise ValueError(
                f"k={cut!r} must be a positive integer, "
                '"k" (the document\'s number of gold phrases) or "M" (all predictions).'
            )
    return cuts


def _score_documents(
    predictions: Sequence[PhraseList],
    references: Sequence[PhraseList],
    sources: Sequence[str] | None,
    cuts: tuple[Cut, ...],
    rules: Convention,
) -> dict[str, list[dict]]:
    """{"total": one row per document}, and with sources also "present" and "absent"."""
    _check_lengths(predictions, references, sources)
    rows: dict[str, list[dict]] = {part: [] for part in (PARTS[:1] if sources is None else PARTS)}
    texts: Sequence[str | None] = [None] * len(predictions) if sources is None else sources
    for i, (predicted, gold, text) in enumerate(zip(predictions, references, texts, strict=True)):
        predicted = _predicted_keys(_phrases(predicted, f"predictions[{i}]", rules), rules)
        gold = _gold_keys(_phrases(gold, f"references[{i}]", rules), rules)
        rows["total"].append(_score(predicted, gold, cuts, rules))
        if sources is not None:
            text = _text(text, f"sources[{i}]", rules)
            present = {key for key in (*predicted, *gold) if f" {' '.join(key.split())} " in text}
            for part, inside in (("present", True), ("absent", False)):
                chosen, targets = ([key for key in keys if (key in present) is inside] for keys in (predicted, gold))
                rows[part].append(_score(chosen, targets, cuts, rules))
    return rows


def _check_lengths(predictions, references, sources):
    named = {"predictions": predictions, "references": references}
    if sources is not None:
        named["sources"] = sources
    for name, documents in named.items():
        if isinstance(documents, str):
            raise TypeError(
                f"{name}={_short.repr(documents)} is one string. Use {name}=[...] with one entry per document."
            )
    if len({len(documents) for documents in named.values()}) > 1:
        counts = ", ".join(f"{len(documents)} {name}" for name, documents in named.items())
        raise ValueError(
            f"{counts}: pass one entry per document in each. For a single document use [[phrase, ...]], "
            "and [] for a document without phrases."
        )


def _phrases(document: PhraseList, where: str, rules: Convention) -> list[str]:
    """One document's phrases, split if the convention requires it."""
    if isinstance(document, str):
        if not rules.split_phrases:
            raise TypeError(
                f"{where}={_short.repr(document)} is a string, not a list of phrases. "
                f"Use [[{_short.repr(document)}, ...], ...], one list per document, or split_phrases=True "
                'for lines such as "phrase ; phrase".'
            )
        document = [document]
    if not isinstance(document, Iterable) or isinstance(document, dict):
        raise TypeError(
            f"{where}={_short.repr(document)} is not a list of phrases. Use a list of strings, [] for no phrases."
        )
    document = list(document)
    for j, phrase in enumerate(document):
        if not isinstance(phrase, str):
            raise TypeError(
                f"{where}[{j}]={_short.repr(phrase)} is not a string. "
                'Pass a phrase as "neural network": join its words by spaces, and leave out its score.'
            )
    if not rules.split_phrases:
        return document
    line = _FILLER.sub("", _SEPARATOR.sub(";", ";".join(document)))
    return [phrase.strip() for phrase in line.split(";") if phrase.strip()]


def _predicted_keys(phrases: list[str], rules: Convention) -> list[str]:
    """Predictions in the form in which they are compared; the steps have the order of the reference implementation."""
    keys = [stem_phrase(p, rules.language) if rules.stem else p.strip() for p in phrases[: rules.max_predictions]]
    if rules.drop_unknown:
        keys = [key for key in keys if "<unk>" not in key]
    if rules.max_one_word_predictions is not None:
        one_word = [i for i, key in enumerate(keys) if len(key.split()) == 1]
        surplus = set(one_word[rules.max_one_word_predictions :])
        keys = [key for i, key in enumerate(keys) if i not in surplus]
    return list(dict.fromkeys(keys)) if rules.deduplicate else keys


def _gold_keys(phrases: list[str], rules: Convention) -> list[str]:
    """Gold phrases in the form in which they are compared."""
    exact = rules.references_stemmed or not rules.stem
    keys = [p.strip() if exact else stem_phrase(p, rules.language) for p in phrases]
    return list(dict.fromkeys(keys)) if rules.deduplicate else keys


def _text(source: str | None, where: str, rules: Convention) -> str:
    """A source's words (or stems) with a space on either side of each, so that `in` only matches whole words."""
    if not isinstance(source, str):
        raise TypeError(
            f'{where}={_short.repr(source)} is not a string. Use " ".join(words) to join the words of a text.'
        )
    words = source.split()
    return f" {' '.join(stem(word, rules.language) for word in words) if rules.stem else ' '.join(words)} "


def _score(predicted: list[str], gold: list[str], cuts: tuple[Cut, ...], rules: Convention) -> dict:
    """One document's row."""
    targets = set(gold)
    matched = [int(key in targets) for key in predicted]
    row = {"matched": matched, "num_preds": len(matched), "num_targets": len(gold)}
    for k in cuts:
        cut = k if isinstance(k, int) else {"k": len(gold), "M": len(matched)}[k]
        correct = sum(matched[:cut])
        slots = cut if rules.denominator == "fixed" else min(cut, len(matched))
        precision = correct / slots if slots else 0.0
        recall = correct / len(gold) if gold else 0.0
        row[f"precision@{k}"] = precision
        row[f"recall@{k}"] = recall
        row[f"f1@{k}"] = _f1(precision, recall)
        row[f"correct@{k}"] = correct
    return row


def _average(rows: list[dict], cuts: tuple[Cut, ...], rules: Convention) -> dict:
    """The convention's averages and sums over the documents' rows."""
    if rules.documents_without_gold == "drop":
        rows = [row for row in rows if row["num_targets"]]
    scores = {}
    for k in cuts:
        precision, recall, mean_f1 = (_mean([row[f"{s}@{k}"] for row in rows]) for s in ("precision", "recall", "f1"))
        f1 = mean_f1
        if rules.aggregate == "f1_of_means" and precision is not None and recall is not None:
            f1 = _f1(precision, recall)
        scores[f"precision@{k}"] = precision
        scores[f"recall@{k}"] = recall
        scores[f"f1@{k}"] = _round(f1, rules.round_f1)
        scores[f"mean_f1@{k}"] = mean_f1
        scores[f"correct@{k}"] = sum(row[f"correct@{k}"] for row in rows)
    scores["sum_preds"] = sum(row["num_preds"] for row in rows)
    scores["sum_targets"] = sum(row["num_targets"] for row in rows)
    scores["avg_num_preds"] = _mean([row["num_preds"] for row in rows])
    scores["documents"] = len(rows)
    return scores


def _f1(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _mean(values: list[float]) -> float | None:
    # fsum: exact, so the order of the documents does not matter
    return math.fsum(values) / len(values) if values else None


def _round(value: float | None, decimals: int | bool) -> float | None:
    # scale, then round half to even, as NumPy and SEKE's scorer do; Python's round differs on some ties
    if decimals is False or value is None:
        return value
    return round(value * 10**decimals) / 10**decimals
