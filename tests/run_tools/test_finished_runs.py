"""Runs that are repeated after their end, that append, and folders that are not theirs."""

import csv
import datetime
import decimal
import json
import os
import shutil
import uuid

import pyarrow
import pytest
import typer
from pyarrow import parquet
from typer.testing import CliRunner

from lexperts.cli import build_app
from lexperts.cli.keyphrases import app
from run_tools import resume
from run_tools.claims import RECORD, Claim
from run_tools.corpus import block_runs
from run_tools.corpus.block_runs import check_output, run_blocks
from run_tools.corpus.documents import Corpus
from run_tools.corpus.outputs import format_row
from run_tools.errors import UserError
from run_tools.resume import ResumableOutput, SettingsMismatchError
from tests.corpora import Lengths, lines, stop_after, write_jsonl

TEXT = "The network of the graph is cut. " * 30
ROWS = [{"id": i, "text": "graph " * (i + 1), "year": 2000 + i} for i in range(10)]


def run(source, output, append=False, keep=("year",), process=None, **options):
    corpus = Corpus(source, keep=keep, output=output)
    return run_blocks(process or Lengths(), corpus, output, block_size=2, append=append, **options)


def stop(monkeypatch, blocks, *arguments, **options):
    stop_after(monkeypatch, blocks, lambda: run(*arguments, **options))


@pytest.fixture
def source(tmp_path):
    return write_jsonl(tmp_path / "in.jsonl", ROWS)


@pytest.fixture
def unfinished(source, tmp_path, monkeypatch):
    """OUT, OUT.parts of a run that has stopped after two blocks, and the output of a whole run."""
    run(source, tmp_path / "whole.jsonl")
    stop(monkeypatch, 2, source, tmp_path / "out.jsonl")
    assert ResumableOutput(tmp_path / "out.jsonl", "test").blocks() == {0: 2, 2: 4}
    return tmp_path / "out.jsonl", tmp_path / "out.jsonl.parts", (tmp_path / "whole.jsonl").read_bytes()


def content(folder):
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_file_that_comes_during_a_run_stays(source, tmp_path, monkeypatch):
    join = block_runs.join_blocks

    def join_later(*arguments):
        (tmp_path / "out.jsonl.parts" / "thesis.txt").write_text("mine")
        return join(*arguments)

    monkeypatch.setattr(block_runs, "join_blocks", join_later)
    run(source, tmp_path / "out.jsonl")
    assert {path.name for path in (tmp_path / "out.jsonl.parts").iterdir()} == {"thesis.txt"}


@pytest.mark.parametrize("change", ["truncated", "longer", "other content", "foreign", "no record", "damaged record"])
def test_a_block_that_is_not_of_the_run_is_not_joined(change, unfinished, source):
    output, parts, whole = unfinished
    block = parts / "000000000002-000000000004.jsonl"
    original = block.read_bytes()
    if change == "truncated":
        block.write_bytes(original[:-7])
    elif change == "longer":
        block.write_bytes(original + original)
    elif change == "other content":
        block.write_bytes(original.replace(b"2002", b"2222"))
    elif change == "foreign":
        block = parts / "000000000004-000000000006.jsonl"
        block.write_bytes(original)
    else:
        (parts / RECORD).write_text("{") if change == "damaged record" else (parts / RECORD).unlink()
    left = block.read_bytes()
    with pytest.raises(UserError) as error:
        run(source, output)
    assert not output.exists() and str(parts) in str(error.value) and block.read_bytes() == left
    if "record" not in change:  # the fix of the message
        assert block.name in str(error.value)
        block.unlink()
        assert run(source, output) == (10, 0, [], 10) and output.read_bytes() == whole


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv", "tsv"])
def test_a_finished_run_is_complete(suffix, source, tmp_path):
    output = tmp_path / f"out.{suffix}"
    assert run(source, output) == (10, 0, [], 10)
    before = content(tmp_path)
    assert run(source, output) == run(source, output, append=True) == (10, 0, [], 0)
    assert content(tmp_path) == before and not (tmp_path / f"out.{suffix}.parts").exists()


