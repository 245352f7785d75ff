"""The recipe of a mixture: a YAML file or a dict, every key known, every value checked before a source is opened.

Its keys are those of mergekit-moe where the meaning is the same, so that such a file works here as it stands.
"""

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .errors import MergeError, nearest

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
            for expert in plain["experts"]
        ]
        return plain


def read_recipe(source: Recipe | dict | str | Path, **changes) -> Recipe:
    """A recipe from a YAML file or a dict, checked; `changes` replace its keys.

    Raises:
        MergeError: for an unknown key (with the nearest known one), a missing one, or a value out of range.
    """
    if isinstance(source, Recipe):
        source = source.to_dict()
    folder = None
    if not isinstance(source, dict):
        folder, source = Path(source).parent, read_yaml(Path(source))
    options = dict(source) | {key: value for key, value in changes.items() if value is not None}
    refuse_unknown(options, Recipe, "the recipe")
    if not isinstance(options.get("experts"), list) or not options["experts"]:
        raise MergeError("The recipe names no experts. Give a list: experts: [{source_model: PATH}, ...].")
    options["experts"] = name_experts([read_expert(expert) for expert in options["experts"]])
    if isinstance(options.get("router_layers"), str):
        options["router_layers"] = [options["router_layers"]]
    if isinstance(options.get("allow"), str):
        options["allow"] = [name.strip() for name in options["allow"].split(",") if name.strip()]
    recipe = Recipe(**options)
    if recipe.weights is not None:
        if len(recipe.weights) != len(recipe.experts):
            raise MergeError(
                f"weights has {len(recipe.weights)} values for {len(recipe.experts)} experts. Give each one."
            )
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
    if not path.is_file():
        raise MergeError(f"There is no recipe {str(path)!r}.")
    try:
        content = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise MergeError(f"{path} is no valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise MergeError(f"{path} holds no keys. A recipe starts with: experts: [{{source_model: PATH}}, ...].")
    return content


def refuse_unknown(options: dict, kind: type, where: str):
    known = {f.name for f in fields(kind)}
    for name in options:
        if name not in known:
            raise MergeError(f"Unknown key {name!r} in {where}.{nearest(str(name), known)}")


def read_expert(given) -> ExpertRecipe:
    if isinstance(given, str | Path):
        given = {"source_model": str(given)}
    if not isinstance(given, dict):
        raise MergeError(f"An expert is a path or a mapping with source_model, not {given!r:.80}.")
    refuse_unknown(given, ExpertRecipe, "an expert")
    if not given.get("source_model"):
        raise MergeError("An expert has no source_model. Give the folder or the Hub id of its checkpoint.")
    expert = ExpertRecipe(**{**given, "source_model": str(given["source_model"])})
    for key in ("positive_prompts", "negative_prompts"):
        prompts = getattr(expert, key) or []
        setattr(expert, key, [prompts] if isinstance(prompts, str) else list(prompts))
    return expert


def name_experts(experts: list[ExpertRecipe]) -> list[ExpertRecipe]:
    """Names left out are the folders'."""
    for expert in experts:
        expert.name = expert.name or Path(expert.source_model).name or expert.source_model
    names = [expert.name for expert in experts]
    for name in names:
        if names.count(name) > 1:
            raise MergeError(f"Two experts are called {name!r}. Give them different names: name: ...")
    return experts


def validate(recipe: Recipe):
    count, k = len(recipe.experts), recipe.experts_per_token
    if count < 2:
        raise MergeError("One expert makes no mixture: copy its folder, or give two or more.")
    if not isinstance(k, int) or k < 1:
        raise MergeError(f"experts_per_token={k!r} is no count of experts. Use 1 to {count}.")
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
            raise MergeError(
                f"{key}: {getattr(recipe, key)!r} is not known.{nearest(str(getattr(recipe, key)), known)}"
            )
    if recipe.dtype is not None and recipe.dtype not in DTYPES:
        raise MergeError(f"dtype: {recipe.dtype!r} cannot be written.{nearest(str(recipe.dtype), DTYPES)}")
    for name in recipe.allow:
        if name not in ALLOWANCES:
            raise MergeError(f"allow: {name!r} is no difference that can be allowed.{nearest(name, ALLOWANCES)}")
    for name in recipe.router_layers:
        if name not in ("mlp", *LINEARS):
            raise MergeError(f"router_layers: {name!r} is no part of a layer.{nearest(name, ('mlp', *LINEARS))}")
    if not recipe.router_layers or len(set(recipe.router_layers)) < len(recipe.router_layers):
        raise MergeError(f"router_layers: {recipe.router_layers} routes nothing, or something twice. Use mlp.")
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
    weights = [expert.weight for expert in recipe.experts]
    if any(not isinstance(w, int | float) or w < 0 for w in weights) or sum(weights) <= 0:
        raise MergeError(f"weights {weights} are no shares of a mean. Use numbers from 0 on, with a sum above 0.")
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
    if folder is None:
        return recipe

    def place(path: str | None) -> str | None:
        if path and not Path(path).exists() and (folder / path).exists():
            return str(folder / path)
        return path

    recipe.base_model, recipe.centroids = place(recipe.base_model), place(recipe.centroids)
    for expert in recipe.experts:
        expert.source_model, expert.samples = place(expert.source_model), place(expert.samples)
    return recipe
