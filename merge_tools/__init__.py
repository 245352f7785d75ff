"""Definitions into clusters, Llama experts in, one routed mixture out: composed, checked, inspected, extended, taken apart again."""

from .checks import check
from .clustering import cluster
from .composing import compose, load_experts, prepare
from .errors import MergeError
from .mixture import inspect, verify
from .recipe import ExpertRecipe, Recipe, read_recipe
from .records import own_version
from .report import Finding, Report
from .routing import Routing, plot, route
from .surgery import add, export, extract, remove
from .writing import Progress

__version__ = own_version()

__all__ = [
    "ExpertRecipe",
    "Finding",
    "MergeError",
    "Progress",
    "Recipe",
    "Report",
    "Routing",
    "add",
    "check",
    "cluster",
    "compose",
    "export",
    "extract",
    "inspect",
    "load_experts",
    "plot",
    "prepare",
    "read_recipe",
    "remove",
    "route",
    "verify",
]
