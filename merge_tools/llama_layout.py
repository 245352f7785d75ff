"""The layout of a Llama according to its config.json: tensor names and shapes, RoPE settings, and routed modules."""

from dataclasses import dataclass, fields

from .errors import MergeError
from .recipe import LINEARS, MLP_LINEARS, Recipe

BLOCK_OF = {name: "mlp" if name in MLP_LINEARS else "self_attn" for name in LINEARS}
MIXTRAL_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
DEFAULT_THETA = 10000.0


@dataclass(frozen=True)
class LlamaShape:
    """The fields of config.json that determine the shapes of all tensors."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool

    @classmethod
    def from_config(cls, config: dict) -> "LlamaShape":
        """Reads the sizes from a config.json; raises a `MergeError` if one is missing."""
        try:
            heads = config["num_attention_heads"]
            optional = {"num_key_value_heads": heads, "head_dim": config["hidden_size"] // heads}
            optional |= dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings"), False)
            values = {name: config.get(name) or default for name, default in optional.items()}
            return cls(**{f.name: config[f.name] for f in fields(cls) if f.name not in values}, **values)
        except KeyError as error:
            raise MergeError(f"config.json is missing {error.args[0]!r}. Copy or download it again.") from error

    def linear(self, name: str) -> tuple[int, int]:
        """Shape `(out, in)` of a linear layer."""
        d = self.hidden_size
        queries, keys = (heads * self.head_dim for heads in (self.num_attention_heads, self.num_key_value_heads))
        shapes = {"q_proj": (queries, d), "k_proj": (keys, d), "v_proj": (keys, d), "o_proj": (d, queries)}
        shapes["gate_proj"] = shapes["up_proj"] = (self.intermediate_size, d)
        shapes["down_proj"] = (d, self.intermediate_size)
        return shapes[name]

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of all tensors, in the order in which a forward pass uses them."""
        d = self.hidden_size
        shapes = {"model.embed_tokens.weight": (self.vocab_size, d)}
        for layer in range(self.num_hidden_layers):
            prefix = f"model.layers.{layer}"
            shapes[f"{prefix}.input_layernorm.weight"] = (d,)
            for name in LINEARS:
                if name == "gate_proj":
                    shapes[f"{prefix}.post_attention_layernorm.weight"] = (d,)
                module = f"{prefix}.{BLOCK_OF[name]}.{name}"
                shapes[f"{module}.weight"] = self.linear(name)
                if self.mlp_bias if name in MLP_LINEARS else self.attention_bias:
                    shapes[f"{module}.bias"] = self.linear(name)[:1]
        shapes["model.norm.weight"] = (d,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, d)
        return shapes


def rope_parameters(config: dict) -> dict:
    """The RoPE settings of a config of transformers 4 or 5 as `{"rope_type", "rope_theta", ...}`."""
    settings = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    rope_type = settings.pop("rope_type", None) or settings.pop("type", None) or "default"
    settings.pop("type", None)
    theta = settings.pop("rope_theta", None) or config.get("rope_theta") or DEFAULT_THETA
    settings = {key: value for key, value in settings.items() if value is not None}
    return {"rope_type": rope_type, "rope_theta": float(theta), **settings}


def rope_config_v4_and_v5(config: dict) -> dict:
    """The RoPE settings in two spellings: transformers 5 reads `rope_parameters`, 4.x the other keys."""
    settings = rope_parameters(config)
    scaling = {key: value for key, value in settings.items() if key != "rope_theta"}
    return {
        "rope_parameters": settings,
        "rope_theta": settings["rope_theta"],
        "rope_scaling": None if settings["rope_type"] == "default" else scaling,
    }


@dataclass(frozen=True)
class RoutedPart:
    """One router and the module that it routes: a whole MLP, or one linear layer."""

    layer: int
    part: str  # "mlp" or the name of a linear layer

    @property
    def module(self) -> str:
        """The name of the dense module, whose input is the input of the router."""
        inner = "mlp" if self.part == "mlp" else f"{BLOCK_OF[self.part]}.{self.part}"
        return f"model.layers.{self.layer}.{inner}"

    @property
    def prefix(self) -> str:
        """The prefix of gate and experts in a mixture's files."""
        return f"model.layers.{self.layer}.block_sparse_moe" if self.part == "mlp" else self.module

    @property
    def gate(self) -> str:
        """The name of the gate's weight."""
        return f"{self.prefix}.gate.weight"

    def expert_tensors(self, shape: LlamaShape) -> list[tuple[str, str]]:
        """`[(name in a dense Llama, suffix after "experts.N." in the mixture)]`."""
        if self.part == "mlp":
            return [(f"{self.module}.{name}.weight", f"{short}.weight") for name, short in MIXTRAL_NAMES.items()]
        bias = shape.mlp_bias if self.part in MLP_LINEARS else shape.attention_bias
        return [(f"{self.module}.{suffix}", suffix) for suffix in ("weight", "bias")[: 1 + bias]]

    def expert(self, index: int, suffix: str) -> str:
        """The name of an expert's tensor."""
        return f"{self.prefix}.experts.{index}.{suffix}"

    def input_size(self, shape: LlamaShape) -> int:
        """The size of the vectors that are routed."""
        return shape.hidden_size if self.part == "mlp" else shape.linear(self.part)[1]


def routed_parts(layers: int, router_layers: list[str], index: list[int] | None) -> list[RoutedPart]:
    """All routers in the order of a forward pass.

    Raises a `MergeError` if `index` contains a layer that does not exist.
    """
    order = [name for name in (*LINEARS[:4], "mlp", *MLP_LINEARS) if name in router_layers]
    chosen = range(layers) if index is None else sorted(set(index))
    for layer in chosen:
        if not isinstance(layer, int) or not 0 <= layer < layers:
            raise MergeError(f"router_layers_index contains {layer!r}; the experts have layers 0 to {layers - 1}.")
    return [RoutedPart(layer, part) for layer in chosen for part in order]


def mixture_layout(shape: LlamaShape, parts: list[RoutedPart]) -> list[str | RoutedPart]:
    """The names of the tensors that are not routed, and the routed parts, in the order of a forward pass."""
    part_of = {dense: part for part in parts for dense, _ in part.expert_tensors(shape)}
    return list(dict.fromkeys(part_of.get(name, name) for name in shape.tensors()))


def gated_parts(recipe: Recipe, layers: int) -> list[RoutedPart]:
    """The routers that have a gate: all; with the domain policy only the first, or none."""
    parts = routed_parts(layers, recipe.router_layers, recipe.router_layers_index)
    if recipe.routing_policy != "domain":
        return parts
    return [] if recipe.gate_mode == "none" else parts[:1]
