"""What the keyphrase generator returns."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers.utils import ModelOutput


@dataclass
class ExHirdEncoderOutput(ModelOutput):
    """
    Args:
        last_hidden_state (`(B, L, d)`): the memory m, 0 at padding.
        phrase_start (`(B, d)`): h_0, where the phrase decoder begins.
    """

    last_hidden_state: torch.FloatTensor | None = None
    phrase_start: torch.FloatTensor | None = None


@dataclass
class ExHirdOutput(ModelOutput):
    """
    Args:
        loss (`()`): what is minimised, summed over words and divided by the documents; in eval mode the generation loss alone.
        log_probs (`(B, I, J)`): of each right word, given those before it; 0 where there is none.
        generation_loss (`()`): the negative log-likelihood's sum, divided by the documents.
        exclusive_loss (`()`): the exclusive loss's sum, divided by the documents, without its coefficient.
        memory (`(B, L, d)`): the encoder's.
        attention (`(B, I, J, L)`): alpha, where each step reads.
    """

    loss: torch.FloatTensor | None = None
    log_probs: torch.FloatTensor | None = None
    generation_loss: torch.FloatTensor | None = None
    exclusive_loss: torch.FloatTensor | None = None
    memory: torch.FloatTensor | None = None
    attention: torch.FloatTensor | None = None


class GeneratedRows(NamedTuple):
    """What a batch of documents was given.

    Attributes:
        ids (`(B, I, J)`): extended ids, each phrase's start, words and `;`; the last row begins with `</s>`; pad elsewhere.
        log_probs (`(B, I)`): of each phrase, given those before it, the sum over its words.
    """

    ids: torch.LongTensor
    log_probs: torch.FloatTensor
