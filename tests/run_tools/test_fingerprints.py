"""Hashes of weights, equal for equal values only, in whatever way a tensor stores them."""

import copy

import pytest
import torch

from run_tools.fingerprints import hash_weights


def dense(model):
    return model


def half(model):
    return model.to(torch.bfloat16)


def by_torch(model):
    weight = torch.quantize_per_tensor(model.weight.detach(), 0.01, 0, torch.qint8)
    del model.weight
    model.register_buffer("weight", weight)
    return model


def by_torchao(model):
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed: make test does it")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


def sparse(model):
    weight = model.weight.detach().to_sparse()
    del model.weight
    model.register_buffer("weight", weight)
    return model


@pytest.mark.parametrize("stored", [dense, half, by_torch, by_torchao, sparse], ids=lambda stored: stored.__name__)
def test_one_changed_value_changes_the_hash(stored):
    torch.manual_seed(0)
    model = torch.nn.Linear(200, 200)
    same, other = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        other.weight[100, 100] += 0.05  # in the middle, which the repr of a large tensor leaves out
    assert hash_weights(stored(model)) == hash_weights(stored(same))
    assert hash_weights(model) != hash_weights(stored(other))


def test_names_shapes_and_types_are_part_of_the_hash():
    model = torch.nn.Linear(4, 4)
    torch.nn.init.zeros_(model.weight)
    hashes = {hash_weights(model), hash_weights(torch.nn.Sequential(model)), hash_weights(model.to(torch.float64))}
    assert len(hashes) == 3
