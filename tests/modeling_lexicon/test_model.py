"""What every model class keeps, for all routing policies."""

import re

import pytest
import torch
import torch.nn.functional as F
from accelerate import cpu_offload
from torch.testing import assert_close
from transformers import MixtralConfig, MixtralForCausalLM

from modeling_lexicon import LexiconCausalLMOutput, LexiconConfig
from modeling_lexicon.routing_lexicon import load_balancing_loss
from tests.modeling_lexicon.conftest import (
    FAMILIES,
    POLICIES,
    SIZES,
    E,
    dense_domains,
    each_family,
    each_implementation,
    each_policy,
    each_row_policy,
    gradients,
    put_experts,
    tiny_lexicon,
)


@each_family
@pytest.mark.parametrize(
    "policy, k", [*(("token", k) for k in (1, 2, 3, 4)), *((policy, 2) for policy in POLICIES[1:])]
)
def test_experts_that_are_the_same_are_the_dense_model(policy, k, family, prompts):
    dense, *others = dense_domains(family)
    model = put_experts(tiny_lexicon(policy=policy, num_experts_per_tok=k, **FAMILIES[family][2]), [dense] * E)
    with torch.no_grad():
        expected = dense(**prompts).logits
        assert_close(model(**prompts).logits, expected, rtol=0, atol=1e-5)
        # negative control: experts that differ
        put_experts(model, [*others, others[0]])
        assert not torch.allclose(model(**prompts).logits, expected, atol=1e-2)


def mixtral_and_lexicon():
    torch.manual_seed(0)
    mixtral = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=E)).eval()
    names = ("rms_norm_eps", "rope_parameters", "router_aux_loss_coef")
    model = tiny_lexicon(seed=1, **{name: getattr(mixtral.config, name) for name in names})
    model.load_state_dict(mixtral.state_dict())
    return mixtral, model


@each_implementation
def test_token_routing_of_mlps_is_mixtral_with_all_gradients(implementation, batch):
    mixtral, model = mixtral_and_lexicon()
    for each in (mixtral, model):
        each.set_experts_implementation(implementation)
        each(**batch, output_router_logits=True).loss.backward()
    with torch.no_grad():
        found, expected = (each(**batch, output_router_logits=True) for each in (model, mixtral))
        assert_close(found.logits, expected.logits, rtol=0, atol=1e-5)
        assert_close(found.loss, expected.loss)
        assert_close(found.aux_loss, expected.aux_loss)
        model.config.router_aux_loss_coef = LexiconConfig().router_aux_loss_coef
        assert_close(model(**batch).loss, mixtral(**batch).loss)  # by default neither adds the balance
        for name, p in mixtral.named_parameters():
            assert_close(model.get_parameter(name).grad, p.grad, rtol=1e-4, atol=1e-6, msg=name)
        model.model.layers[0].mlp.gate.weight.mul_(-1)  # negative control: other routes
        assert not torch.allclose(model(**batch).logits, expected.logits, atol=1e-3)


@each_family
def test_a_domains_rows_are_its_dense_model_alone_and_in_mixed_batches(family, prompts):
    denses = dense_domains(family)
    model = put_experts(tiny_lexicon(policy="domain", domain_gate=False, **FAMILIES[family][2]), denses)
    with torch.no_grad():
        expected = torch.stack([dense(**prompts).logits for dense in denses])  # (E, B, T, V)
        for domain in range(E):
            found = model(**prompts, domain_ids=torch.full((3,), domain)).logits
            assert_close(found, expected[domain], rtol=0, atol=1e-5)
        mixed = model(**prompts, domain_ids=torch.tensor([2, 0, 2])).logits
        assert_close(mixed, expected[torch.tensor([2, 0, 2]), torch.arange(3)], rtol=0, atol=1e-5)
        assert not torch.allclose(expected[2], expected[0], atol=1e-2)


