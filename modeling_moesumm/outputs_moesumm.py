"""What a MoeSumm model returns.

Letters: B texts, S source tokens, T target tokens, d hidden size, V vocabulary.
"""

from dataclasses import dataclass

import torch
from transformers.utils import ModelOutput


@dataclass
class MoeSummOutput(ModelOutput):
    """
    Args:
        loss (scalar, when `labels` are given): generation loss, plus `margin_loss_coef` times the margin loss.
        logits (`(B, T, V)`): scores of the next token.
        generation_loss (scalar, when `labels` are given): cross-entropy over the labels that are not -100, smoothed by
            `label_smoothing`.
        margin_loss (scalar, when `labels` are given and `margin_loss_coef` is not 0): MoeSumm, Eq. 9, unweighted.
        past_key_values: the decoder's cache.
        decoder_hidden_states (tuple of `(B, T, d)`), encoder_hidden_states (tuple of `(B, S, d)`, both with
            `output_hidden_states`): after the embedding and after each layer.
        decoder_attentions (tuple of `(B, heads, T, T)`), cross_attentions (tuple of `(B, heads, T, S)`),
            encoder_attentions (tuple of `(B, heads, S, S)`, all with `output_attentions`): of each layer. All that are
            returned on request are part of the loss's graph, so that `retain_grad()` works.
        encoder_last_hidden_state (`(B, S, d)`): what the decoder reads; part of the loss's graph where states are
            returned on request, without a margin loss, and with `margin_main="last_layer"`.
        encoder_deputies (tuple of `(B, S)`), decoder_deputies (tuple of `(B, T)`, both with `output_deputies`): the
            deputy that each token took in each layer, -1 where the main expert was alone. `None` for an encoder that
            has not run.
        encoder_gates, decoder_gates (the same shapes, float32): its weight g_p, 0 where the main expert was alone.
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    generation_loss: torch.Tensor | None = None
    margin_loss: torch.Tensor | None = None
    past_key_values: object | None = None
    decoder_hidden_states: tuple[torch.Tensor, ...] | None = None
    decoder_attentions: tuple[torch.Tensor, ...] | None = None
    cross_attentions: tuple[torch.Tensor, ...] | None = None
    encoder_last_hidden_state: torch.Tensor | None = None
    encoder_hidden_states: tuple[torch.Tensor, ...] | None = None
    encoder_attentions: tuple[torch.Tensor, ...] | None = None
    encoder_deputies: tuple[torch.Tensor, ...] | None = None
    encoder_gates: tuple[torch.Tensor, ...] | None = None
    decoder_deputies: tuple[torch.Tensor, ...] | None = None
    decoder_gates: tuple[torch.Tensor, ...] | None = None
