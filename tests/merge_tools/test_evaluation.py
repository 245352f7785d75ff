"""`merge evaluate`: losses of base, experts and mixture on each domain, and the share of the experts' gain that is kept."""

import numpy as np
import pytest
import torch

from merge_tools import compose, evaluate
from merge_tools.evaluation import DomainLosses, cut_domains
from run_tools.errors import UserError

from .conftest import open_model, recipe_of, save_adapter, tiny_tokenizer

TEXTS = {
    "birds": ["the owl is awake", "a nest of twigs and moss", "an egg"],
    "market": ["the price of oak is low today", "a"],
}


@pytest.fixture
def domains(tmp_path):
    files = {name: tmp_path / f"{name}.txt" for name in TEXTS}
    for name, file in files.items():
        file.write_text("\n".join(TEXTS[name]))
    return files


@pytest.fixture
def mixture(experts, tmp_path):
    """A mixture of an expert and an adapter; these two and their base."""
    birds, base = experts(2)
    adapter = save_adapter(tmp_path / "ships", base, target_modules=["gate_proj"], layers_to_transform=[0])
    recipe = recipe_of([birds, adapter], base_model=str(base), gate_mode="random")
    return compose(recipe, tmp_path / "out")["out"], [birds, adapter, base]


def loss_of(folder, texts, length):
    """Nats per token, text by text and window by window, without padding."""
    model, nats, tokens = open_model(folder), 0.0, 0
    for text in texts:
        for ids in torch.tensor(tiny_tokenizer()(text).input_ids).split(length):
            if len(ids) > 1:
                with torch.no_grad():
                    nats += model(input_ids=ids[None], labels=ids[None]).loss.item() * (len(ids) - 1)
                tokens += len(ids) - 1
    return nats / tokens


@pytest.mark.parametrize("length", [5, 512])  # the context is 128
def test_losses_are_those_of_each_text_alone(length, mixture, domains):
    out, folders = mixture
    found = evaluate(out, domains, max_length=length)
    for name, texts in TEXTS.items():
        row = found["domains"][name]
        losses = {"mixture": row["mixture"], "base": row["base"], **row["experts"]}
        for model, folder in zip(("mixture", "base", "birds", "ships"), (out, folders[2], *folders[:2]), strict=True):
            assert losses[model] == pytest.approx(loss_of(folder, texts, min(length, 128)), abs=2e-4)
        assert row["change"]["value"] == pytest.approx(row["mixture"] / row["base"] - 1, abs=1e-3)
    assert [found["domains"][name]["expert"] for name in TEXTS] == ["birds", None]


def test_fewer_texts_are_read_on_request_spread_over_the_file_and_a_repeated_one_once_with_a_warning(mixture, domains):
    with domains["birds"].open("a") as file:
        file.write("\nan egg")
    with pytest.warns(UserWarning, match=r"birds\.txt: 1 "):
        row = evaluate(mixture[0], domains, max_texts=2)["domains"]["birds"]
    assert row["texts"] == 2
    assert row["base"] == pytest.approx(loss_of(mixture[1][2], TEXTS["birds"][::2], 128), abs=2e-4)


def test_the_share_of_the_gain_and_its_interval():
    random = np.random.default_rng(1)
    base, gain, shares = random.uniform(20, 40, 60), random.uniform(5, 15, 60), random.uniform(0.8, 1.0, 60)

    def report(n):
        experts = {"law": (base - gain)[:n], "art": base[:n]}
        return DomainLosses(np.full(n, 10), "law", base[:n], (base - shares * gain)[:n], experts).report()["kept"]

    low, high = report(60)["interval"]
    assert report(60)["value"] == pytest.approx((shares * gain).sum() / gain.sum(), abs=1e-4)
    assert 0.85 < low < report(60)["value"] < high < 0.95
    assert np.diff(report(6)["interval"]) > high - low
    no_better = DomainLosses(np.full(60, 10), "law", base, base * 1.1, {"law": base * 1.2}).report()
    assert no_better["kept"] is None and no_better["change"]["value"] == pytest.approx(0.1)


def test_texts_from_which_nothing_is_predicted_are_counted():
    def tokenizer(text, verbose):
        return {"input_ids": text.split()}

    with pytest.warns(UserWarning, match="2 texts of the domain 'birds'"):
        found = cut_domains(tokenizer, {"birds": ["wren", "a wren", "robin"]}, 8)
    assert found == {"birds": [[["a", "wren"]]]}


def test_what_cannot_be_evaluated_is_refused(experts, mixture, domains, tmp_path):
    with pytest.raises(UserError, match="--domain"):
        evaluate(mixture[0], {})
    with pytest.raises(UserError, match="'birds' are too short"):
        evaluate(mixture[0], domains, max_length=1)
    compose(recipe_of(experts(2), routing_policy="domain"), tmp_path / "without")
    with pytest.raises(UserError, match="no gate"):
        evaluate(tmp_path / "without", domains)
    larger = experts(1, extra_tokens=["zebra"])[0]
    recipe = recipe_of([larger, experts(2)[1]], base_model=str(larger), tokenizer="base", gate_mode="random")
    compose(recipe, tmp_path / "larger")
    domains["birds"].write_text("a zebra is awake")
    with pytest.raises(UserError, match="token 45, .* ships have 45 rows"):
        evaluate(tmp_path / "larger", domains)
