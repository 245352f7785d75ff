"""Recipes of mergekit-moe: the same defaults here, and every key that is not supported is refused by name."""

import pytest
import torch
import yaml
from transformers import Qwen3Config, Qwen3ForCausalLM

from merge_tools import MergeError, check, compose, inspect, read_recipe

from .conftest import SIZES, contents, read_tensors, recipe_of, tiny_tokenizer

# As in mergekit's docs/moe.md: no gate_mode, whose default is hidden.
EXAMPLE = """
base_model: {base}
dtype: float32
experts_per_token: 2
experts:
  - source_model: {one}
    positive_prompts:
      - "the birds"
      - "a bird is"
    negative_prompts:
      - "ships"
  - source_model: {two}
    positive_prompts: ["the ships"]
"""


def written(tmp_path, experts, text=EXAMPLE):
    base, one, two = experts(3)
    (tmp_path / "recipe.yml").write_text(text.format(base=base, one=one, two=two))
    return tmp_path / "recipe.yml", base


def test_a_file_with_prompts_and_a_base_has_hidden_gates_and_the_shared_weights_of_the_base(experts, tmp_path):
    recipe, base = written(tmp_path, experts)
    compose(recipe, tmp_path / "out")
    facts, state = inspect(tmp_path / "out"), read_tensors(tmp_path / "out")
    assert facts["gate_mode"] == "hidden" and facts["shared"].startswith("copied from the base")
    shared = {name: tensor for name, tensor in read_tensors(base).items() if ".mlp." not in name}
    assert all(torch.equal(state[name], tensor) for name, tensor in shared.items()) and len(shared) > 5


@pytest.mark.parametrize(
    "changes, gate_mode, average",
    [
        ({}, "hidden", "base"),
        ({"gate_mode": "random"}, "random", "base"),
        ({"average": "mean"}, "hidden", "mean"),
        ({"gate_mode": "cheap_embed"}, "cheap_embed", "base"),
        ({"routing_policy": "domain"}, "none", "mean"),
        ({"router_layers": ["q_proj"]}, "random", "mean"),
    ],
)
def test_defaults_with_prompts_and_a_base(changes, gate_mode, average, experts, tmp_path):
    recipe = read_recipe(written(tmp_path, experts)[0], **changes)
    assert (recipe.gate_mode, recipe.average) == (gate_mode, average)
    assert read_recipe(recipe) == recipe  # also after a round trip through a dict


def test_without_a_base_or_without_prompts_the_defaults_are_random_gates_and_means(experts, tmp_path):
    source = read_recipe(written(tmp_path, experts)[0]).to_dict()
    for key in ("gate_mode", "average"):
        del source[key]
    no_base = {key: value for key, value in source.items() if key != "base_model"}
    no_prompts = {**source, "experts": [expert["source_model"] for expert in source["experts"]]}
    for options in (no_base, no_prompts):
        recipe = read_recipe(options)
        assert (recipe.gate_mode, recipe.average) == ("random", "mean")


@pytest.mark.parametrize(
    "line, pattern",
    [
        ("architecture: deepseek", "architecture='deepseek' .* format: mixtral"),
        ("architecture: [mixtral]", "architecture=.* format: mixtral"),
        ("shared_experts: [{source_model: x}]", "shared_experts in the recipe is a key of mergekit-moe"),
        ("gate_mode: uniform_random", "gate_mode: uniform_random of mergekit-moe"),
        ("gate_mode: hidden_avg", "gate_mode: hidden_avg of mergekit-moe"),
        ("gate_mode: hidden_last", "gate_mode: hidden_last of mergekit-moe .* Use hidden, which is the same"),
        ("experts: [{source_model: a, noise_scale: 0.1}, b]", "noise_scale in the expert 'a' is a key of mergekit-moe"),
        ("experts: [{source_model: a, residual_scale: 0.1}, b]", "residual_scale in the expert 'a' is a key"),
        ("dtype: int64", "Invalid dtype: 'int64'"),
    ],
)
def test_keys_without_a_counterpart_are_refused_by_name(line, pattern, experts, tmp_path):
    path, _ = written(tmp_path, experts)
    key = line.partition(":")[0]
    options = path.read_text()
    kept = options.partition("experts:\n")[0] if key == "experts" else options.replace("dtype: float32\n", "")
    path.write_text(f"{kept}\n{line}\n")
    with pytest.raises(MergeError, match=pattern):
        read_recipe(path)


