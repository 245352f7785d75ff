"""Mixture-of-experts models for keyphrases, summaries and definitions, for transformers.

`import lexperts` makes every model class and pipeline known to transformers' Auto classes and to `pipeline()`.
It costs nothing by itself: the registration runs when transformers is imported, or now if it already is.
"""

from importlib.metadata import PackageNotFoundError, version

from .registration import register_with_transformers

try:
    __version__ = version("lexperts")
except PackageNotFoundError:  # a plain copy of the files
    __version__ = "unknown"

register_with_transformers()

__all__ = ["__version__"]
