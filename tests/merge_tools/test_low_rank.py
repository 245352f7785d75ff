"""`rank`: experts as two thin matrices over the base's MLPs, against the truncated SVD, in every format, added and removed."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.testing import assert_close

from merge_tools import MergeError, add, check, compose, export, extract, inspect, remove, verify
from merge_tools.checkpoints import open_source
from merge_tools.low_rank import decompose, matrix

from .conftest import contents, logits_of, open_model, read_tensors, recipe_of
from .test_shard_writer import Stop, interrupt

IDS = torch.arange(5, 25)[None]
LINEARS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def recipe(folders, base, rank=8, **options):
    return recipe_of(folders, base_model=str(base), average="base", gate_mode="random", rank=rank, **options)


@pytest.mark.parametrize("shape", [(12, 7), (7, 12), (9, 9)], ids=str)
@pytest.mark.parametrize("rank", [1, 3, 7])
def test_factors_are_those_of_the_truncated_svd(shape, rank):
    difference = np.random.default_rng(0).normal(size=shape)
    a, b, energy = decompose(difference, rank)
    u, s, v = np.linalg.svd(difference, full_matrices=False)
    assert a.shape == (rank, shape[1]) and b.shape == (shape[0], rank)
    np.testing.assert_allclose(b @ a, (u[:, :rank] * s[:rank]) @ v[:rank], atol=1e-10)
    assert energy == pytest.approx((s[:rank] ** 2).sum() / (s**2).sum())
    np.testing.assert_allclose(np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=0), rtol=1e-8)


def test_a_difference_of_zero_has_factors_of_zero():
    a, b, energy = decompose(np.zeros((4, 3)), 2)
    assert not a.any() and not b.any() and energy == 1


def test_the_mixture_holds_the_base_once_and_thin_experts(experts, tmp_path):
    base, *folders = experts(3, same_shared=True)
    compose(recipe(folders, base), tmp_path / "out")
    mixture, sources = read_tensors(tmp_path / "out"), [read_tensors(folder) for folder in folders]
    dense = read_tensors(base)
    energies = []
    for layer in range(2):
        block = f"model.layers.{layer}.block_sparse_moe"
        for short, name in LINEARS.items():
            key = f"model.layers.{layer}.mlp.{name}.weight"
            assert torch.equal(mixture[f"{block}.base.{short}.weight"], dense[key])
            for e, source in enumerate(sources):
                a, b = (mixture[f"{block}.experts.{e}.{short}.{half}.weight"] for half in "AB")
                u, s, v = torch.linalg.svd((source[key] - dense[key]).double(), full_matrices=False)
                assert_close((b @ a).double(), (u[:, :8] * s[:8]) @ v[:8], atol=1e-5, rtol=1e-5)
                energies.append([e, float((s[:8] ** 2).sum() / (s**2).sum())])
    found = inspect(tmp_path / "out")
    expected = [np.mean([energy for e, energy in energies if e == expert]) for expert in range(2)]
    assert found["rank"] == 8 and found["energies"] == pytest.approx(expected, abs=1e-4)


def test_full_rank_is_the_mixture_of_whole_experts(experts, tmp_path):
    base, *folders = experts(3, same_shared=True)
    compose(recipe(folders, base, rank=32), tmp_path / "thin")
    compose(recipe(folders, base, rank=None), tmp_path / "whole")
    assert_close(
        logits_of(open_model(tmp_path / "thin"), IDS),
        logits_of(open_model(tmp_path / "whole"), IDS),
        atol=2e-4,
        rtol=1e-4,
    )


def test_every_format_has_the_same_logits(experts, tmp_path):
    base, *folders = experts(4, same_shared=True)
    compose(recipe(folders, base), tmp_path / "thin")
    export(tmp_path / "thin", tmp_path / "stock", "mixtral")
    thin, stock = open_model(tmp_path / "thin"), open_model(tmp_path / "stock")
    assert stock.config.model_type == "mixtral" and "energies" not in json.loads(
        (tmp_path / "stock" / "merge_record.json").read_text()
    )
    assert_close(logits_of(thin, IDS), logits_of(stock, IDS), atol=1e-4, rtol=1e-4)
    verified = verify(tmp_path / "stock")
    assert verified["ok"] and any("rank 8" in note for note in verified["notes"])
    extract(tmp_path / "thin", folders[1].name, tmp_path / "dense")
    stored = read_tensors(tmp_path / "stock")["model.layers.1.block_sparse_moe.experts.1.w2.weight"]
    assert torch.equal(read_tensors(tmp_path / "dense")["model.layers.1.mlp.down_proj.weight"], stored)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_expert_that_is_added_and_removed_leaves_the_old_bytes(dtype, experts, tmp_path):
    base, *folders = experts(4, same_shared=True, dtype=dtype)
    compose(recipe(folders[:2], base), tmp_path / "two")
    compose(recipe(folders, base), tmp_path / "three")
    add(tmp_path / "two", str(folders[2]), tmp_path / "added")
    remove(tmp_path / "added", folders[2].name, tmp_path / "removed")
    assert contents(tmp_path / "added") == contents(tmp_path / "three")
    assert contents(tmp_path / "removed") == contents(tmp_path / "two")
    verified = verify(tmp_path / "added")
    assert verified["ok"] and not verified["notes"]


def test_a_rank_by_energy_is_the_smallest_for_all_matrices(experts, tmp_path):
    base, *folders = experts(3, same_shared=True)
    compose(recipe(folders, base, rank=0.8), tmp_path / "out")
    rank, least = inspect(tmp_path / "out")["rank"], {}
    dense = read_tensors(base)
    for folder in folders:
        source = read_tensors(folder)
        for key in dense:
            if ".mlp." in key:
                squares = torch.linalg.svdvals((source[key] - dense[key]).double()) ** 2
                for r in (rank, rank - 1):
                    least[r] = min(least.get(r, 1), float(squares[:r].sum() / squares.sum()))
    assert least[rank] >= 0.8 > least[rank - 1]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rank": 33}, "rank: 33 exceeds that of the experts' matrices, 32"),
        ({"rank": 0}, "rank in the recipe must be an integer of at least 1"),
        ({"rank": 1.5}, "rank in the recipe must be"),
        ({"rank": True}, "rank in the recipe must be"),
        ({"rank": 4, "base_model": None, "average": "mean"}, "needs base_model"),
        ({"rank": 4, "router_layers": ["up_proj"]}, "needs router_layers: mlp"),
        ({"rank": 4, "format": "mixtral"}, "rank.*format: lexicon"),
    ],
    ids=str,
)
def test_ranks_that_are_not_possible(options, message, experts):
    base, *folders = experts(3, same_shared=True)
    report = check(recipe_of(folders, **{"base_model": str(base), "average": "base", "gate_mode": "random", **options}))
    with pytest.raises(MergeError, match=message):
        report.raise_for_errors()


def test_attention_is_routed_beside_experts_of_low_rank(experts, tmp_path):
    base, *folders = experts(3)
    compose(recipe(folders, base, attention="routed"), tmp_path / "thin")
    compose(recipe(folders, base, attention="routed", rank=0.9), tmp_path / "energy")
    compose(recipe(folders, base, attention="routed", rank=None), tmp_path / "whole")
    thin, whole = read_tensors(tmp_path / "thin"), read_tensors(tmp_path / "whole")
    attention = [name for name in whole if "self_attn" in name]
    assert any(".experts.1." in name for name in attention)
    assert all(torch.equal(thin[name], whole[name]) for name in attention)
    extract(tmp_path / "thin", folders[0].name, tmp_path / "dense")
    model = open_model(tmp_path / "thin")
    model.set_active_experts([0])
    dense = read_tensors(tmp_path / "dense")
    copied = [name for name in read_tensors(folders[0]) if "self_attn" in name]
    assert all(torch.equal(dense[name], read_tensors(folders[0])[name]) for name in copied)
    assert_close(logits_of(model, IDS), logits_of(open_model(tmp_path / "dense"), IDS), atol=1e-4, rtol=1e-4)
    assert verify(tmp_path / "thin")["compared"]["experts"] == 2 * 2 * 4  # experts, layers, linears of the attention


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_verify_computes_the_factors_again(dtype, experts, tmp_path):
    base, *folders = experts(3, same_shared=True)
    compose(recipe(folders, base, dtype=dtype), tmp_path / "out")
    result = verify(tmp_path / "out")
    assert result["ok"] and not result["notes"] and result["compared"]["factors"] == 2 * 2 * 3 * 2
    tensors, name = read_tensors(tmp_path / "out"), "model.layers.1.block_sparse_moe.experts.1.w2.B.weight"
    other = {key: -value if key.startswith(name.removesuffix("B.weight")) else value for key, value in tensors.items()}
    save_file(other, tmp_path / "out" / "model.safetensors", {"format": "pt"})  # -A and -B have the same product
    assert not [fault for fault in verify(tmp_path / "out")["faults"] if "w2" in fault]
    tensors[name][0] *= 1.5
    save_file(tensors, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    (fault,) = (fault for fault in verify(tmp_path / "out")["faults"] if "w2" in fault)
    assert name in fault and "of their norm" in fault


@pytest.mark.parametrize("files", [1, 2, 3, 5])  # what is left decides whose factors are only computed for the record
def test_a_run_that_is_resumed_writes_the_same_record(files, experts, tmp_path):
    base, *folders = experts(3, same_shared=True)
    compose(recipe(folders, base), tmp_path / "whole", shard_bytes=20_000)
    with pytest.raises(KeyboardInterrupt):
        compose(recipe(folders, base), tmp_path / "out", shard_bytes=20_000, progress=Stop("sync", files, interrupt))
    compose(recipe(folders, base), tmp_path / "out", shard_bytes=20_000, resume=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_matrix_with_nan_names_its_expert(experts, tmp_path):
    name, path = "model.layers.0.mlp.up_proj.weight", tmp_path / "ships"
    shutil.copytree(experts(2)[1], path)
    tensors = read_tensors(path)
    tensors[name][1, 3] = float("nan")
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(MergeError, match=f"ships: '{name}' holds NaN"):
        matrix(open_source("ships", str(path)), name)


def test_gguf_needs_the_whole_experts(experts, tmp_path):
    base, *folders = experts(3, same_shared=True)
    compose(recipe(folders, base), tmp_path / "thin")
    with pytest.raises(MergeError, match="'lexicon'.*--format mixtral first"):
        export(tmp_path / "thin", tmp_path / "out.gguf", "gguf")
