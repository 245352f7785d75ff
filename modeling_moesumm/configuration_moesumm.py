# SPDX-License-Identifier: Apache-2.0
"""Configuration of MoeSumm: a pretrained model with a main expert and dataset-aware deputies (MoeSumm, Sect. 4)."""

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig
from transformers.configuration_utils import SubConfigSpec

from .shared_moesumm import ValidatedConfigMixin, require_one_of, require_range

EXPERTS_IMPLEMENTATIONS = ("auto", "eager", "batched_mm", "grouped_mm")
GATE_POSITIONS = ("deputy", "layer_output")
MARGIN_MAIN = ("model", "last_layer")
SUMMARY_PROMPT = "\n\nSummary:\n"
DECODERS = ("llama", "mistral", "qwen2", "qwen3")  # by model_type
BACKBONES = "BART or PEGASUS (MoeSummForConditionalGeneration), Llama, Mistral, Qwen2 or Qwen3 (MoeSummForCausalLM)"


def backbone_field(name: str) -> property:
    """A field of the backbone's configuration that the outer one exposes under the same name."""
    return property(
        lambda config: getattr(config.text_config, name, None),
        lambda config, value: setattr(config.text_config, name, value),
    )


@strict
class MoeSummConfig(ValidatedConfigMixin, PreTrainedConfig):
    r"""Configuration of a MoeSumm model: a backbone, the datasets, and the deputy experts.

    Args:
        text_config (`dict` or `PreTrainedConfig`, default a BART-large):
            The backbone's: BART or PEGASUS for `MoeSummForConditionalGeneration`; Llama, Mistral, Qwen2 or Qwen3 for
            `MoeSummForCausalLM`. Its special tokens and sizes can be read and set on this configuration too.
        datasets (`list[str]`, default `["default"]`):
            The datasets that have a selector, in the order of their ids.
        num_deputies (`int`, default 3): N, in every layer.
        deputy_intermediate_size (`int`, default 512): d_h. Unset with `main_expert=False`.
        margin_loss_coef (`float`, default 1.0):
            Weight of the max-margin loss (Eq. 8-9); 0 saves its second forward pass. 0 with `main_expert=False`.
        dataset_aware (`bool`, default `True`):
            `False` is the paper's ablation with one selector for all datasets. A row without a dataset uses the main expert
            only in both cases.
        main_expert (`bool`, default `True`):
            `False` is the paper's baseline FlatMoE: N experts of the size of the backbone's feed-forward layer, which
            `from_backbone` copies into each, and one selector. The selected expert has the weight 1 with the gradient of its
            probability, so the initial model computes what its backbone computes.
        margin_main (`str`, default `"model"`):
            P_main of Eq. 8: `"model"` without any deputies, as in the paper; `"last_layer"` without those of the last layer,
            as in the authors' code, which needs no second pass.
        label_smoothing (`float`, default 0.0):
            Of the generation loss only, in [0, 1). The Trainer's `label_smoothing_factor` would drop the margin loss.
        gate_position (`str`, default `"deputy"`):
            What g_p multiplies: the deputy's pre-activation (Eq. 6), or the `"layer_output"` after its last normalisation, as in
            the authors' code.
        selector_bias (`bool`, default `False`): as in the authors' code; Eq. 4 has none.
        deputy_init_std (`float`, default 0):
            Initial standard deviation of the deputies' second matrix. With 0 the initial model computes what its backbone
            computes.
        summary_prompt (`str`, default `"\n\nSummary:\n"`): the text between a document and its summary for a decoder.
        kwargs: of `PreTrainedConfig`; `experts_implementation` is that of `DeputyExperts`.

    Raises:
        ValueError: for a value out of range.

    Example:

    ```python
    >>> from modeling_moesumm import MoeSummConfig, MoeSummForConditionalGeneration
    >>> config = MoeSummConfig(text_config={"model_type": "pegasus", "d_model": 64}, datasets=["news", "letters"])
    >>> model = MoeSummForConditionalGeneration(config)  # random weights; from_backbone() starts from pretrained ones
    ```"""

    model_type = "moesumm"
    how_to_start = "To start from a backbone, use from_backbone(name_or_path, datasets=[...]) of a MoeSumm model."
    sub_configs_defaults = {"text_config": SubConfigSpec(AutoConfig, model_type="bart")}
    # only logits are predictions
    keys_to_ignore_at_inference = [
        "generation_loss", "margin_loss", "cache", "past_key_values", "hidden_states", "attentions", "decoder_hidden_states",
        "decoder_attentions", "cross_attentions", "encoder_last_hidden_state", "encoder_hidden_states", "encoder_attentions",
        *(f"{part}expert_{what}" for part in ("", "encoder_", "decoder_") for what in ("indices", "weights")),
    ]  # fmt: skip

    text_config: dict | PreTrainedConfig | None = None
    datasets: list[str] | None = None
    num_deputies: int = 3
    deputy_intermediate_size: int | None = None
    margin_loss_coef: float | int | None = None
    dataset_aware: bool | None = None
    main_expert: bool = True
    margin_main: str = "model"
    label_smoothing: float | int = 0.0
    gate_position: str = "deputy"
    selector_bias: bool = False
    deputy_init_std: float | int = 0.0
    summary_prompt: str = SUMMARY_PROMPT
    is_encoder_decoder: bool = True
    tie_word_embeddings: bool = True

    vocab_size = backbone_field("vocab_size")
    hidden_size = d_model = backbone_field("hidden_size")
    max_position_embeddings = backbone_field("max_position_embeddings")
    num_hidden_layers = encoder_layers = backbone_field("num_hidden_layers")
    decoder_layers = backbone_field("decoder_layers")
    num_attention_heads = encoder_attention_heads = backbone_field("num_attention_heads")
    decoder_attention_heads = backbone_field("decoder_attention_heads")
    use_cache = backbone_field("use_cache")
    pad_token_id = backbone_field("pad_token_id")
    bos_token_id = backbone_field("bos_token_id")
    eos_token_id = backbone_field("eos_token_id")
    decoder_start_token_id = backbone_field("decoder_start_token_id")

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.datasets is None:
            self.datasets = ["default"]
        if self.main_expert and self.deputy_intermediate_size is None:
            self.deputy_intermediate_size = 512
        if self.margin_loss_coef is None:
            self.margin_loss_coef = 1.0 if self.main_expert else 0.0
        if self.dataset_aware is None:
            self.dataset_aware = self.main_expert
        # saving and loading read these fields; the backbone's are the ones that count
        self.is_encoder_decoder = bool(getattr(self.text_config, "is_encoder_decoder", False))
        self.tie_word_embeddings = self.text_config.tie_word_embeddings
        self.check()

    @property
    def _experts_implementation(self):
        return self._experts_implementation_internal

    @_experts_implementation.setter
    def _experts_implementation(self, value: str | dict | None):
        # not set on the backbone, as transformers would: it has no experts and rejects these names
        self._experts_implementation_internal = value.get("") if isinstance(value, dict) else value

    @property
    def num_selectors(self) -> int:
        """Selectors in every layer: one per dataset, or one for all."""
        return len(self.datasets or ()) if self.dataset_aware else 1

    def check(self):
        """Raises a `ValueError` for a value out of range."""
        model_type = self.text_config.model_type
        if not getattr(self.text_config, "is_encoder_decoder", False) and model_type not in DECODERS:
            raise ValueError(f"text_config has model_type={model_type!r}, which is not supported. Use a {BACKBONES}.")
        require_range(self, ["num_deputies", "deputy_intermediate_size"], 1)
        require_range(self, ["margin_loss_coef", "deputy_init_std"], 0)
        require_range(self, ["label_smoothing"], 0, 1)
        require_one_of(self, {"gate_position": GATE_POSITIONS, "margin_main": MARGIN_MAIN})
        check_datasets(self.datasets)
        # FlatMoE has one selector, no margin, and experts of the backbone's size
        for name, accepted in (("dataset_aware", False), ("margin_loss_coef", 0), ("deputy_intermediate_size", None)):
            value = getattr(self, name)
            if not self.main_expert and value != accepted:
                raise ValueError(f"{name}={value} needs a main expert. Leave {name} out, or set main_expert=True.")


def check_datasets(names: list[str]):
    """Raises a `ValueError` for an empty list, an empty name, and a name that occurs twice."""
    if not names or not all(name.strip() for name in names) or len({*names}) < len(names):
        raise ValueError(f"datasets={names} must be one or more names, each of them once.")


MoeSummConfig.register_for_auto_class()
