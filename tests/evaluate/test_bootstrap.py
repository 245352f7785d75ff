"""Bootstrap means and intervals against numpy's and scipy's."""

import numpy as np
import pytest
from scipy import stats

from lexperts.evaluate.bootstrap import bootstrap_means, confidence_interval


def test_means_are_those_of_drawn_rows():
    values = np.random.default_rng(1).normal(size=(37, 3))
    means = bootstrap_means(values, samples=250, seed=3)
    rng = np.random.default_rng(3)
    expected = np.stack([values[rng.integers(0, 37, 37)].mean(0) for _ in range(250)])
    np.testing.assert_allclose(means, expected, atol=1e-12)
    one = bootstrap_means(values[:, 1], samples=250, seed=3)
    assert one.shape == (250,)
    np.testing.assert_allclose(one, means[:, 1], atol=1e-12)
    paired = bootstrap_means(values[:, :1] + np.array([[0.0, 0.5]]))
    np.testing.assert_allclose(paired[:, 1] - paired[:, 0], 0.5)  # what is added to all rows has no spread


@pytest.mark.parametrize("sizes", [(37,), (50, 71, 33)])
def test_interval_is_that_of_scipy(sizes):
    rng = np.random.default_rng(2)
    data = [rng.normal(size=n) for n in sizes]

    def mean_of_means(*columns, axis=-1):
        return np.mean([column.mean(axis=axis) for column in columns], axis=0)

    expected = stats.bootstrap(data, mean_of_means, n_resamples=2000, method="percentile", rng=0).confidence_interval
    shared = np.random.default_rng(0)
    means = np.mean([bootstrap_means(column, seed=shared) for column in data], axis=0)
    assert confidence_interval(means) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_levels():
    means = np.arange(1001) / 1000
    assert confidence_interval(means) == (0.025, 0.975)
    assert confidence_interval(means, level=0.9) == (0.05, 0.95)
