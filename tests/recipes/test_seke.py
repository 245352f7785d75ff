# needs: spacy
"""`lexperts train seke`, on tiny models and small texts."""

import json
import os
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import TrainingArguments, pipeline

from lexperts.cli.train import app
from lexperts.recipes.seke.arguments import ModelArguments
from lexperts.recipes.seke.data import UNLABELLED, Documents, MixtureSampler, hide_styles
from lexperts.recipes.seke.distill import DistillationTrainer, new_student
from lexperts.recipes.seke.ranking import SHOWN, score_tests
from lexperts_lite.features import CLASSES, MODIFIER, NOUN, OTHER
from modeling_seke import SekeForTokenClassification
from tests.loopback_hub import LoopbackHub
from tests.tools import fails, write_rows

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "examples" / "corpus"
ROWS = [json.loads(line) for line in (CORPUS / "test.jsonl").read_text(encoding="utf-8").splitlines()]
FAST = ["--max-length", 64, "--learning-rate", 0.01, "--use-cpu", "--report-to", "none", "--disable-tqdm", "true"]
FILES, LENGTHS = [0] * 900 + [1] * 100, [(7 * i) % 50 for i in range(1000)]


def train(*argv):
    app(["seke", *map(str, argv)], standalone_mode=False)


def results_of(folder):
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", ROWS[:16])


@pytest.fixture(scope="module")
def tagger(tmp_path_factory):
    """A spaCy pipeline that knows a few words."""
    spacy = pytest.importorskip("spacy")
    phrases = [phrase.lower().split() for row in ROWS for phrase in row["keyphrases"]]
    nouns = {phrase[-1] for phrase in phrases} | {"owl", "owls", "nest", "model"}
    adjectives = {word for phrase in phrases for word in phrase[:-1]} - nouns
    pipe, folder = spacy.blank("en"), tmp_path_factory.mktemp("tagger")
    known = {"NOUN": sorted(nouns), "ADJ": sorted(adjectives | {"grey", "large"})}
    ruler = pipe.add_pipe("attribute_ruler")
    for tag, words in known.items():
        ruler.add([[{"LOWER": word}] for word in words], {"POS": tag})
    ruler.add([[{"LOWER": {"NOT_IN": sum(known.values(), [])}}]], {"POS": "X"})
    pipe.to_disk(folder)
    return folder


@pytest.fixture(scope="module")
def mixed(backbone, rows, tagger, tmp_path_factory):
    """A model of two styles whose rankers read noun phrases, scored on three files; and its options."""
    folder = tmp_path_factory.mktemp("runs") / "mixed"
    argv = [
        *FAST, "--backbone", backbone, "--train-files", f"phrases={rows}", f"words={rows}", "--validation-files", f"words={rows}",
        rows, "--test-files", f"a={rows}", f"b:words={rows}", rows, "--mixing-temperature", 2, "--rows-per-epoch", 48,
        "--learning-rate", 0.001, "--lora", "false", "--frozen-layers", 1, "--head-learning-rate", 0.02, "--fit-ranker", "true", "--validation-limit", 12,
        "--tagger", tagger, "--num-train-epochs", 2, "--early-stopping-patience", 0,
    ]  # fmt: skip
    train(*argv, "--output-dir", folder)
    return folder, argv


def test_a_mixture_is_trained_ranked_and_scored_by_file(mixed, backbone):
    folder, _ = mixed
    results = results_of(folder)
    assert list(results["test"]) == ["a", "b:words", "test"] and results["test"]["a"]["documents"] == 16
    assert results["test"]["a"] != results["test"]["b:words"]
    assert 1 >= results["word_classes"]["accuracy"] > results["word_classes"]["most_frequent"]
    assert (results["documents"]["train"], results["documents"]["validation"]) == (32, 24)
    extract = pipeline("keyphrase-extraction", model=str(folder))
    config = extract.model.config
    assert config.styles == ["phrases", "words"] and config.keyphrase_threshold is None
    assert set(config.keyphrase_word_classes) == set(CLASSES) and "best_noun_phrase" in config.keyphrase_ranker
    assert list(config.style_rankers) == ["words"] and config.style_rankers["words"] != config.keyphrase_ranker
    assert np.isfinite([phrase["score"] for phrase in extract(ROWS[0]["text"], style="words")]).all()
    for name, value in SekeForTokenClassification.from_backbone(str(backbone)).backbone.state_dict().items():
        frozen = name.startswith(("embeddings", "encoder.layer.0."))
        assert torch.equal(value, extract.model.backbone.state_dict()[name]) == frozen or "key.bias" in name, name
    card = (folder / "README.md").read_text()
    assert f"{100 * results['test']['a']['seke']['f1@5']:.1f}" in card and "A ranker was fitted" in card
    assert "| `learning_rate` | 0.001 |" in card and str(folder.parent) not in card


