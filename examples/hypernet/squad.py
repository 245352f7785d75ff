"""SQuAD's exact match and F1, as its authors' scripts count them (Rajpurkar et al. 2016, 2018)."""

import re
import string
from collections import Counter
from collections.abc import Sequence

PUNCTUATION = set(string.punctuation)


def normalise(answer: str) -> str:
    """Lower case, without punctuation, articles and surplus spaces."""
    bare = "".join(c for c in answer.lower() if c not in PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def exact(predicted: str, gold: str) -> float:
    return float(normalise(predicted) == normalise(gold))


def f1(predicted: str, gold: str) -> float:
    """Of the words that both have; where either has none, whether both have none."""
    ours, theirs = normalise(predicted).split(), normalise(gold).split()
    if not ours or not theirs:
        return float(ours == theirs)
    common = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * common / (len(ours) + len(theirs))


def squad_scores(predicted: Sequence[str], gold: Sequence[Sequence[str]]) -> dict[str, float]:
    """Answers, "" for none, and each question's gold answers, none for one without -> per cent.

    `exact` and `f1` over all questions, each against its best gold answer; with unanswerable ones among them also over
    those that have an answer and those that have none. As in the second version's script, gold answers of which nothing is
    left by normalising do not count.
    """
    rows = []
    for ours, answers in zip(predicted, gold, strict=True):
        theirs = [answer for answer in answers if normalise(answer)] or [""]
        rows.append((max(exact(ours, a) for a in theirs), max(f1(ours, a) for a in theirs), theirs != [""]))
    parts = {"": rows}
    if not all(row[2] for row in rows):
        parts |= {"HasAns_": [row for row in rows if row[2]], "NoAns_": [row for row in rows if not row[2]]}
    return {
        f"{part}{name}": 100 * sum(row[place] for row in of) / max(len(of), 1)
        for part, of in parts.items()
        for place, name in enumerate(("exact", "f1"))
    }
