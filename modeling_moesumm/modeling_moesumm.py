# SPDX-License-Identifier: Apache-2.0
"""MoeSumm as Hugging Face models: a pretrained summariser with deputies beside its main expert (MoeSumm, Sect. 4).

Letters: B texts, S source tokens, T target tokens (of a decoder, all tokens), K positions that are scored, d hidden size,
V vocabulary, N deputies, E datasets.
"""

from dataclasses import dataclass

import torch
from transformers import GenerationMixin
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.utils import can_return_tuple

from .base_moesumm import MoeSummPreTrainedModel
from .cache_moesumm import CACHE, accepts_both_names
from .heads_moesumm import LanguageModelMixin, next_tokens
from .routing_moesumm import check_has_labels, refuse_encoder_inputs
from .seq2seq_moesumm import MoeSummSeq2SeqPreTrainedModel


@dataclass
class MoeSummSeq2SeqModelOutput(Seq2SeqModelOutput):
    """
    Args:
        last_hidden_state (`(B, T, d)`): the decoder's states; the other fields of `Seq2SeqModelOutput` are as there.
        encoder_expert_indices (tuple of `(B, S)`): with `output_router_indices`, each token's deputy in each layer, -1 if it
            used the main expert only. `None` for an encoder that did not run.
        decoder_expert_indices (tuple of `(B, T)`): the same of the decoder.
        encoder_expert_weights, decoder_expert_weights (the same shapes, float32): its weight g_p, 0 without a deputy.
    """

    encoder_expert_indices: tuple[torch.Tensor, ...] | None = None
    encoder_expert_weights: tuple[torch.Tensor, ...] | None = None
    decoder_expert_indices: tuple[torch.Tensor, ...] | None = None
    decoder_expert_weights: tuple[torch.Tensor, ...] | None = None


@dataclass
class MoeSummSeq2SeqLMOutput(Seq2SeqLMOutput):
    """
    Args:
        loss (scalar, if `labels` are given): generation loss, plus `margin_loss_coef` times the margin loss.
        logits (`(B, T, V)`): scores of the next token.
        cache: the decoder's; `past_key_values` before transformers 5.24.
        decoder_hidden_states (tuple of `(B, T, d)`), encoder_hidden_states (tuple of `(B, S, d)`): after the embedding and
            after each layer, with `output_hidden_states`.
        decoder_attentions (tuple of `(B, heads, T, T)`), cross_attentions (tuple of `(B, heads, T, S)`): of each layer, with
            `output_attentions`.
        encoder_attentions (tuple of `(B, heads, S, S)`): the same. States and attentions are part of the loss's graph, so
            `retain_grad()` works.
        encoder_last_hidden_state (`(B, S, d)`): part of the loss's graph if states or attentions are requested, without a
            margin loss, and with `margin_main="last_layer"`.
        generation_loss (scalar, if `labels` are given): cross-entropy over the labels that are not -100, smoothed by
            `label_smoothing`.
        margin_loss (scalar, if `labels` are given and `margin_loss_coef` is not 0): MoeSumm, Eq. 9, unweighted.
        encoder_expert_indices, encoder_expert_weights, decoder_expert_indices, decoder_expert_weights: as in
            `MoeSummSeq2SeqModelOutput`.
    """

    generation_loss: torch.Tensor | None = None
    margin_loss: torch.Tensor | None = None
    encoder_expert_indices: tuple[torch.Tensor, ...] | None = None
    encoder_expert_weights: tuple[torch.Tensor, ...] | None = None
    decoder_expert_indices: tuple[torch.Tensor, ...] | None = None
    decoder_expert_weights: tuple[torch.Tensor, ...] | None = None


@dataclass
class MoeSummModelOutput(BaseModelOutputWithPast):
    """
    Args:
        last_hidden_state (`(B, T, d)`): the states of a decoder; the other fields of `BaseModelOutputWithPast` are as there.
        expert_indices, expert_weights: as in `MoeSummCausalLMOutput`.
    """

    expert_indices: tuple[torch.Tensor, ...] | None = None
    expert_weights: tuple[torch.Tensor, ...] | None = None


