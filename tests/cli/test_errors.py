# needs: serve, app
"""What is wrong with a command line: one line that names it, exit status 2, nothing written and no model opened."""

import json

import pytest
import typer
from transformers import PreTrainedModel
from typer.testing import CliRunner

from lexperts.cli import build_app

GROUPS = typer.main.get_command(build_app()).commands
COMMANDS = {
    f"{group} {name}".strip(): own
    for group, command in GROUPS.items()
    for name, own in (getattr(command, "commands", None) or {"": command}).items()
    if not own.allow_extra_args  # those of recipes
}
ROW = {"id": 1, "text": "graph cuts", "keyphrases": ["cuts"], "term": "cut", "context": "the cut", "document": "One."}
TABLE = [  # command line, and what the line names
    ("keyphrases extrac rows.jsonl out.jsonl", "Did you mean 'extract'"),
    ("keyphrases extract none.jsonl out.jsonl", "none.jsonl"),
    ("keyphrases extract rows.jsonl folder", "folder"),
    ("keyphrases extract rows.jsonl out.docx", "out.docx"),
    ("keyphrases extract rows.jsonl out.jsonl --text-column txt", "'txt'"),
    ("keyphrases extract rows.jsonl out.jsonl --keep year", "'year'"),
    ("keyphrases extract rows.jsonl out.jsonl --text_colum a", "--text-column"),
    ("keyphrases extract rows.jsonl out.jsonl --top-k 0", "--top-k"),
    ("keyphrases extract rows.jsonl out.jsonl --min-score nan", "--min-score"),
    ("keyphrases extract rows.jsonl out.jsonl --language klingon", "'klingon'"),
    ("keyphrases extract rows.jsonl out.jsonl --candidates none.txt", "none.txt"),
    ("keyphrases extract rows.jsonl out.jsonl --device nowhere", "nowhere"),
    ("keyphrases extract rows.jsonl out.jsonl --model folder", "folder"),
    ("keyphrases extract rows.jsonl out.jsonl --model deep", "'deep' cannot be opened"),
    ("keyphrases extract rows.csv out.jsonl --encoding klingon", "klingon"),
    ("keyphrases extract rows.csv out.jsonl --delimiter ab", "delimiter"),
    ("keyphrases generate rows.jsonl out.jsonl --model folder", "folder"),
    ("keyphrases show rows.csv --output rows.jsonl", "rows.jsonl"),
    ("keyphrases show rows.csv --output dangling.html", "dangling.html"),
    ("keyphrases show latin1.txt", "latin1.txt, line 2 is not UTF-8: unexpected end of data"),
    ("keyphrases score rows.jsonl rows.jsonl -k m", "'m'"),
    ("keyphrases export folder out", "folder"),
    ("keyphrases serve --max-wait-ms nan", "--max-wait-ms"),
    ("keyphrases serve --host 203.0.113.1", "203.0.113.1"),
    ("define term bank -c river --num-definitions 3 --best-of 2", "--best-of 2"),
    ("define term bank -c river --model folder", "folder"),
    ("define terms rows.csv out.jsonl", "'term'"),
    ("summarize rows.csv out.jsonl", "'document'"),
    ("summarize rows.jsonl out.jsonl --dataset a --dataset-column id", "--dataset-column"),
    ("summarize rows.jsonl out.jsonl --dataset-column ids", "'ids'"),
    ("train seke minilm_cpu --train-files a=rows.jsonl --text-column txt", "'txt'"),
    ("train hypernet-keyphrases --train-files rows.jsonl --title-column titel", "'titel'"),
    ("train hypernet-qa --train-files rows.jsonl", "'question'"),
    ("merge compose none.yml out", "none.yml"),
    ("merge inspect folder", "folder"),
    ("merge verify folder --moved law", "law"),
    ("merge tune folder out --domain law", "law"),
    ("merge evaluate folder --domain a=b --domain a=c", "a=c"),
    ("merge cluster none.jsonl out --method tfidf", "none.jsonl"),
    ("mergee", "Did you mean 'merge'"),
]
EMPTY = ["keyphrases extract rows.jsonl", "merge compose recipe.yml", "merge inspect", "keyphrases export tiny"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(words) -> the one line of a command that fails; nothing has been written."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "config.json").write_text('{"x": ' + "[" * 900 + "]" * 900 + "}")
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    (tmp_path / "rows.csv").write_text("id,text\n1,graph cuts\n")
    (tmp_path / "latin1.txt").write_bytes("a\ncafé".encode("latin-1"))
    (tmp_path / "dangling.html").symlink_to(tmp_path / "page.html")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", lambda *_, **__: pytest.fail("a model was opened"))
    before = sorted(tmp_path.rglob("*"))

    def run(words: list[str]) -> str:
        done = CliRunner().invoke(build_app(), words)
        assert done.exit_code == 2 and done.stdout == "", (done.output, done.exception)
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: ") and sorted(tmp_path.rglob("*")) == before
        return line

    return run


@pytest.mark.parametrize("line, named", TABLE)
def test_the_line_names_what_is_wrong(line, named, run):
    assert named in run(line.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_misspelt_option_is_named(name, run):
    options = {option for one in COMMANDS[name].params for option in one.opts if option.startswith("--")}
    for option in options:
        assert f"{option}x" in run([*name.split(), f"{option}x", "1"])


@pytest.mark.parametrize("line", EMPTY)
def test_an_empty_value_is_not_the_current_folder(line, run):
    before = line.split()[-1]
    assert repr(before) in run([*line.split(), ""])
    assert "--output=" in run([*line.split(), "--output="])


def test_without_a_command_the_help_is_printed():
    done = CliRunner().invoke(build_app(), ["merge"])
    assert done.exit_code == 2 and "compose" in done.output and "error:" not in done.output


def test_debug_raises_the_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words in (["--debug", "merge", "inspect", "none"], ["merge", "--debug", "inspect", "none"]):
        assert "none" in str(CliRunner().invoke(build_app(), words).exception)


def test_an_error_that_is_not_the_users_has_another_status(monkeypatch):
    monkeypatch.setattr("merge_tools.inspect", lambda _: {}["x"])
    done = CliRunner().invoke(build_app(), ["merge", "inspect", "mixture"])
    assert done.exit_code == 1 and done.stderr == "error: KeyError: 'x'\n"
