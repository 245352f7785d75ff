"""The layout of a model according to its family and config.json: tensors, RoPE settings, and routed modules."""

from dataclasses import dataclass, fields

from .errors import MergeError
from .families import ATTENTION, LINEARS, MIXTURES, MLP, Family, MixtureClass, family_of

BLOCK_OF = {name: "mlp" if name in MLP else "self_attn" for name in LINEARS}
SHAPE_DEFAULTS = ("attention_bias", "mlp_bias", "tie_word_embeddings")
DEFAULT_THETA = 10000.0


@dataclass(frozen=True)
class Shape:
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
    family: Family

    @classmethod
    def from_config(cls, config: dict) -> "Shape":
        """Reads the sizes from a config.json; raises a `MergeError` if one is missing."""
        try:
            family, heads = family_of(config), config["num_attention_heads"]
            optional = {"num_key_value_heads": heads, "head_dim": config["hidden_size"] // heads}
            optional |= {key: value for key, value in family.defaults.items() if key in optional and key not in config}
            optional |= dict.fromkeys(SHAPE_DEFAULTS, False)
            values = {name: config.get(name) or default for name, default in optional.items()} | {"family": family}
            return cls(**{f.name: config[f.name] for f in fields(cls) if f.name not in values}, **values)
        except KeyError as error:
            raise MergeError(f"config.json is missing {error.args[0]!r}. Copy or download it again.") from error

    @property
    def mixture(self) -> MixtureClass:
        """The class of mixtures of such models."""
        return MIXTURES[self.family.mixture]

    def sizes(self) -> dict[str, int | bool]:
        """The fields of config.json."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "family"}

    def has_bias(self, linear: str) -> bool:
        """Whether a linear layer has a bias."""
        rule = self.family.biases.get(linear, False)
        return rule if isinstance(rule, bool) else getattr(self, rule)

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
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, d)}
        for layer in range(self.num_hidden_layers):
            prefix = f"model.layers.{layer}"
            for name in self.family.layer:
                if name in ("q_norm", "k_norm"):
                    heads = self.linear(name[0] + "_proj")[0]
                    size = self.head_dim if self.family.head_norms == "head" else heads
                    shapes[f"{prefix}.self_attn.{name}.weight"] = (size,)
                elif name not in BLOCK_OF:
                    shapes[f"{prefix}.{name}.weight"] = (d,)
                else:
                    module = f"{prefix}.{BLOCK_OF[name]}.{name}"
                    shapes[f"{module}.weight"] = self.linear(name)
                    if self.has_bias(name):
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
    mixture: MixtureClass = MIXTURES["mixtral"]
    rank: int = 0  # of the experts' differences from the base's MLP; 0 if each expert is stored whole

    @property
    def module(self) -> str:
        """The name of the dense module, whose input is the input of the router."""
        inner = "mlp" if self.part == "mlp" else f"{BLOCK_OF[self.part]}.{self.part}"
        return f"model.layers.{self.layer}.{inner}"

    @property
    def prefix(self) -> str:
        """The prefix of gate and experts in a mixture's files."""
        return f"model.layers.{self.layer}.{self.mixture.block}" if self.part == "mlp" else self.module

    @property
    def gate(self) -> str:
        """The name of the gate's weight."""
        return f"{self.prefix}.gate.weight"

    def expert_tensors(self, shape: Shape) -> list[tuple[str, str]]:
        """`[(name in a dense model, suffix after "experts.N." in the mixture)]`; two suffixes, of factors, for experts of low rank."""
        if self.rank:
            names = self.mixture.names.items()
            return [
                (f"{self.module}.{name}.weight", f"{short}.{half}.weight") for name, short in names for half in "AB"
            ]
        if self.part == "mlp":
            return [(f"{self.module}.{name}.weight", f"{short}.weight") for name, short in self.mixture.names.items()]
        suffixes = ("weight", "bias")[: 1 + shape.has_bias(self.part)]
        return [(f"{self.module}.{suffix}", suffix) for suffix in suffixes]

    def base_tensors(self) -> dict[str, str]:
        """Name in the mixture -> name in a dense model, of the base's MLP that experts of low rank share."""
        names = self.mixture.names.items() if self.rank else ()
        return {f"{self.prefix}.base.{short}.weight": f"{self.module}.{name}.weight" for name, short in names}

    def factor_size(self, half: str, size: tuple[int, ...]) -> tuple[int, int]:
        """The shape of the factor A or B of a matrix of this size."""
        return (self.rank, size[1]) if half == "A" else (size[0], self.rank)

    def zero_tensors(self, shape: Shape) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the tensors of the shared expert, all zero, if the class of the mixture has one."""
        if not (rows := self.mixture.shared_expert):
            return {}
        d = shape.hidden_size
        sizes = {"gate_proj": (rows, d), "up_proj": (rows, d), "down_proj": (d, rows)}
        return {
            **{f"{self.prefix}.shared_expert.{name}.weight": size for name, size in sizes.items()},
            f"{self.prefix}.shared_expert_gate.weight": (1, d),
        }

    def expert(self, index: int, suffix: str) -> str:
        """The name of an expert's tensor."""
        return f"{self.prefix}.experts.{index}.{suffix}"

    def input_size(self, shape: Shape) -> int:
        """The size of the vectors that are routed."""
        return shape.hidden_size if self.part == "mlp" else shape.linear(self.part)[1]


def routed_parts(
    layers: int,
    router_layers: list[str],
    index: list[int] | None,
    mixture: MixtureClass = MIXTURES["mixtral"],
    rank: int = 0,
) -> list[RoutedPart]:
    """All routers in the order of a forward pass.

    Raises a `MergeError` if `index` contains a layer that does not exist.
    """
    order = [name for name in (*ATTENTION, "mlp", *MLP) if name in router_layers]
    chosen = range(layers) if index is None else sorted(set(index))
    for layer in chosen:
        if not isinstance(layer, int) or not 0 <= layer < layers:
            raise MergeError(f"router_layers_index contains {layer!r}; the experts have layers 0 to {layers - 1}.")
    return [RoutedPart(layer, part, mixture, rank if part == "mlp" else 0) for layer in chosen for part in order]


def mixture_layout(shape: Shape, parts: list[RoutedPart]) -> list[str | RoutedPart]:
    """The names of the tensors that are not routed, and the routed parts, in the order of a forward pass."""
    part_of = {dense: part for part in parts for dense, _ in part.expert_tensors(shape)}
    return list(dict.fromkeys(part_of.get(name, name) for name in shape.tensors()))
