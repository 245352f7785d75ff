# needs: parquet
"""`lexperts keyphrases generate`: what the pipeline gives, for files, resumable."""

import json

import pyarrow
import pytest
import torch
from pyarrow import parquet
from transformers import pipeline
from typer.testing import CliRunner

from lexperts.cli.keyphrases import app

from .conftest import DOCUMENTS, tiny_exhird, word_tokenizer

ROWS = [
    {"id": f"d{i}", "title": title, "text": text, "year": 2000 + i}
    for i, (title, text) in enumerate(zip(DOCUMENTS["title"] * 3, DOCUMENTS["text"] * 3, strict=True))
]
ROWS.insert(5, {"id": "none", "title": "Graph", "text": None, "year": 1})
OPTIONS = ["--num-keyphrases", "3", "--batch-size", "2", "--device", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model = tiny_exhird("bigru", initializer_range=0.7, exclusion_window=-1)
    with torch.no_grad():  # copies more, so that some phrases are present
        model.generator.copy.bias.fill_(0.0)
        model.generator.vocabulary.bias[4] += 8.0
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def source(tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return tmp_path / "in.jsonl"


def run(source, output, model, *options):
    return CliRunner().invoke(app, ["generate", str(source), str(output), "--model", model, *OPTIONS, *options])


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_rows_hold_the_phrases_of_the_pipeline(folder, source, tmp_path):
    done = run(source, tmp_path / "out.jsonl", folder, "--keep", "year")
    assert done.exit_code == 0 and "13 documents in" in done.stdout and "1 could not be processed" in done.stdout
    generate, found = pipeline("keyphrase-generation", model=folder), lines(tmp_path / "out.jsonl")
    assert found[5] == {"id": "none", "year": 1, "error": "'text' is None, not a text"}
    kinds = set()
    for row, own in zip(ROWS, found, strict=True):
        if row["text"] is None:
            continue
        expected = generate({"title": row["title"], "text": row["text"]}, num_keyphrases=3)
        assert own.keys() == {"id", "year", "keyphrases"} and own["id"] == row["id"]
        assert [p["keyphrase"] for p in own["keyphrases"]] == [p["keyphrase"] for p in expected]
        assert [p["score"] for p in own["keyphrases"]] == pytest.approx([p["score"] for p in expected], rel=1e-3)
        for phrase in own["keyphrases"]:
            assert list(phrase) == ["keyphrase", "present", "score", "start", "end", "field"]
            if phrase["present"]:
                assert row[phrase["field"]][phrase["start"] : phrase["end"]] == phrase["keyphrase"]
            kinds.add((phrase["present"], phrase["field"]))
    assert {(True, "text"), (False, None)} <= kinds


def test_a_parquet_file_has_types_and_other_settings_are_named(folder, source, tmp_path):
    output = tmp_path / "out.parquet"
    assert run(source, output, folder).exit_code == 0
    done = run(source, output, folder, "--min-phrases", "2")
    assert done.exit_code == 2 and "min_phrases=None before, 2 now" in done.stderr
    schema = parquet.read_table(output).schema
    assert schema.field("keyphrases").type.value_type.field("present").type == pyarrow.bool_()


def test_errors_are_one_line(folder, source, tiny_seke, tiny_tokenizer, tmp_path):
    for part in (tiny_seke("bert"), tiny_tokenizer):
        part.save_pretrained(tmp_path / "seke")
    for model, options, message in (
        (str(tmp_path / "seke"), (), "SekeConfig"),
        ("no/such-model", (), "'no/such-model' cannot be opened"),
        (folder, ("--text-column", "txt"), "there is no 'txt'"),
    ):
        done = run(source, tmp_path / "out.jsonl", model, *options)
        assert done.exit_code == 2 and message in done.stderr and done.stderr.count("error: ") == 1, done.output
        assert "Traceback" not in done.stderr and not (tmp_path / "out.jsonl").exists()
