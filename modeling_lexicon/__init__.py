"""LM-Lexicon: definition modeling by Llama decoders whose MLPs, or any linear layers, are routed experts."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.pipelines import PIPELINE_REGISTRY

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
from .pipeline_lexicon import DefinitionModelingPipeline

AutoConfig.register(LexiconConfig.model_type, LexiconConfig)
AutoModel.register(LexiconConfig, LexiconModel)
AutoModelForCausalLM.register(LexiconConfig, LexiconForCausalLM)
AutoModelForSequenceClassification.register(LexiconConfig, LexiconForSequenceClassification)
PIPELINE_REGISTRY.register_pipeline(
    "definition-modeling", pipeline_class=DefinitionModelingPipeline, pt_model=AutoModelForCausalLM, type="text"
)

__all__ = [
    "DefinitionCollator",
    "DefinitionModelingPipeline",
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
