"""Rows of documents: their texts, and how much can be learnt from them."""

import pytest
from datasets import Dataset

from keyphrase_tools.labels import tokenize_documents
from keyphrase_tools.rows import describe_coverage, full_text

GOOD = {"title": "Graph cuts", "text": "They work.", "keyphrases": ["graph cuts"]}
OTHER = {"heading": "Graph cuts", "body": ["They", "work."]}


@pytest.mark.parametrize("row, options, expected", [
    (GOOD, {}, "Graph cuts. They work."), (GOOD, {"title_column": None}, "They work."), ({"title": None, "text": "They work."}, {}, "They work."),
    (OTHER, {"title_column": "heading", "text_column": "body"}, "Graph cuts. They work."),
])  # fmt: skip
def test_a_rows_full_text_is_its_title_and_its_text(row, options, expected):
    assert full_text(row, **options) == expected


def test_coverage_counts_the_keyphrases_that_occur_in_their_texts(tiny_tokenizer):
    batch = {"text": ["graph cuts", "deep network " * 50], "keyphrases": [["graph cut", "tensor"], ["network", "deep"]]}
    rows = tokenize_documents(batch, tiny_tokenizer)
    assert len(rows["labels"]) > 2  # the second document is long: its keyphrases are counted once all the same
    sentence = describe_coverage(rows)
    assert sentence == describe_coverage(Dataset.from_dict(rows)) and "3 of 4 keyphrases (75.0%)" in sentence
    assert "; 1 do not" in sentence
    assert ";" not in describe_coverage({"num_keyphrases": [1000, 500], "num_present": [1000, 500]})
    with pytest.raises(ValueError, match="None of the 1,234 keyphrases.*--keyphrases-column"):
        describe_coverage({"num_keyphrases": [1234], "num_present": [0]})
