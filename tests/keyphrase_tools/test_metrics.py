"""Both scoring conventions against numbers from the two public scorers (tests/vectors/keyphrase_eval.json)."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from keyphrase_tools import metrics
from keyphrase_tools.metrics import CONVENTIONS, PARTS, keyphrase_f1, keyphrase_f1_by_document
from keyphrase_tools.words import stem_phrase

ROOT = Path(__file__).parents[2]
VECTORS = json.loads((ROOT / "tests/vectors/keyphrase_eval.json").read_text())["vectors"]


def vectors_of(convention):
    chosen = [vector for vector in VECTORS if vector["convention"] == convention]
    return pytest.mark.parametrize("vector", chosen, ids=[vector["id"].split("/")[1] for vector in chosen])


def same(found, expected):
    if found is None or expected is None:
        return found is expected
    return math.isclose(found, expected, rel_tol=1e-12, abs_tol=1e-12)


def exhird_arguments(vector):
    """The reference's options in our words."""
    options = dict(vector["options"])
    switches = {}
    if "semeval" in options.pop("tgt_name", ""):
        switches["references_stemmed"] = True
    if "single_word_maxnum" in options:
        switches["max_one_word_predictions"] = options.pop("single_word_maxnum")
    if "do_stem" in options:
        switches["stem"] = options.pop("do_stem")
    assert not options
    predictions = vector["pred_lines"] or vector["preds"]
    references = vector["gold_lines"] or vector["golds"]
    return (predictions, references), dict(convention="exhird", sources=vector["src"], k=(5, 10, "M"), **switches)


def seke_arguments(vector):
    keep = not vector["options"]["remove_docs_with_no_kw"]
    switches = {"documents_without_gold": "keep"} if keep else {}
    return (vector["preds"], vector["golds"]), dict(convention="seke", **switches)


# ---- every vector, every number


def test_the_vectors_are_all_there():
    counts = {name: sum(v["convention"] == name for v in VECTORS) for name in ("exhird", "seke_eval")}
    assert counts == {"exhird": 22, "seke_eval": 18}


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
    arguments, switches = seke_arguments(vector)
    expected = dict(vector["expected"])
    expected.pop("per_doc")
    if not expected["docs_evaluated"]:  # the reference's averages are nan
        with pytest.raises(ValueError, match="None of the"):
            keyphrase_f1(*arguments, **switches)
        return
    scores = keyphrase_f1(*arguments, **switches)
    assert scores["documents"] == expected.pop("docs_evaluated")
    assert len(vector["preds"]) - scores["documents"] == expected.pop("docs_removed")
    assert len(expected) == 18
    for name, value in expected.items():
        score, k = name.split("_")
        name = {"p": "precision", "r": "recall", "f": "f1"}[score] + "@" + k
        assert same(scores[name], value), name


@vectors_of("seke_eval")
def test_seke_gives_the_reference_scorers_numbers_for_each_document(vector):
    arguments, switches = seke_arguments(vector)
    flexible = keyphrase_f1_by_document(*arguments, **switches)
    fixed = keyphrase_f1_by_document(*arguments, **switches, denominator="fixed")
    for soft, hard, numbers in zip(flexible, fixed, vector["expected"]["per_doc"], strict=True):
        assert soft["matched"] == numbers["match"]
        for k in (5, 10, "M"):
            assert same(soft[f"correct@{k}"], numbers[f"correct@{k}"])
            assert same(soft[f"precision@{k}"], numbers[f"precision@{k}"])
            assert same(soft[f"recall@{k}"], numbers[f"recall@{k}"])
            assert same(soft[f"f1@{k}"], numbers[f"f_score@{k}"])
            assert same(hard[f"precision@{k}"], numbers[f"precision_hard@{k}"])
            assert same(hard[f"f1@{k}"], numbers[f"f_score_hard@{k}"])


# ---- where the two differ, row by row


def both(predictions, references, k=5):
    return [keyphrase_f1(predictions, references, convention=name, k=k) for name in ("exhird", "seke")]


