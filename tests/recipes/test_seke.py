"""The SEKE recipe: a second stage, settings, the model card, the Hub."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoConfig, AutoModelForTokenClassification

from keyphrase_tools.cards import build_card, read_record
from lexperts.recipes.seke.train import main
from run_tools.packaged import find_packaged, is_hub_id
from tests.loopback_hub import LoopbackHub
from tests.recipes.helpers import run_main, write_rows

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "examples" / "corpus"


def run(*command, **environment):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, timeout=400
    )


def train(backbone, output, *options):
    return run_main(
        main, "minilm_cpu", "--backbone", backbone, "--output-dir", output, "--max-length", 64,
        "--train-files", CORPUS / "test.jsonl", "--test-files", CORPUS / "test.jsonl", "--num-train-epochs", 1,
        "--learning-rate", 0.01, "--show", 0, *options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(backbone, tmp_path_factory):
    """A model without the recurrent encoder, and a second one that starts from it."""
    folder = tmp_path_factory.mktemp("runs")
    for name, options in (("first", ("--lora", "false")), ("seke-tiny", ("--start-from", folder / "first"))):
        done = train(backbone, folder / name, "--use-rnn", "false", *options)
        assert done.returncode == 0, done.stderr[-3000:]
    return folder / "seke-tiny"


def test_a_second_stage_starts_from_the_first(trained, backbone):
    record = read_record(trained)
    assert record["model"]["backbone"] == "first"
    model = AutoModelForTokenClassification.from_pretrained(trained)
    assert model.rnn is None and model.moe is not None
    assert model.config.keyphrase_threshold == record["threshold"]
    assert model.config.keyphrase_temperature == record["calibration"]["temperature"]
    options = ("--use-rnn", "false", "--start-from", trained.with_name("first"))
    other = train(backbone, trained, *options, "--learning-rate", 0.5)
    assert other.returncode == 2 and "learning_rate=0.01 before, 0.5 now" in other.stderr


@pytest.mark.parametrize("split", ["validation", "test"])
def test_documents_without_a_usable_keyphrase_end_the_command_before_training(backbone, tmp_path, split):
    useless = write_rows(tmp_path / "useless.jsonl", [{"text": "graph cuts", "keyphrases": ["graph, cuts"]}])
    done = train(backbone, tmp_path / "out", f"--{split}-files", useless)
    assert done.returncode == 2 and "None of the" in done.stderr and "nan" not in done.stdout.split()
    assert f"--{split}-files {useless}" in done.stderr and not (tmp_path / "out" / "base").exists()


def test_german_documents_are_learnt_and_scored_with_german_stems(backbone, tmp_path):
    texts = ["Bäume und Häuser", "Häuser am Haus", "ein Baum oder Bäume"]
    rows = [{"text": f"{texts[i % 3]} {'xyz'[i % 3]} b{i}", "keyphrases": "Baum; Haus"} for i in range(12)]
    labelled = write_rows(tmp_path / "german.jsonl", rows)
    options = [word for split in ("train", "validation", "test") for word in (f"--{split}-files", labelled)]
    options += ["--language", "german"]
    done = train(backbone, tmp_path / "out", *options, "--lora", "false", "--use-rnn", "false")
    assert done.returncode == 0, done.stderr[-3000:]
    record = read_record(tmp_path / "out")
    assert {split: counts["present"] for split, counts in record["data"].items()} == dict.fromkeys(record["data"], 16)
    assert AutoConfig.from_pretrained(tmp_path / "out").keyphrase_language == "german"
    assert "language='klingon'" in train(backbone, tmp_path / "other", "--language", "klingon").stderr


@pytest.fixture(scope="module")
def train_here(backbone, tmp_path_factory):
    """train_here(folder, options): trains on few documents -> the exit status and the error message."""
    rows = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rows.write_text("".join((CORPUS / "test.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)[:10]))

    def call(folder, *options):
        done = run_main(
            main, "--backbone", backbone, "--output-dir", folder, "--max-length", 64, "--train-files", rows, "--max-steps", 2,
            "--eval-strategy", "steps", "--eval-steps", 1, "--save-strategy", "steps", "--save-steps", 1, "--use-cpu",
            "--report-to", "none", "--disable-tqdm", "true", "--calibrate", "false", *options,
        )  # fmt: skip
        return done.returncode, done.stderr

    return call


@pytest.fixture(scope="module")
def short_run(train_here, tmp_path_factory):
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("short")
    assert train_here(folder, "--num-train-epochs", 10)[0] == 0
    return folder


def test_the_default_model_is_trained_further(train_here, tmp_path):
    pytest.importorskip("lexperts_seke_minilm", reason="the default model is not installed")
    status, error = train_here(tmp_path, "--start-from", "default", "--learning-rate", 1e-3)
    assert status == 0, error
    found = Path(find_packaged("default"))
    trained, start = (AutoModelForTokenClassification.from_pretrained(folder) for folder in (tmp_path, found))
    assert trained.config.styles == start.config.styles and read_record(tmp_path)["model"]["backbone"] == found.name
    changed = {name for name, p in start.named_parameters() if not torch.equal(p, trained.get_parameter(name))}
    assert changed and all("query" in name or "value" in name or not name.startswith("backbone.") for name in changed)


def test_the_record_has_the_steps_that_were_trained(short_run):
    training = read_record(short_run)["training"]
    assert (training["max_steps"], training["trained_steps"]) == (2, 2) and 0 < training["trained_epochs"] < 1
    assert "num_train_epochs" not in training and "num_train_epochs" not in (short_run / "README.md").read_text()


def test_an_unfinished_base_is_written_again(short_run, train_here, tmp_path):
    folder = shutil.copytree(short_run, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoint-*"))
    expected, part = (folder / "model.safetensors").read_bytes(), folder / "base.part"
    (folder / "base").rename(part)
    (part / "model.safetensors").write_bytes(b"half")
    assert train_here(folder, "--num-train-epochs", 10)[0] == 0
    assert (folder / "model.safetensors").read_bytes() == expected and not part.exists()


def test_the_best_model_is_pushed(backbone, tmp_path):
    with LoopbackHub() as hub:
        pushed = ("--use-rnn", "false", "--lora", "false", "--push-to-hub", "true", "--max-steps", 1)
        done = run(
            "-m", "lexperts", "train", "seke", "--backbone", backbone, "--output-dir", tmp_path / "mine", "--max-length", 64,
            "--train-files", CORPUS / "test.jsonl", "--calibrate", "false", "--use-cpu", "--report-to", "none", *pushed,
            **hub.env,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        repository = hub.repos["model", "tester/mine"]
        files = set(repository.commits[repository.resolve("main")]["tree"])
    saved = {"model.safetensors", "config.json", "README.md", "results.json"}
    assert saved | {"pipeline_keyphrase_extraction.py"} <= files
    assert not [name for name in files if name.startswith("checkpoint-") or name == "run_settings.json"]


def test_the_card_has_what_was_recorded(trained):
    record, card = read_record(trained), ModelCard.load(trained / "README.md")
    data = card.data.to_dict()
    assert data["library_name"] == "transformers" and data["pipeline_tag"] == "token-classification"
    assert {"keyphrase-extraction", "seke"} <= set(data["tags"])
    results = {result.metric_name: result.metric_value for result in card.data.eval_results}
    assert results["F1@10, lexperts"] == record["test"]["lexperts"]["f1@10"]
    f1 = f"{100 * record['test']['seke']['f1@5']:.1f}"
    assert all(part in card.text for part in (f1, "| `learning_rate` | 0.01 |"))
    assert "with experts over `first`" in card.text and str(trained.parent) not in card.text.split("```")[0]
    assert re.search(r"\| test \| test.jsonl \| 50 \| \d+ \| 100.0% \|", card.text)


def test_the_cards_snippet_runs(trained, capsys):
    snippet = re.search(r"```python\n(.*?)```", (trained / "README.md").read_text(), re.S).group(1)
    assert "import keyphrase_tools" in snippet  # which registers the pipeline in a process of its own
    exec(snippet, {})
    for line in capsys.readouterr().out.splitlines():
        assert re.fullmatch(r".+ [01](\.\d+)? \d+ \d+", line)


def test_a_card_without_test_documents_and_of_a_hub_model():
    record = {
        "model": {"type": "seke", "backbone": "microsoft/deberta-v3-base", "use_moe": True, "use_rnn": True, "parameters": 7},
        "data": {
            "train": {"source": "midas/inspec", "documents": 10, "keyphrases": 50, "present": 40},
            "validation": {"source": "midas/inspec", "documents": 5, "keyphrases": 0, "present": 0},
        },
        "training": {"seed": 1},
        "threshold": 0.2,
        "best_validation_f1@10": 0.5,
    }  # fmt: skip
    card = build_card(record, "mine", "me/mine")
    assert card.data.base_model == "microsoft/deberta-v3-base" and card.data.datasets == ["midas/inspec"]
    assert 'model="me/mine"' in card.text and "experts and a BiLSTM over `microsoft/deberta-v3-base`" in card.text
    assert "5 validation documents: 50.0." in card.text and "threshold 0.2" in card.text
    assert is_hub_id("a/b") and not any(map(is_hub_id, ("minilm", "a/b/c", "./a", "/a")))
