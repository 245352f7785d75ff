"""A hypernetwork on any encoder: a title or question generates the weights of the LSTM that encodes the text (Duan et al. 2021)."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.pipelines import PIPELINE_REGISTRY

from .base_hypernet import HypernetModel, HypernetPreTrainedModel
from .configuration_hypernet import HypernetConfig
from .data_hypernet import DataCollatorForTextPairs, add_states, tokenize_pairs, tokenize_questions
from .modeling_hypernet import (
    HypernetForQuestionAnswering,
    HypernetForSequenceClassification,
    HypernetForTokenClassification,
)
from .pipeline_extractive_qa import ExtractiveQAPipeline

try:
    from run_tools.loading import register_pipeline
except ImportError:  # this package alone
    register_pipeline = PIPELINE_REGISTRY.register_pipeline

AutoConfig.register(HypernetConfig.model_type, HypernetConfig)
AutoModel.register(HypernetConfig, HypernetModel)
AutoModelForTokenClassification.register(HypernetConfig, HypernetForTokenClassification)
AutoModelForSequenceClassification.register(HypernetConfig, HypernetForSequenceClassification)
AutoModelForQuestionAnswering.register(HypernetConfig, HypernetForQuestionAnswering)
register_pipeline(
    "extractive-qa", pipeline_class=ExtractiveQAPipeline, pt_model=AutoModelForQuestionAnswering, type="text"
)

__all__ = [
    "DataCollatorForTextPairs", "ExtractiveQAPipeline", "HypernetConfig", "HypernetForQuestionAnswering",
    "HypernetForSequenceClassification", "HypernetForTokenClassification", "HypernetModel", "HypernetPreTrainedModel",
    "add_states", "tokenize_pairs", "tokenize_questions",
]  # fmt: skip
