"""MoeSumm: one summariser for many domains, with a main expert and dataset-aware deputies (Chen et al. 2024)."""

from transformers import AutoConfig, AutoModelForSeq2SeqLM

from .configuration_moesumm import MoeSummConfig
from .data_moesumm import MixedDatasetSampler, MixedSampling, MoeSummCollator
from .modeling_moesumm import MoeSummForConditionalGeneration, MoeSummPreTrainedModel
from .outputs_moesumm import MoeSummOutput
from .pipeline_moesumm import MoeSummarizationPipeline, enable_summarization_task, register

AutoConfig.register(MoeSummConfig.model_type, MoeSummConfig)
AutoModelForSeq2SeqLM.register(MoeSummConfig, MoeSummForConditionalGeneration)
register("moe-summarization", MoeSummarizationPipeline)

__all__ = [
    "MixedDatasetSampler",
    "MixedSampling",
    "MoeSummCollator",
    "MoeSummConfig",
    "MoeSummForConditionalGeneration",
]
__all__ += ["MoeSummOutput", "MoeSummPreTrainedModel", "MoeSummarizationPipeline", "enable_summarization_task"]