def test_two_right_of_two_predicted_are_perfect_for_seke_only():
    exhird, seke = both([["neural network", "graph cut"]], [["neural network", "graph cut"]])
    assert (exhird["precision@5"], exhird["recall@5"], round(exhird["f1@5"], 4)) == (0.4, 1.0, 0.5714)
    assert (seke["precision@5"], seke["recall@5"], seke["f1@5"]) == (1.0, 1.0, 1.0)


TWO_DOCUMENTS = [["a"], ["e", "x", "y", "z"]], [["a", "b", "c", "d"], ["e"]]


def test_f1_of_the_averages_is_not_the_average_f1():
    exhird, seke = both(*TWO_DOCUMENTS)
    assert (exhird["precision@5"], exhird["recall@5"]) == (0.2, 0.625)
    assert (round(exhird["f1@5"], 4), round(exhird["mean_f1@5"], 4)) == (0.3030, 0.2778)
    assert (seke["precision@5"], seke["recall@5"], seke["f1@5"]) == (0.625, 0.625, 0.625)


def test_the_mean_of_f1_is_a_switch_away_from_either_convention():
    flexible = keyphrase_f1(*TWO_DOCUMENTS, convention="seke", aggregate="mean_of_f1", k=5)
    fixed = keyphrase_f1(*TWO_DOCUMENTS, convention="exhird", aggregate="mean_of_f1", k=5)
    assert same(flexible["f1@5"], 0.4)
    assert same(fixed["f1@5"], 5 / 18) and fixed["f1@5"] == fixed["mean_f1@5"]


def test_a_document_without_gold_counts_as_zero_for_exhird_and_is_dropped_by_seke():
    exhird, seke = both([["a"], ["a"]], [[], ["a"]], k=(5, "M"))
    assert (exhird["precision@5"], exhird["recall@5"], round(exhird["f1@5"], 4)) == (0.1, 0.5, 0.1667)
    assert (exhird["f1@M"], exhird["documents"]) == (0.5, 2)
    assert (seke["f1@5"], seke["documents"]) == (1.0, 1)


def test_three_forms_of_one_phrase_are_one_prediction_for_exhird_and_recall_3_for_seke():
    exhird, seke = both([["neural network", "neural networks", "Neural Networks"]], [["neural network"]])
    assert (exhird["sum_preds"], round(exhird["f1@5"], 4)) == (1, 0.3333)
    assert (seke["precision@5"], seke["recall@5"], seke["f1@5"]) == (1.0, 3.0, 1.5)


def test_gold_in_two_forms_is_one_gold_phrase_for_exhird_and_two_for_seke():
    exhird, seke = both([["neural network"]], [["neural network", "neural networks", "deep models"]])
    assert (exhird["recall@5"], round(exhird["f1@5"], 4)) == (1 / 2, 0.2857)
    assert (seke["recall@5"], seke["f1@5"]) == (1 / 3, 0.5)


def test_only_the_first_five_count_at_5():
    predictions, references = [["a", "v", "w", "x", "y", "b", "c", "z"]], [["a", "b", "c"]]
    exhird, seke = both(predictions, references)
    assert same(exhird["f1@5"], 0.25) and seke["f1@5"] == 0.25
    # negative control: another order, another score
    exhird, seke = both([predictions[0][::-1]], references)
    assert same(exhird["f1@5"], 0.5) and seke["f1@5"] == 0.5


# ---- what the reference does where the table is silent


def test_exhird_precision_at_5_always_divides_by_five():
    scores = keyphrase_f1([["a"]], [["a"]], convention="exhird", k=5)
    assert scores["precision@5"] == 0.2
    padded = keyphrase_f1([["a", "v", "w", "x", "y"]], [["a"]], convention="exhird", k=5)
    assert padded["precision@5"] == 0.2
    # negative control
    assert keyphrase_f1([["a"]], [["a"]], convention="seke", k=5)["precision@5"] == 1.0


def test_exhird_counts_a_repeated_one_word_prediction_against_the_limit():
    predictions = [["deep", "deep", "graph", "neural network"]]
    limited = keyphrase_f1_by_document(predictions, [["graph"]], convention="exhird", max_one_word_predictions=2)
    assert limited[0]["matched"] == [0, 0]  # deep, neural network
    unlimited = keyphrase_f1_by_document(predictions, [["graph"]], convention="exhird")
    assert unlimited[0]["matched"] == [0, 1, 0]


