"""What the keyphrase generator returns."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers.utils import ModelOutput

from .decoder_exhird import DecoderState


@dataclass
class ExHirdEncoderOutput(ModelOutput):
    """
    Args:
        last_hidden_state (`(B, L, d)`): the memory m, 0 at padding.
        hidden_states (tuple, with `output_hidden_states=True`): what the first layer reads and what each layer gives,
            `(B, L, d)`, the last of which is the memory. A recurrent encoder counts as one layer: PyTorch computes all of its
            layers in one call. A pretrained encoder's own are averaged over each word, and the memory comes after them.
        attentions (tuple, with `output_attentions=True`): of each layer of a Transformer `(B, A, L, L)`; a pretrained
            encoder's own, `(windows, A, S, S)` of the windows that are read; empty for encoders without self-attention.
        phrase_start (`(B, d)`): h_0, where the phrase decoder begins.
    """

    last_hidden_state: torch.FloatTensor | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    attentions: tuple[torch.FloatTensor, ...] | None = None
    phrase_start: torch.FloatTensor | None = None


@dataclass
class ExHirdOutput(ModelOutput):
    """As transformers' `Seq2SeqLMOutput`, and the parts of the loss. With labels `(B, I, J)`, T is I, J.

    Args:
        loss (`()`): what is minimised, summed over words and divided by the documents; in eval mode the generation loss alone.
        logits (`(B, T, V + O)`): log P of each next word, of the vocabulary and of the O words of the batch's documents that
            it lacks; with labels 0 where there is none. In training with labels only with `output_logits=True`. After the
            last word allowed, and after padding, `;` is certain.
        log_probs (`(B, T)`): of each label, given those before it; 0 where there is none.
        generation_loss (`()`): the negative log-likelihood's sum, divided by the documents.
        exclusive_loss (`()`): the exclusive loss's sum, divided by the documents, without its coefficient.
        past_key_values (`DecoderState`): what the next step needs, where there are no labels.
        decoder_hidden_states (tuple of one `(B, T, d)`, with `output_hidden_states=True`): the attentional vectors a, from
            which words are predicted.
        decoder_attentions: `None`, the decoder is recurrent.
        cross_attentions (tuple of one `(B, 1, T, L)`, with `output_attentions=True`): alpha, what each step attends to.
        encoder_last_hidden_state, encoder_hidden_states, encoder_attentions: see `ExHirdEncoderOutput`.
    """

    loss: torch.FloatTensor | None = None
    logits: torch.FloatTensor | None = None
    log_probs: torch.FloatTensor | None = None
    generation_loss: torch.FloatTensor | None = None
    exclusive_loss: torch.FloatTensor | None = None
    past_key_values: DecoderState | None = None
    decoder_hidden_states: tuple[torch.FloatTensor, ...] | None = None
    decoder_attentions: tuple[torch.FloatTensor, ...] | None = None
    cross_attentions: tuple[torch.FloatTensor, ...] | None = None
    encoder_last_hidden_state: torch.FloatTensor | None = None
    encoder_hidden_states: tuple[torch.FloatTensor, ...] | None = None
    encoder_attentions: tuple[torch.FloatTensor, ...] | None = None


class GeneratedRows(NamedTuple):
    """What a batch of documents was given.

    Attributes:
        ids (`(B, I, J)`): extended ids, each phrase's start, words and `;`; the last row begins with `</s>`; pad elsewhere.
        log_probs (`(B, I)`): of each phrase, given those before it, the sum over its words.
    """

    ids: torch.LongTensor
    log_probs: torch.FloatTensor
