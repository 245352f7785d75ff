"""Mixture-of-experts models for keyphrases, summaries and definitions, for transformers.

`import lexperts` makes every model class and pipeline known to transformers' Auto classes and to `pipeline()`.
It costs nothing by itself: the registration runs when transformers is imported, or now if it already is.
"""

from run_tools.versions import __version__

from .registration import register_with_transformers

register_with_transformers()

__all__ = ["__version__"]
