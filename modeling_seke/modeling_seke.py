# SPDX-License-Identifier: Apache-2.0
"""SEKE as a Hugging Face model: any encoder, the head of `layers_seke`, a token classifier (Martinc et al. 2025).

Letters: B documents, S sub-tokens, T real tokens, d hidden size, E experts, k experts per token, C labels.
"""

import inspect
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutput, TokenClassifierOutput
from transformers.utils import can_return_tuple

from .configuration_seke import SekeConfig
from .layers_seke import (
    EXPERTS_IMPLEMENTATIONS,
    NoisyTopKRouter,
    PackedTokens,
    SekeExperts,
    SekeMoe,
    SekeRnn,
    float32_or_more,
    load_balancing_loss,
    router_z_loss,
)
from .pipeline_keyphrase_extraction import KeyphraseExtractionPipeline
from .shared_seke import LexpertsModelMixin, build_encoder, lexperts_tools

# Options of from_backbone() that are fields of the configuration.
CONFIG_OPTIONS = {field.name for field in fields(SekeConfig)} - {"text_config"} | {"num_labels"}


@dataclass
class SekeModelOutput(BaseModelOutput):
    """
    Args:
        last_hidden_state (`(B, S, d)`): the head's token states; zero at padding.
        hidden_states, attentions: the backbone's.
        router_logits (`(B, S, E)`, with `use_moe`): the gate's scores without noise; zero at padding.
        expert_index (`(B, S, k)`, with `use_moe`): the experts of each token, highest weight first; -1 at padding.
    """

    router_logits: torch.Tensor | None = None
    expert_index: torch.Tensor | None = None


@dataclass
class SekeTokenClassifierOutput(TokenClassifierOutput):
    """
    Args:
        loss (scalar, with `labels`): cross-entropy over the labels that are not -100, plus the router's losses.
        logits (`(B, S, C)`): label scores; zero at padding.
        hidden_states, attentions, router_logits, expert_index: as in `SekeModelOutput`.
    """

    router_logits: torch.Tensor | None = None
    expert_index: torch.Tensor | None = None


class PackedStates(NamedTuple):
    """The head's states before they are padded again."""

    y: torch.Tensor  # (T, d)
    tokens: PackedTokens
    router_logits: torch.Tensor | None  # (T, E)
    expert_index: torch.Tensor | None  # (T, k)
    backbone_outputs: BaseModelOutput

    def shared_fields(self) -> dict:
        """The fields that all output classes have, padded."""
        return {
            "router_logits": None if self.router_logits is None else self.tokens.scatter(self.router_logits),
            "expert_index": None if self.expert_index is None else self.tokens.scatter(self.expert_index, fill=-1),
            "hidden_states": self.backbone_outputs.hidden_states,
            "attentions": self.backbone_outputs.attentions,
        }