@dataclass
class MoeSummCausalLMOutput(CausalLMOutputWithPast):
    """
    Args:
        loss (scalar, if `labels` are given): generation loss, plus `margin_loss_coef` times the margin loss.
        logits (`(B, K, V)`): scores of the next token.
        cache: `past_key_values` before transformers 5.24.
        hidden_states (tuple of `(B, T, d)`): after the embedding and after each layer, with `output_hidden_states`.
        attentions (tuple of `(B, heads, T, T)`): of each layer, with `output_attentions`. States and attentions are part of
            the loss's graph, so `retain_grad()` works.
        generation_loss (scalar, if `labels` are given): cross-entropy over the labels that are not -100, smoothed by
            `label_smoothing`.
        margin_loss (scalar, if `labels` are given and `margin_loss_coef` is not 0): MoeSumm, Eq. 9, unweighted.
        expert_indices (tuple of `(B, T)`): with `output_router_indices`, each token's deputy in each layer, -1 if it used the
            main expert only.
        expert_weights (tuple of `(B, T)`, float32): its weight g_p, 0 without a deputy.
    """

    generation_loss: torch.Tensor | None = None
    margin_loss: torch.Tensor | None = None
    expert_indices: tuple[torch.Tensor, ...] | None = None
    expert_weights: tuple[torch.Tensor, ...] | None = None


class MoeSummModel(MoeSummSeq2SeqPreTrainedModel):
    """The hidden states of encoder and decoder, or of a decoder, without logits. It opens the checkpoints of
    `MoeSummForConditionalGeneration` and `MoeSummForCausalLM`, and the other way round: the language modeling head is kept, but
    not used.

    Example:

    ```python
    >>> from transformers import AutoModel
    >>> model = AutoModel.from_pretrained("runs/moesumm")
    >>> states = model(**tokenizer(texts, return_tensors="pt", padding=True), dataset="news").encoder_last_hidden_state
    ```
    """

    def initialize_weights(self):
        """Initialises new modules, and freezes a language modeling head that is not tied to the embeddings."""
        super().initialize_weights()
        if not self.config.tie_word_embeddings:
            self.backbone.get_output_embeddings().requires_grad_(False)

    @can_return_tuple
    @accepts_both_names
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs=None,
        cache=None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        dataset: str | list[str | None] | None = None,
        dataset_ids: torch.Tensor | None = None,
        main_expert_only: bool | None = None,
        deputy_id: int | None = None,
        use_cache: bool | None = None,
        output_router_indices: bool = False,
        **kwargs,
    ) -> MoeSummSeq2SeqModelOutput | MoeSummModelOutput:
        """Computes hidden states; arguments as in `MoeSummForConditionalGeneration.forward`, or over a decoder as in
        `MoeSummForCausalLM.forward`.
        """
        options = {
            "dataset": dataset, "dataset_ids": dataset_ids, "main_expert_only": main_expert_only, "deputy_id": deputy_id,
            "training": self.training and torch.is_grad_enabled(), "recording": output_router_indices,
        }  # fmt: skip
        given = {
            "decoder_input_ids": decoder_input_ids, "decoder_attention_mask": decoder_attention_mask,
            "encoder_outputs": encoder_outputs, "decoder_inputs_embeds": decoder_inputs_embeds,
        }  # fmt: skip
        if not self.config.is_encoder_decoder:
            refuse_encoder_inputs(self.config, given)
            shape, routing = self._make_decoder_routing(input_ids, inputs_embeds, cache, **options)
            outputs = self.backbone.base_model(
                input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, use_cache=use_cache,
                routing=routing, return_dict=True, **{CACHE: cache}, **kwargs,
            )  # fmt: skip
            router_outputs = self._decoder_router_outputs(routing, shape, outputs.last_hidden_state.device)
            return MoeSummModelOutput(**outputs, **router_outputs)
        decoder_tokens = decoder_input_ids if decoder_inputs_embeds is None else decoder_inputs_embeds
        B, routing = self._make_routing(input_ids, inputs_embeds, encoder_outputs, decoder_tokens, cache, **options)
        outputs = self.backbone.base_model(
            input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **given,
            use_cache=use_cache, routing=routing, return_dict=True, **{CACHE: cache}, **kwargs,
        )  # fmt: skip
        router_outputs = self._router_outputs(routing, B, outputs, encoder_outputs is None)
        return MoeSummSeq2SeqModelOutput(**outputs, **router_outputs)


