"""F1@k of keyphrases under two conventions: SEKE's (Martinc et al. 2025) and ExHiRD's (Chen et al. 2020).

For one document with n predictions, of which c among the first k are correct, and g gold phrases:

    P@k = c / min(k, n)  (seke)  or  c / k  (exhird)        R@k = c / g        F1@k = 2 P R / (P + R)

and 0 if a denominator is 0. k is a number, "k" (the document's g) or "M" (all n). P and R are averaged over the documents; the
reported F1 is that of the two averages. Phrases are compared by their stems. The conventions also differ in this:

                                              seke          exhird
    phrases with equal stems count            each          once
    documents without gold phrases            are left out  count as zeros
    f1@k is rounded to                        4 decimals    never
    phrases are split at ; / and ExHiRD's     no            yes, without <eokp> <blank> and empty ones
        tags <p_start> ... <absent_end>
    predictions that contain <unk>            count         are left out
"""

import math
import re
from collections.abc import Iterable, Sequence

from lexperts_lite.words import check_language, stem, stem_phrase
from run_tools.errors import short_repr

PhraseList = Sequence[str] | str
Cut = int | str

CUTS = (1, 3, 5, 10, "k", "M")
PARTS = ("total", "present", "absent")
CONVENTIONS = ("seke", "exhird")

NO_GOLD = "None of the {documents:,} documents has a gold keyphrase that can be scored. Check the column of keyphrases."

_SEPARATOR = re.compile(r"[;/]|<[pa]_(?:start|end)>|<absent_end>")
_FILLER = re.compile(r"<eokp>|<blank>")


def keyphrase_f1(
    predictions: Sequence[PhraseList],
    golds: Sequence[PhraseList],
    *,
    convention: str = "seke",
    sources: Sequence[str] | None = None,
    k: Cut | Sequence[Cut] = CUTS,
    language: str | None = "english",
) -> dict:
    """Score the predicted keyphrases of some documents against their gold keyphrases.

    Args:
        predictions: one list of phrases per document, best first; in ExHiRD's convention also one string per document, such as
            "<p_start> neural network ; <a_start> graph cut".
        golds: the gold phrases, in the same form.
        convention: "seke" or "exhird".
        sources: one text per document. A phrase is present if its stems are adjacent in the text, whose words are separated by
            white space only ("network." is not "network"), and absent otherwise.
        k: cutoffs, any of 1, 2, ..., "k" (the document's number of gold phrases) and "M" (no cutoff).
        language: of the stems, Porter's for English, see `words.stem`; `None` for words without stemming.

    Returns:
        For each k, precision@k, recall@k and f1@k, mean_f1@k (the mean of the documents' F1) and correct@k (a count); then
        sum_preds, sum_targets, avg_num_preds and documents, all over the documents that are kept. With sources: three such
        dictionaries, "total", "present" and "absent", whose averages are `None` if no document is kept.

    Raises:
        ValueError: if lengths differ, if no document is kept, or for an unknown convention, cutoff or language.
        TypeError: if a document is not a list of strings.

    >>> scores = keyphrase_f1([["neural networks"]], [["neural network", "graph cut"]], k=5)
    >>> scores["precision@5"], scores["recall@5"], scores["f1@5"]
    (1.0, 0.5, 0.6667)
    """
    found = keyphrase_f1_by_document(predictions, golds, convention=convention, sources=sources, k=k, language=language)
    rows = {"total": found} if isinstance(found, list) else found
    kept = {part: [row for row in rows[part] if convention == "exhird" or row["num_targets"]] for part in rows}
    if not kept["total"]:
        raise ValueError(NO_GOLD.format(documents=len(golds)))
    scores = {part: _average(kept[part], check_cuts(k), convention) for part in kept}
    return scores["total"] if sources is None else scores


