"""Both scoring conventions against numbers from the two public scorers (tests/vectors/keyphrase_eval.json)."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from keyphrase_tools import metrics
from keyphrase_tools.metrics import CONVENTIONS, PARTS, keyphrase_f1, keyphrase_f1_by_document
from lexperts_lite.words import stem_phrase

ROOT = Path(__file__).parents[2]
# vectors with options of the public scorers other than those that papers report are left out
DEFAULTS = ({}, {"remove_docs_with_no_kw": True})
VECTORS = json.loads((ROOT / "tests/vectors/keyphrase_eval.json").read_text())["vectors"]
VECTORS = [vector for vector in VECTORS if vector.get("options") in DEFAULTS]


def vectors_of(convention, number):
    chosen = [vector for vector in VECTORS if vector["convention"] == convention]
    assert len(chosen) == number
    return pytest.mark.parametrize("vector", chosen, ids=[vector["id"].split("/")[1] for vector in chosen])


def assert_numbers(row, expected, names):
    """The numbers of a reference scorer, under our names for them; those of its other options are left out."""
    for name, value in expected.items():
        if name in ("per_doc", "docs_removed") or "_hard" in name:
            continue
        for old, new in names.items():
            name = new + name.removeprefix(old) if name.startswith(old) else name
        if value is None or row[name] is None or name == "matched":
            assert row[name] == value, name
        else:
            assert math.isclose(row[name], value, rel_tol=1e-12, abs_tol=1e-12), name


# ---- every vector, every number

EXHIRD_NAMES = {"macro_p@": "precision@", "macro_r@": "recall@", "std_f1@": "f1@", "n_docs": "documents"}
EXHIRD_ROW_NAMES = {"p@": "precision@", "r@": "recall@", "n_gold": "num_targets", "n_pred": "num_preds"}
SEKE_NAMES = {"p_": "precision@", "r_": "recall@", "f_score@": "f1@", "f_": "f1@", "docs_evaluated": "documents", "match": "matched"}  # fmt: skip


@vectors_of("exhird", 19)
def test_exhird_gives_the_numbers_of_the_reference(vector):
    arguments = (vector["pred_lines"] or vector["preds"], vector["gold_lines"] or vector["golds"])
    options = {"convention": "exhird", "sources": vector["src"], "k": (5, 10, "M")}
    scores, rows = keyphrase_f1(*arguments, **options), keyphrase_f1_by_document(*arguments, **options)
    assert tuple(scores) == PARTS and vector["expected"].keys() <= set(PARTS)
    for part, expected in vector["expected"].items():
        assert len(rows[part]) == len(expected["per_doc"]) and len(expected) - 1 == len(scores[part])
        for row, numbers in zip(rows[part], expected["per_doc"], strict=True):
            assert_numbers(row, numbers, EXHIRD_ROW_NAMES)
        assert_numbers(scores[part], expected, EXHIRD_NAMES)
    assert keyphrase_f1(*arguments, **options | {"sources": None}) == scores["total"]


@vectors_of("seke_eval", 17)
def test_seke_gives_the_numbers_of_the_reference(vector):
    arguments, expected = (vector["preds"], vector["golds"]), vector["expected"]
    rows = keyphrase_f1_by_document(*arguments)
    for row, numbers in zip(rows, expected["per_doc"], strict=True):
        assert_numbers(row, numbers, SEKE_NAMES)
    if not expected["docs_evaluated"]:  # the reference's averages are nan
        with pytest.raises(ValueError, match="None of the"):
            keyphrase_f1(*arguments)
        return
    scores = keyphrase_f1(*arguments)
    assert len(rows) - scores["documents"] == expected["docs_removed"]
    assert_numbers(scores, expected, SEKE_NAMES)


# ---- where the two differ, beside the vectors


F5, P5, R5 = "f1@5", "precision@5", "recall@5"
DIFFER = {  # predictions, gold, and what ExHiRD's convention and SEKE's give
    "three forms of one": ([["neural network", "neural networks", "Neural Networks"]], [["neural network"]], {"sum_preds": 1, F5: 0.3333}, {P5: 1, R5: 3, F5: 1.5}),
    "gold in two forms": ([["neural network"]], [["neural network", "neural networks", "deep models"]], {R5: 0.5, F5: 0.2857}, {R5: 0.3333, F5: 0.5}),
    "unknown words and full stops": ([["a <unk>", "e.g."]], [["a <unk>"]], {"sum_preds": 1, "sum_targets": 1}, {"sum_preds": 2}),
    "separators": ([["c/c++"]], [["c", "c++"]], {R5: 1}, {R5: 0}),
}  # fmt: skip


@pytest.mark.parametrize("predictions, golds, exhird, seke", DIFFER.values(), ids=DIFFER)
def test_the_conventions_differ_as_the_docstring_says(predictions, golds, exhird, seke):
    for convention, expected in (("exhird", exhird), ("seke", seke)):
        scores = keyphrase_f1(predictions, golds, convention=convention, k=5)
        assert {name: round(scores[name], 4) for name in expected} == expected


def test_seke_with_sources_drops_the_documents_without_gold_of_that_kind():
    scores = keyphrase_f1([["a", "z"], ["b"]], [["a"], ["y"]], sources=["a b", "a b"], k="M")
    assert [scores[part]["documents"] for part in PARTS] == [2, 1, 1]
    assert [scores[part]["recall@M"] for part in PARTS] == [0.5, 1.0, 0.0]
    scores = keyphrase_f1([["a"]], [["a"]], sources=["a"], k=5)
    assert (scores["total"]["f1@5"] > 0, scores["absent"]["f1@5"], scores["absent"]["documents"]) == (True, None, 0)


def test_phrases_are_compared_by_the_stems_of_the_language():
    arguments = [["Häuser", "Bäume"]], [["Haus", "Baum"]]
    assert keyphrase_f1(*arguments, k="M", language="german")["f1@M"] == 1
    assert keyphrase_f1(*arguments, k="M", language=None)["f1@M"] == keyphrase_f1(*arguments, k="M")["f1@M"] == 0
    assert keyphrase_f1_by_document(*arguments, k="M", language="german")[0]["correct@M"] == 2


def test_seke_rounds_f1_as_numpy_does_and_nothing_else():
    for ties in range(1, 20_000, 2):
        assert metrics._round(ties / 20_000) == float(np.round(np.float64(ties / 20_000), 4))
    # negative control: Python's own rounding differs on some of them
    assert any(round(n / 20_000, 4) != metrics._round(n / 20_000) for n in range(1, 20_000, 2))
    scores = keyphrase_f1([["a", "x", "y"]], [["a", "b", "c"]], k="M")
    assert (scores["precision@M"], scores["f1@M"]) == (1 / 3, 0.3333)


# ---- properties

WORDS = st.sampled_from(["graph", "graphs", "cut", "cuts", "neural", "network", "networks", "Deep", "<unk>", "c++"])
PHRASES = st.lists(WORDS, min_size=1, max_size=3).map(" ".join)
KNOWN = PHRASES.filter(lambda phrase: "<unk>" not in phrase)
SOURCE = st.lists(WORDS, max_size=12).map(" ".join)
DOCUMENT = st.tuples(st.lists(PHRASES, max_size=8), st.lists(PHRASES, max_size=5), SOURCE)


@given(st.lists(DOCUMENT, min_size=1, max_size=6), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=50)
def test_what_holds_for_any_documents(documents, random):
    assume(any(gold for _, gold, _ in documents))
    scores = {}
    for convention in CONVENTIONS:
        for _ in range(2):  # their order does not matter, to the last bit
            predictions, golds, sources = map(list, zip(*documents, strict=True))
            found = keyphrase_f1(predictions, golds, sources=sources, convention=convention, k=(5, "M"))
            assert repr(scores.setdefault(convention, found)) == repr(found)
            documents = random.sample(documents, len(documents))
    scores, present = scores["exhird"], 0
    for part in scores.values():
        assert part["precision@5"] == pytest.approx(part["correct@5"] / (5 * len(documents)))
    for name in ("sum_preds", "sum_targets", "correct@M"):
        assert scores["total"][name] == scores["present"][name] + scores["absent"][name]
    for _, gold, source in documents:  # a phrase is present if a search word by word finds it
        words = stem_phrase(source).split()
        spans = {tuple(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)}
        present += len({stem_phrase(phrase) for phrase in gold if tuple(stem_phrase(phrase).split()) in spans})
    assert scores["present"]["sum_targets"] == present


FIVE = st.lists(KNOWN, min_size=5, max_size=8, unique_by=stem_phrase)
GOLD = st.lists(KNOWN, min_size=1, max_size=5, unique_by=stem_phrase)


@given(st.lists(st.tuples(FIVE, GOLD), min_size=1, max_size=4))
@settings(deadline=None, max_examples=50)
def test_the_conventions_agree_on_five_distinct_predictions_and_gold_everywhere(documents):
    predictions, golds = map(list, zip(*documents, strict=True))
    exhird = keyphrase_f1(predictions, golds, convention="exhird", k=5)
    seke = keyphrase_f1(predictions, golds, convention="seke", k=5)
    assert exhird.pop("f1@5") == pytest.approx(seke.pop("f1@5"), abs=5.1e-5)
    assert exhird == seke
    for convention in CONVENTIONS:  # what is perfect has 1
        assert keyphrase_f1(golds, golds, convention=convention, k=("k", "M"))["f1@M"] == 1


# ---- errors name the value


@pytest.mark.parametrize("arguments, options, error, name", [
    (([["a"]], [["a"], ["b"]]), {}, ValueError, "1 predictions, 2 golds"),
    (([["a"]], [["a"]]), {"sources": ["a", "b"]}, ValueError, "2 sources"),
    (([["a"]], [["a"]]), {"convention": "kpg"}, ValueError, "kpg"), (([["a"]], [["a"]]), {"k": (5, "m")}, ValueError, "k='m'"),
    (([["a"]], [["a"]]), {"k": 0}, ValueError, "k=0"), (([["a"]], [["a"]]), {"language": "klingon"}, ValueError, "klingon"),
    ((["graph cut"], [["a"]]), {}, TypeError, "predictions.0.='graph cut'"),
    (([None], [["a"]]), {"convention": "exhird"}, TypeError, "predictions.0.=None"),
    (([["a"]], [[{"phrase": "a"}]]), {}, TypeError, "golds.0. has {'phrase'"),
    (([], []), {}, ValueError, "None of the 0 documents"), (([["a"], []], [[], []]), {}, ValueError, "None of the 2 documents"),
    (([], []), {"convention": "exhird"}, ValueError, "None of the 0 documents"),
])  # fmt: skip
def test_a_wrong_value_is_named(arguments, options, error, name):
    with pytest.raises(error, match=name):
        keyphrase_f1(*arguments, **options)
