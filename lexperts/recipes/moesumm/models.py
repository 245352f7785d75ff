"""Summarisers of both kinds: an encoder with a decoder, or a decoder alone, by the backbone's configuration."""

from modeling_moesumm.configuration_moesumm import DECODERS, MoeSummConfig
from run_tools.model_loading import open_config
from run_tools.model_options import describe_load_errors


def is_decoder(config) -> bool:
    """Whether a configuration is that of a decoder, or of a MoeSumm over one."""
    return config.model_type in DECODERS or (
        config.model_type == MoeSummConfig.model_type and not config.is_encoder_decoder
    )


def auto_class(option: str, name_or_path: str):
    """The auto class of a summariser, which `option` names: `AutoModelForCausalLM` for a decoder, else
    `AutoModelForSeq2SeqLM`. Raises a `UserError` for a model that cannot be opened.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    with describe_load_errors(option, name_or_path):
        config = open_config(name_or_path)
    return AutoModelForCausalLM if is_decoder(config) else AutoModelForSeq2SeqLM
