"""What the hypernetwork's models return.

Letters: B pairs, S tokens of a padded pair, N_z size of the meta-text's vector, D size of the main text's states (N_h, or
2 N_h where it is read both ways), C labels.
"""

from dataclasses import dataclass

import torch
from transformers.utils import ModelOutput


@dataclass
class HypernetModelOutput(ModelOutput):
    """
    Args:
        last_hidden_state (`(B, S, D)`): H^S at the main text's tokens, 0 elsewhere.
        meta_embedding (`(B, N_z)`): z, from which the weights are written.
        main_mask (`(B, S)`, bool): the main text's tokens.
        hidden_states (tuple of `(B, S, d)`, with `output_hidden_states`): the backbone's.
        attentions (tuple of `(B, heads, S, S)`, with `output_attentions`): the backbone's.
    """

    last_hidden_state: torch.Tensor | None = None
    meta_embedding: torch.Tensor | None = None
    main_mask: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None


@dataclass
class HypernetTokenClassifierOutput(ModelOutput):
    """
    Args:
        loss (scalar, when `labels` are given): minus the log-likelihood of the labels, by label.
        logits (`(B, S, C)`): the log-probability of each label at each word's first token, which a softmax leaves as it is;
            elsewhere 0 for O and -10,000 for the others. The same in training and in eval, with labels or without.
        meta_embedding (`(B, N_z)`): z, from which the weights are written.
        hidden_states, attentions: the backbone's, as in `HypernetModelOutput`.
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    meta_embedding: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None


@dataclass
class HypernetSequenceClassifierOutput(ModelOutput):
    """
    Args:
        loss (scalar, when `labels` are given): cross-entropy; mean squared error for one label.
        logits (`(B, C)`): scores.
        meta_embedding (`(B, N_z)`): z, from which the weights are written.
        hidden_states, attentions: the backbone's, as in `HypernetModelOutput`.
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    meta_embedding: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None


@dataclass
class HypernetQuestionAnsweringOutput(ModelOutput):
    """
    Args:
        loss (scalar, when positions are given): the sum of the cross-entropies of start and end.
        start_logits, end_logits (`(B, S)`): scores at the main text's tokens and at the first token, which stands for "no
            answer"; -10,000 elsewhere.
        meta_embedding (`(B, N_z)`): z, from which the weights are written.
        hidden_states, attentions: the backbone's, as in `HypernetModelOutput`.
    """

    loss: torch.Tensor | None = None
    start_logits: torch.Tensor | None = None
    end_logits: torch.Tensor | None = None
    meta_embedding: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None
