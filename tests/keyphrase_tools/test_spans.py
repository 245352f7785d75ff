"""Scores of spans: computed by hand, and from the Trainer's logits over whole documents."""

import doctest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import EvalPrediction

from keyphrase_tools.evaluation import ExtractionMetrics, span_scores
from keyphrase_tools.labels import tag_words
from lexperts_lite.words import split_words

ID2LABEL = {0: "O", 1: "B", 2: "I"}
TEXTS = ["Graph cuts for semi-supervised learning, and graph networks", "of networks " * 60 + "energy"]
KEYPHRASES = [["graph cut", "semi-supervised learning", "graph network"], ["networks", "energy", "absent"]]


def test_the_docstrings_example_holds():
    (example,) = doctest.DocTestFinder().find(span_scores, "span_scores", globs={"span_scores": span_scores})
    assert doctest.DocTestRunner().run(example) == doctest.TestResults(0, 1)


def chunks(tags):
    """conlleval's rule, word by word: a chunk ends before a B or an O, and begins at a B or an I with no chunk open."""
    found, open_at = set(), None
    for i, label in enumerate(tags):
        if open_at is not None and label != 2:
            found.add((open_at, i))
            open_at = None
        if label and open_at is None:
            open_at = i
    return found | ({(open_at, len(tags))} if open_at is not None else set())


labels = st.lists(st.integers(0, 2), max_size=12)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(labels, st.randoms(use_true_random=False)), max_size=4))
def test_spans_are_counted_as_conlleval_does(documents):
    gold = [tags for tags, _ in documents]
    predicted = [[random.choice((tag, tag, 0, 1, 2)) for tag in tags] for tags, random in documents]
    right = sum(len(chunks(p) & chunks(g)) for p, g in zip(predicted, gold, strict=True))
    found, wanted = sum(len(chunks(p)) for p in predicted), sum(len(chunks(g)) for g in gold)
    scores = span_scores(predicted, gold)
    expected = right / found if found else 0, right / wanted if wanted else 0, 2 * right / ((found + wanted) or 1)
    assert (scores["precision"], scores["recall"], scores["f1"]) == pytest.approx(expected)


def test_documents_that_do_not_match_are_refused():
    with pytest.raises(ValueError, match="Document 1 has 2 .* 1 gold"):
        span_scores([[0], [0, 1]], [[0], [0]])
    with pytest.raises(ValueError, match="shorter"):
        span_scores([[0], [0]], [[0]])


def of_words(metrics, labels, special):
    """Arrays (windows, S) with the labels of the words that begin, by document, and `special` elsewhere."""
    rows = np.full((len(metrics.rows["labels"]), max(map(len, metrics.rows["labels"]))), special)
    for row, window in zip(rows, metrics._windows, strict=True):
        for place, word in enumerate(window.word_starts):
            row[place] = labels[window.document][word] if word >= 0 else special
    return rows


def logits_for(metrics, labels):
    """Logits (windows, S, 3) whose most likely label of each word is `labels` of its document."""
    return 9.0 * np.eye(3)[of_words(metrics, labels, 0)]


@pytest.mark.parametrize("rules", ["lexperts", "seke"])
def test_the_trainers_logits_are_scored_against_the_labels_of_whole_documents(tiny_tokenizer, rules):
    options = {"rules": rules, "thresholds": (None,), "spans": True}
    metrics = ExtractionMetrics(TEXTS, KEYPHRASES, tiny_tokenizer, ID2LABEL, **options)
    gold = [tag_words(split_words(text), k, rules=rules) for text, k in zip(TEXTS, KEYPHRASES, strict=True)]
    scores = metrics(EvalPrediction(logits_for(metrics, gold), None))
    assert scores["span_precision"] == scores["span_recall"] == scores["span_f1"] == 1
    if rules == "lexperts":  # the ceiling of the way from keyphrases to labels to keyphrases
        assert scores["precision@10"] == scores["recall@10"] == scores["f1@10"] == 1
    wrong = [[0] * len(gold[0]), gold[1]]
    scores = metrics(EvalPrediction(logits_for(metrics, wrong), None))
    first, second = (sum(label == 1 for label in tags) for tags in gold)
    assert scores["span_precision"] == 1 and scores["span_recall"] == pytest.approx(second / (first + second))
    without = ExtractionMetrics(TEXTS, KEYPHRASES, tiny_tokenizer, ID2LABEL, **{**options, "spans": False})
    plain = without(EvalPrediction(logits_for(metrics, wrong), None))
    assert plain == {name: value for name, value in scores.items() if not name.startswith("span_")}


def test_the_spans_are_those_of_the_threshold_that_is_reported(tiny_tokenizer):
    def scores(*thresholds):
        options = {"thresholds": thresholds, "spans": True}
        return ExtractionMetrics(["graph cuts"], [["graph", "cuts"]], tiny_tokenizer, ID2LABEL, **options)(prediction)

    logits = np.log([[[0.98, 0.01, 0.01], [0.6, 0.39, 0.01], [0.05, 0.94, 0.01], [0.98, 0.01, 0.01]]])
    prediction = EvalPrediction(logits, None)
    assert (scores(0.9, 0.3)["threshold"], scores(0.9, 0.3)["span_f1"]) == (0.3, 1)
    assert scores(0.9)["span_recall"] == 0.5


def test_paths_decide_where_no_threshold_does(tiny_tokenizer):
    """Logits say O everywhere, and the paths beside them the gold labels: a CRF's most likely path."""
    makers = [
        ExtractionMetrics(TEXTS, KEYPHRASES, tiny_tokenizer, ID2LABEL, thresholds=thresholds, spans=True)
        for thresholds in ((None,), (0.5,), (0.5, None))
    ]
    by_path, by_threshold, both = makers
    gold = [tag_words(split_words(text), k) for text, k in zip(TEXTS, KEYPHRASES, strict=True)]
    silent = logits_for(by_path, [[0] * len(tags) for tags in gold])
    paths = of_words(by_path, gold, -1)
    assert by_path(EvalPrediction(silent, None))["span_f1"] == 0
    scores = by_path(EvalPrediction((silent, paths), None))
    assert scores["span_f1"] == 1 and scores["recall@10"] == 1
    assert by_threshold(EvalPrediction((silent, paths), None))["span_f1"] == 0
    scores = both(EvalPrediction((silent, paths), None))  # the better of the two
    assert scores["span_f1"] == 1 and "threshold" not in scores
    scores = both(EvalPrediction((logits_for(by_path, gold), np.where(paths < 0, -1, 0)), None))
    assert scores["span_f1"] == 1 and scores["threshold"] == 0.5
