"""The recipe of a mixture: a YAML file or a dict, validated completely before any source is opened.

A file of mergekit-moe keeps its meaning: gates from prompts and the base's shared weights are the default with
`base_model` and prompts, and a key that is not supported is refused by name.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from run_tools.errors import did_you_mean, expand_user, short_repr
from run_tools.yaml_files import read_yaml

from . import mergekit
from .averages import AVERAGES
from .errors import MergeError
from .families import ATTENTION, MIXTURES
from .layout import RoutedPart, Shape, routed_parts
from .places import resolve
from .recipe_checks import find_conflicts
from .recipe_values import CHOICES, VALIDATORS, is_name, is_text, list_of

MAX_ERRORS = 20  # reported at once


@dataclass
class ExpertRecipe:
    """One expert: the path or Hub id of its checkpoint, its name, and the texts that its gate is computed from."""

    source_model: str
    name: str = ""
    positive_prompts: list[str] = field(default_factory=list)
    negative_prompts: list[str] = field(default_factory=list)
    samples: str | None = None  # .jsonl or .txt file of the expert's own data, for `gate_mode: centroid` and `ridge`
    weight: float = 1.0


@dataclass
class Recipe:
    """Which experts are merged, and how.

    Args:
        experts: two or more experts, each a path, a Hub id, or a mapping with `source_model`, `name` (default: the name
            of the folder), `positive_prompts`, `negative_prompts`, `samples`, `weight`.
        base_model: the model that provides the configuration, the tokenizer, the hidden states for gates and, with
            `average: base`, all weights that are not routed. Default: the first expert.
        average: "mean" averages weights that are not routed over the experts; "base" copies the base model's; "slerp"
            interpolates between two experts; "ties", "dare" and "dare_ties" merge the experts' differences from the base, see
            `task_vectors`. Default:
            "base" for a recipe as mergekit-moe reads them, i.e. with `base_model`, with prompts for every expert or
            `gate_mode: random`, and routing whole MLPs per token; otherwise "mean".
        density: share of the elements of each task vector that "ties", "dare" and "dare_ties" keep, above 0 and at most
            1; default 0.5.
        attention: "routed" also routes q_proj, k_proj, v_proj and o_proj, each with its own gate, as if `router_layers` had
            them; "shared" (default) does not.
        router_layers: "mlp" (default) routes whole MLPs; a list of linear layers routes each of them by its own gate.
        router_layers_index: indices of the layers that are routed; default: all.
        routing_policy: "token" (default), "sequence_soft", "sequence_hard" or "domain".
        gate_mode: "random", "zeros", "orthogonal", "hidden", "cheap_embed", "router_input", "centroid", "ridge" or "anchor". Default: "hidden" for a recipe
            as mergekit-moe reads them, see `average`; "none" for the domain policy, to which any other mode adds a learned
            gate; otherwise "random".
        experts_per_token: experts that the token policy selects per token (top-k), default 2.
        dtype: dtype of the output; default: the base model's.
        format: "auto", "lexicon", or the class of transformers for mixtures of such experts, which opens without this
            package: "mixtral", "qwen2_moe", "qwen3_moe" or "flex_olmo". "auto" is that class if it can represent the mixture.
        tokenizer_source: "base", "union" or the name of an expert, whose tokenizer, generation settings, ids of special
            tokens and number of embedding rows the mixture gets. "union" (default) is the base's, or the longest that
            extends it.
        weights: one weight per expert for the mean, or for the mean of task vectors; normalised to sum to 1.
        centroids: safetensors file with the centroids of the experts' clusters, `(experts, size)`. They are saved with
            the mixture for `assign_domains`.
        embedder: name of the sentence embedder that the centroids were computed with.
        rank: stores the base's MLPs once, and of each expert its difference from them as two matrices of this rank per linear layer,
            see `low_rank`; or, below 1, the share of the difference's energy that every matrix keeps. Default: experts are whole.
        include_base: whether the base is an expert too, for texts of no expert's domain; or a mapping with its texts or samples for
            gates, and its name (default: base).
        gate_tokens: tokens of each expert's samples that `gate_mode: ridge` and `centroid` read; default: 8 per dimension of the
            model. More give better gates, in proportionally more time.
        architecture: the name of the format in mergekit-moe, accepted if it is what is written anyway.
        allow: differences between the experts to accept: "vocab", "tokenizer", "rope".
        seed: seed of random gates, of the rows drawn from `samples`, and of the elements that "dare" drops.
    """

    experts: list[ExpertRecipe]
    base_model: str | None = None
    average: str = ""
    density: float | None = None
    attention: str | None = None
    router_layers: list[str] = field(default_factory=lambda: ["mlp"])
    router_layers_index: list[int] | None = None
    routing_policy: str = "token"
    gate_mode: str = ""
    experts_per_token: int = 2
    dtype: str | None = None
    format: str = "auto"
    tokenizer_source: str | None = None
    weights: list[float] | None = None
    centroids: str | None = None
    embedder: str | None = None
    rank: int | float | None = None
    include_base: bool | dict[str, Any] | None = None
    gate_tokens: int | None = None
    architecture: str | None = None
    allow: list[str] = field(default_factory=list)
    seed: int = 42

    @property
    def names(self) -> list[str]:
        """The names of the experts."""
        return [expert.name for expert in self.experts]

    @property
    def is_stock(self) -> bool:
        """Whether a class of transformers can represent the routing of this recipe."""
        whole = self.router_layers == ["mlp"] and self.router_layers_index is None and not self.rank
        return whole and self.routing_policy == "token"

    def to_dict(self) -> dict[str, Any]:
        """The recipe as it would be written to a YAML file, without keys that have their default."""

        def without_defaults(options):
            if not isinstance(options, dict):
                return options
            return {k: v for k, v in options.items() if v not in (None, [], "") and (k, v) != ("weight", 1.0)}

        content = without_defaults(asdict(self))
        return content | {"experts": [without_defaults(expert) for expert in content.get("experts", [])]}


LIST_OR_STRING = ("router_layers", "allow", "positive_prompts", "negative_prompts")


def read_recipe(source: Recipe | dict | str | Path, **changes) -> Recipe:
    """Reads and validates a recipe.

    Args:
        source: YAML file, dict or `Recipe`.
        changes: keys to replace; `allow` is added to the recipe's.

    Raises:
        MergeError: for a recipe of mergekit-yaml; otherwise with a line for everything that is wrong: unknown keys with the closest known
            one, missing keys, invalid values. What follows from another error is left out.
    """
    folder = None
    if isinstance(source, Recipe):
        source = source.to_dict()
    elif not isinstance(source, dict):
        if not is_text(source):
            raise MergeError(f"A recipe must be a YAML file, a dict or a Recipe, got {short_repr(source)}.")
        folder = Path(source).parent
        source = read_yaml(source, kind="recipe", example="experts: [{source_model: PATH}, ...]")
    mergekit.check_is_mixture(source)
    problems: dict[str, str] = {}
    recipe = None
    try:
        recipe = build_recipe(source, changes, problems)
    except MergeError as error:  # after which nothing more can be checked
        problems[str(error)] = ""
    if recipe is not None:
        invalid = set(problems.values())
        problems |= {message: "" for keys, message in find_conflicts(recipe) if not invalid & {*keys}}
    if problems or recipe is None:
        raise MergeError("\n".join(list(problems)[:MAX_ERRORS]))
    return resolve_paths(recipe, folder)


def build_recipe(source: dict, changes: dict, problems: dict[str, str]) -> Recipe | None:
    """The recipe with all defaults, whose values are not checked against each other; `None` if too little of it can be read for that.

    Adds to `problems` the message of each invalid value and its key, which has its default then. Raises a `MergeError` for what has no
    default.
    """
    problems |= dict.fromkeys([*find_key_errors(source), *find_key_errors(changes)], "")
    readable = not problems
    options, changes = (validate_keys(keys, "the recipe", problems) for keys in (source, changes))
    allowed = [*options.get("allow", []), *changes.get("allow", [])]
    options |= {**changes, "allow": list(dict.fromkeys(allowed))}
    given, count = options.get("experts"), len(problems)
    experts: list[ExpertRecipe] = []
    if isinstance(given, list) and given:
        all_given = [*given, *base_expert(options, problems)]
        experts = [read_expert(expert, number, problems) for number, expert in enumerate(all_given, 1)]
    elif readable:
        problem = "has no experts" if not given else f"has experts={short_repr(given)}, which is not a list"
        raise MergeError(f"The recipe {problem}. Give a list: experts: [{{source_model: PATH}}, ...].")
    if not readable or len(problems) > count:
        return None
    recipe = Recipe(**{**options, "experts": name_experts(experts)})
    set_weights(recipe, replaced="weights" in changes)
    set_defaults(recipe)
    return recipe


def find_key_errors(recipe: dict) -> Iterator[str]:
    """The keys of a recipe and its experts that are unknown, or that only mergekit-moe has, one message each."""
    mappings: list[tuple[type, str, dict]] = [(Recipe, "the recipe", recipe)]
    experts = recipe.get("experts")
    for number, expert in enumerate(experts if isinstance(experts, list | tuple) else [], 1):
        if isinstance(expert, dict):
            mappings.append((ExpertRecipe, called(expert, number), expert))
    if isinstance(recipe.get("include_base"), dict):
        mappings.append((ExpertRecipe, "include_base", recipe["include_base"]))
    for kind, where, options in mappings:
        known = {f.name for f in fields(kind)}
        for name, value in options.items():
            if name in mergekit.KEYS:
                neutral, advice = mergekit.KEYS[name]
                if value is not None and value != neutral:
                    yield f"{name} in {where} is a key of mergekit-moe that is not supported. {advice}"
            elif name not in known:
                yield f"Unknown key {short_repr(name)} in {where}.{did_you_mean(str(name), known - {'architecture'})}"


def set_weights(recipe: Recipe, replaced: bool) -> None:
    """Gives each expert its weight of the list `weights`; `replaced` if the list replaces the weights of the recipe."""
    if recipe.weights is None:
        return
    count = len(recipe.experts)
    if len(recipe.weights) != count:
        raise MergeError(f"weights has {len(recipe.weights)} values for {count} experts. Give one value per expert.")
    if not replaced and any(expert.weight != 1.0 for expert in recipe.experts):
        raise MergeError("The recipe has both weights and a weight of an expert. Remove one of them.")
    for expert, weight in zip(recipe.experts, recipe.weights, strict=True):
        expert.weight = weight
    recipe.weights = None


def set_defaults(recipe: Recipe) -> None:
    """Sets values that depend on others: the routed layers, the tokenizer's source, `average`, `density` and `gate_mode`."""
    if recipe.attention == "routed":
        more = [name for name in ATTENTION if name not in recipe.router_layers]
        recipe.router_layers = [*more, *recipe.router_layers]
    recipe.attention = None  # router_layers has it now
    if recipe.tokenizer_source is not None:  # mergekit's value is a path
        paths = {recipe.base_model: "base"} | {expert.source_model: expert.name for expert in recipe.experts}
        recipe.tokenizer_source = paths.get(recipe.tokenizer_source, recipe.tokenizer_source)
    complete = all(expert.positive_prompts for expert in recipe.experts) or recipe.gate_mode == "random"
    like_mergekit = bool(recipe.base_model) and recipe.is_stock and complete
    recipe.average = recipe.average or ("base" if like_mergekit else "mean")
    if recipe.density is None:
        recipe.density = AVERAGES[recipe.average].density
    if not recipe.gate_mode:
        default = "hidden" if like_mergekit else "random"
        recipe.gate_mode = "none" if recipe.routing_policy == "domain" else default


