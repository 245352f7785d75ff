"""What every hypernetwork model has: initialisation, saving and loading, and the way from a pretrained encoder."""

from dataclasses import fields

import torch
from transformers import AutoTokenizer, PreTrainedModel
from transformers import initialization as init

from .backbone_hypernet import HUB_OPTIONS, BackboneMixin, find_lora_targets, resolve_backbone, split_options
from .card import warn_if_unsaved
from .configuration_hypernet import HypernetConfig
from .crf_hypernet import LinearChainCrf
from .lstm_hypernet import WeightGenerator
from .saving_hypernet import CompleteCheckpointMixin
from .word_starts_hypernet import WordStarts

# What from_backbone() takes for the configuration.
CONFIG_OPTIONS = {field.name for field in fields(HypernetConfig)} - {"text_config"} | {"num_labels", "problem_type"}


class HypernetPreTrainedModel(BackboneMixin, CompleteCheckpointMixin, PreTrainedModel):
    """Initialisation, saving and loading of hypernetwork models."""

    model_class: type  # of what stands under a head
    lora_task: str | None = None  # peft's name for what the model does
    default_labels: tuple[str, ...] = ()  # of from_backbone()

    config_class = HypernetConfig
    base_model_prefix = "hypernet"
    backbone_path = "hypernet.backbone"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def _init_weights(self, module):
        if isinstance(module, WeightGenerator):
            # generated weights of variance 1 / N_h where z has the length 1; from_backbone() sees to the rest
            N_h = module.bias.shape[1]
            for name, weight in module.named_parameters():
                if name.startswith("base_"):
                    init.uniform_(weight, -(N_h**-0.5), N_h**-0.5)  # as PyTorch's LSTM
                elif module.base_bias is not None:
                    init.zeros_(weight)  # a new model is one LSTM for all texts
                else:
                    init.normal_(weight, mean=0.0, std=N_h**-0.5)
        elif isinstance(module, (LinearChainCrf, WordStarts)):
            module.reset_parameters()
        else:
            super()._init_weights(module)

    def initialize_weights(self):
        super().initialize_weights()
        if self.config.freeze_backbone:  # loading makes new parameters, which would be trained
            self.base_model.backbone.requires_grad_(False)

    @classmethod
    def from_backbone(
        cls,
        name_or_path: str,
        *,
        dtype: torch.dtype | str = torch.float32,
        attention_dropout: float | None = None,
        **options,
    ):
        """A model over a pretrained encoder. Everything else is newly initialised; the generators are scaled on random
        texts so that generated weights have variance 1 / N_h.

        Args:
            name_or_path (`str`): folder or Hub id of any encoder that `AutoModel` opens, or "minilm".
            dtype: of all weights, "auto" for the checkpoint's. Not the default, since a new head does not learn in half
                precision.
            attention_dropout (`float`, *optional*): in place of the encoder's own. 0 is faster on a CPU, whose fused
                attention does not support dropout.
            options: fields of `HypernetConfig` (`meta_size=16`, `freeze_backbone=False`, `id2label=...`), and what
                `from_pretrained` takes to find and load weights (`revision`, `token`, `device_map`,
                `quantization_config`, `variant`, ...).

        Raises:
            OSError: when there is no such encoder.
            ValueError: for an unknown option, or a value out of range.
        """
        options, load_kwargs = split_options(options, CONFIG_OPTIONS)
        if cls.default_labels and not {"num_labels", "id2label", "label2id"} & set(options):
            options["id2label"] = dict(enumerate(cls.default_labels))

        def make_config(encoder):
            return HypernetConfig(text_config=encoder, **special_ids(name_or_path, encoder, load_kwargs) | options)

        loaded = cls.load_over_backbone(name_or_path, make_config, load_kwargs, dtype, attention_dropout)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.base_model.scale_generators()
        return loaded

    def lora_config(self, **overrides):
        """A peft `LoraConfig` that fits this model: r = 16, alpha = 16, dropout 0.1 on the backbone's query and value
        projections, and everything else trained and saved whole (peft by itself would freeze the hypernetwork, and leave
        it out of the adapter).

        Args:
            overrides: any field of `LoraConfig`; what you pass replaces what stands here.

        Warns:
            UserWarning: for a model that has not been saved, over which an adapter could not be opened again.

        Raises:
            ImportError: without peft.
            ValueError: for a frozen backbone, and for one whose projections have names not known here; then pass
                `target_modules`.
        """
        try:
            from peft import LoraConfig
        except ImportError as error:
            raise ImportError("lora_config() needs peft. Install it with: pip install lexperts[train]") from error
        if self.config.freeze_backbone:
            raise ValueError(
                "The backbone is frozen and runs without gradients, so that an adapter in it would learn nothing. Start "
                "with from_backbone(..., freeze_backbone=False), or set model.config.freeze_backbone = False."
            )
        children = {name for name, module in self.named_children() if any(True for _ in module.parameters())}
        heads = sorted(children - {self.base_model_prefix, "backbone", "meta_encoder", "reader"})
        options = {
            "r": 16,
            "lora_alpha": 16,
            "lora_dropout": 0.1,
            "modules_to_save": ["meta_encoder", "reader", *heads],
        }
        if self.lora_task:
            options["task_type"] = self.lora_task
        if "target_modules" not in overrides:
            options["target_modules"] = find_lora_targets(self.base_model.backbone)
        warn_if_unsaved(self)
        return LoraConfig(**{**options, **overrides})


def special_ids(name_or_path: str, config, load_kwargs: dict) -> dict[str, int | None]:
    """The tokenizer's ids of the tokens around the texts; the configuration's where there is no tokenizer."""
    try:
        hub = {name: value for name, value in load_kwargs.items() if name in HUB_OPTIONS}
        known = AutoTokenizer.from_pretrained(resolve_backbone(name_or_path), **hub)
    except (OSError, ValueError, ImportError):
        known = config
    sep = getattr(known, "sep_token_id", None)
    return {
        "cls_token_id": getattr(known, "cls_token_id", None),
        "sep_token_id": getattr(known, "eos_token_id", None) if sep is None else sep,
    }