class SekePreTrainedModel(LexpertsModelMixin, PreTrainedModel):
    """Initialisation, loading, saving and adapters of SEKE models."""

    card_family = "SEKE: a mixture of experts and a recurrent encoder on a pretrained encoder (Martinc et al. 2025)"

    config_class = SekeConfig
    base_model_prefix = "backbone"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def _init_weights(self, module):
        if isinstance(module, SekeExperts):
            # each expert's layers as PyTorch initialises a Linear: uniform in +-1/sqrt(fan_in)
            for name in ("up", "down", "out"):
                weight = getattr(module, f"{name}_proj")
                bound = weight.shape[-1] ** -0.5
                init.uniform_(weight, -bound, bound)
                init.uniform_(getattr(module, f"{name}_bias"), -bound, bound)
            if self.config.expert_init == "identity":
                for parameter, value in module.identity_init():
                    init.copy_(parameter, value)
        elif isinstance(module, nn.GRU):
            for name, weight in module.named_parameters():
                init.xavier_uniform_(weight) if "weight" in name else init.zeros_(weight)
        else:
            super()._init_weights(module)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # transformers looks for a decorator in this file's source

    def get_correct_experts_implementation(self, requested_experts: str | None) -> str:
        """As in transformers, with this package's implementations; `"eager"` by default."""
        if requested_experts is None:
            return "eager"
        if requested_experts not in EXPERTS_IMPLEMENTATIONS:
            raise ValueError(f"experts_implementation={requested_experts!r} is none of {[*EXPERTS_IMPLEMENTATIONS]}.")
        return requested_experts

    @classmethod
    def from_backbone(
        cls,
        name_or_path: str,
        *,
        dtype: torch.dtype | str = torch.float32,
        attention_dropout: float | None = None,
        **options,
    ):
        """Builds a SEKE model on a pretrained encoder, with a newly initialised head.

        Args:
            name_or_path (`str`): folder or Hub id of any encoder that `AutoModel` opens, or "minilm".
            dtype: of all weights; "auto" for the checkpoint's. A new head does not learn in half precision.
            attention_dropout (`float`, *optional*): replaces the encoder's own. 0 is faster on a CPU.
            options: fields of `SekeConfig` (`num_experts=8`, `id2label=...`), and arguments of `from_pretrained`.

        Raises:
            ImportError: without Lexperts.
            OSError: if the encoder cannot be opened.
            TypeError, ValueError: for an unknown option, or a value out of range.
        """
        tools = lexperts_tools("backbones", "from_backbone()")
        options, load_kwargs = tools.split_options(options, CONFIG_OPTIONS)

        def make_config(encoder):
            return SekeConfig(text_config=encoder, **options)

        return tools.load_over_backbone(cls, name_or_path, make_config, load_kwargs, dtype, attention_dropout)

    def lora_config(self, **overrides):
        """A peft `LoraConfig` for this model: the paper's r = 16, alpha = 16, dropout 0.1 on the backbone's query and value
        projections, with the whole head trained and saved. `overrides` are fields of `LoraConfig`, which replace these.

        Warns, Raises: as `run_tools.backbones.make_lora_config`.
        """
        parts = ("style_embedding", "moe", "rnn", "classifier")
        head = [name for name in parts if getattr(self, name, None) is not None]
        tools = lexperts_tools("backbones", "lora_config()")
        return tools.make_lora_config(self, overrides, self.backbone, task_type=self.lora_task, modules_to_save=head)


class SekeModel(SekePreTrainedModel):
    """Backbone, mixture of experts and recurrent encoder, without a classifier: token states.

    Opens checkpoints of `SekeForTokenClassification` too, whose parameters have the same names.
    """

    _keys_to_ignore_on_load_unexpected: list[str] | None = [r"^classifier\."]

    def __init__(self, config: SekeConfig):
        super().__init__(config)
        self.build_head(config)
        self.post_init()

    def build_head(self, config: SekeConfig):
        """Makes all modules."""
        text_config: Any = config.text_config
        if text_config._experts_implementation == "grouped_mm":
            # encoders without experts refuse it by name; None is the same for those with experts
            text_config._experts_implementation_internal = None
        self.backbone = build_encoder(text_config)
        self._takes_token_type_ids = "token_type_ids" in inspect.signature(self.backbone.forward).parameters
        self.dropout = nn.Dropout(config.classifier_dropout)
        # row 0: no style
        self.style_embedding = nn.Embedding(len(config.styles) + 1, config.hidden_size) if config.styles else None
        self.moe = SekeMoe(config) if config.use_moe else None
        self.rnn = SekeRnn(config) if config.use_rnn else None

    @staticmethod
    def pack_tokens(attention_mask: torch.Tensor) -> PackedTokens:
        """The positions of real tokens, for the argument `packed_tokens` of `forward`; see `PackedTokens.to`."""
        return PackedTokens(attention_mask)

    def encode(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        style_ids: torch.Tensor | None = None,
        packed_tokens: PackedTokens | None = None,
        **kwargs,
    ) -> PackedStates:
        """The states of the real tokens. Arguments as in `forward`; `packed_tokens` are those of the mask."""
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(f"attention_mask has the shape {tuple(attention_mask.shape)}, not (batch, length).")
        if token_type_ids is not None and self._takes_token_type_ids:
            kwargs["token_type_ids"] = token_type_ids
        if position_ids is not None:
            kwargs["position_ids"] = position_ids
        outputs = self.backbone(
            input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, return_dict=True, **kwargs
        )
        states = outputs.last_hidden_state  # (B, S, d)
        mask = states.new_ones(states.shape[:2]) if attention_mask is None else attention_mask.to(states.device)
        tokens = PackedTokens(mask) if packed_tokens is None else packed_tokens
        if self.style_embedding is not None:
            rows = states.new_zeros(len(states), dtype=torch.long) if style_ids is None else style_ids
            states = states + self.style_embedding(rows)[:, None]
        y = tokens.gather(self.dropout(states))  # (T, d)
        router_logits = expert_index = None
        if self.moe is not None:
            y, router_logits, expert_index = self.moe(y, self.config._experts_implementation)
        if self.rnn is not None:
            y = self.rnn(y, tokens)
        return PackedStates(y, tokens, router_logits, expert_index, outputs)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        style_ids: torch.Tensor | None = None,
        **kwargs,
    ) -> SekeModelOutput:
        """
        Args:
            input_ids, attention_mask, token_type_ids, position_ids (`(B, S)`), inputs_embeds (`(B, S, d)`):
                as for the backbone; `token_type_ids` are ignored if the backbone has none.
            style_ids (`(B,)`): for a model with `config.styles`, the style of each row: its index in them plus 1, 0 for none.
            kwargs: `packed_tokens`, see `pack_tokens`; others are for the backbone, such as `output_hidden_states`.

        Raises:
            ValueError: for an `attention_mask` that is not `(B, S)`.
        """
        states = self.encode(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, style_ids, **kwargs
        )
        return SekeModelOutput(last_hidden_state=states.tokens.scatter(states.y), **states.shared_fields())


