"""Experts of low rank: equal to the same experts in full, in values and gradients, saved and opened."""

import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from modeling_lexicon import LexiconForCausalLM

from .conftest import each_implementation, each_policy, tiny_lexicon


def low_rank(policy="token", **options):
    return tiny_lexicon(policy=policy, expert_rank=8, **options)


def full_weights(model):
    """The state of the model with the same experts as whole MLPs, W + B A; differentiable."""
    state = {name: p for name, p in model.named_parameters() if ".experts." not in name}
    for layer, module in enumerate(model.routed_modules()):
        e, prefix = module.experts, f"model.layers.{layer}.mlp.experts"
        gate, up = e.shared_gate_up.chunk(2)
        gate_a, up_a = e.gate_up_a.chunk(2, dim=1)
        state[f"{prefix}.gate_up_proj"] = torch.cat([gate + e.gate_b @ gate_a, up + e.up_b @ up_a], dim=1)
        state[f"{prefix}.down_proj"] = e.shared_down + e.down_b @ e.down_a
    return state


@each_policy
@each_implementation
def test_logits_and_gradients_are_those_of_the_full_experts(policy, implementation, batch):
    model, full = low_rank(policy), tiny_lexicon(policy=policy)
    for each in (model, full):
        each.set_experts_implementation(implementation)
        each.train()
    found = model(**batch)
    grads = torch.autograd.grad(found.loss, list(model.parameters()), allow_unused=True)
    expected = torch.func.functional_call(full, full_weights(model), kwargs=batch)
    assert_close(found.logits, expected.logits, atol=1e-5, rtol=1e-5)
    wanted = torch.autograd.grad(expected.loss, list(model.parameters()), allow_unused=True)
    for (name, _), one, other in zip(model.named_parameters(), grads, wanted, strict=True):
        if one is None or other is None:
            assert one is None and (other is None or not other.abs().max() > 0), name
        else:
            assert_close(one, other, atol=2e-5, rtol=1e-4, msg=name)


def test_saved_by_the_names_of_the_factors_and_opened_again(prompts, tmp_path):
    model = low_rank()
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    short = {name.split("block_sparse_moe.")[1] for name in state if "layers.0.block_sparse_moe" in name}
    parts = {f"experts.{e}.w{i}.{half}.weight" for e in range(4) for i in (1, 2, 3) for half in "AB"}
    assert short == {"gate.weight", *(f"base.w{i}.weight" for i in (1, 2, 3)), *parts}
    opened = LexiconForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(opened(**prompts).logits, model(**prompts).logits)


def test_what_a_checkpoint_lacks_is_drawn(tmp_path):
    model = low_rank()
    model.save_pretrained(tmp_path, state_dict={"model.norm.weight": model.model.norm.weight})
    for name, p in LexiconForCausalLM.from_pretrained(tmp_path).named_parameters():
        assert "norm" in name or 0.15 < p.std() < 0.25, name
