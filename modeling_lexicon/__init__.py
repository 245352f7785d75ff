"""LM-Lexicon: definition modeling by Llama decoders whose MLPs, or any linear layers, are routed experts."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from .configuration_lexicon import LexiconConfig
from .data_lexicon import DefinitionCollator, encode_rows, prompt, read_definitions
from .modeling_lexicon import (
    LexiconCausalLMOutput,
    LexiconForCausalLM,
    LexiconForSequenceClassification,
    LexiconModel,
    LexiconModelOutput,
    LexiconPreTrainedModel,
    LexiconSequenceClassifierOutput,
)

AutoConfig.register(LexiconConfig.model_type, LexiconConfig)
AutoModel.register(LexiconConfig, LexiconModel)
AutoModelForCausalLM.register(LexiconConfig, LexiconForCausalLM)
AutoModelForSequenceClassification.register(LexiconConfig, LexiconForSequenceClassification)

__all__ = [
    "DefinitionCollator",
    "LexiconCausalLMOutput",
    "LexiconConfig",
    "LexiconForCausalLM",
    "LexiconForSequenceClassification",
    "LexiconModel",
    "LexiconModelOutput",
    "LexiconPreTrainedModel",
    "LexiconSequenceClassifierOutput",
    "encode_rows",
    "prompt",
    "read_definitions",
]
