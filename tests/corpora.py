"""Runs over corpora in tests, whole and interrupted."""

import json
import os
import runpy
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from keyphrase_tools.extractor import KeyphraseExtractor
from run_tools.corpus.block_runs import RunSummary, run_blocks
from run_tools.corpus.documents import Corpus
from run_tools.resume import ResumableOutput

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


class Stop(Exception):
    pass


@contextmanager
def bound_by_permissions(folder: Path):
    """In this context root has the rights of an ordinary user, who may enter the folder."""
    is_root, temporary = os.geteuid() == 0, Path(tempfile.gettempdir())
    for path in (folder, *folder.parents) if is_root else ():
        if temporary in path.parents:
            path.chmod(0o755)
    try:
        if is_root:
            os.seteuid(65534)
        yield
    finally:
        if is_root:
            os.seteuid(0)


def lines(path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def write_jsonl(path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def extract_file(model, source, output, block_size=512, engine=None, **options) -> RunSummary:
    """Extracts the keyphrases of files by a pipeline, or by a model's name."""
    corpus = Corpus(source)
    extractor = KeyphraseExtractor(model, corpus.text_column, corpus.title_column, **options)
    return run_blocks(extractor, corpus, output, block_size=block_size, engine=engine)


def interrupt(monkeypatch, blocks: int, *arguments, **options) -> None:
    """Starts `extract_file` and stops it after some blocks."""
    stop_after(monkeypatch, blocks, lambda: extract_file(*arguments, **options))


def stop_after(monkeypatch, blocks: int, start: Callable) -> None:
    """Starts a run and stops it after some blocks."""
    write, left = ResumableOutput.write_block, iter(range(blocks))

    def write_some(*args):
        if next(left, None) is None:
            raise Stop
        write(*args)

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(ResumableOutput, "write_block", write_some)
        start()


def check_example(name: str, model: str, folder: Path, *options) -> None:
    """Runs a file of examples/ as a program, but in this process: it gives what the command gives."""
    texts = [" ".join(f"graph {i} cut {j}" for j in range(1 + i % 9)) for i in range(40)]
    columns = {"id": [f"d{i:02}" for i in range(40)], "title": ["A graph", None] * 20, "text": [*texts[:-1], None]}
    parquet.write_table(pyarrow.table(columns), folder / "in.parquet")
    with pytest.MonkeyPatch.context() as patch:
        given = (folder / "in.parquet", folder / "out", "--model", model, *options)
        patch.setattr(sys, "argv", [name, *map(str, given)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    found = pyarrow.concat_tables(map(parquet.read_table, sorted((folder / "out").glob("*.parquet")))).sort_by("id")

    process = KeyphraseExtractor(model, title_column="title", top_k=10, num_threads=1)
    run_blocks(process, Corpus(folder / "in.parquet"), folder / "whole.parquet")
    expected = parquet.read_table(folder / "whole.parquet")
    assert found.schema.names == expected.schema.names and found.to_pylist() == expected.to_pylist()
    assert any(found["keyphrases"].to_pylist()[0]) and found["error"].null_count == 39


def as_written(phrases, mentions=False) -> list[dict]:
    """Keyphrases of the pipeline as a run writes them."""

    def with_field(place):
        return place | {"field": place.get("field") or (None if place["start"] is None else "text")}

    return [
        {name: value for name, value in with_field(phrase).items() if name != "mentions"}
        | ({"mentions": [with_field(mention) for mention in phrase["mentions"]]} if mentions else {})
        for phrase in phrases
    ]


class Lengths:
    """Adds the length of each text."""

    results = ("length",)

    def describe(self):
        return {}

    def process_rows(self, rows, progress=None):
        lengths = [len(row["text"]) if isinstance(row.get("text"), str) else None for row in rows]
        return [{"error": "it has no text"} if length is None else {"length": length} for length in lengths]

    def types(self):
        return {"length": pyarrow.int64(), "error": pyarrow.string()}
