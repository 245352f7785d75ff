"""What gates are measured with, and LoRA adapters: told before anything is written where they cannot serve."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file

from merge_tools import check, compose

from .broken import GATE, copied, refused, value
from .conftest import edit_json, recipe_of


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
    refused(tmp_path, recipe, "Gates from texts need a tokenizer, and birds .* brings none that opens")


def test_prompts_need_a_tokenizer_that_opens(pair, tmp_path):
    for folder in pair:
        (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')  # JSON, with tokens, and yet none
    refused(
        tmp_path, with_prompts(pair, "the birds", "the ships"), "its tokenizer does not open|brings none that opens"
    )


def test_prompts_need_to_fit_the_model(pair, tmp_path):
    refused(
        tmp_path,
        with_prompts(pair, "the birds " * 100, "the ships"),
        "The prompt 'the birds .* has .* tokens, and the model reads 128. Shorten it",
    )


def test_prompts_need_rows_in_the_embeddings(pair, tmp_path):
    for folder in pair:
        content = json.loads((folder / "tokenizer.json").read_text())
        vocab = content["model"]["vocab"]
        vocab["z"], vocab["ȥ"] = len(vocab), vocab["z"]
        (folder / "tokenizer.json").write_text(json.dumps(content))
    recipe = with_prompts(pair, "zzz", "the ships")
    refused(tmp_path, recipe, "a prompt has the token 45, and its embeddings have 45 rows")
    warned = [f.message for f in check(recipe_of(pair)).warnings]
    assert (
        warned
        == ["its tokenizer gives ids up to 45, and its embeddings have 45 rows: such a token fails in the model."] * 2
    )


@pytest.mark.parametrize(
    "name, content, pattern",
    [
        (
            "rows.jsonl",
            '{"text": "the birds"}\n{"nothing": 3}\n',
            "rows.jsonl, line 2: no row with text, prompt, or term",
        ),
        ("rows.jsonl", "[1]\n", "rows.jsonl, line 1: no row"),
        ("rows.txt", "\n\n", "rows.txt holds no samples"),
        ("rows.txt", None, "There is no file of samples '.*rows.txt'"),
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
        (
            {"c": np.ones((3, 8), np.float32)},
            r"holds tensors of the shapes \[\[3, 8\]\], where one of \(2, size\) is needed",
        ),
        ({"c": np.ones(8, np.float32)}, r"shapes \[\[8\]\]"),
        ({"c": np.ones((2, 8), np.float32), "d": np.ones(1, np.float32)}, "where one of"),
        ({"c": np.full((2, 8), np.nan, np.float32)}, "holds values that are no finite numbers"),
        ({"c": np.ones((2, 8), np.int32)}, "holds values that are no finite numbers, of dtype I32"),
        (None, "fewer than a safetensors header"),
    ],
)
def test_centroids_of_another_form(arrays, pattern, pair, tmp_path):
    file = tmp_path / "centroids.safetensors"
    save_arrays(arrays, file) if arrays else file.write_bytes(b"")
    refused(tmp_path, recipe_of(pair, centroids=str(file), format="lexicon"), pattern)


def test_centroids_have_no_place_in_a_mixtral(pair, tmp_path):
    save_arrays({"c": np.ones((2, 8), np.float32)}, tmp_path / "centroids.safetensors")
    recipe = recipe_of(pair, centroids=str(tmp_path / "centroids.safetensors"))
    refused(tmp_path, recipe, "centroids travel with a lexicon only")
    assert check(recipe | {"format": "lexicon"}).ok


def test_attention_biases_have_no_place_in_a_mixtral_and_mlp_biases_in_no_routed_mlp(tmp_path, make_expert):
    folders = [make_expert(tmp_path / "experts" / n, s, attention_bias=True) for s, n in enumerate(("birds", "ships"))]
    refused(tmp_path, recipe_of(folders, format="mixtral"), "its attention has biases, which a Mixtral does not hold")
    assert check(recipe_of(folders)).ok
    folders = [make_expert(tmp_path / "experts" / n, s, mlp_bias=True) for s, n in enumerate(("tools", "plants"))]
    refused(tmp_path, recipe_of(folders), "its MLPs have biases, which routed MLPs do not hold")
    assert check(recipe_of(folders, router_layers=["gate_proj"])).ok


# adapters


def adapter(folder, over, rank=4, seed=0, **config):
    """A LoRA adapter of gate_proj in layer 0, as peft saves it."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    prefix = "base_model.model.model.layers.0.mlp.gate_proj"
    halves = {
        f"{prefix}.lora_A.weight": torch.randn(rank, 32, generator=generator),
        f"{prefix}.lora_B.weight": torch.randn(64, rank, generator=generator),
    }
    save_file(halves, folder / "adapter_model.safetensors")
    known = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "base_model_name_or_path": str(over), **config}
    (folder / "adapter_config.json").write_text(json.dumps(known))
    return folder


@pytest.fixture
def adapters(tmp_path, pair):
    """Two adapters over birds."""
    return [adapter(tmp_path / "experts" / name, pair[0], seed=seed) for seed, name in enumerate(("one", "two"))]


def rename(folder, **names):
    found = load_file(folder / "adapter_model.safetensors")
    changed = {}
    for name, tensor in found.items():
        for old, new in names.items():
            name = name.replace(old, new)
        changed[name] = tensor
    save_file(changed, folder / "adapter_model.safetensors")


def change(folder, half, tensor):
    found = load_file(folder / "adapter_model.safetensors")
    name = next(name for name in found if f"lora_{half}" in name)
    save_file({**found, name: tensor}, folder / "adapter_model.safetensors")


