"""Which experts a mixture selects for each token."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from run_tools.errors import UserError
from run_tools.loading import open_model, open_tokenizer

from .families import FORMATS
from .record import RECORD, read_record
from .sources import read_json

GATE = re.compile(r"(?:model\.)?layers\.(\d+)\.\w+\.gate\.weight")  # of a layer, in a model and in a file


@dataclass
class Routing:
    """The experts that a mixture selects for one text.

    Attributes:
        text, tokens: the text and its T tokens.
        routers: names of the R routers, such as "layer 3".
        experts: `(R, T, k)`, the selected experts by decreasing weight; equal for all tokens if the policy routes whole sequences.
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
        values = {"text": self.text, "tokens": self.tokens, "routers": self.routers, "experts": self.experts.tolist()}
        return values | {"weights": np.round(self.weights, 4).tolist(), "load": np.round(self.load(), 4).tolist()}


def route(folder: str | Path, texts: Sequence[str], domain: str | None = None) -> list[Routing]:
    """Runs a mixture on texts and returns the experts that it selects.

    Args:
        domain: name of the expert, for a mixture with the domain policy.

    Raises:
        UserError: if a text is empty or too long, or the folder is not a mixture.
    """
    opened = open_mixture(folder)
    return [route_text(*opened, text, domain) for text in texts]


def open_mixture(folder: str | Path, **options: Any):
    """Model, tokenizer and names of the experts of a mixture; `options` of `from_pretrained`. A `UserError` for another model."""
    from transformers import AutoModelForCausalLM

    import modeling_lexicon  # noqa: F401  (registers LexiconForCausalLM)

    folder = Path(folder).expanduser()
    if (model_type := read_json(folder / "config.json").get("model_type")) not in FORMATS:
        raise UserError(f"{folder} has model_type {model_type!r}. Give a mixture ({', '.join(FORMATS)}).")
    model, tokenizer = open_model(AutoModelForCausalLM, folder, **options).eval(), open_tokenizer(folder)
    if (folder / RECORD).is_file():
        return model, tokenizer, [expert["name"] for expert in read_record(folder)["experts"]]
    return model, tokenizer, [f"expert {e}" for e in range(model.config.num_experts)]


def gates_of(model) -> dict[int, torch.nn.Parameter]:
    """Layer -> its gate (E, d)."""
    return {int(match[1]): gate for name, gate in model.named_parameters() if (match := GATE.fullmatch(name))}


@torch.no_grad()
def route_text(model, tokenizer, names: list[str], text: str, domain: str | None = None) -> Routing:
    """`route` of one text with a mixture that `open_mixture` has opened."""
    policy, options = getattr(model.config, "routing_policy", "token"), {}
    if domain is not None:
        if policy != "domain":
            raise UserError(f"domain={domain!r} needs routing_policy domain, but it is {policy}.")
        if domain not in names:
            raise UserError(f"domain={domain!r} must be one of {', '.join(names)}.")
        options["domain_ids"] = torch.tensor([names.index(domain)])
    inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    length, limit = inputs["input_ids"].shape[1], model.config.max_position_embeddings
    if not text.strip() or length > limit:
        raise UserError(f"The text {text[:60]!r} has {length} tokens, and must have 1 to {limit}.")
    try:
        outputs = model(**inputs, **options, output_router_logits=True, use_cache=False)
    except ValueError as error:  # of the domain policy, without a gate and without a domain
        raise UserError(str(error)) from error
    tokens = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0].tolist())
    if policy == "domain":  # without a gate there are no logits
        experts = outputs.expert_index[0].reshape(1, 1, 1).expand(1, length, 1).numpy()
        return Routing(text, tokens, ["all layers"], experts, np.ones(experts.shape, np.float32), names)
    k = {"token": model.config.num_experts_per_tok, "sequence_soft": len(names)}.get(policy, 1)
    # (R, T, E), or (R, 1, E) if the whole sequence is routed
    logits = torch.stack([own.float().reshape(-1, own.shape[-1]) for own in outputs.router_logits])
    top, index = (values.expand(-1, length, k) for values in logits.topk(k, dim=-1))
    routers = [f"layer {layer}" for layer in gates_of(model)]
    return Routing(text, tokens, routers, index.numpy(), top.softmax(-1).numpy(), names)
