# SPDX-License-Identifier: Apache-2.0
"""Configuration of LM-Lexicon: a Llama, or a model like it, whose MLPs are E routed experts (Sect. 3)."""

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig

from .shared_lexicon import ValidatedConfigMixin, require_one_of, require_range

ROUTING_POLICIES = ("token", "sequence_soft", "sequence_hard", "domain")


@strict
class LexiconConfig(ValidatedConfigMixin, LlamaConfig):
    r"""Configuration of an LM-Lexicon model: all fields of `LlamaConfig`, and the routing.

    Args:
        num_local_experts (`int`, default 4; also `num_experts`):
            Number of experts E in each layer, one per domain.
        num_experts_per_tok (`int`, default 2):
            Number of experts k per token with `routing_policy="token"`, 1 to `num_local_experts`.
        routing_policy (`str`, default `"token"`):
            `"token"`: each token uses its top k experts. `"sequence_soft"`: a sequence uses all experts, weighted by
            the gate's mean logits over its prompt. `"sequence_hard"`: it uses the best of these. `"domain"`: it uses the
            expert given by `domain_ids`, in every layer.
        expert_rank (`int`, default `None`):
            Rank of the experts' differences from one MLP that all of them share: an expert is two thin matrices per linear
            layer (FlexMoRE, arXiv 2602.08818). `None`: each expert has MLPs of its own.
        domain_gate (`bool`, default `False`):
            Whether the domain policy has a learned gate, in the first layer, that selects the expert from the prompt if no
            `domain_ids` are given.
        qkv_bias (`bool`, default `False`):
            Whether `q_proj`, `k_proj` and `v_proj` have biases but `o_proj` has none, as in Qwen2.
        qk_norm (`bool`, default `False`):
            Whether the queries and keys of each head are normalised before RoPE, as in Qwen3.
        router_aux_loss_coef (`float`, default 0):
            Weight of the load-balancing loss in the training loss, which the paper does not have. A Mixtral's is 0.001, but it
            adds that loss only with `output_router_logits=True`: by default both train by the same loss.
        output_router_logits (`bool`, default `False`):
            Whether the outputs have `router_logits`, `expert_index` and `aux_loss`.
        expert_names (`list[str]`, default `None`):
            One name per expert, such as its domain.
        centroid_size (`int`, default `None`), embedder (`str`, default `None`):
            Size of the saved cluster centroids, and the sentence-transformers model that computed them; both for
            `LexiconForCausalLM.assign_domains`.
        kwargs: fields of `LlamaConfig`.

    Raises:
        ValueError: for a value outside its range.

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
    # Llama's plans shard the MLPs.
    base_model_tp_plan = None
    base_model_pp_plan = None

    num_local_experts: int = 4
    num_experts_per_tok: int = 2
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

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        self.check()

    def check(self):
        """Raises a `ValueError` that states the value and the reason."""
        E, k, rank = self.num_local_experts, self.num_experts_per_tok, self.expert_rank
        require_range(self, ["num_local_experts", "num_experts_per_tok", "centroid_size", "expert_rank"], 1)
        require_range(self, ["router_aux_loss_coef"], 0)
        require_one_of(self, {"routing_policy": ROUTING_POLICIES})
        if k > E:
            raise ValueError(f"num_experts_per_tok={k} exceeds num_local_experts={E}.")
        if self.expert_names is not None and len(self.expert_names) != E:
            raise ValueError(f"expert_names={self.expert_names} are not one name for each of num_local_experts={E}.")
        if rank is not None and rank > (most := min(self.hidden_size, self.intermediate_size)):
            raise ValueError(f"expert_rank={rank} exceeds that of the matrices, {most}.")
        if getattr(self, "sliding_window", None) is not None:
            raise ValueError(f"sliding_window={self.sliding_window} is not supported: attention is full. Use None.")
        if self.mlp_bias:
            raise ValueError("mlp_bias=True is not supported: Mixtral's experts have no bias.")
        if self.qkv_bias and self.attention_bias:
            raise ValueError("qkv_bias=True and attention_bias=True exclude each other: only one gives o_proj a bias.")
        for name, whole in (("router_layers", (None, "mlp", ["mlp"])), ("router_layers_index", (None,))):
            if (value := getattr(self, name, None)) not in whole:  # of older checkpoints
                raise ValueError(f"{name}={value} is not supported: experts are the whole MLPs of all layers.")


LexiconConfig.register_for_auto_class()
