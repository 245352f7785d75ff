# SPDX-License-Identifier: Apache-2.0
"""Configuration of SEKE: any encoder, a mixture of experts, a recurrent encoder, a token classifier (Martinc et al. 2025)."""

import warnings
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig
from transformers.configuration_utils import SubConfigSpec

from .shared_seke import ValidatedConfigMixin, require_one_of, require_range

RNN_TYPES = ("lstm", "gru")
EXPERT_INITS = ("identity", "uniform")
KEYPHRASE_LABELS = ("O", "B-KEY", "I-KEY")


@strict
class SekeConfig(ValidatedConfigMixin, PreTrainedConfig):
    r"""Configuration of a SEKE model. `use_moe` and `use_rnn` give the paper's four ablations.

    Args:
        text_config (`dict` or `PreTrainedConfig`, default a BERT):
            The backbone's configuration; any encoder that `AutoModel` can build.
        use_moe, use_rnn (`bool`, default `True`):
            Whether a mixture of experts transforms the backbone's states; whether a bidirectional recurrent encoder is added
            after it.
        num_experts (`int`, default 4), num_experts_per_tok (`int`, default 2):
            Number of experts E, and of experts k per token, 1 to E. With k = 1 the weight is always 1 and the router is trained
            by a straight-through estimate only, which a warning reports.
        expert_intermediate_size (`int`, default 4 times the backbone's hidden size):
            Size of an expert's first hidden layer.
        expert_init (`"identity"` or `"uniform"`, default `"identity"` if the width is at least twice the hidden size):
            `"identity"`: each expert starts near E_i(x) = x, so initially the backbone's states pass through almost unchanged.
            `"uniform"`: as PyTorch's linear layers, like the authors' code.
        expert_dropout (`float`, default 0.1), rnn_dropout (0.3), classifier_dropout (0.1):
            Dropout inside each expert, before and between the recurrent layers, and on the backbone's states.
        rnn_type (`"lstm"` or `"gru"`, default `"lstm"`), rnn_num_layers (`int`, default 2):
            Type and number of layers of the recurrent encoder.
        router_aux_loss_coef, router_z_loss_coef (`float`, default 0):
            Weights of the load-balancing loss (Fedus et al. 2022, Eq. 4; uniform routing gives k) and of the router's
            z-loss (Zoph et al. 2022, Eq. 5). The paper has neither; they counteract router collapse.
        styles (`list[str]`, default none):
            Names of annotation styles ("phrases", "terms", ...). Each has an embedding that is added to the backbone's states;
            rows without a style have one of their own.
        label_smoothing (`float`, default 0):
            Share of the target that is spread over all labels, in [0, 1).
        keyphrase_threshold, keyphrase_temperature (`float`, default `None`):
            Minimum probability of B or I for a word to be part of a keyphrase in the keyphrase pipeline (with `None` the most
            likely label is used), and the temperature of its scores. Chosen on validation documents.
        keyphrase_ranker (`dict[str, float]`, default `None`), style_rankers (one for each of `styles`, default `None`):
            Weights with which the keyphrase pipeline ranks phrases by all evidence of a document, and which make a score the
            probability that the phrase is a keyphrase. Fitted by `keyphrase_tools.ranker_fit.fit_ranker`.
        keyphrase_word_classes (`dict[str, list[float]]`, default `None`):
            Bias and weights of a linear layer on the backbone's states that tells nouns, their modifiers and other words apart,
            for the ranker.
        id2label, label2id, num_labels:
            The labels; `O`, `B-KEY`, `I-KEY` by default.

    Raises:
        ValueError: for a value outside its range; the message states the value.

    Example:

    ```python
    >>> from modeling_seke import SekeConfig, SekeForTokenClassification
    >>> config = SekeConfig(text_config={"model_type": "bert", "hidden_size": 64, "num_attention_heads": 4}, num_experts=8)
    >>> model = SekeForTokenClassification(config)  # random weights; from_backbone() starts from pretrained ones
    ```"""

    model_type = "seke"
    how_to_start = "To start from an encoder, use SekeForTokenClassification.from_backbone(name_or_path)."
    sub_configs_defaults = {"text_config": SubConfigSpec(AutoConfig, model_type="bert")}
    keys_to_ignore_at_inference = ["router_logits", "expert_index", "hidden_states", "attentions"]

    text_config: dict | PreTrainedConfig | None = None
    use_moe: bool = True
    use_rnn: bool = True
    num_experts: int = 4
    num_experts_per_tok: int = 2
    expert_intermediate_size: int | None = None
    expert_init: str | None = None
    expert_dropout: float | int = 0.1
    rnn_type: str = "lstm"
    rnn_num_layers: int = 2
    rnn_dropout: float | int = 0.3
    classifier_dropout: float | int = 0.1
    router_aux_loss_coef: float | int = 0.0
    router_z_loss_coef: float | int = 0.0
    label_smoothing: float | int = 0.0
    styles: list[str] | None = None
    keyphrase_threshold: float | None = None
    keyphrase_temperature: float | int | None = None
    keyphrase_ranker: dict[str, float] | None = None
    style_rankers: dict[str, dict[str, float]] | None = None
    keyphrase_word_classes: dict[str, list[float]] | None = None

    def __post_init__(self, **kwargs):
        if self.id2label is None and self.label2id is None and "num_labels" not in kwargs:
            self.id2label = dict(enumerate(KEYPHRASE_LABELS))
        if self.id2label is None and self.label2id is not None:
            self.id2label = {i: label for label, i in self.label2id.items()}
        elif self.label2id is None and self.id2label is not None:
            self.label2id = {label: int(i) for i, label in self.id2label.items()}
        super().__post_init__(**kwargs)
        if self.expert_intermediate_size is None:
            self.expert_intermediate_size = 4 * self.hidden_size
        if self.expert_init is None:
            wide = self.expert_intermediate_size >= 2 * self.hidden_size
            self.expert_init = "identity" if wide else "uniform"
        self.check()

    @property
    def hidden_size(self) -> int:
        """Hidden size d of the backbone and of the head."""
        text_config: Any = self.text_config  # no longer a dictionary
        return text_config.hidden_size

    def check(self):
        """Raises a `ValueError` for a value out of range."""
        E, k, width, d = self.num_experts, self.num_experts_per_tok, self.expert_intermediate_size, self.hidden_size
        if not 1 <= k <= E:
            raise ValueError(
                f"num_experts_per_tok={k} must be from 1 to num_experts={E}. For no experts: use_moe=False."
            )
        if k == 1 and E > 1 and self.use_moe:
            warnings.warn(
                "num_experts_per_tok=1: the only weight is always 1, so the router is trained by a straight-through estimate. "
                "Use 2, or router_aux_loss_coef=0.01.",
                stacklevel=2,
            )
        require_one_of(self, {"rnn_type": RNN_TYPES, "expert_init": EXPERT_INITS})
        require_range(self, ["rnn_num_layers", "expert_intermediate_size"], 1)
        require_range(self, ["router_aux_loss_coef", "router_z_loss_coef"], 0)
        require_range(self, ["expert_dropout", "rnn_dropout", "classifier_dropout", "label_smoothing"], 0, 1)
        if self.expert_init == "identity" and width < 2 * d:
            raise ValueError(f"expert_init='identity' needs expert_intermediate_size={2 * d} or more, not {width}.")
        require_range(self, ["keyphrase_temperature"], 0, above=True)
        require_range(self, ["keyphrase_threshold"], 0, 1, above=True)
        if self.styles is not None and len(set(self.styles)) < len(self.styles):
            raise ValueError(f"styles={self.styles} has a name twice.")


SekeConfig.register_for_auto_class()
