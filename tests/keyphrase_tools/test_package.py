"""The examples of docstrings."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", [
    "keyphrase_tools.labels", "keyphrase_tools.metrics", "keyphrase_tools.phrase_lists",
    *(f"lexperts_lite.{name}" for name in ("call_options", "clean", "decoding", "porter", "words")),
])  # fmt: skip
def test_the_examples_of_docstrings_hold(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted and not result.failed
