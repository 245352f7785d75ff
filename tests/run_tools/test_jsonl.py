"""Reading rows as a list: errors name the file and the line."""

import json

import pytest

from run_tools.errors import UserError
from run_tools.rows import read_jsonl

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
    second = write(json.dumps([{"body": "last"}]), name="b.json", encoding="utf-16")
    assert read_jsonl([first, str(second)]) == [GOOD, {**GOOD, "text": "Çünkü 日本\u2028."}, {"body": "last"}]
    assert read_jsonl(str(second)) == read_jsonl(second) == [{"body": "last"}]


@pytest.mark.parametrize(
    ("lines", "name", "names"),
    [
        ((GOOD, "", GOOD, '{"text": "graph"', GOOD), "a.jsonl", ("a.jsonl, line 4", "column 17")),
        ((GOOD, '["graph"]'), "a.jsonl", ("a.jsonl, line 2", "['graph']")),
        ((GOOD, '{"abstract": "x", "keyphrases": []}'), "a.jsonl", ("a.jsonl, line 2", "'text'", "'abstract'")),
        (('{"body": "x"}',), "a.jsonl", ("a.jsonl, line 1", "'text'", "'keyphrases'", "'body'")),
        (('{"text": "a", "x": ' + "[" * 9999,), "a.jsonl", ("a.jsonl, line 1",)),
        (('[{"text": "graph", "keyphrases": []}, 3]',), "a.json", ("a.json, element 2", "3 is not")),
        (("text,keyphrases", "a"), "a.csv", ("a.csv, line 2", "fewer")),
        ((), "a.jsonl", ("a.jsonl",)),
        (("", " "), "a.jsonl", ("a.jsonl",)),
    ],
)
def test_what_cannot_be_read_is_named(write, lines, name, names):
    with pytest.raises(UserError) as found:
        read_jsonl(write(*lines, name=name), ("text", "keyphrases"))
    assert all(name in str(found.value) for name in names) and "\n" not in str(found.value)


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_what_is_not_utf8_is_named(write, name):
    with pytest.raises(UserError, match=name):
        read_jsonl(write("text", {"text": "café"}, name=name, encoding="latin-1"))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.jsonl"):
        read_jsonl(tmp_path / "nowhere.jsonl")
