"""Runs over corpora: outputs, resumption after a killed run, settings, errors."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pyarrow
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load_file, save_file
from tqdm import tqdm
from transformers import AutoTokenizer, pipeline
from typer.testing import CliRunner

import keyphrase_tools
from keyphrase_tools.clean_text import clean
from keyphrase_tools.extractor import KeyphraseExtractor
from lexperts.cli.keyphrases import app
from lexperts.recipes.exhird.generate_file import GenerationProcess
from lexperts.recipes.lexicon.define_file import DefinitionProcess
from lexperts.recipes.moesumm.batch_summaries import SummaryProcess
from run_tools import claims, files, resume
from run_tools.claims import Claim, FileEntry
from run_tools.corpus import block_runs, engines, parquet_output
from run_tools.corpus.block_runs import run_blocks
from run_tools.corpus.documents import Corpus
from run_tools.resume import ResumableOutput, SettingsMismatchError
from tests.corpora import Lengths, as_written, extract_file, interrupt, lines, stop_after, write_jsonl

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ["Graph cuts solve energy problems.", "Deep networks learn cuts.", "", "The network of the graph is cut. " * 30]


@pytest.fixture(scope="module")
def extract(folder):
    return pipeline("keyphrase-extraction", model=str(folder))


@pytest.fixture
def source(tmp_path):
    return write_jsonl(tmp_path / "texts.jsonl", [{"id": f"d{i}", "text": text} for i, text in enumerate(TEXTS)])


def run(source, output, block_size=1, keep=()):
    return run_blocks(Lengths(), Corpus(source, keep=keep), output, block_size=block_size)


def test_json_lines_contain_what_the_pipeline_gives(extract, source, tmp_path):
    assert extract_file(extract, source, tmp_path / "out.jsonl", top_k=3) == (4, 0, [], 4)
    assert not (tmp_path / "out.jsonl.parts").exists()
    expected = [as_written(phrases) for phrases in extract(TEXTS, top_k=3)]
    assert any(expected)
    assert lines(tmp_path / "out.jsonl") == [{"id": f"d{i}", "keyphrases": own} for i, own in enumerate(expected)]
    extract_file(extract, source, tmp_path / "all.jsonl", mentions=True)
    assert lines(tmp_path / "all.jsonl")[3]["keyphrases"] == as_written(extract(TEXTS[3]), mentions=True)


def test_parquet_contains_the_same_rows(extract, tmp_path):
    rows = [{"id": i, "text": text, "year": 2000 + i, "tags": ["a"] * i} for i, text in enumerate([*TEXTS, None])]
    source = write_jsonl(tmp_path / "texts.jsonl", rows)
    process = KeyphraseExtractor(extract)
    for name in ("out.jsonl", "out.parquet"):
        run_blocks(process, Corpus(source, keep=["year", "tags"]), tmp_path / name, block_size=2)
    table = parquet.read_table(tmp_path / "out.parquet")
    assert table.schema.names == ["id", "year", "tags", "keyphrases", "error"]
    assert table.schema.field("id").type == pyarrow.int64() and str(table.schema.field("tags").type).startswith("list<")
    found = [{k: v for k, v in row.items() if v is not None} for row in table.to_pylist()]
    assert found == lines(tmp_path / "out.jsonl") and found[4]["error"] == "'text' is None, not a text"


@pytest.mark.parametrize("block_size", [1, 512])
def test_values_of_several_types_are_a_column_of_strings_in_parquet(block_size, tmp_path):
    values = {"id": (3, "x\ud800", [1], None), "year": (3, "2001a", 4, 5), "hash": (2**63 + 1, 5, 6, 7)}
    rows = [
        dict(zip(values, row, strict=True)) | {"text": "graph \ud800"} for row in zip(*values.values(), strict=True)
    ]
    source = write_jsonl(tmp_path / "texts.jsonl", rows)
    for name in ("out.parquet", "out.jsonl"):
        run(source, tmp_path / name, block_size, keep=("year", "hash"))
    table = parquet.read_table(tmp_path / "out.parquet")
    assert table["id"].to_pylist() == ["3", "x\ufffd", "[1]", None] and table["year"].to_pylist()[1] == "2001a"
    assert table["hash"].to_pylist() == [str(2**63 + 1), "5", "6", "7"]
    assert [row["id"] for row in lines(tmp_path / "out.jsonl")] == [3, "x\ud800", [1], None]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_an_interrupted_run_computes_no_finished_block_again_and_ends_in_the_same_bytes(suffix, tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / "texts.jsonl", [{"text": f"graph {i}"} for i in range(60)])
    whole, output = tmp_path / f"whole.{suffix}", tmp_path / f"out.{suffix}"
    run(source, whole, 7)
    processed, process = Counter(), Lengths.process_rows

    def counted(self, rows, progress):
        processed.update(row["text"] for row in rows)
        return process(self, rows, progress)

    monkeypatch.setattr(Lengths, "process_rows", counted)
    for _ in range(3):
        stop_after(monkeypatch, 2, lambda: run(source, output, 7))
    blocks = ResumableOutput(output, "test").blocks()
    assert len(blocks) == 6
    claim = Claim.read(f"{output}.parts")
    name = claim.name_file("000000000042-000000000049.jsonl", FileEntry(100, "")).name
    (claim.folder / f".{name}.1.tmp").write_text('{"id": 4')  # as a killed process leaves it
    with (claim.folder / claims.RECORD).open("a") as record:
        record.write('{"file": "0000')
    processed.clear()
    run(source, output, 7)
    assert processed.total() == 60 - max(blocks.values()) and max(processed.values()) == 1
    assert output.read_bytes() == whole.read_bytes()


SLOW_RUN = """
import sys, time
from run_tools.corpus.block_runs import run_blocks
from run_tools.corpus.documents import Corpus

