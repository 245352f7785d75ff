"""The recipe of a mixture: a YAML file or a dict, every key known, every value checked before a source is opened.

Its keys are those of mergekit-moe where the meaning is the same, so that such a file works here as it stands.
"""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from .errors import MergeError, nearest, reason

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")
GATE_MODES = ("random", "zeros", "hidden", "cheap_embed", "centroid", "none")
POLICIES = ("token", "sequence_soft", "sequence_hard", "domain")
DTYPES = ("bfloat16", "float16", "float32")
ALLOWANCES = {
    "vocab": "experts with longer vocabularies: shared rows as usual, further rows from the experts that have them",
    "tokenizer": "tokenizers that differ: the base model's is written",
    "rope": "experts trained with another rotary embedding: the base model's is written",
}


@dataclass
class ExpertRecipe:
    """One expert: where it lies, its name, and what its gate is made of."""

    source_model: str
    name: str = ""
    positive_prompts: list[str] = field(default_factory=list)
    negative_prompts: list[str] = field(default_factory=list)
    samples: str | None = None  # .jsonl or .txt of its own cluster, for `gate_mode: centroid`
    weight: float = 1.0


@dataclass
class Recipe:
    """What to compose, and how.

    Args:
        experts: two or more; each a path or Hub id, or a mapping with `source_model`, `name` (default: the folder's),
            `positive_prompts`, `negative_prompts`, `samples`, `weight`.
        base_model: gives configuration, tokenizer, what gates are measured with and, with `average: base`, all that is
            not routed. Default: the first expert.
        average: "mean" (default) averages what is not routed over the experts, by `weights`; "base" takes the base's.
        router_layers: "mlp" (default) for whole MLPs, or a list of linears that are routed each by a gate of its own.
        router_layers_index: the layers that are routed; default all.
        routing_policy: "token" (default), "sequence_soft", "sequence_hard", "domain".
        gate_mode: "random" (default), "zeros", "hidden", "cheap_embed", "centroid"; for the domain policy "none" is the
            default, and any other gives it a learned gate.
        experts_per_token: k of the token policy, default 2.
        dtype: of what is written; default the base model's.
        format: "mixtral" (opens without this project), "lexicon", or "auto" (mixtral where it can say it all).
        weights: one a expert, for the mean; made to sum to 1.
        centroids, embedder: safetensors file with the clusters' centroids (experts, size), and the name of the sentence
            embedder they were found with; they travel with the checkpoint, for `assign_domains`.
        allow: names of differences to accept: vocab, tokenizer, rope.
        seed: of random gates, and of the rows drawn from `samples`.
    """

    experts: list[ExpertRecipe]
    base_model: str | None = None
    average: str = "mean"
    router_layers: list[str] = field(default_factory=lambda: ["mlp"])
    router_layers_index: list[int] | None = None
    routing_policy: str = "token"
    gate_mode: str | None = None
    experts_per_token: int = 2
    dtype: str | None = None
    format: str = "auto"
    weights: list[float] | None = None
    centroids: str | None = None
    embedder: str | None = None
    allow: list[str] = field(default_factory=list)
    seed: int = 42

    @property
    def names(self) -> list[str]:
        return [expert.name for expert in self.experts]

    @property
    def is_stock(self) -> bool:
        """Whether a Mixtral says all that this recipe does."""
        return self.router_layers == ["mlp"] and self.router_layers_index is None and self.routing_policy == "token"

    def to_dict(self) -> dict[str, Any]:
        """As it would stand in a YAML file, without what is left at its default."""
        plain = {name: value for name, value in asdict(self).items() if value not in (None, [], {})}
        plain["experts"] = [
            {
                key: value
                for key, value in expert.items()
                if value not in (None, [], "") and (key, value) != ("weight", 1.0)
            }
            if isinstance(expert, dict)
            else expert
            for expert in plain["experts"]
        ]
        return plain


def is_text(value) -> bool:
    return isinstance(value, str | Path) and bool(str(value).strip()) and "\0" not in str(value)


def is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e300


