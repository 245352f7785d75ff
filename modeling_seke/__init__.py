"""SEKE: keyphrase extraction by sparse experts and a recurrent encoder on any encoder (Martinc et al. 2025)."""

from transformers import AutoConfig, AutoModelForTokenClassification

from .configuration_seke import SekeConfig
from .modeling_seke import SekeForTokenClassification, SekePreTrainedModel, SekeTokenClassifierOutput

AutoConfig.register(SekeConfig.model_type, SekeConfig)
AutoModelForTokenClassification.register(SekeConfig, SekeForTokenClassification)

__all__ = ["SekeConfig", "SekeForTokenClassification", "SekePreTrainedModel", "SekeTokenClassifierOutput"]
