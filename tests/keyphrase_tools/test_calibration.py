"""Calibration: the error by its formula, recovery of a known temperature, and the temperature in a pipeline."""

import math

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


def test_the_error_is_the_formula():
    scores, right = [0.95, 0.91, 0.55, 0.58, 0.52, 1.0, 0.0], [1, 0, 1, 0, 0, 1, 0]
    expected = (3 * abs((0.95 + 0.91 + 1) / 3 - 2 / 3) + 3 * abs((0.55 + 0.58 + 0.52) / 3 - 1 / 3) + 0) / 7
    assert expected_calibration_error(scores, right) == pytest.approx(expected)
    bins = reliability(scores, right)
    assert [row["phrases"] for row in bins] == [1, 3, 3]
    assert sum(row["phrases"] * abs(row["score"] - row["share"]) for row in bins) / 7 == pytest.approx(expected)
    assert expected_calibration_error([0.3] * 10, [1] * 3 + [0] * 7) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
def test_the_temperature_that_was_put_in_is_found(temperature):
    generator = np.random.default_rng(0)
    p = generator.uniform(0.02, 0.98, 60_000)
    right = generator.random(60_000) < p
    scores = apply_temperature(p, 1 / temperature)  # as sure as 1/T says
    found = fit_temperature(scores, right)
    assert found == pytest.approx(temperature, rel=0.03)
    assert expected_calibration_error(apply_temperature(scores, found), right) < 0.01
    likelihood = lambda T: np.log(np.where(right, apply_temperature(scores, T), 1 - apply_temperature(scores, T))).sum()  # noqa: E731
    assert all(likelihood(found) >= likelihood(found * factor) for factor in (0.9, 0.99, 1.01, 1.1))


@pytest.mark.parametrize(
    "scores, right, message",
    [
        ([0.3, 0.2, 0.4, 0.1], [0, 0, 0, 0], "0 of 4"),  # a model that has learnt nothing
        ([0.9, 0.8], [1, 1], "2 of 2"),
        ([0.9, 0.8, 0.3, 0.2], [1, 1, 0, 0], r"temperature=0\.05"),  # T = 0.05 would be sold as an error of 0.0
        ([0.9, 0.2, 0.9, 0.2], [0, 1, 1, 0], "temperature=20"),
    ],
)
def test_a_temperature_that_fits_nothing_is_refused(scores, right, message):
    with pytest.raises(ValueError, match=message):
        fit_temperature(scores, right)


def test_a_refused_temperature_leaves_none_behind(extract):
    extract.model.config.keyphrase_temperature = 2.0
    with pytest.raises(ValueError, match="no temperature fits"):
        calibrate(extract, TEXTS, [["solve"], []], top_k=None)
    assert extract.model.config.keyphrase_temperature is None


def test_a_temperature_keeps_the_order():
    p = np.array([0.0, 1e-9, 0.2, 0.5, 0.51, 1.0])
    for T in (0.3, 1.0, 4.0):
        assert (np.diff(apply_temperature(p, T)) >= 0).all() and apply_temperature(np.array(0.5), T) == 0.5
    assert apply_temperature(np.array([0.9]), 2)[0] == pytest.approx(1 / (1 + math.sqrt(1 / 9)))


def test_phrases_are_right_by_their_stems():
    phrases = [[{"keyphrase": "Graph-Cuts", "score": 0.9}, {"keyphrase": "network", "score": 0.2}], []]
    assert match_to_gold(phrases, [["graph cut"], ["tree"]]) == ([0.9, 0.2], [True, False])


@pytest.fixture
def extract(tiny_seke, tiny_tokenizer):
    return pipeline("keyphrase-extraction", model=tiny_seke("bert", keyphrase_threshold=0.3), tokenizer=tiny_tokenizer)


TEXTS = ["Graph cuts solve energy problems.", "Deep networks learn the cuts of a graph."]
KEYPHRASES = [["graph cuts", "energy problems"], ["deep networks"]]  # one of them is extracted


def test_the_pipeline_uses_the_temperature_that_is_found(extract):
    before = extract(TEXTS, top_k=None)
    scores, right = match_to_gold(before, KEYPHRASES)
    T = calibrate(extract, TEXTS, KEYPHRASES, top_k=None)
    assert extract.model.config.keyphrase_temperature == T == pytest.approx(fit_temperature(scores, right), rel=1e-3)
    after = extract(TEXTS, top_k=None)
    for one, two in zip(before, after, strict=True):
        assert [phrase["keyphrase"] for phrase in one] == [phrase["keyphrase"] for phrase in two]
        for p, q in zip(one, two, strict=True):
            assert q["score"] == pytest.approx(float(apply_temperature(np.array(p["score"]), T)), abs=1e-5)
            assert q["score"] == max(mention["score"] for mention in q["mentions"])
    found = calibration_error(extract, TEXTS, KEYPHRASES, top_k=None)
    assert found["after"] == expected_calibration_error(*match_to_gold(after, KEYPHRASES))
    assert found["before"] == pytest.approx(expected_calibration_error(scores, right))
    assert found["after"] == pytest.approx(
        expected_calibration_error(apply_temperature(np.array(scores), T), right), abs=1e-5
    )
    assert found["phrases"] == len(right) and extract.model.config.keyphrase_temperature == T
    assert calibrate(extract, TEXTS, KEYPHRASES, top_k=None) == pytest.approx(
        T
    )  # from scratch, not on top of the old one


