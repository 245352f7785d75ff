# SPDX-License-Identifier: Apache-2.0
"""MoeSumm over a decoder: a Llama, Mistral, Qwen2 or Qwen3 with deputies beside its main expert (MoeSumm, Sect. 4).

Letters: B rows, T tokens in each, K positions that are scored, d hidden size, V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from .base_moesumm import MoeSummPreTrainedModel
from .cache_moesumm import CACHE, accepts_both_names
from .heads_moesumm import LanguageModelMixin
from .routing_moesumm import check_has_labels, make_routing_context, past_length


@dataclass
class MoeSummCausalLMOutput(CausalLMOutputWithPast):
    """
    Args:
        loss (scalar, if `labels` are given): generation loss, plus `margin_loss_coef` times the margin loss.
        logits (`(B, K, V)`): scores of the next token.
        cache: `past_key_values` before transformers 5.24.
        hidden_states (tuple of `(B, T, d)`): after the embedding and after each layer, with `output_hidden_states`.
        attentions (tuple of `(B, heads, T, T)`): of each layer, with `output_attentions`. States and attentions are part of
            the loss's graph, so `retain_grad()` works.
        generation_loss (scalar, if `labels` are given): cross-entropy over the labels that are not -100, smoothed by
            `label_smoothing`.
        margin_loss (scalar, if `labels` are given and `margin_loss_coef` is not 0): MoeSumm, Eq. 9, unweighted.
        expert_indices (tuple of `(B, T)`): with `output_router_indices`, each token's deputy in each layer, -1 if it used the
            main expert only.
        expert_weights (tuple of `(B, T)`, float32): its weight g_p, 0 without a deputy.
    """

    generation_loss: torch.Tensor | None = None
    margin_loss: torch.Tensor | None = None
    expert_indices: tuple[torch.Tensor, ...] | None = None
    expert_weights: tuple[torch.Tensor, ...] | None = None


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

    backbone_class = AutoModelForCausalLM
    backbone_example = "a Llama, Mistral, Qwen2 or Qwen3, such as 'HuggingFaceTB/SmolLM2-135M-Instruct'"
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
        deputy_id: int | None = None,
        use_cache: bool | None = None,
        output_router_indices: bool = False,
        logits_to_keep: int | torch.Tensor = 0,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> MoeSummCausalLMOutput:
        """Computes logits and losses.

        Args:
            input_ids, attention_mask, position_ids (`(B, T)`), inputs_embeds (`(B, T, d)`), cache, use_cache: as for the
                backbone. Rows may be padded on either side.
            labels (`(B, K)`): the token ids, -100 for tokens without a loss, such as those of the prompt. They are shifted
                here: the scores at a position are those of the next token. K is T without `logits_to_keep`.
            dataset: the name of each row's dataset, `None` for none, or one name for all rows.
            dataset_ids (`(B,)`): the same as ids, -1 for none. Without either, only the main expert is used.
            main_expert_only: whether to use only the main expert in all rows.
            deputy_id: the deputy that all tokens of all rows use, with weight 1, whatever their datasets.
            output_router_indices: whether to return `expert_indices` and `expert_weights`.
            logits_to_keep: the number of last positions to score, or their indices `(K,)`; 0 for all.
            num_items_in_batch: labels of the whole step, over accumulated batches and processes, as the Trainer passes it.
                The losses are then sums divided by it, so gradient accumulation changes nothing.
            kwargs: for the backbone, such as `output_hidden_states` and `output_attentions`. With labels and a margin
                loss, requesting these takes two forward passes, so that the returned states are part of the loss's graph.

        Raises:
            ValueError: for an unknown dataset, ids out of range or of a wrong number, rows without tokens, and labels that do
                not match the positions that are scored.
        """
        config = self.config
        tokens = check_tokens(input_ids, inputs_embeds)
        if labels is not None:
            use_cache = False
        elif self.training and num_items_in_batch is not None:
            check_has_labels(config, input_ids)
        B, past = len(tokens), past_length(cache)
        routing = make_routing_context(
            config, B, tokens.device, dataset, dataset_ids, main_expert_only, deputy_id,
            training=self.training and labels is not None and torch.is_grad_enabled(), validated=past > 0,
            recording=output_router_indices,
        )  # fmt: skip
        model_inputs = {
            "input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }  # fmt: skip
        margin = labels is not None and bool(config.margin_loss_coef) and routing.active
        cached = {CACHE: cache, "use_cache": use_cache}
        outputs, main = self._run_backbone(model_inputs, cached, routing, margin, kwargs)
        states = outputs.last_hidden_state  # (B, T, d), or (2B, T, d) with the main expert's states in the second half
        full, main = (states[:B], states[B:]) if len(states) > B else (states, main)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self._lm_logits(full[:, kept])
        fields = {}
        if labels is not None:
            targets = next_tokens(labels.to(logits.device), logits.shape[1])
            main = None if main is None else main[:, kept]
            fields = self._losses(logits, targets, main, num_items_in_batch)
        if output_router_indices:
            shape = (B, tokens.shape[1])
            indices, weights = routing.experts_of(range(self.num_layers), shape, states.device)
            fields |= {"expert_indices": indices, "expert_weights": weights}
        return self._output(outputs, full, logits=logits, **fields)


def check_tokens(input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
    """The inputs, `(B, T)` or `(B, T, d)`; raises a `ValueError` if there are none, or if they are empty."""
    tokens = input_ids if input_ids is not None else inputs_embeds
    if tokens is None:
        raise ValueError("Neither input_ids nor inputs_embeds was given. Pass one of them.")
    if not tokens.shape[1]:
        raise ValueError("The rows have no tokens. Leave out empty texts.")
    return tokens


def next_tokens(labels: torch.Tensor, K: int) -> torch.Tensor:
    """The label of the next position for each of K positions, both `(B, K)`, -100 at the last; raises a `ValueError` for
    labels of another length.
    """
    if labels.shape[1] != K:
        raise ValueError(
            f"labels has {labels.shape[1]} positions, and {K} are scored. Pass the labels of the scored positions: all, or with "
            "logits_to_keep=K the last K."
        )
    return F.pad(labels[:, 1:], (0, 1), value=-100)


MoeSummForCausalLM.register_for_auto_class("AutoModelForCausalLM")

__all__ = ["MoeSummCausalLMOutput", "MoeSummForCausalLM"]
