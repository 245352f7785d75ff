"""Configuration of the hypernetwork: any encoder, an LSTM that writes weights, an LSTM that reads by them."""

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig
from transformers.configuration_utils import SubConfigSpec

from .validation_hypernet import ValidatedConfigMixin, require_at_least, require_fraction, require_one_of

READOUTS = ("last", "mean")
LSTM_IMPLEMENTATIONS = ("auto", "by_text", "by_step", "loop")


@strict
class HypernetConfig(ValidatedConfigMixin, PreTrainedConfig):
    r"""Configuration of a hypernetwork model.

    Args:
        text_config (`dict` or `PreTrainedConfig`, default a BERT):
            The backbone's configuration; any encoder that `AutoModel` can build.
        freeze_backbone (`bool`, default `True`):
            Whether the backbone is left as it is and runs without gradients, as the paper says; its states may then be
            computed once and kept (`data_hypernet.StatesDataset`). `False` fine-tunes it, and lets adapters be attached.
        meta_size (`int`, default 16):
            Size N_z of the vector that a meta-text becomes; 16 or 32 in the paper. Parameters and memory of the
            generators are in proportion to it.
        meta_hidden_size (`int`, default 512):
            Hidden size of the LSTM that reads the meta-text; `None` for one of `meta_size` without a projection.
        normalize_meta (`bool`, default `True`):
            Whether z is brought to mean 0 and length 1. Not in the paper; without it z grows in training, and with it all
            weights that it writes, until gradients explode (benchmarks/LOG.md).
        meta_dropout (`float`, default 0.0):
            Dropout on z, so that a title's code is not learnt by heart. Not in the paper.
        base_weights (`bool`, default `False`):
            Whether what z writes is added to weights that all texts share; what it writes is 0 then in a new model. Not in
            the paper.
        hidden_size (`int`, default 512):
            Hidden size N_h of the LSTM that reads the main text.
        bidirectional (`bool`, default `False`):
            Whether a second set of generated weights reads the main text from its end.
        head_dropout (`float`, default 0.1):
            Dropout on what the main text's LSTM gives.
        readout (`"last"` or `"mean"`, default `"last"`):
            What a text is classified by: the state after its last token, or the mean of all.
        title_in_main (`bool`, default `False`):
            Whether the keyphrase pipeline reads the title again as the beginning of the main text, so that phrases are
            found in it too.
        constrained_decoding (`bool`, default `False`):
            Whether `decode` refuses an I that follows an O or stands first. All transitions are allowed in training.
        keyphrase_threshold (`float`, default `None`):
            Probability of B or I from which the keyphrase pipeline takes a word into a keyphrase; found on validation
            documents by `keyphrase_tools.evaluation.ExtractionMetrics`. `None` takes the likeliest path.
        keyphrase_temperature (`float`, default `None`):
            Temperature of the keyphrase pipeline's scores, found on validation documents by
            `keyphrase_tools.calibration.calibrate`. `None` leaves them as they are.
        lstm_implementation (`"auto"`, `"by_text"`, `"by_step"` or `"loop"`, default `"auto"`):
            How the main text's LSTM is computed; all give the same. `"auto"` is the fastest on the device.
        cls_token_id, sep_token_id (`int`):
            The tokenizer's; by them meta-text and main text are told apart where neither `meta_mask` nor
            `token_type_ids` do it. `from_backbone` finds them.
        has_word_starts (`bool`, default `False`):
            Whether the token head has a table of the tokens that begin words, for calls without `word_start_mask`. Set by
            `set_word_starts`, and so by `from_backbone`.
        id2label, label2id, num_labels:
            The labels.

    Raises:
        ValueError: for a value outside its range; the message states the value and how to fix it.

    Example:

    ```python
    >>> from modeling_hypernet import HypernetConfig, HypernetForTokenClassification
    >>> config = HypernetConfig(text_config={"model_type": "bert", "hidden_size": 64, "num_attention_heads": 4}, meta_size=16)
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
    meta_size: int = 16
    meta_hidden_size: int | None = 512
    normalize_meta: bool = True
    meta_dropout: float | int = 0.0
    base_weights: bool = False
    hidden_size: int = 512
    bidirectional: bool = False
    head_dropout: float | int = 0.1
    readout: str = "last"
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
        return self.text_config.hidden_size

    @property
    def output_size(self) -> int:
        """Size of what the main text's LSTM gives for each token: N_h, or 2 N_h where it reads both ways."""
        return self.hidden_size * (2 if self.bidirectional else 1)

    def check(self):
        """Raises a `ValueError` that names the value, the reason and the fix."""
        require_at_least(self, 1, ["meta_size", "meta_hidden_size", "hidden_size"])
        require_fraction(self, ["head_dropout", "meta_dropout"])
        require_one_of(self, {"readout": READOUTS, "lstm_implementation": LSTM_IMPLEMENTATIONS})
        if self.normalize_meta and self.meta_size == 1:
            raise ValueError("meta_size=1: normalize_meta would make it 0. Use 2 or more, or normalize_meta=False.")
        if self.keyphrase_temperature is not None and self.keyphrase_temperature <= 0:
            raise ValueError(
                f"keyphrase_temperature={self.keyphrase_temperature} must be above 0. Use 1 for no change."
            )
        if self.keyphrase_threshold is not None and not 0 < self.keyphrase_threshold < 1:
            raise ValueError(f"keyphrase_threshold={self.keyphrase_threshold} must be a probability between 0 and 1.")


HypernetConfig.register_for_auto_class()
