"""Which experts a mixture selects for each token, as data and as a heat map."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from run_tools.errors import expand_user

from .checkpoints import read_json
from .errors import MergeError
from .families import MIXTURES
from .layout import routed_parts
from .provenance import RECORD, read_record
from .tokenizers import tokenizer_file


@dataclass
class Routing:
    """The experts that a mixture selects for one text.

    Attributes:
        text, tokens: the text and its T tokens.
        routers: names of the R routers, such as "layer 3" or "layer 3 q_proj".
        experts: `(R, T, k)`, the selected experts by decreasing weight; equal for all tokens if the policy routes whole
            sequences.
        weights: `(R, T, k)`, their weights.
        names: names of the E experts.
    """

    text: str
    tokens: list[str]
    routers: list[str]
    experts: np.ndarray
    weights: np.ndarray
    names: list[str]

    def load(self) -> np.ndarray:
        """Each router's share of weight on each expert, `(R, E)`; rows sum to 1."""
        experts = range(len(self.names))
        load = np.stack([(self.weights * (self.experts == e)).sum((1, 2)) for e in experts], 1, dtype=np.float64)
        return load / np.maximum(load.sum(1, keepdims=True), 1e-12)

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable values."""
        return {
            "text": self.text,
            "tokens": self.tokens,
            "routers": self.routers,
            "experts": self.experts.tolist(),
            "weights": np.round(self.weights, 4).tolist(),
            "load": np.round(self.load(), 4).tolist(),
        }


def route(folder: str | Path, texts: Sequence[str], *, domain: str | None = None) -> list[Routing]:
    """Runs a mixture on texts and returns the experts that it selects.

    Args:
        domain: name of the expert, for a mixture with the domain policy.

    Raises:
        MergeError: if a text is empty or too long, or the folder is not a mixture.
    """
    from run_tools.model_loading import open_config

    if not texts or not all(text.strip() for text in texts):
        raise MergeError("A text is empty. Give at least one non-empty text (--text).")
    folder = expand_user(folder)
    check_mixture(folder)
    config = open_config(folder)
    names = expert_names(folder, config)
    find_domain(config, names, domain)
    model, tokenizer = open_mixture(folder)
    return route_texts(model, tokenizer, names, texts, domain=domain)


def find_domain(config, names: list[str], domain: str | None) -> int | None:
    """The index of a domain's expert. Raises a `MergeError` for an unknown one, and for a mixture that routes otherwise."""
    if domain is None:
        return None
    if policy_of(config) != "domain":
        raise MergeError(
            f"domain={domain!r} needs routing_policy domain, but this mixture has {policy_of(config)}. Leave it out."
        )
    if domain not in names:
        raise MergeError(f"The mixture has no expert {domain!r}. Its experts: {', '.join(names)}.")
    return names.index(domain)


def expert_names(folder: Path, config) -> list[str]:
    """The names in the record of the merge, or else numbers."""
    if (folder / RECORD).is_file():
        return [expert["name"] for expert in read_record(folder)["experts"]]
    return [f"expert {e}" for e in range(count_experts(config))]


def route_texts(
    model, tokenizer, names: list[str], texts: Sequence[str], *, domain: str | None = None
) -> list[Routing]:
    """`route` with a mixture that is already open; `names` are those of `expert_names`."""
    import torch

    config, options = model.config, {}
    if (index := find_domain(config, names, domain)) is not None:
        options["domain_ids"] = torch.tensor([index])
    routings = []
    for text in texts:
        inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        length, limit = inputs["input_ids"].shape[1], config.max_position_embeddings
        if length > limit:
            raise MergeError(f"A text has {length} tokens; the model supports {limit}. Shorten it.")
        try:
            with torch.no_grad():
                outputs = model(**inputs, **options, output_router_logits=True, use_cache=False)
        except ValueError as error:
            raise MergeError(str(error)) from error
        tokens = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0].tolist())
        experts, weights = selected_experts(config, outputs, length)
        routings.append(Routing(text, tokens, router_names(config), experts, weights, names))
    return routings


def open_mixture(folder: Path):
    """Opens the model in eval mode, and its tokenizer; raises a `MergeError` if the folder has not both."""
    from transformers import AutoModelForCausalLM

    from run_tools.model_loading import open_model, open_tokenizer

    check_mixture(folder)
    return open_model(AutoModelForCausalLM, folder).eval(), open_tokenizer(folder)