@each_policy
def test_a_later_token_changes_no_earlier_logits(policy, prompts):
    model, ids = tiny_lexicon(policy=policy), prompts["input_ids"][:2]
    changed = torch.cat([ids[:, :-1], (ids[:, -1:] + 5) % 48], dim=1)
    prompt_mask = torch.ones_like(ids)
    prompt_mask[:, 4:] = 0
    with torch.no_grad():
        first, second = (model(x, prompt_mask=prompt_mask).logits for x in (ids, changed))
        assert_close(first[:, :-1], second[:, :-1], rtol=0, atol=1e-5)
        assert not torch.allclose(first[:, -1], second[:, -1], atol=1e-2)
        if policy == "sequence_soft":  # negative control: a mask that holds the answer lets it be read
            first, second = (model(x, prompt_mask=torch.ones_like(x)).logits for x in (ids, changed))
            assert not torch.allclose(first[:, :-1], second[:, :-1], atol=1e-4)


@each_row_policy
def test_a_decision_in_training_reads_nothing_of_the_gold_answer(policy, batch):
    model = tiny_lexicon(policy=policy).train()
    answer = batch["labels"] != -100
    other = {**batch, "input_ids": batch["input_ids"].masked_fill(answer, 9)}
    other["labels"] = batch["labels"].masked_fill(answer, 9)
    masked = {**batch, "labels": batch["labels"].index_fill(1, torch.tensor([8]), -100)}  # it has read the answer, too
    a, b, c = (model(**each, output_router_logits=True) for each in (batch, other, masked))
    assert_close(a.router_logits, b.router_logits, rtol=0, atol=1e-5)
    assert_close(a.router_logits, c.router_logits, rtol=0, atol=1e-5)
    prompt = ~answer & batch["attention_mask"].bool()
    assert_close(a.logits[prompt], b.logits[prompt], rtol=0, atol=1e-5)
    # negative control: without labels the whole text is the prompt
    del batch, other["labels"]
    a = model(**other, output_router_logits=True)
    assert not torch.allclose(a.router_logits[-1], b.router_logits[-1], atol=1e-4)


