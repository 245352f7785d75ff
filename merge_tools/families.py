"""The families of models that can be merged: one description each of the dense model, and of the class of its mixture.

To add a family, add an entry to `FAMILIES` (and to `MIXTURES`, if its mixture is of a new class), see CONTRIBUTING.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import MergeError

LAYER = (
    "input_layernorm", "q_proj", "k_proj", "v_proj", "o_proj", "post_attention_layernorm", "gate_proj", "up_proj",
    "down_proj",
)  # fmt: skip
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ATTENTION, MLP = LINEARS[:4], LINEARS[4:]


@dataclass(frozen=True, eq=False)
class MixtureClass:
    """A class of transformers for mixtures: how it names its files' tensors and its configuration's fields.

    Attributes:
        model_type, architecture: as in config.json.
        block: the module of a layer that holds gate and experts.
        names: linear layer of a dense MLP -> its name in an expert.
        counts: the fields with the number of experts; releases of transformers spell it differently.
        sizes: the fields with the intermediate size of an expert.
        settings: fields with a fixed value, among them those with which identical experts equal the dense model.
        attention_biases: whether attention may have biases.
        shared_expert: the intermediate size of a shared expert, which the class requires. Its weights are zero, and so it
            adds nothing, whatever its gate is. 0 if the class has none.
        gguf: the architecture of llama.cpp that computes the same, by its name in the package gguf; empty if there is none.
            Its Qwen2-MoE does not: it leaves the weights of the selected experts as they are, and divides the zero gate of the
            shared expert by itself. Its Llama, with experts and biases, does.
    """

    model_type: str
    architecture: str
    block: str = "mlp"
    names: dict[str, str] = field(default_factory=lambda: {name: name for name in MLP})
    counts: tuple[str, ...] = ("num_experts",)
    sizes: tuple[str, ...] = ("intermediate_size", "moe_intermediate_size")
    settings: dict[str, Any] = field(default_factory=dict)
    attention_biases: bool = True
    shared_expert: int = 0
    gguf: str = ""

    def count(self, config: dict[str, Any]) -> Any:
        """The number of experts in a config.json, None if it has none."""
        return next((config[name] for name in self.counts if config.get(name) is not None), None)


@dataclass(frozen=True, eq=False)
class Family:
    """A dense model whose MLPs can become experts.

    Attributes:
        model_type, architecture: as in config.json.
        mixture: the class of its mixtures in transformers.
        layer: the modules of a layer in the order in which they run.
        biases: linear layer -> the field that enables its bias ("attention_bias" or "mlp_bias"), or True if it always has one.
        head_norms: "head" if `q_norm` and `k_norm` have the size of one head, "all" if that of all heads.
        defaults: the values of fields that config.json does not have.
        carried: fields that the mixture has too, besides those of every family.
        refused: field -> the values with which the mixture can represent it; any other is an error.
        lexicon: the fields of `LexiconConfig` by which `format: lexicon` represents its attention; None if it cannot.
    """

    model_type: str
    architecture: str
    mixture: str
    layer: tuple[str, ...] = LAYER
    biases: Mapping[str, str | bool] = field(default_factory=dict)
    head_norms: str = ""
    defaults: dict[str, Any] = field(default_factory=dict)
    carried: tuple[str, ...] = ()
    refused: dict[str, tuple] = field(default_factory=dict)
    lexicon: dict[str, bool] | None = None


NORMALISED = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.001}
FULL_ATTENTION = {"use_sliding_window": False, "sliding_window": None}
MIXTURES = {
    mixture.model_type: mixture
    for mixture in (
        MixtureClass(
            "mixtral", "MixtralForCausalLM", block="block_sparse_moe", counts=("num_local_experts",),
            names={"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}, sizes=("intermediate_size",),
            settings={"router_aux_loss_coef": 0.001, "sliding_window": None}, attention_biases=False, gguf="LLAMA",
        ),
        MixtureClass(
            "qwen2_moe", "Qwen2MoeForCausalLM", shared_expert=32, gguf="LLAMA",
            settings={**NORMALISED, **FULL_ATTENTION, "qkv_bias": True, "shared_expert_intermediate_size": 32},
        ),
        MixtureClass(
            "qwen3_moe", "Qwen3MoeForCausalLM", settings={**NORMALISED, **FULL_ATTENTION}, gguf="QWEN3MOE",
            counts=("num_experts", "num_local_experts"),
        ),
        MixtureClass(
            "flex_olmo", "FlexOlmoForCausalLM", sizes=("intermediate_size",),
            settings={"norm_topk_prob": True, "router_aux_loss_coef": 0.001},
        ),
    )
}  # fmt: skip
NO_WINDOW = {"use_sliding_window": (False, None)}
ALL_BIASES = {**dict.fromkeys(ATTENTION, "attention_bias"), **dict.fromkeys(MLP, "mlp_bias")}
QWEN = {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "num_key_value_heads": 32}
FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            "llama", "LlamaForCausalLM", "mixtral", biases=ALL_BIASES, lexicon={},
            defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
        ),
        Family(
            "mistral", "MistralForCausalLM", "mixtral", lexicon={}, carried=("sliding_window",),
            defaults={
                "rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096,
            },
        ),
        Family(
            "qwen2", "Qwen2ForCausalLM", "qwen2_moe", biases=dict.fromkeys(ATTENTION[:3], True), refused=NO_WINDOW,
            defaults=QWEN, lexicon={"qkv_bias": True},
        ),
        Family(
            "qwen3", "Qwen3ForCausalLM", "qwen3_moe", biases=dict.fromkeys(ATTENTION, "attention_bias"),
            layer=(*LAYER[:4], "q_norm", "k_norm", *LAYER[4:]), head_norms="head", refused=NO_WINDOW,
            carried=("attention_bias",), defaults={**QWEN, "head_dim": 128, "attention_bias": False}, lexicon={"qk_norm": True},
        ),
        Family(
            "olmo2", "Olmo2ForCausalLM", "flex_olmo", biases=dict.fromkeys(ATTENTION, "attention_bias"),
            layer=(
                *LAYER[1:4], "q_norm", "k_norm", "o_proj", "post_attention_layernorm", *MLP, "post_feedforward_layernorm",
            ),
            head_norms="all", carried=("attention_bias",),
            defaults={
                "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "attention_bias": False, "bos_token_id": None,
                "eos_token_id": 50279, "pad_token_id": 1,
            },
        ),
    )
}  # fmt: skip


def family_of(config: dict[str, Any]) -> Family:
    """The family of a dense model or of a mixture, whose tensors that are not routed have the same names and shapes.

    Raises a `MergeError` with the supported families for any other.
    """
    name = config.get("model_type")
    if name == "lexicon":
        fields = {key: True for key in ("qkv_bias", "qk_norm") if config.get(key)}
        return next((family for family in FAMILIES.values() if family.lexicon == fields), FAMILIES["llama"])
    if isinstance(name, str):
        for family in FAMILIES.values():
            if name in (family.model_type, family.mixture):
                return family
    raise MergeError(f"model_type is {name!r:.60}; models of these types can be merged: {', '.join(FAMILIES)}.")
