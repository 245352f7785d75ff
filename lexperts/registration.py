"""Registers the models and pipelines as soon as transformers is imported, and not earlier: that takes two seconds, for which neither
`lexperts --help` nor a program that imports lexperts first should wait.
"""

import gc
import random
import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from typing import Any

PACKAGES = (
    "modeling_exhird", "modeling_hypernet", "modeling_lexicon", "modeling_moesumm", "modeling_seke", "keyphrase_tools",
)  # fmt: skip


def register_with_transformers() -> None:
    """Registers now if transformers is imported already, otherwise when it is imported."""
    if "transformers" in sys.modules:
        import_packages()
    elif not any(isinstance(finder, AfterTransformers) for finder in sys.meta_path):
        sys.meta_path.insert(0, AfterTransformers())


def import_packages() -> None:
    """Each package registers its own classes when it is imported."""
    numbers = random.getstate()  # rich, which scikit-learn's and our dependencies import, draws a number
    collects = gc.isenabled()
    gc.disable()  # what is imported stays: the search for garbage in it would be a quarter of the time
    try:
        for name in PACKAGES:
            import_module(name)
    finally:
        random.setstate(numbers)
        if collects:
            gc.enable()


class AfterTransformers(MetaPathFinder):
    """Finds transformers as usual, and imports the packages once it has been executed."""

    def find_spec(self, name, path=None, target=None):
        """The spec of transformers with a loader that registers afterwards, `None` for any other module."""
        if name != "transformers":
            return None
        sys.meta_path.remove(self)
        if (spec := find_spec(name)) is not None:
            loader: Any = spec.loader

            def execute(module) -> None:
                del loader.exec_module  # the method of its class again
                loader.exec_module(module)
                import_packages()

            loader.exec_module = execute
        return spec
