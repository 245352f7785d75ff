"""LM-Lexicon as Hugging Face models: Llamas with the layers of `layers_lexicon` (LM-Lexicon, paper's Sect. 3).

Letters: B sequences, T tokens, d hidden size, V vocabulary, E experts, C labels.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.models.llama.modeling_llama import (
    LlamaModel,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.utils import can_return_tuple

from .configuration_lexicon import LexiconConfig
from .domains_lexicon import embed, nearest_centroids
from .experts_lexicon import LexiconExperts, LinearExperts
from .layers_lexicon import LexiconDecoderLayer, RoutedModule
from .layout_lexicon import as_in_memory
from .outputs_lexicon import LexiconCausalLMOutput, LexiconModelOutput, LexiconSequenceClassifierOutput
from .routing_lexicon import keep_on_cache, load_balancing_loss, plan_routing
from .saving_lexicon import CompleteCheckpointMixin


class LexiconPreTrainedModel(CompleteCheckpointMixin, LlamaPreTrainedModel):
    """Initialisation, saving and loading of LM-Lexicon models."""

    config: LexiconConfig
    config_class = LexiconConfig
    _no_split_modules = ["LexiconDecoderLayer"]

    def _init_weights(self, module):
        std = self.config.initializer_range
        if isinstance(module, LexiconExperts):
            init.normal_(module.gate_up_proj, mean=0.0, std=std)
            init.normal_(module.down_proj, mean=0.0, std=std)
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
        """As in transformers, always one tensor an expert: also where the loading had none to convert."""
        self._weight_conversions = None
        return super().save_pretrained(*args, **kwargs)

    def load_state_dict(self, state_dict, strict: bool = True, assign: bool = False):
        """As in torch, for the layout on disk too: so the Trainer resumes a run, and takes up its best model."""
        state_dict = as_in_memory(state_dict, dict(self.named_parameters()), strict)
        return super().load_state_dict(state_dict, strict, assign)

    def routed_modules(self) -> list[RoutedModule]:
        """The M routed modules, in the order in which they run."""
        return [m for layer in self.modules() if isinstance(layer, LexiconDecoderLayer) for m in layer.routed_modules()]

    def train_only(self, *parts: str) -> int:
        """Freezes everything but these parts, `"gates"` and `"experts"`: the last of LM-Lexicon's four steps.

        Returns: the number of parameters that are left to train.

        Raises:
            ValueError: for a part that is not known, or that the model does not have.
        """
        for part in parts or ("nothing",):
            if part not in ("gates", "experts"):
                raise ValueError(f"train_only({part!r}): there is no such part. Use 'gates', 'experts' or both.")
        chosen = []
        for module in self.routed_modules():
            gate = [] if module.gate is None else list(module.gate.parameters())
            chosen += gate * ("gates" in parts) + list(module.experts.parameters()) * ("experts" in parts)
        if "gates" in parts and all(module.gate is None for module in self.routed_modules()):
            raise ValueError(
                "train_only('gates'): the model has no gates, because with routing_policy='domain' the caller names "
                "the experts. Use domain_gate=True, or train_only('experts')."
            )
        self.requires_grad_(False)
        for p in chosen:
            p.requires_grad_(True)
        return sum(p.numel() for p in chosen)


class LexiconModel(LexiconPreTrainedModel, LlamaModel):
    """The decoder without a head: a `LlamaModel` whose layers hold routed modules."""

    def __init__(self, config: LexiconConfig):
        # Not LlamaModel's own, which would build every dense MLP first.
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
            # A checkpoint may come from another policy; its gates have nothing to decide here.
            self._keys_to_ignore_on_load_unexpected = [r"\.gate\.weight$"]
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values=None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        domain_ids: torch.Tensor | None = None,
        prompt_mask: torch.Tensor | None = None,
        output_router_logits: bool | None = None,
        learn_domain_gate: bool = False,
        **kwargs,
    ) -> LexiconModelOutput:
        """
        Args:
            input_ids, attention_mask, position_ids (`(B, T)`), past_key_values, inputs_embeds (`(B, T, d)`), use_cache:
                as a Llama takes them. A 4-D attention mask does not tell where the prompt is: sequence policies and the
                domain gate then need `prompt_mask`, and the domain policy without a gate `domain_ids`.
            domain_ids (`(B,)`): each row's expert, for the domain policy; the others do not read it.
            prompt_mask (`(B, T)`): non-zero at the tokens that sequence policies and the domain gate decide on; without
                it all real tokens of the first call. Later calls with the same cache keep the first call's decisions. A
                row is one sequence: several packed into one would share a decision.
            output_router_logits: whether the output holds `router_logits` and `expert_index`; by default the
                configuration's. Under the domain policy with `domain_ids` no gate decides: `router_logits` is empty
                and `aux_loss` `None`; with labels and a domain gate, `router_logits` hold what the gate learns from.
            learn_domain_gate: whether the domain gate is run though `domain_ids` are given, on input without gradient.
            kwargs: for the Llama, such as `output_hidden_states`.

        Raises:
            ValueError: when there is nothing to decide by (the message says what is missing), or for ids out of range.
        """
        tokens = input_ids if input_ids is not None else inputs_embeds
        if tokens is None:
            raise ValueError("Neither input_ids nor inputs_embeds were given. Pass one of them.")
        routing = plan_routing(
            self.config,
            tuple(tokens.shape[:2]),
            tokens.device,
            attention_mask,
            domain_ids,
            prompt_mask,
            past_key_values,
            learn_domain_gate,
        )
        outputs = super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            routing=routing,
            return_dict=True,
            **kwargs,
        )
        decided = routing.policy != "token" and (not routing.kept or domain_ids is not None)
        if outputs.past_key_values is not None and decided:
            keep_on_cache(outputs.past_key_values, routing.to_keep())
        if output_router_logits is None:
            output_router_logits = self.config.output_router_logits
        found = routing.decisions
        return LexiconModelOutput(
            last_hidden_state=outputs.last_hidden_state,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=tuple(d.logits for d in found if d.logits is not None) if output_router_logits else None,
            expert_index=tuple(d.index for d in found) if output_router_logits else None,
        )


class LexiconForCausalLM(LexiconPreTrainedModel, GenerationMixin):
    """Writes text: the decoder and a head over the vocabulary.

    Example:

    ```python
    >>> from modeling_lexicon import LexiconForCausalLM
    >>> model = LexiconForCausalLM.from_pretrained("merged", routing_policy="domain")
    >>> ids = model.assign_domains(prompts)  # the nearest saved centroid
    >>> model.generate(**tokenizer(prompts, return_tensors="pt", padding=True), domain_ids=ids)
    ```
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    @classmethod
    def pipelines(cls) -> dict[str, type | str]:
        from .pipeline_lexicon import DefinitionModelingPipeline

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
            # model.to(bfloat16) is about the network; distances between embeddings stay in float32
            self.domain_centroids = exact.to(self.domain_centroids.device)
        return self

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values=None,
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
        """
        Args:
            labels (`(B, T)`): the tokens themselves, -100 where there is nothing to learn. What stands before the first
                label is the prompt, where no `prompt_mask` says otherwise: a decision reads nothing of the answer.
            logits_to_keep: the last positions to score, or which; 0 for all.
            num_items_in_batch: labels in the whole step, over accumulated batches and processes. The Trainer gives it,
                and the loss is then their sum divided by it: gradient accumulation changes nothing.
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, domain_ids, prompt_mask,
                output_router_logits, kwargs: as in `LexiconModel.forward`.

        Raises:
            ValueError: as `LexiconModel.forward`.
        """
        config = self.config
        if output_router_logits is None:
            output_router_logits = config.output_router_logits
        if prompt_mask is None and labels is not None and config.routing_policy != "token":
            prompt_mask = (labels != -100).cumsum(1) == 0
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            domain_ids=domain_ids,
            prompt_mask=prompt_mask,
            output_router_logits=True,
            learn_domain_gate=labels is not None,
            **kwargs,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, keep])
        loss = aux_loss = None
        if output_router_logits or (labels is not None and config.router_aux_loss_coef):
            aux_loss = balance(config, outputs, attention_mask, domain_ids)
        if labels is not None:
            targets = kwargs.get("shift_labels")
            learnt = ((labels[:, 1:] if targets is None else targets) != -100).sum(1)  # (B,)
            total = torch.as_tensor(learnt.sum() if num_items_in_batch is None else num_items_in_batch).clamp(min=1)
            loss = self.loss_function(logits, labels, config.vocab_size, num_items_in_batch=total, **kwargs)
            loss = loss + gates_owe(config, outputs, aux_loss, domain_ids, learnt / total)
        return LexiconCausalLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            aux_loss=aux_loss if output_router_logits else None,
            router_logits=outputs.router_logits if output_router_logits else None,
            expert_index=outputs.expert_index if output_router_logits else None,
        )

    def _expand_inputs_for_generation(self, expand_size=1, is_encoder_decoder=False, input_ids=None, **model_kwargs):
        # generate() passes here once, before it writes: what is there now is the prompt, in all steps to come.
        if self.config.routing_policy != "token" and model_kwargs.get("prompt_mask") is None:
            mask, embeds = model_kwargs.get("attention_mask"), model_kwargs.get("inputs_embeds")
            if mask is None:  # generate() drops a mask of ones
                mask = torch.ones_like(input_ids if embeds is None else embeds[..., 0], dtype=torch.long)
            if torch.is_tensor(mask) and mask.dim() == 2:
                model_kwargs["prompt_mask"] = mask
        return super()._expand_inputs_for_generation(expand_size, is_encoder_decoder, input_ids, **model_kwargs)

    def prepare_inputs_for_generation(self, input_ids, *args, prompt_mask=None, **kwargs):
        inputs = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)
        if prompt_mask is not None:
            written = input_ids.shape[1] - prompt_mask.shape[1]
            inputs["prompt_mask"] = F.pad(prompt_mask, (0, max(written, 0)))
        return inputs

    def assign_domains(self, texts: list[str], embedder=None, return_distances: bool = False):
        """The domain of each text: the nearest of the saved centroids, after L2-normalising the embeddings.

        Args:
            texts: what is embedded, as it was when the centroids were found (by default term and context).
            embedder: a callable from texts to an array (B, centroid_size); an object with `.encode`, such as a
                `SentenceTransformer`; or the name or folder of one. By default the configuration's `embedder`.
            return_distances: whether to return the distances too.

        Returns:
            ids (B,), int64, for `domain_ids`; and with `return_distances` the distances (B, E), float32.

        Raises:
            ValueError: when there are no centroids or no embedder, or the embeddings do not fit.
            ImportError: for a name, without sentence-transformers.
        """
        centroids = self.domain_centroids
        if centroids is None or not centroids.any():
            raise ValueError(
                "The model has no centroids, so that no text is near to one. Set centroid_size in the configuration "
                "and fill model.domain_centroids (experts, centroid_size), or pass domain_ids yourself."
            )
        if isinstance(texts, str):
            raise ValueError(f"assign_domains() takes a list of texts, and got one: {texts[:40]!r}. Pass [text].")
        vectors = embed(texts, self.config.embedder if embedder is None else embedder)
        ids, distances = nearest_centroids(vectors, centroids)
        return (ids, distances) if return_distances else ids


