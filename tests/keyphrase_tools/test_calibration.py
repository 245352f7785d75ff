"""Calibration: the error by its formula, recovery of a known temperature, and the temperature in a pipeline."""

import numpy as np
import pytest
from transformers import pipeline

from keyphrase_tools.calibration import (
    calibrate,
    calibration_error,
    describe_scores,
    expected_calibration_error,
    fit_temperature,
    match_to_gold,
    reliability,
)
from lexperts_lite.decoding import apply_temperature

from .known_answers import names

TEXTS = ["Graph cuts solve energy problems.", "Deep networks learn the cuts of a graph."]
KEYPHRASES = [["graph cuts", "energy problems"], ["deep networks"]]  # one of them is extracted
RANKER = {"bias": -1.0, "gold": 1.0, "labels": 0.9, "more_words": 0.6}


@pytest.fixture
def extract(tiny_seke, tiny_tokenizer):
    return pipeline("keyphrase-extraction", model=tiny_seke("bert", keyphrase_threshold=0.3), tokenizer=tiny_tokenizer)


def test_the_error_is_the_formula():
    scores, right = [0.95, 0.91, 0.55, 0.58, 0.52, 1.0, 0.0], [1, 0, 1, 0, 0, 1, 0]
    expected = (3 * abs((0.95 + 0.91 + 1) / 3 - 2 / 3) + 3 * abs((0.55 + 0.58 + 0.52) / 3 - 1 / 3) + 0) / 7
    assert expected_calibration_error(scores, right) == pytest.approx(expected)
    bins = reliability(scores, right)
    assert [row["phrases"] for row in bins] == [1, 3, 3]
    assert sum(row["phrases"] * abs(row["score"] - row["share"]) for row in bins) / 7 == pytest.approx(expected)


@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
def test_the_temperature_that_was_put_in_is_found(temperature):
    generator = np.random.default_rng(0)
    p = generator.uniform(0.02, 0.98, 60_000)
    right = generator.random(60_000) < p
    scores = apply_temperature(p, 1 / temperature)  # as sure as 1/T says
    assert (np.diff(scores[np.argsort(p)]) >= 0).all() and apply_temperature(np.array(0.5), temperature) == 0.5
    found = fit_temperature(scores, right)
    assert found == pytest.approx(temperature, rel=0.03)
    assert expected_calibration_error(apply_temperature(scores, found), right) < 0.01


@pytest.mark.parametrize("call, args, message", [
    (fit_temperature, ([0.3, 0.2, 0.4, 0.1], [0, 0, 0, 0]), "0 of 4"),  # a model that has learnt nothing
    (fit_temperature, ([0.9, 0.8], [1, 1]), "2 of 2"),
    (fit_temperature, ([0.9, 0.8, 0.3, 0.2], [1, 1, 0, 0]), r"temperature=0\.05"),  # T = 0.05 would be sold as an error of 0.0
    (fit_temperature, ([0.9, 0.2, 0.9, 0.2], [0, 1, 1, 0]), "temperature=20"),
    (fit_temperature, ([], []), "no scores"), (expected_calibration_error, ([0.5, 1.5], [True, False]), "score=1.5"),
    (describe_scores, ([0.5, float("nan")], [True, True]), "score=nan"),
])  # fmt: skip
def test_what_cannot_be_fitted_or_measured_is_named(call, args, message):
    with pytest.raises(ValueError, match=message):
        call(*args)


def test_a_refused_temperature_leaves_none_behind(extract):
    extract.model.config.keyphrase_temperature = 2.0
    with pytest.raises(ValueError, match="no temperature fits"):
        calibrate(extract, TEXTS, [["solve"], []], top_k=None)
    assert extract.model.config.keyphrase_temperature is None


def test_phrases_are_right_by_their_stems_and_absent_candidates_have_no_score():
    phrases = [[{"keyphrase": n, "score": s} for n, s in (("Graph-Cuts", 0.9), ("network", 0.2), ("tree", None))], []]
    assert match_to_gold(phrases, [["graph cut", "tree"], ["tree"]]) == ([0.9, 0.2], [True, False])


@pytest.mark.parametrize("ranker", [None, RANKER], ids=["labels", "ranker"])
def test_the_pipeline_uses_the_temperature_that_is_found_and_saves_it(extract, tmp_path, ranker):
    extract.model.config.keyphrase_ranker = ranker
    extract = pipeline("keyphrase-extraction", model=extract.model, tokenizer=extract.tokenizer)
    options = {"min_score": 0.0, "top_k": None}
    before, by_itself, by_labels = extract(TEXTS, **options), extract(TEXTS), extract(TEXTS, threshold=0.3)
    T = calibrate(extract, TEXTS, KEYPHRASES, **options)
    scores, right = match_to_gold(before, KEYPHRASES)
    assert T == extract.model.config.keyphrase_temperature == pytest.approx(fit_temperature(scores, right), rel=1e-3)
    assert abs(T - 1) > 0.1 and calibrate(extract, TEXTS, KEYPHRASES, **options) == T  # from scratch, not on top of it
    extract.save_pretrained(tmp_path)
    saved = pipeline("keyphrase-extraction", model=str(tmp_path))
    after, found = saved(TEXTS, **options), calibration_error(extract, TEXTS, KEYPHRASES, **options)
    assert found["before"] == pytest.approx(expected_calibration_error(scores, right))
    assert found["after"] == expected_calibration_error(*match_to_gold(after, KEYPHRASES)) != found["before"]
    assert (found["phrases"], found["temperature"]) == (len(right), T)
    assert extract.model.config.keyphrase_temperature == T
    for one, two in zip(before, after, strict=True):
        assert names(one) == names(two)
        tempered = apply_temperature(np.array([phrase["score"] for phrase in one]), T)
        assert [phrase["score"] for phrase in two] == pytest.approx(tempered, abs=1e-5)
    assert [len(phrases) for phrases in saved(TEXTS)] == [len(phrases) for phrases in by_itself]
    if ranker:  # scores of labels have no temperature
        assert saved(TEXTS, threshold=0.3) == by_labels
        for other in ({"threshold": 0.3}, {"candidates": ["graph cuts"]}):
            with pytest.raises(ValueError, match="ranker"):
                calibrate(extract, TEXTS, KEYPHRASES, **other)


@pytest.mark.parametrize("field", ["keyphrase_temperature", "keyphrase_threshold"])
@pytest.mark.parametrize("value", [float("nan"), -1, 0, "1"])
def test_a_field_that_was_set_after_loading_is_checked(extract, monkeypatch, field, value):
    """A configuration without validation, as of a stock model, accepts any value."""
    monkeypatch.setitem(vars(extract.model.config), field, value)
    with pytest.raises(ValueError, match=field):
        extract(TEXTS)


def test_scores_are_described_with_those_above_seven_tenths():
    row = describe_scores([0.9, 0.75, 0.7, 0.1], [True, False, True, False])
    assert (row["phrases"], row["confident"], row["confident_right"], row["right"]) == (4, 2, 0.5, 0.5)
    assert row["mean_score"] == pytest.approx(0.6125)
    assert row["calibration_error"] == pytest.approx((0.1 + abs(1.45 - 1) + 0.1) / 4)
    assert describe_scores([], [])["calibration_error"] is None
    assert describe_scores([0.2], [True])["confident_right"] is None
