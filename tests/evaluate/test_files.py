"""`lexperts evaluate` over files: joined rows, columns, what is counted, what is refused."""

import json
import sys

import pytest
from typer.main import get_command

from lexperts.cli import build_app
from tests.recipes.helpers import fails, run_main, write_rows

APP = get_command(build_app())
ROWS = [
    {"id": i, "term": f"t{i}", "context": f"a t{i}", "definition": gold, "document": f"d{i}", "summary": gold}
    for i, gold in enumerate(("a small boat", "the old tree", "water in a boat", "a bird"))
]
TEXTS = {"ours": ("a small boat", "an old tree", "water", "a bell"), "base": ("boat", "a tree", "boat", "bird")}


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Predictions and references in the working directory."""
    monkeypatch.chdir(tmp_path)
    for name, texts in TEXTS.items():
        rows = [row | {"summary_text": text} for row, text in zip(ROWS, texts, strict=True)]
        write_rows(tmp_path / f"{name}.jsonl", rows)
        source = [{key: row[key] for key in ("id", "term", "context")} for row in ROWS]
        rows = [row | {"definition": text, "score": 0.5} for row, text in zip(source, texts, strict=True)]
        write_rows(tmp_path / f"{name}-definitions.jsonl", rows[::-1])
    write_rows(tmp_path / "gold.jsonl", ROWS)
    return tmp_path


def evaluate(*arguments) -> dict:
    done = run_main(APP.main, "evaluate", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_systems_are_compared_in_a_table_and_a_file(files):
    given = ("summaries", "ours=ours.jsonl", "base.jsonl", "--baseline", "base", "-o", "runs/scores.json")
    done = run_main(APP.main, "evaluate", *given)
    written = json.loads((files / "runs" / "scores.json").read_text())
    assert written["rows"] == 4 and written["files"] == {"ours": ["ours.jsonl"], "base": ["base.jsonl"]}
    found, difference = written["systems"]["ours"]["ROUGE-1"], written["differences"]["ours"]["ROUGE-1"]
    assert f"{found['value']:.2f} [{found['low']:.2f}, {found['high']:.2f}]" in done.stdout
    assert f"{difference['value']:+.2f}" in done.stdout and f"p={difference['p']:.2g}" in done.stdout
    assert "rouge-score" in done.stdout and written["metrics"]["ROUGE-1"] in done.stdout
    before = (files / "runs" / "scores.json").read_bytes()
    assert "runs/scores.json" in fails(APP.main, "evaluate", *given)
    assert (files / "runs" / "scores.json").read_bytes() == before


def test_rows_are_joined_by_id_and_have_references_of_their_own_or_of_a_file(files):
    joined = evaluate("definitions", "ours=ours-definitions.jsonl", "--references", "gold.jsonl")  # in reverse order
    assert joined["systems"]["ours"]["ROUGE-L"]["value"] == pytest.approx((100 + 200 / 3 + 40 + 50) / 4)
    columns = ("--prediction-column", "summary_text", "--reference-column", "definition")
    assert evaluate("definitions", "ours=ours.jsonl", *columns)["systems"] == joined["systems"]
    runs = evaluate("definitions", "ours=ours.jsonl", "ours=base.jsonl", *columns)["systems"]["ours"]["ROUGE-L"]
    assert runs["runs"][0] == pytest.approx(joined["systems"]["ours"]["ROUGE-L"]["value"]) and runs["sd"] > 0


def test_rows_with_an_error_count_as_empty_and_are_counted(files):
    rows = [
        *({**row, "summary_text": row["summary"]} for row in ROWS[:2]),
        ROWS[2] | {"error": "no text"},
        ROWS[3] | {"summary_text": ""},
    ]
    write_rows(files / "some.jsonl", rows)
    done = run_main(APP.main, "evaluate", "summaries", "some.jsonl", "--json")
    assert json.loads(done.stdout)["systems"]["some"]["ROUGE-1"]["value"] == 50
    assert json.loads(done.stdout)["empty"] == {"some": 2}
    assert "2 of 4 predictions are empty, 1 by an error" in done.stderr
    write_rows(files / "none.jsonl", [row | {"error": "no text", "summary_text": None} for row in ROWS])
    assert "all 4 rows have an error" in fails(APP.main, "evaluate", "summaries", "none.jsonl")


def test_keyphrases_and_answers_are_read_in_their_forms(files):
    gold = {"id": "a", "title": "Graph cuts", "text": "They segment images.", "keyphrases": "graph cut; images"}
    write_rows(files / "gold.jsonl", [gold])
    found = [{"keyphrase": "graph cuts", "score": 0.9}, {"keyphrase": "cuts", "score": 0.1}]
    write_rows(files / "found.jsonl", [{"id": "a", "keyphrases": found}])
    given = ("keyphrases", "found.jsonl", "--references", "gold.jsonl")
    assert evaluate(*given)["systems"]["found"]["F1@5"]["value"] == pytest.approx(50)
    exhird = evaluate(*given, "--convention", "exhird", "--language", "none")["systems"]["found"]
    assert exhird["present F1@M"]["value"] == pytest.approx(0)  # "cuts" is not "cut"
    write_rows(
        files / "squad.jsonl", [{"id": "q", "question": "?", "answers": {"text": ["a cat"], "answer_start": [1]}}]
    )
    write_rows(files / "answers.jsonl", [{"id": "q", "answer": "The cat"}])
    assert (
        evaluate("answers", "answers.jsonl", "--references", "squad.jsonl")["systems"]["answers"]["exact"]["value"]
        == 100
    )


REFUSED = [
    ("an id is missing", lambda rows: rows[:3], "ids ['3']"),
    ("an id occurs twice", lambda rows: [*rows[:3], rows[0]], "id of ['0']"),
    ("another number without ids", lambda rows: [{"summary_text": "a"}] * 3, "3 rows"),
    ("another order without ids", lambda rows: [{k: v for k, v in row.items() if k != "id"} for row in rows[::-1]], "'t3'"),
    ("other references", lambda rows: [*rows[:3], rows[3] | {"summary": "a bell"}], "'a bell'"),
    ("no prediction", lambda rows: [*rows[:3], ROWS[3] | {"summary_text": None}], "row 4, 'summary_text'"),
    ("no column", lambda rows: ROWS, "'summary_text'"),
]  # fmt: skip


@pytest.mark.parametrize("change, names", [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_rows_of_another_source_are_refused(change, names, files):
    rows = [json.loads(line) for line in (files / "ours.jsonl").read_text().splitlines()]
    write_rows(files / "other.jsonl", change(rows))
    for given in (("ours.jsonl", "other.jsonl"), ("other.jsonl", "--references", "gold.jsonl")):
        error = fails(APP.main, "evaluate", "summaries", *given)
        assert names in error and "other.jsonl" in error


@pytest.mark.parametrize(
    "given, names",
    [
        (("definitions", "ours-definitions.jsonl"), "'definition'"),
        (("summaries", "ours.jsonl", "--baseline", "x"), "--baseline 'x'"),
        (("summaries", "=ours.jsonl"), "'=ours.jsonl'"),
        (("summaries", "ours.jsonl", "--language", "german"), "--language german"),
        (("summaries", "ours.jsonl", "--reference-column", "empty"), "gold.jsonl, row 1, 'empty'"),
        (("translations", "ours.jsonl"), "'translations'"),
    ],
)
def test_options_that_do_not_fit_are_named(given, names, files):
    write_rows(files / "gold.jsonl", [row | {"empty": " "} for row in ROWS])
    more = ("--references", "gold.jsonl") if "empty" in given else ()
    assert names in fails(APP.main, "evaluate", *given, *more)


def test_a_package_that_is_missing_is_named_with_its_extra(files, monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    error = fails(APP.main, "evaluate", "summaries", "ours.jsonl")
    assert "rouge_score" in error and "'lexperts[summaries]'" in error
