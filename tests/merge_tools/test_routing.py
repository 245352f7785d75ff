"""route says what the model does: its routers' own choices and weights, token by token."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer

from merge_tools import MergeError, compose, plot, route
from merge_tools.routing import Routing

from .conftest import open_model, recipe_of

TEXTS = ["the owl is a bird of the night", "saw"]
LINEARS = ["q_proj", "down_proj"]
TOKEN = {
    "Mixtral, top 2": {},
    "Mixtral, top 1": {"experts_per_token": 1},
    "lexicon": {"format": "lexicon", "experts_per_token": 3},
    "linears": {"router_layers": LINEARS, "router_layers_index": [1]},
}


def with_prompts(folders):
    texts = {"birds": ["owl owl", "the wing"], "ships": ["mast mast", "a sail"], "tools": ["saw saw saw"]}
    return [{"source_model": str(folder), "positive_prompts": texts[folder.name]} for folder in folders]


def composed(out, folders, **options):
    gates = "none" if options.get("routing_policy") == "domain" else "random"
    compose(recipe_of(with_prompts(folders), **{"gate_mode": gates, **options}), out)
    return out


def ids_of(folder, text):
    return AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids


def watched(model, ids):
    """The outputs of the routers in a forward pass: [(weights, index)], each (T, k)."""
    result = []
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(lambda _, args: result.append((args[2].float(), args[1])))
    with torch.no_grad():
        model(ids)
    return result


@pytest.mark.parametrize("name", TOKEN)
def test_tokens_are_routed_as_in_the_model(experts, tmp_path, name):
    folder = composed(tmp_path / "out", experts(3), **TOKEN[name])
    for text, routing in zip(TEXTS, route(folder, TEXTS), strict=True):
        ids = ids_of(folder, text)
        seen = watched(open_model(folder), ids)
        assert routing.tokens == AutoTokenizer.from_pretrained(folder).convert_ids_to_tokens(ids[0])
        assert routing.text == text and routing.names == ["birds", "ships", "tools"]
        assert routing.experts.shape == routing.weights.shape == (len(seen), ids.shape[1], seen[0][0].shape[1])
        for r, (weights, index) in enumerate(seen):
            order = weights.argsort(dim=-1, descending=True, stable=True)
            assert routing.experts[r].tolist() == index.gather(1, order).tolist()
            np.testing.assert_allclose(routing.weights[r], weights.gather(1, order), atol=1e-6)
    assert len(np.unique(route(folder, TEXTS[:1])[0].experts[..., 0])) > 1  # a choice, not a constant
    expected = ["layer 1 q_proj", "layer 1 down_proj"] if name == "linears" else ["layer 0", "layer 1"]
    assert routing.routers == expected


@pytest.mark.parametrize("policy", ["sequence_soft", "sequence_hard"])
def test_a_sequence_is_routed_by_its_mean(experts, tmp_path, policy):
    folder = composed(tmp_path / "out", experts(3), routing_policy=policy)
    routing, model = route(folder, TEXTS[:1])[0], open_model(folder)
    with torch.no_grad():
        logits = model(ids_of(folder, TEXTS[0]), output_router_logits=True).router_logits
    count = len(routing.tokens)
    for r, mean in enumerate(logits):
        shares = mean[0].softmax(-1).numpy()
        order = np.argsort(-shares)[: 3 if policy == "sequence_soft" else 1]
        assert routing.experts[r].tolist() == [order.tolist()] * count
        weights = shares[order] if policy == "sequence_soft" else [1.0]
        np.testing.assert_allclose(routing.weights[r], [weights] * count, atol=1e-6)


def test_a_domain_can_be_named(experts, tmp_path):
    folder = composed(tmp_path / "out", experts(3), routing_policy="domain")
    for e, name in enumerate(("birds", "ships", "tools")):
        routing = route(folder, TEXTS[:1], domain=name)[0]
        assert routing.routers == ["all layers"]
        assert routing.experts.tolist() == [[[e]] * len(routing.tokens)]
        assert routing.load().tolist() == [[float(i == e) for i in range(3)]]
    with pytest.raises(MergeError, match="needs domain_ids"):
        route(folder, TEXTS)
    with pytest.raises(MergeError, match="no expert 'horses'.* birds, ships, tools"):
        route(folder, TEXTS, domain="horses")


def test_a_domain_is_selected_by_the_gate_or_named(experts, tmp_path):
    folder = composed(tmp_path / "out", experts(3), routing_policy="domain", gate_mode="random")
    model = open_model(folder)
    for text, routing in zip(TEXTS, route(folder, TEXTS), strict=True):
        with torch.no_grad():
            result = int(model(ids_of(folder, text), output_router_logits=True).router_logits[0].argmax())
        assert (routing.experts == result).all() and routing.experts.shape[0] == 1
        other = "birds" if result else "ships"
        assert (route(folder, [text], domain=other)[0].experts != result).all()


def test_load_is_the_share_of_weight_per_expert():
    experts = np.array([[[0, 1], [1, 2]], [[2, 0], [2, 0]]])
    weights = np.array([[[0.75, 0.25], [0.5, 0.5]], [[0.9, 0.1], [1.0, 0.0]]])
    routing = Routing("a b", ["a", "b"], ["layer 0", "layer 1"], experts, weights, ["x", "y", "z"])
    np.testing.assert_allclose(routing.load(), [[0.375, 0.375, 0.25], [0.05, 0.0, 0.95]])
    plain = json.loads(json.dumps(routing.to_dict()))
    assert plain["experts"] == experts.tolist() and plain["load"] == [[0.375, 0.375, 0.25], [0.05, 0.0, 0.95]]


def test_a_mixture_without_a_record_has_numbered_experts(experts, tmp_path):
    folder = composed(tmp_path / "out", experts(3))
    (folder / "merge_record.json").unlink()
    assert route(folder, TEXTS)[0].names == ["expert 0", "expert 1", "expert 2"]


def test_route_errors(experts, tmp_path):
    folder = composed(tmp_path / "out", experts(3))
    for texts in ([], ["the owl", " "]):
        with pytest.raises(MergeError, match="--text"):
            route(folder, texts)
    with pytest.raises(MergeError, match=r"has 20\d tokens; .* 128"):
        route(folder, ["x " * 100])
    with pytest.raises(MergeError, match="routing_policy domain, but this mixture has token"):
        route(folder, TEXTS, domain="birds")
    with pytest.raises(MergeError, match="model_type 'llama'"):
        route(experts(1)[0], TEXTS)
    with pytest.raises(MergeError, match="does not exist"):
        route(tmp_path / "nowhere", TEXTS)
    bare = shutil.copytree(folder, tmp_path / "bare")
    for file in bare.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(MergeError, match="has no tokenizer"):
        route(bare, TEXTS)


def test_plot_draws_a_panel_for_each_text(experts, tmp_path):
    folder = composed(tmp_path / "out", experts(3))
    routings = route(folder, TEXTS)
    plot(routings, tmp_path / "both.png")
    plot(routings[1:], tmp_path / "one.png")
    both, one = (Image.open(tmp_path / name) for name in ("both.png", "one.png"))
    assert both.format == "PNG" and both.height > one.height and both.width > one.width
    routings[1].experts = (routings[1].experts + 1) % 3
    plot(routings[1:], tmp_path / "other.png")
    result = [np.asarray(Image.open(tmp_path / name).convert("RGB")) for name in ("one.png", "other.png")]
    assert result[0].shape == result[1].shape and (result[0] != result[1]).any()  # other experts, other colours


def test_plot_escapes_special_characters(tmp_path):
    routing = Routing(
        "$x_1$ costs $5 \\frac",
        ["▁$x", "Ġ$", "\\frac", "ĊĊ"],
        ["layer 0"],
        np.zeros((1, 4, 1), int),
        np.ones((1, 4, 1)),
        ["a"],
    )
    plot([routing], tmp_path / "signs.png")
    assert Image.open(tmp_path / "signs.png").format == "PNG"
