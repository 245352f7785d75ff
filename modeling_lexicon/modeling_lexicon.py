# SPDX-License-Identifier: Apache-2.0
"""LM-Lexicon as Hugging Face models: Llamas with the layers of `layers_lexicon` (LM-Lexicon, Sect. 3).

Letters: B sequences, T tokens, d hidden size, V vocabulary, E experts, k experts per token, M routed modules, C labels.
"""

import inspect
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.models.llama.modeling_llama import (
    LlamaModel,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.utils import can_return_tuple

from .cache_lexicon import CACHE, accepts_both_names, named_for_peft
from .configuration_lexicon import LexiconConfig
from .conversion_lexicon import fuse_expert_keys
from .experts_lexicon import LexiconExperts, LinearExperts
from .generation_lexicon import embed, nearest_centroids
from .layers_lexicon import LexiconDecoderLayer, RoutedModelMixin, last_token_positions
from .low_rank_lexicon import LowRankExperts
from .routing_lexicon import (
    at_least_float32,
    attach_to_cache,
    compute_aux_loss,
    make_routing,
    router_loss,
    with_virtual_tokens,
)
from .saving_lexicon import SelfContainedCheckpointMixin


@dataclass
class LexiconModelOutput(MoeModelOutputWithPast):
    """Output of `LexiconModel`.

    Args:
        last_hidden_state (`(B, T, d)`): the decoder's states.
        cache: of keys and values, and of the decisions of the sequence and domain policies; `past_key_values` before
            transformers 5.24.
        hidden_states (tuple of `(B, T, d)`, with `output_hidden_states`): after the embedding and after each layer.
        attentions (tuple of `(B, heads, T, T)`, with `output_attentions`): of each layer.
        router_logits (tuple, with `output_router_logits`): x W_gate of each routed module whose gate ran, in order: `(B, T, E)`
            for the token policy, else the mean over each prompt, `(B, E)`. Empty if no gate ran: under the domain policy with
            `domain_ids`, except in training, where the domain gate learns these ids.
        expert_index (tuple of M, with `output_router_logits`): the experts of each routed module: `(B, T, k)`, largest weight
            first, for the token policy, else `(B,)`; for `sequence_soft` the one with the largest weight.
    """

    expert_index: tuple[torch.Tensor, ...] | None = None


@dataclass
class LexiconCausalLMOutput(CausalLMOutputWithPast):
    """Output of `LexiconForCausalLM`.

    Args:
        loss (scalar, with `labels`): cross-entropy over the labels that are not -100, plus router losses.
        logits (`(B, T, V)`): scores of the next token.
        aux_loss (scalar, with `output_router_logits` if gates ran): the load-balancing loss, unweighted.
        cache, hidden_states, attentions, router_logits, expert_index: as in `LexiconModelOutput`.
    """

    aux_loss: torch.Tensor | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None
    expert_index: tuple[torch.Tensor, ...] | None = None


@dataclass
class LexiconSequenceClassifierOutput(LexiconCausalLMOutput):
    """Output of `LexiconForSequenceClassification`.

    Args:
        loss (scalar, with `labels`): cross-entropy, or the squared error with one label, plus router losses.
        logits (`(B, C)`): scores of the labels, read at each row's last real token.
        aux_loss, cache, hidden_states, attentions, router_logits, expert_index: as in `LexiconCausalLMOutput`.
    """


class LexiconPreTrainedModel(RoutedModelMixin, SelfContainedCheckpointMixin, LlamaPreTrainedModel):
    """Initialisation, saving and loading of LM-Lexicon models."""

    card_family = "LM-Lexicon: a Llama decoder with routed experts (Definition Modeling with Mixture-of-Experts)"
    config: LexiconConfig
    config_class = LexiconConfig
    _no_split_modules = ["LexiconDecoderLayer"]

    def _init_weights(self, module):
        std = self.config.initializer_range
        if isinstance(module, LexiconExperts | LowRankExperts):
            for weight in module.parameters(recurse=False):
                init.normal_(weight, mean=0.0, std=std)
        elif isinstance(module, LinearExperts):
            init.normal_(module.weight, mean=0.0, std=std)
            if module.bias is not None:
                init.zeros_(module.bias)
        else:
            super()._init_weights(module)
        if getattr(module, "domain_centroids", None) is not None:
            init.zeros_(module.domain_centroids)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True

    def save_pretrained(self, *args, **kwargs):
        """As in transformers, with one tensor per expert, also if loading has converted nothing."""
        self._weight_conversions = None
        return super().save_pretrained(*args, **kwargs)

    def load_state_dict(self, state_dict, strict: bool = True, assign: bool = False):
        """As in torch, also for the layout on disk, which the Trainer loads when it resumes or loads the best model."""
        state_dict = fuse_expert_keys(state_dict, dict(self.named_parameters()), strict)
        return super().load_state_dict(state_dict, strict, assign)


class LexiconModel(LexiconPreTrainedModel, LlamaModel):
    """The decoder without a head: a `LlamaModel` whose layers hold routed modules."""

    def __init__(self, config: LexiconConfig):
        # Not LlamaModel's __init__, which would build every dense MLP first.
        PreTrainedModel.__init__(self, config)
        config.check()
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList([LexiconDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        if config.routing_policy == "domain":
            # A checkpoint may have been saved with another policy; its gates are not used.
            self._keys_to_ignore_on_load_unexpected = [r"\.gate\.weight$"]
        self.post_init()

    @can_return_tuple
    @accepts_both_names
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache=None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        domain_ids: torch.Tensor | None = None,
        prompt_mask: torch.Tensor | None = None,
        output_router_logits: bool | None = None,
        train_domain_gate: bool = False,
        **kwargs,
    ) -> LexiconModelOutput:
        """Runs the decoder.

        Args:
            input_ids, attention_mask, position_ids (`(B, T)`), cache, inputs_embeds (`(B, T, d)`), use_cache:
                as for a Llama. A 4-D attention mask does not mark the prompt: sequence policies and the domain gate then
                need `prompt_mask`, and the domain policy without a gate `domain_ids`.
            domain_ids (`(B,)`): each row's expert, for the domain policy; ignored by the others.
            prompt_mask (`(B, T)`): non-zero at the tokens that sequence policies and the domain gate read; by default all
                real tokens of the first call. Later calls with the same cache keep its decisions. A row is one sequence:
                sequences packed into one row would share a decision. Of `inputs_embeds` the mask may cover the last tokens
                only: the tokens before them, which prompt tuning adds, are read too. With a cache that another module has
                filled, as in prefix tuning, pass `prompt_mask` or labels.
            output_router_logits: whether the output has `router_logits` and `expert_index`; by default the
                configuration's value. Under the domain policy with `domain_ids` no gate runs: `router_logits` is empty
                and `aux_loss` is `None`; with labels and a domain gate, `router_logits` are those that it learns from.
            train_domain_gate: whether the domain gate also runs if `domain_ids` are given, on detached input.
            kwargs: for the Llama, such as `output_hidden_states`.

        Raises:
            ValueError: if an input that the decision needs is missing, or for ids out of range.
        """
        tokens = input_ids if input_ids is not None else inputs_embeds
        if tokens is None:
            raise ValueError("Neither input_ids nor inputs_embeds was passed. Pass one of them.")
        routing = make_routing(
            self.config, (tokens.shape[0], tokens.shape[1]), tokens.device, attention_mask, domain_ids,
            with_virtual_tokens(prompt_mask, inputs_embeds),
            cache, train_domain_gate,
        )  # fmt: skip
        outputs = super().forward(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
            inputs_embeds=inputs_embeds, use_cache=use_cache, routing=routing, return_dict=True, **{CACHE: cache}, **kwargs,
        )  # fmt: skip
        has_new_decisions = routing.policy != "token" and (not routing.cached or domain_ids is not None)
        if CACHE in outputs and has_new_decisions:
            attach_to_cache(outputs[CACHE], routing.cacheable())
        if output_router_logits is None:
            output_router_logits = self.config.output_router_logits
        routes = {}
        if output_router_logits:
            routes["router_logits"] = tuple(d.logits for d in routing.decisions if d.logits is not None)
            routes["expert_index"] = tuple(d.index for d in routing.decisions)
        return LexiconModelOutput(**outputs, **routes)


class LexiconForCausalLM(LexiconPreTrainedModel, GenerationMixin):
    """The decoder with a language modeling head.

    Example:

    ```python
    >>> from modeling_lexicon import LexiconForCausalLM
    >>> model = LexiconForCausalLM.from_pretrained("merged", routing_policy="domain")
    >>> ids = model.assign_domains(prompts)  # the nearest saved centroid
    >>> model.generate(**tokenizer(prompts, return_tensors="pt", padding=True), domain_ids=ids)
    ```
    """

    card_use = {
        "what": "Writes definitions of terms in context",
        "tag": "text-generation",
        "task": "definition-modeling",
        "call": 'run({"term": "barrage", "context": "A barrage holds the water back."})',
    }
    lora_task = "CAUSAL_LM"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    @classmethod
    def pipelines(cls) -> dict[str, type | str]:
        """See `SelfContainedCheckpointMixin`."""
        from .pipeline_definition_modeling import DefinitionModelingPipeline

        return {"definition-modeling": DefinitionModelingPipeline}

    def __init__(self, config: LexiconConfig):
        super().__init__(config)
        self.model = LexiconModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        centroids = None
        if config.centroid_size is not None:
            centroids = torch.zeros(config.num_local_experts, config.centroid_size, dtype=torch.float32)
        self.register_buffer("domain_centroids", centroids)
        self.post_init()

    def _apply(self, fn, recurse=True):
        exact = self.domain_centroids
        super()._apply(fn, recurse)
        if exact is not None and self.domain_centroids.dtype != exact.dtype:
            # model.to(bfloat16) must not round the centroids: distances between embeddings stay in float32
            self.domain_centroids = exact.to(self.domain_centroids.device)
        return self

    @can_return_tuple
    @accepts_both_names
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache=None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        domain_ids: torch.Tensor | None = None,
        prompt_mask: torch.Tensor | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> LexiconCausalLMOutput:
        """Scores the next tokens, and computes the loss.

        Args:
            labels (`(B, T)`): the token ids, -100 for tokens without a loss. Unless `prompt_mask` is passed, the tokens before
                the first label are the prompt: a decision reads nothing of the answer.
            logits_to_keep: the number of last positions to score, or their indices; 0 for all.
            num_items_in_batch: labels in the whole step, over accumulated batches and processes. The Trainer passes it,
                and the loss is the sum over labels divided by it: gradient accumulation changes nothing.
            input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache: as in `LexiconModel.forward`.
            domain_ids, prompt_mask, output_router_logits, kwargs: as in `LexiconModel.forward`.

        Raises:
            ValueError: as `LexiconModel.forward`.
        """
        config = self.config
        if prompt_mask is None and labels is not None and config.routing_policy != "token":
            prompt_mask = (labels != -100).cumsum(1) == 0
        outputs = self.model(
            input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache, domain_ids, prompt_mask,
            output_router_logits=True, train_domain_gate=labels is not None, **kwargs,
        )  # fmt: skip
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, positions])
        loss = share = None
        if labels is not None:
            targets = kwargs.get("shift_labels")
            share, total = share_of_labels(labels[:, 1:] if targets is None else targets, num_items_in_batch)
            loss = self.loss_function(logits, labels, config.vocab_size, num_items_in_batch=total, **kwargs)
        fields = shared_fields(config, outputs, loss, share, attention_mask, domain_ids, output_router_logits)
        return LexiconCausalLMOutput(logits=logits, **fields)

    def _expand_inputs_for_generation(self, expand_size=1, is_encoder_decoder=False, input_ids=None, **model_kwargs):
        # generate() calls this once, before the first new token: the present tokens are the prompt of all steps.
        if self.config.routing_policy != "token" and model_kwargs.get("prompt_mask") is None:
            mask, embeds = model_kwargs.get("attention_mask"), model_kwargs.get("inputs_embeds")
            if mask is None:  # generate() drops a mask without zeros
                mask = torch.ones_like(input_ids if embeds is None else embeds[..., 0], dtype=torch.long)
            if torch.is_tensor(mask) and mask.dim() == 2:
                model_kwargs["prompt_mask"] = mask
        return super()._expand_inputs_for_generation(expand_size, is_encoder_decoder, input_ids, **model_kwargs)

    def prepare_inputs_for_generation(self, input_ids, *args, prompt_mask=None, **kwargs):
        """As in transformers; `prompt_mask` is 0 at generated tokens."""
        inputs = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)
        if prompt_mask is not None:
            num_new_tokens = input_ids.shape[1] - prompt_mask.shape[1]
            inputs["prompt_mask"] = F.pad(prompt_mask, (0, max(num_new_tokens, 0)))
        return named_for_peft(self, inputs)

    def _get_candidate_generator(self, *args, model_kwargs, assistant_model=None, **kwargs):
        # An assistant takes the routing inputs that its forward names; a mask of tokens only with the same tokenizer.
        if assistant_model is not None:
            known = inspect.signature(assistant_model.forward).parameters
            names = {"domain_ids", "prompt_mask"} - set(known)
            names |= {"prompt_mask"} if kwargs.get("assistant_tokenizer") is not None else set()
            model_kwargs = {name: value for name, value in model_kwargs.items() if name not in names}
        return super()._get_candidate_generator(
            *args, model_kwargs=model_kwargs, assistant_model=assistant_model, **kwargs
        )

    def assign_domains(self, texts: list[str], embedder=None, return_distances: bool = False):
        """The domain of each text: the nearest of the saved centroids, after L2-normalising the embeddings.

        Args:
            texts: the texts to embed, in the form that the centroids were computed from (by default the prompts).
            embedder: a callable from texts to an array (B, centroid_size); an object with `.encode`, such as a
                `SentenceTransformer`; or the name or folder of one. By default the configuration's `embedder`.
            return_distances: whether to return the distances too.

        Returns:
            ids (B,), int64, for `domain_ids`; and with `return_distances` the distances (B, E), float32.

        Raises:
            ValueError: without centroids or embedder, and for embeddings of another size.
            ImportError: for a name, without sentence-transformers.
        """
        centroids = self.domain_centroids
        if centroids is None or not centroids.any():
            raise ValueError(
                "The model has no centroids. Set centroid_size in the configuration and fill model.domain_centroids "
                "(experts, centroid_size), or pass domain_ids."
            )
        if isinstance(texts, str):
            raise ValueError(f"assign_domains() expects a list of texts, got the string {texts[:40]!r}. Pass [text].")
        vectors = embed(texts, self.config.embedder if embedder is None else embedder)
        ids, distances = nearest_centroids(vectors, centroids)
        return (ids, distances) if return_distances else ids


