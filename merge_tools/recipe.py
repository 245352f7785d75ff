"""The recipe of a mixture: a YAML file or a dict. A file of mergekit-moe keeps its meaning: gates from prompts and the base's shared
weights are the default with `base_model` and prompts, and a key that is not supported is refused by name.
"""

import os
import re
from collections import defaultdict
from dataclasses import asdict, dataclass, field, fields
from itertools import count
from pathlib import Path
from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassFieldValidationError

from run_tools.errors import UserError, did_you_mean, short_repr
from run_tools.files import read_yaml

from .families import MIXTURES

GateMode = Literal["random", "hidden", "cheap_embed", "ridge", "none"]
Policy = Literal["token", "sequence_soft", "sequence_hard", "domain"]
Format = Literal["auto", "lexicon", "mixtral", "qwen2_moe", "qwen3_moe", "flex_olmo"]
TEXTS_OF = {"hidden": "positive_prompts", "cheap_embed": "positive_prompts", "ridge": "samples"}
PATHS = ("base_model", "centroids", "source_model", "samples")
SAME = {("average", "linear"): "mean", ("gate_mode", "uniform_random"): "random"}  # names of mergekit
MERGED_BEFORE = "Merge with mergekit first, and give the result as base_model, with average: base."
WHOLE_MLPS = "Experts are whole MLPs in all layers."
# What mergekit and mergoo have and Lexperts does not -> what to do. A value without an effect is accepted.
OTHER_KEYS = {
    "noise_scale": "Experts are copied byte by byte. Tune the gates after the merge to break symmetry.",
    "residual_scale": "Experts are copied byte by byte. Scale down_proj in the expert's checkpoint first.",
    "shared_experts": "Every expert is routed.",
    "tokenizer_source": "The base's tokenizer is written. Set base_model to the model that has it.",
    "density": MERGED_BEFORE,
    **dict.fromkeys(("router_layers", "router_layers_index", "attention"), WHOLE_MLPS),
    "include_base": "List the base as an expert: {source_model: BASE, name: base}.",
    "weights": "Give each expert its weight.",
    "allow": "Write tokenizer: base to accept experts with another vocabulary.",
}
OTHER_VALUES = {
    "average": (MERGED_BEFORE, ("slerp", "ties", "dare", "dare_ties", "dare_linear")),
    "gate_mode": ("Use hidden or ridge.", ("hidden_avg", "hidden_last", "router_input", "centroid", "anchor")),
}
TEXT = "a text (in quotes, if it has a colon or is a number)"
KINDS = {"list": f"{TEXT}, or a list of these", "float": "a number", "int": "a whole number", "str": TEXT}
ARCHITECTURES = {"mixtral": "mixtral", "qwen moe": "qwen2_moe", "qwen3 moe": "qwen3_moe"}  # mergekit's -> the format


@strict
@dataclass
class ExpertRecipe:
    """One expert: the path or Hub id of its checkpoint, its name, and the texts that its gate is computed from."""

    source_model: str
    name: str = ""
    positive_prompts: list[str] = field(default_factory=list)
    negative_prompts: list[str] = field(default_factory=list)
    samples: str | None = None  # .jsonl or .txt file of the expert's own data, for `gate_mode: ridge`
    weight: float | int = 1.0


