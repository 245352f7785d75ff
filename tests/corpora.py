"""Runs over files in tests."""

import runpy
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from keyphrase_tools.extractor import KeyphraseExtractor
from run_tools.run_over import Summary, run_over
from tests.tools import read_rows as lines  # noqa: F401
from tests.tools import write_rows as write_jsonl  # noqa: F401

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def extract_file(model, source, output, **options) -> Summary:
    """Extracts the keyphrases of files by a pipeline, or by a model's name."""
    extractor = KeyphraseExtractor(model, **{"title_column": "title", **options})
    return run_over(extractor.open, source, output, {}, check=extractor.check, keep=[], types=extractor.types)


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

    extract_file(model, folder / "in.parquet", folder / "whole.parquet", top_k=10, num_threads=1)
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