class LexiconForSequenceClassification(LexiconPreTrainedModel):
    """Scores a text at its last real token: classes, or with one label a reward model (LM-Lexicon, Eq. 7)."""

    card_use = {"what": "Scores definitions", "tag": "text-classification"}
    lora_task = "SEQ_CLS"
    _keys_to_ignore_on_load_unexpected = [r"lm_head", r"domain_centroids"]

    def __init__(self, config: LexiconConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = LexiconModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

    @can_return_tuple
    @accepts_both_names
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache=None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        domain_ids: torch.Tensor | None = None,
        prompt_mask: torch.Tensor | None = None,
        output_router_logits: bool | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> LexiconSequenceClassifierOutput:
        """Scores texts, and computes the loss.

        Args:
            labels (`(B,)`, or `(B, C)` for multi-label problems): classes, or targets of a regression, as in transformers.
            num_items_in_batch: labels in the whole step, as in `LexiconForCausalLM.forward`.
            input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache: as in `LexiconModel.forward`.
            domain_ids, prompt_mask, output_router_logits, kwargs: as in `LexiconModel.forward`. The prompt is by default the whole text.

        Raises:
            ValueError: as `LexiconModel.forward`; and for a batch without a mask or padding token that marks the last tokens.
        """
        config = self.config
        last = last_token_positions(input_ids, attention_mask, inputs_embeds, config.pad_token_id)
        outputs = self.model(
            input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache, domain_ids, prompt_mask,
            output_router_logits=True, train_domain_gate=labels is not None, **kwargs,
        )  # fmt: skip
        states = outputs.last_hidden_state
        logits = self.score(states[torch.arange(len(states), device=states.device), last.to(states.device)])  # (B, C)
        loss = share = None
        if labels is not None:
            share, total = share_of_labels(labels.reshape(len(labels), -1), num_items_in_batch)
            single = config.problem_type in (None, "single_label_classification") and config.num_labels > 1
            if single and labels.dtype == torch.long and labels.dim() == 1:
                scores = at_least_float32(logits)
                loss = F.cross_entropy(scores, labels.to(scores.device), reduction="sum") / total.to(scores.device)
            else:
                loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=config)
                loss = loss * share.sum().to(loss.device)
        fields = shared_fields(config, outputs, loss, share, attention_mask, domain_ids, output_router_logits)
        return LexiconSequenceClassifierOutput(logits=logits, **fields)


