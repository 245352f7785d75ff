"""Tiny LM-Lexicon models, the dense models that they are compared with, and a batch with prompts, answers and padding."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from modeling_lexicon import LexiconConfig, LexiconForCausalLM

POLICIES = ("token", "sequence_soft", "sequence_hard", "domain")
E = 4
# dense families, and the options with which ours has their attention
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama with biases": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"qkv_bias": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"qk_norm": True}),
}
each_policy = pytest.mark.parametrize("policy", POLICIES)
each_row_policy = pytest.mark.parametrize("policy", POLICIES[1:])
each_family = pytest.mark.parametrize("family", FAMILIES)
each_implementation = pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])

# Weights large enough that experts, routes and texts differ visibly.
SIZES = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def tiny_lexicon(kind=LexiconForCausalLM, seed=0, policy="token", **options):
    """A new model in eval mode, always the same weights; the domain policy has its gate unless it says otherwise."""
    torch.manual_seed(seed)
    options = {**SIZES, "routing_policy": policy, "domain_gate": True, **options}
    return randomise_biases(kind(LexiconConfig(**options)).eval())


def tiny_dense(seed=0, family="llama", **options):
    torch.manual_seed(seed)
    config, kind, own = FAMILIES[family]
    return randomise_biases(kind(config(**{**SIZES, "rms_norm_eps": 1e-6, "head_dim": 8, **own, **options})).eval())


def randomise_biases(model):
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(p)
    return model


def put_experts(model, denses):
    """Expert e of each layer from dense model e, and what is not routed from the first."""
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, p in denses[0].named_parameters():
            if ".mlp." not in name:
                own[name].copy_(p)
        for layer, module in enumerate(model.routed_modules()):
            for e, mlp in enumerate(dense.model.layers[layer].mlp for dense in denses):
                module.experts.gate_up_proj[e] = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
                module.experts.down_proj[e] = mlp.down_proj.weight
    return model


def dense_domains(family="llama"):
    """E dense models that differ in their MLPs alone."""
    denses = [tiny_dense(seed, family) for seed in range(E)]
    for dense in denses[1:]:
        own = {name: p for name, p in dense.state_dict().items() if ".mlp." in name}
        dense.load_state_dict({**denses[0].state_dict(), **own})
    return denses


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="session")
def batch():
    """Three rows: prompts of 4, 6 and 2 tokens, answers of 5, 3 and 4, padding on the right."""
    torch.manual_seed(7)
    ids = torch.randint(3, SIZES["vocab_size"], (3, 9))
    mask = torch.ones_like(ids)
    mask[2, 6:] = 0
    labels = ids.clone()
    for row, prompt in enumerate((4, 6, 2)):
        labels[row, :prompt] = -100
    labels[mask == 0] = -100
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask, "labels": labels}


@pytest.fixture(scope="session")
def prompts(batch):
    """The batch without its labels."""
    return {name: batch[name] for name in ("input_ids", "attention_mask")}
