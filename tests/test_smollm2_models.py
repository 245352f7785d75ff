# needs: smollm2, app
"""The models over SmolLM2 that pipelines open without a model argument, with their real weights."""

import ast
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer
from transformers import pipeline
from typer.testing import CliRunner

import lexperts  # noqa: F401
from lexperts.app import Answers
from lexperts.cli.define import app
from lexperts.cli.keyphrases import app as keyphrases_app
from lexperts.cli.summarize import summarize as summarize_command
from run_tools.packaged import PACKAGED_MODELS
from run_tools.rows import read_jsonl

ROOT = Path(__file__).resolve().parents[1]
MODELS = [name for name in PACKAGED_MODELS if name.endswith("-smollm2")]
NEEDED = ("lexperts_smollm2", *(PACKAGED_MODELS[name] for name in MODELS))
MISSING = not all(map(find_spec, NEEDED))
pytestmark = [pytest.mark.nightly, pytest.mark.skipif(MISSING, reason="the models are not installed: make test does")]

RIVER = {"term": "bank", "context": "They sat on the bank of the river."}
MONEY = {"term": "bank", "context": "The bank refused to lend the company any more money."}
ABSTRACT = (
    "Pruning removes weights of a trained network. We find that a few steps of training after each round of pruning recover the accuracy, and "
    "explain why: the loss stays convex along the removed directions. On three image sets, networks with a tenth of the weights lose nothing."
)
QUESTION = {
    "title": "How can I rotate a log file every night?",
    "text": "The service cannot be restarted, and the file has 4 GB.",
}


@pytest.fixture(scope="module")
def define():
    return pipeline("definition-modeling")


@pytest.fixture(scope="module")
def summarize():
    return pipeline("moe-summarization")


@pytest.fixture(scope="module")
def generate():
    return pipeline("keyphrase-generation")


def test_a_term_is_defined_for_the_sense_that_it_has_in_its_context(define):
    river, money = define([RIVER, MONEY])
    assert river["definition"] != money["definition"] and 0 < min(river["score"], money["score"]) < 1
    assert define(MONEY)["definition"] == money["definition"]
    done = CliRunner().invoke(app, ["term", RIVER["term"], "--context", RIVER["context"]])
    assert done.exit_code == 0 and done.stdout.splitlines()[-1] == river["definition"]


def test_a_summary_is_shorter_and_depends_on_the_kind_of_text(summarize):
    datasets = ["papers", "clinic", None]
    of_papers, of_clinic, plain = (row["summary_text"] for row in summarize([ABSTRACT] * 3, dataset=datasets))
    assert 3 <= len(of_papers.split()) < 0.7 * len(ABSTRACT.split())
    assert len({of_papers, of_clinic, plain}) == 3
    assert summarize(ABSTRACT, dataset="papers")[0]["summary_text"] == of_papers
    with pytest.raises(ValueError, match="'news'.*papers.*clinic"):
        summarize(ABSTRACT, dataset="news")
    with pytest.raises(ValueError, match="Text 0 has 2200 tokens, more than 1948"):
        summarize(ABSTRACT * 40, dataset="papers", on_long="error")


def test_tags_are_not_repeated_and_some_are_not_in_the_text(generate):
    phrases = generate(QUESTION)
    names = [phrase["keyphrase"] for phrase in phrases]
    assert len(set(names)) == len(names) > 1 and not all(phrase["present"] for phrase in phrases)
    for phrase in phrases:
        if phrase["present"]:
            text = QUESTION[phrase["field"]]
            assert text[phrase["start"] : phrase["end"]].lower() == phrase["keyphrase"].lower()
    assert generate([QUESTION, {"text": ""}]) == [phrases, []]