class LexiconForSequenceClassification(LexiconPreTrainedModel):
    """Scores a text at its last real token: classes, or with one label a reward model (LM-Lexicon, paper's Eq. 7)."""

    _keys_to_ignore_on_load_unexpected = [r"lm_head", r"domain_centroids"]

    def __init__(self, config: LexiconConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = LexiconModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values=None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        domain_ids: torch.Tensor | None = None,
        prompt_mask: torch.Tensor | None = None,
        output_router_logits: bool | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> LexiconSequenceClassifierOutput:
        """
        Args:
            labels (`(B,)`, or `(B, C)` for several at once): classes, or numbers for a regression, as in transformers.
            num_items_in_batch: labels in the whole step, as in `LexiconForCausalLM.forward`.
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, domain_ids, prompt_mask,
                output_router_logits, kwargs: as in `LexiconModel.forward`. The prompt is by default the whole text.

        Raises:
            ValueError: as `LexiconModel.forward`; and for a batch where a row's last token cannot be known.
        """
        config = self.config
        if output_router_logits is None:
            output_router_logits = config.output_router_logits
        last = self._last_tokens(input_ids, attention_mask, inputs_embeds)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            domain_ids=domain_ids,
            prompt_mask=prompt_mask,
            output_router_logits=True,
            learn_domain_gate=labels is not None,
            **kwargs,
        )
        states = outputs.last_hidden_state
        logits = self.score(states[torch.arange(len(states), device=states.device), last.to(states.device)])  # (B, C)
        loss = aux_loss = None
        if output_router_logits or (labels is not None and config.router_aux_loss_coef):
            aux_loss = balance(config, outputs, attention_mask, domain_ids)
        if labels is not None:
            learnt = (labels != -100).reshape(len(labels), -1).sum(1)  # (B,)
            total = torch.as_tensor(learnt.sum() if num_items_in_batch is None else num_items_in_batch).clamp(min=1)
            share = learnt / total
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=config) * share.sum()
            loss = loss + gates_owe(config, outputs, aux_loss, domain_ids, share)
        return LexiconSequenceClassifierOutput(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            aux_loss=aux_loss if output_router_logits else None,
            router_logits=outputs.router_logits if output_router_logits else None,
            expert_index=outputs.expert_index if output_router_logits else None,
        )

    def _last_tokens(self, input_ids, attention_mask, inputs_embeds) -> torch.Tensor:
        """(B,): each row's last real token, by the mask, or without one by the padding token."""
        B, T = (input_ids if input_ids is not None else inputs_embeds[..., 0]).shape
        pad = self.config.pad_token_id
        if attention_mask is not None and attention_mask.dim() == 2:
            real = attention_mask[:, -T:] != 0
        elif input_ids is not None and pad is not None:
            real = input_ids != pad
        elif B == 1:
            return torch.tensor([T - 1])
        else:
            raise ValueError(
                f"A batch of {B} rows without attention_mask and without config.pad_token_id: where a row ends is not "
                "known. Pass attention_mask (batch, length), or set pad_token_id and pass input_ids."
            )
        return (real * torch.arange(T, device=real.device)).argmax(1)


