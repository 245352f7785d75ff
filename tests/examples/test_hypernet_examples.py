"""The hypernetwork's examples as a user runs them, on a tiny BERT and texts of their own."""

import json
import sys
from pathlib import Path

import pytest
import torch
import yaml
from torch.testing import assert_close
from transformers import AutoModel, TrainingArguments, pipeline

from modeling_hypernet import HypernetConfig, HypernetForTokenClassification
from tests.examples.scripts import EXAMPLES, scripts_of

HYPERNET = EXAMPLES / "hypernet"
FAST = ["--use_cpu", "--report_to", "none", "--disable_tqdm", "true", "--per_device_train_batch_size", "8"]
FAST += ["--save_strategy", "epoch", "--num_train_epochs", "2", "--meta_size", "4", "--hidden_size", "8"]
EVALUATED = ["--eval_strategy", "epoch"]
TEXT = "the graph cut of the network is learning in graph networks"


@pytest.fixture(scope="module")
def scripts():
    with scripts_of(
        "hypernet", "baselines", "systems", "squad", "train_keyphrases", "train_classification", "train_qa"
    ) as found:
        yield found


@pytest.fixture(scope="module")
def backbone(backbone_config, tiny_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("backbone")
    torch.manual_seed(0)
    AutoModel.from_config(backbone_config("bert")).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Twelve rows that serve all three scripts, and the same for testing."""
    folder = tmp_path_factory.mktemp("rows")
    rows = []
    for i in range(12):
        row = {
            "title": ["graph cut", "learning", ""][i % 3],
            "text": f"{TEXT} {i}",
            "keyphrases": ["graph cut", "network"],
        }
        row |= {"label": ["sport", "arts"][i % 2], "id": f"q{i}", "question": "the network", "context": row["text"]}
        answered = i % 4 > 0
        row["answers"] = {"text": ["learning"] * answered, "answer_start": [TEXT.index("learning")] * answered}
        rows.append(row)
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--train_files", str(folder / "train.jsonl"), "--test_files", str(folder / "test.jsonl")]


def run(script, *given):
    before, sys.argv = sys.argv, ["script", *map(str, given)]
    try:
        script.main()
    finally:
        sys.argv = before


@pytest.mark.parametrize("reader", ["hypernet", "bilstm", "title_guided", "plain"])
def test_keyphrases_are_learnt_by_one_command_and_scored(reader, scripts, backbone, files, tmp_path, capsys):
    given = [
        *FAST,
        *EVALUATED,
        "--backbone",
        backbone,
        "--reader",
        reader,
        "--output_dir",
        tmp_path,
        "--max_length",
        "60",
        *files,
    ]
    run(scripts.train_keyphrases, *given)
    results = json.loads((tmp_path / "results.json").read_text())
    assert {"precision", "recall", "f1"} == set(results["test"]["spans"]) and "f1@10" in results["test"]["seke"]
    assert {"precision", "recall", "f1"} == set(results["test"]["paths"])
    assert [entry for entry in results["epochs"] if "eval_span_f1" in entry]
    said = capsys.readouterr().out
    assert "train: 9 documents in 9 windows; 18 of 18 keyphrases" in said and "test, 12 documents: F1 of spans" in said
    assert (tmp_path / "states-train" / "states.json").exists()
    if reader == "hypernet":
        extract = pipeline("keyphrase-extraction", model=str(tmp_path))
        assert isinstance(extract({"title": "graph cut", "text": TEXT}), list)
        assert extract.model.config.keyphrase_threshold == results["threshold"]
        run(scripts.train_keyphrases, *given)  # the same again goes on from the last checkpoint, and has nothing to do
    else:
        assert not (tmp_path / "config.json").exists()


def test_without_a_word_about_scores_the_best_epoch_is_kept(scripts, backbone, files, tmp_path, monkeypatch):
    decode, halves = HypernetForTokenClassification.decode, []

    def seen(model, **inputs):
        halves.append(torch.is_autocast_enabled("cpu"))
        return decode(model, **inputs)

    monkeypatch.setattr(HypernetForTokenClassification, "decode", seen)
    given = ["--train_sampling_strategy", "group_by_length"]  # of training rows; those of validation keep their order
    given += ["--bf16", "true", "--freeze_backbone", "false"]
    run(scripts.train_keyphrases, *FAST, *given, "--backbone", backbone, "--output_dir", tmp_path, *files)
    assert halves[0] and not halves[-1]  # validation as in training, the test as the pipeline reads
    results = json.loads((tmp_path / "results.json").read_text())
    scores = [entry["eval_span_f1"] for entry in results["epochs"] if "eval_span_f1" in entry]
    assert len(scores) == 2 and results["best_validation_span_f1"] == max(scores)
    assert (tmp_path / "model.safetensors").exists()


def test_classes_are_learnt_by_one_command(scripts, backbone, files, tmp_path, capsys):
    given = [*FAST, *EVALUATED, "--backbone", backbone, "--output_dir", tmp_path, "--max_length", "60", *files]
    run(scripts.train_classification, *given, "--freeze_backbone", "false", "--backbone_lr", "1e-3")
    assert "2 classes; train: 10 texts, test: 12 texts, validation: 2 texts" in capsys.readouterr().out
    classify = pipeline("text-classification", model=str(tmp_path))
    assert classify({"text": "graph cut", "text_pair": TEXT})["label"] in ("sport", "arts")
    assert 0 <= json.loads((tmp_path / "results.json").read_text())["test"]["test_accuracy"] <= 1


def test_answers_are_learnt_by_one_command_and_scored(scripts, backbone, files, tmp_path, capsys):
    given = [*FAST, "--backbone", backbone, "--output_dir", tmp_path, "--max_length", "40", "--stride", "8", *files]
    run(scripts.train_qa, *given, "--cache_states", "true")
    results = json.loads((tmp_path / "results.json").read_text())
    assert {"exact", "f1", "HasAns_exact", "NoAns_f1"} <= set(results["test"]) and len(results["test_answers"]) == 12
    assert pipeline("extractive-qa", model=str(tmp_path))(question="the network", context=TEXT)["answer"] in TEXT


@pytest.mark.parametrize("name", ["train_keyphrases", "train_classification", "train_qa"])
def test_a_run_of_other_settings_or_rows_is_not_gone_on_with(name, scripts, backbone, files, tmp_path, capsys):
    rows = tmp_path / "train.jsonl"
    rows.write_text(Path(files[1]).read_text())
    files = ["--train_files", str(rows)] + (["--validation_share", "0.25"] if name != "train_qa" else ["--stride", "8"])
    given = [*FAST, "--backbone", backbone, "--output_dir", tmp_path / "run", "--max_length", "60", *files]
    script = getattr(scripts, name)
    run(script, *given)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["ran"]["trained_epochs"] == 2 and results["ran"]["num_train_epochs"] == 2

    def refused(*more):
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            run(script, *given, *more)
        assert end.value.code == 2
        return capsys.readouterr().err

    assert "learning_rate=5e-05 before, 0.5 now" in refused("--learning_rate", "0.5")
    assert "reader=hypernet before, plain now" in refused("--reader", "plain")
    rows.write_text(rows.read_text().replace("learning", "LEARNING"))
    assert "train_files=[train.jsonl (" in refused()
    run(script, *given, "--overwrite_output_dir", "true")  # states and checkpoints with it


@pytest.mark.parametrize(
    "name, wrong, message",
    [
        ("train_keyphrases", ["--text_column", "body"], "there is no 'body'; the columns are 'title', 'text'"),
        ("train_classification", ["--label_column", "class"], "there is no 'class'; the columns are"),
        ("train_qa", ["--train_files", "nowhere.jsonl"], "No such file or directory: 'nowhere.jsonl'"),
        ("train_qa", ["--backbone", "nowhere/at-all"], "--backbone 'nowhere/at-all' could not be opened"),
    ],
)
def test_what_the_caller_can_mend_is_said_in_a_line(name, wrong, message, scripts, backbone, files, tmp_path, capsys):
    given = ["--backbone", backbone, "--output_dir", tmp_path, *files, *wrong]
    with pytest.raises(SystemExit) as end:
        run(getattr(scripts, name), *given)
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.startswith("error: ") and message in error


def test_the_recipes_are_arguments_of_their_scripts(scripts):
    known = {}
    for kind, script in (
        ("keyphrases", "keyphrases"),
        ("inspec", "keyphrases"),
        ("news", "classification"),
        ("squad", "qa"),
    ):
        module = getattr(scripts, f"train_{script}")
        known[kind] = {
            *vars(module.ModelArguments()),
            *vars(module.DataArguments()),
            *TrainingArguments.__dataclass_fields__,
        }
    recipes = sorted(HYPERNET.glob("*.yml"))
    assert len(recipes) == 6
    for recipe in recipes:
        assert set(yaml.safe_load(recipe.read_text())) <= known[recipe.stem.split("_")[0]], recipe.name


def test_the_title_guided_reader_is_the_formula(scripts, backbone_config):
    torch.manual_seed(0)
    config = HypernetConfig(text_config=backbone_config("bert"), hidden_size=8)
    model = scripts.baselines.TitleGuidedModel(config).eval()
    u, v = torch.randn(2, 3, 32), torch.randn(2, 5, 32)
    lengths = torch.tensor([3, 1]), torch.tensor([5, 4])
    found, _ = model.read(u, lengths[0], v, lengths[1])
    for i in range(2):
        title = model.reader["title"].rnn(u[i : i + 1, : lengths[0][i]])[0][0]
        text = model.reader["text"].rnn(v[i : i + 1, : lengths[1][i]])[0][0]
        gathered = torch.stack(
            [(title * (title @ (model.reader["match"].weight @ t)).softmax(0)[:, None]).sum(0) for t in text]
        )
        merged = model.reader["merge"].rnn(torch.cat([text, gathered], -1)[None])[0][0]
        assert_close(found[i, : lengths[1][i]], (text + merged) / 2)


def test_a_backbone_that_is_trained_has_a_rate_of_its_own(scripts, backbone, tmp_path):
    args = scripts.systems.ModelArguments(backbone, freeze_backbone=False, meta_size=4, hidden_size=8)
    model = scripts.systems.build("classes", args, backbone, num_labels=2)
    arguments = TrainingArguments(str(tmp_path), learning_rate=1e-2, report_to="none", use_cpu=True)
    trainer = scripts.systems.TwoRatesTrainer(model=model, args=arguments)
    trainer.backbone_lr = 1e-5
    rates = {id(p): group["lr"] for group in trainer.create_optimizer().param_groups for p in group["params"]}
    of_backbone = {id(p) for p in model.base_model.backbone.parameters()}
    assert len(rates) == len(list(model.parameters()))
    assert all(rate == (1e-5 if place in of_backbone else 1e-2) for place, rate in rates.items())


@pytest.mark.parametrize(
    "predicted, gold, exact, f1",
    [
        ("The Cat.", ["cat"], 1, 1),
        ("the black cat", ["cat", "a dog"], 0, 2 / 3),
        ("", [], 1, 1),
        ("cat", [], 0, 0),
        ("", ["cat"], 0, 0),
        ("cat cat", ["cat dog"], 0, 1 / 2),
        ("a", ["the", "U.S."], 0, 0),
        ("us", ["the", "U.S."], 1, 1),
    ],
)
def test_squad_counts_as_its_authors_do(predicted, gold, exact, f1, scripts):
    scores = scripts.squad.squad_scores([predicted], [gold])
    assert scores["exact"] == 100 * exact and abs(scores["f1"] - 100 * f1) < 1e-9
    both = scripts.squad.squad_scores([predicted, "cat"], [gold, ["cat"]])
    assert both["exact"] == 50 * (exact + 1)
