"""What every model class keeps, for all routing policies."""

import pytest
import torch
import torch.nn.functional as F
from accelerate import cpu_offload
from torch.testing import assert_close
from transformers import MixtralConfig, MixtralForCausalLM

from modeling_lexicon import LexiconCausalLMOutput, LexiconForCausalLM, LexiconModel
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

# --- equal to what is known -----------------------------------------------------------------------------------------


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


# --- nothing else matters -------------------------------------------------------------------------------------------


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
    a, b = (model(**each, output_router_logits=True) for each in (batch, other))
    for x, y in zip(a.router_logits, b.router_logits, strict=True):
        assert_close(x, y, rtol=0, atol=1e-5)
    prompt = ~answer & batch["attention_mask"].bool()
    assert_close(a.logits[prompt], b.logits[prompt], rtol=0, atol=1e-5)
    # negative control: without labels the whole text is the prompt
    del batch, other["labels"]
    a = model(**other, output_router_logits=True)
    assert not torch.allclose(a.router_logits[-1], b.router_logits[-1], atol=1e-4)


def test_a_masked_label_after_the_answer_is_no_prompt(batch):
    """A token behind the answer has read it, whatever its label."""
    model = tiny_lexicon(policy="sequence_soft")
    masked = {**batch, "labels": batch["labels"].clone()}
    masked["labels"][:, 8] = -100
    with torch.no_grad():
        a, b = (model(**each, output_router_logits=True).router_logits[-1] for each in (batch, masked))
    assert_close(a, b, rtol=0, atol=1e-6)


@each_row_policy
def test_a_decision_reads_what_the_prompt_mask_says(policy, prompts):
    model = tiny_lexicon(policy=policy)
    half = torch.zeros_like(prompts["input_ids"])
    half[:, :3] = 1
    with torch.no_grad():
        a = model(**prompts, prompt_mask=half, output_router_logits=True)
        b = model(prompts["input_ids"][:, :3], output_router_logits=True)
        c = model(**prompts, output_router_logits=True)
    assert_close(a.router_logits[0], b.router_logits[0], rtol=0, atol=1e-5)
    assert not torch.allclose(a.router_logits[0], c.router_logits[0], atol=1e-3)


# --- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy, k", [("token", 1), *((policy, 2) for policy in POLICIES)])
def test_every_gate_learns(policy, k, batch):
    model = tiny_lexicon(policy=policy, num_experts_per_tok=k).train()
    model(**batch).loss.backward()
    for name, gradient in gradients(model).items():
        if ".gate." in name:
            assert gradient.abs().max() > 0, name


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
    gate = torch.optim.SGD(model.model.layers[0].mlp.gate.parameters(), lr=1.0)
    for _ in range(60):
        gate.zero_grad()
        model(**batch, domain_ids=ids).loss.backward()
        gate.step()
    expert_index = model(**batch, output_router_logits=True).expert_index
    assert all(torch.equal(index, ids) for index in expert_index)


@pytest.mark.parametrize("policy, depth", [("sequence_hard", 1), ("domain", 2)])
@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_hard_choices_gate_gets_the_gradient_of_its_experts_weight(policy, depth, row, batch):
    """dL/dW = dL/dw dp/dW, with w = 1 the weight of the row's expert in every module that has it, p its probability.

    An expert's output is linear in its last matrix V, so that dL/dw is the sum of <dL/dV, V> over these modules.
    """
    model = tiny_lexicon(policy=policy, num_hidden_layers=depth).train()
    one = {name: value[row : row + 1] for name, value in batch.items()}
    output = model(**one, output_router_logits=True)
    output.loss.backward(retain_graph=True)
    matrices = [module.experts.down_proj for module in model.routed_modules()]
    of_weight = sum((p.grad * p).sum() for p in matrices).detach()
    gate = model.model.layers[0].mlp.gate.weight
    (expected,) = torch.autograd.grad(of_weight * output.router_logits[0].softmax(-1).max(), gate)
    assert_close(gate.grad, expected, rtol=1e-4, atol=1e-7)
    assert gate.grad.abs().max() > 1e-5 and len(matrices) == depth


# --- loss and outputs -----------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("policy", ["token", "sequence_hard"])
def test_domain_ids_in_the_data_do_not_disturb_other_policies(policy, batch):
    model = tiny_lexicon(policy=policy, router_aux_loss_coef=0.5)
    assert torch.equal(model(**batch, domain_ids=torch.tensor([3, 0, 1])).loss, model(**batch).loss)


