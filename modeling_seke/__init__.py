"""SEKE: keyphrase extraction with a sparse mixture of experts and a BiLSTM on any encoder (Martinc et al. 2025)."""

from transformers import AutoConfig, AutoModel, AutoModelForTokenClassification

from .configuration_seke import SekeConfig
from .modeling_seke import (
    SekeForTokenClassification,
    SekeModel,
    SekeModelOutput,
    SekePreTrainedModel,
    SekeTokenClassifierOutput,
)

AutoConfig.register(SekeConfig.model_type, SekeConfig)
AutoModel.register(SekeConfig, SekeModel)
AutoModelForTokenClassification.register(SekeConfig, SekeForTokenClassification)

__all__ = [
    "SekeConfig", "SekeForTokenClassification", "SekeModel", "SekeModelOutput", "SekePreTrainedModel",
    "SekeTokenClassifierOutput",
]  # fmt: skip