def is_count(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def many(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and all(map(kind, value))


PATH = ("a path", is_text)
PATH_OR_ID = ("a path or a Hub id", is_text)
TEXTS = ("a text or a list of texts, none of them empty", many(is_text))
# What each key takes; those that take one of a few names are held against these by `validate`.
FORMS = {
    "base_model": PATH_OR_ID,
    "router_layers": ("mlp, or a list of names of linears", many(is_text)),
    "router_layers_index": (
        "a list of layers' numbers, from 0 on",
        lambda value: many(is_count)(value) and bool(value),
    ),
    "experts_per_token": ("a whole number from 1 on", lambda value: is_count(value) and value > 0),
    "weights": ("a list of numbers from 0 on, one for each expert", many(is_number)),
    "centroids": PATH,
    "embedder": ("a name", is_text),
    "allow": (f"names of differences: {', '.join(ALLOWANCES)}", many(is_text)),
    "seed": ("a whole number from 0 on", is_count),
    "source_model": PATH_OR_ID,
    "name": ("a text (put quotes around a number or a date)", is_text),
    "positive_prompts": TEXTS,
    "negative_prompts": TEXTS,
    "samples": PATH,
    "weight": ("a number from 0 on", is_number),
}
LISTS = ("router_layers", "allow", "positive_prompts", "negative_prompts")  # that take a single text too


def unmeasured(recipe: Recipe) -> Recipe:
    """The recipe with gates of zeros in the place of any others: the same tensors, and no model to run for them."""
    return replace(recipe, gate_mode="none" if recipe.gate_mode == "none" else "zeros")


def read_recipe(source: Recipe | dict | str | Path, **changes) -> Recipe:
    """A recipe from a YAML file or a dict, checked; `changes` replace its keys, and `allow` adds to them.

    Raises:
        MergeError: for an unknown key (with the nearest known one), a missing one, or a value out of range.
    """
    if isinstance(source, Recipe):
        source = source.to_dict()
    folder = None
    if not isinstance(source, dict):
        if not is_text(source):
            raise MergeError(f"A recipe is a YAML file, a mapping or a Recipe, not {shown(source)}.")
        folder, source = Path(source).parent, read_yaml(Path(source))
    options, changes = understood(source, Recipe, "the recipe"), understood(changes, Recipe, "the recipe")
    allowed = [*options.get("allow", []), *changes.get("allow", [])]
    options |= {**changes, "allow": list(dict.fromkeys(allowed))}
    if not isinstance(options.get("experts"), list) or not options["experts"]:
        raise MergeError("The recipe names no experts. Give a list: experts: [{source_model: PATH}, ...].")
    options["experts"] = name_experts([read_expert(expert) for expert in options["experts"]])
    recipe = Recipe(**options)
    if recipe.weights is not None:
        if len(recipe.weights) != len(recipe.experts):
            raise MergeError(
                f"weights has {len(recipe.weights)} values for {len(recipe.experts)} experts. Give each one."
            )
        if "weights" not in changes and any(expert.weight != 1.0 for expert in recipe.experts):
            raise MergeError("The recipe has weights, and an expert has a weight of its own. Give either.")
        for expert, weight in zip(recipe.experts, recipe.weights, strict=True):
            expert.weight = weight
        recipe.weights = None
    if recipe.gate_mode is None:
        recipe.gate_mode = "none" if recipe.routing_policy == "domain" else "random"
    validate(recipe)
    return anchored(recipe, folder)


def read_yaml(path: Path) -> dict:
    try:
        import yaml
    except ImportError as error:
        raise ImportError("Reading a recipe needs PyYAML. Install it with: pip install lexperts[merge]") from error
    if not os.path.isfile(path):
        raise MergeError(f"There is no recipe {str(path)!r}.")

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node, deep=False):
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            for key in keys:
                if keys.count(key) > 1:
                    raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", node.start_mark)
            return super().construct_mapping(node, deep)

    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" (line {mark.line + 1})" if mark else ""
        raise MergeError(f"{path} is no valid YAML: {error.problem or error.context}{place}.") from error
    except (yaml.YAMLError, ValueError, RecursionError, OSError) as error:
        raise MergeError(f"{path} cannot be read as YAML: {reason(error)}.") from error
    if not isinstance(content, dict):
        raise MergeError(f"{path} holds no keys. A recipe starts with: experts: [{{source_model: PATH}}, ...].")
    return content


def understood(options: dict, kind: type, where: str) -> dict[str, Any]:
    """The keys that have a value, each known and in its form; paths as texts, single texts as lists."""
    known = {f.name for f in fields(kind)}
    kept = {}
    for name, value in options.items():
        if name not in known:
            raise MergeError(f"Unknown key {shown(name)} in {where}.{nearest(str(name), known)}")
        if value is None:  # `key:` with nothing behind it is a key left out
            continue
        if name in LISTS and isinstance(value, str):
            value = [value]
        if name == "allow" and many(is_text)(value):
            value = [part.strip() for names in value for part in str(names).split(",") if part.strip()]
        what, fits = FORMS.get(name, ("", lambda _: True))
        if not fits(value):
            raise MergeError(f"{name} in {where} is {shown(value)}, and takes {what}.")
        kept[name] = str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
    return kept


def shown(value) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def read_expert(given) -> ExpertRecipe:
    if isinstance(given, str | Path):
        given = {"source_model": str(given)}
    if not isinstance(given, dict):
        raise MergeError(f"An expert is a path or a mapping with source_model, not {shown(given)}.")
    given = understood(given, ExpertRecipe, f"the expert {shown(given.get('name') or given.get('source_model'))}")
    if "source_model" not in given:
        raise MergeError("An expert has no source_model. Give the folder or the Hub id of its checkpoint.")
    return ExpertRecipe(**given)


def name_experts(experts: list[ExpertRecipe]) -> list[ExpertRecipe]:
    """Names left out are the folders'."""
    seen: dict[str, ExpertRecipe] = {}
    for expert in experts:
        place = Path(expert.source_model)
        expert.name = expert.name or (place if place.name not in ("", "..") else place.resolve()).name or str(place)
        other = seen.setdefault(expert.name, expert)
        if other is not expert:
            raise MergeError(
                f"Two experts are called {expert.name!r}: {other.source_model} and {expert.source_model}. Give each its own "
                "with the key name."
            )
    return experts


def validate(recipe: Recipe):
    count, k = len(recipe.experts), recipe.experts_per_token
    if count < 2:
        raise MergeError("One expert makes no mixture: copy its folder, or give two or more.")
    if k > count:
        raise MergeError(
            f"experts_per_token={k} is more than the {count} experts: a token cannot choose one twice. Use {count} or fewer."
        )
    for key, known in (
        ("gate_mode", GATE_MODES),
        ("routing_policy", POLICIES),
        ("average", ("mean", "base")),
        ("format", ("auto", "mixtral", "lexicon")),
    ):
        if getattr(recipe, key) not in known:
            given = getattr(recipe, key)
            raise MergeError(f"{key}: {shown(given)} is not known.{nearest(str(given), known)}")
    if recipe.dtype is not None and recipe.dtype not in DTYPES:
        raise MergeError(f"dtype: {shown(recipe.dtype)} cannot be written.{nearest(str(recipe.dtype), DTYPES)}")
    for name in recipe.allow:
        if name not in ALLOWANCES:
            raise MergeError(f"allow: {shown(name)} is no difference that can be allowed.{nearest(name, ALLOWANCES)}")
    for name in recipe.router_layers:
        if name not in ("mlp", *LINEARS):
            raise MergeError(f"router_layers: {shown(name)} is no part of a layer.{nearest(name, ('mlp', *LINEARS))}")
    if not recipe.router_layers or len(set(recipe.router_layers)) < len(recipe.router_layers):
        raise MergeError(f"router_layers: {shown(recipe.router_layers)} routes nothing, or something twice. Use mlp.")
    if "mlp" in recipe.router_layers and set(recipe.router_layers) & set(MLP_LINEARS):
        raise MergeError("router_layers: mlp routes gate_proj, up_proj and down_proj together. Name either it or them.")
    if recipe.average == "base" and recipe.base_model is None:
        raise MergeError("average: base needs base_model, whose weights are taken for all that is not routed.")
    if recipe.gate_mode == "none" and recipe.routing_policy != "domain":
        raise MergeError(f"gate_mode: none leaves the {recipe.routing_policy} policy without gates. Use random.")
    if recipe.format == "mixtral" and not recipe.is_stock:
        raise MergeError(
            "format: mixtral can hold whole MLPs in all layers, routed by token. Leave out router_layers, "
            "router_layers_index and routing_policy, or use format: lexicon."
        )
    if sum(expert.weight for expert in recipe.experts) <= 0:
        raise MergeError("weights are 0 for all experts: there is nothing to average. Give one of them more.")
    if recipe.gate_mode == "cheap_embed" and {"o_proj", "down_proj"} & set(recipe.router_layers):
        raise MergeError(
            "gate_mode: cheap_embed has no vectors for o_proj and down_proj, which read no hidden states. Use hidden."
        )
    for expert in recipe.experts:
        if recipe.gate_mode in ("hidden", "cheap_embed") and not expert.positive_prompts:
            raise MergeError(
                f"gate_mode: {recipe.gate_mode} needs positive_prompts for every expert, and {expert.name!r} has none. "
                "Give some, or use gate_mode: random."
            )
        if recipe.gate_mode == "centroid" and not expert.samples:
            raise MergeError(
                f"gate_mode: centroid needs samples for every expert, and {expert.name!r} has none. Give a .jsonl or .txt "
                "file of its own cluster."
            )


def anchored(recipe: Recipe, folder: Path | None) -> Recipe:
    """Paths that exist beside the recipe's file, but not from here, are meant from there."""

    def place(path: str | None) -> str | None:
        here = path is None or folder is None or os.path.exists(path)
        return path if here or not os.path.exists(folder / path) else str(folder / path)

    def file(path: str | None) -> str | None:
        return path and place(os.path.expanduser(path))

    recipe.base_model, recipe.centroids = place(recipe.base_model), file(recipe.centroids)
    for expert in recipe.experts:
        expert.source_model, expert.samples = place(expert.source_model), file(expert.samples)
    return recipe
