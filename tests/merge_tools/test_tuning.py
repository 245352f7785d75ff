"""`merge tune`: gates learn, nothing else changes, and every class of mixture can be tuned."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from merge_tools import MergeError, add, compose, extract, inspect, tune, verify
from merge_tools.families import FAMILIES
from merge_tools.gate_training import cut_windows, nats_and_tokens
from merge_tools.tuning import split_texts

from .conftest import SIZES, read_tensors, recipe_of, tiny_tokenizer
from .test_cli import run
from .test_families import save

WORDS = {
    "birds": ["owl", "wing", "nest", "egg", "sky", "feather"],
    "ships": ["mast", "sail", "deck", "oar", "sea", "anchor"],
}
QUICK = {"steps": 30, "learning_rate": 0.05, "max_length": 32}


@pytest.fixture(scope="module")
def domains(tmp_path_factory):
    """Two domains of sixty texts, each with words of its own."""
    folder, generator = tmp_path_factory.mktemp("domains"), torch.Generator().manual_seed(0)
    files = {}
    for name, words in WORDS.items():
        picks = torch.randint(len(words), (60, 8), generator=generator).tolist()
        texts = dict.fromkeys(" ".join(words[i] for i in row) for row in picks)
        files[name] = folder / f"{name}.jsonl"
        files[name].write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return files


def is_gate(name):
    return name.endswith(".gate.weight")


@pytest.mark.parametrize(
    "options, gates",
    [
        ({}, 2),
        ({"dtype": "bfloat16"}, 2),
        ({"format": "lexicon"}, 2),
        ({"attention": "routed", "router_layers_index": [1]}, 5),
    ],
)
def test_only_gates_change_and_perplexity_falls(options, gates, experts, domains, tmp_path):
    compose(recipe_of(experts(3), **options), tmp_path / "mixture")
    result = tune(tmp_path / "mixture", tmp_path / "tuned", domains, **QUICK)
    before, after = read_tensors(tmp_path / "mixture"), read_tensors(tmp_path / "tuned")
    assert list(before) == list(after)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if is_gate(name)} and len(changed) == gates
    assert all(before[name].dtype == after[name].dtype for name in before)
    assert set(result["perplexity"]) == {"birds", "ships", "all"}
    assert result["perplexity"]["all"]["after"] < 0.97 * result["perplexity"]["all"]["before"]
    checked = verify(tmp_path / "tuned")
    assert checked["ok"] and "tuned after the merge" in checked["notes"][0]
    assert inspect(tmp_path / "tuned")["experts"] == inspect(tmp_path / "mixture")["experts"]


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "llama"])
def test_every_family_can_be_tuned(name, domains, tmp_path):
    folders = [save(tmp_path / expert, name, seed) for seed, expert in enumerate(("one", "two", "three"))]
    compose(recipe_of(folders), tmp_path / "mixture")
    result = tune(tmp_path / "mixture", tmp_path / "tuned", domains, **QUICK)
    before, after = read_tensors(tmp_path / "mixture"), read_tensors(tmp_path / "tuned")
    assert {n for n in before if not torch.equal(before[n], after[n])} == {n for n in before if is_gate(n)}
    assert result["perplexity"]["all"]["after"] < result["perplexity"]["all"]["before"]


def test_a_mixture_without_a_record_is_tuned(domains, tmp_path):
    config = MixtralConfig(**SIZES, vocab_size=45, num_local_experts=3, tie_word_embeddings=True)
    torch.manual_seed(0)
    MixtralForCausalLM(config).save_pretrained(tmp_path / "mixture")
    tiny_tokenizer().save_pretrained(tmp_path / "mixture")
    tune(tmp_path / "mixture", tmp_path / "tuned", domains, **QUICK)
    before, after = read_tensors(tmp_path / "mixture"), read_tensors(tmp_path / "tuned")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert len(changed) == 2 and all(is_gate(name) for name in changed)
    assert {f.name for f in (tmp_path / "mixture").iterdir()} == {f.name for f in (tmp_path / "tuned").iterdir()}


def test_perplexity_is_that_of_the_saved_model(experts, domains, tmp_path):
    compose(recipe_of(experts(3), gate_mode="zeros"), tmp_path / "mixture")
    result = tune(tmp_path / "mixture", tmp_path / "tuned", domains, **QUICK)
    held_out = split_texts(domains["ships"], 0.1)[1]
    assert result["perplexity"]["ships"]["texts"] == len(held_out) == 6
    for folder, when in (("mixture", "before"), ("tuned", "after")):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        loss, tokens = 0.0, 0
        for window in cut_windows(tiny_tokenizer(), held_out, 32):
            ids = torch.tensor([window])
            loss += model(input_ids=ids, labels=ids).loss.item() * (len(window) - 1)
            tokens += len(window) - 1
        perplexity = float(torch.tensor(loss / tokens).exp())
        assert result["perplexity"]["ships"][when] == pytest.approx(perplexity, rel=1e-4)
        assert nats_and_tokens(model, cut_windows(tiny_tokenizer(), held_out, 32))[1] == tokens
    assert (tmp_path / "tuned" / "README.md").read_text().count("| ships | 6 |") == 1


def test_training_is_reproducible(experts, domains, tmp_path):
    compose(recipe_of(experts(2)), tmp_path / "mixture")
    for out in ("one", "two"):
        tune(tmp_path / "mixture", tmp_path / out, domains, **QUICK | {"steps": 3})
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (
        tmp_path / "two" / "model.safetensors"
    ).read_bytes()


def test_tuned_gates_survive_edits_or_a_warning_says_that_they_do_not(experts, domains, tmp_path):
    folders = experts(3)
    compose(recipe_of(folders[:2]), tmp_path / "mixture")
    tune(tmp_path / "mixture", tmp_path / "tuned", domains, **QUICK | {"steps": 2})
    add(tmp_path / "tuned", folders[2], tmp_path / "added")
    gate = "model.layers.0.block_sparse_moe.gate.weight"
    tuned, added = read_tensors(tmp_path / "tuned")[gate], read_tensors(tmp_path / "added")[gate]
    assert torch.equal(tuned, added[:2]) and verify(tmp_path / "added")["ok"]
    assert "perplexity before" not in (tmp_path / "added" / "README.md").read_text()  # not of these experts
    again = add(tmp_path / "tuned", folders[2], tmp_path / "again", recompose=True)
    assert "Tune" in again["warnings"][-1]
    extract(tmp_path / "tuned", folders[0].name, tmp_path / "dense")


@pytest.mark.parametrize(
    "recipe, options, message",
    [
        ({"routing_policy": "domain", "gate_mode": "random"}, {}, "routing_policy is domain.*lexicon-router"),
        ({"routing_policy": "sequence_soft"}, {}, "routing_policy is sequence_soft.*lexicon-router"),
        ({"experts_per_token": 1}, {}, "num_experts_per_tok is 1"),
        ({}, {"steps": 0}, "steps must be at least 1"),
        ({}, {"learning_rate": 0}, "learning_rate must be above 0 and at most 1"),
        ({}, {"learning_rate": 2}, "learning_rate must be above 0 and at most 1"),
        ({}, {"holdout": 1}, "holdout must be between 0 and 1"),
    ],
)
def test_what_cannot_be_tuned_is_refused(recipe, options, message, experts, domains, tmp_path):
    compose(recipe_of(experts(2), **recipe), tmp_path / "mixture")
    with pytest.raises(MergeError, match=message):
        tune(tmp_path / "mixture", tmp_path / "tuned", domains, **QUICK | options)
    assert not (tmp_path / "tuned").exists()


def test_weights_that_are_not_finite_are_an_error(domains, tmp_path):
    model = MixtralForCausalLM(MixtralConfig(**SIZES, vocab_size=45, num_local_experts=2))
    torch.nn.init.constant_(model.lm_head.weight, float("nan"))
    model.save_pretrained(tmp_path / "mixture")
    tiny_tokenizer().save_pretrained(tmp_path / "mixture")
    with pytest.raises(MergeError, match="loss on the domain 'birds' is nan"):
        tune(tmp_path / "mixture", tmp_path / "tuned", domains, **QUICK)


def test_a_dense_model_has_no_gates(experts, domains, tmp_path):
    with pytest.raises(MergeError, match="has model_type 'llama'"):
        tune(experts(2)[0], tmp_path / "tuned", domains)


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "has 0 different texts"),
        ('{"text": "a"}\n{"text": "a"}\n', "has 1 different texts"),
        ('{"words": "a"}\n', "line 1 needs text"),
        ("[1]\n", "line 1 needs text"),
    ],
)
def test_files_without_texts_are_refused(content, message, tmp_path):
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(MergeError, match=message):
        split_texts(tmp_path / "x.jsonl", 0.1)


def test_no_held_out_text_is_trained_on(tmp_path):
    rows = [{"text": f"text {i % 30}"} for i in range(90)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train, held_out = split_texts(tmp_path / "x.jsonl", 0.2)
    assert len(held_out) == 6 and len(train) == 24 and not set(train) & set(held_out)


def test_the_command_prints_a_table(experts, domains, tmp_path):
    compose(recipe_of(experts(2)), tmp_path / "mixture")
    flags = [f"--domain={name}={file}" for name, file in domains.items()]
    result, _ = run("tune", tmp_path / "mixture", tmp_path / "tuned", *flags, "--steps=2", "--max-length=32")
    assert all(word in result for word in ("birds", "ships", "perplexity before", "wrote"))
