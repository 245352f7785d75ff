# SPDX-License-Identifier: Apache-2.0
"""Configuration of LM-Lexicon: a Llama, or a model like it, whose MLPs, or linear layers, are E routed experts (Sect. 3)."""

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig

from .validation_lexicon import ValidatedConfigMixin, did_you_mean, require_one_of, require_range

ROUTING_POLICIES = ("token", "sequence_soft", "sequence_hard", "domain")
ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")
# In the order in which a decoder layer runs them.
ROUTER_LAYERS = (*ATTENTION_LINEARS, "mlp", *MLP_LINEARS)


@strict
class LexiconConfig(ValidatedConfigMixin, LlamaConfig):
    r"""Configuration of an LM-Lexicon model: all fields of `LlamaConfig`, and the routing.

    Args:
        num_local_experts (`int`, default 4; also `num_experts`):
            Number of experts E in each routed module, one per domain.
        num_experts_per_tok (`int`, default 2):
            Number of experts k per token with `routing_policy="token"`, 1 to `num_local_experts`.
        router_layers (`"mlp"` or a list of names, default `"mlp"`):
            The modules that exist once per expert and are routed. `"mlp"` is a whole MLP with one gate; `gate_proj`,
            `up_proj`, `down_proj`, `q_proj`, `k_proj`, `v_proj`, `o_proj` are single linear layers, each with its own
            gate. Stored as a list. `"mlp"` cannot be combined with the MLP's linear layers.
        router_layers_index (`list[int]`, default `None`):
            The decoder layers with routed modules, counted from 0; `None` for all.
        routing_policy (`str`, default `"token"`):
            `"token"`: each token uses its top k experts. `"sequence_soft"`: a sequence uses all experts, weighted by
            the gate's mean logits over its prompt. `"sequence_hard"`: it uses the best of these. `"domain"`: it uses the
            expert given by `domain_ids`, in every routed module.
        expert_rank (`int`, default `None`):
            Rank of the experts' differences from one MLP that all of them share, for `router_layers="mlp"`: an expert is two thin
            matrices per linear layer (FlexMoRE, arXiv 2602.08818). `None`: each expert has MLPs of its own.
        domain_gate (`bool`, default `False`):
            Whether the domain policy has a learned gate, in the first routed module, that selects the expert from the
            prompt if no `domain_ids` are given.
        qkv_bias (`bool`, default `False`):
            Whether `q_proj`, `k_proj` and `v_proj` have biases but `o_proj` has none, as in Qwen2.
        qk_norm (`bool`, default `False`):
            Whether the queries and keys of each head are normalised before RoPE, as in Qwen3.
        router_aux_loss_coef (`float`, default 0):
            Weight of the load-balancing loss (Fedus et al. 2022, Eq. 4, per layer) in the training loss.
        output_router_logits (`bool`, default `False`):
            Whether the outputs have `router_logits`, `expert_index` and `aux_loss`. With `domain_ids` no gate runs, and
            they only have `expert_index`.
        expert_names (`list[str]`, default `None`):
            One name per expert, such as its domain.
        centroid_size (`int`, default `None`), embedder (`str`, default `None`):
            Size of the saved cluster centroids, and the sentence-transformers model that computed them; both for
            `LexiconForCausalLM.assign_domains`.
        kwargs: fields of `LlamaConfig`.

    Raises:
        ValueError: for a value outside its range; the message has the value and how to fix it.

    Example:

    ```python
    >>> from modeling_lexicon import LexiconConfig, LexiconForCausalLM
    >>> config = LexiconConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    >>> model = LexiconForCausalLM(config)  # random weights; from_pretrained() opens merged experts
    ```"""

    model_type = "lexicon"
    readable_model_types = ("lexicon", "mixtral")  # both are saved in Mixtral's layout
    how_to_start = "Merge dense models into experts first: merge-experts compose recipe.yml folder."
    attribute_map = {"num_experts": "num_local_experts"}
    keys_to_ignore_at_inference = ["cache", "past_key_values", "router_logits", "expert_index", "aux_loss"]
    # Llama's plans shard linear layers that may be routed modules in this model.
    base_model_tp_plan = None
    base_model_pp_plan = None

    num_local_experts: int = 4
    num_experts_per_tok: int = 2
    router_layers: str | list[str] = "mlp"
    router_layers_index: list[int] | None = None
    routing_policy: str = "token"
    expert_rank: int | None = None
    domain_gate: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    router_aux_loss_coef: float | int = 0.0
    output_router_logits: bool = False
    expert_names: list[str] | None = None
    centroid_size: int | None = None
    embedder: str | None = None

    def __setattr__(self, name, value):
        if name == "router_layers" and isinstance(value, str):
            value = [value]
        super().__setattr__(name, value)

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        self.check()

    def routed_modules(self) -> list[tuple[int, str]]:
        """(decoder layer, name in `router_layers`) of every routed module, in the order in which they run."""
        layers = range(self.num_hidden_layers) if self.router_layers_index is None else sorted(self.router_layers_index)
        names = [name for name in ROUTER_LAYERS if name in self.router_layers]
        return [(layer, name) for layer in layers for name in names]

    def check(self):
        """Raises a `ValueError` that states the value, the reason and how to fix it."""
        E, k = self.num_local_experts, self.num_experts_per_tok
        require_range(self, ["num_local_experts", "num_experts_per_tok", "centroid_size", "expert_rank"], 1)
        require_range(self, ["router_aux_loss_coef"], 0)
        require_one_of(self, {"routing_policy": ROUTING_POLICIES})
        if k > E:
            raise ValueError(
                f"num_experts_per_tok={k} exceeds num_local_experts={E}. Use num_experts_per_tok={E} or less."
            )
        if self.expert_names is not None and len(self.expert_names) != E:
            raise ValueError(
                f"expert_names has {len(self.expert_names)} names for num_local_experts={E}: {self.expert_names}. "
                "Pass one name per expert, or None."
            )
        if getattr(self, "sliding_window", None) is not None:
            raise ValueError(
                f"sliding_window={self.sliding_window} is not supported: this model has full attention, like Llama. "
                "Use sliding_window=None."
            )
        if self.qkv_bias and self.attention_bias:
            raise ValueError(
                "qkv_bias=True and attention_bias=True exclude each other: with attention_bias o_proj has a bias too. Use one."
            )
        self._check_layers()

    def _check_layers(self):
        names, layers, depth = self.router_layers, self.router_layers_index, self.num_hidden_layers
        if not names:
            raise ValueError("router_layers is empty. Use router_layers='mlp'.")
        for name in names:
            if name not in ROUTER_LAYERS:
                raise ValueError(f"router_layers has the unknown layer {name!r}. {did_you_mean(name, ROUTER_LAYERS)}")
        if len(set(names)) != len(names):
            raise ValueError(f"router_layers={names} has a layer twice. Remove one.")
        mlp_linears = [name for name in MLP_LINEARS if name in names]
        if "mlp" in names and mlp_linears:
            raise ValueError(
                f"router_layers={names} has the whole MLP and also its {', '.join(mlp_linears)}. Use one or the other."
            )
        if "mlp" in names and self.mlp_bias:
            raise ValueError(
                "mlp_bias=True is not supported with router_layers='mlp': Mixtral's experts have no bias. "
                "Use mlp_bias=False, or router_layers=['gate_proj', 'up_proj', 'down_proj']."
            )
        if self.expert_rank is not None and "mlp" not in names:
            raise ValueError(
                f"expert_rank={self.expert_rank} is for whole MLPs, but router_layers={names}. Use router_layers='mlp', or "
                "expert_rank=None."
            )
        if self.expert_rank is not None and self.expert_rank > (most := min(self.hidden_size, self.intermediate_size)):
            raise ValueError(
                f"expert_rank={self.expert_rank} exceeds that of the matrices, {most}. Use {most} or less."
            )
        if layers is None:
            return
        if not layers:
            raise ValueError("router_layers_index is empty. Use None for all layers.")
        if invalid := [layer for layer in layers if not 0 <= layer < depth]:
            raise ValueError(
                f"router_layers_index has {invalid[0]}, but with num_hidden_layers={depth} layers are 0 to {depth - 1}."
            )
        if len(set(layers)) != len(layers):
            raise ValueError(f"router_layers_index={layers} has a layer twice. Remove one.")


LexiconConfig.register_for_auto_class()
