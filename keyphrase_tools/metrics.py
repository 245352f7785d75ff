"""F1@k of keyphrases under two conventions: SEKE's (Martinc et al. 2025) and ExHiRD's (Chen et al. 2020).

For one document, c right predictions among its first k, n predictions, g gold phrases:

    P@k = c / min(k, n)  (flexible)  or  c / k  (fixed)        R@k = c / g        F1@k = 2 P R / (P + R)

and 0 where a denominator is 0. k is a number, "k" (the document's g) or "M" (all n). P and R are averaged over the
documents; the reported F1 is that of the two averages. Papers differ in everything else, so each difference is a
switch, and a convention is no more than a name for one setting of them:

    switch                    seke          exhird        what it does
    denominator               "flexible"    "fixed"       of P@k: min(k, n), or k however few were predicted
    deduplicate               False         True          phrases of equal stems count once, predicted and gold alike
    documents_without_gold    "drop"        "keep"        left out of the averages, or counted as zeros
    aggregate                 "f1_of_means" "f1_of_means" or "mean_of_f1": the average of the documents' F1
    round_f1                  4             False         decimals of f1@k, False for all; P and R are never rounded
    stem                      True          True          compare Porter stems; False: the words as spelt, case included
    references_stemmed        False         False         True: gold is stems already and compared as it is (SemEval)
    split_phrases             False         True          part phrases at ; / <p_start> <p_end> <a_start> <a_end>
                                                          <absent_end>, delete <eokp> <blank>, drop empty ones
    drop_unknown              False         True          drop predictions that hold <unk>
    max_predictions           None          None          keep the first so many, before all that follows; None: all
    max_one_word_predictions  None          None          keep so many one-word predictions, repeats counted; None: all
"""

import math
import re
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from .stemming import stem as stem_word
from .stemming import stem_phrase

Document = Sequence[str] | str
Cut = int | str

CUTS = (1, 3, 5, 10, "k", "M")
PARTS = ("total", "present", "absent")
EVALUATE_MODULE = str(Path(__file__).resolve().parent / "keyphrase_f1")  # for evaluate.load

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
    """One setting of the switches in the table above; the defaults are SEKE's. Raises ValueError for any other value."""

    denominator: str = "flexible"
    deduplicate: bool = False
    documents_without_gold: str = "drop"
    aggregate: str = "f1_of_means"
    round_f1: int | bool = 4
    stem: bool = True
    references_stemmed: bool = False
    split_phrases: bool = False
    drop_unknown: bool = False
    max_predictions: int | None = None
    max_one_word_predictions: int | None = None

    def __post_init__(self):
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(
                    f"{name}={value!r} is no choice. Use {' or '.join(map(repr, choices))}, "
                    f"or leave {name} out for the convention's own."
                )
        for name, off in (("round_f1", False), ("max_predictions", None), ("max_one_word_predictions", None)):
            value = getattr(self, name)
            if value is not off and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise ValueError(f"{name}={value!r} is no count. Use 0, 1, 2, ..., or {off} to switch it off.")


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
    predictions: Sequence[Document],
    references: Sequence[Document],
    *,
    convention: str = "seke",
    sources: Sequence[str] | None = None,
    k: Cut | Sequence[Cut] = CUTS,
    denominator: str | None = None,
    deduplicate: bool | None = None,
    documents_without_gold: str | None = None,
    aggregate: str | None = None,
    round_f1: int | bool | None = None,
    stem: bool | None = None,
    references_stemmed: bool | None = None,
    split_phrases: bool | None = None,
    drop_unknown: bool | None = None,
    max_predictions: int | None = None,
    max_one_word_predictions: int | None = None,
) -> dict:
    """Score the predicted keyphrases of some documents against their gold keyphrases.

    predictions: one list of phrases per document, best first; where phrases are split (exhird), one string per
        document will do as well, such as "<p_start> neural network ; <a_start> graph cut".
    references: the gold phrases, in the same form.
    convention: "seke" or "exhird".
    sources: one text per document. A phrase is present where its stems stand in a row in the text, whose words are
        parted by white space alone ("network." is not "network"), and absent elsewhere.
    k: cuts, any of 1, 2, ..., "k" (the document's number of gold phrases) and "M" (no cut).
    Every other argument is a switch of the module's table; None is the convention's own value.

    Returns, for each k, precision@k, recall@k and f1@k, mean_f1@k (the mean of the documents' F1, never rounded) and
    correct@k (a count); then sum_preds, sum_targets, avg_num_preds and documents, all over the documents kept. The
    averages are nan where no document is kept. With sources: three such dictionaries, under "total", "present" and
    "absent", where the documents kept or dropped are those with gold phrases of that kind. (SEKE's own scorer does
    not part present from absent; ExHiRD's f1@k is what its logs call std_F1.)

    Raises ValueError where lengths differ or a convention, a cut or a switch is unknown, and TypeError where a
    document is no list of strings.

    >>> scores = keyphrase_f1([["neural networks"]], [["neural network", "graph cut"]], k=5)
    >>> scores["precision@5"], scores["recall@5"], scores["f1@5"]
    (1.0, 0.5, 0.6667)
    """
    rules = _rules(
        convention,
        denominator=denominator,
        deduplicate=deduplicate,
        documents_without_gold=documents_without_gold,
        aggregate=aggregate,
        round_f1=round_f1,
        stem=stem,
        references_stemmed=references_stemmed,
        split_phrases=split_phrases,
        drop_unknown=drop_unknown,
        max_predictions=max_predictions,
        max_one_word_predictions=max_one_word_predictions,
    )
    cuts = _cuts(k)
    rows = _score_documents(predictions, references, sources, cuts, rules)
    if sources is None:
        return _average(rows["total"], cuts, rules)
    return {part: _average(rows[part], cuts, rules) for part in PARTS}


