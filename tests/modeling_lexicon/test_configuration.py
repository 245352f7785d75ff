"""LexiconConfig: accepted and refused values."""

import pytest
from transformers import AutoConfig, LlamaConfig, MixtralConfig

from modeling_lexicon import LexiconConfig, LexiconForCausalLM
from tests.modeling_lexicon.conftest import SIZES


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok=3 exceeds num_local_experts=2"),
        ({"num_local_experts": 0, "num_experts_per_tok": 0}, "num_local_experts=0"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok=0"),
        ({"routing_policy": "sequence-hard"}, "routing_policy='sequence-hard'.*'sequence_hard'"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"qkv_bias": True, "attention_bias": True}, "qkv_bias=True and attention_bias=True"),
        ({"router_aux_loss_coef": -0.1}, "router_aux_loss_coef=-0.1"),
        ({"expert_names": ["a", "b"]}, r"\['a', 'b'\].*num_local_experts=4"),
        ({"centroid_size": 0}, "centroid_size=0"),
        ({"sliding_window": 16}, "sliding_window=16"),
        ({"expert_rank": 33}, "expert_rank=33 exceeds that of the matrices, 32"),
        ({"expert_rank": 0}, "expert_rank=0"),
        ({"router_layers": ["q_proj", "up_proj"]}, r"router_layers=\['q_proj', 'up_proj'\]"),
        ({"router_layers_index": [1]}, r"router_layers_index=\[1\]"),
    ],
)
def test_a_value_out_of_range_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        LexiconConfig(**{**SIZES, **options})


def test_a_value_of_the_wrong_type_is_refused():
    with pytest.raises(Exception, match="num_local_experts"):
        LexiconConfig(num_local_experts="four")


def test_defaults_are_top_two_of_four():
    config = LexiconConfig(router_layers=["mlp"], router_layers_index=None)  # as older checkpoints have them
    assert (config.num_local_experts, config.num_experts_per_tok, config.routing_policy) == (4, 2, "token")
    assert config.num_experts == 4 and LexiconConfig(num_experts=8).num_local_experts == 8
    assert config.router_aux_loss_coef == 0 and not config.output_router_logits and not config.domain_gate


def test_a_configuration_survives_saving(tmp_path):
    config = LexiconConfig(
        **SIZES,
        num_local_experts=3,
        routing_policy="domain",
        domain_gate=True,
        expert_names=["law", "medicine", "sports"],
        centroid_size=5,
        embedder="some/embedder",
        rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    )  # fmt: skip
    kept = config.to_dict()
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is LexiconConfig
    assert {**again.to_dict(), "_name_or_path": ""} == kept


def test_a_value_set_afterwards_is_checked_when_the_model_is_built():
    config = LexiconConfig(**SIZES)
    config.num_experts_per_tok = 5
    with pytest.raises(ValueError, match="num_experts_per_tok=5 exceeds"):
        LexiconForCausalLM(config)


def test_a_dense_models_configuration_is_refused_and_mixtrals_is_not(tmp_path):
    LlamaConfig(**SIZES).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model_type='llama'.*Merge"):
        LexiconConfig.from_pretrained(tmp_path)
    MixtralConfig(**SIZES, num_local_experts=3).save_pretrained(tmp_path)
    assert LexiconConfig.from_pretrained(tmp_path).num_local_experts == 3