class MoeSummForConditionalGeneration(LanguageModelMixin, MoeSummSeq2SeqPreTrainedModel, GenerationMixin):
    """Summarises texts of several datasets: an encoder and a decoder with a main expert and deputies in every layer.

    Example:

    ```python
    >>> from modeling_moesumm import MoeSummForConditionalGeneration
    >>> model = MoeSummForConditionalGeneration.from_backbone("facebook/bart-large", datasets=["cnn_dm", "pubmed"])
    >>> model.generate(**tokenizer(texts, return_tensors="pt", padding=True), dataset=["pubmed", None])
    ```
    """

    has_encoder = True
    backbone_example = "a BART, PEGASUS or mBART, such as 'facebook/bart-large'"
    lora_task = "SEQ_2_SEQ_LM"
    output_class = MoeSummSeq2SeqLMOutput

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """The decoder's input `(B, T)` for labels `(B, T)`, shifted as the backbone shifts them."""
        return self.backbone.prepare_decoder_input_ids_from_labels(labels)

    @can_return_tuple
    @accepts_both_names
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs=None,
        cache=None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        dataset: str | list[str | None] | None = None,
        dataset_ids: torch.Tensor | None = None,
        main_expert_only: bool | None = None,
        deputy_id: int | None = None,
        use_cache: bool | None = None,
        output_router_indices: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> MoeSummSeq2SeqLMOutput:
        """Computes logits and losses.

        Args:
            input_ids, attention_mask (`(B, S)`), inputs_embeds (`(B, S, d)`): as for the backbone.
            decoder_input_ids, decoder_attention_mask (`(B, T)`), decoder_inputs_embeds (`(B, T, d)`): as for the backbone.
            encoder_outputs, cache, use_cache: as for the backbone.
            labels (`(B, T)`): the summaries' tokens, -100 for tokens without a loss.
            dataset: the name of each row's dataset, `None` for none, or one name for all rows.
            dataset_ids (`(B,)`): the same as ids, -1 for none. Without either, only the main expert is used.
            main_expert_only: whether to use only the main expert in all rows.
            deputy_id: the deputy that all tokens of all rows use, with weight 1, whatever their datasets.
            output_router_indices: whether to return `encoder_expert_indices` and the related fields.
            num_items_in_batch: labels of the whole step, over accumulated batches and processes, as the Trainer passes it.
                The losses are then sums divided by it, so gradient accumulation changes nothing.
            kwargs: for the backbone, such as `output_hidden_states` and `output_attentions`. With labels and a margin
                loss, requesting these takes two forward passes, so that the returned states are part of the loss's graph.

        Raises:
            ValueError: for an unknown dataset, ids out of range or of a wrong number, and for texts or summaries that are
                longer than the backbone's positions.
        """
        config = self.config
        if labels is not None:
            use_cache = False
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        elif self.training and num_items_in_batch is not None:
            check_has_labels(config, decoder_input_ids)
        decoder_tokens = decoder_input_ids if decoder_inputs_embeds is None else decoder_inputs_embeds
        B, routing = self._make_routing(
            input_ids, inputs_embeds, encoder_outputs, decoder_tokens, cache, dataset=dataset,
            dataset_ids=dataset_ids, main_expert_only=main_expert_only, deputy_id=deputy_id,
            training=self.training and labels is not None and torch.is_grad_enabled(), recording=output_router_indices,
        )  # fmt: skip
        model_inputs = {
            "input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds,
            "decoder_input_ids": decoder_input_ids, "decoder_attention_mask": decoder_attention_mask,
            "decoder_inputs_embeds": decoder_inputs_embeds,
        }  # fmt: skip
        margin = labels is not None and bool(config.margin_loss_coef) and routing.active
        cached = {"encoder_outputs": encoder_outputs, CACHE: cache, "use_cache": use_cache}
        outputs, main = self._run_backbone(model_inputs, cached, routing, margin, kwargs)
        states = outputs.last_hidden_state  # (B, T, d), or (2B, T, d) with the main expert's states in the second half
        full, main = (states[:B], states[B:]) if len(states) > B else (states, main)
        logits = self._lm_logits(full)
        losses = {}
        if labels is not None:
            losses = self._losses(logits, labels.to(logits.device), main, num_items_in_batch)
        router_outputs = self._router_outputs(routing, B, outputs, encoder_outputs is None)
        return self._output(outputs, full, logits=logits, **losses, **router_outputs)

    def _validate_generated_length(self, generation_config, input_ids_length, has_default_max_length):
        super()._validate_generated_length(generation_config, input_ids_length, has_default_max_length)
        limit = self.config.max_position_embeddings
        if limit is not None and generation_config.max_length > limit:
            raise ValueError(
                f"max_length={generation_config.max_length} exceeds the decoder's {limit} positions. Use "
                f"max_length={limit} or less, or fewer max_new_tokens."
            )


