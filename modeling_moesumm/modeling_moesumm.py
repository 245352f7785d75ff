"""MoeSumm as a Hugging Face model: a pretrained summariser with deputies beside its main expert (MoeSumm, Sect. 4).

Letters: B texts, S source tokens, T target tokens, d hidden size, V vocabulary, N deputies, E datasets.
"""

import copy
from dataclasses import fields

import torch
from torch import nn
from transformers import AutoModelForSeq2SeqLM, GenerationMixin, PreTrainedModel
from transformers.utils import can_return_tuple

from .backbone_moesumm import HUB_OPTIONS, split_options
from .base_moesumm import MoeSummPreTrainedModel
from .configuration_moesumm import MoeSummConfig
from .inputs_moesumm import check_has_labels, check_has_source, check_target, source_tokens, written_tokens
from .layers_moesumm import attach_deputies, layers_of
from .loss_moesumm import margin_losses, token_losses
from .outputs_moesumm import MoeSummOutput
from .routing_moesumm import Routing, check_dataset_ids, check_one_of, dataset_ids_of, plan_routing
from .summarizing_moesumm import Summarizer, check_texts

# What from_backbone() takes for the configuration.
CONFIG_OPTIONS = {field.name for field in fields(MoeSummConfig)} - {"text_config"}
STATES = ("output_hidden_states", "output_attentions")


class MoeSummEncoder(nn.Module):
    """The backbone's encoder, called with a batch's datasets: what `get_encoder` returns. Its weights are the model's.

    The arguments are those of `MoeSummForConditionalGeneration.forward`: `generate` hands on what is named here.
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
        force_deputy: int | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ):
        """-> the backbone encoder's output, `last_hidden_state` (B, S, d) first."""
        tokens = source_tokens(self.config, input_ids, inputs_embeds)
        routing = plan_routing(
            self.config, len(tokens), tokens.device, dataset, dataset_ids, main_expert_only, force_deputy
        )
        return self.encoder(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=return_dict,
            routing=routing,
        )


