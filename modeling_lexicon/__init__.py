"""LM-Lexicon: definition modeling by Llama decoders whose MLPs are routed experts."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.pipelines import PIPELINE_REGISTRY

from .configuration_lexicon import LexiconConfig
from .data_lexicon import format_prompt, tokenize_definitions
from .modeling_lexicon import (
    LexiconCausalLMOutput,
    LexiconForCausalLM,
    LexiconForSequenceClassification,
    LexiconModel,
    LexiconModelOutput,
    LexiconPreTrainedModel,
)
from .pipeline_definition_modeling import DefinitionModelingPipeline

try:
    from run_tools.loading import register_pipeline
except ImportError:  # this package alone
    register_pipeline = PIPELINE_REGISTRY.register_pipeline

AutoConfig.register(LexiconConfig.model_type, LexiconConfig)
AutoModel.register(LexiconConfig, LexiconModel)
AutoModelForCausalLM.register(LexiconConfig, LexiconForCausalLM)
AutoModelForSequenceClassification.register(LexiconConfig, LexiconForSequenceClassification)
register_pipeline(
    "definition-modeling", pipeline_class=DefinitionModelingPipeline, pt_model=AutoModelForCausalLM, type="text"
)

__all__ = [
    "DefinitionModelingPipeline", "LexiconCausalLMOutput", "LexiconConfig",
    "LexiconForCausalLM", "LexiconForSequenceClassification", "LexiconModel", "LexiconModelOutput",
    "LexiconPreTrainedModel", "format_prompt", "tokenize_definitions",
]  # fmt: skip