@strict
@dataclass
class Recipe:
    """Which experts are merged, and how.

    Args:
        experts: two or more experts, each a path, a Hub id, or a mapping with `source_model`, `name` (default: the name
            of the folder), `positive_prompts`, `negative_prompts`, `samples`, `weight`. As in mergekit, MODEL@REVISION is a revision on
            the Hub, and MODEL+ADAPTER an adapter over a model.
        base_model: the model that provides the configuration, the tokenizer, the hidden states for gates and, with
            `average: base`, all weights that are not routed. Default: the first expert.
        average: "mean" averages weights that are not routed over the experts, by their `weight`; "base" copies the base model's.
            Default: "base" for a recipe as mergekit-moe reads them, i.e. with `base_model`, with prompts for every expert or
            `gate_mode: random`, and routing per token; otherwise "mean".
        routing_policy: "token" (default), "sequence_soft", "sequence_hard" or "domain".
        gate_mode: "random", "hidden", "cheap_embed", "ridge" or "none", see `gates`. Default: "hidden" for a recipe as mergekit-moe reads
            them, see `average`; "none" for the domain policy, to which any other mode adds a learned gate; otherwise "random".
        gate_tokens: tokens of each expert's samples that `gate_mode: ridge` reads; default: 8 per dimension of the model.
        experts_per_token: experts that the token policy selects per token (top-k), default 2.
        dtype: dtype of the output; default: the base model's.
        format: "auto", "lexicon", or the class of transformers for mixtures of such experts, which opens without this
            package: "mixtral", "qwen2_moe", "qwen3_moe" or "flex_olmo". "auto" is that class if it can represent the mixture.
        tokenizer: "base" accepts experts with another vocabulary; the base's tokenizer and embeddings are written.
        centroids: safetensors file with the centroids of the experts' clusters, `(experts, size)`, saved for `assign_domains`.
        embedder: name of the sentence embedder that the centroids were computed with.
        rank: stores experts as differences of this rank from the base's MLPs, see `low_rank`. Default: experts are whole.
        architecture: the name of the format in mergekit-moe, accepted if it is what is written anyway.
        seed: seed of random gates, and of the order in which samples are read.
    """

    experts: list[ExpertRecipe]
    base_model: str | None = None
    average: Literal["base", "mean"] | None = None
    routing_policy: Policy = "token"
    gate_mode: GateMode | None = None
    gate_tokens: int | None = None
    experts_per_token: int = 2
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    format: Format = "auto"
    tokenizer: Literal["base"] | None = None
    centroids: str | None = None
    embedder: str | None = None
    rank: int | None = None
    architecture: str | None = None
    seed: int = 42

    @property
    def names(self) -> list[str]:
        """The names of the experts."""
        return [expert.name for expert in self.experts]

    @property
    def is_stock(self) -> bool:
        """Whether a class of transformers can represent the routing of this recipe."""
        return self.routing_policy == "token" and not self.rank

    def to_dict(self) -> dict[str, Any]:
        """The recipe as it would be written to a YAML file, without keys that are not set."""

        def shortened(options: dict[str, Any]) -> dict[str, Any]:
            return {k: v for k, v in options.items() if v not in (None, [], "") and (k, v) != ("weight", 1.0)}

        content = shortened(asdict(self))
        return content | {"experts": [shortened(expert) for expert in content["experts"]]}


def read_recipe(source: Recipe | dict | str | Path, **changes) -> Recipe:
    """Reads and validates a recipe; paths of a file are relative to its folder if they exist there.

    Args:
        source: YAML file, dict or `Recipe`.
        changes: keys to replace.

    Raises:
        UserError: for the first key or value that is wrong.
    """
    folder = None
    if isinstance(source, Recipe):
        source = source.to_dict()
    elif not isinstance(source, dict):
        folder = Path(source).expanduser().parent
        source = read_yaml(Path(source).expanduser())
    dense = source.keys() & {"merge_method", "models", "slices"}
    if dense and "experts" not in source:
        raise UserError(f"The recipe has {min(dense)}: it is for a dense model. Run it with mergekit-yaml.")
    options = {**source, **changes}
    given = options.get("experts")
    if not isinstance(given, list | tuple) or len(given) < 2:
        raise UserError(f"experts must be a list of two or more, got {short_repr(given)}.")
    experts = [e if isinstance(e, dict) else {"source_model": e} for e in given]
    options["experts"] = [read_keys(ExpertRecipe, f"expert {number}", e, folder) for number, e in enumerate(experts, 1)]
    recipe = read_keys(Recipe, "the recipe", options, folder)
    name_experts(recipe.experts)
    set_defaults(recipe)
    check_values(recipe)
    return recipe


def read_keys(kind: type, where: str, options: dict[str, Any], folder: Path | None) -> Any:
    """A recipe or an expert with these keys; paths are relative to `folder` if they exist there, else to the working directory.

    Raises a `UserError` for a key or a value that is not known, or of another type.
    """
    known = {f.name: f.type for f in fields(kind)}
    values: dict[str, Any] = {}
    for name, value in options.items():
        if name in OTHER_KEYS and (value in (None, 0, []) or (name, value) == ("residual_scale", 1)):
            continue
        if name not in known:
            way = f" {OTHER_KEYS[name]}" if name in OTHER_KEYS else did_you_mean(str(name), known)
            raise UserError(f"Unknown key {short_repr(name)} in {where}.{way}")
        if isinstance(value, str | Path):
            value = str(SAME.get((name, str(value)), value))
            advice, others = OTHER_VALUES.get(name, ("", ()))
            if value in others:
                raise UserError(f"{name}: {value} is not supported. {advice}")
            if not value.strip():
                raise UserError(f"{name} in {where} is empty.")
            if name in PATHS:
                paths = [Path(os.path.expanduser(part)) for part in value.split("+")]  # MODEL+ADAPTER
                value = "+".join(str(folder / p if folder and (folder / p).exists() else p) for p in paths)
            value = [value] if name.endswith("_prompts") else value
        if value is not None:
            values[name] = value
    try:
        return kind(**values)
    except TypeError as error:  # of the only field without a default
        raise UserError(f"{where} has no source_model.") from error
    except StrictDataclassFieldValidationError as error:
        hint = str(known[name := str(error).split("'")[1]])
        allowed = "one of " + ", ".join(re.findall(r"'(\w+)'", hint)) if "Literal" in hint else ""
        allowed = allowed or next(text for part, text in KINDS.items() if part in hint)
        raise UserError(f"{where}: {name}: {short_repr(values[name])} is not {allowed}.") from error


