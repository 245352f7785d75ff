# SPDX-License-Identifier: Apache-2.0
"""What both language models share: the logits, the losses with their second pass, and `generate` with datasets (MoeSumm, Sect. 4).

Letters: B texts, T tokens in each, d hidden size, V vocabulary.
"""

import functools

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin
from transformers.utils import ModelOutput

from .cache_moesumm import CACHE, named_for_peft
from .layers_moesumm import margin_losses, token_losses
from .routing_moesumm import RoutingContext, check_has_labels, resolve_datasets

STATES = ("output_hidden_states", "output_attentions")


class LanguageModelMixin:
    """A language model over `backbone`. Put it before `MoeSummPreTrainedModel` and `GenerationMixin` in the bases.

    `output_class` is the class of the outputs.
    """

    card_use = {
        "what": "Summarises texts of several domains",
        "tag": "summarization",
        "task": "moe-summarization",
        "call": 'run("The council met on Monday. ...")',
    }
    output_class: type[ModelOutput]

    @classmethod
    def pipelines(cls) -> dict[str, type]:
        """The pipeline that is saved with the model."""
        from .pipeline_moe_summarization import MoeSummarizationPipeline

        return {"moe-summarization": MoeSummarizationPipeline}

    def get_output_embeddings(self) -> nn.Module:
        """The language modeling head."""
        return self.backbone.get_output_embeddings()

    def set_output_embeddings(self, value: nn.Module):
        """Replaces the language modeling head."""
        self.backbone.set_output_embeddings(value)

    def _get_candidate_generator(self, *args, model_kwargs, **kwargs):
        if getattr(kwargs.get("assistant_model"), "config", self.config).model_type != self.config.model_type:
            model_kwargs = {k: v for k, v in model_kwargs.items() if k not in ("dataset_ids", "main_expert_only")}
        return super()._get_candidate_generator(*args, model_kwargs=model_kwargs, **kwargs)

    def _language_model(
        self, inputs: dict, cached: dict, routing_options: dict, labels, num_items_in_batch, kwargs, kept=slice(None)
    ) -> ModelOutput:
        """The output of `forward`. Of the backbone's arguments `inputs` are doubled for a margin, `cached` are not; `kept` are the
        positions to score.
        """
        if labels is not None:
            cached["use_cache"] = False
        elif self.training and num_items_in_batch is not None:
            check_has_labels(self.config, inputs.get("decoder_input_ids", inputs["input_ids"]))
        training = self.training and labels is not None and torch.is_grad_enabled()
        shifted = kwargs.pop("shift_labels", None)  # of the Trainer, if it splits sequences
        given = cached[CACHE], cached.get("encoder_outputs")
        tokens, routing = self._make_routing(inputs, *given, training=training, **routing_options)
        B = len(tokens)
        margin = labels is not None and bool(self.config.margin_loss_coef) and routing.active
        outputs, main = self._run_backbone(inputs, cached, routing, margin, kwargs)
        states = outputs.last_hidden_state  # (B, T, d), or (2B, T, d) with the main expert's states in the second half
        full, main = (states[:B], states[B:]) if len(states) > B else (states, main)
        logits, fields = self._lm_logits(full[:, kept]), {}
        if labels is not None:
            if not self.config.is_encoder_decoder:
                labels = next_tokens(labels, logits.shape[1]) if shifted is None else shifted
            fields = self._losses(logits, labels, None if main is None else main[:, kept], num_items_in_batch)
        fields |= self._router_outputs(routing, B, outputs, cached.get("encoder_outputs") is None)
        return self._output(outputs, full, logits=logits, **fields)

    def _run_backbone(self, inputs: dict, cached: dict, routing: RoutingContext, margin: bool, kwargs: dict):
        """The backbone's outputs and, if the margin takes a pass of its own, the main expert's states, else `None`."""
        if margin and self.config.margin_main == "model":
            if given := [name for name in ("encoder_outputs", CACHE) if cached.get(name) is not None]:
                raise ValueError(
                    f"labels with {given[0]}: the margin loss also needs the states without deputies. Pass input_ids instead, "
                    "or set config.margin_loss_coef = 0 or config.margin_main = 'last_layer'."
                )
            return self._full_and_main(inputs, routing, kwargs)
        if margin:
            routing.main_only_layer = self.num_layers - 1
        return self.backbone.base_model(**inputs, **cached, routing=routing, return_dict=True, **kwargs), None

    def _full_and_main(self, inputs: dict, routing: RoutingContext, kwargs: dict):
        """The backbone's output with and without deputies: one pass of 2B rows; or two of B rows, and the second's states."""
        # One pass uses every parameter once, which sharding and re-entrant checkpoints need. But slices of its states would
        # not be part of the loss's graph, so requested states come from a pass of their own. If only deputies are trained,
        # a pass of its own needs no graph.
        call = {"use_cache": False, "return_dict": True}
        model = self.backbone.base_model
        defaults = {name: getattr(self.config.text_config, name, False) for name in STATES}
        requested = {name: value for name, value in kwargs.items() if name in STATES and value is not None}
        frozen = not self._main_expert_learns(inputs)
        if torch.is_grad_enabled() and (frozen or any({**defaults, **requested}.values())):
            outputs = model(**inputs, routing=routing, **call, **kwargs)
            kwargs = {name: value for name, value in kwargs.items() if name not in STATES}
            with torch.set_grad_enabled(not frozen):
                main = model(**inputs, routing=RoutingContext(False), **call, **kwargs)
            return outputs, main.last_hidden_state
        first = next(x for x in inputs.values() if x is not None)
        B = len(first)
        # position ids of one row are those of all rows
        doubled = {name: x if x is None or len(x) != B else torch.cat([x, x]) for name, x in inputs.items()}
        routing = routing.with_main_only_rows(B, first.device)
        return model(**doubled, routing=routing, **call, **kwargs), None

    def _main_expert_learns(self, inputs: dict) -> bool:
        """Whether P_main has a gradient: of anything but deputies, or of the inputs, as in prompt tuning."""
        if torch.compiler.is_compiling():
            return True
        weights = (p for name, p in self.named_parameters() if ".deputies." not in name)
        return any(x.requires_grad for x in (*inputs.values(), *weights) if x is not None)

    def _lm_logits(self, states: torch.Tensor) -> torch.Tensor:
        """The logits `(..., V)` of states `(..., d)`."""
        logits = self.backbone.get_output_embeddings()(states)
        bias = getattr(self.backbone, "final_logits_bias", None)
        return logits if bias is None else logits + bias[0].to(logits.device)

    def _losses(self, logits, labels, main_states, num_items_in_batch) -> dict[str, torch.Tensor]:
        """The losses of the output for logits `(B, T, V)` and the main expert's states `(B, T, d)`."""
        labels, coef = labels.flatten().to(logits.device), self.config.margin_loss_coef
        full = token_losses(logits.flatten(0, 1), labels)
        smoothing = self.config.label_smoothing
        generation = token_losses(logits.flatten(0, 1), labels, smoothing) if smoothing else full
        real = labels != -100
        total = torch.as_tensor(real.sum() if num_items_in_batch is None else num_items_in_batch).clamp(min=1)
        total = total.to(generation.device)
        generation_loss = generation.sum() / total
        if not coef:
            return {"loss": generation_loss, "generation_loss": generation_loss}
        main = full  # without deputies both are the same model, and m_t = 0
        if main_states is not None:
            main_states = main_states.flatten(0, 1).to(real.device)  # of a split model, the last layer's device differs
            if not torch.compiler.is_compiling():  # logits of the real tokens only, since the vocabulary is large
                main_states, labels, full = main_states[real], labels[real], full[real]
            main = token_losses(self._lm_logits(main_states), labels)
        margin_loss = margin_losses(full, main).sum() / total
        loss = generation_loss + coef * margin_loss
        return {"loss": loss, "generation_loss": generation_loss, "margin_loss": margin_loss}

    def _output(self, outputs, full, **fields) -> ModelOutput:
        """The output of the first B rows of the backbone's, whose last states are `full` `(B, T, d)`, with other fields."""
        B = len(full)

        def first_rows(states):
            if isinstance(states, tuple):
                return tuple(map(first_rows, states))
            if states is outputs.last_hidden_state:
                return full  # the input of the logits, and so part of the loss's graph
            return states if states is None or len(states) == B else states[:B]

        names = set(outputs) - {"last_hidden_state", CACHE}
        states = {name: first_rows(outputs[name]) for name in names}
        return self.output_class(**fields, **{CACHE: outputs.get(CACHE)}, **states)

    @functools.wraps(GenerationMixin.prepare_inputs_for_generation)  # whose arguments `generate` looks up
    def prepare_inputs_for_generation(self, *args, **kwargs):
        """As in transformers, also for prefix tuning by peft."""
        return named_for_peft(self, super().prepare_inputs_for_generation(*args, **kwargs))

    def _prepare_model_inputs(self, inputs, bos_token_id, model_kwargs):
        # generate() calls this once, before the encoder runs and before rows are expanded to beams: names become ids,
        # which transformers expands with their rows
        inputs, name, model_kwargs = super()._prepare_model_inputs(inputs, bos_token_id, model_kwargs)
        dataset, ids = model_kwargs.pop("dataset", None), model_kwargs.get("dataset_ids")
        ids = resolve_datasets(self.config, dataset, ids, len(inputs))
        if ids is not None:
            model_kwargs["dataset_ids"] = ids.to(inputs.device)
        return inputs, name, model_kwargs


def next_tokens(labels: torch.Tensor, K: int) -> torch.Tensor:
    """The label of the next position for each of K positions, both `(B, K)`, -100 at the last."""
    if labels.shape[1] != K:
        raise ValueError(f"labels has {labels.shape[1]} positions, and {K} are scored. Pass the labels of these.")
    return F.pad(labels[:, 1:], (0, 1), value=-100)
