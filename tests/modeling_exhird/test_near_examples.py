# needs: cluster
"""Keyphrases of near examples as candidates: which are chosen, and files of documents with them."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from lexperts.cli.keyphrases import app
from lexperts.near_examples import NearExamples
from run_tools.errors import UserError
from run_tools.rows import read_jsonl
from tests.recipes.lexicon_helpers import save_embedder

from .conftest import tiny_exhird, word_tokenizer
from .llamas import fitted, llama_tokenizer

TOOLS = ("saw", "axe")
EXAMPLES = [
    {"title": f"the {kind}", "text": f"{kind} {number}", "keyphrases": [kind, "tools" if kind in TOOLS else "animals"]}
    for number in range(4)
    for kind in ("cat", "dog", *TOOLS)
]


def embed(texts):
    """Animals here, tools there; a little less similar with each number."""
    vectors = [[float(any(tool in text for tool in TOOLS)), float("cat" in text or "dog" in text)] for text in texts]
    return np.array(vectors) + [[0.01 * sum(map(ord, text)) / 100] * 2 for text in texts]


def test_the_keyphrases_of_near_examples_come_first(monkeypatch):
    monkeypatch.setattr("lexperts.near_examples.NEAREST", 8)
    near = NearExamples([*EXAMPLES, {"text": "saw", "keyphrases": []}], embed)
    animal, tool = near.candidates([{"text": "a cat"}, {"title": "Which axe?", "text": "It is old."}])
    assert animal[0] == "animals" and set(animal) == {"animals", "cat", "dog"}
    assert tool[0] == "tools" and set(tool) == {"tools", *TOOLS}
    assert [near.candidates([{"text": text}])[0] for text in ("a cat", "axe")] == near.candidates(
        [{"text": "a cat"}, {"text": "axe"}]
    )
    (document,) = near.add_candidates([{"id": 7, "text": "a cat"}])
    assert document == {"id": 7, "text": "a cat", "candidates": animal}


def test_a_document_is_no_example_of_itself():
    rows = [{"text": "my cat", "keyphrases": ["its own"]}, {"text": "my dog", "keyphrases": ["dog"]}]
    assert NearExamples(rows, embed).candidates([{"text": "my cat"}, {"text": "my bird"}]) == [
        ["dog"],
        ["dog", "its own"],
    ]
    assert NearExamples(rows, embed).add_candidates([]) == []


def test_examples_without_keyphrases_are_refused():
    with pytest.raises(UserError, match="None of the 1 examples has keyphrases"):
        NearExamples([{"text": "a", "keyphrases": []}], embed)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoder")
    fitted().save_pretrained(folder)
    llama_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def files(tmp_path):
    """Documents, examples, and an embedder of both."""
    rows = [{"term": row["title"], "context": row["text"], "source": ""} for row in EXAMPLES]
    documents = [{"id": i, "text": f"the {kind} cuts graphs"} for i, kind in enumerate(("saw", "cat", "axe"))]
    for name, values in (("in.jsonl", documents), ("examples.jsonl", EXAMPLES)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in values), encoding="utf-8")
    save_embedder(tmp_path / "embedder", rows)
    return tmp_path


def run(files, model, *options, output="out.jsonl"):
    given = ["generate", str(files / "in.jsonl"), str(files / output), "--model", model, "--device", "cpu"]
    return CliRunner().invoke(app, [*given, *options])


def test_the_command_writes_what_the_pipeline_gives(files, model):
    given = ("--examples", str(files / "examples.jsonl"), "--embedder", str(files / "embedder"))
    done = run(files, model, *given)
    assert done.exit_code == 0, done.output
    lines = read_jsonl(files / "out.jsonl")
    saw, cat, _ = ({phrase["keyphrase"] for phrase in line["keyphrases"]} for line in lines)
    assert {"tools", "saw"} <= saw and {"animals", "cat"} <= cat
    for line in lines:
        scores = [phrase["score"] for phrase in line["keyphrases"]]
        assert scores == sorted(scores, reverse=True) and len(scores) <= 10
    again = run(files, model, *given, output="again.jsonl")
    assert again.exit_code == 0 and (files / "again.jsonl").read_bytes() == (files / "out.jsonl").read_bytes()
    changed = run(
        files, model, *given[:2], "--embedder", str(files / "embedder"), "--num-keyphrases", "1", output="one.jsonl"
    )
    assert changed.exit_code == 0
    assert [line["keyphrases"] for line in read_jsonl(files / "one.jsonl")] == [
        line["keyphrases"][:1] for line in lines
    ]


def test_other_examples_are_another_run(files, model):
    given = ("--examples", str(files / "examples.jsonl"), "--embedder", str(files / "embedder"))
    assert run(files, model, *given).exit_code == 0
    (files / "examples.jsonl").write_text(json.dumps(EXAMPLES[0]) + "\n", encoding="utf-8")
    done = run(files, model, *given)
    assert done.exit_code == 2 and "examples='examples.jsonl" in done.stderr


def test_errors_name_the_option(files, model):
    for part in (tiny_exhird("bigru"), word_tokenizer()):
        part.save_pretrained(files / "gru")
    (files / "bare.jsonl").write_text('{"text": "a cat"}\n', encoding="utf-8")
    (files / "title.jsonl").write_text('{"text": "a", "title": 5, "keyphrases": ["b"]}\n', encoding="utf-8")
    embedder = ("--embedder", str(files / "embedder"))
    for chosen, options, message in (
        (model, ("--examples", str(files / "no.jsonl")), "no.jsonl"),
        (model, ("--examples", str(files / "bare.jsonl"), *embedder), "bare.jsonl"),
        (model, ("--examples", str(files / "title.jsonl"), *embedder), "title=5 is not a title"),
        (str(files / "gru"), ("--examples", str(files / "examples.jsonl"), *embedder), "scores no candidates"),
        (model, ("--examples", str(files / "examples.jsonl"), "--embedder", str(files / "no-embedder")), "no-embedder"),
    ):
        done = run(files, chosen, *options)
        assert done.exit_code == 2 and message in done.stderr.replace("\n", ""), (options, done.output)
        assert "Traceback" not in done.stderr and not (files / "out.jsonl").exists()
