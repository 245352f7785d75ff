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


def vectors_of(convention):
    chosen = [vector for vector in VECTORS if vector["convention"] == convention]
    return pytest.mark.parametrize("vector", chosen, ids=[vector["id"].split("/")[1] for vector in chosen])


def same(found, expected):
    if found is None or expected is None:
        return found is expected
    return math.isclose(found, expected, rel_tol=1e-12, abs_tol=1e-12)


def exhird_arguments(vector):
    predictions = vector["pred_lines"] or vector["preds"]
    golds = vector["gold_lines"] or vector["golds"]
    return (predictions, golds), {"convention": "exhird", "sources": vector["src"], "k": (5, 10, "M")}


# ---- every vector, every number


def test_the_vectors_are_all_there():
    counts = {name: sum(v["convention"] == name for v in VECTORS) for name in ("exhird", "seke_eval")}
    assert counts == {"exhird": 19, "seke_eval": 17}


EXHIRD_NAMES = {"macro_p@": "precision@", "macro_r@": "recall@", "std_f1@": "f1@", "n_docs": "documents"}
EXHIRD_ROW_NAMES = {"p@": "precision@", "r@": "recall@", "n_gold": "num_targets", "n_pred": "num_preds"}


def renamed(numbers, names):
    for name, value in numbers.items():
        for old, new in names.items():
            name = new + name.removeprefix(old) if name.startswith(old) else name
        yield name, value


@vectors_of("exhird")
def test_exhird_gives_the_reference_scorers_numbers(vector):
    arguments, switches = exhird_arguments(vector)
    scores = keyphrase_f1(*arguments, **switches)
    assert tuple(scores) == PARTS
    for part, expected in vector["expected"].items():
        expected = {name: value for name, value in expected.items() if name != "per_doc"}
        expected = dict(renamed(expected, EXHIRD_NAMES))
        assert expected.keys() == scores[part].keys()
        for name, value in expected.items():
            assert same(scores[part][name], value), (part, name)


@vectors_of("exhird")
def test_exhird_gives_the_reference_scorers_numbers_for_each_document(vector):
    arguments, switches = exhird_arguments(vector)
    rows = keyphrase_f1_by_document(*arguments, **switches)
    for part, expected in vector["expected"].items():
        assert len(rows[part]) == len(expected["per_doc"])
        for row, numbers in zip(rows[part], expected["per_doc"], strict=True):
            assert row["matched"] == numbers["matched"]
            numbers = dict(numbers)
            del numbers["matched"]
            for name, value in renamed(numbers, EXHIRD_ROW_NAMES):
                assert same(row[name], value), (part, name)


@vectors_of("exhird")
def test_exhird_without_sources_gives_the_total(vector):
    arguments, switches = exhird_arguments(vector)
    total = keyphrase_f1(*arguments, **switches)["total"]
    assert keyphrase_f1(*arguments, **{**switches, "sources": None}) == total


@vectors_of("seke_eval")
def test_seke_gives_the_reference_scorers_numbers(vector):
    arguments, expected = (vector["preds"], vector["golds"]), dict(vector["expected"])
    expected.pop("per_doc")
    if not expected["docs_evaluated"]:  # the reference's averages are nan
        with pytest.raises(ValueError, match="None of the"):
            keyphrase_f1(*arguments)
        return
    scores = keyphrase_f1(*arguments)
    assert scores["documents"] == expected.pop("docs_evaluated")
    assert len(vector["preds"]) - scores["documents"] == expected.pop("docs_removed")
    assert len(expected) == 18
    for name, value in expected.items():
        score, k = name.split("_")
        name = {"p": "precision", "r": "recall", "f": "f1"}[score] + "@" + k
        assert same(scores[name], value), name