@pytest.mark.parametrize("change", ["option", "source", "block size", "output", "no record", "record of another"])
def test_an_output_of_anything_else_is_refused(change, source, tmp_path):
    output, options = tmp_path / "out.jsonl", {}
    run(source, output)
    if change == "option":
        options, message = {"keep": ["year", "text"]}, "other settings: keep="
    elif change == "source":
        write_jsonl(source, ROWS[1:])
        message = "source=.*in.jsonl .* before, .*add --append"
    elif change == "block size":
        options, message = {"settings": {"block_size": 3}}, "block_size=2 before, 3 now"
    elif change == "output":
        output.write_bytes(output.read_bytes() + b"{}\n")
        message = "has changed since"
    else:
        record = ResumableOutput(output, "test").record
        record.unlink()
        if change == "record of another":
            record.write_text("{}")
        message = "is not of a run"
    before = content(tmp_path)
    with pytest.raises(SettingsMismatchError, match=f"out.jsonl already exists, and .*{message}"):
        run(source, output, **options)
    assert content(tmp_path) == before and not (tmp_path / "out.jsonl.parts").exists()


def test_an_output_that_is_a_folder_or_the_source_is_named(source, tmp_path):
    before = source.read_bytes()
    with pytest.raises(UserError, match=f"OUT {source} is the source, which is not replaced. Name another file."):
        check_output(source, str(source))
    with pytest.raises(UserError, match=f"OUT {tmp_path} is a folder. Name a file in it"):
        check_output(tmp_path, str(source))
    assert source.read_bytes() == before


@pytest.mark.parametrize("name", ["out.jsonl", ".out.jsonl.run.json"])
@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_link_and_a_users_record_stay(kind, name, source, tmp_path):
    path = tmp_path / name
    path.write_text("mine") if kind == "file" else path.symlink_to("nothing.jsonl")
    with pytest.raises(SettingsMismatchError, match=f"{name} (is|already)"):
        check_output(tmp_path / "out.jsonl")
    with pytest.raises(SettingsMismatchError, match=f"{name} (is|already)"):
        run(source, tmp_path / "out.jsonl")
    assert path.read_text() == "mine" if kind == "file" else path.is_symlink()
    assert sorted(os.listdir(tmp_path)) == sorted([name, source.name])


@pytest.mark.parametrize("pattern", ["", "*.jsonl", "*.json*"])
def test_an_output_beside_its_source_is_not_read(pattern, tmp_path, monkeypatch):
    """Nor are its record and the blocks of a run that was killed."""
    folder = tmp_path / "in"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", ROWS)
    source, output = folder / pattern, folder / "out.jsonl"
    stop(monkeypatch, 2, source, output)
    assert run(source, output).documents == 10
    assert run(source, output) == (10, 0, [], 0)
    write_jsonl(folder / "b.jsonl", [{"id": 99, "text": "new", "year": 1}])
    assert run(source, output, append=True) == (11, 0, [], 1)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_append_adds_the_documents_with_new_ids(suffix, tmp_path):
    bad = "{no json\n"
    source, output, whole = tmp_path / "in.jsonl", tmp_path / f"out.{suffix}", tmp_path / f"whole.{suffix}"
    text = [json.dumps(row) + "\n" for row in ROWS]
    source.write_text("".join(text[2:5]) + bad)
    assert run(source, output, append=True) == (4, 1, [], 4)
    source.write_text("".join(text[2:5]) + bad + "".join(text[:2]) + bad + "".join(text[5:]))
    assert run(source, output, append=True) == (12, 2, [], 8)
    run(source, whole)
    rows = {"jsonl": lines, "parquet": lambda path: parquet.read_table(path).to_pylist(), "csv": read_csv}[suffix]
    assert rows(output) == rows(whole)
    assert run(source, output, append=True) == (12, 2, [], 0)
    write_jsonl(source, ROWS[5:])  # older documents are gone: what is written stays
    assert run(source, output, append=True) == (12, 2, [], 0) and rows(output) == rows(whole)


