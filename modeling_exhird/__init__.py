"""ExHiRD: keyphrase generation, present and absent, without repeats."""

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer

from .base_exhird import ExhirdPreTrainedModel
from .configuration_exhird import ExhirdConfig
from .data_exhird import DataCollatorForKeyphraseGeneration, tokenize_documents
from .modeling_exhird import ExhirdEncoder, ExhirdForKeyphraseGeneration
from .pipeline_base import register_pipeline
from .pipeline_keyphrase_generation import KeyphraseGenerationPipeline
from .tokenization_exhird import ExhirdTokenizer

AutoConfig.register(ExhirdConfig.model_type, ExhirdConfig)
AutoModel.register(ExhirdConfig, ExhirdEncoder)
AutoModelForSeq2SeqLM.register(ExhirdConfig, ExhirdForKeyphraseGeneration)
AutoTokenizer.register(ExhirdConfig, fast_tokenizer_class=ExhirdTokenizer)
register_pipeline("keyphrase-generation", KeyphraseGenerationPipeline, AutoModelForSeq2SeqLM)

__all__ = [
    "DataCollatorForKeyphraseGeneration", "ExhirdConfig", "ExhirdEncoder", "ExhirdForKeyphraseGeneration",
    "ExhirdPreTrainedModel", "ExhirdTokenizer", "KeyphraseGenerationPipeline", "tokenize_documents",
]  # fmt: skip
