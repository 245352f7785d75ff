"""Merges independently fine-tuned models of one family into one sparse mixture, and inspects, verifies and edits such mixtures."""

from run_tools.versions import __version__ as __version__

from .cluster import cluster
from .compose import compose
from .edit import add, export, extract, remove
from .errors import MergeError
from .mixture import inspect
from .recipe import ExpertRecipe, Recipe, read_recipe
from .verify import verify

__all__ = [
    "ExpertRecipe", "MergeError", "Recipe", "add", "cluster", "compose", "export", "extract", "inspect", "read_recipe", "remove", "verify",
]  # fmt: skip
