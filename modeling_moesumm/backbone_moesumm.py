# SPDX-License-Identifier: Apache-2.0
"""What a saved model needs of its pretrained backbone; `run_tools.backbones` makes new models. Copied by `make fix-copies`."""

from transformers import AutoModel, AutoModelForTextEncoding, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING


class BackboneMixin:
    """What `run_tools.backbones.load_over_backbone` reads of a class. Put it before `PreTrainedModel` in the bases.

    Attributes:
        backbone_path: path of attributes to the pretrained model in this one.
        lora_task: peft's name of the task, for adapters.
    """

    backbone_path = "backbone"
    lora_task: str | None = None

    @classmethod
    def build_backbone(cls, config: PreTrainedConfig) -> PreTrainedModel:
        """The backbone of its configuration. Raises a `ValueError` for a configuration that is not supported."""
        return build_encoder(config)


def build_encoder(config: PreTrainedConfig) -> PreTrainedModel:
    """The encoder of a configuration, for T5 without the decoder, and without a pooler, which would not be trained."""
    auto_class = AutoModelForTextEncoding if type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING else AutoModel
    if auto_class is AutoModel and config.is_encoder_decoder:
        raise ValueError(f"{config.model_type!r} is an encoder with a decoder. Use a model with an encoder only.")
    encoder = auto_class.from_config(config, trust_remote_code=False)
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None
    return encoder
