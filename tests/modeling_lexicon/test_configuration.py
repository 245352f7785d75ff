"""LexiconConfig: accepted and refused values, and error messages."""

import pytest
from transformers import AutoConfig, LlamaConfig, MixtralConfig

from modeling_lexicon import LexiconConfig, LexiconForCausalLM
from tests.modeling_lexicon.conftest import ALL_LINEARS, SIZES, tiny_lexicon


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"num_local_experts": 2, "num_experts_per_tok": 3},
            r"num_experts_per_tok=3 exceeds num_local_experts=2.*num_experts_per_tok=2",
        ),
        ({"num_local_experts": 0, "num_experts_per_tok": 0}, r"num_local_experts=0 .*at least 1"),
        ({"num_experts_per_tok": 0}, r"num_experts_per_tok=0 .*at least 1"),
        ({"routing_policy": "sequence-hard"}, r"routing_policy='sequence-hard'.*Did you mean 'sequence_hard'"),
        ({"routing_policy": "xyz"}, r"Use one of 'token', 'sequence_soft', 'sequence_hard', 'domain'"),
        ({"router_layers": "q_porj"}, r"'q_porj'.*Did you mean 'q_proj'"),
        ({"router_layers": []}, r"router_layers is empty.*'mlp'"),
        ({"router_layers": ["q_proj", "q_proj"]}, r"\['q_proj', 'q_proj'\]"),
        ({"router_layers": ["mlp", "up_proj"]}, r"router_layers=.*up_proj"),
        ({"mlp_bias": True}, r"mlp_bias=True.*router_layers=\['gate_proj', 'up_proj', 'down_proj'\]"),
        ({"router_layers_index": [2]}, r"router_layers_index has 2, but.*num_hidden_layers=2"),
        ({"router_layers_index": [-1]}, r"router_layers_index has -1"),
        ({"router_layers_index": [1, 1]}, r"router_layers_index=\[1, 1\]"),
        ({"router_layers_index": []}, r"router_layers_index is empty.*Use None"),
        ({"router_aux_loss_coef": -0.1}, r"router_aux_loss_coef=-0.1 .*at least 0"),
        ({"expert_names": ["a", "b"]}, r"expert_names has 2 names for num_local_experts=4"),
        ({"centroid_size": 0}, r"centroid_size=0"),
        ({"sliding_window": 16}, r"sliding_window=16.*sliding_window=None"),
    ],
)
def test_a_value_out_of_range_is_refused_with_a_fix(options, message):
    with pytest.raises(ValueError, match=message):
        LexiconConfig(**{**SIZES, **options})


def test_a_value_of_the_wrong_type_is_refused():
    with pytest.raises(Exception, match="num_local_experts"):
        LexiconConfig(num_local_experts="four")


def test_defaults_are_top_two_of_four_whole_mlps():
    config = LexiconConfig()
    assert (config.num_local_experts, config.num_experts_per_tok, config.routing_policy) == (4, 2, "token")
    assert config.router_layers == ["mlp"] and config.router_layers_index is None
    assert config.num_experts == 4 and LexiconConfig(num_experts=8).num_local_experts == 8
    assert config.router_aux_loss_coef == 0 and not config.output_router_logits and not config.domain_gate


def test_router_layers_are_always_stored_as_a_list():
    config = LexiconConfig(router_layers="q_proj")
    assert config.router_layers == ["q_proj"]
    config.router_layers = "mlp"
    assert config.router_layers == ["mlp"] and config.to_dict()["router_layers"] == ["mlp"]


def test_routed_modules_come_in_the_order_in_which_they_run():
    config = LexiconConfig(**SIZES, router_layers=ALL_LINEARS[::-1], router_layers_index=[1, 0])
    assert config.routed_modules() == [(layer, name) for layer in (0, 1) for name in ALL_LINEARS]
    ran = []
    model = tiny_lexicon(layers="all linears")
    for number, module in enumerate(model.routed_modules()):
        module.register_forward_hook(lambda *_, number=number: ran.append(number))
    model(model.dummy_inputs["input_ids"])
    assert ran == list(range(14))


def test_a_configuration_survives_saving(tmp_path):
    config = LexiconConfig(
        **SIZES,
        num_local_experts=3,
        router_layers=["q_proj", "up_proj"],
        router_layers_index=[1],
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