@vectors_of("seke_eval")
def test_seke_gives_the_reference_scorers_numbers_for_each_document(vector):
    rows = keyphrase_f1_by_document(vector["preds"], vector["golds"])
    for row, numbers in zip(rows, vector["expected"]["per_doc"], strict=True):
        assert row["matched"] == numbers["match"]
        for k in (5, 10, "M"):
            assert same(row[f"correct@{k}"], numbers[f"correct@{k}"])
            assert same(row[f"precision@{k}"], numbers[f"precision@{k}"])
            assert same(row[f"recall@{k}"], numbers[f"recall@{k}"])
            assert same(row[f"f1@{k}"], numbers[f"f_score@{k}"])


# ---- where the two differ, row by row


F5, P5, R5 = "f1@5", "precision@5", "recall@5"
DIFFER = {  # predictions, gold, and what ExHiRD's convention and SEKE's give
    "two right of two": ([["neural network", "graph cut"]], [["neural network", "graph cut"]], {P5: 0.4, R5: 1, F5: 0.5714}, {P5: 1, R5: 1, F5: 1}),
    "f1 of the averages": ([["a"], ["e", "x", "y", "z"]], [["a", "b", "c", "d"], ["e"]], {P5: 0.2, R5: 0.625, F5: 0.3030, "mean_f1@5": 0.2778}, {P5: 0.625, R5: 0.625, F5: 0.625}),
    "no gold": ([["a"], ["a"]], [[], ["a"]], {P5: 0.1, R5: 0.5, F5: 0.1667, "documents": 2}, {F5: 1, "documents": 1}),
    "three forms of one": ([["neural network", "neural networks", "Neural Networks"]], [["neural network"]], {"sum_preds": 1, F5: 0.3333}, {P5: 1, R5: 3, F5: 1.5}),
    "gold in two forms": ([["neural network"]], [["neural network", "neural networks", "deep models"]], {R5: 0.5, F5: 0.2857}, {R5: 0.3333, F5: 0.5}),
    "only the first five": ([["a", "v", "w", "x", "y", "b", "c", "z"]], [["a", "b", "c"]], {F5: 0.25}, {F5: 0.25}),
    "another order": ([["z", "c", "b", "y", "x", "w", "v", "a"]], [["a", "b", "c"]], {F5: 0.5}, {F5: 0.5}),
    "one of five": ([["a"]], [["a"]], {P5: 0.2}, {P5: 1}),
    "one and four wrong": ([["a", "v", "w", "x", "y"]], [["a"]], {P5: 0.2}, {P5: 0.2}),
    "unknown words and full stops": ([["a <unk>", "e.g."]], [["a <unk>"]], {"sum_preds": 1, "sum_targets": 1}, {"sum_preds": 2}),
    "separators": ([["c/c++"]], [["c", "c++"]], {R5: 1}, {R5: 0}),
}  # fmt: skip


@pytest.mark.parametrize("predictions, golds, exhird, seke", DIFFER.values(), ids=DIFFER)
def test_the_conventions_differ_as_the_docstring_says(predictions, golds, exhird, seke):
    for convention, expected in (("exhird", exhird), ("seke", seke)):
        scores = keyphrase_f1(predictions, golds, convention=convention, k=5)
        assert {name: round(scores[name], 4) for name in expected} == expected


# ---- what the reference does where the table is silent


def test_exhird_splits_a_line_as_it_splits_its_phrases():
    line = "<p_start> neural network <p_end> ; <eokp> deep/models ;; <absent_end> ; <a_start> graph cut <a_end> <blank>"
    phrases = ["neural network", "deep", "models", "graph cut"]
    as_line = keyphrase_f1_by_document([line], [["graph cut"]], convention="exhird")
    assert as_line == keyphrase_f1_by_document([phrases], [["graph cut"]], convention="exhird")
    assert as_line[0]["matched"] == [0, 0, 0, 1]
    as_list = keyphrase_f1_by_document([line.split(";")], ["graph cut ;"], convention="exhird")
    assert as_list == as_line