def keyphrase_f1_by_document(
    predictions: Sequence[Document],
    references: Sequence[Document],
    *,
    convention: str = "seke",
    sources: Sequence[str] | None = None,
    k: Cut | Sequence[Cut] = CUTS,
    **switches,
) -> list[dict] | dict[str, list[dict]]:
    """What keyphrase_f1 averages: one dictionary per document, those without gold included. Arguments, errors: there.

    Each holds matched (1 or 0 for each prediction that was scored, in order), num_preds, num_targets and, for each k,
    precision@k, recall@k, f1@k and correct@k. With sources: three such lists, under "total", "present" and "absent".
    """
    rules = _rules(convention, **switches)
    rows = _score_documents(predictions, references, sources, _cuts(k), rules)
    return rows["total"] if sources is None else rows


def _rules(convention: str, **switches) -> Convention:
    if convention not in CONVENTIONS:
        known = " or ".join(f"convention={name!r}" for name in CONVENTIONS)
        raise ValueError(f"convention={convention!r} is not known: a score means nothing without one. Use {known}.")
    known = [field.name for field in fields(Convention)]
    for name in switches:
        if name not in known:
            raise TypeError(f"{name}= is no switch of the scorer. Use any of {', '.join(known)}.")
    return replace(CONVENTIONS[convention], **{name: value for name, value in switches.items() if value is not None})


def _cuts(k: Cut | Sequence[Cut]) -> tuple[Cut, ...]:
    cuts = tuple(k) if isinstance(k, Iterable) and not isinstance(k, str) else (k,)
    for cut in cuts:
        if cut not in ("k", "M") and (isinstance(cut, bool) or not isinstance(cut, int) or cut < 1):
            raise ValueError(
                f"k={cut!r} is no cut: it says how many predictions count. "
                'Use 1, 2, ..., "k" (as many as the document has gold phrases) or "M" (all).'
            )
    return cuts


def _score_documents(
    predictions: Sequence[Document],
    references: Sequence[Document],
    sources: Sequence[str] | None,
    cuts: tuple[Cut, ...],
    rules: Convention,
) -> dict[str, list[dict]]:
    """-> {"total": one row per document}, and with sources "present" and "absent" too."""
    _check_lengths(predictions, references, sources)
    rows = {part: [] for part in (PARTS[:1] if sources is None else PARTS)}
    texts = [None] * len(predictions) if sources is None else sources
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
                f"{name}={_short.repr(documents)} is one string, which would be read letter by letter. "
                f"Use {name}=[...] with one entry per document."
            )
    if len({len(documents) for documents in named.values()}) > 1:
        counts = ", ".join(f"{len(documents)} {name}" for name, documents in named.items())
        raise ValueError(
            f"{counts}: each takes one entry per document. For a single document use [[phrase, ...]], "
            "and [] for a document without phrases."
        )


