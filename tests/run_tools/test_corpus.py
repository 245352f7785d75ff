"""Corpora: every format and file system, blocks, columns, and files that cannot be read."""

import bz2
import gzip
import itertools
import json
import lzma
import os
import warnings
from functools import partial

import fsspec
import pyarrow
import pytest
from pyarrow import parquet

from keyphrase_tools.rows import read_texts
from keyphrase_tools.words import join_title
from run_tools.corpus.documents import Corpus
from tests.corpora import bound_by_permissions, write_jsonl

TEXTS = ["Graph cuts solve energy problems.", "Deep networks learn cuts.", "", "The network of the graph is cut. " * 30]
ROWS = [{"id": f"d{i}", "title": None if i % 2 else f"Title {i}", "text": text} for i, text in enumerate(TEXTS)]


def write_parquet(path, rows, **options):
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)
    return path


def write_csv(path, rows, separator=","):
    quoted = [[json.dumps(str(row[name] or "")) for name in ("id", "title", "text")] for row in rows]
    path.write_text("\n".join(separator.join(row) for row in [["id", "title", "text"], *quoted]), encoding="utf-8")
    return path


def contents(corpus):
    return [(row.number, row.id, row.values["text"], row.values["title"] or None) for row in corpus.read()]


class HubError(OSError):
    """An error of a server, which is an OSError without an errno, as huggingface_hub's."""


EXPECTED = [(i, row["id"], row["text"], row["title"]) for i, row in enumerate(ROWS)]


@pytest.mark.parametrize(
    "name",
    ["a.jsonl", "a.jsonl.gz", "a.ndjson.bz2", "a.csv", "a.csv.gz", "a.tsv", "a.parquet", "memory://set/a.parquet"],
)
def test_the_rows_of_every_format(name, tmp_path):
    path = tmp_path / name.split("/")[-1]
    plain = path.with_suffix("") if path.suffix in (".gz", ".bz2") else path
    write = {".parquet": write_parquet, ".csv": write_csv, ".tsv": lambda *a: write_csv(*a, "\t")}
    write.get(plain.suffix, write_jsonl)(plain, ROWS)
    if plain != path:
        path.write_bytes({".gz": gzip, ".bz2": bz2}[path.suffix].compress(plain.read_bytes()))
    source = str(path)
    if "://" in name:
        source = name
        with fsspec.open(name, "wb") as file:
            file.write(path.read_bytes())
    corpus = Corpus(source)
    assert contents(corpus) == EXPECTED
    assert corpus.documents in (4, None) and (corpus.documents == 4) == (path.suffix in (".jsonl", ".parquet"))


def test_folders_and_patterns(tmp_path):
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    for name, text in zip(("b.txt", "a.txt", "sub/c.txt", "notes.md"), TEXTS, strict=True):
        (folder / name).write_text(text)
    assert [(row.number, row.id, row.values["text"]) for row in Corpus(folder).read()] == [
        (0, "a.txt", TEXTS[1]),
        (1, "b.txt", TEXTS[0]),
        (2, "sub/c.txt", TEXTS[2]),
    ]
    for i, row in enumerate(ROWS):
        write_parquet(folder / f"part-{i}.parquet", [row])
    write_parquet(folder / "_hidden.parquet", ROWS)
    with pytest.raises(ValueError, match=r".parquet, .txt.*Pass.*'\*.parquet'"):
        Corpus(folder)
    corpus = Corpus(f"{folder}/part-*.parquet")
    assert contents(corpus) == EXPECTED and corpus.documents == 4
    assert [row.id for row in Corpus(f"{folder}/part-[12].parquet").read()] == ["d1", "d2"]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_blocks_depend_on_the_documents_only(suffix, tmp_path):
    rows = [{"id": i, "text": "cut " * (1 + 600 * (i % 7 == 3))} for i in range(50)]
    path = tmp_path / f"texts.{suffix}"
    write_parquet(path, rows, row_group_size=8) if suffix == "parquet" else write_jsonl(path, rows)
    corpus = Corpus(path)
    blocks = list(corpus.blocks(4))
    assert [row.number for block in blocks for row in block.rows] == list(range(50))
    assert max(len(block.rows) for block in blocks) == 4 and len(blocks) == 13
    long = [{"text": "cut " * 3000}] * 3  # each longer than 4 x 2,000 characters
    assert [len(b.rows) for b in Corpus(write_jsonl(tmp_path / "long.jsonl", long)).blocks(4)] == [1, 1, 1]
    finished = {block.start: block.end for block in blocks[::2]}
    skipped = []
    rest = list(corpus.blocks(4, finished, skipped.append))
    assert rest == blocks[1::2] and sum(skipped) == sum(len(block.rows) for block in blocks[::2])


