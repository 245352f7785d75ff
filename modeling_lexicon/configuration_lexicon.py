"""Configuration of LM-Lexicon: a Llama whose MLPs, or linear layers, are E experts (LM-Lexicon, paper's Sect. 3)."""

import difflib

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig

from .validation_lexicon import ValidatedConfigMixin

ROUTING_POLICIES = ("token", "sequence_soft", "sequence_hard", "domain")
ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")
# The order in which a decoder layer runs them.
ROUTER_LAYERS = (*ATTENTION_LINEARS, "mlp", *MLP_LINEARS)


@strict
class LexiconConfig(ValidatedConfigMixin, LlamaConfig):
    r"""What an LM-Lexicon model is made of: all that `LlamaConfig` has, and who routes what to which experts.

    Args:
        num_local_experts (`int`, default 4; also `num_experts`):
            Experts E in each routed module, one a domain.
        num_experts_per_tok (`int`, default 2):
            Experts k that each token chooses with `routing_policy="token"`, 1 to `num_local_experts`.
        router_layers (`"mlp"` or a list of names, default `"mlp"`):
            What is kept once per expert and routed. `"mlp"` is a whole MLP behind one gate; any of `gate_proj`,
            `up_proj`, `down_proj`, `q_proj`, `k_proj`, `v_proj`, `o_proj` is that linear layer behind a gate of its
            own. Always stored as a list; `"mlp"` does not go together with the MLP's own linear layers.
        router_layers_index (`list[int]`, default `None`):
            The decoder layers where this is so, counted from 0; `None` is all of them.
        routing_policy (`str`, default `"token"`):
            `"token"`: each token takes its top k experts. `"sequence_soft"`: a sequence takes all experts, weighted by
            the mean over its prompt. `"sequence_hard"`: it takes the best of these. `"domain"`: it takes the one
            expert that `domain_ids` name, in every routed module.
        domain_gate (`bool`, default `False`):
            Whether the domain policy has a learned gate, in the first routed module, that chooses the expert from the
            prompt where no `domain_ids` are given.
        router_aux_loss_coef (`float`, default 0):
            Weight of the load-balancing loss (Fedus et al. 2022, Eq. 4, a layer at a time) in the training loss.
        output_router_logits (`bool`, default `False`):
            Whether the outputs hold `router_logits`, `expert_index` and `aux_loss`. Where `domain_ids` decide, no gate
            does: then `expert_index` alone.
        expert_names (`list[str]`, default `None`):
            A name for each expert, such as its domain's.
        centroid_size (`int`, default `None`), embedder (`str`, default `None`):
            Size of the saved cluster centroids, and the sentence-transformers model they were found with; both for
            `LexiconForCausalLM.assign_domains`.
        kwargs: all that `LlamaConfig` takes.

    Raises:
        ValueError: for a value outside its range; the message names the value and the mend.

    Example:

    ```python
    >>> from modeling_lexicon import LexiconConfig, LexiconForCausalLM
    >>> config = LexiconConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    >>> model = LexiconForCausalLM(config)  # random weights; merged experts come by from_pretrained()
    ```"""

    model_type = "lexicon"
    readable_model_types = ("lexicon", "mixtral")  # Mixtral's layout is the one that LM-Lexicon writes
    how_to_start = "Merge dense models into experts first: merge-experts compose recipe.yml folder."
    attribute_map = {"num_experts": "num_local_experts"}
    keys_to_ignore_at_inference = ["past_key_values", "router_logits", "expert_index", "aux_loss"]
    # Llama's plans split linear layers that may be routed modules here.
    base_model_tp_plan = None
    base_model_pp_plan = None

    num_local_experts: int = 4
    num_experts_per_tok: int = 2
    router_layers: str | list[str] = "mlp"
    router_layers_index: list[int] | None = None
    routing_policy: str = "token"
    domain_gate: bool = False
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
        """Raises a `ValueError` that names the value, the reason and the mend."""
        E, k = self.num_local_experts, self.num_experts_per_tok
        if E < 1:
            raise ValueError(f"num_local_experts={E}: there must be at least one expert. Use num_local_experts=4.")
        if k > E:
            raise ValueError(
                f"num_experts_per_tok={k} is more than num_local_experts={E}: a token cannot choose an expert twice. "
                f"Use num_experts_per_tok={E} or fewer."
            )
        if k < 1:
            raise ValueError(f"num_experts_per_tok={k}: each token needs at least one expert. Use 2.")
        if self.routing_policy not in ROUTING_POLICIES:
            raise ValueError(
                f"routing_policy={self.routing_policy!r} is not known. {nearest(self.routing_policy, ROUTING_POLICIES)}"
            )
        if self.router_aux_loss_coef < 0:
            raise ValueError(
                f"router_aux_loss_coef={self.router_aux_loss_coef}: a loss weight cannot be negative. "
                "Use 0 to switch it off."
            )
        if self.centroid_size is not None and self.centroid_size < 1:
            raise ValueError(
                f"centroid_size={self.centroid_size}: it is the length of an embedding, 1 or more. "
                "Use None for a model without centroids."
            )
        if self.expert_names is not None and len(self.expert_names) != E:
            raise ValueError(
                f"expert_names has {len(self.expert_names)} names for num_local_experts={E}: {self.expert_names}. "
                "Give one name an expert, or None."
            )
        if getattr(self, "sliding_window", None) is not None:
            raise ValueError(
                f"sliding_window={self.sliding_window}: this model attends to the whole text, as Llama does. "
                "Use sliding_window=None."
            )
        self._check_layers()

    def _check_layers(self):
        names, layers, depth = self.router_layers, self.router_layers_index, self.num_hidden_layers
        if not names:
            raise ValueError("router_layers is empty, so that nothing would be routed. Use router_layers='mlp'.")
        for name in names:
            if name not in ROUTER_LAYERS:
                raise ValueError(f"router_layers has {name!r}, which is not known. {nearest(name, ROUTER_LAYERS)}")
        if len(set(names)) != len(names):
            raise ValueError(f"router_layers={names} names a layer twice. Name each once.")
        inside = [name for name in MLP_LINEARS if name in names]
        if "mlp" in names and inside:
            raise ValueError(
                f"router_layers={names} routes the whole MLP and also {', '.join(inside)} in it. Use one or the other."
            )
        if "mlp" in names and self.mlp_bias:
            raise ValueError(
                "mlp_bias=True: the experts of router_layers='mlp' are Mixtral's, which have no bias. "
                "Use mlp_bias=False, or router_layers=['gate_proj', 'up_proj', 'down_proj']."
            )
        if layers is not None:
            if not layers:
                raise ValueError(
                    "router_layers_index is empty, so that nothing would be routed. Use None for all layers."
                )
            wrong = [layer for layer in layers if not 0 <= layer < depth]
            if wrong:
                raise ValueError(
                    f"router_layers_index has {wrong[0]}, but the model has num_hidden_layers={depth}, "
                    f"counted 0 to {depth - 1}."
                )
            if len(set(layers)) != len(layers):
                raise ValueError(f"router_layers_index={layers} names a layer twice. Name each once.")


def nearest(name: str, known: tuple[str, ...]) -> str:
    """What a misspelt name may have meant, as a sentence."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {close[0]!r}?" if close else f"Use one of {', '.join(map(repr, known))}."


LexiconConfig.register_for_auto_class()
