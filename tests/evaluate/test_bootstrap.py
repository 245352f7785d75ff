"""Bootstrap means and intervals against scipy's, and differences of systems."""

import numpy as np
import pytest
from scipy import stats

from lexperts.evaluate import Score, compare
from lexperts.evaluate.bootstrap import bootstrap_means, confidence_interval
from lexperts.evaluate.scores import f1_of_means


def test_interval_is_that_of_scipy():
    data = np.random.default_rng(2).normal(size=(37, 2))
    means = bootstrap_means(data)
    expected = stats.bootstrap((data[:, 1],), np.mean, n_resamples=2000, method="percentile", rng=0).confidence_interval
    assert confidence_interval(means[:, 1]) == pytest.approx((expected.low, expected.high), abs=1e-12)
    paired = bootstrap_means(data[:, :1] + np.array([[0.0, 0.5]]))
    np.testing.assert_allclose(paired[:, 1] - paired[:, 0], 0.5)  # what is added to all rows has no spread


def test_a_difference_is_one_only_where_it_is_more_than_chance():
    rng = np.random.default_rng(0)
    base = rng.normal(30, 10, 200)
    better, tie, ratios = base + 1 + rng.normal(0, 2, 200), base + rng.normal(0, 2, 200), rng.uniform(10, 90, (200, 2))
    other = base + (np.arange(200) == 0)  # in a single row, which a third of the samples lack

    def of(rows, two=ratios):
        return [{"mean": Score(rows, ""), "F1": Score(two, "", f1_of_means), "all": Score(rows[:1], "")}]

    systems = {"base": of(base), "better": of(better, ratios + 1), "tie": of(tie, ratios[::-1]), "same": of(base)}
    results = compare(systems | {"other": of(other), "seeds": of(better) + of(tie)}, "base")
    found, seeds = results["differences"], results["systems"]["seeds"]["mean"]
    for metric in ("mean", "F1"):
        assert found["better"][metric]["p"] == pytest.approx(2 / 2001)
        assert 0 < found["better"][metric]["low"] < found["better"][metric]["value"]
        assert found["tie"][metric]["low"] < 0 < found["tie"][metric]["high"] and found["tie"][metric]["p"] > 0.05
        assert found["same"][metric] == dict.fromkeys(("value", "low", "high"), 0) | {"p": 1}
    assert found["tie"]["mean"]["p"] == pytest.approx(stats.ttest_rel(tie, base).pvalue, abs=0.03)
    assert found["other"]["mean"]["p"] == pytest.approx(np.exp(-1), abs=0.05)  # ties count half
    assert found["better"]["all"].keys() == {"value"}  # a single value has neither interval nor test
    assert results["systems"]["better"]["F1"]["value"] == pytest.approx(f1_of_means(ratios.mean(0) + 1))
    assert seeds["runs"] == pytest.approx([better.mean(), tie.mean()])
    assert (seeds["value"], seeds["sd"]) == pytest.approx((np.mean(seeds["runs"]), np.std(seeds["runs"], ddof=1)))