class Slow:
    results = ("length",)
    def describe(self): return {}
    def types(self): return {"length": None}
    def process_rows(self, rows, progress):
        time.sleep(0.03)
        return [{"length": len(row["text"])} for row in rows]

run_blocks(Slow(), Corpus(sys.argv[1]), sys.argv[2], block_size=9)
"""


def test_killed_at_any_moment_it_ends_with_the_same_bytes(tmp_path):
    source = write_jsonl(tmp_path / "texts.jsonl", [{"text": "graph " * i} for i in range(200)])

    def start(output):
        command = [sys.executable, "-c", SLOW_RUN, str(source), str(output)]
        return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE)

    output, killed = ResumableOutput(tmp_path / "out.jsonl", "test"), 0
    for blocks in (0, 1, 6, 15):
        process = start(output.path)
        while process.poll() is None and not (output.parts.exists() and len(output.blocks()) >= blocks):
            time.sleep(0.002)
        killed += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert killed == 4 and not output.path.exists()
    for path in (output.path, tmp_path / "whole.jsonl"):
        _, errors = (process := start(path)).communicate()
        assert process.returncode == 0, errors.decode()[-2000:]
    assert output.path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_run_that_lost_a_block_is_not_joined(source, tmp_path, monkeypatch):
    output = tmp_path / "out.jsonl"
    stop_after(monkeypatch, 3, lambda: run(source, output))
    with pytest.raises(RuntimeError, match="no results for row 3 of 4"):
        list(ResumableOutput(output, "test").read_blocks(4))
    (tmp_path / "out.jsonl.parts" / "000000000001-000000000002.jsonl").unlink()
    assert run(source, output)[:2] == (4, 0)
    assert [row["id"] for row in lines(output)] == ["d0", "d1", "d2", "d3"]


def test_a_long_text_shows_progress_by_its_windows(extract, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(block_runs, "tqdm", partial(tqdm, mininterval=0, miniters=0))
    source = write_jsonl(tmp_path / "texts.jsonl", [{"text": "graph cut " * 3000}, {"text": 3}, {"text": "cut"}])
    assert extract_file(extract, source, tmp_path / "out.jsonl")[:2] == (3, 1)
    percents = [int(percent) for percent in re.findall(r"(\d+)%", capsys.readouterr().err)]
    assert percents == sorted(percents) and percents[-1] == 100 and len(set(percents)) >= 8


@pytest.mark.parametrize("name", ["out.xml", "out.jsonl.gz"])
def test_an_output_of_another_format_is_named(name, source, tmp_path):
    with pytest.raises(ValueError, match=f"{name} ends in '{Path(name).suffix}'"):
        run(source, tmp_path / name)
    assert {path.name for path in tmp_path.iterdir()} == {"texts.jsonl"}


@pytest.mark.parametrize(
    "number, message",
    [
        (errno.ENOSPC, "has no space left .*000000000002-.*Free some space, and"),
        (errno.EDQUOT, "user's quota has no space left .*"),
        (errno.EFBIG, "limit of file sizes .*"),
    ],
    ids=["disk", "quota", "limit"],
)
def test_a_full_disk_is_named_and_the_run_resumes(number, message, source, tmp_path, monkeypatch):
    fsync, calls = os.fsync, iter(range(6))  # of the claim, and two of each block

    def full(descriptor):
        if next(calls, None) is None:
            raise OSError(number, "no")
        fsync(descriptor)

    with monkeypatch.context() as patch, pytest.raises(OSError, match=f"{message} repeat the command to resume"):
        patch.setattr(os, "fsync", full)
        run(source, tmp_path / "out.jsonl")
    assert not list((tmp_path / "out.jsonl.parts").glob("*.tmp"))
    assert run(source, tmp_path / "out.jsonl")[:2] == (4, 0)


@pytest.mark.skipif(not os.access("/dev/full", os.W_OK), reason="needs /dev/full")
def test_a_device_without_space_is_named(tmp_path, monkeypatch):
    (tmp_path / ".a.1.tmp").symlink_to("/dev/full")
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(OSError, match="has no space left"):
        files.write_file(tmp_path / "a", b"x")


def test_the_output_is_on_the_disk_before_the_blocks_are_deleted(source, tmp_path, monkeypatch):
    order, sync, remove = [], resume.sync, Claim.remove
    monkeypatch.setattr(resume, "sync", lambda path: order.append(path.name) or sync(path))
    monkeypatch.setattr(Claim, "remove", lambda claim: order.append(claim.folder.name) or remove(claim))
    for suffix in ("jsonl", "parquet"):
        order.clear()
        run(source, tmp_path / f"out.{suffix}")
        assert order == [f"joined.{suffix}", tmp_path.name, f"out.{suffix}.parts"]


def killed(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("left", ["all of the blocks", "some of the blocks"])
def test_blocks_of_a_run_that_was_killed_at_its_end_are_removed(left, source, tmp_path, monkeypatch):
    output, parts = tmp_path / "out.jsonl", tmp_path / "out.jsonl.parts"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Claim, "remove", killed)
        run(source, output)
    whole = output.read_bytes()
    if left == "some of the blocks":
        next(parts.glob("0*.jsonl")).unlink()
    assert run(source, output) == (4, 0, [], 0)
    assert not parts.exists() and output.read_bytes() == whole


def test_two_processes_do_not_write_the_same_output(source, tmp_path, monkeypatch):
    stop_after(monkeypatch, 1, lambda: run(source, tmp_path / "out.jsonl"))
    with (
        claims.locked(tmp_path / "out.jsonl.parts"),
        pytest.raises(BlockingIOError, match="Another process writes .*out.jsonl.parts"),
    ):
        run(source, tmp_path / "out.jsonl")
    assert run(source, tmp_path / "out.jsonl")[:2] == (4, 0)


def test_a_file_that_cannot_be_read_ends_the_command_with_an_error(folder, tmp_path):
    (tmp_path / "in").mkdir()
    for i, text in enumerate(TEXTS):
        parquet.write_table(pyarrow.table({"id": [f"d{i}"], "text": [text]}), tmp_path / "in" / f"{i}.parquet")
    path = tmp_path / "in" / "2.parquet"
    path.write_bytes(path.read_bytes()[:-40])
    paths = [str(tmp_path / name) for name in ("in", "out.parquet")]
    done = CliRunner().invoke(app, ["extract", *paths, "--model", str(folder)])
    assert done.exit_code == 1 and "error: 2.parquet cannot be read" in done.stderr and "Traceback" not in done.stderr
    rows = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["id"] for row in rows] == ["d0", "d1", None, "d3"] and "2.parquet" in rows[2]["error"]


@pytest.fixture
def unfinished(folder, tmp_path, monkeypatch):
    """A run that has stopped, of a copy of the model and of a source, and how it is started again."""
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    source = write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])

    def arguments(model=model, source=source, of_pipeline=(), **options):
        extract = pipeline("keyphrase-extraction", model=str(model), **dict(of_pipeline))
        return (extract, source, tmp_path / "out.jsonl"), {"top_k": 3, "block_size": 2, **options}

    given, options = arguments()
    interrupt(monkeypatch, 1, *given, **options)

    def start(**changes):
        given, options = arguments(**changes)
        return extract_file(*given, **options)

    return start


def test_an_unfinished_run_resumes_with_a_model_and_a_source_that_were_moved(unfinished, tmp_path):
    moved = {name: (tmp_path / name).rename(tmp_path / f"moved-{name}") for name in ("model", "texts.jsonl")}
    assert unfinished(model=moved["model"], source=moved["texts.jsonl"])[:2] == (4, 0)
    extract, whole = pipeline("keyphrase-extraction", model=str(moved["model"])), tmp_path / "whole.jsonl"
    extract_file(extract, moved["texts.jsonl"], whole, top_k=3)  # in one block
    assert (tmp_path / "out.jsonl").read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    "change", ["weights", "config", "tokenizer", "source", "option", "option of the pipeline", "block_size", "version"]
)
def test_what_differs_from_an_unfinished_run_is_named(unfinished, tmp_path, change, monkeypatch):
    model, options, config = tmp_path / "model", {}, tmp_path / "model" / "config.json"
    if change == "weights":
        weights = load_file(model / "model.safetensors")
        weights["classifier.bias"] += 0.1  # trained a little more, in the same place
        save_file(weights, model / "model.safetensors", {"format": "pt"})
        difference = f"model={model} ("
    elif change == "config":
        settings = json.loads(config.read_text()) | {"keyphrase_threshold": 0.2}
        config.write_text(json.dumps(settings))
        difference = "config.keyphrase_threshold='0.4' before, '0.2' now"
    elif change == "tokenizer":
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.model_max_length = 40
        tokenizer.save_pretrained(model)
        difference = "tokenizer="
    elif change == "source":
        write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in ["a graph", *TEXTS[1:]]])
        difference = f"source={tmp_path / 'texts.jsonl'} (1 file, "
    elif change == "block_size":
        options, difference = {"block_size": 3}, "block_size=2 before, 3 now"
    elif change == "version":
        monkeypatch.setattr(engines, "__version__", "9.9")
        difference = f"lexperts={keyphrase_tools.__version__!r} before, '9.9' now"
    else:
        options = {"top_k": 5} if change == "option" else {"of_pipeline": {"min_score": 0.5}}
        difference = "top_k=3 before, 5 now" if change == "option" else "min_score=(not given) before, 0.5 now"
    with pytest.raises(SettingsMismatchError, match="out.jsonl.parts holds an unfinished run") as error:
        unfinished(**options)
    assert difference in str(error.value) and str(error.value).count(";") == 0


def test_places_are_those_in_the_rows_own_fields(tiny_seke, tiny_tokenizer, tmp_path):
    model = tiny_seke("bert")
    model.classifier.weight.data *= 0
    model.classifier.bias.data[:] = torch.tensor([0.0, 5.0, 0.0])  # every word begins a phrase
    extract = pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer)
    rows = [
        {"title": "  Graph cuts\tof networks ", "text": " Deep net-\nworks of &amp; in graph\n  cuts"},
        {"title": "The network?", "text": "graph cuts"},
        {"title": None, "text": "\n graph cuts"},
        {"title": " ", "text": "cuts of a network"},
    ]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    extract_file(extract, source, tmp_path / "out.jsonl", mentions=True)
    fields = Counter()
    for row, found in zip(rows, lines(tmp_path / "out.jsonl"), strict=True):
        for phrase in found["keyphrases"]:
            fields.update(mention["field"] for mention in phrase["mentions"])
            piece = row[phrase["field"]][phrase["start"] : phrase["end"]]
            assert clean(" ".join(piece.split())) == phrase["keyphrase"]
    assert fields == {"title": 6, "text": 14}


@pytest.mark.parametrize("name, value", [("length", 3), ("error", "x"), ("raw", b"\x00")])
def test_a_column_that_cannot_be_kept_is_named(name, value, tmp_path):
    parquet.write_table(pyarrow.table({"text": ["graph"], name: [value]}), tmp_path / "a.parquet")
    kind, message = (TypeError, "bytes cannot be kept") if name == "raw" else (ValueError, f"--keep {name} is the name")
    with pytest.raises(kind, match=message):
        run(tmp_path / "a.parquet", tmp_path / "out.jsonl", keep=[name])
    assert (tmp_path / "out.jsonl.parts").exists() == (name == "raw")


def test_an_error_column_of_the_source_is_no_error(tmp_path):
    source = write_jsonl(tmp_path / "texts.jsonl", [{"text": "graph", "error": 0.5}, {"text": "cut", "error": "none"}])
    assert run(source, tmp_path / "out.jsonl", keep=None)[:3] == (2, 0, [])
    assert lines(tmp_path / "out.jsonl") == [{"text": "graph", "length": 5}, {"text": "cut", "length": 3}]


def test_a_row_keeps_the_documents_id(tmp_path):
    rows = [{"id": 1, "doc": "x", "text": "graph"}, {"id": 2, "doc": "y", "text": "cut"}]
    source = write_jsonl(tmp_path / "texts.jsonl", rows)
    with pytest.raises(ValueError, match="--keep id is the name of a result"):
        run_blocks(Lengths(), Corpus(source, id_column="doc", keep=["id"]), tmp_path / "out.jsonl")
    run(source, tmp_path / "out.jsonl", keep=["id", "doc"])
    assert lines(tmp_path / "out.jsonl")[1] == {"id": 2, "doc": "y", "length": 3}
    source = write_jsonl(tmp_path / "without.jsonl", [{"text": "graph"}, {"text": "cut"}])
    run(source, tmp_path / "numbers.jsonl", keep=["id"])
    assert [row["id"] for row in lines(tmp_path / "numbers.jsonl")] == [0, 1]


@pytest.mark.parametrize("empty", [{}, {"a": {}}, [{}], [{"a": [{}]}]])
def test_an_object_without_fields_is_a_text_in_parquet(empty, tmp_path):
    source = write_jsonl(tmp_path / "texts.jsonl", [{"text": "graph", "meta": empty}, {"text": "cut", "meta": None}])
    run(source, tmp_path / "out.parquet", keep=["meta"])
    found = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert json.loads(found[0]["meta"]) == empty and found[1]["meta"] is None


def test_numbers_of_two_kinds_are_written_to_parquet(tmp_path):
    rows = [{"id": i, "text": "graph", "large": 2**60 + i, "small": i} for i in range(512)]  # a slice of integers
    rows += [{"id": 0.5, "text": "cut", "large": 0.5, "small": 0.5}]
    run(write_jsonl(tmp_path / "texts.jsonl", rows), tmp_path / "out.parquet", 512, keep=["large", "small"])
    table = parquet.read_table(tmp_path / "out.parquet")
    found = {name: [table[name][i].as_py() for i in (0, 511, 512)] for name in ("id", "large", "small")}
    assert found["id"] == ["0", "511", "0.5"] and found["large"] == [str(2**60), str(2**60 + 511), "0.5"]
    assert found["small"] == [0.0, 511.0, 0.5]


def test_a_result_replaces_no_column_of_the_source(tmp_path):
    rows = [{"text": "graph"}, {"text": "cut"}, {"text": "bank", "length": "of the source"}]
    source = write_jsonl(tmp_path / "texts.jsonl", rows)
    message = "texts.jsonl, row 3: it has a column 'length', which is the name of a result. Rename or remove"
    with pytest.raises(ValueError, match=message):
        run(source, tmp_path / "out.jsonl", keep=None)
    assert not (tmp_path / "out.jsonl").exists()
    assert run(source, tmp_path / "others.jsonl", keep=[])[:2] == (3, 0)


def test_a_column_of_the_source_is_safe_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    source = write_jsonl(tmp_path / "texts.jsonl", [{"text": "graph", "length": "of the source"}])
    for keep, message in ((None, "a column 'length', which is the name"), (["length"], "--keep length is the name")):
        with pytest.raises(ValueError, match=message):
            run(source, tmp_path / f"{keep}.jsonl", keep=keep)


@pytest.mark.parametrize(
    "process",
    [
        KeyphraseExtractor(), DefinitionProcess(None, None, 8, None, 1, {}), SummaryProcess(None, "text", None, None, 8, None, {}),
        GenerationProcess(None, "text", None, 8, None, {}),
    ],
)  # fmt: skip
def test_processes_name_what_they_add(process):
    assert {*process.results, "error"} == process.types().keys()


def test_row_groups_of_long_texts_are_smaller(tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / "texts.jsonl", [{"text": "graph " * 1000}] * 1200)
    monkeypatch.setattr(parquet_output, "BYTES", 1_000_000)
    run(source, tmp_path / "out.parquet", 512, keep=None)
    assert parquet.ParquetFile(tmp_path / "out.parquet").num_row_groups == 3


def test_a_model_that_changes_during_a_run_stops_it(folder, tmp_path):
    model = shutil.copytree(folder, tmp_path / "model")
    extract = KeyphraseExtractor(model)
    extract.describe()
    assert extract.process_rows([{"text": TEXTS[0]}])
    (model / "config.json").write_text((model / "config.json").read_text() + " ")
    with pytest.raises(RuntimeError, match="has changed since this run began"):
        extract.process_rows([{"text": TEXTS[0]}])
    extract.describe()
    assert extract.process_rows([{"text": TEXTS[0]}])