def test_exhird_cuts_before_it_drops_repeats():
    predictions = [["deep model", "deep models", "graph cut"]]
    cut = keyphrase_f1_by_document(predictions, [["graph cut"]], convention="exhird", max_predictions=2)
    assert cut[0]["matched"] == [0]
    assert keyphrase_f1_by_document(predictions, [["graph cut"]], convention="exhird")[0]["matched"] == [0, 1]


def test_exhird_keeps_a_gold_phrase_with_unk_and_a_prediction_with_a_full_stop():
    scores = keyphrase_f1([["a <unk>", "e.g."]], [["a <unk>"]], convention="exhird", k="M")
    assert (scores["sum_preds"], scores["sum_targets"]) == (1, 1)
    assert keyphrase_f1([["a <unk>", "e.g."]], [["a <unk>"]], convention="exhird", drop_unknown=False)["sum_preds"] == 2


def test_exhird_splits_a_line_as_it_splits_its_phrases():
    line = "<p_start> neural network <p_end> ; <eokp> deep/models ;; <absent_end> ; <a_start> graph cut <a_end> <blank>"
    phrases = ["neural network", "deep", "models", "graph cut"]
    as_line = keyphrase_f1_by_document([line], [["graph cut"]], convention="exhird")
    assert as_line == keyphrase_f1_by_document([phrases], [["graph cut"]], convention="exhird")
    assert as_line[0]["matched"] == [0, 0, 0, 1]
    as_list = keyphrase_f1_by_document([line.split(";")], ["graph cut ;"], convention="exhird")
    assert as_list == as_line


def test_seke_leaves_separators_inside_a_phrase():
    assert keyphrase_f1([["c/c++"]], [["c", "c++"]], convention="seke", k="M")["f1@M"] == 0
    assert keyphrase_f1([["c/c++"]], [["c", "c++"]], convention="seke", split_phrases=True, k="M")["f1@M"] == 1


def test_without_stems_case_and_ending_count():
    assert keyphrase_f1([["Graph"]], [["graph"]], stem=False, k="M")["f1@M"] == 0
    assert keyphrase_f1([["graphs"]], [["graph"]], stem=False, k="M")["f1@M"] == 0
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
    with pytest.raises(ValueError, match="None of the 2 documents"):
        keyphrase_f1([["a"], []], [[], []], convention=convention, documents_without_gold="drop")
    scores = keyphrase_f1([["a"]], [["a"]], convention=convention, sources=["a"], k=5, documents_without_gold="drop")
    assert (scores["total"]["f1@5"] > 0, scores["absent"]["f1@5"], scores["absent"]["documents"]) == (True, None, 0)


def test_phrases_are_compared_by_the_stems_of_the_language():
    arguments = [["Häuser", "Bäume"]], [["Haus", "Baum"]]
    assert keyphrase_f1(*arguments, k="M", language="german")["f1@M"] == 1
    assert keyphrase_f1(*arguments, k="M", language=None)["f1@M"] == keyphrase_f1(*arguments, k="M")["f1@M"] == 0
    assert keyphrase_f1_by_document(*arguments, k="M", language="german")[0]["correct@M"] == 2
    with pytest.raises(ValueError, match="'klingon'"):
        keyphrase_f1(*arguments, language="klingon")


def test_seke_rounds_f1_as_numpy_rounds():
    for ties in range(1, 20_000, 2):
        value = ties / 20_000
        assert metrics._round(value, 4) == float(np.round(np.float64(value), 4))
    # negative control: Python's own rounding differs on some of them
    assert any(round(n / 20_000, 4) != metrics._round(n / 20_000, 4) for n in range(1, 20_000, 2))


def test_precision_and_recall_are_never_rounded():
    scores = keyphrase_f1([["a", "x", "y"]], [["a", "b", "c"]], k="M")
    assert (scores["precision@M"], scores["f1@M"]) == (1 / 3, 0.3333)
    assert keyphrase_f1([["a", "x", "y"]], [["a", "b", "c"]], k="M", round_f1=False)["f1@M"] == 1 / 3


