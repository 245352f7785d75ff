"""Gates from prompts, as mergekit-moe makes them, and in closed form, by ridge regression."""

import json
import shutil
from typing import get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoTokenizer

from merge_tools import add, compose, inspect, remove, verify
from merge_tools.gates import HELD_OUT_SHARE, encode_beginnings
from merge_tools.recipe import TEXTS_OF, GateMode
from merge_tools.ridge import HELD_OUT_TOKENS, MomentSum, fit_scale, held_out_logits
from merge_tools.texts import read_samples
from run_tools.errors import UserError

from .conftest import open_model, read_tensors, recipe_of, same_tensors

GATE = "model.layers.{}.block_sparse_moe.gate.weight"
PROMPTS = {"birds": ["the owl", "a nest of the owl"], "ships": ["the sail"], "tools": ["a saw", "the nail", "oak"]}
WORDS = {"birds": "owl nest wing egg", "ships": "sail mast hull", "tools": "saw nail oak anvil", "plants": "leaf root"}


def unit(vector):
    return vector / vector.norm()


def test_every_mode_but_random_and_none_names_its_texts():
    assert set(get_args(GateMode)) == {"random", "none", *TEXTS_OF}  # one without texts would have random gates


@pytest.mark.parametrize("mode", ["hidden", "cheap_embed"])
def test_gates_from_prompts_are_those_of_a_plain_loop(mode, experts, tmp_path):
    """The states of the base at the input of each layer; the first special token once, and negative prompts taken off."""
    folders = experts(3)
    given = [{"source_model": str(f), "positive_prompts": PROMPTS[f.name]} for f in folders]
    given[0]["negative_prompts"] = ["the sea"]
    compose(recipe_of(given, base_model=folders[0], gate_mode=mode), tmp_path / "out")
    model, tokenizer = open_model(folders[0]), AutoTokenizer.from_pretrained(folders[0])

    def vector(text, layer):
        ids = tokenizer(f"<s>{text}", add_special_tokens=False, return_tensors="pt")["input_ids"]
        assert ids[0].tolist().count(1) == 1
        if mode == "cheap_embed":
            return model.model.embed_tokens(ids)[0].double().sum(0)
        return model(ids, output_hidden_states=True).hidden_states[layer][0, -1].double()

    for layer in range(2):
        rows = []
        for expert in given:
            means = [torch.stack([vector(t, layer) for t in expert["positive_prompts"]]).mean(0)]
            if "negative_prompts" in expert:
                means.append(torch.stack([vector(t, layer) for t in expert["negative_prompts"]]).mean(0))
            means = [unit(mean) for mean in means] if mode == "cheap_embed" else means
            rows.append(unit(means[0] - means[1] if len(means) > 1 else means[0]))
        found = read_tensors(tmp_path / "out")[GATE.format(layer)]
        assert_close(found, torch.stack(rows).float(), atol=1e-5, rtol=1e-5)


def test_equal_prompts_are_a_warning_and_a_prompt_that_is_too_long_is_an_error(experts, tmp_path):
    folders = experts(2)
    given = [{"source_model": str(f), "positive_prompts": ["the owl"]} for f in folders]
    (warning,) = compose(recipe_of(given, gate_mode="hidden"), tmp_path / "out")["warnings"]
    assert "birds and ships" in warning
    given[1]["positive_prompts"] = ["owl " * 200]
    with pytest.raises(UserError, match="128"):
        compose(recipe_of(given, gate_mode="hidden"), tmp_path / "long")


