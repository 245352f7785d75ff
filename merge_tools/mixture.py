"""A mixture on disk: opens the folder and reads what it consists of."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from run_tools.errors import did_you_mean, expand_user, one_line

from .averages import AVERAGES
from .averaging import to_float64
from .checkpoints import Source, open_checkpoint, open_source
from .config_checks import find_value_errors
from .errors import MergeError
from .families import FAMILIES
from .layout import RoutedPart, mixture_layout, rope_parameters
from .output_tensors import CENTROIDS
from .places import download, is_on_hub, is_relative, locate, recorded_paths
from .plan import active_parameters
from .provenance import RECORD, read_record
from .recipe import Recipe, all_parts, gated_parts, read_recipe
from .tensor_files import read_all

IF_MOVED = " If it was moved, use --moved {}=FOLDER."


def read_recorded_recipe(folder: Path, record: dict[str, Any]) -> Recipe:
    """The recipe in a record; raises a `MergeError` that names the record."""
    try:
        return read_recipe(record["recipe"])
    except MergeError as error:
        raise MergeError(
            f"{folder / RECORD} is damaged: {one_line(error)} Copy or compose the mixture again."
        ) from error


@dataclass
class Mixture:
    """A folder written by `compose`, `add`, `remove` or `export`."""

    source: Source
    record: dict[str, Any]
    recipe: Recipe
    moved: Mapping[str, str | Path] = field(default_factory=dict)  # name of a source -> where it is now

    def __post_init__(self):
        if not isinstance(self.record.get("beside"), dict):
            self.record["beside"] = {}
        self.folder, self.config, self.names = self.source.folder, self.source.config, self.recipe.names
        # the names of the experts that the shared weights are the mean of
        self.shared_from = self.record.get("shared_from", self.names)
        # the number that seeds each expert's random gate row: its index in the first mixture it was added to
        self.gate_rows = self.record.get("gate_rows", list(range(len(self.names))))
        self.next_row = max(self.gate_rows) + 1
        self.family = FAMILIES[self.record["family"]]
        # the config.json of a mixture does not tell families apart that share its class
        self.shape = self.source.shape = replace(self.source.shape, family=self.family)
        self.parts, self.gated = all_parts(self.recipe, self.shape), gated_parts(self.recipe, self.shape)

    @classmethod
    def open(cls, folder: str | Path, moved: Mapping[str, str | Path] | None = None) -> "Mixture":
        """Opens a mixture and checks that its files agree. `moved` maps names of sources to their folders today.

        Raises a `MergeError` if the folder is not a mixture, or is damaged.
        """
        folder = expand_user(folder)
        record = read_record(folder)
        source = Source("mixture", str(folder), open_checkpoint(folder))
        errors = find_value_errors(source.config)
        if errors:
            raise MergeError(f"{folder / 'config.json'} is damaged: {errors[0]}. Copy or compose the mixture again.")
        try:
            mixture = cls(source, record, read_recorded_recipe(folder, record), moved or {})
            if [source["name"] for source in record["experts"]] != mixture.names:
                raise MergeError(f"{folder / RECORD} lists other experts than its recipe. Copy or compose it again.")
            known = {"base", *mixture.names}
            if unknown := [given for given in mixture.moved if given not in known]:
                hint = did_you_mean(str(unknown[0]), known)
                raise MergeError(f"The mixture has no source {unknown[0]!r:.80} that was moved.{hint}")
            expected = mixture.tensor_names()
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise MergeError(f"{folder / RECORD} is damaged ({error!r:.80}). Copy or compose it again.") from error
        missing = [name for name in expected if name not in mixture.source]
        if missing:
            raise MergeError(f"{folder} is missing the tensor {missing[0]!r}. Copy or compose the mixture again.")
        return mixture

    def layout(self) -> list[str | RoutedPart]:
        """The names of the tensors that are not routed, and the routed parts, in the order in which they are written."""
        centroids = [CENTROIDS] * (CENTROIDS in self.source)
        items: list[str | RoutedPart] = []
        for item in mixture_layout(self.shape, self.parts):
            items += [item] if isinstance(item, str) else [item, *item.base_tensors(), *item.zero_tensors(self.shape)]
        return items + centroids

    def tensor_names(self) -> list[str]:
        """The names of all tensors."""
        layout = self.layout()
        names = [name for name in layout if isinstance(name, str)] + [part.gate for part in self.gated]
        for part in self.parts:
            suffixes = [suffix for _, suffix in part.expert_tensors(self.shape)]
            names += [part.expert(e, suffix) for e in range(len(self.names)) for suffix in suffixes]
        return names

    def index_of(self, name: str) -> int:
        """The index of an expert; raises a `MergeError` if the expert does not exist."""
        if name not in self.names:
            raise MergeError(f"{self.folder} has no expert {name!r}. Its experts: {', '.join(self.names)}.")
        return self.names.index(name)

    def gates(self) -> dict[str, np.ndarray]:
        """The gates by name, `(E, d)`, float64."""
        entries = [self.source.entry(part.gate) for part in self.gated]
        return {entry.name: to_float64(read_all(entry), entry.dtype).reshape(entry.shape) for entry in entries}

    def open_base(self) -> Source:
        """Opens the base model that the mixture was made with."""
        return self._open_source("base", self.record["base"], None)

    def open_experts(self) -> list[Source]:
        """Opens the experts that the mixture was made from."""
        return [self.open_expert(index) for index in range(len(self.names))]

    def open_expert(self, index: int) -> Source:
        """Opens one of the experts that the mixture was made from."""
        return self._open_source(self.names[index], self.record["experts"][index], self.base_model)

    @property
    def base_model(self) -> str | None:
        """Where the recipe's `base_model` is now, if it has one; a Hub id is unchanged."""
        origin = self.recipe.base_model
        return origin and str(self.locate(origin, "base") or origin)

    def locate(self, origin: str, name: str = "") -> Path | None:
        """Where a path of the record is now: where the caller says, else beside the mixture as when it was merged.

        Returns None for a model of the Hub. The working directory does not matter: it can have another folder of that name.
        """
        for given in (name, *(e.name for e in self.recipe.experts if e.source_model == origin)):
            if given in self.moved:
                return locate(str(self.moved[given]))
        beside = self.record["beside"].get(origin)
        if isinstance(beside, str):
            return Path(os.path.normpath(self.folder.resolve() / beside))
        if is_on_hub(self.record, origin):
            return None
        return Path(os.path.normpath(self.folder.resolve() / expand_user(origin)))

    def find_source(self, name: str, origin: str) -> Path | None:
        """The folder of a source, None for a model of the Hub; raises a `MergeError` if the folder is gone."""
        place = self.locate(origin, name)
        if place is not None and not place.is_dir():
            raise MergeError(f"{name}: the folder {str(place)!r} does not exist.{IF_MOVED.format(name)}")
        return place

    def places(self) -> dict[str, Path | None]:
        """Path in the record -> where it is now; None for a model of the Hub."""
        return {path: self.locate(path) for path in recorded_paths(self.record)}

    def recipe_from_here(self) -> Recipe:
        """The recipe with paths from the working directory instead of from that in which the mixture was composed."""
        places = self.places()

        def from_here(path: str | None) -> str | None:
            if path is None:
                return None
            if (place := places[path]) is not None:
                return os.path.relpath(place) if is_relative(path) else str(place)
            if os.path.isdir(path):
                raise MergeError(
                    f"{path!r} is a model of the Hub in the recipe of {self.folder}, and also a folder in the working directory. Run the command in "
                    "another folder."
                )
            return path

        experts = [
            replace(e, source_model=from_here(e.source_model) or e.source_model, samples=from_here(e.samples))
            for e in self.recipe.experts
        ]
        base, centroids = from_here(self.recipe.base_model), from_here(self.recipe.centroids)
        return replace(self.recipe, experts=experts, base_model=base, centroids=centroids)

    def _open_source(self, name: str, record: dict[str, Any], base: str | None) -> Source:
        origin = record["source"]
        place = self.find_source(name, origin)
        if place is None:
            try:
                place = download(origin)
            except MergeError as error:
                raise MergeError(f"{error}{IF_MOVED.format(name)}") from error
        over = self.locate(record["adapter_over"]) if isinstance(record.get("adapter_over"), str) else None
        if over is not None and not over.is_dir():
            over = None if base is None or not os.path.isdir(base) else Path(base)
        return open_source(name, origin, base, folder=place, over=over)


