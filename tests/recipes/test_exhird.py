"""The training of keyphrase generators, on tiny models and small texts."""

import json
import shutil
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Trainer, TrainingArguments, pipeline, set_seed

from lexperts.cli.train import app
from lexperts.recipes.exhird.arguments import ModelArguments
from lexperts.recipes.exhird.train import (
    KeyphraseTrainer,
    PlateauSchedule,
    StopAfterRises,
    score,
    tokenize,
)
from modeling_exhird import DataCollatorForKeyphraseGeneration as Collator
from modeling_exhird import ExhirdConfig, ExhirdForKeyphraseGeneration, ExhirdTokenizer, tokenize_documents
from modeling_exhird.generation_exhird import KeyphraseGenerator
from modeling_exhird.prompts_exhird import PromptSettings
from tests.modeling_exhird.llamas import llama_config, llama_tokenizer, tiny_llama
from tests.tools import fails, write_rows

STEPS = ["--use-cpu", "--report-to", "none", "--disable-tqdm", "true", "--per-device-train-batch-size", "4"]
STEPS += ["--num-train-epochs", "2", "--logging-steps", "1", "--learning-rate", "1e-3"]
SMALL = ["--hidden-size", "16", "--num-hidden-layers", "1", "--num-attention-heads", "2", "--intermediate-size", "24"]
KEYPHRASES = ["graph cut", "image segmentation", "networks"]
TEXTS = [f"graph cuts segment images and learning networks number {i} do so too" for i in range(12)]
ROWS = [{"title": ["Graph cuts", "", "Networks"][i % 3], "text": TEXTS[i], "keyphrases": KEYPHRASES} for i in range(12)]
WORDS = {"title": ["Some", "words"], "text": TEXTS[0].split(), "keyphrases": "graph cut; networks"}
LONG, BARE = {"text": "graph cut " * 300, "keyphrases": ["graph cut"]}, {"text": "graph cuts", "keyphrases": [" "]}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Twelve documents for training and two that are no use, validation and test."""
    folder, splits = tmp_path_factory.mktemp("rows"), {"train": [*ROWS, LONG, BARE], "validation": ROWS[:4]}
    splits["test"] = [WORDS, *ROWS[:3]]
    return [x for name in splits for x in (f"--{name}-files", write_rows(folder / f"{name}.jsonl", splits[name]))]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoder")
    for part in (AutoModelForCausalLM.from_config(llama_config(keyphrase_generation=None)), llama_tokenizer()):
        part.save_pretrained(folder)
    return str(folder)


def same(weights, others):
    return all(torch.equal(tensor, others[name]) for name, tensor in weights.items() if name in others)


def run(folder, *argv):
    """The results of a training, and its model."""
    app(["exhird", *map(str, argv), "--output-dir", str(folder)], standalone_mode=False)
    model = pipeline("keyphrase-generation", model=str(folder), device="cpu").model
    return json.loads((folder / "results.json").read_text()), model


def test_one_command_goes_from_documents_to_scores(files, tmp_path, capsys):
    results, model = run(tmp_path, *SMALL, *STEPS, *files, "--relative-attention", "off", "--exclusive-loss-coef", 1)
    assert (model.config.relative_attention, model.config.exclusive_loss_coef) == (None, 1)
    printed = capsys.readouterr().out
    assert "train: 12 of 14 documents" in printed and "test, 4 documents: present F1@5 " in printed
    losses = [entry["eval_loss"] for entry in results["log"] if "eval_loss" in entry]
    assert len(losses) == 2 and results["best_validation_loss"] == min(losses)
    assert set(results["test"]) == {"present F1@5", "present F1@M", "absent F1@5", "absent F1@M", "repeats"}


def test_the_model_is_that_of_the_stock_trainer(tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", ROWS)
    argv = [*SMALL, *STEPS, "--train-files", file, "--validation-files", file, "--encoder-type", "bigru", "--seed", 7]
    _, model = run(tmp_path / "ours", *argv, "--vocab-size", 15)
    texts = [text for row in ROWS for text in (row["title"], row["text"], *row["keyphrases"])]
    tokenizer = ExhirdTokenizer.from_texts(texts, vocab_size=15)
    data = Dataset.from_dict(tokenize_documents(Dataset.from_list(ROWS)[:], tokenizer))
    set_seed(7)
    config = ExhirdConfig.from_tokenizer(tokenizer, encoder_type="bigru", hidden_size=16, num_hidden_layers=1)
    plain = ExhirdForKeyphraseGeneration(config)
    options = {"num_train_epochs": 2, "learning_rate": 1e-3, "per_device_train_batch_size": 4, "seed": 7}
    args = TrainingArguments(str(tmp_path / "plain"), use_cpu=True, report_to="none", **options)
    Trainer(plain, args, Collator(tokenizer), data).train()
    assert same(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("rank", [2, None])
def test_a_stock_decoder_is_trained_and_a_killed_run_goes_on(rank, decoder, files, tmp_path):
    """An adapter is added to the weights; without one all weights are trained."""
    own = ["--adapter-rank", rank] if rank else []
    name = ["smollm2_cpu"] if rank else []
    argv = [*name, "--backbone", decoder, *own, *STEPS, *files[:4], "--bf16", "false", "--save-strategy", "epoch"]
    argv += ["--eval-strategy", "epoch", "--max-source-length", 100, "--exclusion-window", 2]
    _, model = run(tmp_path, *argv)
    assert type(model) is LlamaForCausalLM
    settings = PromptSettings.of(model.config)
    assert (settings.max_source_length, settings.exclusion_window) == (100, 2)
    assert sorted(settings.known_keyphrases.split("; ")) == sorted(KEYPHRASES) and "graph" in settings.frequent_words
    stock = AutoModelForCausalLM.from_pretrained(decoder).state_dict()
    changed = {name for name, weight in model.state_dict().items() if not torch.equal(weight, stock[name])}
    assert {"_proj.weight" in name for name in changed} == ({True} if rank else {True, False})
    assert (
        str(tmp_path) not in (tmp_path / "config.json").read_text()
        and "keyphrase-generation" in (tmp_path / "README.md").read_text()
    )
    (tmp_path / "results.json").unlink()  # as after the first checkpoint
    shutil.rmtree(tmp_path / "checkpoint-8")
    _, again = run(tmp_path, *argv)
    assert same(model.state_dict(), again.state_dict())


def test_scores_count_repeats_and_both_kinds(monkeypatch):
    written = [["graph", "cut"], ["graph", "cuts"], ["tree"]]
    monkeypatch.setattr(KeyphraseGenerator, "stream", lambda *_: iter([written]))
    row = {"title": "", "text": "Graph cuts segment images.", "keyphrases": ["graph cuts (GC)", "tree"]}
    scores = score(tiny_llama(), llama_tokenizer(), [row])
    expected = {
        "present F1@M": 100,
        "absent F1@M": 100,
        "present F1@5": 40 / 1.2,
        "absent F1@5": 40 / 1.2,
        "repeats": 100 / 3,
    }
    assert scores == pytest.approx(expected)


def test_rows_are_made_once():
    rows, tokenizer = {"train": ROWS, "validation": ROWS[:4]}, ExhirdTokenizer.from_texts(TEXTS)
    made = [tokenize(rows, tokenize_documents, tokenizer=tokenizer, max_source_length=n) for n in (20, 20, 30)]
    first, again, other = (splits["train"].cache_files for splits in made)
    assert first == again != other


def test_the_rate_falls_after_each_rise_and_training_ends_after_n(tmp_path):
    args = TrainingArguments(str(tmp_path), eval_strategy="epoch", lr_scheduler_type="reduce_lr_on_plateau")
    trainer = KeyphraseTrainer(torch.nn.Linear(1, 1), args, eval_dataset=Dataset.from_dict({"x": [1]}))
    trainer.create_optimizer_and_scheduler(9)
    assert type(trainer.lr_scheduler) is PlateauSchedule and set(trainer.lr_scheduler.min_lrs) == {1e-5}
    trainer.optimizer.param_groups[0]["lr"], schedule, rates = 1.0, trainer.lr_scheduler, []
    schedule.min_lrs = [0.3] * len(schedule.min_lrs)
    for loss in (3.0, 4.0, 3.5, 3.6, 2.0, 2.1):  # compared with the previous one, not with the best
        schedule.step(loss)
        rates += schedule.get_last_lr()
    assert rates[::2] == [1.0, 0.5, 0.5, 0.3, 0.3, 0.3] and schedule.state_dict()["best"] == 2.1
    for losses, ends in (([1, 2, 3], True), ([1, 2, 1.5], False), ([1, 2, 2], False), ([2, 3], False)):
        state, control = SimpleNamespace(log_history=[{"eval_loss": loss} for loss in losses]), SimpleNamespace()
        StopAfterRises(2).on_evaluate(None, state, control)
        assert hasattr(control, "should_training_stop") is ends


def test_rises_end_a_training_and_one_that_is_killed_later_is_not_trained_further(files, tmp_path, monkeypatch):
    argv = [*SMALL, *STEPS, *files[:4], "--encoder-type", "bigru", "--learning-rate", 3, "--num-train-epochs", 20]
    results, model = run(tmp_path, *argv, "--stop-after-rises", 1)
    losses = [entry["eval_loss"] for entry in results["log"] if "eval_loss" in entry]
    assert len(losses) < 20 and losses[-1] > losses[-2]
    (tmp_path / "results.json").unlink()
    monkeypatch.setattr(Trainer, "training_step", lambda *_, **__: pytest.fail("a step was trained again"))
    _, again = run(tmp_path, *argv, "--stop-after-rises", 1)
    assert same(model.state_dict(), again.state_dict())


def test_the_defaults_are_the_models():
    assert all(getattr(ExhirdConfig, one.name, one.default) == one.default for one in fields(ModelArguments))


@pytest.mark.parametrize(
    "options, fragment",
    [
        (["--backbone", "DECODER", "--encoder-type", "bigru"], "encoder_type"), (["--backbone", "minilm"], "minilm"),
        (["--adapter-rank", 2], "'adapter_rank'"),
        (["--backbone", "DECODER", "--hidden-size", 8], "'hidden_size'"),
        (["--backbone", "DECODER", "--max-length", 12], "train: 0 of 14"),
        (["--max-source-length", 3], "train: 0 of 14"), (["--test-files", "BARE"], "test documents"),
        (["--num-attention-heads", 7], "num_attention_heads=7"),
    ],
)  # fmt: skip
def test_what_is_refused(options, fragment, files, decoder, tmp_path):
    bare = write_rows(tmp_path / "bare.jsonl", [BARE])
    options = [{"DECODER": decoder, "BARE": bare}.get(word, word) for word in options]
    argv = [*STEPS, *files[:4], *options, "--output-dir", tmp_path / "run"]
    assert fragment in fails(app, "exhird", *argv) and not list(tmp_path.glob("run/checkpoint-*"))
