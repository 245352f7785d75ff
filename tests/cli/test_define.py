"""`lexperts define term` and `terms`: what the pipeline returns, interruptions, terms in their contexts."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, pipeline
from typer.testing import CliRunner

from lexperts.cli.define import app
from modeling_lexicon.data_lexicon import format_prompt
from tests import tools
from tests.recipes.lexicon_helpers import kind_rows
from tests.tools import read_rows, train_tokenizer, write_rows

TINY = {**tools.TINY, "initializer_range": 0.2}
ROWS = kind_rows(0, 10)
TEXTS = [text for row in ROWS for text in (format_prompt(row["term"], row["context"]), row["definition"])]
TERMS = [{name: row[name] for name in ("term", "context")} for row in ROWS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A dense model."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(folder / "dense")
    train_tokenizer(TEXTS, TINY["vocab_size"]).save_pretrained(folder / "dense")
    return folder


def test_terms_of_a_file_are_defined(folder, tmp_path):
    """`lexperts define terms` writes what the pipeline returns."""
    source, output = write_rows(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"  # which have another definition
    command = ["terms", str(source), str(output), "-m", str(folder / "dense")]
    command += ["--max-new-tokens", "6", "--batch-size", "4", "--keep", "term", "--keep", "context"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0 and "10 documents in" in result.output, result.output
    define = pipeline("definition-modeling", model=str(folder / "dense"), max_new_tokens=6)
    expected = [row | one for row, one in zip(TERMS, define(TERMS), strict=True)]
    assert [line["definition"] for line in read_rows(output)] == [line["definition"] for line in expected]
    error = CliRunner().invoke(app, [*command, "--best-of", "2"])
    assert error.exit_code == 2 and "best_of=1 before, 2 now" in error.stderr
    other = shutil.copytree(folder / "dense", tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    save_file({name: weight * 1.01 for name, weight in weights.items()}, other / "model.safetensors", {"format": "pt"})
    error = CliRunner().invoke(app, [*command[:3], "-m", str(other), *command[5:]])
    assert error.exit_code == 2 and "model='dense, sha256 " in error.stderr
    assert "is complete" in CliRunner().invoke(app, command).output


def test_sampled_definitions_do_not_depend_on_interruptions_and_bad_rows_are_reported(folder, tmp_path):
    rows = [*TERMS[:9], {"term": "axe", "context": None}]
    source, whole, output = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    options = ["-m", str(folder / "dense"), "--max-new-tokens", "6", "--best-of", "2", "--batch-size", "1"]
    CliRunner().invoke(app, ["terms", str(source), str(whole), *options])
    output.write_text("".join(whole.read_text().splitlines(keepends=True)[:8]))  # as if killed after a batch
    shutil.copy(f"{whole}.settings.json", f"{output}.settings.json")
    done = CliRunner().invoke(app, ["terms", str(source), str(output), *options])
    assert done.exit_code == 0 and "2 of them new; 1 could not be processed" in done.output, done.output
    assert output.read_bytes() == whole.read_bytes()
    assert read_rows(output)[9] == rows[9] | {"error": "its context is None, not a text"}


@pytest.mark.parametrize("options, count", [((), 1), (("--num-definitions", "3"), 3), (("--best-of", "4"), 1)])
def test_a_term_of_the_command_line_is_defined(options, count, folder, monkeypatch):
    command = ["term", "bell", "-c", "the bell rang", "--json", *options]
    monkeypatch.setattr("run_tools.packaged.find_packaged", lambda name: str(folder / "dense"))
    given = CliRunner().invoke(app, [*command, "-m", str(folder / "dense")])
    by_default = CliRunner().invoke(app, command)
    found = json.loads(given.stdout.splitlines()[-1])
    assert 1 <= len(found) <= count and {"term", "definition", "score"} <= found[0].keys()
    assert json.loads(by_default.stdout.splitlines()[-1]) == found


def test_a_term_without_a_context_of_its_own_is_defined_with_a_warning(folder, monkeypatch):
    warnings = []
    logger = SimpleNamespace(warning=warnings.append, warning_once=warnings.append)
    monkeypatch.setattr("modeling_lexicon.generation_lexicon.logger", logger)
    define, rows = pipeline("definition-modeling", model=str(folder / "dense")), []
    for term in ("gong", "Bell", "to bell"):
        rows.append({"term": term, "context": "the bell rang"})
        assert define(rows[-1])["term"] == term
    assert len(warnings) == 1 and "'gong' does not occur in its context" in warnings[0]
    assert define(rows) == [define(row) for row in rows]
    assert warnings[1] == warnings[0]