def inspect(folder: str | Path) -> dict[str, Any]:
    """The contents of a mixture: experts and their sources, parameters, gates, files.

    Raises a `MergeError` if the folder is not a mixture, or is damaged.
    """
    mixture = Mixture.open(folder)
    entries = mixture.source.checkpoint.entries
    total = sum(entry.elements for entry in entries.values())
    in_experts = sum(entry.elements for name, entry in entries.items() if ".experts." in name)
    recipe, count = mixture.recipe, len(mixture.names)
    return {
        "folder": str(mixture.folder),
        "format": mixture.record["format"],
        "made_by": mixture.record["made_by"],
        "routing_policy": recipe.routing_policy,
        "experts_per_token": recipe.experts_per_token,
        "router_layers": recipe.router_layers,
        "router_layers_index": recipe.router_layers_index,
        "shared": AVERAGES[recipe.average].describe(
            mixture.shared_from, mixture.record["base"]["source"], recipe.density
        ),
        "rope": rope_parameters(mixture.config),
        "tied": mixture.shape.tie_word_embeddings,
        "parameters": total,
        "active_parameters": active_parameters(recipe, total, in_experts),
        "parameters_per_expert": in_experts // count,
        "rank": recipe.rank,
        "energies": mixture.record.get("energies"),
        "bytes": sum(entry.nbytes for entry in entries.values()),
        "experts": mixture.record["experts"],
        "base": mixture.record["base"],
        "gate_mode": recipe.gate_mode,
        "confusion": None if "tuned" in mixture.record else mixture.record["gates"].get("confusion"),
        "gates": [describe_gate(part, mixture.gates()[part.gate]) for part in mixture.gated],
    }


def describe_gate(part: RoutedPart, gate: np.ndarray) -> dict[str, Any]:
    """The condition number of a gate (large if two rows are nearly parallel) and the norms of its rows."""
    singular = np.linalg.svd(gate, compute_uv=False)
    condition = float(singular[0] / singular[-1]) if singular[-1] > 0 else float("inf")
    norms = np.linalg.norm(gate, axis=1)
    return {
        "layer": part.layer,
        "part": part.part,
        "condition_number": round(condition, 3) if np.isfinite(condition) else None,
        "row_norms": [round(float(norm), 4) for norm in norms],
    }
