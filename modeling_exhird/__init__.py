"""ExHiRD: keyphrases generated one by one, present and absent, without repeats."""

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.pipelines import PIPELINE_REGISTRY

from .configuration_exhird import ExHirdConfig
from .data_exhird import ExHirdCollator
from .modeling_exhird import ExHirdEncoder, ExHirdForKeyphraseGeneration, ExHirdPreTrainedModel
from .pipeline_keyphrase_generation import KeyphraseGenerationPipeline
from .targets_exhird import encode
from .tokenization_exhird import ExHirdTokenizer

AutoConfig.register(ExHirdConfig.model_type, ExHirdConfig)
AutoModel.register(ExHirdConfig, ExHirdEncoder)
AutoModelForSeq2SeqLM.register(ExHirdConfig, ExHirdForKeyphraseGeneration)
AutoTokenizer.register(ExHirdConfig, fast_tokenizer_class=ExHirdTokenizer)
PIPELINE_REGISTRY.register_pipeline(
    "keyphrase-generation", pipeline_class=KeyphraseGenerationPipeline, pt_model=AutoModelForSeq2SeqLM, type="text"
)

__all__ = [
    "ExHirdCollator",
    "ExHirdConfig",
    "ExHirdEncoder",
    "ExHirdForKeyphraseGeneration",
    "ExHirdPreTrainedModel",
    "ExHirdTokenizer",
    "KeyphraseGenerationPipeline",
    "encode",
]
