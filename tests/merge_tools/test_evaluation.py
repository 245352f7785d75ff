"""`merge evaluate`: losses of base, experts and mixture on each domain, and the share of the experts' gain that is kept."""

import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from lexperts.cli import merge_screen
from merge_tools import MergeError, compose, evaluate
from merge_tools.card import EVALUATION, with_evaluation
from merge_tools.evaluation import DomainLosses, plot_losses, windows_of_domains

from .conftest import open_model, recipe_of

TEXTS = {
    "birds": ["the owl is awake", "a nest of twigs and moss", "an egg"],
    "market": ["the price of oak is low today", "a"],
}


@pytest.fixture
def domains(tmp_path):
    for name, texts in TEXTS.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return {name: tmp_path / f"{name}.jsonl" for name in TEXTS}


@pytest.fixture
def mixture(experts, tmp_path):
    folders = experts(3)
    return compose(recipe_of(folders[:2], base_model=str(folders[2])), tmp_path / "out")["out"], folders


@pytest.mark.parametrize("limit", [1, 2, 9])
def test_fewer_texts_are_read_on_request(limit, mixture, domains):
    found = evaluate(mixture[0], domains, max_texts=limit)["domains"]
    assert [found[name]["texts"] for name in TEXTS] == [min(limit, 3), min(limit, 2)]
    if limit == 2:  # the first and the last
        texts = [TEXTS["birds"][0], TEXTS["birds"][-1]]
        assert found["birds"]["base"] == pytest.approx(loss_of(mixture[1][2], texts, 128), abs=2e-4)


def test_no_texts_are_refused(mixture, domains):
    with pytest.raises(MergeError, match="max_texts must be at least 1, got 0"):
        evaluate(mixture[0], domains, max_texts=0)


def loss_of(folder, texts, length):
    """Nats per token, text by text and window by window, without padding."""
    model, tokenizer, nats, tokens = open_model(folder), AutoTokenizer.from_pretrained(folder), 0.0, 0
    for text in texts:
        for ids in torch.tensor(tokenizer(text).input_ids).split(length):
            if len(ids) > 1:
                with torch.no_grad():
                    nats += model(input_ids=ids[None], labels=ids[None]).loss.item() * (len(ids) - 1)
                tokens += len(ids) - 1
    return nats / tokens


@pytest.mark.parametrize("length", [5, 64])
def test_losses_are_those_of_each_text_alone(length, mixture, domains):
    out, folders = mixture
    named = []
    found = evaluate(out, domains, max_length=length, on_model=named.append)
    assert named == ["mixture", "base", "birds", "ships"]
    for name, texts in TEXTS.items():
        row = found["domains"][name]
        losses = {"mixture": row["mixture"], "base": row["base"], **row["experts"]}
        for model, folder in zip(named, (out, folders[2], *folders[:2]), strict=True):
            assert losses[model] == pytest.approx(loss_of(folder, texts, length), abs=2e-4)
        assert row["change"]["value"] == pytest.approx(row["mixture"] / row["base"] - 1, abs=1e-3)
    assert [found["domains"][name]["expert"] for name in TEXTS] == ["birds", None]


def test_the_share_of_the_gain_and_its_interval():
    random = np.random.default_rng(1)
    base, gain = random.uniform(20, 40, 60), random.uniform(5, 15, 60)
    shares = random.uniform(0.8, 1.0, 60)
    losses = DomainLosses(np.full(60, 10), "law", base, base - shares * gain, {"law": base - gain, "art": base})
    kept = losses.report()["kept"]
    low, high = kept["interval"]
    assert kept["value"] == pytest.approx((shares * gain).sum() / gain.sum(), abs=1e-4)
    assert 0.85 < low < kept["value"] < high < 0.95
    wider = DomainLosses(
        *(getattr(losses, n) for n in ("tokens", "expert")), base[:6], losses.mixture[:6], {"law": base[:6] - gain[:6]}
    )
    wider.tokens = wider.tokens[:6]
    few = wider.report()["kept"]["interval"]
    assert few[1] - few[0] > high - low


