"""MoeSumm against numbers from its authors' code, where that and the paper agree: logits, losses, gradients, choices.

`tests/vectors/moesumm_model.json` holds weights and outputs in float64. Every g_p is 1 there, so that the gate's place
does not matter: all `gate_position`s must give the same. In the case `margin` all deputies but those of the decoder's
last layer are silent, so that both `margin_main` must.
"""

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from transformers import BartConfig

from modeling_moesumm import MoeSummConfig, MoeSummForConditionalGeneration
from modeling_moesumm.configuration_moesumm import GATE_POSITIONS, MARGIN_MAIN
from modeling_moesumm.layers_moesumm import margin_losses, token_losses

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "moesumm_model.json").read_text())
CASES = {case["name"]: case for case in VECTORS["cases"]}
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
DEPUTIES = {"up": "experts.up_proj", "up_bias": "experts.up_bias", "down": "experts.down_proj"}
DEPUTIES |= {"selectors": "selectors.weight"}


tensor = partial(torch.tensor, dtype=torch.float64)


def name_of(weight: str) -> str:
    """A weight of the vectors in our model."""
    layer, found, last = weight.partition(".deputies.")
    return f"backbone.model.{layer}.deputies.{DEPUTIES[last]}" if found else f"backbone.model.{weight}"


def in_our_layout(weight: str, value: torch.Tensor) -> torch.Tensor:
    return value.mT if weight.endswith("deputies.down") else value


def model_of(case, **options):
    sizes = case["sizes"]
    bart = BartConfig(
        vocab_size=sizes["V"], d_model=sizes["d"], encoder_layers=sizes["enc"], decoder_layers=sizes["dec"],
        encoder_attention_heads=sizes["heads"], decoder_attention_heads=sizes["heads"], encoder_ffn_dim=sizes["ffn"],
        decoder_ffn_dim=sizes["ffn"], max_position_embeddings=sizes["pos"], scale_embedding=sizes["scale"],
        dropout=0.0,
    )  # fmt: skip
    options = {"margin_loss_coef": case.get("margin_loss_coef", 0), **options}
    names = [f"set {i}" for i in range(sizes["E"])]
    config = MoeSummConfig(
        text_config=bart, datasets=names, num_deputies=sizes["N"], deputy_intermediate_size=sizes["h"], **options
    )
    model = MoeSummForConditionalGeneration(config).double().eval()
    state = model.state_dict()
    with torch.no_grad():
        for weight, entry in case["weights"].items():
            value = tensor(entry["values"]).view(entry["shape"])
            if weight == "final_logits_bias":
                state["backbone.final_logits_bias"].copy_(value[None])
            else:
                state[name_of(weight)].copy_(in_our_layout(weight, value))
    return model


def inputs_of(case):
    return {name: torch.tensor(values) for name, values in case["inputs"].items()}


@pytest.mark.parametrize("gate_position", GATE_POSITIONS)
@pytest.mark.parametrize("margin_main", MARGIN_MAIN)
@pytest.mark.parametrize("name", ["one_deputy", "routed", "margin"])
def test_a_model_gives_the_authors_numbers(name, margin_main, gate_position):
    case = CASES[name]
    model = model_of(case, margin_main=margin_main, gate_position=gate_position)
    inputs, expected = inputs_of(case), case["expected"]
    output = model(**inputs, output_router_indices=True)
    assert_close(output.encoder_last_hidden_state, tensor(expected["encoder_last_hidden_state"]), **CLOSE)
    assert_close(output.logits, tensor(expected["logits"]), **CLOSE)
    for part in ("encoder", "decoder"):
        assert torch.equal(torch.stack(output[f"{part}_expert_indices"]), torch.tensor(expected[f"{part}_deputies"]))
        assert all((gate == 1).all() for gate in output[f"{part}_expert_weights"])
    for loss in ("generation_loss", "margin_loss", "loss"):
        if loss in expected:
            assert math.isclose(output[loss], expected[loss], rel_tol=1e-9)
    assert ("margin_loss" in expected) == (output.margin_loss is not None) == (name == "margin")
    output.loss.backward()
    for weight, norm in expected["gradient_norms"].items():
        gradient = model.get_parameter(name_of(weight)).grad
        assert math.isclose(gradient.norm(), norm, rel_tol=1e-8, abs_tol=1e-10), weight
    for weight, entry in expected["gradients"].items():
        values = entry["values"] if isinstance(entry, dict) else entry
        gradient = in_our_layout(weight, model.get_parameter(name_of(weight)).grad)
        assert_close(gradient, tensor(values).view_as(gradient), **CLOSE, msg=weight)
    alone = model(**{name: x for name, x in inputs.items() if name != "dataset_ids"})
    assert_close(alone.logits, tensor(expected["main_expert_only_logits"]), **CLOSE)
    assert not torch.allclose(alone.logits, output.logits, atol=1e-2)  # negative control
    if "main_logits" in expected:
        assert_close(alone.logits, tensor(expected["main_logits"]), **CLOSE)


def test_the_first_layers_choice_is_the_authors():
    case = CASES["choice"]
    model, inputs = model_of(case), inputs_of(case)
    inputs["decoder_input_ids"] = torch.full((case["sizes"]["B"], 1), 2)
    output, expected = model(**inputs, output_router_indices=True), case["expected"]
    real = inputs["attention_mask"].bool()
    found, wanted = output.encoder_expert_indices[0], torch.tensor(expected["encoder_deputies_first_layer"])
    assert torch.equal(found[real], wanted[real])
    gates = tensor(expected["encoder_gates_first_layer"])
    assert_close(output.encoder_expert_weights[0].double()[real], gates[real], rtol=1e-6, atol=1e-6)
    other = model(
        **{**inputs, "dataset_ids": (inputs["dataset_ids"] + 1) % case["sizes"]["E"]}, output_router_indices=True
    )
    assert not torch.equal(other.encoder_expert_indices[0][real], wanted[real])  # negative control


def test_the_losses_of_given_scores_are_the_authors():
    case = CASES["formula"]
    full, main = (tensor(case[name]).requires_grad_() for name in ("logits_full", "logits_main"))
    labels, expected = torch.tensor(case["labels"]).flatten(), case["expected"]
    real = labels != -100
    nll, main_nll = (token_losses(x.flatten(0, 1), labels) for x in (full, main))
    assert_close(((-nll).exp() - (-main_nll).exp()) * real, tensor(expected["margins"]).flatten(), **CLOSE)
    generation, margin = nll.sum() / real.sum(), margin_losses(nll, main_nll).sum() / real.sum()
    assert math.isclose(generation, expected["generation_loss"], rel_tol=1e-9)
    assert math.isclose(margin, expected["margin_loss"], rel_tol=1e-9)
    loss = generation + 10 * margin
    assert math.isclose(loss, expected["loss_with_coef_10"], rel_tol=1e-9)
    loss.backward()
    for logits, norm in ((full, "logits_full"), (main, "logits_main")):
        assert math.isclose(logits.grad.norm(), expected["gradient_norms"][norm], rel_tol=1e-9)
