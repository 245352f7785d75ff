# SPDX-License-Identifier: Apache-2.0
"""MoeSumm as Hugging Face models: a pretrained summariser with deputies beside its main expert (MoeSumm, Sect. 4).

Letters: B texts, S source tokens, T target tokens (of a decoder, all tokens), K positions that are scored, d hidden size,
V vocabulary, N deputies, E datasets.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.utils import can_return_tuple

from .base_moesumm import MoeSummPreTrainedModel
from .cache_moesumm import CACHE, accepts_both_names
from .configuration_moesumm import MoeSummConfig
from .heads_moesumm import LanguageModelMixin
from .routing_moesumm import check_positions, given_tokens, make_routing_context


@dataclass
class MoeSummSeq2SeqModelOutput(Seq2SeqModelOutput):
    """With `output_router_indices`, each token's deputy in each layer (tuples of `(B, S)` and `(B, T)`), -1 if it used the main
    expert only, and the deputy's weight g_p in float32. Those of an encoder that did not run are `None`.
    """

    encoder_expert_indices: tuple[torch.Tensor, ...] | None = None
    encoder_expert_weights: tuple[torch.Tensor, ...] | None = None
    decoder_expert_indices: tuple[torch.Tensor, ...] | None = None
    decoder_expert_weights: tuple[torch.Tensor, ...] | None = None


@dataclass
class MoeSummSeq2SeqLMOutput(Seq2SeqLMOutput):
    """With labels, `loss` is the generation loss, smoothed by `label_smoothing`, plus `margin_loss_coef` times the margin loss
    (MoeSumm, Eq. 9). States and attentions are part of the loss's graph. Other fields are as in `MoeSummSeq2SeqModelOutput`.
    """

    generation_loss: torch.Tensor | None = None
    margin_loss: torch.Tensor | None = None
    encoder_expert_indices: tuple[torch.Tensor, ...] | None = None
    encoder_expert_weights: tuple[torch.Tensor, ...] | None = None
    decoder_expert_indices: tuple[torch.Tensor, ...] | None = None
    decoder_expert_weights: tuple[torch.Tensor, ...] | None = None


@dataclass
class MoeSummModelOutput(BaseModelOutputWithPast):
    """Fields as in `MoeSummSeq2SeqModelOutput`, of a decoder."""

    expert_indices: tuple[torch.Tensor, ...] | None = None
    expert_weights: tuple[torch.Tensor, ...] | None = None


@dataclass
class MoeSummCausalLMOutput(CausalLMOutputWithPast):
    """Fields as in `MoeSummSeq2SeqLMOutput`, of a decoder."""

    generation_loss: torch.Tensor | None = None
    margin_loss: torch.Tensor | None = None
    expert_indices: tuple[torch.Tensor, ...] | None = None
    expert_weights: tuple[torch.Tensor, ...] | None = None


class MoeSummEncoder(nn.Module):
    """The backbone's encoder with the arguments for datasets: what `get_encoder` returns. It shares the model's weights."""

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
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ):  # `generate` passes on the arguments in this signature
        """Computes the backbone encoder's output; its `last_hidden_state` is `(B, S, d)`."""
        tokens = given_tokens(input_ids, inputs_embeds)
        check_positions(self.config, "texts", tokens.shape[1])
        options = dataset, dataset_ids, main_expert_only
        return self.encoder(
            input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds,
            output_attentions=output_attentions, output_hidden_states=output_hidden_states, return_dict=return_dict,
            routing=make_routing_context(self.config, len(tokens), tokens.device, *options),
        )  # fmt: skip


class MoeSummModel(MoeSummPreTrainedModel):
    """A MoeSumm without its language modeling head: the states that embed texts with the deputies of their datasets.

    It has all parameters of the language models, so it opens their checkpoints and they open its own.

    Example:

    ```python
    >>> from transformers import AutoModel
    >>> model = AutoModel.from_pretrained("runs/moesumm")
    >>> states = model(**tokenizer(texts, return_tensors="pt", padding=True), dataset="news").encoder_last_hidden_state
    ```
    """

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        """The encoder, which accepts `dataset_ids` and the other routing arguments."""
        return MoeSummEncoder(self.config, self.backbone.get_encoder())

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
        encoder_outputs=None,
        cache=None,
        inputs_embeds: torch.Tensor | None = None,
        dataset: str | list[str | None] | None = None,
        dataset_ids: torch.Tensor | None = None,
        main_expert_only: bool | None = None,
        output_router_indices: bool = False,
        **kwargs,
    ) -> MoeSummSeq2SeqModelOutput | MoeSummModelOutput:
        """Computes hidden states; arguments as in `MoeSummForConditionalGeneration.forward`, or over a decoder as in
        `MoeSummForCausalLM.forward`.
        """
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds, **kwargs}
        output_class = MoeSummModelOutput
        if self.config.is_encoder_decoder:
            output_class, inputs["encoder_outputs"] = MoeSummSeq2SeqModelOutput, encoder_outputs
        tokens, routing = self._make_routing(
            inputs, cache, encoder_outputs, dataset=dataset, dataset_ids=dataset_ids, main_expert_only=main_expert_only,
            training=self.training and torch.is_grad_enabled(), recording=output_router_indices,
        )  # fmt: skip
        outputs = self.backbone.base_model(**inputs, **{CACHE: cache}, routing=routing, return_dict=True)
        fields = self._router_outputs(routing, len(tokens), outputs, encoder_outputs is None)
        return output_class(**outputs, **fields)


