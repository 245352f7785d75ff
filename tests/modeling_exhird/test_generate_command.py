# needs: cluster, parquet
"""`lexperts keyphrases generate`: what the pipeline gives, for files; keyphrases of near examples as candidates."""

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from transformers import pipeline

from lexperts.cli.keyphrases import app
from lexperts.near_examples import NearExamples
from run_tools.errors import UserError
from tests.recipes.lexicon_helpers import save_embedder
from tests.tools import fails, read_rows, run_main, write_rows

from .conftest import PAIRS, copying, word_tokenizer
from .llamas import fitted, llama_tokenizer

ROWS: list[dict] = [{"id": f"d{i}", **pair, "year": 2000 + i} for i, pair in enumerate(PAIRS * 2)]
ROWS.insert(5, {"id": "none", "title": "Graph", "text": None, "year": 1})
TOOLS = ("saw", "axe")
EXAMPLES = [
    {"title": f"the {kind}", "text": f"{kind} {number}", "keyphrases": [kind, "tools" if kind in TOOLS else "animals"]}
    for number in range(4)
    for kind in ("cat", "dog", *TOOLS)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, documents, examples, and an embedder of both."""
    folder = tmp_path_factory.mktemp("files")
    models = {"gru": (copying(), word_tokenizer()), "llama": (fitted(), llama_tokenizer())}
    for name, parts in models.items():
        for part in parts:
            part.save_pretrained(folder / name)
    write_rows(folder / "rows.jsonl", ROWS)
    write_rows(folder / "tools.jsonl", [{"text": f"the {kind} cuts graphs"} for kind in ("saw", "cat")])
    write_rows(folder / "examples.jsonl", EXAMPLES)
    write_rows(folder / "bare.jsonl", [{"text": "a cat"}])
    save_embedder(
        folder / "embedder", [{"term": row["title"], "context": row["text"], "source": ""} for row in EXAMPLES]
    )
    return folder


def command(folder, source, output, model, **options):
    given = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    return ["generate", folder / source, output, "--model", folder / model, "--device", "cpu", *given]


def test_rows_hold_the_phrases_of_the_pipeline(folder, tmp_path):
    output = tmp_path / "out.jsonl"
    options = {"num_keyphrases": 3, "batch_size": 2, "keep": "year"}
    done = run_main(app, *command(folder, "rows.jsonl", output, "gru", **options))
    assert done.returncode == 0 and "1 could not be processed" in done.stdout, done.stderr
    generate, found = pipeline("keyphrase-generation", model=str(folder / "gru")), read_rows(output)
    assert found[5] == {"id": "none", "year": 1, "error": "'text' is None, not a text"}
    for row, own in zip(ROWS, found, strict=True):
        if row["text"] is None:
            continue
        expected = generate({"title": row["title"], "text": row["text"]}, num_keyphrases=3)
        assert own.keys() == {"id", "year", "keyphrases"} and own["id"] == row["id"]
        assert [p["keyphrase"] for p in own["keyphrases"]] == [p["keyphrase"] for p in expected]
        assert all(phrase["present"] == (phrase["field"] in ("title", "text")) for phrase in own["keyphrases"])


def test_a_parquet_file_has_types_and_other_settings_are_named(folder, tmp_path):
    given = command(folder, "rows.jsonl", tmp_path / "out.parquet", "gru")
    assert run_main(app, *given).returncode == 0
    assert "min_phrases=None before, 2 now" in fails(app, *given, "--min-phrases", 2)
    schema = parquet.read_table(tmp_path / "out.parquet").schema
    assert schema.field("keyphrases").type.value_type.field("present").type == pyarrow.bool_()


def test_keyphrases_of_near_examples_compete(folder, tmp_path):
    examples = write_rows(tmp_path / "examples.jsonl", EXAMPLES)
    options = {"examples": examples, "embedder": folder / "embedder"}
    given = command(folder, "tools.jsonl", tmp_path / "out.jsonl", "llama", **options)
    done = run_main(app, *given)
    assert done.returncode == 0, done.stderr
    saw, cat = (line["keyphrases"] for line in read_rows(tmp_path / "out.jsonl"))
    assert {"tools", "saw"} <= {phrase["keyphrase"] for phrase in saw}
    assert {"animals", "cat"} <= {phrase["keyphrase"] for phrase in cat}
    scores = [phrase["score"] for phrase in saw]
    assert scores == sorted(scores, reverse=True) and len(scores) <= 10
    write_rows(examples, EXAMPLES[:1])
    assert "examples=" in fails(app, *given)


@pytest.mark.parametrize(
    "model, options, fragment",
    [
        ("no/such-model", {}, "no/such-model"),
        ("llama", {"examples": "bare.jsonl", "embedder": "embedder"}, "bare.jsonl"),
        ("gru", {"examples": "examples.jsonl", "embedder": "embedder"}, "candidates"),
        ("llama", {"examples": "examples.jsonl", "embedder": "no-embedder"}, "no-embedder"),
    ],
)
def test_what_is_refused(model, options, fragment, folder, tmp_path):
    files = {name: folder / value for name, value in options.items()}
    assert fragment in fails(app, *command(folder, "rows.jsonl", tmp_path / "out.jsonl", model, **files))
    assert not (tmp_path / "out.jsonl").exists()


def embed(texts):
    """Animals here, tools there."""
    return np.array([[any(tool in text for tool in TOOLS), "cat" in text or "dog" in text] for text in texts]) + 0.01


def test_the_keyphrases_of_near_examples_come_first(monkeypatch):
    monkeypatch.setattr("lexperts.near_examples.NEAREST", 8)
    near = NearExamples([*EXAMPLES, {"text": "saw", "keyphrases": []}], embed)
    animal, tool = near.candidates([{"text": "cat"}, {"title": "the axe", "text": "axe"}])
    assert animal[0] == "animals" and set(animal) == {"animals", "cat", "dog"}
    assert tool[0] == "tools" and set(tool) == {"tools", *TOOLS}
    assert near.add_candidates([{"id": 7, "text": "cat"}]) == [{"id": 7, "text": "cat", "candidates": animal}]
    rows = [{"text": "the cat", "keyphrases": ["its own"]}, {"text": "the dog", "keyphrases": ["dog"]}]
    near = NearExamples(rows, embed)  # a document is not an example of itself
    assert near.candidates([{"text": "the cat"}]) == [["dog"]] and near.add_candidates([]) == []
    with pytest.raises(UserError, match="1 examples"):
        NearExamples([{"text": "a", "keyphrases": []}], embed)
