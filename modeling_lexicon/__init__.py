"""LM-Lexicon: definition modeling by Llama decoders whose MLPs, or any linear layers, are routed experts."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from .configuration_lexicon import LexiconConfig
from .data_lexicon import DataCollatorForDefinitions, format_prompt, tokenize_definitions
from .modeling_lexicon import (
    LexiconCausalLMOutput,
    LexiconForCausalLM,
    LexiconForSequenceClassification,
    LexiconModel,
    LexiconModelOutput,
    LexiconPreTrainedModel,
    LexiconSequenceClassifierOutput,
)
from .pipeline_base import register_pipeline
from .pipeline_definition_modeling import DefinitionModelingPipeline

AutoConfig.register(LexiconConfig.model_type, LexiconConfig)
AutoModel.register(LexiconConfig, LexiconModel)
AutoModelForCausalLM.register(LexiconConfig, LexiconForCausalLM)
AutoModelForSequenceClassification.register(LexiconConfig, LexiconForSequenceClassification)
register_pipeline("definition-modeling", DefinitionModelingPipeline, AutoModelForCausalLM)

__all__ = [
    "DataCollatorForDefinitions", "DefinitionModelingPipeline", "LexiconCausalLMOutput", "LexiconConfig",
    "LexiconForCausalLM", "LexiconForSequenceClassification", "LexiconModel", "LexiconModelOutput",
    "LexiconPreTrainedModel", "LexiconSequenceClassifierOutput", "format_prompt", "tokenize_definitions",
]  # fmt: skip