def test_with_domain_ids_and_labels_every_parameter_gets_a_gradient_and_the_gate_learns_the_ids(batch):
    model, ids = tiny_lexicon(policy="domain").train(), torch.tensor([2, 0, 3])
    output = model(**batch, domain_ids=ids, output_router_logits=True)
    output.loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    fixed = tiny_lexicon(policy="domain", domain_gate=False)
    fixed.load_state_dict(model.state_dict(), strict=False)
    alone = fixed(**batch, domain_ids=ids)
    rows = (batch["labels"][:, 1:] != -100).sum(1)
    missed = F.cross_entropy(output.router_logits[0], ids, reduction="none")
    assert_close(output.loss, alone.loss + (missed * rows).sum() / rows.sum())
    alone.loss.backward()  # the gate's own lesson is its alone
    for name, gradient in gradients(fixed).items():
        assert_close(model.get_parameter(name).grad, gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("policy, depth", [("sequence_hard", 1), ("domain", 2)])
def test_a_hard_choices_gate_gets_the_gradient_of_its_experts_weight(policy, depth, batch):
    """dL/dW = dL/dw dp/dW, with w = 1 the weight of the row's expert in every module that has it, p its probability.

    An expert's output is linear in its last matrix V, so that dL/dw is the sum of <dL/dV, V> over these modules.
    """
    model = tiny_lexicon(policy=policy, num_hidden_layers=depth).train()
    one = {name: value[:1] for name, value in batch.items()}
    output = model(**one, output_router_logits=True)
    output.loss.backward(retain_graph=True)
    matrices = [module.experts.down_proj for module in model.routed_modules()]
    of_weight = sum((p.grad * p).sum() for p in matrices).detach()
    gate = model.model.layers[0].mlp.gate.weight
    (expected,) = torch.autograd.grad(of_weight * output.router_logits[0].softmax(-1).max(), gate)
    assert_close(gate.grad, expected, rtol=1e-4, atol=1e-7)
    assert gate.grad.abs().max() > 1e-5 and len(matrices) == depth


@each_policy
def test_the_loss_is_cross_entropy_plus_the_balance_of_the_gates(policy, batch):
    model = tiny_lexicon(policy=policy)
    plain = model(**batch, output_router_logits=True)
    shifted = batch["labels"][:, 1:].flatten()
    assert_close(plain.loss, F.cross_entropy(plain.logits[:, :-1].flatten(0, 1), shifted))
    assert_close(plain.aux_loss, load_balancing_loss(model.config, plain.router_logits, batch["attention_mask"]))
    owing = tiny_lexicon(policy=policy, router_aux_loss_coef=0.1)(**batch)  # without asking for the router's outputs
    assert_close(owing.loss, plain.loss + 0.1 * plain.aux_loss)
    assert owing.aux_loss is owing.router_logits is owing.expert_index is None
    if policy != "domain":  # ids in the data do not disturb it
        assert torch.equal(model(**batch, domain_ids=torch.tensor([3, 0, 1])).loss, plain.loss)


@each_policy
def test_the_output_holds_routes_layer_by_layer(policy, batch, prompts):
    model, M, tokens = tiny_lexicon(policy=policy), 2, (3, 9) if policy == "token" else (3,)
    output = model(**prompts, output_router_logits=True, output_hidden_states=True)
    assert isinstance(output, LexiconCausalLMOutput) and len(output.hidden_states) == 3
    assert len(output.expert_index) == M and len(output.router_logits) == (1 if policy == "domain" else M)
    assert {logits.shape for logits in output.router_logits} == {(*tokens, E)}
    best = [logits.topk(2).indices if policy == "token" else logits.argmax(-1) for logits in output.router_logits]
    assert all(map(torch.equal, output.expert_index, best))
    silent = model(**prompts)
    assert silent.router_logits is silent.expert_index is silent.aux_loss is None
    assert torch.equal(silent.logits, output.logits)
    assert_close(model(**prompts, logits_to_keep=2).logits, output.logits[:, -2:])
    assert len(model.model(**prompts, output_router_logits=True).expert_index) == M
    attentive = tiny_lexicon(policy=policy, qk_norm=True, attn_implementation="eager", output_router_logits=True)
    output = attentive(**batch, output_attentions=True)
    assert len(output.attentions) == 2 and output.attentions[0].shape == (3, 4, 9, 9) and output.router_logits


@pytest.mark.parametrize("gate", [False, True])
def test_given_domains_give_the_experts_and_no_router_logits(gate, batch, prompts):
    """By the configuration's flag: no gate runs, and its outputs are missing. In training the gate learns."""
    model, ids = tiny_lexicon(policy="domain", domain_gate=gate, output_router_logits=True), torch.tensor([2, 0, 3])
    output = model(**prompts, domain_ids=ids)
    assert output.router_logits == () and output.aux_loss is None
    assert len(output.expert_index) == 2 and all(torch.equal(index, ids) for index in output.expert_index)
    learns = model(**batch, domain_ids=ids)
    assert [logits.shape for logits in learns.router_logits] == gate * [(3, E)] and learns.aux_loss is None


def mask_4d(mask):
    """(B, T) -> (B, 1, T, T): what a token may read."""
    T = mask.shape[1]
    return (torch.ones(T, T).tril().bool() & mask.bool()[:, None, :])[:, None] | torch.eye(T).bool()


@each_policy
def test_a_4d_attention_mask_needs_the_prompt_or_the_ids(policy, prompts):
    model, ids, mask = tiny_lexicon(policy=policy), prompts["input_ids"], prompts["attention_mask"]
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits[mask.bool()]
        if policy != "token":
            with pytest.raises(ValueError, match=r"attention_mask=\(3, 1, 9, 9\)"):
                model(ids, attention_mask=mask_4d(mask))
        found = model(ids, attention_mask=mask_4d(mask), prompt_mask=mask).logits[mask.bool()]
        assert_close(found, expected, rtol=0, atol=1e-5)
        if policy == "domain":
            chosen = model(**prompts, output_router_logits=True).expert_index[0]
            found = model(ids, attention_mask=mask_4d(mask), domain_ids=chosen).logits[mask.bool()]
            assert_close(found, expected, rtol=0, atol=1e-5)


NAMES, KNOWN = ["law", "music", "sport", "art"], "law, music, sport, art, or indices from 0 to 3"


@pytest.mark.parametrize(
    "options, given, message",
    [
        ({"domain_gate": False}, {}, r"domain_ids.*assign_domains\(texts, embedder\)"),
        ({}, {"domain_ids": [0, 4, 1]}, "domain_ids has 4, but with 4 experts"),
        ({}, {"domain_ids": [0, -1, 1]}, "domain_ids has -1"),
        ({}, {"domain_ids": [0, 1]}, r"domain_ids has the shape \(2,\)"),
        ({}, {"domain_ids": [0, 2, 0], "active": ["law", "art"]}, r"domain_ids has one of \[1, 2\]"),
        *(({}, {"active": experts}, KNOWN) for experts in (["laws"], [4], [-1], [True], [])),
        ({"policy": "token"}, {"input_ids": None}, "Neither input_ids nor inputs_embeds"),
    ],
)
def test_missing_and_wrong_inputs_are_named(options, given, message, prompts):
    model = tiny_lexicon(**{"policy": "domain", "expert_names": NAMES, **options})
    given = {name: torch.tensor(x) if name == "domain_ids" else x for name, x in given.items()}
    with pytest.raises(ValueError, match=message):
        model.set_active_experts(given.pop("active", None))
        model(**{**prompts, **given})


@each_policy
@pytest.mark.parametrize("rank", [None, 8])
def test_the_model_is_that_of_the_active_experts_alone(policy, rank, prompts, tmp_path):
    model = tiny_lexicon(policy=policy, expert_names=NAMES, expert_rank=rank)
    before = model(**prompts, output_router_logits=True)
    off = int(before.expert_index[0].flatten()[0])  # an expert that is used
    kept = torch.tensor([e for e in range(E) if e != off])
    small = tiny_lexicon(policy=policy, num_local_experts=3, expert_rank=rank)
    stacked = re.compile(r"\.gate\.|\.experts\.(?!shared)")
    small.load_state_dict({name: w[kept] if stacked.search(name) else w for name, w in model.state_dict().items()})
    model.set_active_experts([NAMES[kept[0]], *kept[1:].tolist()])
    found = model(**prompts, output_router_logits=True)
    assert_close(found.logits, small(**prompts).logits)
    assert (found.logits - before.logits).abs().max() > 1e-3
    weighted = policy in ("token", "sequence_soft")
    assert weighted or all(torch.isin(index, kept).all() for index in found.expert_index)
    model.save_pretrained(tmp_path)
    model.set_active_experts(None)
    for each in (model, type(model).from_pretrained(tmp_path)):  # nothing of it is saved
        assert torch.equal(each(**prompts).logits, before.logits)


def test_one_expert_that_is_left_gets_all_tokens_also_of_an_offloaded_model(prompts):
    one = tiny_lexicon(num_local_experts=1, num_experts_per_tok=1)
    state = tiny_lexicon().state_dict()
    one.load_state_dict({n: w[2:3] if ".experts." in n or ".gate." in n else w for n, w in state.items()})
    for model in (tiny_lexicon(), cpu_offload(tiny_lexicon(), execution_device="cpu")):
        model.set_active_experts([2])
        with torch.no_grad():
            assert_close(model(**prompts).logits, one(**prompts).logits)