def keyphrase_f1_by_document(
    predictions: Sequence[PhraseList],
    golds: Sequence[PhraseList],
    *,
    convention: str = "seke",
    sources: Sequence[str] | None = None,
    k: Cut | Sequence[Cut] = CUTS,
    language: str | None = "english",
) -> list[dict] | dict[str, list[dict]]:
    """The scores of each document that `keyphrase_f1` averages, including documents without gold phrases.

    Returns:
        For each document: matched (1 or 0 for each scored prediction, in order), num_preds, num_targets and, for each k,
        precision@k, recall@k, f1@k and correct@k. With sources: three such lists, "total", "present" and "absent".
    """
    if convention not in CONVENTIONS:
        raise ValueError(f"convention={convention!r} is not one of {CONVENTIONS}.")
    cuts = check_cuts(k)
    check_language(language)
    rows: dict[str, list[dict]] = {part: [] for part in (PARTS[:1] if sources is None else PARTS)}
    texts = [""] * len(golds) if sources is None else sources
    if not len(predictions) == len(golds) == len(texts):
        raise ValueError(
            f"{len(predictions)} predictions, {len(golds)} golds and {len(texts)} sources differ in length."
        )
    for i, (found, true, text) in enumerate(zip(predictions, golds, texts, strict=True)):
        predicted = _keys(found, f"predictions[{i}]", convention, language, is_gold=False)
        gold = _keys(true, f"golds[{i}]", convention, language, is_gold=True)
        rows["total"].append(_score(predicted, gold, cuts, convention))
        if sources is not None:
            # a space on either side of each stem, so that `in` only matches whole words
            inside = f" {' '.join(stem(word, language) for word in text.split())} "
            present = {key for key in (*predicted, *gold) if f" {' '.join(key.split())} " in inside}
            for part, is_present in (("present", True), ("absent", False)):
                chosen, targets = (
                    [key for key in keys if (key in present) is is_present] for keys in (predicted, gold)
                )
                rows[part].append(_score(chosen, targets, cuts, convention))
    return rows["total"] if sources is None else rows


def check_gold(gold: Sequence[Sequence[str]], where: str = "") -> None:
    """Raises a `ValueError` unless at least one document has a gold phrase with words; `where` is prepended to the message."""
    if not any(phrase.strip() for phrases in gold for phrase in phrases):
        raise ValueError((f"{where}: " if where else "") + NO_GOLD.format(documents=len(gold)))


def check_cuts(k: Cut | Sequence[Cut]) -> tuple[Cut, ...]:
    """The cutoffs of `keyphrase_f1`; raises a `ValueError` for another value, or none."""
    cuts = tuple(k) if isinstance(k, Iterable) and not isinstance(k, str) else (k,)
    for cut in cuts or [k]:
        if cut not in ("k", "M") and (isinstance(cut, bool) or not isinstance(cut, int) or cut < 1):
            raise ValueError(f'k={cut!r} must be a positive integer, "k" or "M".')
    return cuts


def _keys(document: PhraseList, where: str, convention: str, language: str | None, is_gold: bool) -> list[str]:
    """One document's phrases as stems; the steps have the order of the reference implementation."""
    if isinstance(document, str) and convention == "exhird":
        document = [document]
    if isinstance(document, str | dict) or not isinstance(document, Iterable):
        raise TypeError(f"{where}={short_repr(document)} is not a list of phrases.")
    phrases = list(document)
    if wrong := [phrase for phrase in phrases if not isinstance(phrase, str)]:
        raise TypeError(f"{where} has {short_repr(wrong[0])}, which is not a string.")
    if convention == "seke":
        return [stem_phrase(phrase, language) for phrase in phrases]
    line = _FILLER.sub("", _SEPARATOR.sub(";", ";".join(phrases)))
    keys = [stem_phrase(phrase.strip(), language) for phrase in line.split(";") if phrase.strip()]
    return list(dict.fromkeys(key for key in keys if is_gold or "<unk>" not in key))


def _score(predicted: list[str], gold: list[str], cuts: tuple[Cut, ...], convention: str) -> dict:
    """One document's row."""
    targets = set(gold)
    matched = [int(key in targets) for key in predicted]
    row: dict = {"matched": matched, "num_preds": len(matched), "num_targets": len(gold)}
    for k in cuts:
        cut = k if isinstance(k, int) else {"k": len(gold), "M": len(matched)}[k]
        correct = sum(matched[:cut])
        slots = cut if convention == "exhird" else min(cut, len(matched))
        precision = correct / slots if slots else 0.0
        recall = correct / len(gold) if gold else 0.0
        row[f"precision@{k}"] = precision
        row[f"recall@{k}"] = recall
        row[f"f1@{k}"] = _f1(precision, recall)
        row[f"correct@{k}"] = correct
    return row


def _average(rows: list[dict], cuts: tuple[Cut, ...], convention: str) -> dict:
    """Averages and sums over the documents' rows."""
    scores = {}
    for k in cuts:
        precision, recall, mean_f1 = (_mean([row[f"{s}@{k}"] for row in rows]) for s in ("precision", "recall", "f1"))
        f1 = None if precision is None or recall is None else _f1(precision, recall)
        scores[f"precision@{k}"] = precision
        scores[f"recall@{k}"] = recall
        scores[f"f1@{k}"] = f1 if convention == "exhird" or f1 is None else _round(f1)
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


def _round(value: float) -> float:
    # scale, then round half to even, as NumPy and SEKE's scorer do; Python's round differs on some ties
    return round(value * 10_000) / 10_000
