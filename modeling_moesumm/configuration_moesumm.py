"""Configuration of MoeSumm: BART, PEGASUS or mBART with a main expert and dataset-aware deputies (MoeSumm, Sect. 4)."""

import difflib

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig
from transformers.configuration_utils import SubConfigSpec

from .validation_moesumm import ValidatedConfigMixin

EXPERTS_IMPLEMENTATIONS = ("auto", "eager", "batched_mm", "grouped_mm")
GATE_POSITIONS = ("deputy", "layer_output", "ffn_output")
MARGIN_MAIN = ("model", "last_layer")
DEPUTY_SIZE = 512


def of_backbone(name: str) -> property:
    """A field of the backbone's configuration, read and written under the same name on the outer one."""

    def read(config):
        return getattr(config.text_config, name, None)

    def write(config, value):
        setattr(config.text_config, name, value)

    return property(read, write, doc=f"The backbone's `{name}`.")


@strict
class MoeSummConfig(ValidatedConfigMixin, PreTrainedConfig):
    r"""What a MoeSumm model is made of: a backbone, the datasets it knows, and its deputies.

    Args:
        text_config (`dict` or `PreTrainedConfig`, default a BART-large):
            The backbone's configuration: BART, PEGASUS or mBART. Its special tokens and sizes can be read and set on
            this one too.
        datasets (`list[str]`, default `["default"]`):
            The datasets that have a selector, in the order of their ids.
        num_deputies (`int`, default 3):
            Deputy experts N in every layer of encoder and decoder.
        deputy_size (`int`, default 512):
            Inner size d_h of a deputy. Without a main expert it is the backbone's own, which is not to be given.
        margin_loss_coef (`float`, default 1.0):
            Weight of the max-margin loss (MoeSumm, Eq. 8-9); 0 switches it and its second pass off. Without a main
            expert there is no margin, and it is 0.
        dataset_aware (`bool`, default `True`):
            Whether each dataset has a selector of its own. `False` is the paper's ablation without dataset information:
            one selector for all datasets. A row without a dataset has the main expert alone in both.
        main_expert (`bool`, default `True`):
            `False` is the paper's baseline FlatMoE: in the place of the main expert and its deputies stand N experts of
            the backbone's own size, and one selector that knows no datasets. `from_backbone` starts them as copies of
            the backbone's feed-forward layers, and the weight of the chosen one is 1 with the gradient of its
            probability, so that the model starts as its backbone.
        margin_main (`str`, default `"model"`):
            What the margin compares with (P_main of Eq. 8): `"model"` is the model without any deputies, as the paper
            says, and needs a second pass; `"last_layer"` leaves out the deputies of the decoder's last layer alone, as
            the authors' code does, and needs none.
        label_smoothing (`float`, default 0.0):
            Label smoothing of the generation loss, at least 0 and below 1. The margin loss is not smoothed: Eq. 8-9 are
            of the probability of the gold token. Use this and not the Trainer's `label_smoothing_factor`.
        gate_position (`str`, default `"deputy"`):
            What the chosen deputy's weight g_p multiplies: `"deputy"` its pre-activation, as printed in Eq. 6;
            `"ffn_output"` the sum of main expert and deputy; `"layer_output"` the whole layer's output, behind its
            last normalisation, as the authors' code does. Rows without a dataset are the backbone's in all.
        selector_bias (`bool`, default `False`):
            Whether selectors have biases, as in the authors' code; Eq. 4 has none.
        deputy_output_std (`float`, default 0):
            Standard deviation that the deputies' second matrix starts with; with 0 a new deputy says nothing yet, and a
            new model starts as its backbone.
        kwargs: all that `PreTrainedConfig` takes; `experts_implementation` is how the deputies are computed, one of
            `"auto"` (by device and number of tokens), `"eager"`, `"batched_mm"`, `"grouped_mm"` (see `DeputyExperts`).

    Raises:
        ValueError: for a value outside its range; the message states the value and how to fix it.

    Example:

    ```python
    >>> from modeling_moesumm import MoeSummConfig, MoeSummForConditionalGeneration
    >>> config = MoeSummConfig(text_config={"model_type": "pegasus", "d_model": 64}, datasets=["news", "letters"])
    >>> model = MoeSummForConditionalGeneration(config)  # random weights; from_backbone() starts from pretrained ones
    ```"""

    model_type = "moesumm"
    how_to_start = (
        "To start from a BART, PEGASUS or mBART, use "
        "MoeSummForConditionalGeneration.from_backbone(name_or_path, datasets=[...])."
    )
    sub_configs_defaults = {"text_config": SubConfigSpec(AutoConfig, model_type="bart")}
    # Logits alone are predictions.
    keys_to_ignore_at_inference = [
        *("generation_loss", "margin_loss", "past_key_values"),
        *("decoder_hidden_states", "decoder_attentions", "cross_attentions"),
        *("encoder_last_hidden_state", "encoder_hidden_states", "encoder_attentions"),
        *("encoder_deputies", "encoder_gates", "decoder_deputies", "decoder_gates"),
    ]

    text_config: dict | PreTrainedConfig | None = None
    datasets: list[str] | None = None
    num_deputies: int = 3
    deputy_size: int | None = None
    margin_loss_coef: float | int | None = None
    dataset_aware: bool | None = None
    main_expert: bool = True
    margin_main: str = "model"
    label_smoothing: float | int = 0.0
    gate_position: str = "deputy"
    selector_bias: bool = False
    deputy_output_std: float | int = 0.0
    is_encoder_decoder: bool = True
    tie_word_embeddings: bool = True

    vocab_size = of_backbone("vocab_size")
    hidden_size = d_model = of_backbone("d_model")
    max_position_embeddings = of_backbone("max_position_embeddings")
    num_hidden_layers = encoder_layers = of_backbone("encoder_layers")
    decoder_layers = of_backbone("decoder_layers")
    num_attention_heads = encoder_attention_heads = of_backbone("encoder_attention_heads")
    decoder_attention_heads = of_backbone("decoder_attention_heads")
    use_cache = of_backbone("use_cache")
    pad_token_id = of_backbone("pad_token_id")
    bos_token_id = of_backbone("bos_token_id")
    eos_token_id = of_backbone("eos_token_id")
    decoder_start_token_id = of_backbone("decoder_start_token_id")

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.datasets is None:
            self.datasets = ["default"]
        if self.main_expert and self.deputy_size is None:
            self.deputy_size = DEPUTY_SIZE
        if self.margin_loss_coef is None:
            self.margin_loss_coef = 1.0 if self.main_expert else 0.0
        if self.dataset_aware is None:
            self.dataset_aware = self.main_expert
        # The backbone decides; this one is what save and load look at.
        self.tie_word_embeddings = self.text_config.tie_word_embeddings
        self.check()

    @property
    def _experts_implementation(self):
        return self._experts_implementation_internal

    @_experts_implementation.setter
    def _experts_implementation(self, value: str | dict | None):
        # Not handed down to the backbone, as transformers would: it has no experts of its own and refuses our names.
        self._experts_implementation_internal = value.get("") if isinstance(value, dict) else value

    @property
    def num_selectors(self) -> int:
        """Selectors in every layer: one a dataset, or one for all."""
        return len(self.datasets) if self.dataset_aware else 1

    def check(self):
        """Raises a `ValueError` that states the value, the reason and how to fix it."""
        if not getattr(self.text_config, "is_encoder_decoder", False):
            raise ValueError(
                f"text_config is of a {self.text_config.model_type!r} model, which has no encoder with a decoder. "
                "Use BART, PEGASUS or mBART."
            )
        for name in ("num_deputies", "deputy_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(
                    f"{name}={value}: it must be 1 or more. For no deputies at all use the backbone itself."
                )
        for name in ("margin_loss_coef", "deputy_output_std"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: it cannot be negative. Use 0 to switch it off.")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing={self.label_smoothing}: it must be at least 0 and below 1, such as 0.1.")
        for name, known in (("gate_position", GATE_POSITIONS), ("margin_main", MARGIN_MAIN)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is not known. {nearest(getattr(self, name), known)}")
        check_datasets(self.datasets)
        if not self.main_expert:
            self._check_flat()

    def _check_flat(self):
        if self.dataset_aware:
            raise ValueError(
                "main_expert=False with dataset_aware=True: FlatMoE's selector knows no datasets. "
                "Leave dataset_aware out."
            )
        if self.margin_loss_coef:
            raise ValueError(
                f"main_expert=False with margin_loss_coef={self.margin_loss_coef}: the margin is that over the main "
                "expert. Leave margin_loss_coef out."
            )
        if self.deputy_size is not None:
            raise ValueError(
                f"main_expert=False with deputy_size={self.deputy_size}: FlatMoE's experts have the size of the "
                "backbone's feed-forward layers. Leave deputy_size out."
            )


def check_datasets(names: list[str]):
    """One name or more, none empty, none twice."""
    if not names:
        raise ValueError(
            "datasets is empty: every deputy is chosen by a dataset's selector. Name at least one, datasets=['news']."
        )
    for name in names:
        if not name.strip():
            raise ValueError(f"datasets={names} has an empty name. Give each dataset a name.")
        if names.count(name) > 1:
            raise ValueError(f"datasets={names} names {name!r} twice. Name each dataset once.")


def nearest(name: str, known) -> str:
    """What a misspelt name may have meant, as a sentence."""
    close = difflib.get_close_matches(str(name), known, n=1)
    return f"Did you mean {close[0]!r}?" if close else f"Use one of {', '.join(map(repr, known))}."


MoeSummConfig.register_for_auto_class()
