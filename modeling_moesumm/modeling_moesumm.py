# SPDX-License-Identifier: Apache-2.0
"""MoeSumm as a Hugging Face model: a pretrained summariser with deputies beside its main expert (MoeSumm, Sect. 4).

Letters: B texts, S source tokens, T target tokens, d hidden size, V vocabulary, N deputies, E datasets.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import GenerationMixin
from transformers.modeling_outputs import Seq2SeqLMOutput, Seq2SeqModelOutput
from transformers.utils import can_return_tuple

from .base_moesumm import MoeSummEncoder, MoeSummPreTrainedModel
from .cache_moesumm import CACHE, accepts_both_names, named_for_peft
from .layers_moesumm import margin_losses, token_losses
from .routing_moesumm import (
    RoutingContext,
    check_exclusive,
    check_has_labels,
    check_has_source,
    dataset_names_to_ids,
    validate_dataset_ids,
)

STATES = ("output_hidden_states", "output_attentions")


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


class MoeSummModel(MoeSummPreTrainedModel):
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


class MoeSummForConditionalGeneration(MoeSummPreTrainedModel, GenerationMixin):
    """Summarises texts of several datasets: an encoder and a decoder with a main expert and deputies in every layer.

    Example:

    ```python
    >>> from modeling_moesumm import MoeSummForConditionalGeneration
    >>> model = MoeSummForConditionalGeneration.from_backbone("facebook/bart-large", datasets=["cnn_dm", "pubmed"])
    >>> model.generate(**tokenizer(texts, return_tensors="pt", padding=True), dataset=["pubmed", None])
    ```
    """

    card_use = {
        "what": "Summarises texts of several domains",
        "tag": "summarization",
        "package": "modeling_moesumm",
        "task": "moe-summarization",
        "call": 'run("The council met on Monday. ...")',
    }
    lora_task = "SEQ_2_SEQ_LM"

    @classmethod
    def pipelines(cls) -> dict[str, type | str]:
        """The pipeline that is saved with the model."""
        from .pipeline_moe_summarization import MoeSummarizationPipeline

        return {"moe-summarization": MoeSummarizationPipeline}

    def get_output_embeddings(self) -> nn.Module:
        """The language modeling head."""
        return self.backbone.get_output_embeddings()

    def set_output_embeddings(self, value: nn.Module):
        """Replaces the language modeling head."""
        self.backbone.set_output_embeddings(value)

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

    def _run_backbone(self, model_inputs: dict, cached: dict, routing, margin: bool, kwargs: dict):
        """The backbone's outputs and, if the margin takes a pass of its own, the main expert's states, else `None`."""
        if margin and self.config.margin_main == "model":
            check_has_source(cached["encoder_outputs"], cached[CACHE])
            return self._full_and_main(model_inputs, routing, kwargs)
        if margin:
            routing.main_only_layer = self.num_layers - 1
        return self.backbone.base_model(**model_inputs, **cached, routing=routing, return_dict=True, **kwargs), None

    def _full_and_main(self, model_inputs: dict, routing: RoutingContext, kwargs: dict):
        """The backbone's output with and without deputies: one pass of 2B rows; or two of B rows, and the second's states."""
        # One pass uses every parameter once, which sharding and re-entrant checkpoints need. But slices of its states would
        # not be part of the loss's graph, so requested states come from a pass of their own.
        call = {"use_cache": False, "return_dict": True}
        model = self.backbone.base_model
        defaults = {name: getattr(self.config.text_config, name, False) for name in STATES}
        requested = {name: value for name, value in kwargs.items() if name in STATES and value is not None}
        if torch.is_grad_enabled() and any({**defaults, **requested}.values()):
            outputs = model(**model_inputs, routing=routing, **call, **kwargs)
            kwargs = {name: value for name, value in kwargs.items() if name not in STATES}
            main = model(**model_inputs, routing=RoutingContext(False), **call, **kwargs)
            return outputs, main.last_hidden_state
        first = next(x for x in model_inputs.values() if x is not None)
        doubled = {name: None if x is None else torch.cat([x, x]) for name, x in model_inputs.items()}
        routing = routing.with_main_only_rows(len(first), first.device)
        return model(**doubled, routing=routing, **call, **kwargs), None

    def _lm_logits(self, states: torch.Tensor) -> torch.Tensor:
        """The logits `(..., V)` of states `(..., d)`."""
        logits = self.backbone.get_output_embeddings()(states)
        bias = getattr(self.backbone, "final_logits_bias", None)
        return logits if bias is None else logits + bias[0].to(logits.device)

    def _losses(self, logits, labels, main_states, num_items_in_batch) -> dict[str, torch.Tensor]:
        """The losses of the output for logits `(B, T, V)` and the main expert's states `(B, T, d)`."""
        labels, coef = labels.flatten(), self.config.margin_loss_coef
        full = token_losses(logits.flatten(0, 1), labels)
        smoothing = self.config.label_smoothing
        generation = token_losses(logits.flatten(0, 1), labels, smoothing) if smoothing else full
        real = labels != -100
        total = torch.as_tensor(real.sum() if num_items_in_batch is None else num_items_in_batch).clamp(min=1)
        generation_loss = generation.sum() / total
        if not coef:
            return {"loss": generation_loss, "generation_loss": generation_loss}
        main = full  # without deputies both are the same model, and m_t = 0
        if main_states is not None:
            main_states = main_states.flatten(0, 1)
            if not torch.compiler.is_compiling():  # logits of the real tokens only, since the vocabulary is large
                main_states, labels, full = main_states[real], labels[real], full[real]
            main = token_losses(self._lm_logits(main_states), labels)
        margin_loss = margin_losses(full, main).sum() / total
        loss = generation_loss + coef * margin_loss
        return {"loss": loss, "generation_loss": generation_loss, "margin_loss": margin_loss}

    def _output(self, outputs, full, **fields) -> MoeSummSeq2SeqLMOutput:
        B = len(full)

        def first_rows(states):
            if isinstance(states, tuple):
                return tuple(map(first_rows, states))
            if states is outputs.last_hidden_state:
                return full  # the input of the logits, and so part of the loss's graph
            return states if states is None or len(states) == B else states[:B]

        names = set(outputs) - {"last_hidden_state", CACHE}
        states = {name: first_rows(outputs[name]) for name in names}
        return MoeSummSeq2SeqLMOutput(**fields, **{CACHE: outputs.get(CACHE)}, **states)

    def prepare_inputs_for_generation(self, *args, **kwargs):
        """As in transformers, also for prefix tuning by peft."""
        return named_for_peft(self, super().prepare_inputs_for_generation(*args, **kwargs))

    def _prepare_model_inputs(self, inputs, bos_token_id, model_kwargs):
        # generate() calls this once, before the encoder runs and before rows are expanded to beams: names become ids,
        # which transformers expands with their rows.
        inputs, name, model_kwargs = super()._prepare_model_inputs(inputs, bos_token_id, model_kwargs)
        dataset, ids = model_kwargs.pop("dataset", None), model_kwargs.get("dataset_ids")
        if dataset is not None:
            check_exclusive(dataset, ids)
            ids = dataset_names_to_ids(self.config.datasets, dataset, len(inputs))
        if ids is not None:
            model_kwargs["dataset_ids"] = validate_dataset_ids(torch.as_tensor(ids, device=inputs.device), len(inputs))
        return inputs, name, model_kwargs

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
