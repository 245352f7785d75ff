"""The hypernetwork: titles and questions write the weights of the layer that reads the text."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.pipelines import PIPELINE_REGISTRY

from .configuration_hypernet import HypernetConfig
from .data_hypernet import HypernetCollator, StatesDataset, encode_pairs
from .modeling_hypernet import (
    HypernetForQuestionAnswering,
    HypernetForSequenceClassification,
    HypernetForTokenClassification,
    HypernetModel,
    HypernetPreTrainedModel,
)
from .pipeline_extractive_qa import ExtractiveQAPipeline
from .questions_hypernet import encode_questions

AutoConfig.register(HypernetConfig.model_type, HypernetConfig)
AutoModel.register(HypernetConfig, HypernetModel)
AutoModelForTokenClassification.register(HypernetConfig, HypernetForTokenClassification)
AutoModelForSequenceClassification.register(HypernetConfig, HypernetForSequenceClassification)
AutoModelForQuestionAnswering.register(HypernetConfig, HypernetForQuestionAnswering)
PIPELINE_REGISTRY.register_pipeline(
    "extractive-qa", pipeline_class=ExtractiveQAPipeline, pt_model=AutoModelForQuestionAnswering, type="text"
)

__all__ = [
    "ExtractiveQAPipeline",
    "HypernetCollator",
    "HypernetConfig",
    "HypernetForQuestionAnswering",
    "HypernetForSequenceClassification",
    "HypernetForTokenClassification",
    "HypernetModel",
    "HypernetPreTrainedModel",
    "StatesDataset",
    "encode_pairs",
    "encode_questions",
]