# ---- properties

WORDS = st.sampled_from(["graph", "graphs", "cut", "cuts", "neural", "network", "networks", "Deep", "<unk>", "c++"])
PHRASES = st.lists(WORDS, min_size=1, max_size=3).map(" ".join)
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
    predictions, references, sources = map(list, zip(*documents, strict=True))
    assume(any(references))
    return keyphrase_f1(predictions, references, sources=sources, **arguments)


def equal(left, right):
    return repr(left) == repr(right)  # to the last bit, and nan equals nan


@given(DOCUMENTS, CONVENTION, st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=50)
def test_the_order_of_documents_does_not_matter(documents, convention, random):
    shuffled = list(documents)
    random.shuffle(shuffled)
    assert equal(scored(documents, convention=convention), scored(shuffled, convention=convention))


@given(st.lists(st.lists(PHRASES, min_size=1, max_size=5, unique_by=stem_phrase), min_size=1, max_size=5))
@settings(deadline=None, max_examples=50)
def test_perfect_predictions_give_1(golds):
    seke = keyphrase_f1(golds, golds, convention="seke", k=(5, "k", "M"))
    exhird = keyphrase_f1(golds, golds, convention="exhird", drop_unknown=False, k=("k", "M"))
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
            st.lists(PHRASES, min_size=5, max_size=8, unique_by=stem_phrase),
            st.lists(PHRASES, min_size=1, max_size=5, unique_by=stem_phrase),
        ),
        min_size=1,
        max_size=4,
    )
)
@settings(deadline=None, max_examples=50)
def test_the_conventions_agree_on_five_distinct_predictions_and_gold_everywhere(documents):
    predictions, references = map(list, zip(*documents, strict=True))
    exhird = keyphrase_f1(predictions, references, convention="exhird", k=5, drop_unknown=False)
    seke = keyphrase_f1(predictions, references, convention="seke", k=5)
    assert exhird.pop("f1@5") == pytest.approx(seke.pop("f1@5"), abs=5.1e-5)
    assert exhird == seke


@given(DOCUMENTS, CONVENTION)
@settings(deadline=None, max_examples=50)
def test_one_convention_is_the_other_with_its_switches_set(documents, convention):
    other = vars(CONVENTIONS["seke" if convention == "exhird" else "exhird"])
    other = {name: value for name, value in other.items() if value is not None}
    turned = scored(documents, convention=convention, **other)
    assert equal(turned, scored(documents, convention="seke" if convention == "exhird" else "exhird"))


# ---- errors: the value, the reason, how to fix it


@pytest.mark.parametrize(
    "arguments, switches, text",
    [
        (([["a"]], [["a"], ["b"]]), {}, r"1 predictions, 2 references: .* one entry per document.*\[\[phrase"),
        (([["a"]], [["a"]]), {"sources": ["a", "b"]}, r"1 predictions, 1 references, 2 sources"),
        (([["a"]], [["a"]]), {"convention": "kpg"}, r"'kpg' is not known.*'seke' or convention='exhird'"),
        (([["a"]], [["a"]]), {"k": 0}, r"k=0 must be.*\"k\".*\"M\""),
        (([["a"]], [["a"]]), {"k": (5, "m")}, r"k='m' must be"),
        (([["a"]], [["a"]]), {"k": "10"}, r"k='10' must be"),
        (([["a"]], [["a"]]), {"k": True}, r"k=True must be"),
        (([["a"]], [["a"]]), {"k": 5.0}, r"k=5.0 must be"),
        (([["a"]], [["a"]]), {"denominator": "hard"}, r"denominator='hard' is invalid. Use 'flexible' or 'fixed'"),
        (([["a"]], [["a"]]), {"aggregate": "micro"}, r"aggregate='micro'.*'f1_of_means' or 'mean_of_f1'"),
        (([["a"]], [["a"]]), {"deduplicate": "no"}, r"deduplicate='no' is invalid. Use True or False"),
        (([["a"]], [["a"]]), {"round_f1": True}, r"round_f1=True must be.*False"),
        (([["a"]], [["a"]]), {"max_one_word_predictions": -1}, r"max_one_word_predictions=-1 must be.*None"),
    ],
)
def test_a_wrong_value_is_named_with_its_fix(arguments, switches, text):
    with pytest.raises(ValueError, match=text):
        keyphrase_f1(*arguments, **switches)