def _phrases(document: Document, where: str, rules: Convention) -> list[str]:
    """One document's phrases, split where the convention splits."""
    if isinstance(document, str):
        if not rules.split_phrases:
            raise TypeError(
                f"{where}={_short.repr(document)} is a string, where a document's list of phrases is meant. "
                f"Use [[{_short.repr(document)}, ...], ...], one list per document, or split_phrases=True "
                'for lines such as "phrase ; phrase".'
            )
        document = [document]
    if not isinstance(document, Iterable) or isinstance(document, dict):
        raise TypeError(
            f"{where}={_short.repr(document)} is no list of phrases. Use a list of strings, [] where there are none."
        )
    document = list(document)
    for j, phrase in enumerate(document):
        if not isinstance(phrase, str):
            raise TypeError(
                f"{where}[{j}]={_short.repr(phrase)} is no string, and phrases are compared as strings. "
                'Use "neural network" for a phrase: join its words by spaces, leave its score out.'
            )
    if not rules.split_phrases:
        return document
    line = _FILLER.sub("", _SEPARATOR.sub(";", ";".join(document)))
    return [phrase.strip() for phrase in line.split(";") if phrase.strip()]


def _predicted_keys(phrases: list[str], rules: Convention) -> list[str]:
    """Predictions in the form in which they are compared; the order of the steps is the reference's."""
    keys = [stem_phrase(p) if rules.stem else p.strip() for p in phrases[: rules.max_predictions]]
    if rules.drop_unknown:
        keys = [key for key in keys if "<unk>" not in key]
    if rules.max_one_word_predictions is not None:
        one_word = [i for i, key in enumerate(keys) if len(key.split()) == 1]
        surplus = set(one_word[rules.max_one_word_predictions :])
        keys = [key for i, key in enumerate(keys) if i not in surplus]
    return list(dict.fromkeys(keys)) if rules.deduplicate else keys


def _gold_keys(phrases: list[str], rules: Convention) -> list[str]:
    """Gold phrases in the form in which they are compared."""
    as_spelt = rules.references_stemmed or not rules.stem
    keys = [p.strip() if as_spelt else stem_phrase(p) for p in phrases]
    return list(dict.fromkeys(keys)) if rules.deduplicate else keys


def _text(source: str, where: str, rules: Convention) -> str:
    """A source's words (or stems) with a space on either side of each, so that `in` finds whole words only."""
    if not isinstance(source, str):
        raise TypeError(
            f'{where}={_short.repr(source)} is no string, and a source is a text. Use " ".join(words) for its words.'
        )
    words = source.split()
    return f" {' '.join(map(stem_word, words) if rules.stem else words)} "


def _score(predicted: list[str], gold: list[str], cuts: tuple[Cut, ...], rules: Convention) -> dict:
    """One document's row."""
    targets = set(gold)
    matched = [int(key in targets) for key in predicted]
    row = {"matched": matched, "num_preds": len(matched), "num_targets": len(gold)}
    for k in cuts:
        cut = {"k": len(gold), "M": len(matched)}.get(k, k)
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
    """The documents' rows -> the convention's averages and sums."""
    if rules.documents_without_gold == "drop":
        rows = [row for row in rows if row["num_targets"]]
    scores = {}
    for k in cuts:
        precision, recall, mean_f1 = (_mean([row[f"{s}@{k}"] for row in rows]) for s in ("precision", "recall", "f1"))
        f1 = _f1(precision, recall) if rules.aggregate == "f1_of_means" else mean_f1
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


def _mean(values: list[float]) -> float:
    # fsum: the same to the last bit in whatever order the documents come
    return math.fsum(values) / len(values) if values else math.nan


def _round(value: float, decimals: int | bool) -> float:
    # scaled, then half to even: as NumPy rounds, and SEKE's scorer with it; Python's round differs on some ties
    if decimals is False or math.isnan(value):
        return value
    return round(value * 10**decimals) / 10**decimals
