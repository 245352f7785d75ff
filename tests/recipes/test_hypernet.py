"""The hypernetwork's trainings, on a tiny BERT and small texts."""

import json

import pytest
import torch
from datasets import Dataset
from transformers import TrainingArguments, pipeline

from lexperts.cli.train import app
from lexperts.recipes.hypernet.arguments import ClassificationDataArguments, ModelArguments
from lexperts.recipes.hypernet.classes import load_texts
from lexperts.recipes.hypernet.keyphrases import score_mentions
from lexperts.recipes.hypernet.models import build_model
from lexperts.recipes.training import RecipeTrainer
from modeling_hypernet import (
    DataCollatorForTextPairs,
    HypernetForSequenceClassification,
    HypernetForTokenClassification,
    add_states,
    tokenize_pairs,
)
from tests.recipes.trainings import some_rows
from tests.tools import write_rows

FAST = ["--use-cpu", "--report-to", "none", "--disable-tqdm", "true", "--per-device-train-batch-size", "8"]
FAST += ["--save-strategy", "epoch", "--num-train-epochs", "2", "--meta-embedding-size", "4", "--hidden-size", "8"]
EVALUATED = ["--eval-strategy", "epoch"]
TEXT = "the graph cut of the network is learning in graph networks"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Twelve rows with the columns of all three commands, some without an answer."""
    nothing = {"answers": {"text": [], "answer_start": []}}
    rows = [row | ({} if i % 4 else nothing) for i, row in enumerate(some_rows())]
    path = str(write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", rows))
    return ["--train-files", path, "--test-files", path]


def run(kind, *arguments):
    with pytest.raises(SystemExit) as ended:
        app([f"hypernet-{kind}", *map(str, arguments)])
    assert not ended.value.code


def test_keyphrases_are_trained_and_scored_by_one_command(backbone, files, tmp_path, capsys):
    arguments = [*FAST, *EVALUATED, "--backbone", backbone, "--output-dir", tmp_path]
    arguments += ["--max-length", "60", "--cache-states", "true", *files]
    run("keyphrases", *arguments)
    results = json.loads((tmp_path / "results.json").read_text())
    assert {"precision", "recall", "f1"} == set(results["test"]["spans"]) and "f1@10" in results["test"]["seke"]
    assert {"precision", "recall", "f1"} == set(results["test"]["paths"])
    assert [entry for entry in results["log"] if "eval_span_f1" in entry]
    output = capsys.readouterr().out
    assert "9 documents in 9 windows" in output and "18 of 18" in output and "test, 12 documents" in output
    assert {path.name for path in tmp_path.glob("*.arrow")} == {"states-train.arrow", "states-validation.arrow"}
    extract = pipeline("keyphrase-extraction", model=str(tmp_path))
    assert isinstance(extract({"title": "graph cut", "text": TEXT}), list)
    assert extract.model.config.keyphrase_threshold == results["threshold"]


def test_mentions_are_counted_against_the_spans_of_the_gold_labels():
    extract = lambda inputs, **_: [[{"mentions": [{"start": 4, "end": 13}, {"start": 0, "end": 3}]}]]  # noqa: E731
    extract.language = "english"
    found = score_mentions(extract, {"title": [""], "text": ["the graph cut of it"], "keyphrases": [["graph cuts"]]})
    assert found == pytest.approx({"precision": 1 / 2, "recall": 1, "f1": 2 / 3})


def test_states_are_computed_once_and_change_nothing(backbone, tmp_path):
    args = ModelArguments(backbone, meta_embedding_size=4, hidden_size=8)
    model, tokenizer = build_model(HypernetForSequenceClassification, args, 60, 1)
    pairs = tokenize_pairs(["graph", None, "a cut"], [TEXT, "networks", "of"], tokenizer)
    rows = Dataset.from_dict({**pairs, "labels": [0, 1, 0]})
    collator, file = DataCollatorForTextPairs(tokenizer), str(tmp_path / "states.arrow")
    expected = model(**collator(list(rows))).logits
    cached = add_states(rows, model, collator, file)
    model.base_model.backbone = None
    again = add_states(rows, model, collator, file)
    for one in (cached, again):
        torch.testing.assert_close(model(**collator(list(one))).logits, expected, rtol=0, atol=1e-5)


def test_by_default_the_best_epoch_is_kept(backbone, files, tmp_path, monkeypatch):
    decode, halves = HypernetForTokenClassification.decode, []

    def recorded_decode(model, **inputs):
        halves.append(torch.is_autocast_enabled("cpu"))
        return decode(model, **inputs)

    monkeypatch.setattr(HypernetForTokenClassification, "decode", recorded_decode)
    options = ["--train-sampling-strategy", "group_by_length"]  # of training rows; validation rows keep their order
    options += ["--bf16", "true", "--freeze-backbone", "false"]
    run("keyphrases", *FAST, *options, "--backbone", backbone, "--output-dir", tmp_path, *files)
    assert halves[0] and not halves[-1]  # validation as in training, the test as in the pipeline
    results = json.loads((tmp_path / "results.json").read_text())
    scores = [entry["eval_span_f1"] for entry in results["log"] if "eval_span_f1" in entry]
    assert len(scores) == 2 and results["best_validation_span_f1"] == max(scores)
    assert (tmp_path / "model.safetensors").exists()


def test_classes_are_trained_by_one_command(backbone, files, tmp_path, capsys):
    arguments = [*FAST, *EVALUATED, "--backbone", backbone, "--output-dir", tmp_path, "--max-length", "60", *files]
    run("classes", *arguments, "--freeze-backbone", "false", "--backbone-lr", "1e-3")
    assert "2 classes; train: 10 texts, test: 12 texts, validation: 2 texts" in capsys.readouterr().out
    classify = pipeline("text-classification", model=str(tmp_path))
    assert classify({"text": "graph cut", "text_pair": TEXT})["label"] in ("sport", "arts")
    assert 0 <= json.loads((tmp_path / "results.json").read_text())["test"]["test_accuracy"] <= 1


@pytest.mark.parametrize(
    "labels, test, fragment",
    [
        ([0, 1, 2], 7, "7"), ([False, True], 0.5, "0.5"), (["a", 1, "b"], "a", "int and str"), ([0, 1, True], 0, "bool and int"),
        ([["a"], ["b"]], "a", "list"), (["a", "b"], ["a"], "['a']"),
    ],
)  # fmt: skip
def test_labels_that_are_no_classes_are_found_before_training(labels, test, fragment, tmp_path):
    paths = [write_rows(tmp_path / f"{name}.jsonl", [{"text": "x", "label": label} for label in own])
             for name, own in (("train", labels * 4), ("test", [test]))]  # fmt: skip
    args = ClassificationDataArguments(train_files=[str(paths[0])], test_files=[str(paths[1])])
    with pytest.raises(ValueError) as error:
        load_texts(args)
    assert fragment in str(error.value)


def test_classes_of_any_type_are_whole_numbers(tmp_path):
    for labels, names in (([True, False], ["False", "True"]), ([1.0, 0.0], ["0.0", "1.0"]), ([3, 1], ["1", "3"])):
        path = write_rows(tmp_path / "train.jsonl", [{"text": "x", "label": label} for label in labels * 6])
        rows, found = load_texts(ClassificationDataArguments(train_files=[str(path)]))
        assert found == names and sorted({repr(row["label"]) for row in rows["train"]}) == ["0", "1"]


def test_answers_are_trained_and_scored_by_one_command(backbone, files, tmp_path):
    arguments = [*FAST, "--backbone", backbone, "--output-dir", tmp_path, *files]
    run("qa", *arguments, "--max-seq-len", "40", "--doc-stride", "8", "--cache-states", "true")
    results = json.loads((tmp_path / "results.json").read_text())
    assert {"exact", "F1", "HasAns exact", "NoAns F1"} <= set(results["test"]) and len(results["test_answers"]) == 12
    assert pipeline("extractive-qa", model=str(tmp_path))(question="the network", context=TEXT)["answer"] in TEXT


def test_the_backbone_has_a_separate_learning_rate(backbone, tmp_path):
    args = ModelArguments(backbone, freeze_backbone=False, meta_embedding_size=4, hidden_size=8)
    model, _ = build_model(HypernetForSequenceClassification, args, 60, 1, num_labels=2)
    arguments = TrainingArguments(str(tmp_path), learning_rate=1e-2, report_to="none", use_cpu=True)
    trainer = RecipeTrainer(model=model, args=arguments, part=model.base_model.backbone.parameters(), part_rate=1e-5)
    rates = {id(p): group["lr"] for group in trainer.create_optimizer().param_groups for p in group["params"]}
    backbone_ids = {id(p) for p in model.base_model.backbone.parameters()}
    assert len(rates) == len(list(model.parameters()))
    assert all(rate == (1e-5 if key in backbone_ids else 1e-2) for key, rate in rates.items())