@pytest.mark.parametrize(
    "arguments, switches, text",
    [
        ((["graph cut"], [["a"]]), {}, r"predictions\[0\]='graph cut' is a string.*Use \[\['graph cut', ...\], ...\]"),
        (([["a"]], ["graph cut"]), {}, r"references\[0\]='graph cut' is a string.*split_phrases=True"),
        (("graph cut", [["a"]]), {"convention": "exhird"}, r"predictions='graph cut' is one string.*one entry per"),
        (([[["graph", "cut"]]], [["a"]]), {}, r"predictions\[0\]\[0\]=\['graph', 'cut'\] is not a string.*join"),
        (([[{"phrase": "a", "score": 1.0}]], [["a"]]), {}, r"predictions\[0\]\[0\]=\{'phrase'.*leave out its score"),
        (([None], [["a"]]), {}, r"predictions\[0\]=None is not a list of phrases"),
        (([["a"]], [["a"]]), {"sources": [["a", "b"]]}, r"sources\[0\]=\['a', 'b'\] is not a string.*join"),
    ],
)
def test_a_wrong_type_is_named_with_its_fix(arguments, switches, text):
    with pytest.raises(TypeError, match=text):
        keyphrase_f1(*arguments, **switches)


def test_a_switch_that_does_not_exist_is_named():
    with pytest.raises(TypeError, match="'dedup'.*deduplicate"):
        keyphrase_f1_by_document([["a"]], [["a"]], dedup=True)


def test_the_modules_table_is_what_the_conventions_hold():
    table = metrics.__doc__.split("what it does\n")[1]
    held = {
        name: (repr(seke), repr(vars(CONVENTIONS["exhird"])[name])) for name, seke in vars(CONVENTIONS["seke"]).items()
    }
    rows = [line.split() for line in table.replace("'", '"').splitlines() if line.strip()]
    documented = {row[0]: (row[1].replace('"', "'"), row[2].replace('"', "'")) for row in rows if row[0] in held}
    assert documented == held


# ---- the evaluate module

PROGRAM = """
import json, evaluate
from keyphrase_tools.metrics import EVALUATE_MODULE
metric = evaluate.load(EVALUATE_MODULE)
predictions = [["neural networks", "graph cut"], []]
references = [["neural network"], ["deep models"]]
sources = ["a neural network", "deep models"]
out = [
    metric.compute(predictions=predictions, references=references, k=[5]),
    metric.compute(predictions=predictions, references=references, k=[5, "M"], convention="exhird", sources=sources),
    metric.compute(predictions=["a ; b", "c"], references=["a", "c"], k=["M"], convention="exhird", deduplicate=False),
]
metric.add_batch(predictions=predictions, references=references)
out.append(metric.compute(k=[5]))
try:
    metric.compute(predictions=["a"], references=["a"])
except TypeError as error:
    out.append(str(error))
print(json.dumps(out))
"""


def test_evaluate_loads_the_module_from_its_folder_without_a_network(tmp_path):
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"), "1")
    places = {"HF_HOME": str(tmp_path), "HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": str(ROOT)}
    environment = {**os.environ, **offline, **places, "HF_METRICS_CACHE": str(tmp_path / "metrics"), "USE_TORCH": "0"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seke, exhird, lines, in_batches, error = json.loads(done.stdout)

    predictions, references = [["neural networks", "graph cut"], []], [["neural network"], ["deep models"]]
    assert seke == in_batches == keyphrase_f1(predictions, references, k=5)
    sources = ["a neural network", "deep models"]
    assert exhird == keyphrase_f1(predictions, references, k=(5, "M"), convention="exhird", sources=sources)
    assert lines == keyphrase_f1([["a", "b"], ["c"]], [["a"], ["c"]], k="M", convention="exhird", deduplicate=False)
    assert "predictions[0]='a' is a string" in error
    # negative control: the conventions do not agree on these documents
    assert seke["f1@5"] != exhird["total"]["f1@5"]
