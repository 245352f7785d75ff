# SPDX-License-Identifier: Apache-2.0
"""Configuration of the hypernetwork: any encoder, an LSTM that generates weights, and an LSTM that uses them."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig
from transformers.configuration_utils import SubConfigSpec

from .shared_hypernet import ValidatedConfigMixin, require_one_of, require_range


@strict
class HypernetConfig(ValidatedConfigMixin, PreTrainedConfig):
    """Configuration of a hypernetwork model.

    Args:
        text_config (`dict` or `PreTrainedConfig`, default a BERT): the backbone's configuration; any encoder of `AutoModel`.
        freeze_backbone (`bool`, default `True`): whether the backbone's weights are not trained and it stays in eval mode,
            as in the paper; its states can then be computed once (docs/hypernet.md).
        meta_embedding_size (`int`, default 16): size N_z of the meta-text's vector z; 16 or 32 in the paper. Parameters and
            memory of the generators are proportional to it.
        meta_hidden_size (`int`, default 512): hidden size of the LSTM that encodes the meta-text; `None` for N_z without a
            projection.
        hidden_size (`int`, default 512): hidden size N_h of the LSTM that encodes the main text.
        bidirectional (`bool`, default `False`): whether a second set of generated weights encodes the main text in reverse.
        classifier_dropout (`float`, default 0.1): dropout on the main text's states.
        pooling (`"last"` or `"mean"`, default `"last"`): input of the sequence classifier: the state of the last token, or
            the mean over all tokens.
        title_in_main (`bool`, default `False`): whether the keyphrase pipeline repeats the title at the beginning of the main
            text and extracts phrases from it.
        constrained_decoding (`bool`, default `False`): whether `decode` excludes an I after an O or at the beginning. All
            transitions are allowed in training.
        keyphrase_threshold (`float`, *optional*): minimum probability of B or I for a word to be part of a keyphrase in the
            keyphrase pipeline, as chosen by `keyphrase_tools.evaluation.ExtractionMetrics`; by default the most likely path
            is used.
        keyphrase_temperature (`float`, *optional*): temperature of the keyphrase pipeline's scores, as chosen by
            `keyphrase_tools.calibration.calibrate`.
        cls_token_id, sep_token_id (`int`): the tokenizer's, which divide the texts of inputs without masks. Set by
            `from_backbone`.
        id2label, label2id, num_labels: the labels.

    Raises:
        ValueError: for a value outside its range.
    """

    model_type = "hypernet"
    how_to_start = (
        "To start from an encoder, use from_backbone(name_or_path) of HypernetForTokenClassification, "
        "HypernetForSequenceClassification or HypernetForQuestionAnswering."
    )
    sub_configs_defaults = {"text_config": SubConfigSpec(AutoConfig, model_type="bert")}
    keys_to_ignore_at_inference = ["hidden_states", "attentions"]

    text_config: dict | PreTrainedConfig | None = None
    freeze_backbone: bool = True
    meta_embedding_size: int = 16
    meta_hidden_size: int | None = 512
    hidden_size: int = 512
    bidirectional: bool = False
    classifier_dropout: float | int = 0.1
    pooling: str = "last"
    title_in_main: bool = False
    constrained_decoding: bool = False
    keyphrase_threshold: float | None = None
    keyphrase_temperature: float | int | None = None
    cls_token_id: int | None = None
    sep_token_id: int | None = None

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
        """Raises a `ValueError` that names the value."""
        require_range(self, ["meta_embedding_size"], 2)  # z is normalised
        require_range(self, ["meta_hidden_size", "hidden_size"], 1)
        require_range(self, ["classifier_dropout"], 0, 1)
        require_one_of(self, {"pooling": ("last", "mean")})
        require_range(self, ["keyphrase_temperature"], 0, above=True)
        require_range(self, ["keyphrase_threshold"], 0, 1, above=True)


HypernetConfig.register_for_auto_class()