def validate_keys(options: dict, where: str, problems: dict[str, str]) -> dict[str, Any]:
    """The keys that have a valid value; paths as strings, single strings as lists. Adds the others to `problems`, see `build_recipe`."""
    valid = {}
    for name, value in options.items():
        if name in mergekit.KEYS or value is None:  # a key without a value is ignored; mergekit's too
            continue
        if name in LIST_OR_STRING and isinstance(value, str):
            value = [value]
        if name == "allow" and list_of(is_text)(value):
            value = [part.strip() for names in value for part in str(names).split(",") if part.strip()]
        if name == "average" and isinstance(value, str):
            value = mergekit.AVERAGES.get(value, value)
        if problem := find_problem(name, value, where):
            problems[problem] = name
            continue
        valid[name] = str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
    return valid


def find_problem(name: str, value, where: str) -> str | None:
    """What is wrong with the value of a key by itself."""
    if name == "gate_mode" and isinstance(value, str) and value in mergekit.GATES:
        return f"gate_mode: {value} of mergekit-moe is not supported. {mergekit.GATES[value]}"
    if name == "architecture" and not (isinstance(value, str) and mergekit.formats_of(value)):
        return (
            f"architecture={short_repr(value)} is a value of mergekit-moe that is not supported. {mergekit.USE_FORMAT}"
        )
    expected, is_valid = VALIDATORS.get(name, ("", lambda _: True))
    if not is_valid(value):
        return f"{name} in {where} must be {expected}, got {short_repr(value)}."
    for item in (value if name in LIST_OR_STRING else [value]) if name in CHOICES else ():
        if item not in CHOICES[name]:
            return f"Invalid {name}: {short_repr(item)}.{did_you_mean(str(item), CHOICES[name])}"
    return None


