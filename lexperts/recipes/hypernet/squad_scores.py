"""Exact match and F1 as in SQuAD's evaluation scripts (Rajpurkar et al. 2016, 2018)."""

import re
import string
from collections import Counter
from collections.abc import Sequence

PUNCTUATION = set(string.punctuation)


def normalise(answer: str) -> str:
    """Lower case, without punctuation, articles and extra spaces."""
    text = "".join(c for c in answer.lower() if c not in PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def f1(predicted: str, gold: str) -> float:
    """F1 of the words of normalised answers; if one of them is empty, 1 if both are and otherwise 0."""
    predicted_words, gold_words = normalise(predicted).split(), normalise(gold).split()
    if not predicted_words or not gold_words:
        return float(predicted_words == gold_words)
    common = sum((Counter(predicted_words) & Counter(gold_words)).values())
    return 2 * common / (len(predicted_words) + len(gold_words))


def squad_scores(predicted: Sequence[str], gold: Sequence[Sequence[str]]) -> dict[str, float]:
    """Exact match and F1 in per cent, over all questions, each against its best gold answer; "" for no answer. With
    unanswerable questions also `NoAns_*`, and `HasAns_*` if there are others. Gold answers that are empty after normalising are
    ignored, as in the script of SQuAD 2.0.

    Raises:
        ValueError: if there are no questions.
    """
    rows = []
    for prediction, answers in zip(predicted, gold, strict=True):
        answers = [answer for answer in answers if normalise(answer)] or [""]
        exact = normalise(prediction) in map(normalise, answers)
        best = max(f1(prediction, answer) for answer in answers)
        rows.append({"exact": exact, "f1": best, "answerable": answers != [""]})
    parts = {"": rows}
    if not all(row["answerable"] for row in rows):
        parts["HasAns_"] = [row for row in rows if row["answerable"]]
        parts["NoAns_"] = [row for row in rows if not row["answerable"]]
    if not rows:
        raise ValueError("There are no questions to score. Pass at least one.")
    return {
        f"{part}{name}": 100 * sum(row[name] for row in of_part) / len(of_part)
        for part, of_part in parts.items()
        if of_part
        for name in ("exact", "f1")
    }
