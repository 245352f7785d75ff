# SPDX-License-Identifier: Apache-2.0
"""Configuration of the hypernetwork: any encoder, an LSTM that generates weights, and an LSTM that uses them."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig
from transformers.configuration_utils import SubConfigSpec

from .validation_hypernet import ValidatedConfigMixin, require_one_of, require_range

POOLINGS = ("last", "mean")
LSTM_IMPLEMENTATIONS = ("auto", "per_example", "batched", "eager")


@strict
class HypernetConfig(ValidatedConfigMixin, PreTrainedConfig):
    r"""Configuration of a hypernetwork model.

    Args:
        text_config (`dict` or `PreTrainedConfig`, default a BERT):
            The backbone's configuration; any encoder that `AutoModel` can build.
        freeze_backbone (`bool`, default `True`):
            Whether the backbone is frozen and runs without gradients, as in the paper; its states can then be computed once
            (`encoder_cache_hypernet.CachedEncoderDataset`). `False` fine-tunes it, and allows adapters.
        meta_embedding_size (`int`, default 16):
            Size N_z of the meta-text's vector z; 16 or 32 in the paper. Parameters and memory of the generators are
            proportional to it.
        meta_hidden_size (`int`, default 512):
            Hidden size of the LSTM that encodes the meta-text; `None` for N_z without a projection.
        normalize_meta_embedding (`bool`, default `True`):
            Whether z is normalised to mean 0 and length 1. Not in the paper; without it z and all generated weights grow in
            training until gradients explode (benchmarks/log/hypernetworks.md).
        meta_dropout (`float`, default 0.0):
            Dropout on z, to reduce overfitting to titles. Not in the paper.
        shared_base_weights (`bool`, default `False`):
            Whether generated weights are added to weights that all texts share. In a new model the generated ones are then
            0. Not in the paper.
        hidden_size (`int`, default 512):
            Hidden size N_h of the LSTM that encodes the main text.
        bidirectional (`bool`, default `False`):
            Whether a second set of generated weights encodes the main text in reverse.
        classifier_dropout (`float`, default 0.1):
            Dropout on the main text's states.
        pooling (`"last"` or `"mean"`, default `"last"`):
            Input of the sequence classifier: the state of the last token, or the mean over all tokens.
        title_in_main (`bool`, default `False`):
            Whether the keyphrase pipeline repeats the title at the beginning of the main text and extracts phrases from it.
        constrained_decoding (`bool`, default `False`):
            Whether `decode` excludes an I after an O or at the beginning. All transitions are allowed in training.
        keyphrase_threshold (`float`, default `None`):
            Minimum probability of B or I for a word to be part of a keyphrase in the keyphrase pipeline. Chosen on
            validation documents by `keyphrase_tools.evaluation.ExtractionMetrics`. With `None` the most likely path is used.
        keyphrase_temperature (`float`, default `None`):
            Temperature of the keyphrase pipeline's scores. Chosen on validation documents by
            `keyphrase_tools.calibration.calibrate`. With `None` scores are not changed.
        lstm_implementation (`"auto"`, `"per_example"`, `"batched"` or `"eager"`, default `"auto"`):
            Implementation of the main text's LSTM; the results are the same. `"auto"` is the fastest on the device.
        cls_token_id, sep_token_id (`int`):
            The tokenizer's. They separate meta-text and main text if neither `meta_mask` nor `token_type_ids` does. Set by
            `from_backbone`.
        has_word_starts (`bool`, default `False`):
            Whether the token head has a table of the tokens that begin words, for calls without `word_start_mask`. Set by
            `set_word_starts` and `from_backbone`.
        id2label, label2id, num_labels:
            The labels.

    Raises:
        ValueError: for a value outside its range; the message states the value and how to fix it.

    Example:

    ```python
    >>> from modeling_hypernet import HypernetConfig, HypernetForTokenClassification
    >>> config = HypernetConfig(text_config={"model_type": "bert", "hidden_size": 64, "num_attention_heads": 4})
    >>> model = HypernetForTokenClassification(config)  # random weights; from_backbone() starts from pretrained ones
    ```"""

    model_type = "hypernet"
    how_to_start = (
        "To start from an encoder, use from_backbone(name_or_path) of HypernetForTokenClassification, "
        "HypernetForSequenceClassification or HypernetForQuestionAnswering."
    )
    sub_configs_defaults = {"text_config": SubConfigSpec(AutoConfig, model_type="bert")}
    keys_to_ignore_at_inference = ["meta_embedding", "hidden_states", "attentions"]

    text_config: dict | PreTrainedConfig | None = None
    freeze_backbone: bool = True
    meta_embedding_size: int = 16
    meta_hidden_size: int | None = 512
    normalize_meta_embedding: bool = True
    meta_dropout: float | int = 0.0
    shared_base_weights: bool = False
    hidden_size: int = 512
    bidirectional: bool = False
    classifier_dropout: float | int = 0.1
    pooling: str = "last"
    title_in_main: bool = False
    constrained_decoding: bool = False
    keyphrase_threshold: float | None = None
    keyphrase_temperature: float | int | None = None
    lstm_implementation: str = "auto"
    cls_token_id: int | None = None
    sep_token_id: int | None = None
    has_word_starts: bool = False

    def __post_init__(self, **kwargs):
        if self.id2label is None and self.label2id is not None:
            self.id2label = {i: label for label, i in self.label2id.items()}
        elif self.label2id is None and self.id2label is not None:
            self.label2id = {label: int(i) for i, label in self.id2label.items()}
        super().__post_init__(**kwargs)
        self.check()

    @property
    def input_size(self) -> int:
        """Hidden size N_x of the backbone."""
        text_config: Any = self.text_config  # no longer a dictionary
        return text_config.hidden_size

    @property
    def output_size(self) -> int:
        """Size D of the main text's states: N_h, or 2 N_h if bidirectional."""
        return self.hidden_size * (2 if self.bidirectional else 1)

    def check(self):
        """Raises a `ValueError` that names the value, the reason and the fix."""
        require_range(self, ["meta_embedding_size", "meta_hidden_size", "hidden_size"], 1)
        require_range(self, ["classifier_dropout", "meta_dropout"], 0, 1)
        require_one_of(self, {"pooling": POOLINGS, "lstm_implementation": LSTM_IMPLEMENTATIONS})
        if self.normalize_meta_embedding and self.meta_embedding_size == 1:
            raise ValueError(
                "meta_embedding_size=1: normalize_meta_embedding would make it 0. Use 2 or more, or "
                "normalize_meta_embedding=False."
            )
        require_range(self, ["keyphrase_temperature"], 0, above=True)
        require_range(self, ["keyphrase_threshold"], 0, 1, above=True)


HypernetConfig.register_for_auto_class()
