# needs: parquet
"""The rows of files of every format, one by one and as a list, and errors that name rows, files and columns."""

import csv
import gzip
import io
import json
import os

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from run_tools.errors import UserError
from run_tools.rows import Source, csv_rows, read_jsonl

ROWS = [{"id": "ü1", "text": "Straße €5"}, {"id": "2", "text": 'na"ïve\n漢字'}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
TABLE = 'id,text\nü1,Straße €5\n\n2,"na""ïve\n漢字"\n'


def write(path, content):
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(content), path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("name", "content", "options"),
    [
        ("a.jsonl", LINES, {}),
        ("a.jsonl.gz", gzip.compress(LINES.encode(), mtime=0), {}),
        ("a.ndjson", LINES.replace("\n", "\n\n").encode("utf-8-sig"), {}),
        ("a.jsonl", LINES.encode("utf-16"), {"encoding": "utf-16"}),
        ("a.json", json.dumps(ROWS, indent=1), {}),
        ("a.json", LINES, {}),
        ("a.csv", TABLE, {}),
        ("a.csv", TABLE.replace(",", ";").encode("utf-16"), {"delimiter": ";", "encoding": "utf-16"}),
        ("a.tsv", TABLE.replace(",", "\t").encode("utf-8-sig"), {}),
        ("a.parquet", ROWS, {}),
    ],
)
def test_the_rows_of_every_format(name, content, options, tmp_path):
    source = Source(write(tmp_path / name, content), **options)
    assert list(source) == ROWS and source.columns == ["id", "text"]


def test_texts_are_lines_of_a_file_and_files_of_a_folder(tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("b.txt", "a.txt", ".hidden.txt", "out.txt"):
        write(tmp_path / "in" / name, f"text of\n{name}\n")
    assert list(Source(tmp_path / "in" / "a.txt")) == [{"text": "text of"}, {"text": "a.txt"}]
    for place in (tmp_path / "in", tmp_path / "in" / "*.txt"):
        source = Source(place, text_column="body", output=tmp_path / "in" / "out.txt")
        assert list(source) == [{"id": name, "body": f"text of\n{name}\n"} for name in ("a.txt", "b.txt")]


def test_rows_and_files_that_cannot_be_read_are_errors_of_their_own(tmp_path):
    write(tmp_path / "a.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n' + b"[" * 9999 + b"\n")
    write(tmp_path / "b.jsonl.gz", gzip.compress(LINES.encode())[:-9])
    write(tmp_path / "c.jsonl", LINES)
    found = list(Source(tmp_path))
    good = [row for row in found if isinstance(row, dict)]
    assert good[0] == {"text": "a"} and good[-2:] == ROWS
    errors = [str(row) for row in found if isinstance(row, ValueError)]
    assert ["line 2" in errors[0], "line 3" in errors[1], "b.jsonl.gz cannot be read" in errors[2]] == [True] * 3
    (tmp_path / "table").mkdir()
    write(tmp_path / "table" / "a.csv", 'id,text\n1,"a"b\n2\n3,c\n')
    found = list(Source(tmp_path / "table"))
    assert [type(row) for row in found] == [ValueError, ValueError, dict] and "line 3" in str(found[1])
    write(tmp_path / "table" / "a.csv", "id,text\n1,é\n".encode("latin-1"))
    with pytest.raises(UserError, match="its encoding"):
        Source(tmp_path / "table").check_columns(["text"])


def test_a_lost_connection_is_not_a_damaged_file(tmp_path, monkeypatch):
    source = Source(write(tmp_path / "a.jsonl", LINES))
    monkeypatch.setattr(source.fs, "open", lambda *_, **__: (_ for _ in ()).throw(ConnectionResetError("reset")))
    with pytest.raises(ConnectionResetError):
        list(source)


@pytest.mark.parametrize(
    ("files", "kind", "message"),
    [
        ({}, FileNotFoundError, "in is not a"),
        ({"a.jsonl": ""}, UserError, "in"),
        ({"a.jsonl": LINES, "b.csv": TABLE}, UserError, r"\.csv, \.jsonl files"),
        ({"a.csv": "id,text,id\n1,a,2\n"}, UserError, "'id'"),
        ({"a.csv": "id;txt\n1;a\n"}, UserError, "'text'.*'id;txt'"),
    ],
)
def test_what_cannot_be_used_is_named(files, kind, message, tmp_path):
    (tmp_path / "in").mkdir()
    for name, content in files.items():
        write(tmp_path / "in" / name, content)
    with pytest.raises(kind, match=message):
        Source(tmp_path / "in").check_columns(["text"])


def test_the_state_changes_with_the_files_and_not_with_their_folder(tmp_path):
    (tmp_path / "old").mkdir()
    path = write(tmp_path / "old" / "a.jsonl", LINES)
    state = Source(path).state()
    os.rename(tmp_path / "old", tmp_path / "new")
    assert Source(tmp_path / "new" / "a.jsonl").state() == state and "1 file, 7" in state
    os.utime(tmp_path / "new" / "a.jsonl", (0, 0))
    assert Source(tmp_path / "new" / "a.jsonl").state() != state


CELL = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\ufeff") | st.sampled_from('",\n\r'))


@given(st.lists(st.tuples(CELL, CELL), min_size=1, max_size=5))
def test_what_csv_writes_is_read(rows):
    text = io.StringIO(newline="")
    csv.writer(text).writerows([("a", "b"), *rows])
    found = [row for _, row in csv_rows(io.StringIO(text.getvalue(), newline=""), ",")]
    assert found == [{"a": a, "b": b} for a, b in rows]


def test_rows_of_several_files_come_in_order_and_blank_lines_are_passed_over(tmp_path):
    first = write(tmp_path / "a.jsonl", LINES.replace("\n", "\n\n  \n"))
    second = write(tmp_path / "b.json", json.dumps([{"body": "last\u2028"}]).encode("utf-16"))
    assert read_jsonl([first, str(second)]) == [*ROWS, {"body": "last\u2028"}]
    assert read_jsonl(str(second)) == read_jsonl(second) == [{"body": "last\u2028"}]


GOOD = '{"text": "a", "keyphrases": []}\n'


@pytest.mark.parametrize(
    ("name", "content", "names"),
    [
        ("a.jsonl", f'{GOOD}\n{GOOD}{{"text": "graph"\n', ("a.jsonl, line 4", "column 17")),
        ("a.jsonl", f'{GOOD}["graph"]', ("a.jsonl, line 2", "['graph']")),
        ("a.jsonl", f'{GOOD}{{"abstract": "x", "keyphrases": []}}', ("a.jsonl, line 2", "'text'", "'abstract'")),
        ("a.jsonl", '{"text": "a", "x": ' + "[" * 9999, ("a.jsonl, line 1",)),
        ("a.json", '[{"text": "graph", "keyphrases": []}, 3]', ("a.json, element 2", "3 is not")),
        ("a.csv", "text,keyphrases\na", ("a.csv, line 2", "fewer")),
        ("a.jsonl", "", ("a.jsonl",)),
        ("a.jsonl", '{"text": "café"}'.encode("latin-1"), ("a.jsonl",)),
    ],
)
def test_what_cannot_be_read_as_a_list_is_named(name, content, names, tmp_path):
    with pytest.raises(UserError) as found:
        read_jsonl(write(tmp_path / name, content), ("text", "keyphrases"))
    assert all(name in str(found.value) for name in names) and "\n" not in str(found.value)
    with pytest.raises(FileNotFoundError, match="nowhere.jsonl does not exist"):
        read_jsonl(tmp_path / "nowhere.jsonl")