def test_without_an_epoch_a_model_gets_new_rankers_and_keeps_its_weights(mixed, tmp_path):
    first, argv = mixed
    train(*argv, "--start-from", first, "--num-train-epochs", 0, "--validation-limit", 8, "--output-dir", tmp_path)
    weights, again = (load_file(folder / "model.safetensors") for folder in (first, tmp_path))
    assert weights.keys() == again.keys() and all(torch.equal(weights[name], again[name]) for name in weights)
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (first, tmp_path))
    assert old["keyphrase_ranker"] != new["keyphrase_ranker"]


def test_lora_ends_in_a_checkpoint_for_both_pipelines(backbone, tmp_path, capsys):
    texts = ["Bäume und Häuser", "Häuser am Haus", "ein Baum oder Bäume"]
    german = [{"document": [*texts[i % 3].split(), f"b{i}"], "gold": "Baum; Haus"} for i in range(12)]
    for split in ("train", "validation", "test"):  # a folder is opened by the same call as a Hub id
        write_rows(tmp_path / "data" / f"{split}.jsonl", german)
    argv = [*FAST, "--backbone", backbone, "--dataset-name", tmp_path / "data", "--num-train-epochs", 2]
    argv += ["--text-column", "document", "--keyphrases-column", "gold", "--language", "german", "--use-rnn", "false"]
    argv += ["--mixing-temperature", 2]
    train("minilm_cpu", *argv, "--output-dir", tmp_path / "out")
    assert "train: 12 windows of 12 documents; 16 of 24 keyphrases" in capsys.readouterr().out
    assert len([entry for entry in results_of(tmp_path / "out")["log"] if "eval_f1@10" in entry]) == 2
    for folder in (tmp_path / "out", max((tmp_path / "out").glob("checkpoint-*"))):
        for task in ("token-classification", "keyphrase-extraction"):
            assert isinstance(pipeline(task, model=str(folder))("Bäume und Häuser"), list)
    extract = pipeline("keyphrase-extraction", model=str(tmp_path / "out"))
    assert extract.language == "german" and extract.model.rnn is None and extract.tokenizer.model_max_length == 64


def test_a_small_model_imitates_a_teacher(mixed, rows, tmp_path, capsys):
    unlabelled = [{"text": f"The grey owls of the north, number {i}."} for i in range(20)]
    texts = write_rows(tmp_path / "texts.jsonl", unlabelled)
    train(
        "distill", *FAST, "--teacher", mixed[0], "--train-files", f"phrases={rows}", "--validation-files", f"phrases={rows}",
        "--unlabelled-files", texts, "--student-hidden-size", 32, "--student-layers", 1, "--rows-per-epoch", 64,
        "--num-train-epochs", 1, "--bf16", "false", "--validation-limit", 8, "--output-dir", tmp_path / "out",
    )  # fmt: skip
    assert "36 documents" in capsys.readouterr().out
    model = SekeForTokenClassification.from_pretrained(tmp_path / "out")
    assert model.config.styles == ["phrases", "words"] and set(model.config.style_rankers) == {"phrases"}
    assert len(model.backbone.encoder.layer) == 1 and model.rnn.recurrent.num_layers == 1


@pytest.mark.nightly
def test_the_best_model_is_pushed(backbone, rows, tmp_path):
    argv = [*FAST, "--backbone", backbone, "--train-files", rows, "--lora", "false", "--use-rnn", "false"]
    argv += ["--max-steps", 1]
    with LoopbackHub() as hub:
        command = [sys.executable, "-m", "lexperts", "train", "seke", *argv, "--push-to-hub", "true"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **hub.env}
        command = [*map(str, command), "--output-dir", str(tmp_path / "mine")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        repository = hub.repos["model", "tester/mine"]
        files = set(repository.commits[repository.resolve("main")]["tree"])
    assert {"model.safetensors", "config.json", "README.md", "results.json"} <= files
    assert not [name for name in files if name.startswith("checkpoint-") or name == "arguments.yml"]
    assert 'model="tester/mine"' in (tmp_path / "mine" / "README.md").read_text()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--frozen-layers", 1], "--lora false"),
        (["--frozen-layers", 9, "--lora", "false"], "--frozen-layers 9"),
        (["--tagger", "en_core_web_sm"], "--fit-ranker true"),
        (["--teacher", "default"], "--lora false"),
        (["--unlabelled-files", "{rows}"], "--teacher"),
        (["--test-files", "a:news={rows}"], "'news'"),
        (["--validation-files", "{useless}"], "{useless}"),
        (["--test-files", "{useless}"], "{useless}"),
        (["--language", "klingon"], "klingon"),
    ],
)
def test_options_and_files_are_refused_before_the_training(options, named, backbone, rows, tmp_path):
    useless = write_rows(tmp_path / "useless.jsonl", [{"text": "graph cuts", "keyphrases": ["graph, cuts"]}])
    at = {"rows": rows, "useless": useless}
    options = [str(option).format(**at) for option in options]
    argv = [*FAST, "--backbone", backbone, "--train-files", rows, "--output-dir", tmp_path / "out", *options]
    assert named.format(**at) in fails(app, "seke", *argv)
    assert not list((tmp_path / "out").glob("checkpoint-*"))