def test_an_expert_that_is_no_better_than_the_base_has_no_gain_to_keep():
    base = np.array([10.0, 12.0])
    report = DomainLosses(np.array([5, 5]), "law", base, base * 1.1, {"law": base * 1.2}).report()
    assert report["kept"] is None and report["change"]["value"] == pytest.approx(0.1)
    (note,) = merge_screen.unmeasured({"experts": ["law"], "domains": {"law": report}})
    assert "'law' is not better than the base" in note


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "has no texts"),
        ('{"text": "a"}\n{"text": " "}\n', "line 2 needs text.*empty"),
        ('{"text": "a"}\n{"text": 3}\n', "line 2.*not a text"),
        (None, "does not exist"),
    ],
)
def test_files_that_cannot_be_used(content, message, mixture, domains, tmp_path):
    domains["birds"] = tmp_path / "new.jsonl"
    if content is not None:
        domains["birds"].write_text(content)
    with pytest.raises(MergeError, match=message):
        evaluate(mixture[0], domains)


def test_texts_without_anything_to_predict(mixture):
    tokenizer = AutoTokenizer.from_pretrained(mixture[0])
    with pytest.raises(MergeError, match="'birds' are too short"):
        windows_of_domains(tokenizer, {"birds": ["an egg"]}, 1)


def test_the_plot_is_drawn(mixture, domains, tmp_path):
    plot_losses(evaluate(mixture[0], domains), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("length", [1, 0, -3])
def test_windows_that_are_too_short_are_refused(length, mixture, domains):
    with pytest.raises(MergeError, match=f"max_length must be at least 2, got {length}"):
        evaluate(mixture[0], domains, max_length=length)


def test_windows_are_no_longer_than_the_context(experts, tmp_path):
    folders = experts(2, max_position_embeddings=16)
    compose(recipe_of(folders, base_model=str(folders[0])), tmp_path / "out")
    (tmp_path / "long.txt").write_text("the owl is awake and the nest is of twigs and moss")
    domains = {"birds": tmp_path / "long.txt"}
    assert evaluate(tmp_path / "out", domains) == evaluate(tmp_path / "out", domains, max_length=16)


def test_a_mixture_without_a_gate_is_refused(experts, tmp_path, domains):
    compose(recipe_of(experts(2), routing_policy="domain"), tmp_path / "out")
    with pytest.raises(MergeError, match="gate_mode: none"):
        evaluate(tmp_path / "out", domains)


def test_tokens_that_a_model_does_not_have_are_refused(experts, tmp_path):
    base, first = experts(2)
    (second,) = experts(1, extra_tokens=["zebra"])
    specs = [first, {"source_model": str(second), "name": "animals"}]
    compose(recipe_of(specs, base_model=str(base), allow=["vocab"]), tmp_path / "out")
    (tmp_path / "new.txt").write_text("a zebra is awake")
    opened = []
    with pytest.raises(MergeError, match="the token 45, but the embeddings of base have 45 rows"):
        evaluate(tmp_path / "out", {"animals": tmp_path / "new.txt"}, on_model=opened.append)
    assert opened == ["mixture"]


def test_the_card_has_the_losses_and_keeps_all_else(mixture, domains, tmp_path):
    folder = shutil.copytree(mixture[0], tmp_path / "copy")
    before = (folder / "README.md").read_text()
    result = evaluate(folder, domains, card=True)
    once = (folder / "README.md").read_text()
    section = once[once.index(EVALUATION) : once.index("## Recipe")]
    for name, row in result["domains"].items():
        line = next(line for line in section.splitlines() if line.startswith(f"| {name} |"))
        assert f"| {row['base']:.3f} |" in line and f"| {row['mixture']:.3f} |" in line
    assert once.replace(section, "") == before
    other = {**result, "domains": {"another": next(iter(result["domains"].values()))}}
    again = with_evaluation(once, other)
    assert again.count(EVALUATION) == 1 and "| another |" in again and again[: again.index(EVALUATION)] in before
    assert again.endswith(before[before.index("## Recipe") :])


@pytest.mark.parametrize(
    "card", ["", "# Mine\n\nA text.\n", "# Mine\n\n## What the mixture keeps of its experts\n\nold\n\n# Next\n\nmore\n"]
)
def test_cards_of_others_are_kept(card):
    losses = {"value": 0.5, "interval": [0.4, 0.6]}
    row = {"texts": 3, "base": 2.0, "mixture": 1.5, "experts": {"law": 1.0}, "change": losses, "kept": losses}
    found = with_evaluation(card, {"domains": {"law": row}, "kept": 0.5})
    for line in filter(None, card.splitlines()):
        assert (line in found) == (line != "old")
    assert "| law | 3 | 2.000 | 1.000 | 1.500 | +50.0% [+40.0%, +60.0%] | 50.0% [40.0%, 60.0%] |" in found
    assert with_evaluation(found, {"domains": {"law": row}, "kept": 0.5}) == found