def read_csv(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("moment", ["block", "record", "rename", "removal", "grown again"])
def test_an_append_that_is_killed_at_any_moment_resumes(moment, tmp_path, monkeypatch):
    source, output = write_jsonl(tmp_path / "in.jsonl", ROWS[:3]), tmp_path / "out.jsonl"
    run(source, output)
    write_jsonl(source, ROWS[:8])

    def killed(*_):
        raise KeyboardInterrupt

    if moment in ("block", "grown again"):
        stop(monkeypatch, 1, source, output, append=True)
    else:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            if moment == "rename":
                write = resume.write_file
                patch.setattr(resume, "write_file", lambda *args: write(*args) or killed())
            elif moment == "record":
                patch.setattr(resume, "write_file", killed)
            else:
                patch.setattr(Claim, "remove", killed)
            run(source, output, append=True)
    if moment == "grown again":
        write_jsonl(source, ROWS)
    count = len(ROWS) if moment == "grown again" else 8
    summary = run(source, output, append=True)
    assert summary == (count, 0, [], 0 if moment == "removal" else count - 3)
    assert [row["id"] for row in lines(output)] == list(range(count)) and not (tmp_path / "out.jsonl.parts").exists()
    assert ResumableOutput(output, "test").find_record().size == output.stat().st_size


def test_append_needs_ids_and_the_same_output(source, tmp_path):
    output = tmp_path / "out.jsonl"
    run(source, output)
    for rows, error, message in (
        ([{"text": "graph"}] * 12, ValueError, "finds new documents by their ids, and .* has none"),
        ([*ROWS, {"text": "graph"}], ValueError, "A document has no id"),
    ):
        write_jsonl(source, rows)
        with pytest.raises(error, match=message):
            run(source, output, append=True)
        shutil.rmtree(tmp_path / "out.jsonl.parts", ignore_errors=True)
    write_jsonl(source, [*ROWS, {"id": 10, "text": "graph"}])
    changed = output.read_bytes().replace(b"2000", b"3000")
    output.write_bytes(changed)
    with pytest.raises(SettingsMismatchError, match="has changed since"):
        run(source, output, append=True)
    assert output.read_bytes() == changed


@pytest.mark.parametrize("source", ["in", "in/**/*.txt"])
def test_a_new_file_changes_no_other_path(source, tmp_path):
    for count, (text, name) in enumerate([("old", "in/sub/a.txt"), ("newer", "in/a.txt")], start=1):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        assert run(tmp_path / source, tmp_path / "out.jsonl", keep=(), append=True) == (count, 0, [], 1)
    rows = [(row["id"], row["length"]) for row in lines(tmp_path / "out.jsonl")]
    assert rows == [("sub/a.txt", 3), ("a.txt", 5)]


def test_a_source_that_changes_while_it_is_read_is_not_joined(source, tmp_path):
    class Truncating(Lengths):
        def process_rows(self, rows, progress=None):
            os.truncate(source, 200)
            return super().process_rows(rows)

    with pytest.raises(RuntimeError, match="in.jsonl.*out.jsonl"):
        run(source, tmp_path / "out.jsonl", process=Truncating())
    assert not (tmp_path / "out.jsonl").exists()


def test_values_that_json_does_not_have(tmp_path):
    number, day = uuid.UUID(int=7), datetime.datetime(2024, 5, 17, 12, 30)
    row = {"id": decimal.Decimal("1.50"), "text": "graph", "day": day, "date": day.date(), "score": float("nan")}
    row |= {"worst": float("-inf"), "nested": [{"x": float("inf")}]}
    table = pyarrow.Table.from_pylist([row])
    table = table.append_column("key", pyarrow.array([str(number)]))
    parquet.write_table(table, tmp_path / "in.parquet")
    keep = ["day", "date", "score", "worst", "nested", "key"]
    run(tmp_path / "in.parquet", tmp_path / "out.jsonl", keep=keep)
    text = (tmp_path / "out.jsonl").read_text()
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert found == {
        "id": "1.50", "day": "2024-05-17T12:30:00", "date": "2024-05-17", "score": None, "worst": None,
        "nested": [{"x": None}], "key": str(number), "length": 5,
    }  # fmt: skip
    assert format_row({"id": number}, {"x": 1}) == f'{{"id": "{number}", "x": 1}}\n'


def test_a_result_that_is_not_a_number_is_an_error(source, tmp_path):
    class Unsure(Lengths):
        def process_rows(self, rows, progress=None):
            return [{"length": float("nan")} for _ in rows]

    assert run(source, tmp_path / "out.jsonl", process=Unsure())[:2] == (10, 10)
    assert lines(tmp_path / "out.jsonl")[0] == {"id": 0, "year": 2000, "error": "a result is not a number"}


def test_csv_has_no_formulas(tmp_path):
    rows = [{"id": "=1+1", "text": "graph", "note": "@SUM(A1)"}, {"id": "-5", "text": "cut", "note": "-5 or more"}]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    run(source, tmp_path / "out.csv", keep=["note"])
    assert read_csv(tmp_path / "out.csv") == [
        {"id": "'=1+1", "note": "'@SUM(A1)", "length": "5"},
        {"id": "-5", "note": "'-5 or more", "length": "3"},
    ]
    write_jsonl(source, [*rows, {"id": "+x", "text": "c", "note": None}])
    assert run(source, tmp_path / "out.csv", keep=["note"], append=True) == (3, 0, [], 1)
    assert [row["id"] for row in read_csv(tmp_path / "out.csv")] == ["'=1+1", "-5", "'+x"]


@pytest.fixture
def command(folder, tmp_path):
    def start(source, name="out.csv", *options):
        arguments = ["extract", str(source), str(tmp_path / name), "--model", str(folder), *options]
        return CliRunner().invoke(app, arguments)

    return start


def test_the_command_reads_and_writes_csv_and_is_repeated(command, tmp_path):
    source = tmp_path / "in.csv"
    source.write_bytes(f"id;text;note\na;{TEXT};=1\nb;Deep networks;é\n".encode("cp1252"))
    options = ("--delimiter", ";", "--encoding", "cp1252", "--keep", "note", "--top-k", "2")
    done = command(source, "out.csv", *options)
    assert done.exit_code == 0, done.stderr
    rows = read_csv(tmp_path / "out.csv")
    assert [(row["id"], row["note"]) for row in rows] == [("a", "'=1"), ("b", "é")]
    assert rows[0]["keyphrases"].count("; ") == rows[0]["scores"].count("; ") and float(rows[0]["scores"].split(";")[0])
    done = command(source, "out.csv", *options)
    assert done.exit_code == 0 and "is complete, nothing to do: 2 documents" in done.stdout
    done = command(source, "out.csv", *options[:-1], "3")
    assert done.exit_code == 2 and "top_k=2 before, 3 now" in done.stderr
    with source.open("ab") as file:
        file.write(b"c;A network;x\n")
    done = command(source, "out.csv", *options)
    assert done.exit_code == 2 and "--append" in done.stderr
    done = command(source, "out.csv", *options, "--append")
    assert done.exit_code == 0 and "3 documents in" in done.stdout and "1 of them new" in done.stdout
    assert [row["id"] for row in read_csv(tmp_path / "out.csv")] == ["a", "b", "c"]


def test_only_bad_rows_are_a_failure(command, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": 3}\n{"text": null}\n')
    for _ in range(2):
        done = command(source, "out.jsonl")
        assert done.exit_code == 1 and "no document could be processed" in done.stderr
    source.write_text('{"text": 3}\n{"text": "graph"}\n')
    assert command(source, "other.jsonl").exit_code == 0


def test_an_option_that_the_format_does_not_have_is_refused(command, source, tmp_path):
    before = content(tmp_path)
    done = command(source, "out.jsonl", "--delimiter", ";")
    assert done.exit_code == 2 and "--delimiter ';' has no effect on .jsonl" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and content(tmp_path) == before


def test_rows_that_keep_all_columns_are_appended_by_their_ids(tmp_path):
    source, output = write_jsonl(tmp_path / "in.jsonl", ROWS[:2]), tmp_path / "out.jsonl"
    run(source, output, keep=None)
    write_jsonl(source, [ROWS[5], *ROWS[:2]])
    assert run(source, output, keep=None, append=True) == (3, 0, [], 1)
    assert [(row["id"], row["year"], row["length"]) for row in lines(output)] == [
        (0, 2000, 6),
        (1, 2001, 12),
        (5, 2005, 36),
    ]


@pytest.mark.parametrize("words", ["keyphrases extract", "keyphrases generate", "summarize", "define terms"])
def test_every_command_that_reads_corpora_has_their_options(words):
    command = typer.main.get_command(build_app())
    for word in words.split():
        command = command.commands[word]
    assert {"append", "delimiter", "encoding", "block_size", "engine"} <= {option.name for option in command.params}


def test_files_are_appended_by_their_paths(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for name in "bc":
        (folder / f"{name}.txt").write_text(name * 3)
    output = tmp_path / "out.jsonl"
    run(folder, output, keep=())
    (folder / "a.txt").write_text("aaaa")
    assert run(folder, output, keep=(), append=True) == (3, 0, [], 1)
    assert [(row["id"], row["length"]) for row in lines(output)] == [("b.txt", 3), ("c.txt", 3), ("a.txt", 4)]
