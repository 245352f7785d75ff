"""Training on several data sets: the shares of the sampler, styles, frozen layers, the ranker, scores per file."""

import json
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file
from transformers import pipeline

from lexperts.recipes.seke import scoring
from lexperts.recipes.seke.data import Documents
from lexperts.recipes.seke.mixture import HideStyles, MixtureSampler, freeze_layers
from lexperts.recipes.seke.scoring import join_neighbours
from modeling_seke import SekeForTokenClassification
from tests.recipes.helpers import KilledError, kill_after_a_checkpoint
from tests.recipes.test_seke import CORPUS, train

LENGTHS = [(7 * i) % 50 for i in range(1000)]
FILES = [0] * 900 + [1] * 100


def sampler(temperature, **options):
    settings = {"num_rows": 20_000, "batch_size": 8, "seed": 1} | options
    return MixtureSampler(FILES, [900, 100], LENGTHS, temperature=temperature, **settings)


@pytest.mark.parametrize(("temperature", "share"), [(1.0, 0.9), (2.0, 0.75), (1e6, 0.5)])
def test_shares_follow_the_temperature(temperature, share):
    sampled = Counter(FILES[row] for row in sampler(temperature))
    assert sampled[0] / 20_000 == pytest.approx(share, abs=0.015)


def test_epochs_differ_and_repeat_by_their_number():
    draws = sampler(1.0, num_rows=500)
    assert len(draws) == len(first := list(draws)) == 500
    draws.set_epoch(1)
    assert list(draws) != first
    draws.set_epoch(0)
    assert list(draws) == first != list(sampler(1.0, num_rows=500, seed=2))


def test_batches_hold_rows_of_similar_length_in_random_order_and_a_short_one_is_last():
    rows = list(sampler(1.0, num_rows=8 * 32))
    batches = [[LENGTHS[row] for row in rows[i : i + 8]] for i in range(0, len(rows), 8)]
    assert sum(max(batch) - min(batch) for batch in batches) / len(batches) < 4 and batches != sorted(batches)
    lengths = [LENGTHS[row] for row in sampler(1.0, num_rows=20)]
    assert len(lengths) == 20 and max(lengths[-4:]) == max(lengths)


def test_styles_are_hidden_from_a_share_of_the_rows():
    torch.manual_seed(0)
    collator = HideStyles(lambda rows: {"style_ids": torch.tensor([row["style_ids"] for row in rows])}, 0.3)
    hidden = (collator([{"style_ids": 2}] * 4000)["style_ids"] == 0).float().mean()
    assert hidden == pytest.approx(0.3, abs=0.03)


def test_neighbours_of_a_file_are_joined():
    texts, gold, files = ["a", "b", "c", "d", "e"], [["x"], ["y"], ["x"], ["x"], ["z"]], [0, 0, 0, 1, 1]
    assert join_neighbours(texts, gold, files, 2) == [("a\n\nb", ["x", "y"], 0), ("d\n\ne", ["x", "z"], 1)]


def test_frozen_layers_are_the_embeddings_and_the_first_ones(tiny_seke):
    model = tiny_seke()
    freeze_layers(model, 1)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert not any(name.startswith(("backbone.embeddings", "backbone.encoder.layer.0.")) for name in trained)
    assert any(name.startswith("backbone.encoder.layer.1.") for name in trained) and "classifier.weight" in trained
    with pytest.raises(ValueError, match="3.*2"):
        freeze_layers(model, 3)


@pytest.fixture(scope="module")
def mixed(backbone, tmp_path_factory):
    """A model of two styles, with a ranker; trained to an end and scored on two files."""
    folder = tmp_path_factory.mktemp("runs")
    at = {}
    for name in ("train", "test"):
        at[name] = folder / f"{name}.jsonl"
        at[name].write_text("".join((CORPUS / f"{name}.jsonl").read_text().splitlines(keepends=True)[:16]))
    options = [
        "--train-files", f"phrases={at['train']}", f"tags={at['test']}", "--validation-files", f"tags={at['test']}", at["test"],
        "--test-files", f"a={at['test']}", f"b:tags={at['test']}", at["train"], "--mixing-temperature", 2, "--rows-per-epoch", 24,
        "--num-train-epochs", 2, "--lora", "false", "--frozen-layers", 1, "--head-learning-rate", 0.02, "--learning-rate", 0.001,
        "--fit-ranker", "true", "--ranker-joined", 4, "--validation-limit", 12, "--early-stopping-patience", 0,
    ]  # fmt: skip
    done = train(backbone, folder / "mixed", *options)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "mixed", options


