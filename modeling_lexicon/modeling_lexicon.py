# SPDX-License-Identifier: Apache-2.0
"""LM-Lexicon as Hugging Face models: Llamas with the layers of `layers_lexicon` (LM-Lexicon, Sect. 3).

Letters: B sequences, T tokens, d hidden size, V vocabulary, E experts, k experts per token, M layers, C labels.
"""

import inspect
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaModel,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.utils import can_return_tuple, logging

from .cache_lexicon import CACHE, accepts_both_names, named_for_peft
from .configuration_lexicon import LexiconConfig
from .conversion_lexicon import fuse_expert_keys
from .experts_lexicon import LexiconExperts
from .generation_lexicon import load_embedder, nearest_centroids
from .layers_lexicon import LexiconDecoderLayer, RoutedModelMixin, last_token_positions
from .low_rank_lexicon import LowRankExperts
from .routing_lexicon import (
    at_least_float32,
    attach_to_cache,
    load_balancing_loss,
    make_routing,
    router_loss,
    with_virtual_tokens,
)
from .shared_lexicon import LexpertsModelMixin

logger = logging.get_logger(__name__)


@dataclass
class LexiconModelOutput(MoeModelOutputWithPast):
    """Output of `LexiconModel`: transformers' fields, and

    Args:
        cache: of keys and values, and of the decisions of the sequence and domain policies; `past_key_values` before
            transformers 5.24.
        router_logits (tuple, with `output_router_logits`): x W_gate of each layer whose gate ran, in order: `(B, T, E)` for the
            token policy, else the mean over each prompt, `(B, E)`. Empty if no gate ran: under the domain policy with
            `domain_ids`, except with labels, of which the domain gate learns.
        expert_index (tuple of M, with `output_router_logits`): the experts of each layer: `(B, T, k)`, largest weight first, for
            the token policy, else `(B,)`; for `sequence_soft` the one with the largest weight.
    """

    expert_index: tuple[torch.Tensor, ...] | None = None


@dataclass
class LexiconCausalLMOutput(MoeCausalLMOutputWithPast):
    """Output of the models with a head: transformers' fields, and `expert_index` as in `LexiconModelOutput`.

    Args:
        loss (scalar, with `labels`): cross-entropy over the labels that are not -100 (with one class the squared error), plus
            router losses.
        logits (`(B, T, V)`, or `(B, C)` of a classifier): scores of the next token, or of the labels.
        aux_loss (scalar, with `output_router_logits` if gates made the decisions): the load-balancing loss, unweighted.
    """

    expert_index: tuple[torch.Tensor, ...] | None = None


class LexiconPreTrainedModel(RoutedModelMixin, LexpertsModelMixin, LlamaPreTrainedModel):
    """Initialisation, saving and loading of LM-Lexicon models."""

    card_family = "LM-Lexicon: a Llama decoder with routed experts (Definition Modeling with Mixture-of-Experts)"
    config: LexiconConfig
    config_class = LexiconConfig
    _no_split_modules = ["LexiconDecoderLayer"]
    _can_record_outputs = {"hidden_states": LexiconDecoderLayer, "attentions": [LlamaAttention, Qwen3Attention]}

    def _init_weights(self, module):
        if isinstance(module, LexiconExperts | LowRankExperts):
            for weight in module.parameters(recurse=False):
                init.normal_(weight, mean=0.0, std=self.config.initializer_range)
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

    def head_fields(self, outputs, loss, labels, counted, attention_mask, domain_ids, output_router_logits) -> dict:
        """The fields that both heads' outputs have in common, `loss` with the router losses.

        `labels` (B, n) are those of `loss`, and `counted` their number in the whole step.
        """
        config, aux_loss = self.config, None
        if output_router_logits is None:
            output_router_logits = config.output_router_logits
        wants_aux = output_router_logits or (loss is not None and config.router_aux_loss_coef)
        is_given = config.routing_policy == "domain" and domain_ids is not None
        if wants_aux and outputs.router_logits and not is_given:
            aux_loss = load_balancing_loss(config, outputs.router_logits, attention_mask)
        if loss is not None:
            share = (labels != -100).sum(1) / counted.to(labels.device)  # (B,)
            own = router_loss(config, outputs, aux_loss, domain_ids, share)
            loss = loss + (own.to(loss.device) if isinstance(own, torch.Tensor) else own)
        fields = {name: outputs[name] for name in (CACHE, "hidden_states", "attentions") if name in outputs}
        if output_router_logits:
            fields |= {"aux_loss": aux_loss, "router_logits": outputs.router_logits}
            fields["expert_index"] = outputs.expert_index
        return {"loss": loss, **fields}