def balance(config, outputs: LexiconModelOutput, attention_mask, domain_ids) -> torch.Tensor | None:
    """The load-balancing loss of the gates that have decided; `None` where none has."""
    given = config.routing_policy == "domain" and domain_ids is not None
    if given or not outputs.router_logits:
        return None
    if attention_mask is not None and attention_mask.dim() != 2:
        attention_mask = None
    return load_balancing_loss(outputs.router_logits, outputs.expert_index, attention_mask)


def gates_owe(config, outputs, aux_loss, domain_ids, share: torch.Tensor) -> torch.Tensor | float:
    """What the gates add to the loss; share (B,) is each row's part of the step's labels: micro-batches add up."""
    owed = 0.0
    if aux_loss is not None and config.router_aux_loss_coef:
        owed = config.router_aux_loss_coef * share.sum() * aux_loss
    if config.routing_policy == "domain" and domain_ids is not None and outputs.router_logits:
        # the domain gate, run to learn these ids
        missed = F.cross_entropy(outputs.router_logits[0], domain_ids.to(share.device), reduction="none")  # (B,)
        owed = owed + (missed * share).sum()
    return owed


LexiconForCausalLM.register_for_auto_class("AutoModelForCausalLM")
LexiconForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
LexiconModel.register_for_auto_class("AutoModel")

__all__ = ["LexiconForCausalLM", "LexiconForSequenceClassification", "LexiconModel", "LexiconPreTrainedModel"]