def test_it_is_saved_with_the_model(extract, tmp_path):
    calibrate(extract, TEXTS, KEYPHRASES, top_k=None)
    expected = extract(TEXTS)
    extract.save_pretrained(tmp_path)
    assert pipeline("keyphrase-extraction", model=str(tmp_path))(TEXTS) == expected


def test_what_cannot_be_measured_is_named(extract):
    with pytest.raises(ValueError, match="There are no scores"):
        calibrate(extract, ["graph"], [["graph"]], threshold=0.999)
    with pytest.raises(ValueError, match="score=1.5"):
        expected_calibration_error([0.5, 1.5], [True, False])


@pytest.mark.parametrize("field", ["keyphrase_temperature", "keyphrase_threshold"])
@pytest.mark.parametrize("value", [float("nan"), -1, 0, "1"])
def test_a_field_that_was_set_after_loading_is_checked(extract, monkeypatch, field, value):
    """A configuration without validation, as of a stock model, accepts any value."""
    monkeypatch.setitem(vars(extract.model.config), field, value)
    with pytest.raises(ValueError, match=field):
        extract(TEXTS)


RANKER = {"bias": -1.0, "gold": 1.0, "labels": 0.9, "more_words": 0.6}


def test_a_temperature_is_that_of_the_rankers_scores_and_measured_through_the_pipeline(extract, tmp_path):
    extract.model.config.keyphrase_ranker = RANKER
    extract = pipeline("keyphrase-extraction", model=extract.model, tokenizer=extract.tokenizer)
    options = {"min_score": 0.0, "top_k": None}
    before, by_itself, by_labels = extract(TEXTS, **options), extract(TEXTS), extract(TEXTS, threshold=0.3)
    T = calibrate(extract, TEXTS, KEYPHRASES, **options)
    assert fit_temperature(*match_to_gold(before, KEYPHRASES)) == T and abs(T - 1) > 0.1
    extract.save_pretrained(tmp_path)
    saved = pipeline("keyphrase-extraction", model=str(tmp_path))
    after = saved(TEXTS, **options)
    found = calibration_error(extract, TEXTS, KEYPHRASES, **options)
    assert found["before"] == expected_calibration_error(*match_to_gold(before, KEYPHRASES))
    assert found["after"] == expected_calibration_error(*match_to_gold(after, KEYPHRASES)) != found["before"]
    for one, two in zip(before, after, strict=True):
        assert [phrase["keyphrase"] for phrase in one] == [phrase["keyphrase"] for phrase in two]
        tempered = apply_temperature(np.array([phrase["score"] for phrase in one]), T)
        assert [phrase["score"] for phrase in two] == pytest.approx(tempered, abs=1e-6)
    assert [len(phrases) for phrases in saved(TEXTS)] == [len(phrases) for phrases in by_itself]
    limit = after[0][0]["score"] - 1e-6
    assert all(phrase["score"] >= limit for phrase in saved(TEXTS[0], min_score=limit, top_k=None))
    assert saved(TEXTS, threshold=0.3) == by_labels  # the scores of labels have none
    for other in ({"threshold": 0.3}, {"candidates": ["graph cuts"]}):
        with pytest.raises(ValueError, match="ranker"):
            calibrate(extract, TEXTS, KEYPHRASES, **other)
    assert extract.model.config.keyphrase_temperature == T


def test_scores_are_described_with_those_above_seven_tenths():
    row = describe_scores([0.9, 0.75, 0.7, 0.1], [True, False, True, False])
    assert (row["phrases"], row["confident"], row["confident_right"], row["right"]) == (4, 2, 0.5, 0.5)
    assert row["mean_score"] == pytest.approx(0.6125)
    assert row["calibration_error"] == pytest.approx((0.1 + abs(1.45 - 1) + 0.1) / 4)
    assert describe_scores([], [])["calibration_error"] is None
    assert describe_scores([0.2], [True])["confident_right"] is None
    with pytest.raises(ValueError, match="score=nan"):
        describe_scores([0.5, float("nan")], [True, True])
