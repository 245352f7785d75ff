"""`merge tune`: gates learn, nothing else changes, and every class of mixture can be tuned."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import merge_tools.tuning
from merge_tools import compose, inspect, tune, verify
from merge_tools.evaluation import cut_domains
from merge_tools.families import MIXTURES
from run_tools.errors import UserError

from .conftest import SIZES, contents, open_model, read_tensors, recipe_of, tiny_tokenizer

WORDS = {"birds": ["owl", "wing", "nest", "egg", "sky"], "ships": ["mast", "sail", "deck", "oar", "sea"]}
QUICK = {"steps": 30, "learning_rate": 0.05, "max_length": 32}


@pytest.fixture(scope="module")
def domains(tmp_path_factory):
    """Two domains of sixty texts, each with words of its own."""
    folder, generator = tmp_path_factory.mktemp("domains"), torch.Generator().manual_seed(0)
    files = {}
    for name, words in WORDS.items():
        picks = torch.randint(len(words), (60, 8), generator=generator).tolist()
        files[name] = folder / f"{name}.txt"
        files[name].write_text("\n".join(" ".join(words[i] for i in row) for row in picks))
    return files


def changed_gates(folder, tuned):
    """The number of gates that differ, if nothing else does, and names, dtypes and bits are the same."""
    before, after = read_tensors(folder), read_tensors(tuned)
    assert before.keys() == after.keys() and all(before[n].dtype == after[n].dtype for n in before)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert all(name.endswith(".gate.weight") for name in changed)
    return len(changed)


@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": "bfloat16"}, {"format": "lexicon", "experts_per_token": 1}, {"rank": 4}, {"gate_mode": "ridge"}],
)
def test_only_gates_change_and_perplexity_falls(options, experts, domains, tmp_path):
    recipe = recipe_of(experts(2), base_model=str(experts(3)[2]), average="mean", **{"gate_mode": "random"} | options)
    for expert, file in zip(recipe["experts"], domains.values(), strict=True):
        expert["samples"] = str(file)
    compose(recipe, tmp_path / "mixture")
    result = tune(tmp_path / "mixture", tmp_path / "other" / "tuned", domains, **QUICK)
    assert changed_gates(tmp_path / "mixture", tmp_path / "other" / "tuned") == 2
    assert result["trained"] == 2 * 2 * 32 and set(result["perplexity"]) == {"birds", "ships", "all"}
    row = result["perplexity"]["all"]
    assert row["after"] < row["before"] * (1 if options == {"gate_mode": "ridge"} else 0.99)
    checked = verify(tmp_path / "other" / "tuned")  # finds the sources from another folder
    assert checked["ok"] and any("tuned" in note for note in checked["notes"])
    ours, theirs = (inspect(folder) for folder in (tmp_path / "other" / "tuned", tmp_path / "mixture"))
    assert [e["files"] for e in ours["experts"]] == [e["files"] for e in theirs["experts"]]
    statistics = [folder / "gate_statistics" for folder in (tmp_path / "mixture", tmp_path / "other" / "tuned")]
    assert statistics[0].is_dir() == ("ridge" in options.values()) == statistics[1].is_dir()
    assert not statistics[0].is_dir() or contents(statistics[0]) == contents(statistics[1])
    assert "tuned for 30 steps" in (tmp_path / "other" / "tuned" / "README.md").read_text()


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_mixture_of_another_tool_is_tuned(kind, domains, tmp_path):
    config = AutoConfig.for_model(
        kind, **SIZES, vocab_size=45, num_experts=3, num_local_experts=3, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, head_dim=8, norm_topk_prob=True, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "mixture", max_shard_size="30KB")
    tiny_tokenizer().save_pretrained(tmp_path / "mixture")
    result = tune(tmp_path / "mixture", tmp_path / "tuned", domains, **QUICK)
    assert changed_gates(tmp_path / "mixture", tmp_path / "tuned") == 2
    assert result["perplexity"]["all"]["after"] < result["perplexity"]["all"]["before"]
    same = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert all(contents(tmp_path / "tuned")[n] == contents(tmp_path / "mixture")[n] for n in same)
    assert contents(tmp_path / "tuned").keys() == same | {"model.safetensors"}
    open_model(tmp_path / "tuned")


def test_perplexity_is_that_of_the_saved_model_on_other_texts(experts, domains, tmp_path, monkeypatch):
    batches, pad = [], merge_tools.tuning.pad
    monkeypatch.setattr(merge_tools.tuning, "pad", lambda windows: batches.append(windows) or pad(windows))
    few = tmp_path / "few.txt"
    few.write_text("\n".join(domains["ships"].read_text().splitlines()[:6]))
    compose(recipe_of(experts(3)), tmp_path / "mixture")
    files = {"birds": domains["birds"], "few": few}
    result = tune(tmp_path / "mixture", tmp_path / "tuned", files, **QUICK | {"max_length": 99})
    held_out = merge_tools.tuning.split_texts(domains["birds"], 0.1)[1]
    (windows,) = cut_domains(tiny_tokenizer(), {"birds": held_out}, 99).values()
    for folder, when in (("mixture", "before"), ("tuned", "after")):
        model, losses = open_model(tmp_path / folder), []
        for ids in (torch.tensor([window]) for text in windows for window in text):
            losses += [model(input_ids=ids, labels=ids).loss.item()] * (ids.shape[1] - 1)
        perplexity = torch.tensor(losses).mean().exp().item()
        assert result["perplexity"]["birds"][when] == pytest.approx(perplexity, rel=1e-4)
    assert result["perplexity"]["birds"]["texts"] == len(held_out) == 6
    trained = [window for batch in batches for window in batch]
    assert not any(window in trained for text in windows for window in text)
    letters = set(tiny_tokenizer()("owl wing nest egg sky", add_special_tokens=False).input_ids)
    shares = [sum(set(window[1:]) <= letters for window in batch) for batch in batches]
    assert shares == [4] * QUICK["steps"]  # of 8, although one domain has ten times the texts


def test_training_is_reproducible(experts, domains, tmp_path):
    compose(recipe_of(experts(2)), tmp_path / "mixture")
    for out in ("one", "two"):
        tune(tmp_path / "mixture", tmp_path / out, domains, **QUICK | {"steps": 3})
    one, two = (contents(tmp_path / out)["model.safetensors"] for out in ("one", "two"))
    assert one == two


@pytest.mark.parametrize(
    "recipe, options, message",
    [
        ({"routing_policy": "sequence_soft"}, {}, "sequence_soft"),
        ({"experts_per_token": 1}, {}, "num_experts_per_tok is 1"),
        ({}, {"domains": {}}, "--domain"),
        ({}, {"max_length": 1}, "birds"),
        ({}, {"learning_rate": 1e38}, "loss is nan"),
    ],
)
def test_what_cannot_be_tuned_is_refused(recipe, options, message, experts, domains, tmp_path):
    compose(recipe_of(experts(2), **recipe), tmp_path / "mixture")
    with pytest.raises(UserError, match=message):
        tune(tmp_path / "mixture", tmp_path / "tuned", **{"domains": domains} | QUICK | options)
    assert {path.name for path in tmp_path.iterdir()} == {"mixture"}


def test_folders_and_files_are_refused_before_the_training(experts, domains, tmp_path):
    (tmp_path / "tuned").write_text("mine")
    with pytest.raises(UserError, match="tuned exists"):
        tune(tmp_path / "missing", tmp_path / "tuned", domains)
    with pytest.raises(UserError, match="'llama'"):
        tune(experts(1)[0], tmp_path / "other", domains)
    (tmp_path / "one.txt").write_text("an owl\nan owl")
    with pytest.raises(UserError, match="one text"):
        tune(tmp_path, tmp_path / "other", {"one": tmp_path / "one.txt"})
