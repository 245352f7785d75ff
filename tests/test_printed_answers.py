"""What pages print of the default models, asked again: an answer that a new model changes must not stay on a page."""

import ast
import json

import pytest

from tests.test_docs import ROOT, blocks_of

pytest.importorskip("lexperts_seke_minilm", reason="pip install ./models/seke-minilm")
from transformers import pipeline

import lexperts  # noqa: F401

PARAGRAPH = (ROOT / "examples/corpus/paragraph.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def extract():
    return pipeline("keyphrase-extraction")


def printed(keyphrase: dict, names: list[str]) -> dict:
    """Some values of a keyphrase, its score to the digits that pages print."""
    return {
        name: round(keyphrase[name], 6) if name == "score" and keyphrase[name] else keyphrase[name] for name in names
    }


def test_the_candidates_have_the_scores_of_the_page(extract):
    (shown,) = blocks_of("keyphrases.md", "text")[-1:]
    expected = ast.literal_eval(shown)
    found = extract(PARAGRAPH, candidates=[phrase["keyphrase"] for phrase in expected])
    for one, other in zip(found, expected, strict=True):
        assert printed(one, ["keyphrase", "score", "start", "end"]) == printed(
            other, ["keyphrase", "score", "start", "end"]
        )


def test_the_answer_of_the_server_is_that_of_the_default_model(extract):
    text = "Graph cuts solve energy minimisation problems in computer vision."
    assert text in (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    (shown,) = blocks_of("serving.md", "json")[:1]
    for one, other in zip(extract(text, top_k=2), json.loads(shown)["results"][0]["keyphrases"], strict=True):
        assert printed(one, ["keyphrase", "score", "start", "end"]) == other