class LexiconModel(LexiconPreTrainedModel, LlamaModel):
    """The decoder without a head: a `LlamaModel` with routed MLPs."""

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
            output_router_logits: whether the output has `router_logits` and `expert_index`; by default the configuration's value.
            train_domain_gate: whether the domain gate also runs if `domain_ids` are given, on detached input.
            kwargs: for the Llama, such as `output_hidden_states`.

        Raises:
            ValueError: if an input that the decision needs is missing, or for ids out of range.
        """
        tokens = input_ids if input_ids is not None else inputs_embeds
        if tokens is None:
            raise ValueError("Neither input_ids nor inputs_embeds was passed. Pass one of them.")
        routing = make_routing(
            self.config, tuple(tokens.shape[:2]), tokens.device, attention_mask, domain_ids,
            with_virtual_tokens(prompt_mask, inputs_embeds), cache, train_domain_gate, position_ids,
        )  # fmt: skip
        outputs = super().forward(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
            inputs_embeds=inputs_embeds, use_cache=use_cache, routing=routing, return_dict=True, **{CACHE: cache}, **kwargs,
        )  # fmt: skip
        has_new_decisions = routing.policy != "token" and (not routing.cached or domain_ids is not None)
        if CACHE in outputs and has_new_decisions:
            attach_to_cache(outputs[CACHE], routing.cacheable())
        routes = {}
        if self.config.output_router_logits if output_router_logits is None else output_router_logits:
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
    def pipelines(cls) -> dict[str, type]:
        """See `LexpertsModelMixin`."""
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
            others: as in `LexiconModel.forward`, with its errors.
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
        loss = targets = counted = None
        if labels is not None:
            shifted = kwargs.get("shift_labels")
            targets = labels[:, 1:] if shifted is None else shifted
            counted = count_labels(targets, num_items_in_batch)
            loss = self.loss_function(logits, labels, config.vocab_size, num_items_in_batch=counted, **kwargs)
        fields = self.head_fields(outputs, loss, targets, counted, attention_mask, domain_ids, output_router_logits)
        return LexiconCausalLMOutput(logits=logits, **fields)

    def _expand_inputs_for_generation(self, expand_size=1, is_encoder_decoder=False, input_ids=None, **model_kwargs):
        # generate() calls this once, before the first new token: the present tokens are the prompt of all steps.
        if self.config.routing_policy != "domain" and model_kwargs.get("domain_ids") is not None:
            logger.warning_once(f"routing_policy={self.config.routing_policy!r} does not read domain_ids.")
        if self.config.routing_policy != "token" and model_kwargs.get("prompt_mask") is None:
            mask, embeds = model_kwargs.get("attention_mask"), model_kwargs.get("inputs_embeds")
            if mask is None:  # generate() drops a mask without zeros
                mask = torch.ones_like(input_ids if embeds is None else embeds[..., 0], dtype=torch.long)
            if torch.is_tensor(mask) and mask.dim() == 2:
                model_kwargs["prompt_mask"] = mask
        return super()._expand_inputs_for_generation(expand_size, is_encoder_decoder, input_ids, **model_kwargs)

    def prepare_inputs_for_generation(self, input_ids, *args, inputs_embeds=None, prompt_mask=None, **kwargs):
        """As in transformers, which looks for the name `inputs_embeds`; `prompt_mask` is 0 at generated tokens."""
        inputs = super().prepare_inputs_for_generation(input_ids, *args, inputs_embeds=inputs_embeds, **kwargs)
        if prompt_mask is not None:
            num_new_tokens = input_ids.shape[1] - prompt_mask.shape[1]
            inputs["prompt_mask"] = F.pad(prompt_mask, (0, max(num_new_tokens, 0)))
        return named_for_peft(self, inputs)

    def _get_candidate_generator(self, *args, model_kwargs, **kwargs):
        # An assistant takes the routing inputs that its forward names; a mask of tokens only with the same tokenizer.
        if (assistant := kwargs.get("assistant_model")) is not None:
            names = {"domain_ids", "prompt_mask"} - inspect.signature(assistant.forward).parameters.keys()
            names |= {"prompt_mask"} if kwargs.get("assistant_tokenizer") is not None else set()
            model_kwargs = {name: value for name, value in model_kwargs.items() if name not in names}
        return super()._get_candidate_generator(*args, model_kwargs=model_kwargs, **kwargs)

    def init_continuous_batching(self, *args, **kwargs):
        """As in transformers. Raises a `ValueError` for policies that route rows, which it packs into one."""
        if self.config.routing_policy != "token":
            raise ValueError(f"routing_policy={self.config.routing_policy!r} routes rows: use generate().")
        return super().init_continuous_batching(*args, **kwargs)

    def assign_domains(self, texts: list[str], embedder=None, return_distances: bool = False):
        """The domain of each text: the nearest of the saved centroids, after L2-normalising the embeddings.

        Args:
            texts: the texts to embed, in the form that the centroids were computed from (by default the prompts).
            embedder: as in `load_embedder`; by default the configuration's.
            return_distances: whether to return the distances too.

        Returns:
            ids (B,), int64, for `domain_ids`; and with `return_distances` the distances (B, E), float32.

        Raises:
            ValueError: without centroids or embedder, for embeddings of another size, and for a single string.
            ImportError: for a name, without sentence-transformers.
        """
        centroids = self.domain_centroids
        if centroids is None or not centroids.any():
            raise ValueError("The model has no centroids. Pass domain_ids, or set centroid_size and domain_centroids.")
        if isinstance(texts, str):
            raise ValueError(f"assign_domains() needs a list of texts, got the string {texts[:40]!r}. Pass [text].")
        embed = load_embedder(embedder or self.config.embedder)
        ids, distances = nearest_centroids(embed(list(texts)), centroids)
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
    ) -> LexiconCausalLMOutput:
        """Scores texts, and computes the loss.

        Args:
            labels (`(B,)`, or `(B, C)` for multi-label problems): classes, or targets of a regression, as in transformers.
            num_items_in_batch: labels in the whole step, as in `LexiconForCausalLM.forward`.
            others: as in `LexiconModel.forward`, with its errors. The prompt is by default the whole text.

        Raises:
            ValueError: for a batch without a mask or padding token that marks the last tokens.
        """
        config = self.config
        last = last_token_positions(input_ids, attention_mask, inputs_embeds, config.pad_token_id)
        outputs = self.model(
            input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache, domain_ids, prompt_mask,
            output_router_logits=True, train_domain_gate=labels is not None, **kwargs,
        )  # fmt: skip
        states = outputs.last_hidden_state
        logits = self.score(states[torch.arange(len(states), device=states.device), last.to(states.device)])  # (B, C)
        loss = targets = counted = None
        if labels is not None:
            targets = labels.reshape(len(labels), -1)
            counted = count_labels(targets, num_items_in_batch)
            single = config.problem_type in (None, "single_label_classification") and config.num_labels > 1
            if single and labels.dtype == torch.long and labels.dim() == 1:
                scores = at_least_float32(logits)
                loss = F.cross_entropy(scores, labels.to(scores.device), reduction="sum") / counted.to(scores.device)
            else:
                loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=config)
                loss = loss * ((targets != -100).sum() / counted.to(targets.device)).to(loss.device)
        fields = self.head_fields(outputs, loss, targets, counted, attention_mask, domain_ids, output_router_logits)
        return LexiconCausalLMOutput(logits=logits, **fields)


def count_labels(labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None) -> torch.Tensor:
    """The number of labels of a whole step, at least 1: `num_items_in_batch`, or that of `labels`."""
    return torch.as_tensor((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch).clamp(min=1)


LexiconForCausalLM.register_for_auto_class("AutoModelForCausalLM")
LexiconForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
LexiconModel.register_for_auto_class("AutoModel")

__all__ = ["LexiconForCausalLM", "LexiconForSequenceClassification", "LexiconModel", "LexiconPreTrainedModel"]
