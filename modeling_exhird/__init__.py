"""ExHiRD: keyphrase generation, present and absent, without repeats."""

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.pipelines import PIPELINE_REGISTRY

from .base_exhird import ExhirdPreTrainedModel
from .configuration_exhird import ExhirdConfig
from .data_exhird import DataCollatorForKeyphraseGeneration, tokenize_documents
from .modeling_exhird import ExhirdEncoder, ExhirdForKeyphraseGeneration
from .pipeline_keyphrase_generation import KeyphraseGenerationPipeline
from .tokenization_exhird import ExhirdTokenizer

try:
    from run_tools.pipelines import register_pipeline
except ImportError:  # this package alone
    register_pipeline = PIPELINE_REGISTRY.register_pipeline

AutoConfig.register(ExhirdConfig.model_type, ExhirdConfig)
AutoModel.register(ExhirdConfig, ExhirdEncoder)
AutoModelForSeq2SeqLM.register(ExhirdConfig, ExhirdForKeyphraseGeneration)
AutoTokenizer.register(ExhirdConfig, fast_tokenizer_class=ExhirdTokenizer)
register_pipeline(
    "keyphrase-generation", pipeline_class=KeyphraseGenerationPipeline, pt_model=AutoModelForSeq2SeqLM, type="text"
)

__all__ = [
    "DataCollatorForKeyphraseGeneration", "ExhirdConfig", "ExhirdEncoder", "ExhirdForKeyphraseGeneration",
    "ExhirdPreTrainedModel", "ExhirdTokenizer", "KeyphraseGenerationPipeline", "tokenize_documents",
]  # fmt: skip
