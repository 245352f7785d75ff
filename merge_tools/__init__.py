"""Merges independently fine-tuned models of one family into one sparse mixture, and inspects, verifies and edits such mixtures."""

from run_tools.errors import UserError as MergeError
from run_tools.versions import __version__ as __version__

from .cluster import cluster
from .compose import compose
from .edit import add, export, extract, remove
from .evaluation import evaluate
from .mixture import inspect
from .recipe import ExpertRecipe, Recipe, read_recipe
from .routing import Routing, route
from .tuning import tune
from .verify import verify

__all__ = [
    "ExpertRecipe", "MergeError", "Recipe", "Routing", "add", "cluster", "compose", "evaluate", "export", "extract", "inspect",
    "read_recipe", "remove", "route", "tune", "verify",
]  # fmt: skip
