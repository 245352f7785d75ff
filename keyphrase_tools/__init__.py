"""Keyphrase extraction: words, labels, decoding, the pipeline, metrics. Importing it registers its models and its pipeline.

Other submodules are imported on first use: `keyphrase_tools.metrics.keyphrase_f1(...)`.
"""

from importlib import import_module
from pkgutil import iter_modules

from transformers import AutoModelForTokenClassification

import modeling_hypernet  # noqa: F401
import modeling_seke  # noqa: F401  (so that one import is enough to open a checkpoint)
from run_tools.loading import register_pipeline
from run_tools.versions import __version__ as __version__

from .pipeline_keyphrase_extraction import KeyphraseExtractionPipeline

TASK = "keyphrase-extraction"
register_pipeline(TASK, pipeline_class=KeyphraseExtractionPipeline, pt_model=AutoModelForTokenClassification)
del KeyphraseExtractionPipeline._registered_impl  # by which transformers would save its code with each model

__all__ = ["KeyphraseExtractionPipeline"]

SUBMODULES = frozenset(module.name for module in iter_modules(__path__))


def __getattr__(name: str):
    if name in SUBMODULES:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *SUBMODULES})
