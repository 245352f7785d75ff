"""Nothing of a pass is kept on modules, and layers are transformers' own."""

import pytest
import torch
from accelerate import infer_auto_device_map

from modeling_moesumm.layers_moesumm import LAYER_CLASSES
from modeling_moesumm.routing_moesumm import RoutingContext
from tests.modeling_moesumm.conftest import each_backbone, gradients, tiny_backbone, tiny_moesumm


@each_backbone
@pytest.mark.parametrize("part", ["encoder", "decoder"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_without_deputies_is_transformers_layer_bit_for_bit(backbone, part, dtype):
    """In training, with dropout, attentions and all gradients: transformers' forward pass is copied, and must stay so."""
    changes = {"dropout": 0.3, "attention_dropout": 0.2, "activation_dropout": 0.4}
    stock = getattr(tiny_backbone(backbone, **changes).train().to(dtype).model, part).layers[1]
    ours = getattr(tiny_moesumm(backbone, changes=changes).train().to(dtype).backbone.model, part).layers[1]
    assert LAYER_CLASSES[type(stock)] is type(ours)
    x, memory = torch.randn(3, 5, 16, dtype=dtype), torch.randn(3, 7, 16, dtype=dtype)
    reads = [{"encoder_hidden_states": memory}, {}] if part == "decoder" else [{}]
    for given in reads:
        found = []
        for layer, routing in ((stock, {}), (ours, {"routing": RoutingContext(False)})):
            torch.manual_seed(3)
            layer.zero_grad()
            y = layer(x, None, **given, **routing)
            (y.float() * torch.arange(y.numel()).view_as(y).sin()).sum().backward()
            found.append((y, gradients(layer)))
        (expected, wanted), (y, ours_gradients) = found
        assert torch.equal(y, expected) and set(wanted) == set(ours_gradients)
        assert all(torch.equal(ours_gradients[name], gradient) for name, gradient in wanted.items())
        speaking = ours(x, None, **given, routing=RoutingContext(True, torch.tensor([0, 1, -1])))
        assert not torch.allclose(speaking, expected, atol=1e-2)  # negative control


@each_backbone
@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_in_float16_large_values_are_clamped_as_transformers_does(backbone, part):
    stock = getattr(tiny_backbone(backbone).half().model, part).layers[0]
    ours = getattr(tiny_moesumm(backbone).half().backbone.model, part).layers[0]
    for layer in (stock, ours):
        layer.final_layer_norm.weight.data.fill_(3e4)
        layer.fc2.bias.data.fill_(3e4)
    x = torch.full((1, 3, 16), 6e4, dtype=torch.float16)
    with torch.no_grad():
        assert torch.equal(
            torch.nan_to_num(ours(x, None, routing=RoutingContext(False))), torch.nan_to_num(stock(x, None))
        )


@each_backbone
def test_device_maps_keep_a_layer_together(backbone):
    model = tiny_moesumm(backbone)
    sizes = {"cpu": 40_000, "disk": 10**9}
    places = infer_auto_device_map(model, sizes, no_split_module_classes=model._no_split_modules)
    assert len(set(places.values())) > 1
    assert all(len(name.split(".layers.")[-1].split(".")) == 1 for name in places if ".layers." in name)