class MoeSummForConditionalGeneration(MoeSummPreTrainedModel, GenerationMixin):
    """Summarises texts of several datasets: an encoder and a decoder with a main expert and deputies in every layer.

    Example:

    ```python
    >>> from modeling_moesumm import MoeSummForConditionalGeneration
    >>> model = MoeSummForConditionalGeneration.from_backbone("facebook/bart-large", datasets=["cnn_dm", "pubmed"])
    >>> model.generate(**tokenizer(texts, return_tensors="pt", padding=True), dataset=["pubmed", None])
    ```
    """

    def __init__(self, config: MoeSummConfig):
        super().__init__(config)
        config.check()
        self.backbone = AutoModelForSeq2SeqLM.from_config(config.text_config, trust_remote_code=False)
        attach_deputies(self.backbone.base_model, config)
        self.post_init()

    @classmethod
    def from_backbone(
        cls,
        name_or_path: str,
        datasets: list[str] | None = None,
        num_deputies: int = 3,
        deputy_size: int | None = None,
        *,
        dtype: torch.dtype | str = torch.float32,
        attention_dropout: float | None = None,
        **options,
    ):
        """A MoeSumm model whose main expert is a pretrained model, with new deputies and selectors.

        Args:
            name_or_path (`str`): folder or Hub id of a BART, PEGASUS or mBART.
            datasets, num_deputies, deputy_size: as in `MoeSummConfig`.
            dtype: of all weights, "auto" for the checkpoint's. Not the default, since new experts do not learn in half
                precision.
            attention_dropout (`float`, *optional*): in place of the backbone's own.
            options: other fields of `MoeSummConfig` (`margin_loss_coef=0`, `main_expert=False`, ...), and what
                `from_pretrained` takes to find and load weights (`revision`, `token`, `device_map`,
                `quantization_config`, `variant`, `experts_implementation`, ...).

        Raises:
            OSError: when there is no such model.
            ValueError: for a backbone without fc1 and fc2, an unknown option, or a value out of range.
        """
        options = {"datasets": datasets, "num_deputies": num_deputies, "deputy_size": deputy_size, **options}
        options, load_kwargs = split_options(options, CONFIG_OPTIONS)
        loaded = cls.load_over_backbone(
            name_or_path,
            lambda backbone: cls.config_class(text_config=backbone, **options),
            load_kwargs,
            dtype,
            attention_dropout,
        )
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if not model.config.main_expert:
            hub = {name: value for name, value in load_kwargs.items() if name in HUB_OPTIONS}
            model._copy_to_experts(AutoModelForSeq2SeqLM.from_pretrained(name_or_path, dtype=model.dtype, **hub))
        return loaded

    @classmethod
    def backbone_skeleton(cls, config: MoeSummConfig) -> PreTrainedModel:
        with torch.device("meta"):
            skeleton = AutoModelForSeq2SeqLM.from_config(copy.deepcopy(config.text_config), trust_remote_code=False)
        layers_of(skeleton.base_model)
        return skeleton

    @classmethod
    def pipelines(cls) -> dict[str, type | str]:
        from .pipeline_moesumm import MoeSummarizationPipeline

        return {"moe-summarization": MoeSummarizationPipeline}

    @torch.no_grad()
    def _copy_to_experts(self, backbone: PreTrainedModel):
        """FlatMoE: every expert starts as a copy of the backbone's feed-forward layer."""
        own = self.backbone.base_model
        for layer, source in zip(
            (*own.encoder.layers, *own.decoder.layers), layers_of(backbone.base_model), strict=True
        ):
            experts = layer.deputies.experts
            experts.up_proj.copy_(source.fc1.weight)
            experts.up_bias.copy_(source.fc1.bias)
            experts.down_proj.copy_(source.fc2.weight.T)
            layer.fc2.bias.copy_(source.fc2.bias)

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        """The encoder, called with `dataset_ids` and the like."""
        return MoeSummEncoder(self.config, self.backbone.get_encoder())

    def get_decoder(self) -> nn.Module:
        return self.backbone.get_decoder()

    def get_input_embeddings(self) -> nn.Module:
        return self.backbone.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module):
        self.backbone.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        return self.backbone.get_output_embeddings()

    def set_output_embeddings(self, value: nn.Module):
        self.backbone.set_output_embeddings(value)

    def resize_token_embeddings(self, *args, **kwargs) -> nn.Module:
        embeddings = self.backbone.resize_token_embeddings(*args, **kwargs)
        self.vocab_size = self.config.vocab_size
        return embeddings

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """labels (B, T) -> what the decoder reads (B, T), as the backbone shifts them."""
        return self.backbone.prepare_decoder_input_ids_from_labels(labels)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs=None,
        past_key_values=None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        dataset: str | list[str | None] | None = None,
        dataset_ids: torch.Tensor | None = None,
        main_expert_only: bool | None = None,
        force_deputy: int | None = None,
        use_cache: bool | None = None,
        output_deputies: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> MoeSummOutput:
        """
        Args:
            input_ids, attention_mask (`(B, S)`), inputs_embeds (`(B, S, d)`), decoder_input_ids, decoder_attention_mask
                (`(B, T)`), decoder_inputs_embeds (`(B, T, d)`), encoder_outputs, past_key_values, use_cache: as the
                backbone takes them.
            labels (`(B, T)`): the summaries' tokens, -100 where there is nothing to learn.
            dataset: the name of each row's dataset, `None` for none, or one for all rows.
            dataset_ids (`(B,)`): the same as ids, -1 for none. Without either the main expert is alone.
            main_expert_only: whether the deputies are left out in all rows.
            force_deputy: a deputy that all tokens of all rows take, with the weight 1, whatever their datasets.
            output_deputies: whether the output holds `encoder_deputies` and so on.
            num_items_in_batch: labels in the whole step, over accumulated batches and processes. The Trainer gives it,
                and the losses are then their sums divided by it: gradient accumulation changes nothing.
            kwargs: for the backbone, such as `output_hidden_states` and `output_attentions`. With labels and a margin
                loss, asking for these takes two passes, so that what is returned is part of the loss's graph.

        Raises:
            ValueError: for an unknown dataset (the known ones are listed), ids out of range or of another length, and
                for texts or summaries longer than the backbone has positions for.
        """
        tokens = source_tokens(self.config, input_ids, inputs_embeds) if encoder_outputs is None else encoder_outputs[0]
        B, device, config = len(tokens), tokens.device, self.config
        if labels is not None:
            use_cache = False
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        elif self.training and num_items_in_batch is not None:
            check_has_labels(config, decoder_input_ids)
        written = written_tokens(past_key_values)
        check_target(config, decoder_input_ids if decoder_inputs_embeds is None else decoder_inputs_embeds, written)
        routing = plan_routing(
            config,
            B,
            device,
            dataset,
            dataset_ids,
            main_expert_only,
            force_deputy,
            training=self.training and labels is not None and torch.is_grad_enabled(),
            checked=encoder_outputs is not None and written > 0,
            recording=output_deputies,
        )
        reading = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "decoder_input_ids": decoder_input_ids,
            "decoder_attention_mask": decoder_attention_mask,
            "inputs_embeds": inputs_embeds,
            "decoder_inputs_embeds": decoder_inputs_embeds,
        }
        margin = labels is not None and bool(config.margin_loss_coef) and routing.active
        main = None
        if margin and config.margin_main == "model":
            check_has_source(encoder_outputs, past_key_values)
            outputs, main = self._full_and_main(reading, routing, kwargs)
        else:
            if margin:
                routing.main_only_layer = self.num_layers - 1
            outputs = self.backbone.base_model(
                **reading,
                encoder_outputs=encoder_outputs,
                past_key_values=past_key_values,
                use_cache=use_cache,
                routing=routing,
                return_dict=True,
                **kwargs,
            )
        states = outputs.last_hidden_state  # (B, T, d), or (2B, T, d) with those of the main expert behind
        full, main = (states[:B], states[B:]) if len(states) > B else (states, main)
        logits = self._scores(full)
        losses = (None, None, None)
        if labels is not None:
            losses = self._losses(logits, labels.to(logits.device), main, num_items_in_batch)
        return self._output(outputs, full, logits, losses, routing, encoder_outputs is None)

    def _full_and_main(self, reading: dict, routing: Routing, kwargs: dict):
        """The backbone's output with deputies and without: one of 2B rows, or two of B rows, the second's states alone.

        One pass of 2B rows uses every parameter once, as sharding and re-entrant checkpoints want it. But rows cut out
        of its states would be no part of the loss's graph: states that are returned come from a pass of their own.
        """
        call = {"use_cache": False, "return_dict": True}
        if torch.is_grad_enabled() and self._returns_states(kwargs):
            outputs = self.backbone.base_model(**reading, routing=routing, **call, **kwargs)
            kwargs = {name: value for name, value in kwargs.items() if name not in STATES}
            return outputs, self.backbone.base_model(
                **reading, routing=Routing(False), **call, **kwargs
            ).last_hidden_state
        B = len(next(x for x in reading.values() if x is not None))
        doubled = {name: None if x is None else torch.cat([x, x]) for name, x in reading.items()}
        return self.backbone.base_model(**doubled, routing=routing.with_main_only_rows(B), **call, **kwargs), None

    def _returns_states(self, kwargs: dict) -> bool:
        """Whether hidden states or attentions are asked for, in the call or in the configuration."""
        asked = (kwargs.get(name) for name in STATES)
        backbone = self.config.text_config
        return any(getattr(backbone, n, False) if x is None else x for n, x in zip(STATES, asked, strict=True))

    @property
    def num_layers(self) -> int:
        """Layers of encoder and decoder together."""
        return len(self.backbone.base_model.encoder.layers) + len(self.backbone.base_model.decoder.layers)

    def _scores(self, states: torch.Tensor) -> torch.Tensor:
        """(..., d) -> (..., V)."""
        logits = self.backbone.get_output_embeddings()(states)
        bias = getattr(self.backbone, "final_logits_bias", None)
        return logits if bias is None else logits + bias[0].to(logits.device)

    def _losses(self, logits, labels, main_states, num_items_in_batch):
        """loss, generation loss and margin loss, of logits (B, T, V) and the main expert's states (B, T, d)."""
        labels, coef = labels.flatten(), self.config.margin_loss_coef
        full = token_losses(logits.flatten(0, 1), labels)
        smoothing = self.config.label_smoothing
        generation = token_losses(logits.flatten(0, 1), labels, smoothing) if smoothing else full
        real = labels != -100
        total = torch.as_tensor(real.sum() if num_items_in_batch is None else num_items_in_batch).clamp(min=1)
        generation_loss = generation.sum() / total
        if not coef:
            return generation_loss, generation_loss, None
        main = full  # without deputies both are one model, and the margin is 0
        if main_states is not None:
            main_states = main_states.flatten(0, 1)
            if not torch.compiler.is_compiling():  # scores of the real tokens only: the vocabulary is the dear part
                main_states, labels, full = main_states[real], labels[real], full[real]
            main = token_losses(self._scores(main_states), labels)
        margin_loss = margin_losses(full, main).sum() / total
        return generation_loss + coef * margin_loss, generation_loss, margin_loss

    def _output(self, outputs, full, logits, losses, routing: Routing, encoder_ran: bool) -> MoeSummOutput:
        B = len(full)

        def first_rows(states):
            if isinstance(states, tuple):
                return tuple(map(first_rows, states))
            if states is outputs.last_hidden_state:
                return full  # what the logits were made of, and so part of the loss's graph
            return states if states is None or len(states) == B else states[:B]

        found = {"encoder": (None, None), "decoder": (None, None)}
        if routing.recording:
            depth, total, device = len(self.backbone.base_model.encoder.layers), self.num_layers, logits.device
            if encoder_ran:
                shape = (B, outputs.encoder_last_hidden_state.shape[1])
                found["encoder"] = routing.choices(range(depth), shape, device)
            found["decoder"] = routing.choices(range(depth, total), (B, logits.shape[1]), device)
        loss, generation_loss, margin_loss = losses
        return MoeSummOutput(
            loss=loss,
            logits=logits,
            generation_loss=generation_loss,
            margin_loss=margin_loss,
            past_key_values=outputs.past_key_values,
            decoder_hidden_states=first_rows(outputs.decoder_hidden_states),
            decoder_attentions=first_rows(outputs.decoder_attentions),
            cross_attentions=first_rows(outputs.cross_attentions),
            encoder_last_hidden_state=first_rows(outputs.encoder_last_hidden_state),
            encoder_hidden_states=first_rows(outputs.encoder_hidden_states),
            encoder_attentions=first_rows(outputs.encoder_attentions),
            encoder_deputies=found["encoder"][0],
            encoder_gates=found["encoder"][1],
            decoder_deputies=found["decoder"][0],
            decoder_gates=found["decoder"][1],
        )

    def summarize(
        self,
        texts,
        tokenizer,
        dataset: str | list[str | None] | None = None,
        max_length: int | float | None = None,
        min_length: int | float | None = None,
        on_long: str = "window",
        batch_size: int = 8,
        **generate_kwargs,
    ) -> str | list[str]:
        """Texts of any length -> their summaries, a text's own whatever else is in the call.

        Args:
            texts: a text, or a list or another iterable of texts.
            tokenizer: the model's.
            dataset: the name of the dataset that a text is from or like, `None` for none; a list has one for each text.
            max_length, min_length: tokens of a summary as `generate` counts them, or a share of the source's tokens
                between 0 and 1. By default what `generation_config` says, else 256 and 0.
            on_long: a text that the encoder has no positions for is read in windows of whole sentences, whose summaries
                are joined and, where they are together longer than `max_length`, summarised again (`"window"`); or
                it is refused (`"error"`), or its beginning alone is read (`"truncate"`).
            batch_size: texts and windows that are read at once.
            generate_kwargs: for `generate`, such as `num_beams` (4 unless this or `generation_config` says otherwise),
                `main_expert_only` or `force_deputy`.

        Returns: a summary, or a list of them. One that ran into its length limit is cut at its last sentence end.

        Raises:
            ValueError: for an empty text, an unknown dataset, lengths beyond the decoder's positions, and under
                `"error"` a text that is too long.
        """
        write = Summarizer(self, tokenizer, max_length, min_length, on_long, batch_size, **generate_kwargs)
        if isinstance(texts, str):
            return write([texts], dataset)[0]
        return write(check_texts(texts), dataset)

    def _prepare_model_inputs(self, inputs, bos_token_id, model_kwargs):
        # generate() passes here once, before the encoder runs and before beams are made of rows: names become ids,
        # which go with their rows wherever these go.
        inputs, name, model_kwargs = super()._prepare_model_inputs(inputs, bos_token_id, model_kwargs)
        dataset, ids = model_kwargs.pop("dataset", None), model_kwargs.get("dataset_ids")
        if dataset is not None:
            check_one_of(dataset, ids)
            ids = dataset_ids_of(self.config, dataset, len(inputs))
        if ids is not None:
            model_kwargs["dataset_ids"] = check_dataset_ids(torch.as_tensor(ids, device=inputs.device), len(inputs))
        return inputs, name, model_kwargs

    def _validate_generated_length(self, generation_config, input_ids_length, has_default_max_length):
        super()._validate_generated_length(generation_config, input_ids_length, has_default_max_length)
        limit = self.config.max_position_embeddings
        if limit is not None and generation_config.max_length > limit:
            raise ValueError(
                f"A summary of up to {generation_config.max_length} tokens was asked for, and the decoder has "
                f"positions for {limit}. Use max_length={limit}, or fewer max_new_tokens."
            )


MoeSummForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")

__all__ = ["MoeSummEncoder", "MoeSummForConditionalGeneration", "MoeSummPreTrainedModel"]