@pytest.fixture
def samples(tmp_path):
    """Name of an expert -> a file of texts of its own words."""
    random, files = np.random.default_rng(0), {}
    for name, words in WORDS.items():
        files[name] = tmp_path / f"{name}.jsonl"
        rows = [{"text": " ".join(random.choice(words.split(), 6))} for _ in range(40)]
        files[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return files


def ridge_recipe(folders, samples, **options):
    experts = [{"source_model": str(f), "samples": str(samples[f.name])} for f in folders]
    return recipe_of(experts, gate_mode="ridge", **options)


def router_inputs(folder, layer, file):
    """The inputs of an MLP for each text of a file, in the order in which they are used, until there are 8 tokens per dimension."""
    model, tokenizer, seen = open_model(folder), AutoTokenizer.from_pretrained(folder), []
    texts = list(dict.fromkeys(json.loads(line)["text"] for line in file.read_text().splitlines()))
    model.model.layers[layer].mlp.register_forward_pre_hook(lambda _, x: seen.append(x[0][0].double().numpy()))
    with torch.no_grad():
        for i in np.random.default_rng(42).permutation(len(texts)):
            if sum(map(len, seen)) < 8 * 32:
                model(**tokenizer(texts[i], return_tensors="pt", return_token_type_ids=False))
    return seen


def test_ridge_gates_are_those_of_plain_least_squares(experts, samples, tmp_path):
    """Each token of an expert's texts, in its own model, weighted so that experts count equally; each fifth text is held out."""
    folders = experts(3)
    compose(ridge_recipe(folders, samples), tmp_path / "out")
    tables = []
    for layer in range(2):
        inputs = [router_inputs(folder, layer, samples[folder.name]) for folder in folders]
        held = [np.concatenate(x[HELD_OUT_SHARE - 1 :: HELD_OUT_SHARE]) for x in inputs]
        for x in inputs:
            del x[HELD_OUT_SHARE - 1 :: HELD_OUT_SHARE]
        own = list(map(np.concatenate, inputs))
        x = np.concatenate([rows / len(rows) ** 0.5 for rows in own])
        y = np.concatenate([np.eye(3)[[e] * len(rows)] / len(rows) ** 0.5 for e, rows in enumerate(own)])
        errors = {}
        for power in range(-5, 1):
            ridge = 10.0**power * (x * x).sum() / 32
            rows, targets = np.concatenate([x, ridge**0.5 * np.eye(32)]), np.concatenate([y, np.zeros((32, 3))])
            w = np.linalg.lstsq(rows, targets, rcond=None)[0].T
            errors[np.mean([((rows @ w.T - np.eye(3)[e]) ** 2).sum(1).mean() for e, rows in enumerate(held)])] = w
        best = errors[min(errors)]
        gate = read_tensors(tmp_path / "out")[GATE.format(layer)].double().numpy()
        scale = (gate * best).sum() / (best * best).sum()
        assert scale > 0 and np.abs(gate - scale * best).max() < 2e-3 * np.abs(gate).max()
        tables.append([np.bincount((rows @ best.T).argmax(1), minlength=3) / len(rows) for rows in held])
    found = inspect(tmp_path / "out")["confusion"]
    np.testing.assert_allclose(found, np.mean(tables, 0), atol=0.02)
    assert np.diagonal(found).mean() > 0.7
    assert verify(tmp_path / "out")["compared"]["gates"] == 2


@pytest.mark.parametrize("options", [{}, {"routing_policy": "domain"}, {"dtype": "bfloat16"}], ids=str)
def test_an_expert_that_is_added_and_removed_leaves_gates_of_a_new_mixture(options, experts, samples, tmp_path):
    """Without the texts of the others: their statistics are one file per expert."""
    folders = experts(4)
    common = {"base_model": str(folders[0]), "average": "base", **options}
    compose(ridge_recipe(folders[:3], samples, **common), tmp_path / "three")
    compose(ridge_recipe(folders, samples, **common), tmp_path / "four")
    for name in ("birds", "ships", "tools"):
        samples[name].unlink()
    add(tmp_path / "three", {"source_model": str(folders[3]), "samples": str(samples["plants"])}, tmp_path / "added")
    remove(tmp_path / "added", folders[3].name, tmp_path / "removed")
    for one, other in (("added", "four"), ("removed", "three")):
        assert same_tensors(tmp_path / one, tmp_path / other)
        statistics = [sorted(p.name for p in (tmp_path / n / "gate_statistics").iterdir()) for n in (one, other)]
        assert statistics[0] == statistics[1] and verify(tmp_path / one)["ok"]


def test_statistics_that_are_missing_or_changed_show_in_a_verification(experts, samples, tmp_path):
    compose(ridge_recipe(experts(2), samples), tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "gate_statistics")
    found = verify(tmp_path / "out")
    assert found["compared"]["gates"] == 0 and "birds.safetensors cannot be read" in found["notes"][0]


def test_the_same_samples_are_an_error_and_few_are_a_warning(experts, samples, tmp_path):
    folders = experts(2)
    with pytest.raises(UserError, match="ships has the same samples as birds"):
        compose(ridge_recipe(folders, {"birds": samples["tools"], "ships": samples["tools"]}), tmp_path / "out")
    (tmp_path / "few.txt").write_text("owl nest\nwing egg\n")
    warnings = compose(ridge_recipe(folders, {**samples, "birds": tmp_path / "few.txt"}), tmp_path / "few")["warnings"]
    assert len(warnings) == 1 and "birds has" in warnings[0]


def test_a_repeated_sample_counts_once(tmp_path):
    """It would be among the texts that are held out and among the others."""
    (tmp_path / "samples.txt").write_text("one\ntwo\none\n")
    with pytest.warns(UserWarning, match=r"samples\.txt: 1 "):
        assert read_samples(tmp_path / "samples.txt") == ["one", "two"]


def test_more_tokens_are_read_if_a_recipe_asks_for_them(experts, samples, tmp_path):
    folders = experts(2)
    for count in (60, 120):
        compose(ridge_recipe(folders, samples, gate_tokens=count), tmp_path / str(count))
    records = [json.loads((tmp_path / name / "merge_record.json").read_text()) for name in ("60", "120")]
    assert all(one < two for one, two in zip(*(record["gates"]["tokens"] for record in records), strict=True))
    held_out = load_file(tmp_path / "120" / "gate_statistics" / "birds.safetensors")["0.held_out"]
    assert 0 < len(held_out) < 120


def test_long_texts_do_not_outweigh_others():
    """Beginnings of 128 tokens, and more of each only if all texts have too few."""
    for lengths, enough, expected in (
        ([300, 300, 300], 200, [128, 128]),
        ([300, 20, 300], 400, [190, 20, 190]),
        ([30, 40], 1000, [30, 40]),
        ([5], 3, [5]),
    ):
        texts = ["x" * length for length in lengths]
        assert [len(ids) for ids in encode_beginnings(texts, lambda text: [1] * len(text), enough, 1000)] == expected


# The formulas


def moments(seed, count=200, width=6, shift=0.0):
    random = np.random.default_rng(seed)
    total = MomentSum(width)
    x = torch.from_numpy(random.normal(size=(count, width)) + shift * np.eye(width)[seed])
    total.add(x[: count // 2], held_out=False)
    total.add(x[count // 2 :], held_out=True)
    return total.moments(), x[: count // 2].numpy(), x[count // 2 :].numpy()


def test_moments_are_those_of_all_tokens():
    found, x, held_out = moments(1, count=3000)
    np.testing.assert_allclose(found.matrix(), x.T @ x / len(x), atol=1e-5)
    np.testing.assert_allclose(found.mean, x.mean(0), atol=1e-6)
    assert found.count == len(x) and len(found.held_out) == HELD_OUT_TOKENS
    np.testing.assert_allclose(found.held_out[[0, -1]], held_out[[0, -1]], atol=1e-6)


def test_the_scale_has_the_largest_likelihood():
    logits = held_out_logits([moments(seed, shift=2.0)[0] for seed in range(3)], np.eye(3, 6))

    def likelihood(scale):
        rows = [torch.log_softmax(torch.tensor(scale * part), 1)[:, e].mean() for e, part in enumerate(logits)]
        return float(torch.stack(rows).mean())

    best = fit_scale(logits)
    assert 0 < best < 1e3 and likelihood(best) >= max(likelihood(best * factor) for factor in (0.9, 0.99, 1.01, 1.1))
