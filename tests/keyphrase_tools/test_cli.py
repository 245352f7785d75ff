# needs: parquet
"""The commands of `lexperts keyphrases`; what is wrong in a command line is in tests/cli/test_errors.py."""

import json

import pytest
from transformers import pipeline
from typer.testing import CliRunner

from keyphrase_tools.evaluation import evaluate_pipeline
from lexperts.cli.keyphrases import app
from lexperts_lite import KeyphraseExtractor
from tests.corpora import as_written, lines, write_jsonl
from tests.keyphrase_tools.known_answers import TEXT

TEXTS = ["Graph cuts solve energy problems.", "Deep networks learn the cuts of a graph."]
KEYPHRASES = [["graph cuts", "energy problems", "absent words"], ["networks"]]


@pytest.fixture
def gold(tmp_path):
    rows = [{"id": i, "text": TEXTS[i], "keyphrases": KEYPHRASES[i]} for i in range(2)]
    return write_jsonl(tmp_path / "gold.jsonl", rows)


def call(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_extract_then_score_is_what_the_library_measures(folder, gold, tmp_path):
    done = call("extract", gold, tmp_path / "out.jsonl", "--model", folder)
    assert done.exit_code == 0 and "2 documents in" in done.output and "numbered" not in done.stderr
    expected = evaluate_pipeline(pipeline("keyphrase-extraction", model=folder), TEXTS, KEYPHRASES)
    done = call("score", tmp_path / "out.jsonl", gold, "--json")
    assert json.loads(done.output) == pytest.approx(expected)
    rows = [
        {"id": 1, "keyphrases": ["networks"]},
        {"id": 0, "keyphrases": ["graph cut", "energy problem"]},
    ]  # in any order
    done = call("score", write_jsonl(tmp_path / "plain.jsonl", rows), gold, "--json")
    assert json.loads(done.output)["f1@10"] == 1
    shown = call("score", tmp_path / "out.jsonl", gold, "-k", 5).output.splitlines()
    assert shown[0].split() == ["precision", "recall", "F1"]
    assert shown[1].split() == ["@5", *(f"{100 * expected[f'{name}@5']:.1f}" for name in ("precision", "recall", "f1"))]


def test_a_source_without_ids_is_numbered_and_the_command_says_so(folder, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [{"key": i, "number": 7, "text": text} for i, text in enumerate(TEXTS)])
    done = call("extract", source, tmp_path / "numbered.jsonl", "--model", folder)
    assert done.exit_code == 0 and "no column 'id', so documents are numbered. --id-column names" in done.stderr
    done = call("extract", source, tmp_path / "named.jsonl", "--model", folder, "--id-column", "number")
    assert done.exit_code == 0 and "numbered" not in done.stderr


def test_an_interrupted_command_says_how_to_resume(folder, gold, tmp_path, monkeypatch):
    monkeypatch.setattr("run_tools.run_over.process_each", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    done = call("extract", gold, tmp_path / "out.jsonl", "--model", folder)
    assert done.exit_code == 130 and done.stderr.endswith("interrupted: Repeat the command to resume.\n"), done.stderr


def test_score_takes_any_cutoff_and_the_language(tmp_path):
    words = [a + b for a in "bcdf" for b in "lmnpq"]
    row = {"text": " . ".join([*words, "Bäume"]), "keyphrases": [*words, "Baum"]}
    gold = write_jsonl(tmp_path / "gold.jsonl", [row])
    found = write_jsonl(tmp_path / "found.jsonl", [{"keyphrases": "; ".join([*words, "Bäumen"])}])
    arguments = ("score", found, gold, "--json", "-k", 21, "-k", "M", "-k", "k")
    scores = json.loads(call(*arguments, "--language", "german").output)
    assert scores["recall@21"] == scores["f1@M"] == scores["f1@k"] == 1
    assert json.loads(call(*arguments).output)["precision@M"] == pytest.approx(20 / 21)


def test_show_prints_keyphrases_and_writes_a_page_that_it_may_replace(folder, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    show = ("show", tmp_path / "a.txt", "--model", folder, "--output")
    done = call(*show, tmp_path / "page.html", "--top-k", 3)
    assert done.exit_code == 0 and "a.txt" in done.output and "<mark" in (tmp_path / "page.html").read_text()
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-16")
    assert call(*show, tmp_path / "page.html", "--top-k", 3).output == done.output
    (tmp_path / "users.html").write_text("<!DOCTYPE html>\n<html lang='en'>")
    for name in ("a.txt", "users.html"):
        before = (tmp_path / name).read_bytes()
        done = call(*show, tmp_path / name)
        assert done.exit_code == 2 and f"{name}' exists" in done.output and (tmp_path / name).read_bytes() == before


def test_options_are_those_of_the_pipeline(folder, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": TEXT}])
    options = ("--model", folder, "--language", "none", "--diversity", "0.9", "--mentions", "--top-k", "4")
    done = call("extract", source, tmp_path / "out.jsonl", *options)
    assert done.exit_code == 0, done.output
    extract, options = pipeline("keyphrase-extraction", model=folder, top_k=4), {"diversity": 0.9}
    expected = extract(TEXT, language=None, **options)
    (row,) = lines(tmp_path / "out.jsonl")
    assert row["keyphrases"] == as_written(expected, mentions=True) and expected != extract(TEXT)


def test_a_style_is_passed_on_and_an_unknown_one_is_named(gold, tmp_path):
    done = call("extract", gold, tmp_path / "out.jsonl", "--model", "tiny", "--style", "terms")
    assert done.exit_code == 0, done.output
    rows, expected = lines(tmp_path / "out.jsonl"), KeyphraseExtractor("tiny")(TEXTS, style="terms")
    assert [[p["score"] for p in row["keyphrases"]] for row in rows] == [[p["score"] for p in row] for row in expected]
    done = call("extract", gold, tmp_path / "other.jsonl", "--model", "tiny", "--style", "news")
    assert done.exit_code == 2 and "'news'" in done.output and "'terms'" in done.output
