"""The families of models that can be merged: one description each of the dense model, and of the class of its mixture.

To add a family, add an entry to `FAMILIES` (and to `MIXTURES`, if its mixture is of a new class), see CONTRIBUTING.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from run_tools.errors import UserError

LINEARS = ("gate_proj", "up_proj", "down_proj")
MLP = re.compile(rf"model\.layers\.(\d+)\.mlp\.({'|'.join(LINEARS)})\.weight")  # what is routed, in a dense model


@dataclass(frozen=True, eq=False)
class MixtureClass:
    """A class of transformers for mixtures: how it names its files' tensors and its configuration's fields.

    Attributes:
        model_type, architecture: as in config.json.
        block: the module of a layer that holds gate and experts.
        names: linear layer of a dense MLP -> its name in an expert.
        settings: fields with a fixed value unless the dense model has them, among them those with which identical experts equal the
            dense model.
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
    names: dict[str, str] = field(default_factory=lambda: {name: name for name in LINEARS})
    settings: dict[str, Any] = field(default_factory=dict)
    attention_biases: bool = True
    shared_expert: int = 0
    gguf: str = ""

    def prefix(self, layer: int) -> str:
        """The prefix of gate and experts of a layer."""
        return f"model.layers.{layer}.{self.block}"

    def gate(self, layer: int) -> str:
        """The name of a layer's gate."""
        return f"{self.prefix(layer)}.gate.weight"

    def expert(self, layer: int, index: int, linear: str, half: str = "") -> str:
        """The name of an expert's matrix, or of the factor A or B of one of low rank."""
        return f"{self.prefix(layer)}.experts.{index}.{self.names[linear]}{'.' + half if half else ''}.weight"

    def base(self, layer: int, linear: str) -> str:
        """The name of the base's matrix, which experts of low rank share."""
        return f"{self.prefix(layer)}.base.{self.names[linear]}.weight"

    def zeros(self, layer: int, hidden_size: int) -> dict[str, tuple[int, int]]:
        """Name -> shape of the tensors of the shared expert, all zero, if there is one."""
        if not (rows := self.shared_expert):
            return {}
        sizes = {"gate_proj": (rows, hidden_size), "up_proj": (rows, hidden_size), "down_proj": (hidden_size, rows)}
        names = {f"{self.prefix(layer)}.shared_expert.{name}.weight": size for name, size in sizes.items()}
        return names | {f"{self.prefix(layer)}.shared_expert_gate.weight": (1, hidden_size)}


@dataclass(frozen=True, eq=False)
class Family:
    """A dense model whose MLPs can become experts.

    Attributes:
        model_type, architecture: as in config.json.
        mixture: the class of its mixtures in transformers.
        refused: field -> the values with which the mixture can represent it; any other is an error.
        lexicon: the fields of `LexiconConfig` by which `format: lexicon` represents its attention; None if it cannot.
    """

    model_type: str
    architecture: str
    mixture: MixtureClass
    refused: dict[str, tuple] = field(default_factory=dict)
    lexicon: dict[str, bool] | None = None


NORMALISED = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.001}
FULL_ATTENTION = {"use_sliding_window": False, "sliding_window": None}
NO_WINDOW = {"use_sliding_window": (False, None)}
MIXTRAL = MixtureClass(
    "mixtral", "MixtralForCausalLM", block="block_sparse_moe", attention_biases=False, gguf="LLAMA",
    names={"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}, settings={"router_aux_loss_coef": 0.001, "sliding_window": None},
)  # fmt: skip
QWEN2_MOE = MixtureClass(
    "qwen2_moe", "Qwen2MoeForCausalLM", shared_expert=32, gguf="LLAMA",
    settings={**NORMALISED, **FULL_ATTENTION, "qkv_bias": True, "shared_expert_intermediate_size": 32},
)  # fmt: skip
QWEN3_MOE = MixtureClass("qwen3_moe", "Qwen3MoeForCausalLM", settings={**NORMALISED, **FULL_ATTENTION}, gguf="QWEN3MOE")
FLEX_OLMO = MixtureClass(
    "flex_olmo", "FlexOlmoForCausalLM", settings={"norm_topk_prob": True, "router_aux_loss_coef": 0.001}
)
LEXICON = MixtureClass("lexicon", "LexiconForCausalLM", block=MIXTRAL.block, names=MIXTRAL.names)
MIXTURES = {mixture.model_type: mixture for mixture in (MIXTRAL, QWEN2_MOE, QWEN3_MOE, FLEX_OLMO)}
FORMATS = MIXTURES | {"lexicon": LEXICON}
FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama", "LlamaForCausalLM", MIXTRAL, lexicon={}),
        Family("mistral", "MistralForCausalLM", MIXTRAL, lexicon={}),
        Family("qwen2", "Qwen2ForCausalLM", QWEN2_MOE, refused=NO_WINDOW, lexicon={"qkv_bias": True}),
        Family("qwen3", "Qwen3ForCausalLM", QWEN3_MOE, refused=NO_WINDOW, lexicon={"qk_norm": True}),
        Family("olmo2", "Olmo2ForCausalLM", FLEX_OLMO),
    )
}


def family_of(model_type: str) -> Family:
    """The family of a dense model. Raises a `UserError` with the supported families for any other."""
    if model_type not in FAMILIES:
        raise UserError(f"model_type is {model_type!r:.60}; these types can be merged: {', '.join(FAMILIES)}.")
    return FAMILIES[model_type]
