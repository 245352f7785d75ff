# SPDX-License-Identifier: Apache-2.0
"""Configuration of ExHiRD: encoder, decoder, generation limits, exclusion."""

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .shared_exhird import ValidatedConfigMixin, require_one_of, require_range

CHOICES = {
    "encoder_type": ("bigru", "transformer"),
    "relative_attention": ("shared", "separate", "none", None),
}
TOKEN_FIELDS = (
    "unk_token_id", "pad_token_id", "bos_token_id", "eos_token_id",
    "end_phrase_token_id", "present_token_id", "absent_token_id", "title_end_token_id",
)  # fmt: skip


@strict
class ExhirdConfig(ValidatedConfigMixin, PreTrainedConfig):
    r"""Configuration of a keyphrase generator.

    Args:
        encoder_type (`"transformer"` or `"bigru"`, default `"transformer"`):
            The encoder of the document's words.
        vocab_size (`int`, default 50004):
            V, the number of words of sources and targets, including special tokens.
        hidden_size (`int`, default 300):
            d, the size of encoder and decoder states.
        embedding_size (`int`, default `None`):
            Size of word embeddings. `None` is d for a Transformer, and 100 for a BiGRU.
        num_hidden_layers (`int`, default 4), num_attention_heads (`int`, default 6), intermediate_size (`int`, default 2048):
            Sizes of the encoder; the last two apply to a Transformer.
        relative_attention (`"shared"`, `"separate"`, `"none"` or `None`, default `"shared"`):
            Relative positions in a Transformer's attention: Eq. 9 as printed, as in Transformer-XL, as in TENER. `None` for
            absolute sinusoidal positions.
        use_lead, use_window, use_top_k (`bool`, default `True`):
            The switches alpha, beta, gamma of the sparse masks. With all three off, attention is full.
        lead_size (`int`, default 10), window_size (`int`, default 50), attention_top_k (`int`, default 10):
            g, w and k of the masks. The paper does not give its numbers; these are ours.
        dropout (`float`, default 0.0):
            Dropout rate in the encoder. The papers have no dropout.
        exclusion_window (`int`, default 1):
            K_D: a phrase does not start with the first word of any of the K_D preceding phrases. 0 for no exclusion, -1 for
            all preceding phrases.
        exclusive_loss_window (`int`, default 4), exclusive_loss_coef (`float`, default 0.0):
            K_L and lambda of the exclusive loss. ExHiRD-s has 1.0, with `exclusion_window=0`.
        max_phrases (`int`, default 20), max_words_per_phrase (`int`, default 5):
            Limits of generation: phrases of a document, and words of a phrase, without its start and `;`.
        initializer_range (`float`, default 0.1):
            All weights are initialised from U(-r, r), but those of LayerNorms.
        end_phrase_token_id, present_token_id, absent_token_id, title_end_token_id (`int`):
            Ids of the tokenizer; `ExhirdConfig.from_tokenizer` sets them.

    Raises:
        ValueError: for a value out of range.

    Example:

    ```python
    >>> from modeling_exhird import ExhirdConfig, ExhirdForKeyphraseGeneration, ExhirdTokenizer
    >>> tokenizer = ExhirdTokenizer.from_texts(texts)
    >>> model = ExhirdForKeyphraseGeneration(ExhirdConfig.from_tokenizer(tokenizer, encoder_type="bigru", num_hidden_layers=2))
    ```"""

    model_type = "exhird"
    how_to_start = "For a new model, use ExhirdForKeyphraseGeneration(ExhirdConfig.from_tokenizer(tokenizer))."
    # all but log_probs, so that evaluation does not collect large tensors
    keys_to_ignore_at_inference = ["generation_loss", "exclusive_loss", "encoder_last_hidden_state"]

    encoder_type: str = "transformer"
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
    dropout: float | int = 0.0
    exclusion_window: int = 1
    exclusive_loss_window: int = 4
    exclusive_loss_coef: float | int = 0.0
    max_phrases: int = 20
    max_words_per_phrase: int = 5
    initializer_range: float | int = 0.1
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
        super().__post_init__(**kwargs)
        self.decoder_start_token_id = self.bos_token_id
        self.check()

    @classmethod
    def from_tokenizer(cls, tokenizer, **options) -> "ExhirdConfig":
        """A configuration with the vocabulary size and token ids of an `ExhirdTokenizer`; `options` are other fields."""
        if unknown := [name for name in options if not hasattr(cls, name)]:
            raise ValueError(f"ExhirdConfig.from_tokenizer() got an unexpected argument {unknown[0]!r}.")
        ids = {name: getattr(tokenizer, name) for name in TOKEN_FIELDS}
        return cls(vocab_size=len(tokenizer), **{**ids, **options})

    @property
    def word_size(self) -> int:
        """Size of word embeddings, with `None` resolved."""
        if self.embedding_size is not None:
            return self.embedding_size
        return self.hidden_size if self.encoder_type == "transformer" else 100

    def check(self):
        """Raises a `ValueError` for a value out of range."""
        require_one_of(self, CHOICES)
        sizes = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"]
        require_range(self, [*sizes, "embedding_size", "max_phrases", "max_words_per_phrase"], 1)
        require_range(self, ["lead_size", "window_size", "initializer_range", "exclusive_loss_coef"], 0)
        require_range(self, ["attention_top_k"], int(self.use_top_k))
        require_range(self, ["dropout"], 0, 1)
        require_range(self, ["exclusion_window", "exclusive_loss_window"], -1)
        for name in TOKEN_FIELDS:
            value = getattr(self, name)
            if not isinstance(value, int) or not 0 <= value < self.vocab_size:
                raise ValueError(f"{name}={value!r} is not the id of one of the vocab_size={self.vocab_size} words.")
        if self.hidden_size % 2:
            raise ValueError(f"hidden_size={self.hidden_size} is odd, but has two halves. Use an even number.")
        if self.encoder_type == "transformer":
            self._check_transformer()

    def _check_transformer(self):
        d, heads = self.hidden_size, self.num_attention_heads
        if d % heads:
            raise ValueError(f"hidden_size={d} is not divisible by num_attention_heads={heads}.")
        if self.relative_attention == "none" and d // heads % 2:
            raise ValueError(
                f"hidden_size={d} / num_attention_heads={heads} is odd, but sinusoids need an even number."
            )
        if self.word_size != d:
            raise ValueError(f"embedding_size={self.embedding_size} must equal hidden_size={d} of a Transformer.")
        if self.use_lead and self.lead_size == 0 and not (self.use_window or self.use_top_k):
            raise ValueError("lead_size=0 without another mask leaves no key visible. Use 1 or more.")


ExhirdConfig.register_for_auto_class()