def test_files_are_read_without_a_model(tmp_path, summarize, generate):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [{"document": ABSTRACT}, QUESTION]))
    commands = typer.Typer()
    commands.command("summarize")(summarize_command)
    commands.command("define")(lambda: None)  # so that the name of the command is needed
    given = [str(tmp_path / "in.jsonl"), str(tmp_path / "summaries.jsonl"), "--dataset", "papers"]
    assert CliRunner().invoke(commands, ["summarize", *given]).exit_code == 0
    first, second = read_jsonl(tmp_path / "summaries.jsonl")
    assert first["summary_text"] == summarize(ABSTRACT, dataset="papers")[0]["summary_text"]
    assert second["error"] == "there is no 'document'; the columns are 'title', 'text'"
    given = [str(tmp_path / "in.jsonl"), str(tmp_path / "tags.jsonl"), "--title-column", "title"]
    assert CliRunner().invoke(keyphrases_app, ["generate", *given]).exit_code == 0
    found = read_jsonl(tmp_path / "tags.jsonl")[1]["keyphrases"]
    assert [phrase["keyphrase"] for phrase in found] == [phrase["keyphrase"] for phrase in generate(QUESTION)]


def test_the_app_writes_what_the_pipelines_write(define, summarize, generate):
    answers = Answers(pipeline("keyphrase-extraction"))
    answers.default_pipeline = {each.task: each for each in (define, summarize, generate)}.__getitem__
    found = define(RIVER)
    assert answers.define(*RIVER.values()) == (found["definition"], round(found["score"], 2))
    assert answers.summarize(ABSTRACT, "papers") == summarize(ABSTRACT, dataset="papers")[0]["summary_text"]
    marked, rows = answers.keyphrases(QUESTION["text"], True, "", 0, 50)
    found = generate(QUESTION["text"])
    assert [row[1] for row in rows] == [phrase["keyphrase"] for phrase in found]
    ranks = {mark["start"]: mark["entity"] for mark in marked["entities"] if mark["entity"]}
    assert ranks == {phrase["start"]: str(i) for i, phrase in enumerate(found, start=1) if phrase["present"]}


def test_a_text_has_the_same_answer_alone_and_in_a_batch(define, summarize, generate):
    """In bfloat16 the first question has other tags alone than beside another one."""
    texts = json.loads((ROOT / "benchmarks/own_texts/smollm2.json").read_text(encoding="utf-8"))
    terms, questions = texts["definitions"][:6], texts["questions"][:3]
    for one, other in zip(define(terms, batch_size=6), map(define, terms), strict=True):
        assert one["definition"] == other["definition"] and one["score"] == pytest.approx(other["score"], abs=1e-4)
    for one, other in zip(generate(questions, batch_size=3), map(generate, questions), strict=True):
        assert [phrase["keyphrase"] for phrase in one] == [phrase["keyphrase"] for phrase in other]
    documents = [row["document"] for row in texts["summaries"][:2]]
    together = summarize(documents, dataset="papers", batch_size=2)
    assert together == [summarize(document, dataset="papers")[0] for document in documents]


def test_the_answers_that_pages_print_are_those_of_the_models(define, summarize, generate):
    def printed(page, pattern, flags=re.M):
        *call, answer = re.search(pattern, (ROOT / f"docs/{page}.md").read_text(encoding="utf-8"), flags).groups()
        return *map(ast.literal_eval, call), answer

    term, answer = printed("definitions", r"^define\((\{.*?\})\)\[.*\n# (.*)$")
    assert define(term)["definition"] == answer
    (answer,) = printed("summarization", r'^summarize\(abstract, dataset="papers"\).*\n# (.*)$')
    (abstract, *_) = read_jsonl(ROOT / "examples/smollm2/abstracts.jsonl")
    assert summarize(abstract["document"], dataset="papers")[0]["summary_text"] == answer
    pattern = r'^visit = (\(.*?^\))\nsummarize\(visit, dataset="clinic"\)[^\n]*  # ([^\n]*)$'
    visit, answer = printed("summarization", pattern, re.M | re.S)
    assert summarize(visit, dataset="clinic")[0]["summary_text"] == answer
    question, answer = printed("exhird", r"^question = (\{.*\})\n.*generate\(question\)\]  # (.*)$")
    assert ", ".join(phrase["keyphrase"] for phrase in generate(question)) == answer
