"""Token ids of texts, as transformers gives them. Its start is saved where the tokenizers library alone gives the same ids."""

import contextlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from .checkpoints import Source, read_json
from .errors import MergeError

# The name of transformers' class that reads an unchanged tokenizer.json.
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")
# Fields of tokenizer_config.json without an effect on the ids of one text, besides the special tokens.
WITHOUT_EFFECT = {
    "tokenizer_class", "backend", "is_local", "local_files_only", "model_max_length", "clean_up_tokenization_spaces",
    "chat_template", "padding_side", "truncation_side", "model_input_names", "name_or_path", "model_specific_special_tokens",
}  # fmt: skip
Encode = Callable[[str, bool], list[int]]  # text, whether special tokens are added -> ids


def open_encoder(source: Source) -> tuple[Encode, str]:
    """A function that encodes a text, with or without special tokens, and the first special token (or an empty string).

    Raises a `MergeError` if the source has no tokenizer that can be opened.
    """
    for folder in (source.folder, source.checkpoint.folder):
        with contextlib.suppress(OSError, ValueError):
            stamp = tuple((path.name, path.stat().st_mtime_ns) for path in sorted(folder.iterdir()))
            return opened(folder, source.config.get("model_type"), stamp)
    raise MergeError(
        f"gate_mode needs a tokenizer, but {source.name} ({source.origin}) has none that can be opened. Set base_model to "
        "a model with a tokenizer, or use gate_mode: random."
    )


@lru_cache(maxsize=1)
def opened(folder: Path, model_type: str, stamp: tuple) -> tuple[Encode, str]:
    """The tokenizer of a folder; `stamp` changes with its files."""
    if plain := plain_tokenizer(folder, model_type):
        return plain
    from run_tools.model_loading import open_tokenizer

    tokenizer = open_tokenizer(folder)

    def encode(text: str, with_special: bool) -> list[int]:
        return tokenizer(text, add_special_tokens=with_special, verbose=False)["input_ids"]

    return encode, tokenizer.bos_token or ""


def plain_tokenizer(folder: Path, model_type: str) -> tuple[Encode, str] | None:
    """The unchanged tokenizer.json of a Llama, if nothing else in the folder changes what it gives."""
    file, settings_file = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if model_type != "llama" or not file.is_file() or not settings_file.is_file():
        return None
    settings, more_file = read_json(settings_file), folder / "special_tokens_map.json"
    same = all(
        content_of(settings.get(k)) == content_of(v)
        for k, v in (read_json(more_file) if more_file.exists() else {}).items()
    )
    if not same or (folder / "added_tokens.json").exists():
        return None
    if settings.get("tokenizer_class") not in PLAIN_CLASSES:
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    added = {token.content: (id, token) for id, token in tokenizer.get_added_tokens_decoder().items()}
    special = {name: content_of(settings[name]) for name in NAMED if settings.get(name) is not None}
    more = settings.get("additional_special_tokens") or settings.get("extra_special_tokens") or []
    named = [*special.values(), *map(content_of, more)] if isinstance(more, list) else [None]
    if any(name not in added or not added[name][1].special for name in named):
        return None
    listed = settings.get("added_tokens_decoder") or {}
    if any(not is_same_token(added.get(token.get("content")), id, token) for id, token in listed.items()):
        return None
    known = {*WITHOUT_EFFECT, *NAMED, "additional_special_tokens", "extra_special_tokens", "added_tokens_decoder"}
    if set(settings) - known or tokenizer.post_processor is None:
        return None
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(text: str, with_special: bool) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=with_special).ids

    return encode, special.get("bos_token") or ""


def content_of(token: Any) -> Any:
    """The text of a special token, which can be stored with its flags."""
    return token.get("content") if isinstance(token, dict) else token


def is_same_token(known: tuple[int, Any] | None, id: str, token: dict[str, Any]) -> bool:
    """Whether tokenizer.json has an added token of tokenizer_config.json with the same id and flags."""
    if known is None or str(known[0]) != id:
        return False
    flags = ("special", "normalized", "lstrip", "rstrip", "single_word")
    return all(getattr(known[1], flag) == token.get(flag, False) for flag in flags)
