"""Mixture-of-experts models for keyphrases, summaries and definitions, for transformers.

`import lexperts` makes every model class and pipeline known to transformers' Auto classes and to `pipeline()`.
It costs nothing by itself: the registration runs when transformers is imported, or now if it already is.
"""

from run_tools.versions import package_version

from .registration import register_with_transformers

__version__ = package_version()
register_with_transformers()

__all__ = ["__version__"]
