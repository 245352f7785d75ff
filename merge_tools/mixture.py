"""A mixture on disk, and its views: each expert, and the base, as a dense model."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from run_tools.errors import UserError, did_you_mean

from .families import FAMILIES, FORMATS, LINEARS
from .low_rank import Factors
from .output import dense_config, new_config
from .recipe import Recipe, read_recipe
from .record import RECORD, read_record
from .sources import Source, open_adapter, open_source
from .writer import BYTES


class Mixture:
    """A folder written by `compose`, `add`, `remove` or `export`.

    Attributes:
        source: its tensors by their stored names.
        record, recipe, names, kind: merge_record.json, the recipe in it, the names of its experts, and its class.
        shared_from: the names of the experts that the shared weights are the mean of.
    """

    def __init__(self, folder: str | Path, moved: Mapping[str, str | Path] | None = None):
        """Opens a mixture. `moved` maps names of experts, or "base", to their folders today.

        Raises a `UserError` if the folder is not a mixture, or is damaged.
        """
        import modeling_lexicon  # noqa: F401  (registers its configuration)

        self.folder, self.moved = Path(folder).expanduser(), moved or {}
        self.record = read_record(self.folder)
        try:
            self.recipe: Recipe = read_recipe(self.record["recipe"])
            if self.recipe.names != [expert["name"] for expert in self.record["experts"]]:
                raise UserError("its recipe has other experts.")
        except (UserError, KeyError) as error:
            raise UserError(f"{self.folder / RECORD} is damaged: {error}") from error
        self.source = Source("mixture", str(folder), self.folder)
        self.kind, self.names = FORMATS[self.record["format"]], self.recipe.names
        self.shared_from: list[str] = self.record.get("shared_from", self.names)
        known = [*self.names, "base"]
        if unknown := next((name for name in self.moved if name not in known), None):
            raise UserError(f"No source {unknown!r} could be moved.{did_you_mean(unknown, known)}")
        self.shared = View(self, "base", None)
        self.views = [View(self, name, index) for index, name in enumerate(self.names)]
        if missing := [v.name for v in self.views if v.specs != self.shared.specs]:
            raise UserError(f"{self.folder} lacks tensors of {missing[0]}. Copy or compose the mixture again.")

    def index_of(self, name: str) -> int:
        """The index of an expert. Raises a `UserError` if there is none of this name."""
        if name not in self.names:
            raise UserError(f"{self.folder} has no expert {name!r}. Its experts: {', '.join(self.names)}.")
        return self.names.index(name)

    def gates(self) -> dict[int, torch.Tensor]:
        """Layer -> its gate (E, d), float32."""
        layers = range(self.source.config.num_hidden_layers)
        names = {layer: self.kind.gate(layer) for layer in layers}
        return {layer: self.source[name].float() for layer, name in names.items() if name in self.source.specs}

    def _place(self, source: dict[str, Any], key: str = "path") -> Path | None:
        return Path(os.path.normpath(self.folder.resolve() / source[key])) if key in source else None

    @property
    def base_model(self) -> str | None:
        """Where the base is now, if the recipe names one."""
        found = self.moved.get("base") or self._place(self.record["base"]) or self.recipe.base_model
        return str(found) if found and self.recipe.base_model else None

    def open_source(self, name: str) -> Source:
        """Opens an expert, or the base, that the mixture was made from. Raises a `UserError` that says what to do if it was moved."""
        record = self.record["base"] if name == "base" else self.record["experts"][self.index_of(name)]
        folder = Path(self.moved[name]).expanduser() if name in self.moved else self._place(record)
        if folder is not None and not folder.is_dir():
            raise UserError(f"{name}: {str(folder)!r} does not exist. If it was moved: --moved {name}=FOLDER.")
        if folder is not None and (over := self._place(record, "over")) is not None and over.is_dir():
            return open_adapter(name, record["source"], folder, over)
        return open_source(name, record["source"], self.base_model, folder)


class View(Source):
    """One expert of a mixture as a dense model, with the mixture's shared weights; the base without an `index`, whose MLPs are those that
    experts of low rank share, or only give shapes.
    """

    def __init__(self, mixture: Mixture, name: str, index: int | None):
        self.name, self.origin, self.folder = name, str(mixture.folder), mixture.folder
        self.adapter, self.files, self.mixture, self.index = None, mixture.source.files, mixture, index
        family, stored = FAMILIES[mixture.record["family"]], mixture.source
        content = dense_config(family, stored)
        old_names = ("rope_theta", "rope_scaling", "torch_dtype")
        self.config = new_config(**{key: value for key, value in content.items() if key not in old_names})
        linear_of = {short: name for name, short in mixture.kind.names.items()}
        own = f"experts\\.{index or 0}" if not mixture.recipe.rank else "base"
        matrix = re.compile(rf"model\.layers\.(\d+)\.{mixture.kind.block}\.{own}\.({'|'.join(linear_of)})\.weight")
        self.stored: dict[str, str] = {}  # name in a dense model -> in the mixture
        for tensor in stored.specs:
            if match := matrix.fullmatch(tensor):
                self.stored[f"model.layers.{match[1]}.mlp.{linear_of[match[2]]}.weight"] = tensor
            elif not re.match(rf"model\.layers\.\d+\.{mixture.kind.block}\.|domain_centroids$", tensor):
                self.stored[tensor] = tensor
        self.specs = {tensor: stored.specs[place] for tensor, place in self.stored.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        base = self.mixture.source[self.stored[name]]
        if not self.mixture.recipe.rank or self.index is None or name.split(".")[-2] not in LINEARS:
            return base
        a, b = (self.factor(None, name, half).float() for half in "AB")
        return (base.float() + b @ a).to(base.dtype)

    def factor(self, factors: Factors | None, name: str, half: str) -> torch.Tensor:
        """The factor A or B that the mixture has."""
        assert self.index is not None
        layer, linear = int(name.split(".")[2]), name.split(".")[-2]
        return self.mixture.source[self.mixture.kind.expert(layer, self.index, linear, half)]


def inspect(folder: str | Path) -> dict[str, Any]:
    """The contents of a mixture: experts and their sources, sizes, and where held-out tokens are routed.

    Raises a `UserError` if the folder is not a mixture, or is damaged.
    """
    mixture = Mixture(folder)
    recipe, record = mixture.recipe, mixture.record
    return {
        "folder": str(mixture.folder), "format": record["format"], "made_by": record["made_by"],
        "routing_policy": recipe.routing_policy, "experts_per_token": recipe.experts_per_token, "rank": recipe.rank,
        "average": recipe.average, "shared_from": mixture.shared_from,
        "bytes": sum(BYTES[dtype] * torch.Size(shape).numel() for dtype, shape in mixture.source.specs.values()),
        "experts": record["experts"], "base": record["base"], "energies": record.get("energies"),
        "gate_mode": recipe.gate_mode, "confusion": None if "tuned" in record else record["gates"].get("confusion"),
    }  # fmt: skip