def called(expert: dict, number: int) -> str:
    """What a message calls an expert: its name, or its number in the recipe."""
    name = expert.get("name") or expert.get("source_model")
    return f"the expert {short_repr(name)}" if name else f"expert number {number}"


def read_expert(options, number: int, problems: dict[str, str]) -> ExpertRecipe:
    """An expert from a path, a Hub id or a mapping. Adds what is wrong with it to `problems`, see `build_recipe`."""
    if isinstance(options, str | Path):
        options = {"source_model": str(options)}
    if not isinstance(options, dict):
        problem = f"Expert number {number} must be a path or a mapping with source_model, got {short_repr(options)}."
        problems[problem] = "experts"
        return ExpertRecipe("")
    name = called(options, number)
    if options.get("source_model") is None:
        problem = f"{name[0].upper()}{name[1:]} has no source_model. Give the folder or the Hub id of its checkpoint."
        problems[problem] = "experts"
    known = {field.name for field in fields(ExpertRecipe)}
    options = validate_keys({k: v for k, v in options.items() if k in known}, name, problems)
    return ExpertRecipe(**{"source_model": "", **options})


def base_expert(options: dict[str, Any], problems: dict[str, str]) -> list[dict[str, Any]]:
    """The base as an expert, if the recipe includes it. The key is removed from `options`."""
    more = options.pop("include_base", False)
    if more is False or "base_model" in problems.values():
        return []
    if "base_model" not in options:
        raise MergeError("include_base needs base_model: the base is one of the experts then.")
    if not isinstance(more, dict):
        more = {}
    if "source_model" in more:
        raise MergeError("include_base must not have a source_model, which is the base_model. Remove it.")
    return [{"name": "base", **more, "source_model": options["base_model"]}]


