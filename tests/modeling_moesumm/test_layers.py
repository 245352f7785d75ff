"""Layers are transformers' own without deputies, and MoeSumm's equations with them."""

import copy

import pytest
import torch
from accelerate import infer_auto_device_map
from torch.testing import assert_close

from modeling_moesumm.layers_moesumm import LAYER_CLASSES
from modeling_moesumm.routing_moesumm import RoutingContext

from .conftest import BACKBONES, DECODERS, each_backbone, gradients, one_of_each, tiny_backbone, tiny_moesumm

PARTS = [*((name, part) for name in BACKBONES for part in ("encoder", "decoder")), *((name, "") for name in DECODERS)]
each_half = pytest.mark.parametrize("part", ["encoder", "decoder"])


def layer_of(model, part):
    base = getattr(model, "backbone", model).base_model
    return (getattr(base, part) if part else base).layers[1]


def weighted_sum(y):
    return (y.float() if y.dtype == torch.bfloat16 else y).mul(torch.arange(y.numel()).view_as(y).sin()).sum()


@pytest.mark.parametrize("backbone, part", PARTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_without_deputies_is_transformers_layer_bit_for_bit(backbone, part, dtype):
    """In training, with dropout and all gradients: transformers' forward pass is copied, and must stay so."""
    changes = {"attention_dropout": 0.2} | ({"dropout": 0.3, "activation_dropout": 0.4} if part else {})
    stock, ours = tiny_backbone(backbone, **changes), tiny_moesumm(backbone, changes=changes)
    stock, ours = stock.train().to(dtype), ours.train().to(dtype)
    layers = layer_of(stock, part), layer_of(ours, part)
    assert LAYER_CLASSES[type(layers[0])] is type(layers[1])
    x, memory = torch.randn(3, 5, 16 if part else 32, dtype=dtype), torch.randn(3, 7, 16, dtype=dtype)
    reads = [{"encoder_hidden_states": memory}, {}] if part == "decoder" else [{}]
    if not part:
        reads = [{"position_embeddings": stock.model.rotary_emb(x, torch.arange(5)[None])}]
    for given in reads:
        found = []
        for layer, routing in zip(layers, ({}, {"routing": RoutingContext(False)}), strict=True):
            torch.manual_seed(3)
            layer.zero_grad()
            y = layer(x, attention_mask=None, **given, **routing)
            weighted_sum(y).backward()
            found.append((y, gradients(layer)))
        (expected, wanted), (y, ours_gradients) = found
        assert torch.equal(y, expected) and set(wanted) == set(ours_gradients)
        assert all(torch.equal(ours_gradients[name], gradient) for name, gradient in wanted.items())
        routing = RoutingContext(True, torch.tensor([0, 1, -1]))  # negative control
        assert not torch.allclose(layers[1](x, attention_mask=None, **given, routing=routing), expected, atol=1e-2)


@each_backbone
@each_half
def test_in_float16_large_values_are_clamped_as_transformers_does(backbone, part):
    stock, ours = layer_of(tiny_backbone(backbone).half(), part), layer_of(tiny_moesumm(backbone).half(), part)
    for layer in (stock, ours):
        layer.final_layer_norm.weight.data.fill_(3e4)
        layer.fc2.bias.data.fill_(3e4)
    x = torch.full((1, 3, 16), 6e4, dtype=torch.float16)
    with torch.no_grad():
        found = ours(x, None, routing=RoutingContext(False))
        assert torch.equal(torch.nan_to_num(found), torch.nan_to_num(stock(x, None)))


def layer_by_formula(layer, x, dataset, position, backbone):
    """A layer's part behind the attention, token by token; with the gate at the deputy MoeSumm, Eq. 4-7: (T, d) -> (T, d)."""
    experts, selectors, rows = layer.deputies.experts, layer.deputies.selectors, []
    for residual in x:
        a = residual if backbone == "bart" else layer.final_layer_norm(residual)
        G = (a @ selectors.weight[dataset].T + (0 if selectors.bias is None else selectors.bias[dataset])).softmax(-1)
        p = int(G.argmax())
        g = {"deputy": (G[p], 1), "layer_output": (1, G[p])}[position]
        inner = g[0] * (a @ experts.up_proj[p].T + experts.up_bias[p])
        H = layer.activation_fn(torch.cat([a @ layer.fc1.weight.T + layer.fc1.bias, inner]))
        X = H @ torch.cat([layer.fc2.weight.T, experts.down_proj[p]]) + layer.fc2.bias
        rows.append(g[1] * (layer.final_layer_norm(residual + X) if backbone == "bart" else residual + X))
    return torch.stack(rows)


@each_backbone
@each_half
@pytest.mark.parametrize("position, bias", [("deputy", False), ("layer_output", True)])
def test_a_layer_is_its_formula_with_the_gate_in_each_place(backbone, part, position, bias):
    layer = layer_of(tiny_moesumm(backbone, gate_position=position, selector_bias=bias).double(), part)
    if bias:
        layer.deputies.selectors.bias.data.normal_()
    layer.self_attn.out_proj.weight.data.zero_()  # so that A is known: the attention adds its bias alone
    slow = copy.deepcopy(layer)
    x, ids = torch.randn(4, 5, 16, dtype=torch.float64), torch.tensor([2, 0, -1, 2])
    y = layer(x, None, routing=RoutingContext(True, ids, rows=torch.tensor([0, 1, 3])))
    A = x + slow.self_attn.out_proj.bias
    A = slow.self_attn_layer_norm(A) if backbone == "bart" else A
    expected = torch.stack([layer_by_formula(slow, A[i], int(ids[i]), position, backbone) for i in (0, 1, 3)])
    assert_close(y[[0, 1, 3]], expected)
    every = RoutingContext(True, ids, recording=True)  # all rows, those without a dataset too
    assert_close(y, layer(x, None, routing=every))
    assert [int(row.min()) == -1 for row in every.recorded[layer.layer_idx][0]] == [False, False, True, False]
    assert torch.equal(y[2], layer(x, None, routing=RoutingContext(False))[2])  # the main expert alone is the backbone
    weighted_sum(y[[0, 1, 3]]).backward()
    weighted_sum(expected).backward()
    for name, gradient in gradients(slow).items():
        assert_close(layer.get_parameter(name).grad, gradient, msg=name)
    other = {"deputy": "layer_output"}.get(position, "deputy")  # negative control
    assert not torch.allclose(expected[0], layer_by_formula(slow, A[0], 2, other, backbone), atol=1e-3)


@pytest.mark.parametrize("mlp_bias", [False, True])
def test_a_layer_is_equations_4_to_7_for_swiglu(mlp_bias):
    layer = layer_of(tiny_moesumm("llama", changes={"mlp_bias": mlp_bias}), "").double()
    A, ids = torch.randn(2, 5, 32, dtype=torch.float64), torch.tensor([2, 0])
    experts, mlp = layer.deputies.experts, layer.mlp
    assert (experts.up_bias is not None) == mlp_bias
    expected = mlp(A)
    for row, e in enumerate(ids):
        G = (A[row] @ layer.deputies.selectors.weight[e].T).softmax(-1)
        for t, (g, p) in enumerate(zip(*G.max(-1), strict=True)):
            pre = A[row, t] @ experts.up_proj[p].T + (experts.up_bias[p] if mlp_bias else 0)
            expected[row, t] += torch.nn.functional.silu(g * pre[:20]) * pre[20:] @ experts.down_proj[p]
    found, _ = layer.feed_forward(A, RoutingContext(True, ids))
    assert_close(found, expected)
    assert not torch.allclose(found, mlp(A), atol=1e-2)


@one_of_each
def test_device_maps_keep_a_layer_together(backbone):
    model = tiny_moesumm(backbone)
    sizes = {"cpu": sum(p.numel() for p in model.parameters()) * 3, "disk": 10**9}
    places = infer_auto_device_map(model, sizes, no_split_module_classes=model._no_split_modules)
    assert len(set(places.values())) > 1
    assert all(len(name.split(".layers.")[-1].split(".")) == 1 for name in places if ".layers." in name)
