"""What both classes of ExHiRD have: initialisation, saving and loading."""

from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init

from .attention_exhird import SparseRelativeAttention
from .backbone_exhird import BackboneMixin, find_lora_targets
from .card import warn_if_unsaved
from .configuration_exhird import ExHirdConfig
from .encoders_exhird import PieceEncoder
from .saving_exhird import CompleteCheckpointMixin


class ExHirdPreTrainedModel(BackboneMixin, CompleteCheckpointMixin, PreTrainedModel):
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

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args, **kwargs):
        """The vocabulary stays as it is: words outside it are read as `<unk>`, and copied where they stand in the source.

        Raises:
            ValueError: for another size.
        """
        if new_num_tokens not in (None, self.config.vocab_size):
            raise ValueError(
                f"A vocabulary of {self.config.vocab_size:,} words cannot become one of {new_num_tokens:,}: ids beyond it "
                "are words to copy. Words that it lacks are copied from the source; for others make a tokenizer with "
                "ExHirdTokenizer.from_texts, and train a model for it."
            )
        return self.get_input_embeddings()

    def lora_config(self, **overrides):
        """A peft `LoraConfig` that fits this model: r = 16, alpha = 16, dropout 0.1 on the pretrained encoder's query and
        value projections, and everything else trained and saved whole.

        Args:
            overrides: any field of `LoraConfig`; what you pass replaces what stands here.

        Warns:
            UserWarning: for a model that has not been saved, over which an adapter could not be opened again.

        Raises:
            ImportError: without peft.
            ValueError: for an encoder that is not a pretrained one, or is frozen, and for one whose projections have names
                not known here; then pass `target_modules`.
        """
        try:
            from peft import LoraConfig
        except ImportError as error:
            raise ImportError("lora_config() needs peft. Install it with: pip install lexperts[train]") from error
        config = self.config
        if config.encoder_type != "pretrained" or config.freeze_backbone:
            what = f"of encoder_type={config.encoder_type!r} has none"
            if config.encoder_type == "pretrained":
                what = "is frozen"
            raise ValueError(
                f"Adapters stand in a pretrained encoder, and this model's {what}. Train all its weights, or start with "
                "ExHirdForKeyphraseGeneration.from_backbone(name_or_path, tokenizer, freeze_backbone=False)."
            )
        reader = self.base_model.reader
        whole = ["encoder.embeddings", "reader.project", "reader.nothing", "encoder.start", "decoder", "mixture"]
        if not any(True for _ in self.base_model.start.parameters()):
            whole.remove("encoder.start")
        options = {"r": 16, "lora_alpha": 16, "lora_dropout": 0.1, "modules_to_save": whole}
        if "target_modules" not in overrides:
            options["target_modules"] = find_lora_targets(reader.backbone)
        warn_if_unsaved(self)
        return LoraConfig(**{**options, **overrides})