class SekeForTokenClassification(SekeModel):
    """Labels each sub-token: backbone, mixture of experts, recurrent encoder, linear classifier.

    Example:

    ```python
    >>> from modeling_seke import SekeForTokenClassification
    >>> model = SekeForTokenClassification.from_backbone("microsoft/deberta-v3-base", num_experts=4)
    >>> model.save_pretrained("seke")  # loads again without the backbone's checkpoint and without a network
    >>> model = SekeForTokenClassification.from_pretrained("seke")
    ```
    """

    card_use = {
        "what": "Extracts keyphrases from texts",
        "tag": "token-classification",
        "task": "keyphrase-extraction",
        "call": 'run("Graph cuts solve energy minimisation problems.")',
    }
    lora_task = "TOKEN_CLS"
    _keys_to_ignore_on_load_unexpected = None

    def build_head(self, config: SekeConfig):
        """Makes all modules."""
        super().build_head(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    @classmethod
    def pipelines(cls) -> dict[str, type]:
        """See `LexpertsModelMixin`."""
        return {"keyphrase-extraction": KeyphraseExtractionPipeline}

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        style_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> SekeTokenClassifierOutput:
        """
        Args:
            input_ids to style_ids: as in `SekeModel.forward`.
            labels (`(B, S)`): label ids; -100 for tokens without a label (all but a word's first sub-token).
            num_items_in_batch: labels in the whole step, over accumulated batches and processes, by which the sum is divided.
            kwargs: as in `SekeModel.forward`, with its errors.
        """
        states = self.encode(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, style_ids, **kwargs
        )
        logits = states.tokens.scatter(self.classifier(states.y))  # (B, S, C)
        loss = None
        if labels is not None:
            loss = self._loss(logits, labels, states.router_logits, states.expert_index, num_items_in_batch)
        return SekeTokenClassifierOutput(loss=loss, logits=logits, **states.shared_fields())

    def _loss(self, logits, labels, router_logits, expert_index, num_items_in_batch):
        """Cross-entropy plus router losses, both divided by the number of labels in the whole step."""
        config, labels = self.config, labels.flatten().to(logits.device)
        count = (labels != -100).sum()
        total = torch.as_tensor(count if num_items_in_batch is None else num_items_in_batch).clamp(min=1).to(count)
        scores = logits.flatten(0, 1).to(float32_or_more(logits))
        loss = F.cross_entropy(scores, labels, label_smoothing=config.label_smoothing, reduction="sum") / total
        if router_logits is not None:
            share = count / total
            if config.router_aux_loss_coef:
                loss = loss + config.router_aux_loss_coef * share * load_balancing_loss(router_logits, expert_index)
            if config.router_z_loss_coef:
                loss = loss + config.router_z_loss_coef * share * router_z_loss(router_logits)
        return loss


SekeModel.register_for_auto_class("AutoModel")
SekeForTokenClassification.register_for_auto_class("AutoModelForTokenClassification")

__all__ = [
    "NoisyTopKRouter", "SekeForTokenClassification", "SekeModel", "SekeModelOutput", "SekePreTrainedModel",
    "SekeTokenClassifierOutput",
]  # fmt: skip