@pytest.mark.parametrize(("temperature", "share"), [(1.0, 0.9), (2.0, 0.75), (1e6, 0.5)])
def test_shares_follow_the_temperature(temperature, share):
    draws = MixtureSampler(FILES, [900, 100], LENGTHS, temperature=temperature, num_rows=20_000, batch_size=8, seed=1)
    assert Counter(FILES[row] for row in draws)[0] / 20_000 == pytest.approx(share, abs=0.015)


def test_epochs_repeat_by_their_number_and_batches_hold_rows_of_similar_length():
    draws = MixtureSampler(FILES, [900, 100], LENGTHS, temperature=1.0, num_rows=8 * 32 + 4, batch_size=8, seed=1)
    first = list(draws)
    draws.set_epoch(1)
    assert list(draws) != first and len(draws) == len(first)
    draws.set_epoch(0)
    assert list(draws) == first
    batches = [[LENGTHS[row] for row in first[i : i + 8]] for i in range(0, len(first), 8)]
    assert sum(max(batch) - min(batch) for batch in batches[:-1]) / 32 < 4 and batches != sorted(batches)


def test_styles_are_hidden_from_a_share_of_the_rows():
    torch.manual_seed(0)
    batch = partial(
        hide_styles, collator=lambda rows: {"style_ids": torch.tensor(rows), "input_ids": torch.tensor([len(rows)])}
    )
    hidden = batch([2] * 4000, share=0.3)["style_ids"] == 0
    assert hidden.float().mean() == pytest.approx(0.3, abs=0.03)
    assert torch.equal(hidden, batch([2] * 4000, share=0.3)["style_ids"] == 0)  # as in a run that is resumed


def test_words_have_the_classes_of_their_tokens(tagger):
    from lexperts.recipes.seke.word_classes import classes_by_tags, open_tagger
    from lexperts_lite.input_documents import read_document

    document = read_document("The grey owls' nest, C++ and a large-scale model.", 0, True)
    (found,) = classes_by_tags(open_tagger(str(tagger)), [document])
    named = {word: int(tag) for (word, _, _), tag in zip(document.words, found, strict=True)}
    assert (named["grey"], named["nest"], named["The"], named["C++"]) == (MODIFIER, NOUN, OTHER, OTHER)


def test_every_phrase_is_scored_and_the_shown_ones_are_calibrated():
    words = [a + b for a in "bcdf" for b in "lmnpq"]
    answers = {"a": [{"keyphrase": word, "score": 0.9} for word in words], "b": []}
    extract = lambda texts, **_: [answers[text[-1]] for text in texts]  # noqa: E731
    extract.language = "english"
    files = [Documents("", name, "", [" . ".join([*words, name])], [words]) for name in answers]
    scores = score_tests(extract, files)
    assert scores["a"]["lexperts"]["f1@M"] == scores["a"]["seke"]["f1@k"] == 1 and scores["a"]["phrases"] == SHOWN
    assert (scores["b"]["calibration_error"], scores["b"]["lexperts"]["f1@10"]) == (None, 0.0)


@pytest.mark.parametrize("weight", [0.3, 1.0])
def test_the_loss_of_a_student_by_hand(weight, tiny_seke, tmp_path):
    """a KL + (1 - a) CE; a row without labels has the first only. The teacher reads a row once, whatever its padding."""
    teacher = tiny_seke("bert", styles=["phrases", "tags"])
    args = ModelArguments(student_hidden_size=32, student_layers=1)
    teacher.classifier.weight.data *= 30
    student = new_student(teacher, args, {"use_rnn": False, "use_moe": False})
    own, theirs = (model.backbone.get_input_embeddings().weight for model in (student, teacher))
    assert torch.allclose(own @ own.T, theirs @ theirs.T, atol=1e-4)  # of the same width: a rotation
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    trainer = DistillationTrainer(model=student, args=arguments, teacher=teacher, weight=weight)
    student.train()
    for module in student.modules():
        module.p = 0.0  # of dropout
    torch.manual_seed(1)
    ids, labels = torch.randint(5, teacher.config.text_config.vocab_size, (3, 9)), torch.randint(3, (3, 9))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "style_ids": torch.tensor([0, 1, 2])}
    inputs["attention_mask"][1, 6:] = 0
    labels[1, 6:], labels[:, ::4] = -100, -100
    labels[2][labels[2] >= 0] = UNLABELLED
    p, q = (model(**inputs).logits.softmax(-1) for model in (teacher, student))
    words, labelled = labels != -100, labels >= 0
    kl = (p[words] * (p[words] / q[words]).log()).sum()
    expected = weight * kl - (1 - weight) * q[labelled].gather(1, labels[labelled][:, None]).log().sum()
    found = trainer.compute_loss(student, {**inputs, "labels": labels})
    assert found.item() == pytest.approx(expected.item() / int(words.sum()), abs=2e-3)
    trainer.teacher = None  # is not asked again
    wider = {name: F.pad(rows, (0, 4)).flip(0) if rows.ndim == 2 else rows.flip(0) for name, rows in inputs.items()}
    again = trainer.compute_loss(student, {**wider, "labels": F.pad(labels, (0, 4), value=-100).flip(0)})
    assert again.item() == pytest.approx(found.item(), rel=1e-4)
