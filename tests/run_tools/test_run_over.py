# needs: parquet
"""`run_over`: interruptions, changes and damage end in the same bytes, or in an error that names the cause."""

import errno
import os
import resource
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from datetime import date
from decimal import Decimal
from itertools import count
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from pyarrow import parquet

from run_tools.errors import UserError, one_line
from run_tools.files import locked
from run_tools.run_over import process_each, run_over
from tests.tools import read_rows, run_in_child, write_rows

ROWS = [{"id": i, "text": "word " * (i % 7), "year": 2000 + i} if i % 5 != 3 else {"id": i} for i in range(23)]


def text_of(row):
    if "text" not in row:
        raise ValueError("there is no text")
    return row["text"]


def lengths(texts):
    return [{"length": len(text), "words": [{"word": word, "score": 0.5} for word in text.split()]} for text in texts]


def run(source, out, settings=None, process=lengths, **options):
    options = {"check": text_of, "batch_size": 4, "results": ("length", "words"), **options}
    return run_over(lambda: process, source, out, settings or {"level": 1}, **options)


class Interruptions(RuleBasedStateMachine):
    """Any number of killed runs, full disks, damaged ends, other settings and repetitions."""

    @initialize(suffix=st.sampled_from([".jsonl", ".csv", ".parquet"]), number=st.integers(1, len(ROWS)))
    def begin(self, suffix, number):
        self.folder = Path(tempfile.mkdtemp())
        self.source = write_rows(self.folder / "in.jsonl", ROWS[:number])
        self.whole, self.out = self.folder / f"whole{suffix}", self.folder / f"out{suffix}"
        self.lines = self.out if suffix == ".jsonl" else Path(f"{self.out}.rows.jsonl")
        run(self.source, self.whole)

    @rule(last=st.integers(1, 40))
    def kill(self, last):
        """By signal 9, when a file is opened, renamed or removed, or rows are processed for the nth time."""
        events = count(1)

        def event():
            if next(events) == last:
                os.kill(os.getpid(), signal.SIGKILL)

        def watch(name, given):
            if name in ("open", "os.rename", "os.remove") and str(given[0]).startswith(str(self.folder)):
                event()

        def run_watched():
            sys.addaudithook(watch)
            run(self.source, self.out, process=lambda texts: event() or lengths(texts))

        run_in_child(run_watched)

    @rule(size=st.integers(0, 1500))
    def fill(self, size):
        """No file may be larger, as on a full disk: an error that names the file."""

        def run_limited():
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            with suppress(UserError):  # without room for a record
                try:
                    run(self.source, self.out)
                except OSError as error:
                    assert error.errno == errno.EFBIG and self.out.name in one_line(error)

        run_in_child(run_limited)

    @rule(size=st.integers(1, 200))
    def damage(self, size):
        """As if the end of the file had not reached the disk."""
        if self.lines.exists():
            os.truncate(self.lines, max(0, self.lines.stat().st_size - size))

    @rule()
    def repeat(self):
        run(self.source, self.out)
        assert self.out.read_bytes() == self.whole.read_bytes()
        assert run(self.source, self.out, process=None).new == 0
        assert not Path(f"{self.out}.rows.jsonl").exists()

    @rule()
    def change(self):
        if any(path.exists() and path.stat().st_size for path in (self.out, self.lines)):
            before = {path: path.read_bytes() for path in self.folder.iterdir()}
            with pytest.raises(UserError, match="level=1 before, 2 now"):
                run(self.source, self.out, {"level": 2})
            time = self.source.stat().st_mtime_ns
            with open(self.source, "a") as file:
                file.write('{"text": "new"}\n')
            with pytest.raises(UserError, match="source='1 file, .* before"):
                run(self.source, self.out)
            self.source.write_bytes(before[self.source])
            os.utime(self.source, ns=(time, time))
            assert {path: path.read_bytes() for path in self.folder.iterdir()} == before

    @rule()
    def forget(self):
        for path in (self.out, self.lines):
            path.unlink(missing_ok=True)

    def teardown(self):
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)


class ManyInterruptions(Interruptions):
    pass


