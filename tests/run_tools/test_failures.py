"""Items that fail: each with its reason, and what fails together but not alone is not kept quiet."""

import warnings

import pytest
import torch

from run_tools.corpus.failures import process_each


def halve(items):
    if len(items) > 2:
        raise MemoryError("too many")
    return [item / 2 for item in items]


def test_items_that_fail_together_only_are_a_warning():
    with pytest.warns(UserWarning, match="3.*too many.*smaller batch"):
        assert process_each(halve, [2, 4, 6]) == [(1, None), (2, None), (3, None)]


def test_one_bad_item_is_its_own_reason_and_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert process_each(halve, [2, 4]) == [(1, None), (2, None)]
        (good, bad) = process_each(halve, [2, "x"])
    assert good == (1, None) and bad[0] is None and "unsupported operand" in bad[1]


def test_a_device_that_fails_is_an_error_of_the_run_also_for_one_item():
    def fail(items):
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    with pytest.raises(torch.AcceleratorError):
        process_each(fail, [1])


def test_all_items_that_fail_are_an_error_unless_it_is_their_values():
    def fail(items):
        raise RuntimeError("no device")

    with pytest.raises(RuntimeError, match="no device"):
        process_each(fail, [1, 2])
    assert [error is None for _, error in process_each(lambda items: [int(i) for i in items], ["x", "y"])] == [
        False,
        False,
    ]
