# SPDX-License-Identifier: Apache-2.0
"""What the MoeSumm models of an encoder and a decoder share (MoeSumm, Sect. 4).

Letters: B texts, S source tokens, d hidden size.
"""

import torch
from torch import nn
from transformers import PreTrainedModel

from .base_moesumm import MoeSummPreTrainedModel
from .configuration_moesumm import MoeSummConfig
from .routing_moesumm import RoutingContext, make_routing_context, past_length, validate_source, validate_target


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
