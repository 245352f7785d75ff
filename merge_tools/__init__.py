"""Merges independently fine-tuned models of one family into one sparse mixture, and inspects, verifies and edits such mixtures."""

from run_tools.versions import __version__ as __version__

from .cluster import cluster
from .compose import check_and_plan, compose, load_experts
from .edit import add, export, extract, remove
from .errors import MergeError
from .evaluation import evaluate
from .findings import Finding, Report
from .fused_experts import split_fused_experts
from .mixture import inspect
from .preflight import check
from .recipe import ExpertRecipe, Recipe, read_recipe
from .routing import Routing, plot, route
from .shard_writer import Progress
from .tuning import tune
from .verify import verify

__all__ = [
    "ExpertRecipe", "Finding", "MergeError", "Progress", "Recipe", "Report", "Routing", "add", "check",
    "check_and_plan", "cluster", "compose", "evaluate", "export", "extract", "inspect", "load_experts", "plot", "read_recipe",
    "remove", "route", "split_fused_experts", "tune", "verify",
]  # fmt: skip
