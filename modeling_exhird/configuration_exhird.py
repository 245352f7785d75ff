# SPDX-License-Identifier: Apache-2.0
"""Configuration of ExHiRD: encoder, decoder, generation limits, exclusion."""

from dataclasses import fields

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig
from transformers.configuration_utils import SubConfigSpec

from .validation_exhird import ValidatedConfigMixin, did_you_mean, require_one_of, require_range

ENCODER_TYPES = ("bigru", "bilstm", "cnn", "transformer", "pretrained")
RELATIVE_ATTENTIONS = ("shared", "separate", "none", None)
DECODER_INITS = ("auto", "last", "mean", "zeros")
TOKEN_FIELDS = ("end_phrase_token_id", "present_token_id", "absent_token_id", "title_end_token_id")


@strict
class ExhirdConfig(ValidatedConfigMixin, PreTrainedConfig):
    r"""Configuration of a keyphrase generator.

    Args:
        encoder_type (`"transformer"`, `"bigru"`, `"bilstm"`, `"cnn"` or `"pretrained"`, default `"transformer"`):
            The encoder of the document's words. `"pretrained"` is any encoder that `AutoModel` opens, with sub-words averaged
            over words; build it with `from_backbone`. It is not in the papers.
        text_config (`dict` or `PreTrainedConfig`, default `None`):
            The pretrained encoder's configuration.
        freeze_backbone (`bool`, default `False`):
            Whether a pretrained encoder is kept frozen.
        vocab_size (`int`, default 50004):
            V, the number of words of sources and targets, including special tokens.
        hidden_size (`int`, default 300):
            d, the size of encoder and decoder states.
        embedding_size (`int`, default `None`):
            Size of word embeddings. `None` is d for a Transformer, and 100 for other encoders.
        num_hidden_layers (`int`, default 4), num_attention_heads (`int`, default 6), intermediate_size (`int`, default 2048):
            Sizes of the encoder; the last two apply to a Transformer.
        relative_attention (`"shared"`, `"separate"`, `"none"` or `None`, default `"shared"`):
            Relative positions in a Transformer's attention: Eq. 9 as printed, as in Transformer-XL, as in TENER. `None` for
            absolute sinusoidal positions.
        use_lead, use_window, use_top_k (`bool`, default `True`):
            The switches alpha, beta, gamma of the sparse masks. With all three off, attention is full.
        lead_size (`int`, default 10), window_size (`int`, default 50), attention_top_k (`int`, default 10):
            g, w and k of the masks. The paper does not give its numbers; these are ours.
        segment_length (`int`, default `None`):
            Number of words of a segment, if attention is limited to segments.
        sparse_attention_implementation (`"auto"`, `"dense"` or `"block"`, default `"auto"`):
            How sparse attention is computed. The results are the same.
        decoder_init (`"auto"`, `"last"`, `"mean"` or `"zeros"`, default `"auto"`):
            The initial state of the phrase decoder: the final states of a recurrent encoder, the mean of the encoder's states
            through a linear layer, or zeros. `"auto"` is `"last"` for recurrent encoders and `"mean"` for others.
        dropout (`float`, default 0.0):
            Dropout rate in the encoder. The papers have no dropout.
        exclusion_window (`int`, default 1):
            K_D: a phrase does not start with the first word of any of the K_D preceding phrases. 0 for no exclusion, -1 for
            all preceding phrases.
        exclusive_loss_window (`int`, default 4), exclusive_loss_coef (`float`, default 0.0):
            K_L and lambda of the exclusive loss. ExHiRD-s has 1.0, with `exclusion_window=0`.
        max_phrases (`int`, default 20), max_words_per_phrase (`int`, default 5):
            Limits of generation: phrases of a document, and words of a phrase, without its start and `;`.
        initializer_range (`float`, default 0.1), init_layer_norm (`bool`, default `False`):
            All weights are initialised from U(-r, r). With `init_layer_norm` the weights of LayerNorms are, too, as in the
            reference.
        end_phrase_token_id, present_token_id, absent_token_id, title_end_token_id (`int`):
            Ids of the tokenizer; `ExhirdConfig.from_tokenizer` sets them.
        decoder_start_token_id (`int`, default `bos_token_id`):
            The first token of generated sequences, and the input of each phrase's first step.

    Raises:
        ValueError: for a value out of range.

    Example:

    ```python
    >>> from modeling_exhird import ExhirdConfig, ExhirdForKeyphraseGeneration, ExhirdTokenizer
    >>> tokenizer = ExhirdTokenizer.from_texts(texts)
    >>> model = ExhirdForKeyphraseGeneration(ExhirdConfig.from_tokenizer(tokenizer, encoder_type="bigru", num_hidden_layers=2))
    ```"""

    model_type = "exhird"
    how_to_start = "To start from an encoder, use ExhirdForKeyphraseGeneration.from_backbone(name_or_path, tokenizer)."
    sub_configs_defaults = {"text_config": SubConfigSpec(AutoConfig, model_type="bert")}
    # all but log_probs, so that evaluation does not collect large tensors
    keys_to_ignore_at_inference = [
        "logits", "generation_loss", "exclusive_loss", "cache", "past_key_values", "decoder_hidden_states", "cross_attentions",
        "encoder_last_hidden_state", "encoder_hidden_states", "encoder_attentions",
    ]  # fmt: skip

    encoder_type: str = "transformer"
    text_config: dict | PreTrainedConfig | None = None
    freeze_backbone: bool = False
    vocab_size: int = 50004
    hidden_size: int = 300
    embedding_size: int | None = None
    num_hidden_layers: int = 4
    num_attention_heads: int = 6
    intermediate_size: int = 2048
    relative_attention: str | None = "shared"
    use_lead: bool = True
    use_window: bool = True
    use_top_k: bool = True
    lead_size: int = 10
    window_size: int = 50
    attention_top_k: int = 10
    segment_length: int | None = None
    sparse_attention_implementation: str = "auto"
    decoder_init: str = "auto"
    dropout: float | int = 0.0
    exclusion_window: int = 1
    exclusive_loss_window: int = 4
    exclusive_loss_coef: float | int = 0.0
    max_phrases: int = 20
    max_words_per_phrase: int = 5
    initializer_range: float | int = 0.1
    init_layer_norm: bool = False
    unk_token_id: int | None = 0
    pad_token_id: int | None = 1
    bos_token_id: int | None = 2
    eos_token_id: int | list[int] | None = 3
    decoder_start_token_id: int | None = None
    is_encoder_decoder: bool = True
    end_phrase_token_id: int = 4
    present_token_id: int = 5
    absent_token_id: int = 6
    title_end_token_id: int = 7

    def __post_init__(self, **kwargs):
        has_backbone = self.encoder_type == "pretrained" or self.text_config is not None
        super().__post_init__(**kwargs)
        if not has_backbone:
            self.text_config = None  # transformers sets a default one
        if self.decoder_start_token_id is None:
            self.decoder_start_token_id = self.bos_token_id
        self.check()

    @classmethod
    def from_tokenizer(cls, tokenizer, **options) -> "ExhirdConfig":
        """A configuration with the vocabulary size and token ids of a tokenizer.

        Args:
            tokenizer: an `ExhirdTokenizer`.
            options: other fields.

        Raises:
            ValueError: for an unknown field, or a value out of range.
        """
        known = {field.name for field in fields(cls)}
        for name in sorted(options.keys() - known):
            hint = did_you_mean(name, known)
            raise ValueError(f"ExhirdConfig.from_tokenizer() got an unexpected argument {name!r}. {hint}")
        ids = {name: getattr(tokenizer, name) for name in (*TOKEN_FIELDS, "unk_token_id", "pad_token_id")}
        ids |= {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id")}
        return cls(vocab_size=len(tokenizer), **{**ids, **options})

    def get_text_config(self, decoder=None, encoder=None) -> "ExhirdConfig":
        """This configuration, whose token ids the Trainer aligns with the tokenizer, and not the pretrained encoder's."""
        return self

    @property
    def word_size(self) -> int:
        """Size of word embeddings, with `None` resolved."""
        if self.embedding_size is not None:
            return self.embedding_size
        return self.hidden_size if self.encoder_type == "transformer" else 100

    @property
    def resolved_decoder_init(self) -> str:
        """`decoder_init` with "auto" resolved."""
        if self.decoder_init != "auto":
            return self.decoder_init
        return "last" if self.encoder_type in ("bigru", "bilstm") else "mean"

    def check(self):
        """Raises a `ValueError` for a value out of range."""
        choices = {"encoder_type": ENCODER_TYPES, "decoder_init": DECODER_INITS}
        choices["relative_attention"] = RELATIVE_ATTENTIONS
        require_one_of(self, {**choices, "sparse_attention_implementation": ("auto", "dense", "block")})
        sizes = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"]
        require_range(self, [*sizes, "embedding_size", "segment_length", "max_phrases", "max_words_per_phrase"], 1)
        masks = ["lead_size", "window_size", "attention_top_k"]
        require_range(self, [*masks, "initializer_range", "exclusive_loss_coef"], 0)
        require_range(self, ["dropout"], 0, 1)
        for name in ("exclusion_window", "exclusive_loss_window"):
            if getattr(self, name) < -1:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be at least -1. Use -1 for all preceding phrases, 0 for none."
                )
        self._check_tokens()
        self._check_encoder()

    def _check_tokens(self):
        names = ("unk_token_id", "pad_token_id", "bos_token_id", "eos_token_id", *TOKEN_FIELDS)
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, int) or not 0 <= value < self.vocab_size:
                raise ValueError(
                    f"{name}={value!r} must be an integer between 0 and vocab_size - 1 = {self.vocab_size - 1}. "
                    "ExhirdConfig.from_tokenizer(tokenizer) takes all ids from a tokenizer."
                )
            duplicates = [other for other in names if other < name and getattr(self, other) == value]
            if duplicates:
                raise ValueError(f"{name}={value} is also {duplicates[0]}. Give each token its own id.")
        if self.decoder_start_token_id != self.bos_token_id:
            raise ValueError(
                f"decoder_start_token_id={self.decoder_start_token_id} differs from bos_token_id={self.bos_token_id}. "
                "Leave decoder_start_token_id out."
            )

    def _check_encoder(self):
        recurrent = self.encoder_type in ("bigru", "bilstm")
        if recurrent and self.hidden_size % 2:
            raise ValueError(
                f"hidden_size={self.hidden_size} is odd, but each direction has half of it. Use an even number."
            )
        if self.resolved_decoder_init == "last" and not recurrent:
            raise ValueError(f"decoder_init='last' needs a recurrent encoder, not {self.encoder_type!r}. Use 'mean'.")
        if self.encoder_type != "pretrained":
            for name in ("text_config", "freeze_backbone"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name} is set, but encoder_type={self.encoder_type!r} has no pretrained encoder. "
                        f"Leave {name} out, or use encoder_type='pretrained'."
                    )
        if self.encoder_type == "transformer":
            self._check_transformer()

    def _check_transformer(self):
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not divisible by num_attention_heads={self.num_attention_heads}. "
                "Use a multiple of it."
            )
        width = self.hidden_size // (self.num_attention_heads if self.relative_attention == "none" else 1)
        if width % 2:
            name = "the head size" if self.relative_attention == "none" else "hidden_size"
            raise ValueError(
                f"{name} is {width}, but sinusoids need an even number. Change hidden_size={self.hidden_size}."
            )
        if self.word_size != self.hidden_size:
            raise ValueError(
                f"embedding_size={self.embedding_size} must equal hidden_size={self.hidden_size} of a Transformer. "
                "Leave embedding_size out."
            )
        if self.use_top_k and self.attention_top_k == 0:
            raise ValueError("attention_top_k=0 selects no keys. Use attention_top_k=1 or more, or use_top_k=False.")
        if self.use_lead and self.lead_size == 0 and not (self.use_window or self.use_top_k):
            raise ValueError(
                "lead_size=0 without another mask leaves no key visible. Use 1 or more, or use_lead=False."
            )
        if self.sparse_attention_implementation == "block" and self.use_top_k:
            raise ValueError(
                "sparse_attention_implementation='block' does not support the top-k mask (use_top_k=True). "
                "Use 'auto' or 'dense', or use_top_k=False."
            )


ExhirdConfig.register_for_auto_class()
