"""SEKE as a Hugging Face model: any encoder, the head of `head_seke`, a token classifier (Martinc et al. 2025).

Letters: B documents, S sub-tokens, T real tokens, d hidden size, E experts, k experts per token, C labels.
"""

import inspect
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.utils import ModelOutput, can_return_tuple

from .backbone_seke import BackboneMixin, build_encoder, find_lora_targets, split_options
from .card import warn_if_unsaved
from .configuration_seke import SekeConfig
from .head_seke import (
    EXPERTS,
    NoisyTopKRouter,
    SekeExperts,
    SekeMoe,
    SekeRnn,
    TokenLayout,
    float32_or_more,
    load_balancing_loss,
    router_z_loss,
)
from .saving_seke import CompleteCheckpointMixin

# What from_backbone() takes for the configuration.
CONFIG_OPTIONS = {field.name for field in fields(SekeConfig)} - {"text_config"} | {"num_labels"}


@dataclass
class SekeTokenClassifierOutput(ModelOutput):
    """
    Args:
        loss (scalar, when `labels` are given): cross-entropy over the labels that are not -100, plus the router's losses.
        logits (`(B, S, C)`): label scores; zero at padding.
        router_logits (`(B, S, E)`, with `use_moe`): the gate's scores without noise; zero at padding.
        expert_index (`(B, S, k)`, with `use_moe`): the experts each token chose, heaviest first; -1 at padding.
        hidden_states (tuple of `(B, S, d)`, with `output_hidden_states`): the backbone's.
        attentions (tuple of `(B, heads, S, S)`, with `output_attentions`): the backbone's.
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    router_logits: torch.Tensor | None = None
    expert_index: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None


class SekePreTrainedModel(BackboneMixin, CompleteCheckpointMixin, PreTrainedModel):
    """Initialisation, saving and loading of SEKE models."""

    config_class = SekeConfig
    base_model_prefix = "backbone"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    pipeline_requirements = ("nltk", "regex")

    def _init_weights(self, module):
        if isinstance(module, SekeExperts):
            # each expert's layers as PyTorch initialises a Linear: uniform in +-1/sqrt(fan_in)
            for name in ("up", "down", "out"):
                weight = getattr(module, f"{name}_proj")
                bound = weight.shape[-1] ** -0.5
                init.uniform_(weight, -bound, bound)
                init.uniform_(getattr(module, f"{name}_bias"), -bound, bound)
            if self.config.expert_init == "identity":
                for parameter, value in module.near_identity():
                    init.copy_(parameter, value)
        elif isinstance(module, nn.GRU):
            for name, weight in module.named_parameters():
                init.xavier_uniform_(weight) if "weight" in name else init.zeros_(weight)
        else:
            super()._init_weights(module)

    @classmethod
    def pipelines(cls) -> dict[str, type | str]:
        return {"keyphrase-extraction": "keyphrase_tools.pipeline_keyphrase_extraction.KeyphraseExtractionPipeline"}

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # transformers looks for a decorator in this file's source

    def get_correct_experts_implementation(self, requested_experts: str | None) -> str:
        """As in transformers, with this package's implementations; `"eager"` by default."""
        if requested_experts is None:
            return "eager"
        if requested_experts not in EXPERTS:
            raise ValueError(
                f"experts_implementation={requested_experts!r} is not known to SEKE. Use one of "
                f"{', '.join(map(repr, EXPERTS))}."
            )
        return requested_experts