def test_columns_are_chosen_and_others_are_not_read(tmp_path):
    rows = [{"key": 7, "body": ["deep", "cuts"], "head": "A", "year": 2000, "other": 1}]
    for path in (write_jsonl(tmp_path / "a.jsonl", rows), write_parquet(tmp_path / "a.parquet", rows)):
        (row,) = Corpus(path, "body", "head", "key", keep=["year"]).read()
        assert row.id == 7 and row.values == {"body": ["deep", "cuts"], "head": "A", "year": 2000}
        (row,) = Corpus(path, "body", None, keep=None).read()
        assert row.id == 0 and row.values == rows[0]


def test_rows_that_cannot_be_read_are_reported(tmp_path):
    good = json.dumps({"text": "graph"}).encode()
    deep = b'{"text": ' + b'{"a":' * 100_000
    bad = [b"{no json", b'{"body": "graph"}', b'"graph"', b'{"text": "\xff"}', deep]
    path = tmp_path / "texts.jsonl"
    path.write_bytes(b"\n".join([good, *bad, b"  ", good]))
    rows = list(Corpus(path).read())
    assert [row.values is None for row in rows] == [False, *[True] * 5, False]
    messages = (
        "texts.jsonl, line 2: this is not valid JSON (Expecting property name enclosed in double quotes, column 2)",
        "columns: 'body'",
        "line 4: expected a JSON object, got 'graph'",
        "not valid UTF-8",
        "nested deeper than 100",
    )
    for row, message in zip(rows[1:6], messages, strict=True):
        assert message in row.error and row.id == row.number
    path = tmp_path / "texts.csv"
    path.write_bytes(b'text,id\ngraph,1\n\ngraph,2,3\n"a\nb",4\n\xff,5\n')
    rows = list(Corpus(path).read())
    assert [row.error for row in rows] == [
        None,
        "texts.csv, row 3: the row has 3 fields, the header has 2",
        None,
        "texts.csv, row 5: it is not valid UTF-8; pass --encoding",
    ]
    assert rows[2].values["text"] == "a\nb"
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_bytes(b"\xff")
    assert "not valid UTF-8 (byte 1)" in next(Corpus(tmp_path / "texts").read()).error


@pytest.mark.parametrize("suffix", ["parquet", "csv", "jsonl"])
@pytest.mark.parametrize(
    "columns, name, fix",
    [
        ({"text_column": "body"}, "body", "Use --text-column"),
        ({"id_column": "doi"}, "doi", "Use --id-column"),
        ({"keep": ["year"]}, "year", ""),
        ({"title_column": "head"}, "head", "Use --title-column"),
    ],
)
def test_a_missing_column_is_named_with_those_that_exist(suffix, columns, name, fix, tmp_path):
    path = tmp_path / f"a.{suffix}"
    {"parquet": write_parquet, "csv": write_csv, "jsonl": write_jsonl}[suffix](path, ROWS)
    is_warning = suffix == "jsonl" and not {"text_column", "id_column"} & set(columns)  # later rows may have it
    message = f"no column '{name}'.*'id', 'title', 'text'.*{'' if is_warning else fix}"
    with pytest.warns(UserWarning, match=message) if is_warning else pytest.raises(ValueError, match=message):
        Corpus(path, **columns)


