"""Rows of text files: encodings, delimiters, arrays, deep nesting."""

import codecs
import csv
import io
import json
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from run_tools.corpus.text_rows import (
    DEEPEST,
    check_depth,
    csv_header,
    csv_rows,
    decode,
    json_rows,
    parse_delimiter,
    parse_encoding,
)
from run_tools.errors import UserError

CELL = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0\ufeff") | st.sampled_from('",\n\r'), max_size=6
)
ROWS = [{"id": "ü1", "text": "Straße €5"}, {"id": "2", "text": "naïve 漢字"}]
ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"]


def values(rows):
    return [row() for row in rows]


@pytest.mark.parametrize(
    "encoding, given", [(name, True) for name in ENCODINGS] + [(n, False) for n in ENCODINGS if not n.endswith("e")]
)
def test_every_encoding_gives_the_same_rows(encoding, given):
    name = encoding if given else None
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode(encoding)
    array = json.dumps(ROWS, ensure_ascii=False, indent=1).encode(encoding)
    table = "".join(";".join(row) + "\n" for row in [ROWS[0].keys(), *(row.values() for row in ROWS)]).encode(encoding)
    for may_be_array in (True, False):
        assert values(json_rows(io.BytesIO(lines), name, may_be_array)) == ROWS
    assert values(json_rows(io.BytesIO(array), name, True)) == ROWS
    assert values(csv_rows(io.BytesIO(table), ";", name)) == ROWS
    assert decode(lines, name) == lines.decode(encoding).removeprefix("\ufeff")


def test_missing_cells_are_an_error_or_none():
    table = io.BytesIO(b"a,b\n1\n"), io.BytesIO(b"a,b\n1,2,3\n"), io.BytesIO(b"a,b\n1\n")
    assert values(csv_rows(table[0], ",", fill_missing=True)) == [{"a": "1", "b": None}]
    with pytest.raises(ValueError, match="3 fields, the header has 2"):
        values(csv_rows(table[1], ",", fill_missing=True))
    with pytest.raises(ValueError, match="1 fields, the header has 2"):
        values(csv_rows(table[2], ","))


def test_quotes_are_read_as_they_were_written_or_are_errors_of_their_rows():
    table = (
        b'id,text\n1,"graph ""cuts"", two\nlines"\n2,a "quoted" word\n3,"graph" cuts\n4,learning\n5,"never\n6,closed\n'
    )
    rows = csv_rows(io.BytesIO(table), ",")
    first, second, third, fourth = islice(rows, 4)
    assert first() == {"id": "1", "text": 'graph "cuts", two\nlines'}
    assert second() == {"id": "2", "text": 'a "quoted" word'}
    with pytest.raises(ValueError, match="^line 5: a quote ends in the middle of a field"):
        third()
    assert fourth() == {"id": "4", "text": "learning"}
    with pytest.raises(ValueError, match="^lines 7 to 8: a quote is never closed. Put fields with quotes in quotes"):
        next(rows)
    with pytest.raises(ValueError, match="^lines 1 to 2: a quote is never closed"):
        csv_header(io.BytesIO(b'id,"text\n1,graph\n'), ",")


@given(st.lists(st.tuples(CELL, CELL), max_size=4), st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]))
def test_a_table_that_was_written_is_read_unchanged(cells, quoting):
    text = io.StringIO(newline="")
    csv.writer(text, quoting=quoting).writerows([("id", "text"), *cells])
    rows = values(csv_rows(io.BytesIO(text.getvalue().encode()), ","))
    assert [(row["id"], row["text"]) for row in rows] == cells


def test_cp1252_is_read_if_it_is_named():
    lines = json.dumps({"text": "naïve €"}, ensure_ascii=False).encode("cp1252")
    assert values(json_rows(io.BytesIO(lines), "cp1252")) == [{"text": "naïve €"}]
    for read in (lambda: values(json_rows(io.BytesIO(lines))), lambda: decode(lines)):
        with pytest.raises(ValueError, match=r"not valid UTF-8 \(byte 13\); pass --encoding"):
            read()


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_without_a_byte_order_mark_is_named(encoding):
    content = '{"text": "graph cuts"}\n'.encode(encoding)
    for read in (
        lambda: values(json_rows(io.BytesIO(content))),
        lambda: decode(content),
        lambda: values(csv_rows(io.BytesIO(content), ",")),
    ):
        with pytest.raises(ValueError, match=f"looks like {encoding.upper()} .* pass --encoding {encoding}"):
            read()


@pytest.mark.parametrize("name", ["utf9", "base64", "rot13", ""])
def test_an_unknown_encoding_is_named(name):
    with pytest.raises(UserError, match=f"encoding '{name}' is not known"):
        parse_encoding(name)
    assert parse_encoding("UTF8") == "utf-8" and parse_encoding(None) is None


def test_delimiters():
    assert [parse_delimiter(name) for name in (None, "tab", "\\t", ";", "|")] == [None, "\t", "\t", ";", "|"]
    for name in ("", ";;", "\n", '"', "comma"):
        with pytest.raises(UserError, match="is not one character"):
            parse_delimiter(name)


@pytest.mark.parametrize(
    "text, count, message",
    [
        ('[{"a": 1}, {"a": 2}', 2, "ends after 2 items without a ']'"),
        ('[{"a": 1}, {"a": 2]', 1, "item 1 of its array is not valid JSON"),
        ('[{"a": 1}] {"a": 2}', 1, "something follows its array"),
        ('[{"a": 1},]', 1, "item 1 of its array is not valid JSON"),
        ('[{"a": 1} {"a": 2}]', 1, "ends after 1 items"),
        ('{\n "text": "a"\n}', 0, "one object over several lines"),
        ("[", 0, "ends after 0 items"),
        ('[{"a": ' + "[" * 100_000 + "]", 0, "nested too deeply"),
    ],
)
def test_a_damaged_array_gives_its_items_up_to_the_fault(text, count, message):
    rows, found = json_rows(io.BytesIO(text.encode()), may_be_array=True), []
    with pytest.raises(ValueError, match=message):
        for row in rows:
            found.append(row())
    assert found == [{"a": 1}, {"a": 2}][:count]


def test_empty_arrays_have_no_rows():
    assert [values(json_rows(io.BytesIO(text), may_be_array=True)) for text in (b"[]", b" [\n ]\n", b"", b"\n")] == [
        []
    ] * 4


@pytest.mark.parametrize("depth, is_read", [(DEEPEST, True), (DEEPEST + 1, False), (900, False), (100_000, False)])
def test_deep_rows_are_errors_of_a_row(depth, is_read):
    line = b'{"text": ' * 1 + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"
    (row,) = json_rows(io.BytesIO(line))
    if is_read:
        assert row()
    else:
        with pytest.raises(ValueError, match=f"nested deeper than {DEEPEST} levels"):
            row()
    assert check_depth([[1]] * 1000) == [[1]] * 1000


def test_a_byte_order_mark_alone_and_a_short_file_are_read():
    for content in (b"", codecs.BOM_UTF8, codecs.BOM_UTF16_LE):
        assert values(json_rows(io.BytesIO(content))) == [] and decode(content) == ""
