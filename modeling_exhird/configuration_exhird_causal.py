# SPDX-License-Identifier: Apache-2.0
"""Configuration of keyphrase generation by a pretrained decoder: the prompt, the marks between phrases, exclusion, adapters."""

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig
from transformers.configuration_utils import SubConfigSpec

from .exclusion_exhird import token_id
from .validation_exhird import ValidatedConfigMixin, require_range

SEPARATOR, ABSENT = " ;", " |"
PROMPT = "Title: {title}\nText: {text}\nKeyphrases:"
TITLE_FIELD, TEXT_FIELD = "{title}", "{text}"


def backbone_field(name: str) -> property:
    """A field of the backbone's configuration that the outer one has under the same name."""

    def get(config):
        return getattr(config.text_config, name, None)

    def put(config, value):
        setattr(config.text_config, name, value)

    return property(get, put, doc=f"The backbone's `{name}`.")


@strict
class ExhirdCausalConfig(ValidatedConfigMixin, PreTrainedConfig):
    r"""Configuration of `ExhirdForCausalLM`.

    The model reads the prompt and writes present phrases, absent phrases, and EOS: ` graph cuts ; max flow | image segmentation`.

    Args:
        text_config (`dict` or `PreTrainedConfig`, default a Llama):
            The backbone's configuration: a decoder such as Llama, Mistral, Qwen2 or Qwen3. Its vocabulary size and special tokens
            can be read and set on this configuration too.
        separator_token_id (`int`, default `None`), absent_token_id (`int`, default `None`):
            The token that ends a phrase, `" ;"`, and the one that ends the present phrases, `" |"`. Both are single tokens that the
            backbone's vocabulary has, so that no row of the embeddings is new, and plain text, which decoders of other libraries
            print. `from_backbone` takes them from the tokenizer.
        prompt_template (`str`):
            The prompt, with `{title}` before `{text}`.
        max_source_length (`int`, default 512):
            Tokens of the prompt in generation; the end of a longer text is not read.
        max_phrases (`int`, default 20), max_tokens_per_phrase (`int`, default 16):
            Limits of generation: phrases of a document, and tokens of a phrase without its separator.
        exclusion_window (`int`, default 1):
            K: a phrase does not begin with the first token of any of the K preceding phrases. 0 for no exclusion, -1 for all
            preceding phrases.
        adapter_rank (`int`, default `None`):
            The rank of differences from the frozen weights of all linear layers in attention and MLPs, see `LowRankLinear`. `None`:
            the model has the backbone's layers, all of which are trained.

    Raises:
        ValueError: for a value out of range.
    """

    model_type = "exhird_causal"
    how_to_start = "To start from a decoder, use ExhirdForCausalLM.from_backbone(name_or_path)."
    sub_configs_defaults = {"text_config": SubConfigSpec(AutoConfig, model_type="llama")}
    keys_to_ignore_at_inference = ["cache", "past_key_values"]

    text_config: dict | PreTrainedConfig | None = None
    separator_token_id: int | None = None
    absent_token_id: int | None = None
    prompt_template: str = PROMPT
    max_source_length: int = 512
    max_phrases: int = 20
    max_tokens_per_phrase: int = 16
    exclusion_window: int = 1
    adapter_rank: int | None = None
    tie_word_embeddings: bool = False

    vocab_size = backbone_field("vocab_size")
    hidden_size = backbone_field("hidden_size")
    num_hidden_layers = backbone_field("num_hidden_layers")
    num_attention_heads = backbone_field("num_attention_heads")
    max_position_embeddings = backbone_field("max_position_embeddings")
    use_cache = backbone_field("use_cache")
    pad_token_id = backbone_field("pad_token_id")
    bos_token_id = backbone_field("bos_token_id")
    eos_token_id = backbone_field("eos_token_id")

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        # saving and loading read this field; the backbone's is the one that counts
        self.tie_word_embeddings = bool(self.text_config.tie_word_embeddings)
        self.check()

    def check(self):
        """Raises a `ValueError` for a value out of range."""
        require_range(self, ["max_source_length", "max_phrases", "max_tokens_per_phrase", "adapter_rank"], 1)
        if self.exclusion_window < -1:
            raise ValueError(
                f"exclusion_window={self.exclusion_window} must be at least -1. Use -1 for all preceding phrases, 0 for none."
            )
        parts = self.prompt_template.split(TITLE_FIELD)
        if len(parts) != 2 or TEXT_FIELD in parts[0] or parts[1].count(TEXT_FIELD) != 1:
            raise ValueError(
                f"prompt_template={self.prompt_template!r} must contain {TITLE_FIELD} once, and {TEXT_FIELD} once after it."
            )
        ids = (self.separator_token_id, self.absent_token_id)
        for name, value in zip(("separator_token_id", "absent_token_id"), ids, strict=True):
            if value is not None and not 0 <= value < self.text_config.vocab_size:
                raise ValueError(
                    f"{name}={value} must be between 0 and vocab_size - 1 = {self.text_config.vocab_size - 1}."
                )
        if ids[0] is not None and ids[0] == ids[1]:
            raise ValueError(f"separator_token_id and absent_token_id are both {ids[0]}. Use two tokens.")

    @property
    def marks(self) -> list[int]:
        """The ids of the tokens between phrases. Raises a `ValueError` if they are not set."""
        ids = {"separator_token_id": self.separator_token_id, "absent_token_id": self.absent_token_id}
        for name, value in ids.items():
            if value is None:
                raise ValueError(
                    f"{name}=None, so phrases cannot be told apart. Set model.config.{name}, or start from "
                    "ExhirdForCausalLM.from_backbone(name_or_path), which takes it from the tokenizer."
                )
        return [value for value in ids.values() if value is not None]

    @property
    def ends(self) -> list[int]:
        """The ids of the tokens after which a document ends."""
        eos = self.eos_token_id
        return list(eos) if isinstance(eos, list | tuple) else [] if eos is None else [eos]

    @staticmethod
    def marks_of(tokenizer) -> dict[str, int]:
        """The fields that are a tokenizer's ids. Raises a `ValueError` if `" ;"` or `" |"` is not a single token of it."""
        return {
            "separator_token_id": token_id(tokenizer, SEPARATOR),
            "absent_token_id": token_id(tokenizer, ABSENT),
        }


ExhirdCausalConfig.register_for_auto_class()
