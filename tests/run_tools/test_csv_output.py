"""CSV for spreadsheets."""

import csv

import pytest

from run_tools.corpus.csv_output import escape_formula, flatten, unescape_formula, write_csv

PHRASES = [{"keyphrase": "graph cut", "score": 0.75, "start": 0}, {"keyphrase": "energy", "score": 0.5, "start": 4}]


@pytest.mark.parametrize("text", ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "-", "+"])
def test_formulas_are_escaped_and_read_back(text):
    assert escape_formula(text) == f"'{text}" and unescape_formula(escape_formula(text)) == text


@pytest.mark.parametrize("text", ["-5", "+3.2e-5", ".5", "-.5", "a=b", "", "'quoted'", "graph"])
def test_numbers_and_texts_stay(text):
    assert escape_formula(text) == text and unescape_formula(text) == text


def test_nested_values_are_cells(tmp_path):
    row = {"id": 3, "tags": ["a", "=b"], "none": None, "flag": True, "keyphrases": PHRASES, "nested": {"a": [1]}}
    cells = {"id": "3", "tags": "a; =b", "none": "", "flag": "true", "keyphrases": "graph cut; energy"}
    assert flatten(row) == cells | {"scores": "0.7500; 0.5000", "nested": '{"a": [1]}'}
    rows = [
        {"id": 1, "keyphrases": [], "error": None},
        {"id": "2\r", "error": "it\ris\r\nnot\nempty\r\n"},
        {"id": 3, "keyphrases": PHRASES},
    ]
    write_csv(lambda: map(flatten, rows), tmp_path / "a.tsv", "\t")
    with (tmp_path / "a.tsv").open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file, delimiter="\t"))
    assert list(found[0]) == ["id", "keyphrases", "scores", "error"]
    assert found[1] == {"id": "2\r", "keyphrases": "", "scores": "", "error": "it\ris\r\nnot\nempty\r\n"}
    assert found[2]["keyphrases"] == "graph cut; energy"


def test_candidates_that_do_not_occur_are_in_neither_cell_and_other_columns_have_no_scores():
    absent = {"keyphrase": "graph cut", "score": None}
    others = [{"name": "x", "score": 0.5}]
    found = flatten({"id": "a", "entities": others, "keyphrases": [PHRASES[0], absent, PHRASES[1]]})
    assert (found["keyphrases"], found["scores"]) == ("graph cut; energy", "0.7500; 0.5000")
    assert flatten({"keyphrases": [absent]}) == {"keyphrases": "", "scores": ""}
    assert flatten({"entities": others, "keyphrases": []}) == {"entities": "x", "keyphrases": ""}