def name_experts(experts: list[ExpertRecipe]) -> None:
    """Names experts without a name after their folder; those of one folder, as for upcycling, are numbered.

    Raises a `UserError` for two experts of one name, and for a name that is not safe in files and tables.
    """
    unnamed = [expert.source_model for expert in experts if not expert.name]
    numbers = defaultdict[str, Any](lambda: count(1))
    for expert in experts:
        origin = expert.source_model
        if not expert.name:
            expert.name = os.path.basename(os.path.abspath(origin))
            if unnamed.count(origin) > 1:
                expert.name += f"-{next(numbers[origin])}"
        if not expert.name.isprintable() or set(expert.name) & {"/", "\\"} or expert.name in ("", ".", ".."):
            raise UserError(f"{expert.name!r} is not usable as a name. Set the key name of {origin}.")
    names = [expert.name for expert in experts]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"Two experts have the name {twice!r}. Give one of them another with the key name.")


def set_defaults(recipe: Recipe) -> None:
    """Sets `average` and `gate_mode`, whose defaults depend on other keys. Raises a `UserError` for texts that the default gates ignore."""
    lacking = [expert.name for expert in recipe.experts if not expert.positive_prompts]
    like_mergekit = bool(recipe.base_model) and recipe.is_stock and (not lacking or recipe.gate_mode == "random")
    recipe.average = recipe.average or ("base" if like_mergekit else "mean")
    default: GateMode = "none" if recipe.routing_policy == "domain" else "hidden" if like_mergekit else "random"
    given = [key for key in ("samples", "positive_prompts") if any(getattr(expert, key) for expert in recipe.experts)]
    if not recipe.gate_mode and (unused := [key for key in given if key != TEXTS_OF.get(default)]):
        why = "base_model is missing" if recipe.is_stock and not recipe.base_model else "gate_mode: hidden does"
        why = "gate_mode: ridge does" if unused[0] == "samples" else f"{lacking[0]!r} has none" if lacking else why
        raise UserError(f"gate_mode: {default}, the default here, does not use the {unused[0]}: {why}. Set gate_mode.")
    recipe.gate_mode = recipe.gate_mode or default


def check_values(recipe: Recipe) -> None:
    """Raises a `UserError` for the first value that does not fit the others."""
    weights, k, rank = [expert.weight for expert in recipe.experts], recipe.experts_per_token, recipe.rank
    base, mode, policy, tokens = recipe.base_model, recipe.gate_mode, recipe.routing_policy, recipe.gate_tokens
    needed, others = TEXTS_OF.get(mode or ""), [e.name for e in recipe.experts if e.source_model != base]
    lacking = next((e.name for e in recipe.experts if needed and not getattr(e, needed)), None)
    problems = {
        f"experts_per_token={k} must be 1 to {len(weights)}, the number of experts.": not 1 <= k <= len(weights),
        f"weight must be at least 0, and larger for one expert: {weights}.": not min(weights) >= 0 < sum(weights) < 1e9,
        "average: base needs base_model, which has these weights.": recipe.average == "base" and not base,
        f"rank: {rank} must be at least 1, and needs base_model.": rank is not None and (rank < 1 or not base),
        f"seed={recipe.seed} must be at least 0.": recipe.seed < 0,
        "The name base is that of base_model. Give the expert another.": "base" in others,
        f"gate_mode: {mode} needs {needed}; {lacking!r} has none. Add some, or use gate_mode: random.": lacking,
        f"gate_mode: none needs routing_policy: domain, not {policy}.": mode == "none" and policy != "domain",
        f"gate_tokens={tokens} is for gate_mode: ridge.": tokens is not None and mode != "ridge",
        f"gate_tokens={tokens} must be at least 1.": tokens is not None and tokens < 1,
        f"format: {recipe.format} routes whole experts per token. Remove rank and routing_policy, or use format: lexicon.": (
            recipe.format in MIXTURES and not recipe.is_stock
        ),
    }
    if problem := next((message for message, found in problems.items() if found), None):
        raise UserError(problem)
