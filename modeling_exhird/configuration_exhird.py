"""Configuration of ExHiRD: how a document is read, how phrases are generated, what is excluded."""

from dataclasses import fields

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig
from transformers.configuration_utils import SubConfigSpec

from .validation_exhird import (
    ValidatedConfigMixin,
    did_you_mean,
    require_at_least,
    require_fraction,
    require_one_of,
)

ENCODERS = ("bigru", "bilstm", "cnn", "transformer", "pretrained")
RELATIVE = ("shared", "separate", "none")
PHRASE_STARTS = ("auto", "last", "mean", "zeros")
TOKENS = ("end_phrase_token_id", "present_token_id", "absent_token_id", "title_end_token_id")


@strict
class ExHirdConfig(ValidatedConfigMixin, PreTrainedConfig):
    r"""Configuration of a keyphrase generator.

    Args:
        encoder_type (`"transformer"`, `"bigru"`, `"bilstm"`, `"cnn"` or `"pretrained"`, default `"transformer"`):
            What reads the document's words; `"pretrained"` is any encoder of `AutoModel`, whose sub-words are pooled to words
            (not in the papers; made by `from_backbone`).
        text_config (`dict` or `PreTrainedConfig`, default `None`):
            The pretrained encoder's configuration.
        freeze_backbone (`bool`, default `False`):
            Whether a pretrained encoder is left as it is.
        vocab_size (`int`, default 50004):
            V, the words of source and target, specials included.
        hidden_size (`int`, default 300):
            d, of memory and decoder.
        embedding_size (`int`, default `None`):
            Of words. `None` for 100 with recurrent encoders and a CNN, and d with a Transformer.
        num_hidden_layers (`int`, default 4), num_attention_heads (`int`, default 6), intermediate_size (`int`, default 2048):
            Of the encoder; the last two of a Transformer.
        relative_attention (`"shared"`, `"separate"`, `"none"` or `None`, default `"shared"`):
            How offsets enter a Transformer's attention (Eq. 9 as printed, as in Transformer-XL, as in TENER); `None` for
            absolute sinusoids.
        scale_attention (`bool`, default `True`):
            Whether scores are divided by the square root of a head's size.
        use_lead, use_window, use_top_k (`bool`, default `True`):
            The switches alpha, beta, gamma of the sparse masks. Without any, attention is full.
        lead_size (`int`, default 10), window_size (`int`, default 50), attention_top_k (`int`, default 10):
            g, w and k of the masks. The paper does not say; these are ours.
        segment_length (`int`, default `None`):
            Attention stays within segments of so many words.
        restart_positions (`bool`, default `False`):
            Whether absolute positions begin anew in each segment.
        attention_implementation (`"auto"`, `"dense"` or `"block"`, default `"auto"`):
            How sparse attention is computed; all give the same.
        phrase_start (`"auto"`, `"last"`, `"mean"` or `"zeros"`, default `"auto"`):
            What the phrase decoder starts from: the recurrent encoder's last states, the memory's mean through a linear layer,
            or zeros. `"auto"` is `"last"` for recurrent encoders and `"mean"` for others.
        dropout (`float`, default 0.0):
            In the encoder. The papers have none.
        exclusion_window (`int`, default 1):
            K_D: a phrase does not begin as one of so many before it. 0 for no exclusion, -1 for all before it.
        exclusive_loss_window (`int`, default 4), exclusive_loss_coef (`float`, default 0.0):
            K_L and lambda of the exclusive loss; ExHiRD-s has 1.0, and then `exclusion_window=0`.
        max_phrases (`int`, default 20), max_phrase_length (`int`, default 6):
            Of what is generated; the length counts the phrase's start and end, so that four words fit with their end.
        init_range (`float`, default 0.1), literal_init (`bool`, default `False`):
            All weights are drawn from U(-r, r); `literal_init` draws the gains of LayerNorms too, as the reference does.
        end_phrase_token_id, present_token_id, absent_token_id, title_end_token_id (`int`):
            The tokenizer's; `ExHirdConfig.for_tokenizer` finds them.
        decoder_start_token_id (`int`, default `bos_token_id`):
            What each phrase is read from, and what generated sequences begin with.

    Raises:
        ValueError: for a value outside its range; the message states the value and how to fix it.

    Example:

    ```python
    >>> from modeling_exhird import ExHirdConfig, ExHirdForKeyphraseGeneration, ExHirdTokenizer
    >>> tokenizer = ExHirdTokenizer.from_texts(texts)
    >>> model = ExHirdForKeyphraseGeneration(ExHirdConfig.for_tokenizer(tokenizer, encoder_type="bigru", num_hidden_layers=2))
    ```"""

    model_type = "exhird"
    how_to_start = "To start from an encoder, use ExHirdForKeyphraseGeneration.from_backbone(name_or_path, tokenizer)."
    sub_configs_defaults = {"text_config": SubConfigSpec(AutoConfig, model_type="bert")}
    # all but log_probs: what an evaluation keeps of each batch is then small
    keys_to_ignore_at_inference = [
        "logits",
        "generation_loss",
        "exclusive_loss",
        "past_key_values",
        "decoder_hidden_states",
        "cross_attentions",
        "encoder_last_hidden_state",
        "encoder_hidden_states",
        "encoder_attentions",
    ]

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
    scale_attention: bool = True
    use_lead: bool = True
    use_window: bool = True
    use_top_k: bool = True
    lead_size: int = 10
    window_size: int = 50
    attention_top_k: int = 10
    segment_length: int | None = None
    restart_positions: bool = False
    attention_implementation: str = "auto"
    phrase_start: str = "auto"
    dropout: float | int = 0.0
    exclusion_window: int = 1
    exclusive_loss_window: int = 4
    exclusive_loss_coef: float | int = 0.0
    max_phrases: int = 20
    max_phrase_length: int = 6
    init_range: float | int = 0.1
    literal_init: bool = False
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
        wanted = self.encoder_type == "pretrained" or self.text_config is not None
        super().__post_init__(**kwargs)
        if not wanted:
            self.text_config = None
        if self.decoder_start_token_id is None:
            self.decoder_start_token_id = self.bos_token_id
        self.check()

    @classmethod
    def for_tokenizer(cls, tokenizer, **options) -> "ExHirdConfig":
        """A configuration with the tokenizer's vocabulary.

        Raises:
            ValueError: for an option that no configuration has, or a value out of range.
        """
        check_options(options, "ExHirdConfig.for_tokenizer()")
        ids = {name: getattr(tokenizer, name) for name in (*TOKENS, "unk_token_id", "pad_token_id")}
        ids |= {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id")}
        return cls(vocab_size=len(tokenizer), **{**ids, **options})

    def get_text_config(self, decoder=None, encoder=None) -> "ExHirdConfig":
        """This one: words have its ids, also where a pretrained encoder's sub-words have others (the Trainer aligns these)."""
        return self

    @property
    def word_size(self) -> int:
        """Size of a word's embedding."""
        if self.embedding_size is not None:
            return self.embedding_size
        return self.hidden_size if self.encoder_type == "transformer" else 100

    @property
    def starts_from(self) -> str:
        """`phrase_start` with "auto" resolved."""
        if self.phrase_start != "auto":
            return self.phrase_start
        return "last" if self.encoder_type in ("bigru", "bilstm") else "mean"

    def check(self):
        """Raises a `ValueError` that names the value, the reason and the fix."""
        choices = {"encoder_type": ENCODERS, "relative_attention": (*RELATIVE, None), "phrase_start": PHRASE_STARTS}
        require_one_of(self, {**choices, "attention_implementation": ("auto", "dense", "block")})
        sizes = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"]
        require_at_least(self, 1, [*sizes, "embedding_size", "segment_length", "max_phrases"])
        require_at_least(self, 0, ["lead_size", "window_size", "attention_top_k", "init_range", "exclusive_loss_coef"])
        require_fraction(self, ["dropout"])
        if self.max_phrase_length < 3:
            raise ValueError(
                f"max_phrase_length={self.max_phrase_length} must be at least 3: it counts a phrase's start and end too."
            )
        for name in ("exclusion_window", "exclusive_loss_window"):
            if getattr(self, name) < -1:
                raise ValueError(
                    f"{name}={getattr(self, name)}: use -1 for all phrases before, 0 for none, or a number."
                )
        self._check_tokens()
        self._check_encoder()

    def _check_tokens(self):
        names = ("unk_token_id", "pad_token_id", "bos_token_id", "eos_token_id", *TOKENS)
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, int) or not 0 <= value < self.vocab_size:
                raise ValueError(
                    f"{name}={value!r} is not the id of a word: it must be a number from 0 to vocab_size - 1 = "
                    f"{self.vocab_size - 1}. ExHirdConfig.for_tokenizer(tokenizer) takes all ids from a tokenizer."
                )
            same = [other for other in names if other < name and getattr(self, other) == value]
            if same:
                raise ValueError(
                    f"{name}={value} is also {same[0]}: these are different words. Give each an id of its own."
                )
        if self.decoder_start_token_id != self.bos_token_id:
            raise ValueError(
                f"decoder_start_token_id={self.decoder_start_token_id} is not bos_token_id={self.bos_token_id}, which "
                "starts every phrase. Leave decoder_start_token_id out."
            )

    def _check_encoder(self):
        recurrent = self.encoder_type in ("bigru", "bilstm")
        if recurrent and self.hidden_size % 2:
            raise ValueError(
                f"hidden_size={self.hidden_size} is odd, and half of it reads either way. Use an even one."
            )
        if self.starts_from == "last" and not recurrent:
            raise ValueError(f"phrase_start='last' needs a recurrent encoder, not {self.encoder_type!r}. Use 'mean'.")
        if self.encoder_type != "pretrained":
            for name in ("text_config", "freeze_backbone"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name} is given with encoder_type={self.encoder_type!r}, which has no pretrained encoder. "
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
            what = "the size of a head" if self.relative_attention == "none" else "hidden_size"
            raise ValueError(
                f"{what} is {width}, and sinusoids need an even one. Change hidden_size={self.hidden_size}."
            )
        if self.word_size != self.hidden_size:
            raise ValueError(
                f"embedding_size={self.embedding_size} with a Transformer of hidden_size={self.hidden_size}: both are "
                "one. Leave embedding_size out."
            )
        if self.use_top_k and self.attention_top_k == 0:
            raise ValueError(
                "attention_top_k=0 chooses no key for any word. Use attention_top_k=1 or more, or use_top_k=False."
            )
        if self.use_lead and self.lead_size == 0 and not (self.use_window or self.use_top_k):
            raise ValueError("lead_size=0 without another mask lets no word see any. Use 1 or more, or use_lead=False.")
        if self.attention_implementation == "block" and self.use_top_k:
            raise ValueError(
                "attention_implementation='block' never makes the scores of all pairs, which the top-k mask needs. "
                "Use 'auto' or 'dense', or use_top_k=False."
            )


def check_options(options: dict, where: str):
    """Raises a `ValueError` for an option that no configuration has."""
    known = {field.name for field in fields(ExHirdConfig)}
    for name in options:
        if name not in known:
            raise ValueError(f"{where} got an unexpected argument {name!r}. {did_you_mean(name, known)}")


ExHirdConfig.register_for_auto_class()