def name_experts(experts: list[ExpertRecipe]) -> list[ExpertRecipe]:
    """Names experts without a name after their folder; those of one folder, as for upcycling, are numbered."""
    seen: dict[str, ExpertRecipe] = {}
    unnamed = [expert.source_model for expert in experts if not expert.name]
    copies: Counter[str] = Counter()
    for expert in experts:
        number = unnamed.count(expert.source_model) > 1 and not expert.name
        path = Path(expert.source_model)
        expert.name = expert.name or (path if path.name not in ("", "..") else path.resolve()).name or str(path)
        if not is_name(expert.name):
            raise MergeError(f"The folder {expert.name!r} is not usable as a name. Set the key name of this expert.")
        if number:
            copies[expert.source_model] += 1
            expert.name += f"-{copies[expert.source_model]}"
        other = seen.setdefault(expert.name, expert)
        if other is not expert:
            raise MergeError(
                f"Two experts have the name {expert.name!r}: {other.source_model} and {expert.source_model}. Give one of "
                "them another name with the key name."
            )
    return experts


def resolve_paths(recipe: Recipe, folder: Path | None) -> Recipe:
    """Resolves paths relative to the recipe's folder; those that do not exist there stay relative to the working directory."""
    for path in (recipe.base_model, *(expert.source_model for expert in recipe.experts)):
        expand_user(path or "")
    recipe.base_model = recipe.base_model and resolve(recipe.base_model, folder)
    recipe.centroids = recipe.centroids and resolve(str(expand_user(recipe.centroids)), folder)
    for expert in recipe.experts:
        expert.source_model = resolve(expert.source_model, folder)
        expert.samples = expert.samples and resolve(str(expand_user(expert.samples)), folder)
    return recipe


def all_parts(recipe: Recipe, shape: Shape) -> list[RoutedPart]:
    """The routers of a mixture of models of this shape; in `format: lexicon` with the names of a Mixtral."""
    layers = shape.num_hidden_layers
    mixture = shape.mixture if recipe.is_stock and recipe.format != "lexicon" else MIXTURES["mixtral"]
    return routed_parts(layers, recipe.router_layers, recipe.router_layers_index, mixture, int(recipe.rank or 0))


def gated_parts(recipe: Recipe, shape: Shape) -> list[RoutedPart]:
    """The routers that have a gate: all; with the domain policy only the first, or none."""
    parts = all_parts(recipe, shape)
    if recipe.routing_policy != "domain":
        return parts
    return [] if recipe.gate_mode == "none" else parts[:1]