TestInterruptions = Interruptions.TestCase
TestInterruptions.settings = hypothesis_settings(max_examples=40, stateful_step_count=8, deadline=None)
TestManyInterruptions = pytest.mark.nightly(ManyInterruptions.TestCase)
TestManyInterruptions.settings = hypothesis_settings(TestInterruptions.settings, max_examples=400)


def test_only_the_error_of_a_row_is_counted_and_a_bar_shows_how_many_there_are(tmp_path, capsys):
    rows = [{"id": 0, "text": "a", "answer": {"error": "404"}}, {"id": 1}]
    for out in (tmp_path / "out.jsonl", tmp_path / "out.csv"):
        assert run(write_rows(tmp_path / "in.jsonl", rows), out)[:2] == (2, 1)
        assert " 2/2 " in capsys.readouterr().err


def test_a_bad_row_is_an_error_of_its_own(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"id": 7, "text": "a b"}\n{"id": 8, "text"\n\n[1]\n{"id": 9, "text": "bad"}\n')

    def process(texts):
        if "bad" in texts:
            raise ValueError("it is bad")
        return lengths(texts)

    assert run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", process=process)[:2] == (4, 3)
    good, *others = read_rows(tmp_path / "out.jsonl")
    assert (good["id"], good["length"]) == (7, 3) and others[2] == {"id": 9, "text": "bad", "error": "it is bad"}
    assert "line 2" in others[0]["error"] and "line 4" in others[1]["error"]


def test_a_failure_of_all_rows_is_raised_and_what_is_done_is_kept(tmp_path):
    source, out = write_rows(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"

    def process(texts):
        if len(read_rows(out)) >= 8:
            raise RuntimeError("out of memory")
        return lengths(texts)

    with pytest.raises(RuntimeError, match="out of memory"):
        run(source, out, process=process)
    assert len(read_rows(out)) == 8 and run(source, out) == (23, 4, 15)
    one_by_one = process_each(lambda items: [{"length": 1}] if len(items) == 1 else 1 / 0, ["a", "b"], str)
    assert one_by_one == [{"length": 1}] * 2


def test_nothing_of_a_user_is_overwritten(tmp_path):
    source, out = write_rows(tmp_path / "in.jsonl", ROWS), tmp_path / "out.csv"
    for name, message in (("out.csv", "not of a run"), ("out.csv.rows.jsonl", "not of a run")):
        (tmp_path / name).write_text("mine")
        with pytest.raises(UserError, match=message):
            run(source, out)
        assert (tmp_path / name).read_text() == "mine"
        (tmp_path / name).unlink()
    (tmp_path / "out.csv.settings.json").write_text("mine")
    with pytest.raises(UserError, match="settings.json is not of a run"):
        run(source, out)
    (tmp_path / "out.csv.settings.json").unlink()
    run(source, out)
    out.write_text(out.read_text() + "mine\n")
    with pytest.raises(UserError, match="has changed since it was written"):
        run(source, out)
    with pytest.raises(UserError, match="out.xlsx is not the name of"):
        run(source, tmp_path / "out.xlsx")
    for out in (tmp_path, source):
        with pytest.raises(UserError, match=f"{out.name} or .* is not of a run"):
            run(source, out)


def test_a_second_process_with_the_same_output_is_an_error(tmp_path):
    source = write_rows(tmp_path / "in.jsonl", ROWS)
    with locked(tmp_path / "out.jsonl"), pytest.raises(BlockingIOError, match="Another process writes"):
        run(source, tmp_path / "out.jsonl")


def test_what_a_kill_before_the_last_step_leaves_is_removed(tmp_path):
    source, rows = write_rows(tmp_path / "in.jsonl", ROWS), tmp_path / "out.csv.rows.jsonl"
    run(source, tmp_path / "out.csv")
    rows.touch()
    assert run(source, tmp_path / "out.csv", process=None).new == 0 and not rows.exists()


def test_a_source_that_changes_is_an_error(tmp_path):
    source = write_rows(tmp_path / "in.jsonl", ROWS)

    def process(texts):
        os.utime(source, (0, 0))
        return lengths(texts)

    with pytest.raises(UserError, match="has changed while it was read"):
        run(source, tmp_path / "out.jsonl", process=process)


def test_columns_are_kept_and_no_result_replaces_one(tmp_path):
    rows = [{"id": "a", "text": "x", "year": 1, "error": "old"}, {"text": "y", "id": "b"}]
    source = write_rows(tmp_path / "in.jsonl", rows)
    run(source, tmp_path / "all.jsonl")
    names = [" ".join(row) for row in read_rows(tmp_path / "all.jsonl")]
    assert names == ["id text year length words", "text id length words"]
    run(source, tmp_path / "kept.jsonl", keep=["year"])
    assert [(row["id"], row["year"]) for row in read_rows(tmp_path / "kept.jsonl")] == [("a", 1), ("b", None)]
    run(source, tmp_path / "numbered.jsonl", keep=[], id_column="none")
    assert [row["id"] for row in read_rows(tmp_path / "numbered.jsonl")] == [0, 1]
    for options in ({"results": ("year",)}, {"keep": ["year"], "results": ("year",)}, {"keep": ["error"]}):
        with pytest.raises(UserError, match="column '(year|error)' has the name of a result"):
            run(source, tmp_path / "out.jsonl", **options)
    assert not (tmp_path / "out.jsonl").exists()


def test_tables_hold_the_rows_of_json_lines(tmp_path):
    rows = [
        {"id": 1, "text": "=1+1", "tags": ["a", "b"], "n": 2**60, "day": "2020-01-01", "meta": {}, "=1": "b"},
        {"id": "x", "text": "a\nb", "tags": None, "n": None, "day": None},
        {"id": 2},
    ]
    source = write_rows(tmp_path / "in.jsonl", rows)
    for suffix in (".jsonl", ".csv", ".tsv", ".parquet"):
        run(source, tmp_path / f"out{suffix}", types=lambda: {"length": pyarrow.int32()})
    table = parquet.read_table(tmp_path / "out.parquet")
    kinds = {field.name: str(field.type) for field in table.schema}
    assert (kinds["id"], kinds["n"], kinds["day"], kinds["meta"]) == ("string", "int64", "string", "string")
    assert kinds["error"] == "string" and kinds["length"] == "int32" and kinds["words"].startswith("list<")
    expected = [row | {"id": str(row["id"])} for row in read_rows(tmp_path / "out.jsonl")]
    found = [{name: value for name, value in row.items() if value not in (None, "{}")} for row in table.to_pylist()]
    assert found == [{name: value for name, value in row.items() if value not in (None, {})} for row in expected]
    text = (tmp_path / "out.csv").read_text(encoding="utf-8")
    assert text.splitlines()[0].split(",")[-1] == "error" and ",'=1," in text.splitlines()[0]
    assert text.splitlines()[1] == "1,'=1+1,a; b,1152921504606846976,2020-01-01,{},b,4,'=1+1,"
    assert (tmp_path / "out.tsv").read_text(encoding="utf-8").splitlines()[0] == text.splitlines()[0].replace(",", "\t")


def test_values_without_json_are_texts_and_null(tmp_path):
    rows = {"text": ["a", "b"], "day": [date(2020, 1, 2), None], "price": [Decimal("1.5"), None], "x": [np.nan, 1.0]}
    parquet.write_table(pyarrow.table(rows), tmp_path / "in.parquet")
    run(tmp_path / "in.parquet", tmp_path / "out.jsonl", process=lambda texts: [{"text2": "\ud800"}] * len(texts))
    first = read_rows(tmp_path / "out.jsonl")[0]
    assert first == {"text": "a", "day": "2020-01-02", "price": "1.5", "x": None, "text2": "?"}


def test_rows_that_fail_together_and_not_alone_are_warned_of(tmp_path):
    def process(texts):
        if len(texts) > 1:
            raise RuntimeError("too large")
        return [{"length": len(text)} for text in texts]

    source = write_rows(tmp_path / "in.jsonl", [{"text": "a"}, {"text": "bc"}])
    with pytest.warns(UserWarning, match="2 rows failed together .too large., and none alone"):
        run(source, tmp_path / "out.jsonl", process=process)
    assert [row["length"] for row in read_rows(tmp_path / "out.jsonl")] == [1, 2]