@each_policy
def test_the_output_holds_routes_layer_by_layer(policy, batch, prompts):
    model, M = tiny_lexicon(policy=policy), 2
    output = model(**prompts, output_router_logits=True, output_hidden_states=True)
    assert isinstance(output, LexiconCausalLMOutput) and len(output.hidden_states) == 3
    assert len(output.expert_index) == M and len(output.router_logits) == (1 if policy == "domain" else M)
    for logits in output.router_logits:
        assert logits.shape == ((3, 9, E) if policy == "token" else (3, E))
    for index in output.expert_index:
        assert index.shape == ((3, 9, 2) if policy == "token" else (3,))
    if policy == "token":
        assert torch.equal(output.expert_index[0], output.router_logits[0].topk(2).indices)
    else:
        assert torch.equal(output.expert_index[0], output.router_logits[0].argmax(-1))
    silent = model(**prompts)
    assert silent.router_logits is silent.expert_index is silent.aux_loss is None
    assert torch.equal(silent.logits, output.logits)
    base = model.model(**prompts, output_router_logits=True)
    assert isinstance(model.model, LexiconModel) and len(base.expert_index) == M
    assert_close(model.lm_head(base.last_hidden_state), output.logits)
    for norm in (False, True):
        attentive = tiny_lexicon(policy=policy, qk_norm=norm, attn_implementation="eager", output_router_logits=True)
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
    assert bool(learns.router_logits) == gate and learns.aux_loss is None
    if gate:
        assert [logits.shape for logits in learns.router_logits] == [(3, E)]
        decided = model(**prompts)
        assert len(decided.router_logits) == 1 and decided.aux_loss is not None


def mask_4d(mask):
    """(B, T) -> (B, 1, T, T): what a token may read, as callers that mask by themselves pass it."""
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


def test_logits_to_keep_scores_the_last_tokens_alone(prompts):
    model = tiny_lexicon()
    assert_close(model(**prompts, logits_to_keep=2).logits, model(**prompts).logits[:, -2:])


def test_tied_embeddings_stay_tied(tmp_path, prompts):
    model = tiny_lexicon(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    again = LexiconForCausalLM.from_pretrained(tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert_close(again(**prompts).logits, model(**prompts).logits, rtol=0, atol=1e-6)


# --- what goes wrong ------------------------------------------------------------------------------------------------

IDS = {"policy": "domain"}


@pytest.mark.parametrize(
    "options, given, message",
    [
        ({"policy": "domain", "domain_gate": False}, {}, r"domain_ids.*assign_domains\(texts, embedder\)"),
        (IDS, {"domain_ids": torch.tensor([0, 4, 1])}, "domain_ids has 4, but with 4 experts"),
        (IDS, {"domain_ids": torch.tensor([0, -1, 1])}, "domain_ids has -1"),
        (IDS, {"domain_ids": torch.tensor([0, 1])}, r"domain_ids has the shape \(2,\)"),
        ({}, {"input_ids": None}, "Neither input_ids nor inputs_embeds"),
    ],
)  # fmt: skip
def test_missing_and_wrong_inputs_are_named(options, given, message, prompts):
    with pytest.raises(ValueError, match=message):
        tiny_lexicon(**options)(**{**prompts, **given})


# --- experts that are switched off ----------------------------------------------------------------------------------

NAMES = ["law", "music", "sport", "art"]


@each_policy
@pytest.mark.parametrize("rank", [None, 8])
def test_the_model_is_that_of_the_active_experts_alone(policy, rank, prompts, tmp_path):
    model = tiny_lexicon(policy=policy, expert_names=NAMES, expert_rank=rank)
    before = model(**prompts, output_router_logits=True)
    off = int(before.expert_index[0].flatten()[0])  # an expert that is used
    kept = torch.tensor([e for e in range(E) if e != off])
    small = tiny_lexicon(policy=policy, num_local_experts=3, expert_rank=rank)
    stacked = [
        name for name in model.state_dict() if (".experts." in name and "shared" not in name) or ".gate." in name
    ]
    small.load_state_dict({name: w[kept] if name in stacked else w for name, w in model.state_dict().items()})
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


def test_domain_ids_of_an_expert_that_is_off_are_an_error(prompts):
    model = tiny_lexicon(policy="domain", expert_names=NAMES)
    model.set_active_experts(["law", "art"])
    model(**prompts, domain_ids=torch.tensor([0, 3, 0]))
    with pytest.raises(ValueError, match=r"domain_ids has one of \[1, 2\]"):
        model(**prompts, domain_ids=torch.tensor([0, 2, 0]))


@pytest.mark.parametrize("experts", [["laws"], [4], [-1], [True], [1.0], []], ids=str)
def test_unknown_experts_are_named(experts):
    with pytest.raises(ValueError, match=r"law, music, sport, art, or indices from 0 to 3"):
        tiny_lexicon(expert_names=NAMES).set_active_experts(experts)
