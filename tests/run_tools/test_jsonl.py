"""Reading JSON Lines: errors name the file and the line."""

import json
import re

import pytest
from datasets import Dataset

from keyphrase_tools.labels import tokenize_documents
from keyphrase_tools.rows import describe_coverage, full_text
from run_tools.jsonl import read_jsonl

GOOD = {"title": "Graph cuts", "text": "They work.", "keyphrases": ["graph cuts"]}


@pytest.fixture
def write(tmp_path):
    def to_file(*lines, name="train.jsonl", encoding="utf-8"):
        path = tmp_path / name
        text = "\n".join(line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines)
        path.write_bytes(text.encode(encoding))
        return path

    return to_file


def test_rows_of_several_files_come_in_order_and_blank_lines_are_passed_over(write):
    first = write(GOOD, "", {**GOOD, "text": "Çünkü 日本\u2028."}, "  ", name="a.jsonl")
    second = write({**GOOD, "text": "last"}, name="b.jsonl")
    rows = read_jsonl([first, str(second)], required=("text", "keyphrases"))
    assert [row["text"] for row in rows] == ["They work.", "Çünkü 日本\u2028.", "last"]
    assert read_jsonl(str(second)) == read_jsonl(second) == rows[2:]


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"text": "graph"', "it is not valid JSON (Expecting ',' delimiter, column 17)"),
        ("text: graph", "it is not valid JSON (Expecting value, column 1)"),
        ('["graph"]', "expected a JSON object, got a list"),
        ('"graph"', "expected a JSON object, got a str"),
        ('{"abstract": "x", "keyphrases": []}', "there is no 'text'; the columns are 'abstract', 'keyphrases'"),
        ('{"body": "x"}', "there is no 'text', 'keyphrases'; the columns are 'body'"),
    ],
)
def test_a_broken_line_is_named_by_file_and_line(write, line, message):
    good, broken = write(GOOD, name="good.jsonl"), write(GOOD, "", GOOD, line, GOOD, name="broken.jsonl")
    with pytest.raises(ValueError, match=re.escape(f"{broken}, line 4: {message}")):
        read_jsonl([good, broken], required=("text", "keyphrases"))


def test_a_line_that_is_not_utf8_is_named_by_file_and_line(write):
    path = write(GOOD, {**GOOD, "text": "café"}, encoding="latin-1")
    with pytest.raises(ValueError, match=re.escape(f"{path}, line 2")):
        read_jsonl(path)


def test_columns_are_not_checked_unless_required(write):
    assert read_jsonl(write({"body": "x"})) == [{"body": "x"}]


@pytest.mark.parametrize("lines", [(), ("", " ")])
def test_a_file_without_documents_is_refused_by_name(write, lines):
    path = write(*lines)
    with pytest.raises(ValueError, match=re.escape("There are no documents in ") + ".*train.jsonl"):
        read_jsonl(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.jsonl"):
        read_jsonl(tmp_path / "nowhere.jsonl")


@pytest.mark.parametrize(
    "row, options, expected",
    [
        (GOOD, {}, "Graph cuts. They work."),
        (GOOD, {"title_column": None}, "They work."),
        ({"text": ["They", "work", "."]}, {}, "They work ."),
        ({"title": None, "text": "They work."}, {}, "They work."),
        (
            {"heading": "Graph cuts", "body": "They work."},
            {"title_column": "heading", "text_column": "body"},
            "Graph cuts. They work.",
        ),
    ],
)
def test_a_rows_full_text_is_its_title_and_its_text(row, options, expected):
    assert full_text(row, **options) == expected


# ---- how much can be learnt


def test_coverage_counts_the_keyphrases_that_occur_in_their_texts(tiny_tokenizer):
    batch = {"text": ["graph cuts", "deep network " * 50], "keyphrases": [["graph cut", "tensor"], ["network", "deep"]]}
    rows = tokenize_documents(batch, tiny_tokenizer)
    assert len(rows["labels"]) > 2  # the second document is long: its keyphrases are counted once all the same
    sentence = describe_coverage(rows)
    assert sentence == describe_coverage(Dataset.from_dict(rows)) and "3 of 4 keyphrases (75.0%)" in sentence
    assert "; 1 do not" in sentence


def test_coverage_of_all_keyphrases_does_not_mention_absent_ones():
    sentence = describe_coverage({"num_keyphrases": [1000, 500], "num_present": [1000, 500]})
    assert "1,500 of 1,500 keyphrases (100.0%)" in sentence and ";" not in sentence


@pytest.mark.parametrize("total", [0, 1234])
def test_coverage_refuses_data_with_nothing_to_learn(total):
    with pytest.raises(ValueError, match=f"None of the {total:,} keyphrases.*--keyphrases-column"):
        describe_coverage({"num_keyphrases": [total], "num_present": [0]})


def test_a_json_file_may_hold_an_array(tmp_path):
    rows = [{"text": "naïve graph", "keyphrases": ["graph"]}, {"text": "cut", "keyphrases": []}]
    (tmp_path / "a.json").write_bytes(json.dumps(rows).encode("utf-16"))
    assert read_jsonl(tmp_path / "a.json") == rows
    (tmp_path / "a.json").write_text('[{"text": "graph"}, 3]')
    with pytest.raises(ValueError, match="a.json, element 2: expected a JSON object, got a int"):
        read_jsonl(tmp_path / "a.json")
