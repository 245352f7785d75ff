"""Tiny LM-Lexicon models, the dense Llamas that they are compared with, and a batch with prompts, answers and padding."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from modeling_lexicon import LexiconConfig, LexiconForCausalLM

POLICIES = ("token", "sequence_soft", "sequence_hard", "domain")
ALL_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LAYER_CHOICES = {
    "mlp": {"router_layers": "mlp"},
    "mlp of one layer": {"router_layers": "mlp", "router_layers_index": [1]},
    "two linears": {"router_layers": ["q_proj", "up_proj"]},
    "all linears": {"router_layers": ALL_LINEARS},
    "all linears of one layer": {"router_layers": ALL_LINEARS, "router_layers_index": [0]},
    "attention and mlp": {"router_layers": ["mlp", "o_proj"]},
    "linears with biases": {"router_layers": ["v_proj", "down_proj"], "attention_bias": True, "mlp_bias": True},
}
each_policy = pytest.mark.parametrize("policy", POLICIES)
each_layers = pytest.mark.parametrize("layers", LAYER_CHOICES)
each_of_few_layers = pytest.mark.parametrize("layers", ["mlp", "all linears of one layer", "attention and mlp"])

# Weights large enough that experts, routes and texts differ visibly.
SIZES = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def tiny_lexicon(kind=LexiconForCausalLM, seed=0, layers="mlp", policy="token", **options):
    """A new model in eval mode, always the same weights; the domain policy has its gate unless it says otherwise."""
    torch.manual_seed(seed)
    options = {**SIZES, "routing_policy": policy, "domain_gate": True, **LAYER_CHOICES[layers], **options}
    return randomise_biases(kind(LexiconConfig(**options)).eval())


def tiny_llama(seed=0, **options):
    torch.manual_seed(seed)
    return randomise_biases(LlamaForCausalLM(LlamaConfig(**{**SIZES, **options})).eval())


def randomise_biases(model):
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(p)
    return model


def put_experts(model, denses):
    """Expert e of each routed module from dense Llama e, and what is not routed from the first."""
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, p in denses[0].named_parameters():
            if name in own:
                own[name].copy_(p)
        for (layer, name), module in zip(model.config.routed_modules(), model.routed_modules(), strict=True):
            for e, dense in enumerate(denses):
                block = dense.model.layers[layer]
                if name == "mlp":
                    module.experts.gate_up_proj[e] = torch.cat([block.mlp.gate_proj.weight, block.mlp.up_proj.weight])
                    module.experts.down_proj[e] = block.mlp.down_proj.weight
                    continue
                linear = getattr(block.self_attn, name, None) or getattr(block.mlp, name)
                module.experts.weight[e] = linear.weight
                if linear.bias is not None:
                    module.experts.bias[e] = linear.bias
    return model


def biases(layers):
    """What of a choice of layers a dense Llama has too."""
    return {name: value for name, value in LAYER_CHOICES[layers].items() if name.endswith("bias")}


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