def test_without_a_language_endings_count():
    assert keyphrase_f1([["graphs"]], [["graph"]], language=None, k="M")["f1@M"] == 0
    assert keyphrase_f1([["Graphs"]], [["graph"]], k="M")["f1@M"] == 1


def test_a_present_phrase_ends_where_words_end():
    scores = keyphrase_f1([["graph cut"]], [["graph cut"]], convention="exhird", sources=["a graph cutter ."], k="M")
    assert (scores["present"]["sum_preds"], scores["absent"]["sum_preds"]) == (0, 1)
    scores = keyphrase_f1([["graph cut"]], [["graph cut"]], convention="exhird", sources=["Graph cuts"], k="M")
    assert (scores["present"]["sum_preds"], scores["absent"]["sum_preds"]) == (1, 0)


def test_seke_with_sources_drops_the_documents_without_gold_of_that_kind():
    scores = keyphrase_f1([["a", "z"], ["b"]], [["a"], ["y"]], sources=["a b", "a b"], k="M")
    assert [scores[part]["documents"] for part in PARTS] == [2, 1, 1]
    assert [scores[part]["recall@M"] for part in PARTS] == [0.5, 1.0, 0.0]


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_nothing_to_average_is_an_error_and_never_nan(convention):
    with pytest.raises(ValueError, match="None of the 0 documents"):
        keyphrase_f1([], [], convention=convention)


def test_a_part_without_gold_has_no_average():
    with pytest.raises(ValueError, match="None of the 2 documents"):
        keyphrase_f1([["a"], []], [[], []])
    scores = keyphrase_f1([["a"]], [["a"]], sources=["a"], k=5)
    assert (scores["total"]["f1@5"] > 0, scores["absent"]["f1@5"], scores["absent"]["documents"]) == (True, None, 0)


def test_phrases_are_compared_by_the_stems_of_the_language():
    arguments = [["Häuser", "Bäume"]], [["Haus", "Baum"]]
    assert keyphrase_f1(*arguments, k="M", language="german")["f1@M"] == 1
    assert keyphrase_f1(*arguments, k="M", language=None)["f1@M"] == keyphrase_f1(*arguments, k="M")["f1@M"] == 0
    assert keyphrase_f1_by_document(*arguments, k="M", language="german")[0]["correct@M"] == 2


def test_seke_rounds_f1_as_numpy_rounds():
    for ties in range(1, 20_000, 2):
        value = ties / 20_000
        assert metrics._round(value) == float(np.round(np.float64(value), 4))
    # negative control: Python's own rounding differs on some of them
    assert any(round(n / 20_000, 4) != metrics._round(n / 20_000) for n in range(1, 20_000, 2))


def test_precision_and_recall_are_never_rounded():
    scores = keyphrase_f1([["a", "x", "y"]], [["a", "b", "c"]], k="M")
    assert (scores["precision@M"], scores["f1@M"]) == (1 / 3, 0.3333)


# ---- properties

WORDS = st.sampled_from(["graph", "graphs", "cut", "cuts", "neural", "network", "networks", "Deep", "<unk>", "c++"])
PHRASES = st.lists(WORDS, min_size=1, max_size=3).map(" ".join)
KNOWN = PHRASES.filter(lambda phrase: "<unk>" not in phrase)
DOCUMENTS = st.lists(
    st.tuples(
        st.lists(PHRASES, max_size=8),
        st.lists(PHRASES, max_size=5),
        st.lists(WORDS, max_size=12).map(" ".join),
    ),
    min_size=1,
    max_size=6,
)
CONVENTION = st.sampled_from(sorted(CONVENTIONS))


def scored(documents, **arguments):
    predictions, golds, sources = map(list, zip(*documents, strict=True))
    assume(any(golds))
    return keyphrase_f1(predictions, golds, sources=sources, **arguments)


def equal(left, right):
    return repr(left) == repr(right)  # to the last bit, and nan equals nan


