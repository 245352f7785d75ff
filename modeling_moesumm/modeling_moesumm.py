# SPDX-License-Identifier: Apache-2.0
"""MoeSumm as a Hugging Face model: BART, PEGASUS or mBART with deputies beside the main expert (MoeSumm, Sect. 4).

Letters: B texts, S source tokens, T target tokens, d hidden size, V vocabulary, N deputies, E datasets.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import Seq2SeqLMOutput, Seq2SeqModelOutput
from transformers.utils import can_return_tuple

from .base_moesumm import MoeSummPreTrainedModel
from .cache_moesumm import CACHE, accepts_both_names
from .configuration_moesumm import MoeSummConfig
from .heads_moesumm import LanguageModelMixin
from .routing_moesumm import (
    RoutingContext,
    check_has_labels,
    make_routing_context,
    past_length,
    validate_source,
    validate_target,
)


class MoeSummEncoder(nn.Module):
    """The backbone's encoder with the arguments for datasets: what `get_encoder` returns. It shares the model's weights.

    The arguments are those of `MoeSummForConditionalGeneration.forward`; `generate` passes on the ones in this signature.
    """

    main_input_name = "input_ids"

    def __init__(self, config: MoeSummConfig, encoder: PreTrainedModel):
        super().__init__()
        self.config, self.encoder = config, encoder

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        dataset: str | list[str | None] | None = None,
        dataset_ids: torch.Tensor | None = None,
        main_expert_only: bool | None = None,
        deputy_id: int | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ):
        """Computes the backbone encoder's output; its `last_hidden_state` is `(B, S, d)`."""
        tokens = validate_source(self.config, input_ids, inputs_embeds)
        options = dataset, dataset_ids, main_expert_only, deputy_id
        return self.encoder(
            input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds,
            output_attentions=output_attentions, output_hidden_states=output_hidden_states, return_dict=return_dict,
            routing=make_routing_context(self.config, len(tokens), tokens.device, *options),
        )  # fmt: skip


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


class MoeSummSeq2SeqPreTrainedModel(MoeSummPreTrainedModel):
    """What the models of an encoder and a decoder share: the encoder with arguments for datasets, and the routing's outputs."""

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        """The encoder, which accepts `dataset_ids` and the other routing arguments."""
        return MoeSummEncoder(self.config, self.backbone.get_encoder())

    def _make_routing(
        self, input_ids, inputs_embeds, encoder_outputs, decoder_tokens, cache, **options
    ) -> tuple[int, RoutingContext]:
        """Validates the lengths; returns B and the routing. `options` are those of `make_routing_context`."""
        tokens = encoder_outputs[0] if encoder_outputs else validate_source(self.config, input_ids, inputs_embeds)
        past, B = past_length(cache), len(tokens)
        validate_target(self.config, decoder_tokens, past)
        options["validated"] = encoder_outputs is not None and past > 0
        return B, make_routing_context(self.config, B, tokens.device, **options)

    def _router_outputs(self, routing: RoutingContext, B: int, outputs, encoder_ran: bool) -> dict[str, tuple]:
        """The output fields for `output_router_indices`, of the first B rows of the backbone's outputs."""
        if not routing.recording:
            return {}
        states, depth = outputs.last_hidden_state, len(self.backbone.base_model.encoder.layers)
        parts = [("decoder", range(depth, self.num_layers), states.shape[1])]
        if encoder_ran:
            parts.append(("encoder", range(depth), outputs.encoder_last_hidden_state.shape[1]))
        router_outputs: dict[str, tuple] = {}
        for part, layers, length in parts:
            indices, weights = routing.experts_of(layers, (B, length), states.device)
            router_outputs |= {f"{part}_expert_indices": indices, f"{part}_expert_weights": weights}
        return router_outputs


class MoeSummModel(MoeSummSeq2SeqPreTrainedModel):
    """The hidden states of encoder and decoder, without logits. It opens the checkpoints of
    `MoeSummForConditionalGeneration`, and the other way round: the language modeling head is kept, but not used.

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
    ) -> MoeSummSeq2SeqModelOutput:
        """Computes hidden states; arguments as in `MoeSummForConditionalGeneration.forward`."""
        decoder_tokens = decoder_input_ids if decoder_inputs_embeds is None else decoder_inputs_embeds
        B, routing = self._make_routing(
            input_ids, inputs_embeds, encoder_outputs, decoder_tokens, cache, dataset=dataset,
            dataset_ids=dataset_ids, main_expert_only=main_expert_only, deputy_id=deputy_id,
            training=self.training and torch.is_grad_enabled(), recording=output_router_indices,
        )  # fmt: skip
        outputs = self.backbone.base_model(
            input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask, encoder_outputs=encoder_outputs,
            inputs_embeds=inputs_embeds, decoder_inputs_embeds=decoder_inputs_embeds, use_cache=use_cache, routing=routing,
            return_dict=True, **{CACHE: cache}, **kwargs,
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


MoeSummModel.register_for_auto_class("AutoModel")
MoeSummForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")

__all__ = ["MoeSummEncoder", "MoeSummForConditionalGeneration", "MoeSummModel", "MoeSummPreTrainedModel"]
