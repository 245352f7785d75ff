"""What both classes of ExHiRD have: initialisation, saving and loading."""

import difflib
import os
from dataclasses import fields

from safetensors import SafetensorError
from torch import nn
from transformers import AutoModel, AutoModelForTextEncoding, PreTrainedModel
from transformers import initialization as init
from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING

from .attention_exhird import SparseRelativeAttention
from .configuration_exhird import ExHirdConfig
from .encoders_exhird import PieceEncoder

LOADING_OPTIONS = ("attn_implementation", "cache_dir", "force_download", "local_files_only", "proxies", "revision")
LOADING_OPTIONS += ("subfolder", "token", "trust_remote_code", "code_revision")


class ExHirdPreTrainedModel(PreTrainedModel):
    """Initialisation, saving and loading of keyphrase generators."""

    config_class = ExHirdConfig
    base_model_prefix = "encoder"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_attention_backend = True
    accepts_loss_kwargs = False  # a loss is a mean over documents: the Trainer divides it by accumulated batches

    def _init_weights(self, module):
        """All weights, biases included, from U(-r, r); gains of LayerNorms 1 and their biases 0, unless `literal_init`."""
        if isinstance(module, nn.LayerNorm) and not self.config.literal_init:
            init.ones_(module.weight)
            init.zeros_(module.bias)
            return
        if isinstance(module, nn.Module) and (
            list(module.children()) == [] or isinstance(module, (SparseRelativeAttention, PieceEncoder))
        ):
            for weight in module.parameters(recurse=False):
                init.uniform_(weight, -self.config.init_range, self.config.init_range)

    def initialize_weights(self):
        super().initialize_weights()
        if self.config.encoder_type == "pretrained" and self.config.freeze_backbone:
            # here, since loading makes new parameters, which would be trained
            self.base_model.reader.backbone.requires_grad_(False)

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


def auto_encoder(config):
    """The auto class that builds an encoder of this configuration, T5's without its decoder."""
    if type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING:
        return AutoModelForTextEncoding
    if config.is_encoder_decoder:
        raise ValueError(f"{config.model_type!r} is an encoder with a decoder, and an encoder alone is wanted.")
    return AutoModel


def check_options(options: dict):
    """Names options that no configuration has.

    Raises:
        ValueError: for the first of them.
    """
    known = {f.name for f in fields(ExHirdConfig)} - {"text_config"}
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else "See the fields of ExHirdConfig."
            raise ValueError(f"from_backbone() got {name!r}, which is no option of a keyphrase generator. {hint}")


def build_backbone(config) -> PreTrainedModel:
    """The encoder of a configuration, without the pooler that nobody trains."""
    backbone = auto_encoder(config).from_config(config)
    if getattr(backbone, "pooler", None) is not None:
        backbone.pooler = None
    return backbone