def share_of_labels(labels: torch.Tensor, num_items_in_batch) -> tuple[torch.Tensor, torch.Tensor]:
    """labels (B, n) -> each row's part of the step's labels (B,), and the number of these labels."""
    count = (labels != -100).sum(1)
    total = torch.as_tensor(count.sum() if num_items_in_batch is None else num_items_in_batch).clamp(min=1)
    return count / total.to(count.device), total


def shared_fields(config, outputs, loss, share, attention_mask, domain_ids, output_router_logits) -> dict:
    """The fields that both heads' outputs have in common; `loss` with the router losses, weighted by `share` (B,)."""
    if output_router_logits is None:
        output_router_logits = config.output_router_logits
    aux_loss = None
    if output_router_logits or (loss is not None and config.router_aux_loss_coef):
        aux_loss = compute_aux_loss(config, outputs, attention_mask, domain_ids)
    if loss is not None:
        own = router_loss(config, outputs, aux_loss, domain_ids, share)
        loss = loss + (own.to(loss.device) if isinstance(own, torch.Tensor) else own)
    fields = {name: outputs[name] for name in (CACHE, "hidden_states", "attentions") if name in outputs}
    if output_router_logits:
        fields |= {"aux_loss": aux_loss, "router_logits": outputs.router_logits, "expert_index": outputs.expert_index}
    return {"loss": loss, **fields}


LexiconForCausalLM.register_for_auto_class("AutoModelForCausalLM")
LexiconForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
LexiconModel.register_for_auto_class("AutoModel")

__all__ = ["LexiconForCausalLM", "LexiconForSequenceClassification", "LexiconModel", "LexiconPreTrainedModel"]
