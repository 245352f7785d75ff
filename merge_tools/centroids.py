"""Cluster centroids that travel with a mixture, read from the safetensors file that a recipe names."""

import os
from pathlib import Path

import numpy as np

from .averaging import to_float32
from .checkpoints import read_all
from .errors import MergeError
from .recipe import Recipe
from .tensor_files import TORCH_NAMES, has_nonfinite, read_header


def read_centroids(recipe: Recipe) -> np.ndarray | None:
    """Reads the only tensor of `recipe.centroids` as float32 of shape `(E, size)`; None if the recipe has no centroids.

    Raises a `MergeError` if the file is missing, holds other tensors, or holds values that are not finite.
    """
    if recipe.centroids is None:
        return None
    path = Path(recipe.centroids)
    if not os.path.isfile(path):
        raise MergeError(f"centroids={str(path)!r:.300} does not exist. Give the centroids.safetensors of `cluster`.")
    entries = read_header(path)
    if len(entries) != 1 or len(entries[0].shape) != 2 or entries[0].shape[0] != len(recipe.experts):
        shapes = [list(entry.shape) for entry in entries[:4]]
        raise MergeError(
            f"{path} holds tensors of shapes {shapes}; expected one tensor of shape ({len(recipe.experts)}, size), with "
            "one centroid per expert in the order of the experts."
        )
    if recipe.is_stock and recipe.format != "lexicon":
        raise MergeError("A Mixtral cannot store centroids. Use format: lexicon, or remove the key centroids.")
    raw, dtype = read_all(entries[0])
    if dtype not in TORCH_NAMES or has_nonfinite(raw, dtype):
        raise MergeError(f"{path} (dtype {dtype}) holds values that are not finite numbers. Run `cluster` again.")
    return np.ascontiguousarray(to_float32(raw, dtype).reshape(entries[0].shape))
