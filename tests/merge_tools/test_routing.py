"""`route` gives the model's own choices: its routers' experts and weights, token by token."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from merge_tools import Routing, compose, route
from run_tools.errors import UserError

from .conftest import open_model, recipe_of

TEXTS = ["the owl is a bird of the night", "saw"]


def run(folder, text, **options):
    """The outputs of a mixture for a text, and the inputs of the experts of each layer, (weights, index)."""
    model, seen = open_model(folder), []
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(lambda _, args: seen.append(args[2:0:-1]))
    with torch.no_grad():
        ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids
        return model(ids, output_router_logits=True), seen


@pytest.mark.parametrize("options", [{}, {"experts_per_token": 1}, {"format": "lexicon", "experts_per_token": 3}])
def test_tokens_are_routed_as_in_the_model(experts, tmp_path, options):
    compose(recipe_of(experts(3), **options), tmp_path / "out")
    for text, routing in zip(TEXTS, route(tmp_path / "out", TEXTS), strict=True):
        assert (routing.text, routing.tokens[0], routing.routers) == (text, "<s>", ["layer 0", "layer 1"])
        assert routing.names == ["birds", "ships", "tools"]
        for r, (weights, index) in enumerate(run(tmp_path / "out", text)[1]):
            order = weights.argsort(dim=-1, descending=True, stable=True)
            assert routing.experts[r].tolist() == index.gather(1, order).tolist()
            np.testing.assert_allclose(routing.weights[r], weights.float().gather(1, order), atol=1e-6)
    (tmp_path / "out" / "merge_record.json").unlink()
    assert route(tmp_path / "out", TEXTS)[0].names == ["expert 0", "expert 1", "expert 2"]


@pytest.mark.parametrize("policy, k", [("sequence_soft", 3), ("sequence_hard", 1)])
def test_a_sequence_is_routed_by_its_mean(experts, tmp_path, policy, k):
    compose(recipe_of(experts(3), routing_policy=policy), tmp_path / "out")
    (routing,) = route(tmp_path / "out", TEXTS[:1])
    for r, logits in enumerate(run(tmp_path / "out", TEXTS[0])[0].router_logits):
        top, index = logits[0].topk(k)
        assert routing.experts[r].tolist() == [index.tolist()] * len(routing.tokens)
        np.testing.assert_allclose(routing.weights[r, -1], top.softmax(-1), atol=1e-6)


def test_a_domain_is_named_or_selected_by_the_gate(experts, tmp_path):
    for gates in ("none", "random"):
        compose(recipe_of(experts(2), routing_policy="domain", gate_mode=gates), tmp_path / gates)
        for e, name in enumerate(("birds", "ships")):
            (routing,) = route(tmp_path / gates, TEXTS[:1], domain=name)
            assert routing.routers == ["all layers"] and (routing.experts == e).all()
            assert routing.load().tolist() == [[float(i == e) for i in range(2)]]
    (routing,) = route(tmp_path / "random", TEXTS[:1])
    assert (routing.experts == int(run(tmp_path / "random", TEXTS[0])[0].router_logits[0].argmax())).all()
    for options, message in ({}, "domain_ids"), ({"domain": "horses"}, "'horses'.* birds, ships"):
        with pytest.raises(UserError, match=message):
            route(tmp_path / "none", TEXTS, **options)


def test_load_is_the_share_of_weight_per_expert():
    experts = np.array([[[0, 1], [1, 2]], [[2, 0], [2, 0]]])
    weights = np.array([[[0.75, 0.25], [0.5, 0.5]], [[0.9, 0.1], [1.0, 0.0]]])
    routing = Routing("a b", ["a", "b"], ["layer 0", "layer 1"], experts, weights, ["x", "y", "z"])
    plain = json.loads(json.dumps(routing.to_dict()))
    assert plain["experts"] == experts.tolist() and plain["load"] == [[0.375, 0.375, 0.25], [0.05, 0.0, 0.95]]


def test_what_cannot_be_routed_is_refused(experts, tmp_path):
    compose(recipe_of(experts(2)), tmp_path / "out")
    for texts, options, message in (
        (["the owl", " "], {}, "' '"),
        (["x " * 100], {}, r"20\d tokens.* 128"),
        (TEXTS, {"domain": "birds"}, "token"),
    ):
        with pytest.raises(UserError, match=message):
            route(tmp_path / "out", texts, **options)
    with pytest.raises(UserError, match="'llama'"):
        route(experts(1)[0], TEXTS)