def check_mixture(folder: Path) -> None:
    """Raises a `MergeError` if a folder is not a mixture with a tokenizer."""
    import modeling_lexicon  # noqa: F401  (registers LexiconForCausalLM)

    if not folder.is_dir():
        raise MergeError(f"Folder {str(folder)!r} does not exist. Give a mixture's folder.")
    model_type = read_json(folder / "config.json").get("model_type")
    if model_type not in (*MIXTURES, "lexicon"):
        raise MergeError(f"{folder} has model_type {model_type!r}. Give a mixture ({', '.join(MIXTURES)} or lexicon).")
    if tokenizer_file(folder) is None:
        raise MergeError(f"{folder} has no tokenizer. Save one there.")


def policy_of(config) -> str:
    """The routing policy of a model's configuration."""
    return getattr(config, "routing_policy", "token")


def count_experts(config) -> int:
    """The number of experts, whose field differs between classes."""
    return getattr(config, "num_local_experts", None) or config.num_experts


def router_names(config) -> list[str]:
    """One name per router."""
    if policy_of(config) == "domain":
        return ["all layers"]
    index = getattr(config, "router_layers_index", None)
    parts = routed_parts(config.num_hidden_layers, getattr(config, "router_layers", ["mlp"]), index)
    return [f"layer {p.layer}" if p.part == "mlp" else f"layer {p.layer} {p.part}" for p in parts]


def selected_experts(config, outputs, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Experts and weights `(R, T, k)` by decreasing weight, from the model's outputs for one text of T tokens."""
    if policy_of(config) == "domain":  # without a gate there are no logits
        experts = outputs.expert_index[0].reshape(1, 1, 1).expand(1, length, 1).numpy()
        return experts, np.ones(experts.shape, np.float32)
    k = {"token": config.num_experts_per_tok, "sequence_soft": count_experts(config)}.get(policy_of(config), 1)
    experts, weights = [], []
    for logits in outputs.router_logits:
        logits = logits.float().reshape(-1, logits.shape[-1])  # (T, E), or (1, E) if the whole sequence is routed
        top, index = logits.topk(k, dim=-1)
        experts.append(index.expand(length, k).numpy())
        weights.append(top.softmax(-1).expand(length, k).numpy())
    return np.stack(experts), np.stack(weights)


def plot(routings: Sequence[Routing], path: str | Path):
    """Draws a heat map into an image file: one panel per text, one row per router, one column per token.

    The colour shows the expert with the largest weight; it is paler for smaller weights. Raises an `ImportError` without
    matplotlib.
    """
    try:
        from matplotlib.colors import to_rgb
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError("The heat map needs matplotlib. Install it with: pip install 'lexperts[merge]'") from error
    names = routings[0].names
    palette = [to_rgb(f"C{e % 10}") for e in range(len(names))]
    widest = max(len(r.tokens) for r in routings)
    rows = [max(0.28 * len(r.routers), 0.6) for r in routings]
    figure = Figure(figsize=(min(2.5 + 0.42 * widest, 40), sum(rows) + 1.3 * len(routings) + 0.6), layout="constrained")
    axes = figure.subplots(len(routings), 1, squeeze=False, gridspec_kw={"height_ratios": rows})[:, 0]
    for axis, routing in zip(axes, routings, strict=True):
        colours = np.array(palette)[routing.experts[..., 0]]  # (R, T, 3)
        strength = np.clip(routing.weights[..., :1], 0.25, 1.0)
        axis.imshow(1 - strength * (1 - colours), aspect="auto", interpolation="nearest")
        tokens = [printable(token) for token in routing.tokens]
        axis.set_xticks(range(len(tokens)), tokens, rotation=90, fontsize=8, parse_math=False)
        axis.set_yticks(range(len(routing.routers)), routing.routers, fontsize=8)
        axis.set_xlim(-0.5, widest - 0.5)
        title = routing.text if len(routing.text) < 100 else routing.text[:99] + "…"
        axis.set_title(title, fontsize=9, loc="left", parse_math=False)
        axis.spines[:].set_visible(False)
    handles = [Patch(color=colour, label=name.replace("$", r"\$")) for name, colour in zip(names, palette, strict=True)]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(names), 6), fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)


def printable(token: str) -> str:
    """A token with tokenizers' markers for spaces replaced by an underscore."""
    return token.replace("Ġ", "_").replace("▁", "_").replace("Ċ", "\\n")
