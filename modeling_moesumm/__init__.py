"""MoeSumm: one summariser for many domains, with a main expert and dataset-aware deputies (Chen et al. 2024)."""

from transformers import AutoConfig, AutoModelForSeq2SeqLM

from .configuration_moesumm import MoeSummConfig
from .modeling_moesumm import MoeSummForConditionalGeneration, MoeSummPreTrainedModel
from .outputs_moesumm import MoeSummOutput

AutoConfig.register(MoeSummConfig.model_type, MoeSummConfig)
AutoModelForSeq2SeqLM.register(MoeSummConfig, MoeSummForConditionalGeneration)

__all__ = ["MoeSummConfig", "MoeSummForConditionalGeneration", "MoeSummOutput", "MoeSummPreTrainedModel"]
