"""Experts that are switched off: the model is that of the others, and the same as before when they are switched on."""

import pytest
import torch
from accelerate import cpu_offload
from torch.testing import assert_close

from .conftest import each_of_few_layers, each_policy, tiny_lexicon

NAMES = ["law", "music", "sport", "art"]


@each_policy
@each_of_few_layers
def test_the_model_is_that_of_the_active_experts_alone(policy, layers, prompts):
    model = tiny_lexicon(layers=layers, policy=policy, expert_names=NAMES)
    before = model(**prompts, output_router_logits=True)
    off = int(before.expert_index[0].flatten()[0])  # an expert that is used
    kept = torch.tensor([e for e in range(4) if e != off])
    small = tiny_lexicon(layers=layers, policy=policy, num_local_experts=3)
    state = {name: w[kept] if ".experts." in name or ".gate." in name else w for name, w in model.state_dict().items()}
    small.load_state_dict(state)
    model.set_active_experts([NAMES[kept[0]], *kept[1:].tolist()])
    found = model(**prompts, output_router_logits=True)
    assert_close(found.logits, small(**prompts).logits)
    assert (found.logits - before.logits).abs().max() > 1e-3
    weighted = policy in ("token", "sequence_soft")
    assert weighted or all(torch.isin(index, kept).all() for index in found.expert_index)
    model.set_active_experts(None)
    assert torch.equal(model(**prompts).logits, before.logits)


def test_one_expert_that_is_left_gets_all_tokens(prompts):
    model = tiny_lexicon(expert_names=NAMES)
    model.set_active_experts(["sport"])
    one = tiny_lexicon(num_local_experts=1, num_experts_per_tok=1)
    state = {name: w[2:3] if ".experts." in name or ".gate." in name else w for name, w in model.state_dict().items()}
    one.load_state_dict(state)
    assert_close(model(**prompts).logits, one(**prompts).logits)


def test_a_switch_is_not_saved(prompts, tmp_path):
    model = tiny_lexicon(expert_names=NAMES)
    before = model(**prompts).logits
    model.set_active_experts(["law"])
    model.save_pretrained(tmp_path)
    assert torch.equal(type(model).from_pretrained(tmp_path).eval()(**prompts).logits, before)


def test_domain_ids_of_an_expert_that_is_off_are_an_error(prompts):
    model = tiny_lexicon(policy="domain", expert_names=NAMES)
    model.set_active_experts(["law", "art"])
    model(**prompts, domain_ids=torch.tensor([0, 3, 0]))
    with pytest.raises(ValueError, match=r"not active, \[1, 2\].*set_active_experts\(None\)"):
        model(**prompts, domain_ids=torch.tensor([0, 2, 0]))


@pytest.mark.parametrize("experts", [["laws"], [4], [-1], [True], [1.0], []], ids=str)
def test_unknown_experts_are_named(experts):
    with pytest.raises(ValueError, match=r"law, music, sport, art, or indices from 0 to 3"):
        tiny_lexicon(expert_names=NAMES).set_active_experts(experts)


def test_an_offloaded_model_leaves_experts_out(prompts):
    model = tiny_lexicon()
    model.set_active_experts([0, 2])
    with torch.no_grad():
        expected = model(**prompts).logits
        offloaded = cpu_offload(tiny_lexicon(), execution_device="cpu")
        offloaded.set_active_experts([0, 2])
        torch.testing.assert_close(offloaded(**prompts).logits, expected)
