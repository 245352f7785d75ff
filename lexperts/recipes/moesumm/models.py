"""Summarisers of both kinds: an encoder with a decoder, or a decoder alone, by the backbone's configuration."""

from modeling_moesumm.configuration_moesumm import DECODERS, MoeSummConfig
from run_tools.errors import UserError
from run_tools.loading import describe_load_errors, open_config


def is_decoder(config) -> bool:
    """Whether a configuration is that of a decoder, or of a MoeSumm over one."""
    return config.model_type in DECODERS or (
        config.model_type == MoeSummConfig.model_type and not config.is_encoder_decoder
    )


def auto_class(option: str, name_or_path: str):
    """The auto class of a summariser, which `option` names: `AutoModelForCausalLM` for a decoder, else
    `AutoModelForSeq2SeqLM`. Raises an error for a model that cannot be opened, or writes no summaries.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    with describe_load_errors(option, name_or_path):
        config = open_config(name_or_path)
    if type(config).__module__.startswith("modeling_") and not isinstance(config, MoeSummConfig):
        raise UserError(
            f"{option} {name_or_path!r} is of the type {config.model_type!r}, which writes no summaries. Train one with `lexperts train "
            "moesumm`, or leave the option out."
        )
    return AutoModelForCausalLM if is_decoder(config) else AutoModelForSeq2SeqLM