class MoeSummForConditionalGeneration(LanguageModelMixin, MoeSummPreTrainedModel, GenerationMixin):
    """Summarises texts of several datasets: an encoder and a decoder with a main expert and deputies in every layer.

    Example:

    ```python
    >>> from modeling_moesumm import MoeSummForConditionalGeneration
    >>> model = MoeSummForConditionalGeneration.from_backbone("facebook/bart-large", datasets=["cnn_dm", "pubmed"])
    >>> model.generate(**tokenizer(texts, return_tensors="pt", padding=True), dataset=["pubmed", None])
    ```
    """

    has_encoder = True
    lora_task = "SEQ_2_SEQ_LM"
    output_class = MoeSummSeq2SeqLMOutput

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        """The encoder, which accepts `dataset_ids` and the other routing arguments."""
        return MoeSummEncoder(self.config, self.backbone.get_encoder())

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
        use_cache: bool | None = None,
        output_router_indices: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> MoeSummSeq2SeqLMOutput:
        """Computes logits and losses. What is not listed is as for the backbone.

        Args:
            labels (`(B, T)`): the summaries' tokens, -100 for tokens without a loss.
            dataset: the name of each row's dataset, `None` for none, or one name for all rows.
            dataset_ids (`(B,)`): the same as ids, -1 for none. Without either, only the main expert is used.
            main_expert_only: whether to use only the main expert in all rows.
            output_router_indices: whether to return `encoder_expert_indices` and the related fields.
            num_items_in_batch: labels of the whole step, over accumulated batches and processes, as the Trainer passes it.
                The losses are then sums divided by it, so gradient accumulation changes nothing.
            kwargs: for the backbone. With a margin loss, `output_hidden_states` and `output_attentions` take two forward passes.

        Raises:
            ValueError: for an unknown dataset, ids out of range or of a wrong number, and for texts or summaries that are
                longer than the backbone's positions.
        """
        if labels is not None and decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        inputs = {
            "input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds,
            "decoder_input_ids": decoder_input_ids, "decoder_attention_mask": decoder_attention_mask,
            "decoder_inputs_embeds": decoder_inputs_embeds,
        }  # fmt: skip
        cached = {"encoder_outputs": encoder_outputs, CACHE: cache, "use_cache": use_cache}
        routing = {
            "dataset": dataset, "dataset_ids": dataset_ids, "main_expert_only": main_expert_only,
            "recording": output_router_indices,
        }  # fmt: skip
        return self._language_model(inputs, cached, routing, labels, num_items_in_batch, kwargs)

    def _validate_generated_length(self, generation_config, input_ids_length, has_default_max_length):
        super()._validate_generated_length(generation_config, input_ids_length, has_default_max_length)
        check_positions(self.config, "summaries", generation_config.max_length)


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
        use_cache: bool | None = None,
        output_router_indices: bool = False,
        logits_to_keep: int | torch.Tensor = 0,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> MoeSummCausalLMOutput:
        """Computes logits and losses. What is not listed is as in `MoeSummForConditionalGeneration.forward`, or as for the backbone.

        Args:
            labels (`(B, K)`): the token ids, -100 for tokens without a loss, such as those of the prompt. The loss shifts
                them: the scores at a position are those of the next token. K is T without `logits_to_keep`.
            logits_to_keep: the number of last positions to score, or their indices `(K,)`; 0 for all.
        """
        inputs = {
            "input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }  # fmt: skip
        routing = {
            "dataset": dataset, "dataset_ids": dataset_ids, "main_expert_only": main_expert_only,
            "recording": output_router_indices,
        }  # fmt: skip
        cached = {CACHE: cache, "use_cache": use_cache}
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return self._language_model(inputs, cached, routing, labels, num_items_in_batch, kwargs, kept)

    def generate_batch(self, *args, dataset=None, dataset_ids=None, **kwargs):
        """As in transformers, by the main expert. Raises a `ValueError` for datasets, which belong to rows: it packs texts into one."""
        if dataset is not None or dataset_ids is not None:
            raise ValueError("generate_batch() packs texts into one row, and datasets belong to rows: use generate().")
        return super().generate_batch(*args, **kwargs)


MoeSummModel.register_for_auto_class("AutoModel")
MoeSummForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")
MoeSummForCausalLM.register_for_auto_class("AutoModelForCausalLM")

__all__ = ["MoeSummForCausalLM", "MoeSummForConditionalGeneration", "MoeSummModel", "MoeSummPreTrainedModel"]
