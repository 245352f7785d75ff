"""`lexperts evaluate`: the recipes that score."""

from ..recipes import EVALUATE
from .common import new_app
from .recipes import add_recipes

app = new_app("evaluate", "Score models: `lexperts evaluate exhird --model runs/warm --test-files test.jsonl`.")
add_recipes(app, EVALUATE)
