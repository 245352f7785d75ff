"""MoeSumm: one summariser for many domains, with a main expert and dataset-aware deputies (Chen et al. 2024)."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.pipelines import PIPELINE_REGISTRY

from .configuration_moesumm import MoeSummConfig
from .data_moesumm import DataCollatorForMoeSumm, TemperatureSampler
from .modeling_moesumm import (
    MoeSummCausalLMOutput,
    MoeSummForCausalLM,
    MoeSummForConditionalGeneration,
    MoeSummModel,
    MoeSummModelOutput,
    MoeSummPreTrainedModel,
    MoeSummSeq2SeqLMOutput,
    MoeSummSeq2SeqModelOutput,
)
from .pipeline_moe_summarization import MoeSummarizationPipeline
from .prompts_moesumm import format_prompt

try:
    from run_tools.loading import register_pipeline
except ImportError:  # this package alone
    register_pipeline = PIPELINE_REGISTRY.register_pipeline

AutoConfig.register(MoeSummConfig.model_type, MoeSummConfig)
AutoModel.register(MoeSummConfig, MoeSummModel)
AutoModelForSeq2SeqLM.register(MoeSummConfig, MoeSummForConditionalGeneration)
AutoModelForCausalLM.register(MoeSummConfig, MoeSummForCausalLM)
register_pipeline(
    "moe-summarization",
    pipeline_class=MoeSummarizationPipeline,
    pt_model=(AutoModelForSeq2SeqLM, AutoModelForCausalLM),
    type="text",
)

__all__ = [
    "DataCollatorForMoeSumm", "MoeSummCausalLMOutput", "MoeSummConfig", "MoeSummForCausalLM",
    "MoeSummForConditionalGeneration", "MoeSummModel", "MoeSummModelOutput", "MoeSummPreTrainedModel",
    "MoeSummSeq2SeqLMOutput", "MoeSummSeq2SeqModelOutput", "MoeSummarizationPipeline", "TemperatureSampler", "format_prompt",
]  # fmt: skip
