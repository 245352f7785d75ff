"""MoeSummConfig: what it accepts, what it refuses and its error messages."""

import json

import pytest
from transformers import AutoConfig, BartConfig, BertConfig

from modeling_moesumm import MoeSummConfig
from tests.modeling_moesumm.conftest import BACKBONES, backbone_config, each_backbone


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_deputies": 0}, r"num_deputies=0.*at least 1"),
        ({"deputy_intermediate_size": 0}, r"deputy_intermediate_size=0"),
        ({"margin_loss_coef": -1.0}, r"margin_loss_coef=-1.0"),
        ({"deputy_init_std": -0.1}, r"deputy_init_std=-0.1"),
        ({"datasets": []}, r"datasets is empty.*datasets=\['news'\]"),
        ({"datasets": ["news", "news"]}, r"'news' twice"),
        ({"datasets": ["news", " "]}, r"empty name"),
        ({"text_config": BertConfig()}, r"model_type='bert'"),
        ({"gate_position": "layer"}, "gate_position='layer'"),
        ({"margin_main": "models"}, "margin_main='models'.*Did you mean 'model'"),
        ({"label_smoothing": 1}, "label_smoothing=1"),
        ({"label_smoothing": -0.1}, "label_smoothing=-0.1"),
        ({"main_expert": False, "dataset_aware": True}, r"dataset_aware=True.*main_expert=True"),
        ({"main_expert": False, "margin_loss_coef": 1.0}, r"margin_loss_coef=1.0"),
        ({"main_expert": False, "deputy_intermediate_size": 8}, r"deputy_intermediate_size=8"),
    ],
)
def test_a_value_out_of_range_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MoeSummConfig(**options)


def test_a_value_of_the_wrong_type_is_refused():
    with pytest.raises(Exception, match="num_deputies"):
        MoeSummConfig(num_deputies="three")


def test_defaults_are_those_of_the_paper():
    config = MoeSummConfig(datasets=["cnn_dm", "pubmed", "wikihow"])
    assert config.text_config.model_type == "bart" and config.hidden_size == 1024
    assert (config.num_deputies, config.deputy_intermediate_size, config.margin_loss_coef) == (3, 512, 1.0)
    assert config.main_expert and config.dataset_aware and config.num_selectors == 3
    assert MoeSummConfig(datasets=["a", "b"], dataset_aware=False).num_selectors == 1


def test_flat_moe_is_one_word():
    config = MoeSummConfig(main_expert=False)
    assert (config.deputy_intermediate_size, config.margin_loss_coef, config.dataset_aware) == (None, 0.0, False)
    again = MoeSummConfig.from_dict(config.to_dict())
    assert again.to_dict() == config.to_dict() and not again.main_expert


@each_backbone
def test_sizes_and_special_tokens_are_the_backbones_and_are_kept_in_one_place(backbone, tmp_path):
    config = MoeSummConfig(text_config=backbone_config(backbone), datasets=["news"])
    for name in ("vocab_size", "d_model", "pad_token_id", "eos_token_id", "decoder_start_token_id", "decoder_layers"):
        assert getattr(config, name) == getattr(config.text_config, name)
    assert config.is_encoder_decoder and config.hidden_size == config.text_config.d_model
    config.pad_token_id = 3
    assert config.text_config.pad_token_id == 3
    kept = config.to_dict()
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is MoeSummConfig and type(again.text_config) is BACKBONES[backbone][0]
    assert again.pad_token_id == 3 and again.datasets == ["news"]
    assert {name: value for name, value in again.to_dict().items() if name in kept and name[0] != "_"} == {
        name: value for name, value in kept.items() if name[0] != "_"
    }


def test_the_way_of_computing_is_not_handed_down_to_the_backbone():
    config = MoeSummConfig(experts_implementation="dense")
    assert config._experts_implementation == "dense" and config.text_config._experts_implementation is None
    assert "dense" not in json.dumps(config.to_dict())  # as in transformers: of the moment, not of the checkpoint


def test_a_dictionary_without_a_type_is_a_bart():
    assert type(MoeSummConfig(text_config={"d_model": 32}).text_config) is BartConfig


def test_a_listed_pipeline_is_dropped_where_the_package_runs_itself():
    listed = {"moe-summarization": {"impl": "pipeline_x.X", "pt": [], "type": "text"}}
    config = MoeSummConfig.from_dict({"custom_pipelines": listed})
    assert not hasattr(config, "custom_pipelines")
