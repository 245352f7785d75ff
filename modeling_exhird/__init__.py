"""ExHiRD: keyphrase generation, present and absent, without repeats."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.pipelines import PIPELINE_REGISTRY

from .configuration_exhird import ExhirdConfig
from .data_exhird import DataCollatorForKeyphraseGeneration, tokenize_documents
from .exclusion_exhird import ExclusionLogitsProcessor
from .modeling_exhird import ExhirdEncoder, ExhirdForKeyphraseGeneration, ExhirdPreTrainedModel
from .pipeline_keyphrase_generation import KeyphraseGenerationPipeline
from .prompts_exhird import DataCollatorForPrompts, tokenize_prompts
from .tokenization_exhird import ExhirdTokenizer

try:
    from run_tools.loading import register_pipeline
except ImportError:  # this package alone
    register_pipeline = PIPELINE_REGISTRY.register_pipeline

AutoConfig.register(ExhirdConfig.model_type, ExhirdConfig)
AutoModel.register(ExhirdConfig, ExhirdEncoder)
AutoModelForSeq2SeqLM.register(ExhirdConfig, ExhirdForKeyphraseGeneration)
AutoTokenizer.register(ExhirdConfig, fast_tokenizer_class=ExhirdTokenizer)
register_pipeline(
    "keyphrase-generation",
    pipeline_class=KeyphraseGenerationPipeline,
    pt_model=(AutoModelForSeq2SeqLM, AutoModelForCausalLM),
    type="text",
)

__all__ = [
    "DataCollatorForKeyphraseGeneration", "DataCollatorForPrompts", "ExclusionLogitsProcessor", "ExhirdConfig", "ExhirdEncoder",
    "ExhirdForKeyphraseGeneration", "ExhirdPreTrainedModel", "ExhirdTokenizer", "KeyphraseGenerationPipeline", "tokenize_documents",
    "tokenize_prompts",
]  # fmt: skip
