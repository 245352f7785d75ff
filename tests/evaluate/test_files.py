# needs: summaries, definitions
"""`lexperts evaluate` over files: joined rows, columns, what is counted, what is refused."""

import json
import sys

import pytest
from typer.main import get_command

from lexperts.cli import build_app
from tests.tools import fails, run_main, write_rows

APP = get_command(build_app())
GOLD = ("a small boat", "the old tree", "water in a boat", "a bird")
ROWS = [{"id": i, "term": f"t{i}", "context": "", "definition": gold, "summary": gold} for i, gold in enumerate(GOLD)]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Predictions and references in the working directory."""
    monkeypatch.chdir(tmp_path)
    for name, texts in (("ours", ("a small boat", "an old tree", "water", "a bell")), ("base", ["boat"] * 4)):
        rows = [row | {"summary_text": text} for row, text in zip(ROWS, texts, strict=True)]
        write_rows(tmp_path / f"{name}.jsonl", rows)
    write_rows(tmp_path / "gold.jsonl", ROWS)
    write_rows(tmp_path / "blank.jsonl", [{"text": text, "keyphrases": ["cuts"]} for text in ("graph cuts", None)])
    (tmp_path / "broken.jsonl").write_text('{"summary": "a", "summary_text": "a"}\n{"id"\n')
    return tmp_path


def evaluate(*arguments) -> dict:
    done = run_main(APP.main, "evaluate", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_systems_are_compared_in_a_table(files):
    given = ("summaries", "ours=ours.jsonl", "base.jsonl", "--baseline", "base")
    results, printed = evaluate(*given), run_main(APP.main, "evaluate", *given).stdout
    found, difference = results["systems"]["ours"]["ROUGE-1"], results["differences"]["ours"]["ROUGE-1"]
    assert f"{found['value']:.2f} [{found['low']:.2f}, {found['high']:.2f}]" in printed
    assert f"{difference['value']:+.2f}" in printed and f"p={difference['p']:.2g}\n" in printed


def test_rows_are_joined_by_id_and_have_references_of_their_own_or_of_a_file(files):
    write_rows(files / "boats.jsonl", [{"id": i, "term": f"t{i}", "definition": "boat"} for i in (3, 1, 0, 2)])
    joined = evaluate("definitions", "ours=boats.jsonl", "--references", "gold.jsonl")
    assert joined["systems"]["ours"]["ROUGE-L"]["value"] == pytest.approx((50 + 40) / 4)
    runs, column = ("summaries", "ours=ours.jsonl", "ours=base.jsonl"), ("--reference-column", "definition")
    own = evaluate(*runs)["systems"]
    assert own == evaluate(*runs, "--references", "gold.jsonl", *column)["systems"]
    assert len(own["ours"]["ROUGE-1"]["runs"]) == 2 and own["ours"]["ROUGE-1"]["sd"] > 0


def test_rows_with_an_error_count_as_empty_and_are_counted(files):
    rows = [{**row, "summary_text": row["summary"]} for row in ROWS[:2]]
    write_rows(files / "some.jsonl", [*rows, ROWS[2] | {"error": "no text"}, ROWS[3] | {"summary_text": ""}])
    done = run_main(APP.main, "evaluate", "summaries", "some.jsonl", "--json")
    assert json.loads(done.stdout)["systems"]["some"]["ROUGE-1"]["value"] == 50
    assert "some.jsonl: 2 of 4 predictions are empty" in done.stderr


def test_keyphrases_and_answers_are_read_in_their_forms(files):
    row = {"id": "a", "title": "Graph cuts", "text": "They segment images.", "keyphrases": "graph cut; images"}
    write_rows(files / "gold.jsonl", [row | {"answers": {"text": ["a cat"], "answer_start": [1]}}])
    phrases = [{"keyphrase": "graph cuts", "score": 0.9}, {"keyphrase": "cuts", "score": 0.1}]
    write_rows(files / "found.jsonl", [{"id": "a", "keyphrases": phrases, "answer": "The cat"}])

    def found(task, *given):
        return evaluate(task, "found.jsonl", "--references", "gold.jsonl", *given)["systems"]["found"]

    assert found("keyphrases")["F1@5"]["value"] == pytest.approx(50)
    exhird = found("keyphrases", "--convention", "exhird", "--language", "none")
    assert exhird["present F1@M"]["value"] == 0  # "cuts" is not "cut"
    assert found("answers")["exact"]["value"] == 100


@pytest.mark.parametrize("case, change, names", [
    ("an id is missing", lambda rows: rows[:3], "each of ['3']"),
    ("an id occurs twice", lambda rows: [*rows, rows[0]], "each of ['0']"),
    ("another number without ids", lambda rows: [{"summary_text": "a"}] * 3, "row 4"),
    ("another order without ids", lambda rows: [{k: v for k, v in row.items() if k != "id"} for row in rows[::-1]], "'t3'"),
    ("other references", lambda rows: [*rows[:3], rows[3] | {"summary": "a bell"}], "'a bell'"),
    ("no prediction", lambda rows: [*rows[:3], ROWS[3] | {"summary_text": None}], "row 4, 'summary_text'"),
    ("no column", lambda rows: ROWS, "'summary_text'"),
])  # fmt: skip
def test_rows_of_another_source_are_refused(case, change, names, files):
    rows = [json.loads(line) for line in (files / "ours.jsonl").read_text().splitlines()]
    write_rows(files / "other.jsonl", change(rows))
    for given in (("ours.jsonl", "other.jsonl"), ("other.jsonl", "--references", "gold.jsonl")):
        error = fails(APP.main, "evaluate", "summaries", *given)
        assert names in error and "other.jsonl" in error


@pytest.mark.parametrize("words, names", [
    ("definitions gold.jsonl", "'definition'"),
    ("summaries broken.jsonl", "broken.jsonl, line 2"),
    ("keyphrases blank.jsonl --references blank.jsonl", "row 2: 'text'"),
    ("summaries ours.jsonl --baseline x", "--baseline 'x'"),
    ("summaries =ours.jsonl", "'=ours.jsonl'"),
    ("summaries ours.jsonl --language german", "'language'"),
    ("summaries ours.jsonl", "rouge_scorer is not installed. Install the extra lexperts[summaries]."),
    ("summaries ours.jsonl --references ours.jsonl --reference-column context", "ours.jsonl, row 1: 'context'"),
])  # fmt: skip
def test_options_that_do_not_fit_are_named(words, names, files, monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)  # the others fail before
    assert names in fails(APP.main, "evaluate", *words.split())