def test_files_with_different_columns_are_named(tmp_path):
    write_parquet(tmp_path / "a.parquet", ROWS)
    write_parquet(tmp_path / "b.parquet", [{"body": "graph"}])
    with pytest.raises(ValueError, match="b.parquet.*'text'.*'body'.*All"):
        Corpus(tmp_path)
    write_parquet(tmp_path / "b.parquet", [{"text": 3}])
    with pytest.raises(ValueError, match="'text'.*b.parquet.*int64"):
        Corpus(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    write_jsonl(tmp_path / "b.jsonl", [{"body": "graph"}])
    with pytest.raises(ValueError, match="b.jsonl has no column 'text'"):
        Corpus(f"{tmp_path}/*.jsonl")


def test_a_file_that_cannot_be_read_is_one_row_and_the_others_are_read(tmp_path):
    for i, row in enumerate(ROWS):
        write_parquet(tmp_path / f"{i}.parquet", [row])
    path = tmp_path / "1.parquet"
    path.write_bytes(path.read_bytes()[:200])
    corpus = Corpus(tmp_path)
    rows = list(corpus.read())
    assert [row.id for row in rows] == ["d0", None, "d2", "d3"] and corpus.documents == 4
    assert rows[1].error.startswith("1.parquet cannot be read, at least not to its end: ")
    with pytest.raises(ValueError, match="No file of .*1.parquet can be read"):
        Corpus(path)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"".join(b'{"text": "%d"}\n' % i for i in range(9999)))[:-5000])
    rows = list(Corpus(tmp_path / "a.jsonl.gz").read())
    assert len(rows) > 1000 and rows[-1].error.startswith("a.jsonl.gz cannot be read")
    assert all(row.error is None for row in rows[:-1])


def test_a_damaged_row_group_is_reported_row_by_row(tmp_path):
    rows = [{"text": f"graph {i} cut {i * i}"} for i in range(60)]
    path = write_parquet(tmp_path / "a.parquet", rows, row_group_size=20, compression="zstd", use_dictionary=False)
    column = parquet.ParquetFile(path).metadata.row_group(1).column(0)
    content = bytearray(path.read_bytes())
    content[column.data_page_offset : column.data_page_offset + 30] = b"\xff" * 30
    path.write_bytes(content)
    found = list(Corpus(path).read())
    assert [row.values is None for row in found] == [False] * 20 + [True] * 20 + [False] * 20


def test_a_damaged_page_late_in_a_row_group_does_not_repeat_other_rows(tmp_path):
    rows = [{"text": f"graph {i} cut {i * i}"} for i in range(5000)]
    options = {"compression": "zstd", "use_dictionary": False, "data_page_size": 4000}
    path = write_parquet(tmp_path / "a.parquet", rows, **options)
    column = parquet.ParquetFile(path).metadata.row_group(0).column(0)
    content, middle = bytearray(path.read_bytes()), column.data_page_offset + column.total_compressed_size // 2
    content[middle : middle + 60] = b"\xff" * 60
    path.write_bytes(content)
    found = list(Corpus(path).read())
    assert len(found) == 5000 and [row.id for row in found] == list(range(5000))
    read = [row for row in found if row.values is not None]
    assert 1024 <= len(read) < 5000 and all(row.values["text"] == rows[row.number]["text"] for row in read)
    assert all(row.error for row in found if row.values is None)


def test_a_value_that_is_not_utf_8_is_one_error(tmp_path):
    texts = [b"graph %d" % i for i in range(3000)]
    texts[1500] = b"gr\xffph"
    offsets = pyarrow.array([0, *itertools.accumulate(map(len, texts))], pyarrow.int32()).buffers()[1]
    column = pyarrow.Array.from_buffers(pyarrow.string(), 3000, [None, offsets, pyarrow.py_buffer(b"".join(texts))])
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    found = list(Corpus(tmp_path / "a.parquet").read())
    assert [row.number for row in found if row.values is None] == [1500]
    assert found[1500].error.startswith("a.parquet, row 1501: 'utf-8' codec can't decode byte 0xff")
    assert all(row.values["text"] == f"graph {row.number}" for row in found if row.number != 1500)