def test_a_mixture_is_trained_ranked_and_scored_by_file(mixed, backbone):
    output, _ = mixed
    record = json.loads((output / "results.json").read_text())
    a, b = (record["test_files"][name] for name in ("a", "b:tags"))
    assert len(record["test_files"]) == 2 and a["documents"] == 16 and a["phrases"] != b["phrases"]
    assert {"seke", "lexperts", "calibration_error", "confident", "confident_right"} <= set(a)
    assert record["data"]["validation"]["documents"] == 24 and record["training"]["trained_steps"] == 2 * 3
    card = (output / "README.md").read_text()
    assert "| a | 16 |" in card and "ranker was fitted" in card and "threshold" not in card
    model = SekeForTokenClassification.from_pretrained(output)
    config = model.config
    assert config.styles == ["phrases", "tags"] and config.keyphrase_ranker == record["ranker"]["weights"]
    assert list(config.style_rankers) == ["tags"] and config.style_rankers == record["ranker"]["style_weights"]
    assert config.style_rankers["tags"] != config.keyphrase_ranker
    trained, start = model.state_dict(), SekeForTokenClassification.from_backbone(str(backbone)).backbone.state_dict()
    for name, value in start.items():
        frozen = name.startswith(("embeddings", "encoder.layer.0."))
        assert torch.equal(value, trained[f"backbone.{name}"]) == frozen or "key.bias" in name, name


def test_a_killed_mixture_ends_in_the_same_weights(mixed, backbone, tmp_path, monkeypatch):
    """The other kinds of runs are in test_recipe_contract.py."""
    whole, options = mixed
    killed = tmp_path / "killed"
    with monkeypatch.context() as patch, pytest.raises(KilledError):
        kill_after_a_checkpoint(patch)
        train(backbone, killed, *options)
    assert not (killed / "results.json").exists()
    (killed / "checkpoint-999").mkdir()  # half a checkpoint
    done = train(backbone, killed, *options)
    assert done.returncode == 0, done.stderr[-3000:]
    weights, weights_of_killed = (load_file(folder / "model.safetensors") for folder in (whole, killed))
    assert weights.keys() == weights_of_killed.keys()
    assert all(torch.equal(weights[name], weights_of_killed[name]) for name in weights)
    assert (whole / "config.json").read_text() == (killed / "config.json").read_text()


def test_a_style_changes_the_answer_and_an_unknown_one_is_named(mixed):
    extract = pipeline("keyphrase-extraction", model=str(mixed[0]))
    text = json.loads((CORPUS / "test.jsonl").read_text().splitlines()[0])["text"]
    answers = [extract(text, min_score=0.0, top_k=None, style=style) for style in (None, "tags", "phrases")]
    assert answers[0] != answers[1] != answers[2]
    assert extract([text, "graph"], style="tags", min_score=0.0, top_k=None)[0] == answers[1]
    with pytest.raises(ValueError, match="'news'.*'phrases', 'tags'"):
        extract(text, style="news")


def test_a_model_without_styles_refuses_one(tiny_seke, tiny_tokenizer):
    extract = pipeline("keyphrase-extraction", model=tiny_seke(), tokenizer=tiny_tokenizer)
    with pytest.raises(ValueError, match="'tags'"):
        extract("graph cuts", style="tags")


def test_another_style_is_another_run(mixed, backbone):
    output, options = mixed
    changed = [f"words={CORPUS / 'test.jsonl'}" if str(o).startswith("tags=") else o for o in options]
    done = train(backbone, output, *changed)
    assert done.returncode == 2 and "tags=" in done.stderr and "words=" in done.stderr


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--mixing-temperature", 2], "--rows-per-epoch"),
        (["--frozen-layers", 1], "--lora false"),
        (["--frozen-layers", 9, "--lora", "false"], "9"),
        (["--test-files", f"a:news={CORPUS / 'test.jsonl'}"], "'news'"),
        (
            ["--train-files", f"tags={CORPUS / 'test.jsonl'}", "--validation-files", f"news={CORPUS / 'test.jsonl'}"],
            "'news'",
        ),
    ],
)
def test_invalid_options_are_named(backbone, tmp_path, options, named):
    done = train(backbone, tmp_path / "run", *options)
    assert done.returncode == 2 and named in done.stderr


def test_a_file_in_which_nothing_is_found_has_no_calibration_error():
    row = scoring.score_file([[]], Documents(["graph cuts work"], [["graph cuts"]], [(0, "")]), "english")
    assert (row["calibration_error"], row["phrases"], row["lexperts"]["f1@10"]) == (None, 0, 0.0)


def test_every_phrase_is_scored_and_the_shown_ones_are_calibrated():
    words = [a + b for a in "bcdf" for b in "lmnpq"]
    phrases = [{"keyphrase": word, "score": 0.9} for word in words]
    row = scoring.score_file([phrases], Documents([" . ".join([*words, "end"])], [words], [(0, "")]), "english")
    assert row["lexperts"]["f1@M"] == row["seke"]["f1@k"] == 1 and row["phrases"] == scoring.SHOWN == 10
