"""What all five pipelines have in common: the inputs of transformers' own pipelines, no default model, cards."""

import json

import pytest
import torch
from datasets import Dataset
from huggingface_hub import ModelCard
from transformers import pipeline
from transformers.pipelines.pt_utils import KeyDataset

import lexperts  # noqa: F401
from run_tools.cards import is_blank
from run_tools.packaged import DEFAULT_MODELS
from tests.modeling_hypernet.conftest import tiny_hypernet  # noqa: F401
from tests.test_hub_contract import make  # noqa: F401

TEXTS = ["the graph cut of the network", "learning in graph networks", "cuts and networks"]
TERMS = [{"term": "graph", "context": text} for text in TEXTS]
QUESTIONS = [{"question": "is the network", "context": text} for text in TEXTS]
PIPELINES = {
    "keyphrase-extraction": ("seke-bert", TEXTS, {"top_k": None}),
    "keyphrase-generation": ("exhird-bigru", TEXTS, {}),
    "moe-summarization": ("moesumm-bart", TEXTS, {"max_length": 6, "num_beams": 1}),
    "definition-modeling": ("lexicon-token", TERMS, {"max_new_tokens": 3}),
    "extractive-qa": ("hypernet-answers", QUESTIONS, {}),
}
each_task = pytest.mark.parametrize("task", PIPELINES)


class ByIndex(torch.utils.data.Dataset):
    """A map-style data set without `__iter__`, which counts its reads and accepts any index."""

    def __init__(self, rows):
        self.rows, self.reads = rows, 0

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        self.reads += 1
        return self.rows[i % len(self.rows)]


# the forms that transformers streams; it reads no `datasets` columns
STREAMS = {
    "KeyDataset": lambda rows: KeyDataset(Dataset.from_dict({"x": rows}), "x"),
    "map-style": ByIndex,
    "generator": lambda rows: (row for row in rows),
}
LISTS = {"list": list, "tuple": tuple, "column": lambda rows: Dataset.from_dict({"x": rows})["x"]}


@pytest.fixture(scope="module")
def runs(make):  # noqa: F811
    """runs(task) -> pipeline, inputs, options."""
    opened = {}

    def run(task):
        name, rows, options = PIPELINES[task]
        if task not in opened:
            model, tokenizer = make(name)
            opened[task] = pipeline(task, model=model, tokenizer=tokenizer, device="cpu")
        return opened[task], rows, options

    return run


@each_task
def test_inputs_come_in_every_form_that_transformers_pipelines_read(task, runs):
    run, rows, options = runs(task)
    expected = run(rows, **options)
    assert len(expected) == len(rows) and all(expected)
    for name, convert in STREAMS.items():
        results = run(convert(rows), **options)
        assert not isinstance(results, list), name
        assert list(results) == expected, name
    for name, convert in LISTS.items():
        results = run(convert(rows), **options)
        is_lazy = task == "keyphrase-extraction" and name == "column"  # for data sets of millions of documents
        assert (list(results) if is_lazy else results) == expected, name


@each_task
def test_a_data_set_is_read_as_far_as_its_results_are_used(task, runs):
    run, rows, options = runs(task)
    source = ByIndex(rows * 40)
    results = iter(run(source, batch_size=1, **options))
    assert source.reads == 0
    next(results)
    assert 0 < source.reads < len(source)
    for wrong in (5, b"text", None):
        with pytest.raises(TypeError):
            run(wrong, **options)


@pytest.mark.parametrize("task", [task for task in PIPELINES if task not in DEFAULT_MODELS])
def test_a_task_without_a_default_model_asks_for_one(task):
    with pytest.raises(ValueError, match=rf"{task}.*model="):
        pipeline(task)


@each_task
def test_a_saved_pipeline_has_a_card_and_no_default_model(task, runs, tmp_path):
    run, _, _ = runs(task)
    run.save_pretrained(tmp_path / "a")
    card = ModelCard.load(tmp_path / "a" / "README.md")
    assert f'pipeline("{run.model.card_use["task"]}", model="PATH")' in card.text and not is_blank(card.content)
    saved = json.loads((tmp_path / "a" / "config.json").read_text())["custom_pipelines"]
    assert set(saved) == {task} and "default" not in saved[task]


# keyphrase-extraction splits its words first: test_odd_texts.py
@pytest.mark.parametrize("task", [task for task in PIPELINES if task != "keyphrase-extraction"])
def test_a_lone_surrogate_is_read_as_an_unknown_character(task, runs):
    run, rows, options = runs(task)

    def written(row, character):
        row = row if isinstance(row, dict) else {"text": row}
        row = {name: f"{value} {character} cut" for name, value in row.items()}
        return row["text"] if list(row) == ["text"] else row

    def scores(results):
        names = ("score", "start", "end", "summary_text")
        return [[result.get(name) for name in names] for result in results if isinstance(result, dict)]

    odd, plain = (run([written(row, character) for row in rows], **options) for character in ("\ud800", "\ufffd"))
    assert len(odd) == len(rows)
    for one, other in zip(odd, plain, strict=True):
        assert scores(one if isinstance(one, list) else [one]) == scores(other if isinstance(other, list) else [other])


@each_task
def test_an_unknown_option_is_refused(runs, task):
    """When a pipeline is made, or by `generate`."""
    run, rows, options = runs(task)
    generates = task in ("moe-summarization", "definition-modeling")
    for made in (True, False):
        with pytest.raises(ValueError if generates else TypeError, match="num_phrasez"):
            if made and not generates:
                pipeline(task, model=run.model, tokenizer=run.tokenizer, num_phrasez=3)
            list(run(rows, **options, num_phrasez=3))


OPTIONS = {  # of each task one, and a value that changes what a pipeline returns
    "keyphrase-extraction": ("top_k", None),
    "keyphrase-generation": ("num_keyphrases", 1),
    "moe-summarization": ("dataset", None),
    "definition-modeling": ("num_definitions", 2),
    "extractive-qa": ("top_k", 3),
}


@each_task
def test_none_is_the_default_of_an_option_also_where_the_pipeline_has_another_value(runs, task):
    (run, rows, options), (name, value) = runs(task), OPTIONS[task]
    rest = {key: given for key, given in options.items() if key != name}
    expected = run(rows, **rest)
    assert run(rows, **rest, **{name: None}, batch_size=None) == expected
    if value is not None:
        narrowed = pipeline(task, model=run.model, tokenizer=run.tokenizer, device="cpu", **{name: value})
        assert narrowed(rows, **rest) != expected == narrowed(rows, **rest, **{name: None})


def test_data_sets_of_pytorch_name_the_datasets_and_generate_may_be_a_function_of_ones_own(runs):
    run, rows, options = runs("moe-summarization")
    names = ["papers", None, "papers"]
    column = KeyDataset(Dataset.from_dict({"x": names}), "x")
    assert run(rows, dataset=column, **options) == run(rows, dataset=names, **options)
    own = {"custom_generate": lambda model, input_ids, mine=None, **_: input_ids, "mine": 3}
    assert len(run(rows, **options, **own)) == len(rows)