class MoeSummForCausalLM(LanguageModelMixin, MoeSummPreTrainedModel, GenerationMixin):
    """Summarises texts of several datasets: a decoder with a main expert and deputies in every layer. The document and the
    configuration's `summary_prompt` are the prompt (`prompts_moesumm.format_prompt`), and the summary continues it.

    Deputies act on all tokens of a row, those of the prompt and those of the summary; `LlamaLikeLayer` has the equations.

    Example:

    ```python
    >>> from modeling_moesumm import MoeSummForCausalLM
    >>> model = MoeSummForCausalLM.from_backbone("HuggingFaceTB/SmolLM2-135M-Instruct", datasets=["papers", "clinic"])
    >>> prompts = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    >>> model.generate(**prompts, dataset=["papers", None], max_new_tokens=60)
    ```
    """

    has_encoder = False
    backbone_example = "a Llama, Mistral, Qwen2 or Qwen3, such as 'HuggingFaceTB/SmolLM2-135M-Instruct'"
    lora_task = "CAUSAL_LM"
    output_class = MoeSummCausalLMOutput

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
        dataset: str | list[str | None] | None = None,
        dataset_ids: torch.Tensor | None = None,
        main_expert_only: bool | None = None,
        deputy_id: int | None = None,
        use_cache: bool | None = None,
        output_router_indices: bool = False,
        logits_to_keep: int | torch.Tensor = 0,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> MoeSummCausalLMOutput:
        """Computes logits and losses.

        Args:
            input_ids, attention_mask, position_ids (`(B, T)`), inputs_embeds (`(B, T, d)`), cache, use_cache: as for the
                backbone. Rows may be padded on either side.
            labels (`(B, K)`): the token ids, -100 for tokens without a loss, such as those of the prompt. The loss shifts
                them: the scores at a position are those of the next token. K is T without `logits_to_keep`.
            dataset: the name of each row's dataset, `None` for none, or one name for all rows.
            dataset_ids (`(B,)`): the same as ids, -1 for none. Without either, only the main expert is used.
            main_expert_only: whether to use only the main expert in all rows.
            deputy_id: the deputy that all tokens of all rows use, with weight 1, whatever their datasets.
            output_router_indices: whether to return `expert_indices` and `expert_weights`.
            logits_to_keep: the number of last positions to score, or their indices `(K,)`; 0 for all.
            num_items_in_batch: labels of the whole step, over accumulated batches and processes, as the Trainer passes it.
                The losses are then sums divided by it, so gradient accumulation changes nothing.
            kwargs: for the backbone, such as `output_hidden_states` and `output_attentions`. With labels and a margin
                loss, requesting these takes two forward passes, so that the returned states are part of the loss's graph.

        Raises:
            ValueError: for an unknown dataset, ids out of range or of a wrong number, rows without tokens, and labels that do
                not match the positions that are scored.
        """
        config = self.config
        if labels is not None:
            use_cache = False
        elif self.training and num_items_in_batch is not None:
            check_has_labels(config, input_ids)
        (B, T), routing = self._make_decoder_routing(
            input_ids, inputs_embeds, cache, dataset=dataset, dataset_ids=dataset_ids, main_expert_only=main_expert_only,
            deputy_id=deputy_id, training=self.training and labels is not None and torch.is_grad_enabled(),
            recording=output_router_indices,
        )  # fmt: skip
        model_inputs = {
            "input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }  # fmt: skip
        margin = labels is not None and bool(config.margin_loss_coef) and routing.active
        cached = {CACHE: cache, "use_cache": use_cache}
        outputs, main = self._run_backbone(model_inputs, cached, routing, margin, kwargs)
        states = outputs.last_hidden_state  # (B, T, d), or (2B, T, d) with the main expert's states in the second half
        full, main = (states[:B], states[B:]) if len(states) > B else (states, main)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self._lm_logits(full[:, kept])
        fields = {}
        if labels is not None:
            targets = next_tokens(labels.to(logits.device), logits.shape[1])
            main = None if main is None else main[:, kept]
            fields = self._losses(logits, targets, main, num_items_in_batch)
        fields |= self._decoder_router_outputs(routing, (B, T), states.device)
        return self._output(outputs, full, logits=logits, **fields)


MoeSummModel.register_for_auto_class("AutoModel")
MoeSummForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")
MoeSummForCausalLM.register_for_auto_class("AutoModelForCausalLM")

__all__ = ["MoeSummForCausalLM", "MoeSummForConditionalGeneration", "MoeSummModel", "MoeSummPreTrainedModel"]