@given(DOCUMENTS, CONVENTION, st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=50)
def test_the_order_of_documents_does_not_matter(documents, convention, random):
    shuffled = list(documents)
    random.shuffle(shuffled)
    assert equal(scored(documents, convention=convention), scored(shuffled, convention=convention))


@given(st.lists(st.lists(KNOWN, min_size=1, max_size=5, unique_by=stem_phrase), min_size=1, max_size=5))
@settings(deadline=None, max_examples=50)
def test_perfect_predictions_give_1(golds):
    seke = keyphrase_f1(golds, golds, convention="seke", k=(5, "k", "M"))
    exhird = keyphrase_f1(golds, golds, convention="exhird", k=("k", "M"))
    assert seke["f1@5"] == seke["f1@k"] == seke["f1@M"] == exhird["f1@k"] == exhird["f1@M"] == 1.0
    # negative control
    wrong = [["zebra"]] * len(golds)
    assert keyphrase_f1(wrong, golds, convention="seke", k="M")["f1@M"] == 0.0


@given(DOCUMENTS)
@settings(deadline=None, max_examples=50)
def test_exhird_macro_precision_at_5_is_the_correct_count_over_five_times_the_documents(documents):
    for part in scored(documents, convention="exhird", k=5).values():
        assert same(part["precision@5"], part["correct@5"] / (5 * len(documents)))


@given(DOCUMENTS)
@settings(deadline=None, max_examples=50)
def test_present_and_absent_add_up_to_the_total_and_agree_with_a_search_word_by_word(documents):
    scores = scored(documents, convention="exhird", k="M")
    for name in ("sum_preds", "sum_targets", "correct@M"):
        assert scores["total"][name] == scores["present"][name] + scores["absent"][name]
    present = 0
    for _, gold, source in documents:
        words = stem_phrase(source).split()
        spans = {tuple(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)}
        present += len({stem_phrase(phrase) for phrase in gold if tuple(stem_phrase(phrase).split()) in spans})
    assert scores["present"]["sum_targets"] == present


@given(
    st.lists(
        st.tuples(
            st.lists(KNOWN, min_size=5, max_size=8, unique_by=stem_phrase),
            st.lists(KNOWN, min_size=1, max_size=5, unique_by=stem_phrase),
        ),
        min_size=1,
        max_size=4,
    )
)
@settings(deadline=None, max_examples=50)
def test_the_conventions_agree_on_five_distinct_predictions_and_gold_everywhere(documents):
    predictions, golds = map(list, zip(*documents, strict=True))
    exhird = keyphrase_f1(predictions, golds, convention="exhird", k=5)
    seke = keyphrase_f1(predictions, golds, convention="seke", k=5)
    assert exhird.pop("f1@5") == pytest.approx(seke.pop("f1@5"), abs=5.1e-5)
    assert exhird == seke


# ---- errors name the value


@pytest.mark.parametrize(
    "arguments, options, error, name",
    [
        (([["a"]], [["a"], ["b"]]), {}, ValueError, "1 predictions, 2 golds"),
        (([["a"]], [["a"]]), {"sources": ["a", "b"]}, ValueError, "2 sources"),
        (([["a"]], [["a"]]), {"convention": "kpg"}, ValueError, "kpg"),
        (([["a"]], [["a"]]), {"k": (5, "m")}, ValueError, "k='m'"),
        (([["a"]], [["a"]]), {"k": 0}, ValueError, "k=0"),
        (([["a"]], [["a"]]), {"language": "klingon"}, ValueError, "klingon"),
        ((["graph cut"], [["a"]]), {}, TypeError, "predictions.0.='graph cut'"),
        (([None], [["a"]]), {"convention": "exhird"}, TypeError, "predictions.0.=None"),
        (([["a"]], [[{"phrase": "a"}]]), {}, TypeError, "golds.0. has {'phrase'"),
    ],
)
def test_a_wrong_value_is_named(arguments, options, error, name):
    with pytest.raises(error, match=name):
        keyphrase_f1(*arguments, **options)