def test_a_lost_connection_is_no_damaged_file(tmp_path, monkeypatch):
    corpus = Corpus(write_jsonl(tmp_path / "a.jsonl", [{"text": "graph"}]))

    def fail_with(error):
        def read_lines(path):
            yield partial(json.loads, b'{"text": "graph"}')
            raise error

        monkeypatch.setattr(corpus, "_read_file", read_lines)

    for error in (TimeoutError(), ConnectionResetError(104, "reset"), HubError("503")):
        fail_with(error)
        with pytest.raises(type(error)):
            list(corpus.read())
    for error in (OSError("Invalid data stream"), gzip.BadGzipFile("crc"), EOFError(), lzma.LZMAError("corrupt")):
        fail_with(error)
        first, last = corpus.read()
        assert first.values["text"] == "graph" and "a.jsonl cannot be read" in last.error


@pytest.mark.parametrize("name", ["b.jsonl.gz", "b.jsonl.xz", "b.csv.gz"])
def test_a_file_that_is_damaged_at_its_beginning_does_not_stop_the_others(name, tmp_path):
    kind = name.split(".")[1]
    (write_jsonl if kind == "jsonl" else write_csv)(tmp_path / f"a.{kind}", ROWS)
    (tmp_path / name).write_bytes({"gz": gzip, "xz": lzma}[name[-2:]].compress(b"a" * 1000)[:20])
    found = list(Corpus(tmp_path).read())
    assert [row.values is None for row in found] == [False] * 4 + [True] and f"{name} cannot be read" in found[4].error
    with pytest.raises(ValueError, match=f"No file of .* can be read. {name}"):
        Corpus(tmp_path / name)


def test_a_text_file_that_cannot_be_read_has_its_path_as_id(tmp_path):
    (tmp_path / "a.txt").write_text("graph cuts")
    (tmp_path / "b.txt").write_bytes(b"gr\xffph")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"graph")[:10])
    found = list(Corpus(tmp_path).read())
    assert [(row.id, row.values is None) for row in found] == [("a.txt", False), ("b.txt", True), ("c.txt.gz", True)]


def test_a_column_that_json_lines_lack_is_a_warning(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "graph", "year": 1}])
    write_jsonl(tmp_path / "b.jsonl", [{"text": "cut", "year": 2}])
    with pytest.warns(UserWarning, match="'yaer',.*'text', 'year'") as found:
        Corpus(tmp_path, keep=["yaer"])
    assert len(found) == 1  # not for each file
    with pytest.warns(UserWarning, match="have no column 'headlin'"):
        Corpus(path, title_column="headlin")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Corpus(path, keep=["year"])


@pytest.mark.parametrize(
    "name, kind, message",
    [
        ("nowhere.jsonl", FileNotFoundError, "nowhere.jsonl does not exist"),
        ("", FileNotFoundError, "There are no .* files in"),
        ("*.parquet", FileNotFoundError, "There are no .* files in"),
        ("empty.jsonl", ValueError, "There are no documents in"),
        ("empty.parquet", ValueError, "There are no documents in"),
        ("empty.csv", ValueError, "There are no documents in"),
        ("empty of rows.csv", ValueError, "There are no documents in"),
        ("a blank first line.csv", ValueError, "has no column 'text'"),
        ("a.docx", ValueError, "unknown suffix '.docx'"),
        ("pipe.jsonl", ValueError, "pipe.jsonl is not a regular file"),
        ("utf-16.jsonl", ValueError, "UTF-16-LE.*--encoding utf-16-le"),
    ],
)
def test_what_cannot_be_opened_is_named(name, kind, message, tmp_path):
    if name.startswith("pipe"):
        os.mkfifo(tmp_path / name)
    elif name == "empty.parquet":
        parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), tmp_path / name)
    elif name == "empty.csv":
        (tmp_path / name).touch()
    elif name == "empty of rows.csv":
        (tmp_path / name).write_text("id,text\n")
    elif name == "a blank first line.csv":
        (tmp_path / name).write_text("\nid,text\n1,graph\n")
    elif name.startswith(("empty", "a", "utf")):
        (tmp_path / name).write_text(
            "\n \n" if name.startswith("empty") else '{"text": "graph"}',
            encoding="utf-16-le" if "utf" in name else "utf-8",
        )
    with pytest.raises(kind, match=message):
        Corpus(f"{tmp_path}/{name}")


