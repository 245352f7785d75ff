"""SekeConfig: defaults, validation and error messages."""

import warnings

import pytest
from transformers import BertConfig

from modeling_seke import SekeConfig

REFUSED = [
    ({"num_experts": 2, "num_experts_per_tok": 3}, r"num_experts_per_tok=3 .* num_experts=2"),
    ({"num_experts": 0}, "num_experts=0.*use_moe=False"),
    ({"num_experts_per_tok": 0}, "num_experts_per_tok=0"),
    ({"num_experts": "four"}, "num_experts"),
    ({"rnn_type": "rwkv"}, "rnn_type='rwkv'.*'lstm', 'gru'"),
    ({"rnn_num_layers": 0}, "rnn_num_layers=0"),
    ({"expert_intermediate_size": 0}, "expert_intermediate_size=0"),
    ({"expert_init": "zeros"}, "expert_init='zeros'.*'uniform'"),
    ({"expert_init": "identity", "expert_intermediate_size": 100}, "expert_init='identity'.*1536"),
    ({"router_aux_loss_coef": -0.1}, "router_aux_loss_coef=-0.1"),
    ({"label_smoothing": 1.0}, "label_smoothing=1.0"),
    ({"rnn_dropout": 1.5}, "rnn_dropout=1.5"),
    ({"classifier_dropout": 1.5}, "classifier_dropout=1.5"),
    ({"keyphrase_temperature": 0.0}, "keyphrase_temperature=0.0"),
    ({"keyphrase_temperature": float("nan")}, "keyphrase_temperature=nan"),
    ({"keyphrase_threshold": 1.5}, "keyphrase_threshold=1.5"),
    ({"styles": ["a", "a"]}, r"styles=\['a', 'a'\]"),
]


@pytest.mark.parametrize("options, message", REFUSED)
def test_a_value_out_of_range_is_named(options, message):
    with pytest.raises(Exception, match=message):
        SekeConfig(**options)


def test_defaults_are_those_of_the_paper():
    config = SekeConfig(text_config=BertConfig(hidden_size=48, num_attention_heads=4))
    assert (config.num_experts, config.num_experts_per_tok, config.expert_intermediate_size) == (4, 2, 4 * 48)
    assert config.expert_init == "identity"
    assert SekeConfig(expert_intermediate_size=100).expert_init == "uniform"
    assert config.id2label == {0: "O", 1: "B-KEY", 2: "I-KEY"} and config.num_labels == 3
    assert config.router_aux_loss_coef == config.router_z_loss_coef == config.label_smoothing == 0


def test_other_labels_replace_the_default_ones():
    assert SekeConfig(num_labels=5).num_labels == 5
    assert SekeConfig(id2label={0: "O", 1: "B", 2: "I", 3: "B-X"}).label2id == {"O": 0, "B": 1, "I": 2, "B-X": 3}
    assert SekeConfig(label2id={"O": 0, "B": 1, "I": 2}).id2label == {0: "O", 1: "B", 2: "I"}


def test_one_expert_per_token_warns_of_the_straight_through_router():
    with pytest.warns(UserWarning, match="straight-through.*router_aux_loss_coef"):
        SekeConfig(num_experts_per_tok=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SekeConfig(num_experts_per_tok=2)
        SekeConfig(num_experts_per_tok=1, use_moe=False)
