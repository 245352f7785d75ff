"""`lexperts train`: the recipes that train."""

from ..recipes import TRAIN
from .common import new_app
from .recipes import add_recipes

app = new_app("train", "Train a model: `lexperts train seke minilm_cpu --train-files train.jsonl`.")
add_recipes(app, TRAIN)