def test_a_source_that_was_moved_is_the_same_and_one_that_has_changed_is_not(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("graph")
    before = Corpus(tmp_path / "texts").describe()["source"]["sha256"]
    (tmp_path / "texts").rename(tmp_path / "moved")
    assert Corpus(tmp_path / "moved").describe()["source"]["sha256"] == before
    (tmp_path / "moved" / "a.txt").write_text("graphs")
    assert Corpus(tmp_path / "moved").describe()["source"]["sha256"] != before


def test_texts_are_joined_with_their_titles_and_errors_are_kept(tmp_path):
    rows = [{"title": "A", "text": ["deep", "cuts"]}, {"text": 3}, {"text": " "}, {"text": "x"}]
    texts, errors = read_texts(Corpus(write_jsonl(tmp_path / "a.jsonl", rows)), 3)
    assert texts == {0: join_title("A", "deep cuts")}
    assert errors == {1: "'text' is 3, not a text", 2: "it is empty"}


def test_options_of_text_files(tmp_path):
    (tmp_path / "a.csv").write_bytes("id;text\n1;naïve, graph\n".encode("cp1252"))
    with pytest.raises(ValueError, match="'id;text'.*Use --delimiter ';'"):
        Corpus(tmp_path / "a.csv")
    (row,) = Corpus(tmp_path / "a.csv", delimiter=";").read()
    assert row.error == "a.csv, row 1: it is not valid UTF-8; pass --encoding"
    corpus = Corpus(tmp_path / "a.csv", delimiter=";", encoding="cp1252")
    assert [row.values["text"] for row in corpus.read()] == ["naïve, graph"]
    assert (corpus.describe()["delimiter"], corpus.describe()["encoding"]) == (";", "cp1252")
    path = write_parquet(tmp_path / "a.parquet", ROWS)
    for options in ({"delimiter": ";"}, {"encoding": "utf-8"}):
        with pytest.raises(ValueError, match=f"--{next(iter(options))} .* has no effect on .parquet"):
            Corpus(path, **options)


def test_json_files_hold_lines_or_an_array(tmp_path):
    for text in (json.dumps(ROWS), json.dumps(ROWS, indent=1), "\n".join(map(json.dumps, ROWS))):
        (tmp_path / "a.json").write_text(text)
        assert contents(Corpus(tmp_path / "a.json")) == EXPECTED
    (tmp_path / "a.json").write_text(json.dumps(ROWS[0], indent=1))
    with pytest.raises(ValueError, match="one object over several lines"):
        Corpus(tmp_path / "a.json")
    (tmp_path / "a.json").write_text(json.dumps(ROWS * 9)[:-40])
    *rows, last = Corpus(tmp_path / "a.json").read()
    assert (
        [row.id for row in rows] == ["d0", "d1", "d2", "d3"] * 8 + ["d0", "d1", "d2"]
        and last.id is None
        and "a.json cannot be read" in last.error
    )


def test_no_row_has_the_id_of_another(tmp_path):
    lines = [
        '{"id": 1, "text": "graph"}',
        "{no json",
        '{"text": "cut"}',
        '{"id": NaN, "text": "cut"}',
        '"a"',
        '{"id": 4}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert [row.id for row in Corpus(tmp_path / "a.jsonl").read()] == [1, None, None, None, None, 4]
    (tmp_path / "a.csv").write_text("id,text\n2,graph\n3\n0,cut\n")
    assert [row.id for row in Corpus(tmp_path / "a.csv").read()] == ["2", None, "0"]
    (tmp_path / "b.jsonl").write_text("{no json\n" + '{"text": "cut"}\n' * 30 + '{"id": 3, "text": "cut"}\n')
    corpus = Corpus(tmp_path / "b.jsonl")
    with pytest.warns(UserWarning, match="Document 31 .* 'id'"):
        assert [row.id for row in corpus.read()] == list(range(32))


@pytest.mark.parametrize("header, message", [("id,text,text", "two columns 'text'"), ("text,,", "without a name")])
def test_columns_of_the_same_name_are_refused(header, message, tmp_path):
    (tmp_path / "a.csv").write_text(f"{header}\n1,2,3\n")
    with pytest.raises(ValueError, match=f"a.csv has .*{message}"):
        Corpus(tmp_path / "a.csv")
    if "id" in header:
        table = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 3, header.split(","))
        parquet.write_table(table, tmp_path / "a.parquet")
        with pytest.raises(ValueError, match=f"a.parquet has .*{message}"):
            Corpus(tmp_path / "a.parquet")


@pytest.mark.parametrize("kind", ["link to nothing", "loop", "pipe", "folder", "no permission"])
@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet", "txt"])
def test_a_file_that_is_none_is_an_error_and_the_others_are_read(kind, suffix, tmp_path):
    write = {
        "parquet": write_parquet,
        "csv": write_csv,
        "jsonl": write_jsonl,
        "txt": lambda path, _: path.write_text("a"),
    }
    for name in "ac":
        write[suffix](tmp_path / f"{name}.{suffix}", ROWS[:1])
    path = tmp_path / f"b.{suffix}"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        (path / "empty").mkdir(parents=True)
    elif kind == "no permission":
        write[suffix](path, ROWS[:1])
        path.chmod(0)
    else:
        path.symlink_to("nothing" if kind == "link to nothing" else path.name)
    list(Corpus(tmp_path).read())  # imports all modules, whose folders may be root's alone
    with bound_by_permissions(tmp_path):
        for source in (tmp_path, f"{tmp_path}/*.{suffix}"):
            corpus = Corpus(source)
            errors = [row.error is not None for row in corpus.read()]
            assert errors == ([False, False] if kind == "folder" else [False, True, False])
            assert corpus.describe()["source"]["sha256"]


def test_rows_of_new_documents_alone_are_blocks(tmp_path):
    rows = [{"id": i, "text": "graph"} for i in range(10)]
    corpus = Corpus(write_jsonl(tmp_path / "a.jsonl", rows))
    blocks = list(corpus.blocks(2, is_new=lambda row: row.id % 2 == 1))
    assert [(block.start, block.end, [row.id for row in block.rows]) for block in blocks] == [
        (0, 2, [1, 3]), (2, 4, [5, 7]), (4, 5, [9]),
    ]  # fmt: skip
    rest = list(corpus.blocks(2, {0: 2}, is_new=lambda row: row.id % 2 == 1))
    assert rest == blocks[1:]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_byte_order_mark_names_the_encoding(name, encoding, tmp_path):
    row = {"id": "ü", "text": "naïve graph"}
    content = {
        "a.jsonl": json.dumps(row),
        "a.json": json.dumps([row]),
        "a.csv": "id,text\nü,naïve graph",
        "a.txt": row["text"],
    }
    (tmp_path / name).write_bytes(content[name].encode(encoding))
    (found,) = Corpus(tmp_path / name).read()
    assert found.values["text"] == row["text"] and found.id == ("a.txt" if name == "a.txt" else "ü")
