"""What LM-Lexicon models return.

Letters: B sequences, T tokens, d hidden size, V vocabulary, E experts, k experts per token, M routed modules, C labels.
"""

from dataclasses import dataclass

import torch
from transformers.utils import ModelOutput


@dataclass
class LexiconModelOutput(ModelOutput):
    """
    Args:
        last_hidden_state (`(B, T, d)`): the decoder's states.
        past_key_values: the cache, which also holds what the sequence and domain policies have decided.
        hidden_states (tuple of `(B, T, d)`, with `output_hidden_states`): after the embedding and after each layer.
        attentions (tuple of `(B, heads, T, T)`, with `output_attentions`): of each layer.
        router_logits (tuple, with `output_router_logits`): g of each routed module whose gate ran, in their order:
            `(B, T, E)` for the token policy, else its mean over each prompt, `(B, E)`. Empty where no gate ran: under
            the domain policy with `domain_ids`, but for training, where the domain gate learns these ids.
        expert_index (tuple of M, with `output_router_logits`): the experts of each routed module: `(B, T, k)`, heaviest
            first, for the token policy, else `(B,)`; the heaviest one for `sequence_soft`.
    """

    last_hidden_state: torch.Tensor | None = None
    past_key_values: object | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None
    expert_index: tuple[torch.Tensor, ...] | None = None


@dataclass
class LexiconCausalLMOutput(ModelOutput):
    """
    Args:
        loss (scalar, when `labels` are given): cross-entropy over the labels that are not -100, and what the gates owe.
        logits (`(B, T, V)`): scores of the next token.
        aux_loss (scalar, with `output_router_logits` and gates that decide): the load-balancing loss, unweighted.
        past_key_values, hidden_states, attentions, router_logits, expert_index: as in `LexiconModelOutput`.
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    past_key_values: object | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None
    aux_loss: torch.Tensor | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None
    expert_index: tuple[torch.Tensor, ...] | None = None


@dataclass
class LexiconSequenceClassifierOutput(LexiconCausalLMOutput):
    """
    Args:
        loss (scalar, when `labels` are given): cross-entropy, or the squared error of one label, plus what gates owe.
        logits (`(B, C)`): scores of the labels, read at each row's last real token.
        aux_loss, past_key_values, hidden_states, attentions, router_logits, expert_index: as in
            `LexiconCausalLMOutput`.
    """
