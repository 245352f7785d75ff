# needs: parquet, serve
"""The commands of `lexperts keyphrases`."""

import json
import re
import subprocess
import sys

import pytest
from transformers import pipeline
from typer.testing import CliRunner

from keyphrase_tools.evaluation import evaluate_pipeline
from lexperts.cli.keyphrases import app

TEXTS = ["Graph cuts solve energy problems.", "Deep networks learn the cuts of a graph."]
KEYPHRASES = [["graph cuts", "energy problems", "absent words"], ["networks"]]


@pytest.fixture(scope="module")
def folder(tiny_seke, tiny_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_seke("bert", keyphrase_threshold=0.3).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def gold(tmp_path):
    rows = [
        {"id": i, "text": text, "keyphrases": own} for i, (text, own) in enumerate(zip(TEXTS, KEYPHRASES, strict=True))
    ]
    (tmp_path / "gold.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "gold.jsonl")


def call(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_extract_then_score_is_what_the_library_measures(folder, gold, tmp_path):
    done = call("extract", gold, tmp_path / "out.jsonl", "--model", folder)
    assert done.exit_code == 0, done.output
    assert "2 documents in" in done.output
    expected = evaluate_pipeline(pipeline("keyphrase-extraction", model=folder), TEXTS, KEYPHRASES)
    done = call("score", tmp_path / "out.jsonl", gold, "--json")
    assert json.loads(done.output) == pytest.approx(expected)
    shown = call("score", tmp_path / "out.jsonl", gold, "-k", 5).output.splitlines()
    assert shown[0].split() == ["precision", "recall", "F1"]
    assert shown[1].split() == ["@5", *(f"{100 * expected[f'{name}@5']:.1f}" for name in ("precision", "recall", "f1"))]


def test_a_source_without_ids_is_numbered_and_the_command_says_so(folder, gold, tmp_path):
    done = call("extract", gold, tmp_path / "own.jsonl", "--model", folder)
    assert "numbered" not in done.stderr
    rows = [{"key": i, "number": 7, "text": text} for i, text in enumerate(TEXTS)]
    (tmp_path / "without.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = call("extract", tmp_path / "without.jsonl", tmp_path / "numbered.jsonl", "--model", folder)
    assert done.exit_code == 0 and "no column 'id', so documents are numbered. --id-column names" in done.stderr
    done = call(
        "extract", tmp_path / "without.jsonl", tmp_path / "named.jsonl", "--model", folder, "--id-column", "number"
    )
    assert done.exit_code == 0 and "numbered" not in done.stderr


def test_an_interrupted_command_says_how_to_resume(folder, gold, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("run_tools.run_over.process_each", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        done = call("extract", gold, tmp_path / "out.jsonl", "--model", folder)
    assert done.exit_code == 130 and done.stderr.endswith("interrupted: Repeat the command to resume.\n"), done.stderr
    assert call("extract", gold, tmp_path / "out.jsonl", "--model", folder).exit_code == 0
    again = call("extract", gold, tmp_path / "out.jsonl", "--model", folder)
    assert again.exit_code == 0 and "is complete: 2 documents" in again.output
    other = call("extract", gold, tmp_path / "out.jsonl", "--model", folder, "--top-k", 3)
    assert other.exit_code == 2 and "top_k=None before, 3 now" in other.stderr


def test_a_wrong_column_is_named_before_torch_is_imported(gold, tmp_path):
    code = (
        "import sys; from lexperts.cli.keyphrases import app\n"
        f"try: app(['extract', {gold!r}, {str(tmp_path / 'out.csv')!r}, *sys.argv[1:]])\n"
        "finally: assert 'torch' not in sys.modules"
    )
    for options, message in (
        (["--text-column", "txt"], "'txt'; the columns are 'id', 'text', 'keyphrases'"),
        (["--keep", "year"], "'year'"),
    ):
        done = subprocess.run([sys.executable, "-c", code, *options], capture_output=True, text=True)
        assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert len(list(tmp_path.iterdir())) == 1


def test_score_reads_plain_keyphrases_in_any_order_of_ids_and_refuses_other_documents(gold, tmp_path):
    predictions = tmp_path / "predictions.jsonl"
    rows = [{"id": 1, "keyphrases": ["networks"]}, {"id": 0, "keyphrases": ["graph cut", "energy problem"]}]

    def score(*own):
        predictions.write_text("".join(json.dumps(row) + "\n" for row in own))
        return call("score", predictions, gold, "--json")

    assert json.loads(score(*rows).output)["f1@10"] == 1
    for own, shown in (
        (rows[:1], "'0'"),
        ([{"id": row["id"]} for row in rows], "line 1: .*'keyphrases'"),
        ([row | {"text": "another"} for row in rows], "'another'"),
    ):
        done = score(*own)
        assert done.exit_code == 2 and re.search(shown, done.stderr), done.stderr


def test_score_takes_any_cutoff_and_the_language(tmp_path):
    words = [a + b for a in "bcdf" for b in "lmnpq"]
    (tmp_path / "gold.jsonl").write_text(
        json.dumps({"text": " . ".join([*words, "Bäume"]), "keyphrases": [*words, "Baum"]})
    )
    (tmp_path / "found.jsonl").write_text(json.dumps({"keyphrases": "; ".join([*words, "Bäumen"])}))
    arguments = ("score", tmp_path / "found.jsonl", tmp_path / "gold.jsonl", "--json", "-k", 21, "-k", "M", "-k", "k")
    scores = json.loads(call(*arguments, "--language", "german").output)
    assert scores["recall@21"] == scores["f1@M"] == scores["f1@k"] == 1
    assert json.loads(call(*arguments).output)["precision@M"] == pytest.approx(20 / 21)
    assert call(*arguments, "-k", "m").exit_code == 2 and "k='m'" in call(*arguments, "-k", "m").stderr
    assert "language='klingon'" in call(*arguments, "--language", "klingon").stderr


def test_show_prints_keyphrases_and_writes_a_page(tmp_path):
    """By the default model."""
    (tmp_path / "a.txt").write_text(
        "A hash table stores each key in a bucket, and a hash function keeps collisions rare."
    )
    done = call("show", tmp_path / "a.txt", "--output", tmp_path / "page.html", "--top-k", 3)
    assert done.exit_code == 0, done.output
    assert "hash" in done.output and "<mark" in (tmp_path / "page.html").read_text()
    done = call("show", tmp_path / "missing.txt", "--output", tmp_path / "page.html")
    assert done.exit_code == 2 and "missing.txt" in done.output
    (tmp_path / "users.html").write_text("<!DOCTYPE html>\n<html lang='en'>")
    for name in ("a.txt", "users.html"):
        before = (tmp_path / name).read_bytes()
        done = call("show", tmp_path / "a.txt", "--output", tmp_path / name)
        assert done.exit_code == 2 and f"{name}' exists" in done.output and (tmp_path / name).read_bytes() == before
    assert call("show", tmp_path / "a.txt", "--output", tmp_path / "page.html", "--top-k", 1).exit_code == 0


def test_a_style_is_passed_on_and_another_style_is_another_run(gold, tmp_path, monkeypatch):
    done = call("extract", gold, tmp_path / "out.jsonl", "--style", "tags")
    assert done.exit_code == 0, done.output
    expected = pipeline("keyphrase-extraction")(TEXTS, style="tags")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [[p["score"] for p in row["keyphrases"]] for row in rows] == [[p["score"] for p in row] for row in expected]
    done = call("extract", gold, tmp_path / "other.jsonl", "--style", "news")
    assert done.exit_code == 2 and "'news'" in done.output and "'tags'" in done.output


def test_without_the_default_model_a_command_says_what_to_install(gold, tmp_path, monkeypatch):
    monkeypatch.setattr("run_tools.packaged.find_spec", lambda name: None)
    done = call("extract", gold, tmp_path / "out")
    assert done.exit_code == 2 and "lexperts-seke-minilm" in done.output