@pytest.mark.parametrize(
    "lines",
    [
        "architecture:\n",
        "shared_experts:\n",
        'architecture: ""\n',
        "architecture: mixtral\n",
        "architecture: Mixtral\n",
        "shared_experts: []\n",
        "    noise_scale: 0.0\n    residual_scale: 1\n",  # of the second expert
    ],
)
def test_neutral_values_of_mergekit_are_accepted(lines, experts, tmp_path):
    path, _ = written(tmp_path, experts)
    path.write_text(path.read_text() + lines)
    assert read_recipe(path).gate_mode == "hidden" and check(path).ok


def test_all_keys_that_cannot_be_read_are_named_at_once(experts, tmp_path):
    path, _ = written(tmp_path, experts)
    text = path.read_text().replace('    negative_prompts:\n      - "ships"\n', "    noise_scale: 0.1\n    weigth: 2\n")
    path.write_text(text + "architecture: deepseek\ngate_mode: uniform_random\ndtpye: float16\n")
    lines = [finding.message for finding in check(path).errors]
    names = ("dtpye", "noise_scale", "weigth", "architecture", "uniform_random")
    assert len(lines) == len(names) and all(name in line for name, line in zip(names, lines, strict=True)), lines


@pytest.mark.parametrize("more", [{"architecture": "qwen"}, {"architecture": "mixtral", "router_layers": ["q_proj"]}])
def test_an_architecture_that_is_not_what_is_written_is_refused(more, experts):
    (finding,) = check(recipe_of(experts(2), **more)).errors
    assert f"architecture: {more['architecture']}" in finding.message and "Use format: " in finding.message


def test_the_architecture_of_a_qwen_is_accepted_and_not_recorded(tmp_path):
    torch.manual_seed(0)
    sizes = {**SIZES, "vocab_size": len(tiny_tokenizer()), "head_dim": 8}
    for name in ("one", "two"):
        Qwen3ForCausalLM(Qwen3Config(**sizes)).save_pretrained(tmp_path / name)
        tiny_tokenizer().save_pretrained(tmp_path / name)
    recipe = recipe_of([tmp_path / "one", tmp_path / "two"])
    compose(recipe, tmp_path / "out", architecture="qwen")
    compose(recipe, tmp_path / "plain")
    assert contents(tmp_path / "out") == contents(tmp_path / "plain")
    assert not check(recipe, architecture="mixtral").ok


@pytest.mark.parametrize(
    "keys", [{"models": [], "merge_method": "slerp"}, {"slices": [], "merge_method": "passthrough"}, {"models": []}]
)
def test_a_recipe_for_one_dense_model_is_recognised(keys, tmp_path):
    (tmp_path / "recipe.yml").write_text(yaml.safe_dump({**keys, "base_model": "a", "dtype": "float16"}))
    (finding,) = check(tmp_path / "recipe.yml").errors
    assert "mergekit-yaml" in finding.message and "experts:" in finding.message
    assert all(key in finding.message for key in keys)


def test_sparse_upcycling_of_one_model(experts, tmp_path):
    """The first example of mergekit's docs/moe.md: eight times the same model, random gates."""
    (folder,) = experts(1)
    recipe = {"base_model": str(folder), "gate_mode": "random", "dtype": "bfloat16"}
    compose({**recipe, "experts": [{"source_model": str(folder)}] * 8}, tmp_path / "out")
    facts = inspect(tmp_path / "out")
    assert [expert["name"] for expert in facts["experts"]] == [f"birds-{n}" for n in range(1, 9)]
    assert facts["shared"].startswith("copied from the base")
