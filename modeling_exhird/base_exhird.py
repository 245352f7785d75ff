# SPDX-License-Identifier: Apache-2.0
"""Base class of ExHiRD's models: initialisation, loading, saving and adapters."""

from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init

from .attention_exhird import SparseRelativeAttention
from .backbone_exhird import BackboneMixin
from .configuration_exhird import ExhirdConfig
from .encoders_exhird import PretrainedWordEncoder
from .saving_exhird import SelfContainedCheckpointMixin, lexperts_tools


class ExhirdPreTrainedModel(BackboneMixin, SelfContainedCheckpointMixin, PreTrainedModel):
    """Initialisation, saving and loading of keyphrase generators."""

    card_family = "ExHiRD: an encoder and a hierarchical decoder without repeats (Chen et al. 2020, Xu et al. 2021)"
    config_class = ExhirdConfig
    base_model_prefix = "encoder"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_attention_backend = True
    accepts_loss_kwargs = False  # the loss is a mean over documents: the Trainer divides it by accumulated batches

    def _init_weights(self, module):
        """All weights, biases included, from U(-r, r); LayerNorms with weight 1 and bias 0, unless `init_layer_norm`."""
        if isinstance(module, nn.LayerNorm) and not self.config.init_layer_norm:
            init.ones_(module.weight)
            init.zeros_(module.bias)
            return
        if isinstance(module, nn.Module) and (
            list(module.children()) == [] or isinstance(module, (SparseRelativeAttention, PretrainedWordEncoder))
        ):
            for weight in module.parameters(recurse=False):
                init.uniform_(weight, -self.config.initializer_range, self.config.initializer_range)

    def initialize_weights(self):
        """As in transformers; also freezes a frozen backbone, whose parameters loading has created as trainable."""
        super().initialize_weights()
        if self.config.encoder_type == "pretrained" and self.config.freeze_backbone:
            self.base_model.word_encoder.backbone.requires_grad_(False)

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args, **kwargs):
        """Returns the embeddings. The vocabulary has a fixed size: ids beyond it are out-of-vocabulary words to copy.

        Raises:
            ValueError: for another size.
        """
        if new_num_tokens not in (None, self.config.vocab_size):
            raise ValueError(
                f"The vocabulary of {self.config.vocab_size:,} words cannot be resized to {new_num_tokens:,}: ids beyond "
                "it are words to copy. Out-of-vocabulary words are copied from the source; for another vocabulary make a "
                "tokenizer with ExhirdTokenizer.from_texts, and train a model for it."
            )
        return self.get_input_embeddings()

    def lora_config(self, **overrides):
        """A peft `LoraConfig` for this model: r = 16, alpha = 16, dropout 0.1 on the pretrained encoder's query and value
        projections; all other modules are trained and saved. `overrides` are fields of `LoraConfig` that replace these.

        Warns, Raises: as `run_tools.backbones.make_lora_config`, and a `ValueError` without a trainable pretrained encoder.
        """
        config = self.config
        if config.encoder_type != "pretrained" or config.freeze_backbone:
            pretrained = config.encoder_type == "pretrained"
            setting = "freeze_backbone=True" if pretrained else f"encoder_type={config.encoder_type!r}"
            raise ValueError(
                f"LoRA needs a trainable pretrained encoder, but this model has {setting}. Train all its weights, or build "
                "it with ExhirdForKeyphraseGeneration.from_backbone(name_or_path, tokenizer, freeze_backbone=False)."
            )
        parts = ["encoder.embeddings", "word_encoder.project", "word_encoder.no_subword_embedding"]
        parts += ["decoder", "generator"]
        if any(True for _ in self.base_model.start.parameters()):
            parts.append("encoder.start")
        backbone = self.base_model.word_encoder.backbone
        tools = lexperts_tools("backbones", "lora_config()")
        return tools.make_lora_config(self, overrides, backbone, modules_to_save=parts)

    def output_flags(self, output_attentions: bool | None, output_hidden_states: bool | None) -> dict[str, bool]:
        """Both flags, with `None` replaced by the configuration's."""
        config = self.config
        flags = {"output_attentions": output_attentions, "output_hidden_states": output_hidden_states}
        return {name: getattr(config, name) if value is None else value for name, value in flags.items()}
