"""Invalid prompts, samples, centroids and LoRA adapters: reported before anything is written."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file

from merge_tools import check, compose

from .conftest import edit_json, recipe_of, save_adapter
from .corruptions import GATE, copied, refused, value


@pytest.fixture
def pair(tmp_path, experts):
    """birds and ships, copied."""
    return copied(experts(2), tmp_path / "experts")


def with_prompts(folders, *prompts, **options):
    return recipe_of(
        [{"source_model": str(f), "positive_prompts": [p]} for f, p in zip(folders, prompts, strict=True)],
        gate_mode="hidden",
        **options,
    )


def test_prompts_need_a_tokenizer(pair, tmp_path):
    recipe = with_prompts(pair, "the birds", "the ships")
    assert check(recipe).ok
    for folder in pair:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).unlink()
    refused(tmp_path, recipe, "needs a tokenizer, but birds")


def test_prompts_need_a_tokenizer_that_opens(pair, tmp_path):
    for folder in pair:
        (folder / "tokenizer.json").write_text(
            '{"model": {"vocab": {"a": 0}}}'
        )  # JSON with tokens, but not a tokenizer
    refused(tmp_path, with_prompts(pair, "the birds", "the ships"), "cannot be opened|can be opened")


def test_prompts_must_fit_the_context_length(pair, tmp_path):
    refused(tmp_path, with_prompts(pair, "the birds " * 100, "the ships"), "'the birds .* has .* tokens; .* 128")


def test_prompts_need_rows_in_the_embeddings(pair, tmp_path):
    for folder in pair:
        content = json.loads((folder / "tokenizer.json").read_text())
        vocab = content["model"]["vocab"]
        vocab["z"], vocab["ȥ"] = len(vocab), vocab["z"]
        (folder / "tokenizer.json").write_text(json.dumps(content))
    recipe = with_prompts(pair, "zzz", "the ships")
    refused(tmp_path, recipe, "token id 45, .* 45 rows")
    warned = [f.message for f in check(recipe_of(pair)).warnings]
    assert len(warned) == 2 and all("ids up to 45" in message and "45 rows" in message for message in warned)


@pytest.mark.parametrize(
    "name, content, pattern",
    [
        ("rows.jsonl", '{"text": "the birds"}\n{"nothing": 3}\n', "rows.jsonl, line 2 needs text, prompt, or term"),
        ("rows.jsonl", "[1]\n", "rows.jsonl, line 1 needs"),
        ("rows.jsonl", '{"text": 5}\n', "rows.jsonl, line 1: 5 is not a text"),
        ("rows.jsonl", '{"prompt": ["a"]}\n', "rows.jsonl, line 1: .'a'. is not a text"),
        ("rows.jsonl", "not json\n", "rows.jsonl, line 1: this is not valid JSON"),
        ("rows.txt", "\n\n", "rows.txt has no samples"),
        ("rows.txt", None, "samples='.*rows.txt' does not exist"),
        ("rows.txt", b"\xff\xfe\xfa", "rows.txt is not UTF-8"),
    ],
)
def test_samples_that_cannot_be_read(name, content, pattern, pair, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    recipe = recipe_of([{"source_model": str(f), "samples": str(tmp_path / name)} for f in pair], gate_mode="centroid")
    refused(tmp_path, recipe, pattern)


@pytest.mark.parametrize(
    "arrays, pattern",
    [
        ({"c": np.ones((3, 8), np.float32)}, r"shapes \[\[3, 8\]\]; .* \(2, size\)"),
        ({"c": np.ones(8, np.float32)}, r"shapes \[\[8\]\]"),
        ({"c": np.ones((2, 8), np.float32), "d": np.ones(1, np.float32)}, r"shapes \[\[2, 8\], \[1\]\]"),
        ({"c": np.full((2, 8), np.nan, np.float32)}, "not finite"),
        ({"c": np.ones((2, 8), np.int32)}, "dtype I32.* not finite"),
        (None, "centroids.safetensors has 0 bytes"),
    ],
)
def test_invalid_centroids(arrays, pattern, pair, tmp_path):
    file = tmp_path / "centroids.safetensors"
    save_arrays(arrays, file) if arrays else file.write_bytes(b"")
    refused(tmp_path, recipe_of(pair, centroids=str(file), format="lexicon"), pattern)


def test_a_mixtral_cannot_store_centroids(pair, tmp_path):
    save_arrays({"c": np.ones((2, 8), np.float32)}, tmp_path / "centroids.safetensors")
    recipe = recipe_of(pair, centroids=str(tmp_path / "centroids.safetensors"))
    refused(tmp_path, recipe, "format: lexicon")
    assert check(recipe | {"format": "lexicon"}).ok


def test_biases_that_a_format_does_not_support(tmp_path, make_expert):
    folders = [make_expert(tmp_path / "experts" / n, s, attention_bias=True) for s, n in enumerate(("birds", "ships"))]
    refused(tmp_path, recipe_of(folders, format="mixtral"), "its attention has biases.* format: lexicon")
    assert check(recipe_of(folders)).ok
    folders = [make_expert(tmp_path / "experts" / n, s, mlp_bias=True) for s, n in enumerate(("tools", "plants"))]
    refused(tmp_path, recipe_of(folders), "its MLPs have biases")
    assert check(recipe_of(folders, router_layers=["gate_proj"])).ok


# adapters


@pytest.fixture
def adapters(tmp_path, pair):
    """Two adapters over birds."""
    return [save_adapter(tmp_path / "experts" / name, pair[0], seed=seed) for seed, name in enumerate(("one", "two"))]


def rename(folder, **names):
    result = load_file(folder / "adapter_model.safetensors")
    changed = {}
    for name, tensor in result.items():
        for old, new in names.items():
            name = name.replace(old, new)
        changed[name] = tensor
    save_file(changed, folder / "adapter_model.safetensors")


def change(folder, half, tensor):
    result = load_file(folder / "adapter_model.safetensors")
    name = next(name for name in result if f"lora_{half}" in name)
    save_file({**result, name: tensor}, folder / "adapter_model.safetensors")


ADAPTERS = {
    "DoRA": (
        lambda f: edit_json(f / "adapter_config.json", use_dora=True),
        "an adapter with 'use_dora'=True.*merge_and_unload",
    ),
    "another kind": (lambda f: edit_json(f / "adapter_config.json", peft_type="IA3"), "peft_type='IA3'"),
    "no kind": (lambda f: edit_json(f / "adapter_config.json", peft_type=None), "peft_type=None"),
    "no rank": (lambda f: edit_json(f / "adapter_config.json", r=None), "no valid r and lora_alpha .*KeyError"),
    "rank of nothing": (lambda f: edit_json(f / "adapter_config.json", r=0), "no valid r and lora_alpha"),
    "another rank": (lambda f: edit_json(f / "adapter_config.json", r=8), "rank 8 .* rank 4"),
    "alpha as a string": (lambda f: edit_json(f / "adapter_config.json", lora_alpha="x"), "no valid r and lora_alpha"),
    "infinite alpha": (lambda f: edit_json(f / "adapter_config.json", lora_alpha=1e999), "no valid r and lora_alpha"),
    "broken pattern": (
        lambda f: edit_json(f / "adapter_config.json", rank_pattern={"(": 4}),
        "no valid r and lora_alpha",
    ),
    "garbage": (lambda f: (f / "adapter_config.json").write_text("{"), "adapter_config.json cannot be read"),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
    "truncated": (
        lambda f: (f / "adapter_model.safetensors").write_bytes((f / "adapter_model.safetensors").read_bytes()[:-9]),
        "adapter_model.safetensors is truncated",
    ),
    "half of it": (lambda f: rename(f, lora_B="lora_A.x"), "not a plain LoRA weight"),
    "other half": (lambda f: rename(f, **{"gate_proj.lora_B": "up_proj.lora_B"}), "has only lora_"),
    "halves that do not fit": (lambda f: change(f, "B", torch.ones(64, 5)), r"\[4, 32\] and \[64, 5\]"),
    "a half of one dimension": (lambda f: change(f, "B", torch.ones(64)), r"\[4, 32\] and \[64\]"),
    "other shape": (lambda f: change(f, "B", torch.ones(48, 4)), r"of shape \[48, 32\], but its base .* of shape \[64"),
    "layer that is not there": (lambda f: rename(f, **{"layers.0": "layers.9"}), "its base .* has no tensor"),
    "quantised": (lambda f: change(f, "B", torch.ones(64, 4, dtype=torch.int8)), "has dtype I8"),
    "NaN": (lambda f: change(f, "A", torch.full((4, 32), float("nan"))), "lora_A.weight' holds NaN"),
    "replaced": (lambda f: rename(f, **{"gate_proj.lora_B": "embed_x", "lora_A": "lora_A"}), "replaces|has only lora_"),
    "no base": (
        lambda f: edit_json(f / "adapter_config.json", base_model_name_or_path="/gone"),
        "an adapter over '/gone', .* base_model",
    ),
    "base as a number": (
        lambda f: edit_json(f / "adapter_config.json", base_model_name_or_path=3),
        "an adapter over 3",
    ),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_broken_adapter_is_refused(name, adapters, tmp_path):
    breaks, pattern = ADAPTERS[name]
    breaks(adapters[1])
    result = refused(tmp_path, recipe_of(adapters), pattern)
    assert all(line.startswith("two: ") for line in result)


def test_two_valid_adapters_merge(adapters, tmp_path):
    report = check(recipe_of(adapters), tmp_path / "out")
    assert report.ok and not report.warnings
    assert compose(recipe_of(adapters), tmp_path / "out")["warnings"] == []


def test_an_adapter_over_another_model_of_the_same_shapes(adapters, pair, tmp_path):
    edit_json(adapters[1] / "adapter_config.json", base_model_name_or_path=str(pair[1]))
    for options in ({}, {"base_model": str(pair[0])}):
        refused(tmp_path, recipe_of(adapters, **options), "two: is an adapter over .*ships, whose weights differ")


def test_an_adapter_over_another_model_of_other_shapes(adapters, tmp_path, make_expert):
    wide = make_expert(tmp_path / "experts" / "wide", 3, intermediate_size=96)
    edit_json(adapters[1] / "adapter_config.json", base_model_name_or_path=str(wide))
    refused(tmp_path, recipe_of(adapters), r"\[96, 32\].* base_model")


def test_an_adapter_next_to_a_full_expert_needs_no_common_base(adapters, pair, tmp_path):
    """The base of ships, which is not an adapter, is unknown; with a different base_model the adapter is refused."""
    assert check(recipe_of([pair[1], adapters[0]])).ok
    refused(
        tmp_path, recipe_of([pair[1], adapters[0]], base_model=str(pair[1])), "one: is an adapter over .*birds, whose"
    )


def test_an_adapter_whose_base_does_not_exist_uses_the_base_model_with_a_warning(adapters, pair, tmp_path):
    for folder in adapters:
        edit_json(folder / "adapter_config.json", base_model_name_or_path="someone/some-llama")
    warned = [f.message for f in check(recipe_of(adapters, base_model=str(pair[0]))).warnings]
    assert len(warned) == 2 and all("'someone/some-llama'" in text and str(pair[0]) in text for text in warned)
    refused(tmp_path, recipe_of(adapters), "'someone/some-llama' .* from the Hub")


def test_nan_below_an_adapter_is_found(adapters, pair, tmp_path):
    value(GATE, 0, float("nan"))(pair[0])
    refused(tmp_path, recipe_of(adapters), "one: '.*gate_proj.weight' holds NaN")
    shutil.rmtree(pair[0])
    refused(tmp_path, recipe_of(adapters), "one: .* is an adapter over .*birds', which does not exist")
