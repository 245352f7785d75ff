"""Keyphrases: words, labels, decoding, the extraction pipeline and the metrics. Importing it registers its models as well."""

from transformers import AutoModelForTokenClassification
from transformers.pipelines import PIPELINE_REGISTRY

import modeling_hypernet  # noqa: F401
import modeling_seke  # noqa: F401  (so that one import is enough to open a checkpoint)

from .pipeline_keyphrase_extraction import KeyphraseExtractionPipeline

PIPELINE_REGISTRY.register_pipeline(
    "keyphrase-extraction",
    pipeline_class=KeyphraseExtractionPipeline,
    pt_model=AutoModelForTokenClassification,
    type="text",
)

__all__ = ["KeyphraseExtractionPipeline"]
