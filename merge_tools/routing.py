"""Which expert takes which token, layer by layer: measured, as a table, and as a picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .errors import MergeError
from .records import RECORD, read_record
from .sources import read_json
from .tokenizers import tokenizer_file


@dataclass
class Routing:
    """One text's way through a mixture.

    Attributes:
        tokens: the text's T tokens, as the tokenizer writes them.
        routers: a name for each of the R routers, such as "layer 3" or "layer 3 q_proj".
        experts: (R, T, k) the experts each token chose, heaviest first; for policies that choose for a whole sequence
            the same at every token.
        weights: (R, T, k) their weights.
    """

    text: str
    tokens: list[str]
    routers: list[str]
    experts: np.ndarray
    weights: np.ndarray
    names: list[str]

    def load(self) -> np.ndarray:
        """(R, E) each router's weight on each expert, as a share: rows sum to 1."""
        load = np.zeros((len(self.routers), len(self.names)))
        for e in range(len(self.names)):
            load[:, e] = (self.weights * (self.experts == e)).sum((1, 2))
        return load / np.maximum(load.sum(1, keepdims=True), 1e-12)

    def to_dict(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "tokens": self.tokens,
            "routers": self.routers,
            "experts": self.experts.tolist(),
            "weights": np.round(self.weights, 4).tolist(),
            "load": np.round(self.load(), 4).tolist(),
        }


def route(folder: str | Path, texts: Sequence[str], *, domain: str | None = None) -> list[Routing]:
    """Reads texts with a mixture and tells where each token went.

    Args:
        domain: the expert's name, for a mixture with the domain policy.

    Raises:
        MergeError: when there is nothing to read, or the folder is no mixture that opens.
    """
    import torch

    if not texts or not all(text.strip() for text in texts):
        raise MergeError("There is no text to route. Give some with --text.")
    model, tokenizer = open_mixture(Path(folder).expanduser())
    config = model.config
    names = expert_names(Path(folder).expanduser(), config.num_local_experts)
    options = {}
    if domain is not None:
        if policy_of(config) != "domain":
            raise MergeError(f"This mixture routes by {policy_of(config)}: no expert can be named for a whole text.")
        if domain not in names:
            raise MergeError(f"There is no expert {domain!r}. The experts: {', '.join(names)}.")
        options["domain_ids"] = torch.tensor([names.index(domain)])
    routings = []
    for text in texts:
        inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        length = inputs["input_ids"].shape[1]
        if length > config.max_position_embeddings:
            raise MergeError(
                f"The text has {length} tokens, and the model reads {config.max_position_embeddings}. Shorten it."
            )
        with torch.no_grad():
            try:
                outputs = model(**inputs, **options, output_router_logits=True, use_cache=False)
            except ValueError as error:
                raise MergeError(str(error)) from error
        tokens = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0].tolist())
        experts, weights = choices(config, outputs, length)
        routings.append(Routing(text, tokens, router_names(config), experts, weights, names))
    return routings


def open_mixture(folder: Path):
    """-> (model in eval mode, its tokenizer)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import modeling_lexicon  # noqa: F401  (registers the class for mixtures that are no Mixtral)

    if not folder.is_dir():
        raise MergeError(f"There is no folder {str(folder)!r}.")
    kind = read_json(folder / "config.json").get("model_type")
    if kind not in ("mixtral", "lexicon"):
        raise MergeError(f"{folder} holds a model of the type {kind!r}, which has no routers.")
    if tokenizer_file(folder) is None:
        raise MergeError(f"{folder} holds no tokenizer: a text cannot be read. Save one there.")
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def policy_of(config) -> str:
    return getattr(config, "routing_policy", "token")


def expert_names(folder: Path, count: int) -> list[str]:
    if (folder / RECORD).is_file():
        return [expert["name"] for expert in read_record(folder)["experts"]]
    return [f"expert {e}" for e in range(count)]


def router_names(config) -> list[str]:
    from .llama import routed_parts

    if policy_of(config) == "domain":
        return ["all layers"]
    index = getattr(config, "router_layers_index", None)
    parts = routed_parts(config.num_hidden_layers, getattr(config, "router_layers", ["mlp"]), index)
    return [f"layer {p.layer}" if p.part == "mlp" else f"layer {p.layer} {p.part}" for p in parts]


def choices(config, outputs, length: int) -> tuple[np.ndarray, np.ndarray]:
    """What a model said of one text with T tokens -> experts and weights (R, T, k), heaviest first."""
    if policy_of(config) == "domain":  # there may be no gate, and so no logits
        experts = outputs.expert_index[0].reshape(1, 1, 1).expand(1, length, 1).numpy()
        return experts, np.ones(experts.shape, np.float32)
    k = {"token": config.num_experts_per_tok, "sequence_soft": config.num_local_experts}.get(policy_of(config), 1)
    experts, weights = [], []
    for logits in outputs.router_logits:
        logits = logits.float().reshape(-1, logits.shape[-1])  # (T, E), or (1, E) for the whole text
        top, index = logits.topk(k, dim=-1)
        experts.append(index.expand(length, k).numpy())
        weights.append(top.softmax(-1).expand(length, k).numpy())
    return np.stack(experts), np.stack(weights)


def plot(routings: Sequence[Routing], path: str | Path):
    """A picture, one panel a text: a router a row, a token a column, coloured by the first expert, paler where its
    weight is smaller.

    Raises:
        ImportError: without matplotlib.
    """
    try:
        from matplotlib.colors import to_rgb
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError("The heat map needs matplotlib. Install it with: pip install lexperts[merge]") from error
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
        axis.set_xticks(range(len(routing.tokens)), [printable(t) for t in routing.tokens], rotation=90, fontsize=8)
        axis.set_yticks(range(len(routing.routers)), routing.routers, fontsize=8)
        axis.set_xlim(-0.5, widest - 0.5)
        title = routing.text if len(routing.text) < 100 else routing.text[:99] + "…"
        axis.set_title(title.replace("$", r"\$"), fontsize=9, loc="left")
        for side in ("top", "right", "bottom", "left"):
            axis.spines[side].set_visible(False)
    handles = [Patch(color=colour, label=name) for name, colour in zip(names, palette, strict=True)]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(names), 6), fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)


def printable(token: str) -> str:
    """A token as people read it: the signs that tokenizers use for spaces become a low bar."""
    return token.replace("Ġ", "_").replace("▁", "_").replace("Ċ", "\\n").replace("$", r"\$")
