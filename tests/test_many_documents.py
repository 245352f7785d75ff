"""The examples for Ray and Spark on one Parquet file, as programs, give what the command gives. Spark needs Java."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from keyphrase_tools.extractor import KeyphraseExtractor
from run_tools.corpus.block_runs import run_blocks
from run_tools.corpus.documents import Corpus

ROOT = Path(__file__).resolve().parents[1]


def has(*modules: str) -> bool:
    return all(importlib.util.find_spec(module) for module in modules)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("ray", marks=pytest.mark.skipif(not has("ray"), reason="needs Ray")),
        pytest.param(
            "spark",
            marks=pytest.mark.skipif(not (has("pyspark") and shutil.which("java")), reason="needs Spark and Java"),
        ),
    ],
)
def test_an_example_gives_what_the_command_gives(name, tiny_seke, tiny_tokenizer, tmp_path):
    for part in (tiny_seke("bert", keyphrase_threshold=0.4), tiny_tokenizer):
        part.save_pretrained(tmp_path / "model")
    texts = [" ".join(f"graph {i} cut {j}" for j in range(1 + i % 9)) for i in range(40)]
    columns = {"id": [f"d{i:02}" for i in range(40)], "title": ["A graph", None] * 20, "text": [*texts[:-1], None]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "in.parquet")
    command = [sys.executable, str(ROOT / "examples" / f"{name}_keyphrases.py")]
    options = [str(tmp_path / "in.parquet"), str(tmp_path / "out"), "--model", str(tmp_path / "model")]
    options += ["--workers", "1"] if name == "ray" else ["--master", "local[1]"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run([*command, *options], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = pyarrow.concat_tables(map(parquet.read_table, sorted((tmp_path / "out").glob("*.parquet")))).sort_by("id")

    process = KeyphraseExtractor(tmp_path / "model", title_column="title", top_k=10, num_threads=1)
    run_blocks(process, Corpus(tmp_path / "in.parquet"), tmp_path / "whole.parquet")
    expected = parquet.read_table(tmp_path / "whole.parquet")
    assert found.schema.names == expected.schema.names and found.to_pylist() == expected.to_pylist()
    assert any(found["keyphrases"].to_pylist()[0]) and found["error"].null_count == 39
