"""What both classes of ExHiRD have: initialisation, saving and loading."""

import os

from safetensors import SafetensorError
from torch import nn
from transformers import AutoModel, AutoModelForTextEncoding, PreTrainedModel
from transformers import initialization as init
from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING

from .attention_exhird import SparseRelativeAttention
from .card import warn_if_unsaved, write_model_card
from .configuration_exhird import ExHirdConfig
from .encoders_exhird import PieceEncoder

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


class ExHirdPreTrainedModel(PreTrainedModel):
    """Initialisation, saving and loading of keyphrase generators."""

    config_class = ExHirdConfig
    base_model_prefix = "encoder"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_attention_backend = True
    accepts_loss_kwargs = False  # a loss is a mean over documents: the Trainer divides it by accumulated batches

    def write_model_card(self, folder, **options):
        """Writes `folder/README.md`, unless there is one; see `card.write_model_card`."""
        return write_model_card(self, folder, **options)

    def _upload_modified_files(self, working_dir, repo_id, *args, **kwargs):
        # the last step of push_to_hub, with transformers' blank card in place
        self.write_model_card(working_dir, repo_id=repo_id)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)

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


def build_backbone(config) -> PreTrainedModel:
    """The encoder of a configuration, without the pooler that nobody trains."""
    backbone = auto_encoder(config).from_config(config)
    if getattr(backbone, "pooler", None) is not None:
        backbone.pooler = None
    return backbone
