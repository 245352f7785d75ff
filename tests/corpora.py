"""Runs over corpora in tests, whole and interrupted."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest

from keyphrase_tools.extractor import KeyphraseExtractor
from run_tools.corpus.block_runs import RunSummary, run_blocks
from run_tools.corpus.documents import Corpus
from run_tools.resume import ResumableOutput


class Stop(Exception):
    pass


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

    def describe(self):
        return {}

    def process_rows(self, rows, progress=None):
        lengths = [len(row["text"]) if isinstance(row.get("text"), str) else None for row in rows]
        return [{"error": "it has no text"} if length is None else {"length": length} for length in lengths]

    def types(self):
        return {"length": pyarrow.int64(), "error": pyarrow.string()}