class SekeForTokenClassification(SekePreTrainedModel):
    """Labels each sub-token: backbone, mixture of experts, recurrent encoder, linear classifier.

    Example:

    ```python
    >>> from modeling_seke import SekeForTokenClassification
    >>> model = SekeForTokenClassification.from_backbone("microsoft/deberta-v3-base", num_experts=4)
    >>> model.save_pretrained("seke")  # complete in itself: loads again without the backbone and without a network
    >>> model = SekeForTokenClassification.from_pretrained("seke")
    ```
    """

    def __init__(self, config: SekeConfig):
        super().__init__(config)
        if config.text_config._experts_implementation == "grouped_mm":
            # encoders without experts refuse it by name; None is the same for those with experts
            config.text_config._experts_implementation_internal = None
        self.backbone = build_encoder(config.text_config)
        self._takes_token_type_ids = "token_type_ids" in inspect.signature(self.backbone.forward).parameters
        self.dropout = nn.Dropout(config.head_dropout)
        self.moe = SekeMoe(config) if config.use_moe else None
        self.rnn = SekeRnn(config) if config.use_rnn else None
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @classmethod
    def from_backbone(
        cls,
        name_or_path: str,
        *,
        dtype: torch.dtype | str = torch.float32,
        attention_dropout: float | None = None,
        **options,
    ):
        """A SEKE model over a pretrained encoder, its head newly initialised.

        Args:
            name_or_path (`str`): folder or Hub id of any encoder that `AutoModel` opens, or "minilm".
            dtype: of all weights, "auto" for the checkpoint's. Not the default, since a new head does not learn in half
                precision.
            attention_dropout (`float`, *optional*): in place of the encoder's own. 0 is faster on a CPU, whose fused
                attention does not support dropout.
            options: fields of `SekeConfig` (`num_experts=8`, `use_rnn=False`, `id2label=...`), and what `from_pretrained`
                takes to find and load weights (`revision`, `token`, `device_map`, `quantization_config`, `variant`, ...).

        Raises:
            OSError: when there is no such encoder.
            ValueError: for an unknown option, or a value out of range.
        """
        options, load_kwargs = split_options(options, CONFIG_OPTIONS)
        return cls.load_over_backbone(
            name_or_path,
            lambda encoder: SekeConfig(text_config=encoder, **options),
            load_kwargs,
            dtype,
            attention_dropout,
        )

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> SekeTokenClassifierOutput:
        """
        Args:
            input_ids, attention_mask, token_type_ids, position_ids (`(B, S)`), inputs_embeds (`(B, S, d)`):
                as the backbone takes them; `token_type_ids` are left out for a backbone that has none.
            labels (`(B, S)`): label ids; -100 where there is nothing to learn (all but a word's first sub-token).
            num_items_in_batch: labels in the whole step, over accumulated batches and processes. The Trainer gives it,
                and the loss is then their sum divided by it: gradient accumulation changes nothing.
            kwargs: for the backbone, such as `output_hidden_states` and `output_attentions`.
        """
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(
                f"attention_mask has {attention_mask.dim()} dimensions: the head needs one value a token. "
                "Pass it as (batch, length)."
            )
        if token_type_ids is not None and self._takes_token_type_ids:
            kwargs["token_type_ids"] = token_type_ids
        if position_ids is not None:
            kwargs["position_ids"] = position_ids
        outputs = self.backbone(
            input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, return_dict=True, **kwargs
        )
        states = outputs.last_hidden_state  # (B, S, d)
        mask = attention_mask if attention_mask is not None else states.new_ones(states.shape[:2])
        layout = TokenLayout(mask)
        y = layout.gather(self.dropout(states))  # (T, d)
        router_logits = expert_index = None
        if self.moe is not None:
            y, router_logits, expert_index = self.moe(y, self.config._experts_implementation)
        if self.rnn is not None:
            y = self.rnn(y, layout)
        logits = layout.scatter(self.classifier(y))  # (B, S, C)
        loss = None
        if labels is not None:
            loss = self._loss(logits, labels, router_logits, expert_index, num_items_in_batch)
        return SekeTokenClassifierOutput(
            loss=loss,
            logits=logits,
            router_logits=None if router_logits is None else layout.scatter(router_logits),
            expert_index=None if expert_index is None else layout.scatter(expert_index, fill=-1),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _loss(self, logits, labels, router_logits, expert_index, num_items_in_batch):
        """Cross-entropy, and what the router owes, both divided by the labels of the whole step."""
        config, flat = self.config, labels.flatten()
        count = (flat != -100).sum()
        total = torch.as_tensor(count if num_items_in_batch is None else num_items_in_batch).clamp(min=1)
        scores = logits.flatten(0, 1).to(float32_or_more(logits))
        loss = F.cross_entropy(scores, flat, label_smoothing=config.label_smoothing, reduction="sum")
        loss = loss / total
        if router_logits is not None:
            share = count / total
            if config.router_aux_loss_coef:
                loss = loss + config.router_aux_loss_coef * share * load_balancing_loss(router_logits, expert_index)
            if config.router_z_loss_coef:
                loss = loss + config.router_z_loss_coef * share * router_z_loss(router_logits)
        return loss

    def lora_config(self, **overrides):
        """A peft `LoraConfig` that fits this model: the paper's r = 16, alpha = 16, dropout 0.1 on the backbone's query
        and value projections, and the whole head trained and saved (peft by itself would freeze the experts and the
        recurrent encoder, and leave them out of the adapter).

        Args:
            overrides: any field of `LoraConfig`; what you pass replaces what stands here.

        Warns:
            UserWarning: for a model that has not been saved, over which an adapter could not be opened again.

        Raises:
            ImportError: without peft.
            ValueError: for a backbone whose projections have names not known here; then pass `target_modules`.
        """
        try:
            from peft import LoraConfig
        except ImportError as error:
            raise ImportError("lora_config() needs peft. Install it with: pip install lexperts[train]") from error
        head = [name for name in ("moe", "rnn", "classifier") if getattr(self, name) is not None]
        options = {"r": 16, "lora_alpha": 16, "lora_dropout": 0.1, "task_type": "TOKEN_CLS", "modules_to_save": head}
        if "target_modules" not in overrides:
            options["target_modules"] = find_lora_targets(self.backbone)
        warn_if_unsaved(self)
        return LoraConfig(**{**options, **overrides})


SekeForTokenClassification.register_for_auto_class("AutoModelForTokenClassification")

__all__ = ["SekeForTokenClassification", "SekePreTrainedModel", "SekeTokenClassifierOutput", "NoisyTopKRouter"]