ADAPTERS = {
    "DoRA": (
        lambda f: edit_json(f / "adapter_config.json", use_dora=True),
        "an adapter with use_dora.*merge_and_unload",
    ),
    "another kind": (
        lambda f: edit_json(f / "adapter_config.json", peft_type="IA3"),
        "of the kind 'IA3', and only LORA",
    ),
    "no kind": (lambda f: edit_json(f / "adapter_config.json", peft_type=None), "of the kind None"),
    "no rank": (lambda f: edit_json(f / "adapter_config.json", r=None), "does not say by what to scale .*KeyError"),
    "rank of nothing": (lambda f: edit_json(f / "adapter_config.json", r=0), "does not say by what to scale"),
    "another rank": (lambda f: edit_json(f / "adapter_config.json", r=8), "the rank 8, and its tensors have 4"),
    "alpha as a text": (
        lambda f: edit_json(f / "adapter_config.json", lora_alpha="x"),
        "does not say by what to scale",
    ),
    "endless alpha": (
        lambda f: edit_json(f / "adapter_config.json", lora_alpha=1e999),
        "does not say by what to scale",
    ),
    "broken pattern": (
        lambda f: edit_json(f / "adapter_config.json", rank_pattern={"(": 4}),
        "does not say by what to",
    ),
    "garbage": (lambda f: (f / "adapter_config.json").write_text("{"), "adapter_config.json cannot be read"),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), "holds no adapter_model.safetensors"),
    "truncated": (
        lambda f: (f / "adapter_model.safetensors").write_bytes((f / "adapter_model.safetensors").read_bytes()[:-9]),
        "adapter_model.safetensors is cut short",
    ),
    "half of it": (lambda f: rename(f, lora_B="lora_A.x"), "which is no plain LoRA"),
    "other half": (
        lambda f: rename(f, **{"gate_proj.lora_B": "up_proj.lora_B"}),
        "holds only a part of the adapter of",
    ),
    "halves that do not fit": (
        lambda f: change(f, "B", torch.ones(64, 5)),
        r"\[4, 32\] and \[64, 5\], which do not fit",
    ),
    "a half of one dimension": (lambda f: change(f, "B", torch.ones(64)), r"\[4, 32\] and \[64\], which do not fit"),
    "other shape": (
        lambda f: change(f, "B", torch.ones(48, 4)),
        r"of shape \[48, 32\], which in its base .* has shape \[64",
    ),
    "layer that is not there": (lambda f: rename(f, **{"layers.0": "layers.9"}), "which in its base .* is not there"),
    "quantised": (lambda f: change(f, "B", torch.ones(64, 4, dtype=torch.int8)), "has dtype I8: quantised adapters"),
    "NaN": (lambda f: change(f, "A", torch.full((4, 32), float("nan"))), "lora_A.weight' holds NaN or infinite values"),
    "replaced": (lambda f: rename(f, **{"gate_proj.lora_B": "embed_x", "lora_A": "lora_A"}), "replaces|only a part"),
    "no base": (
        lambda f: edit_json(f / "adapter_config.json", base_model_name_or_path="/gone"),
        "is an adapter over '/gone', which is not there. Name its base as base_model",
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
    found = refused(tmp_path, recipe_of(adapters), pattern)
    assert all(line.startswith("two: ") for line in found)


def test_two_adapters_are_fine_before_they_are_broken(adapters, tmp_path):
    report = check(recipe_of(adapters), tmp_path / "out")
    assert report.ok and not report.warnings
    assert compose(recipe_of(adapters), tmp_path / "out")["warnings"] == []


def test_an_adapter_over_another_model_of_the_same_shapes(adapters, pair, tmp_path):
    edit_json(adapters[1] / "adapter_config.json", base_model_name_or_path=str(pair[1]))
    for options in ({}, {"base_model": str(pair[0])}):
        refused(
            tmp_path, recipe_of(adapters, **options), "two: is an adapter over .*ships, whose weights are not those of"
        )


def test_an_adapter_over_another_model_of_other_shapes(adapters, tmp_path, make_expert):
    wide = make_expert(tmp_path / "experts" / "wide", 3, intermediate_size=96)
    edit_json(adapters[1] / "adapter_config.json", base_model_name_or_path=str(wide))
    refused(tmp_path, recipe_of(adapters), "that is not the model it was trained on. Give that one as base_model")


def test_an_adapter_beside_a_whole_expert_needs_no_common_base(adapters, pair, tmp_path):
    """ships is no adapter, so nothing says what it was trained from; over a base_model that is another it is refused."""
    assert check(recipe_of([pair[1], adapters[0]])).ok
    refused(
        tmp_path, recipe_of([pair[1], adapters[0]], base_model=str(pair[1])), "one: is an adapter over .*birds, whose"
    )


def test_an_adapter_whose_base_is_gone_takes_the_base_model_and_says_so(adapters, pair, tmp_path):
    for folder in adapters:
        edit_json(folder / "adapter_config.json", base_model_name_or_path="someone/some-llama")
    warned = [f.message for f in check(recipe_of(adapters, base_model=str(pair[0]))).warnings]
    assert warned == [f"was trained over 'someone/some-llama', which is not here: {pair[0]} is taken for it."] * 2
    refused(tmp_path, recipe_of(adapters), "no model of that name could be fetched from the Hub")


def test_nan_below_an_adapter_is_found(adapters, pair, tmp_path):
    value(GATE, 0, float("nan"))(pair[0])
    refused(tmp_path, recipe_of(adapters), "one: '.*gate_proj.weight' holds NaN")
    shutil.rmtree(pair[0])
    refused(tmp_path, recipe_of(adapters), "one: .* is an adapter over .*birds', which is not there")
