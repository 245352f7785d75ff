"""Tokenizer files of a source: which there are, how they differ from another's, and which ones a mixture gets."""

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from run_tools.errors import join_names, short_reason

from .checkpoints import Source, read_json
from .errors import MergeError
from .places import TEMPLATES
from .recipe import Recipe

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", TEMPLATES,
)  # fmt: skip

CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
ENCODING_SETTINGS = (
    "add_bos_token", "add_eos_token", "add_prefix_space", "legacy", "additional_special_tokens", "extra_special_tokens",
    "chat_template",
)  # fmt: skip
GENERATION_CONFIG = "generation_config.json"
VERSION_FIELDS = ("transformers_version", "_from_model_config")  # of generation_config.json, without effect
ADDED_FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")


class DifferenceKind(Enum):
    """How two tokenizers differ."""

    TOKENS = "the same ids represent different tokens"
    MERGES = "the same tokens are merged in a different order"
    SETTINGS = "the same text is split differently"
    SUPERSET = "one has more tokens at the end"
    SPECIAL_TOKENS = "the special tokens around a text differ"
    DECODER_ONLY = "only decoding, truncation or padding differ"


# The keys of tokenizer.json by the kind of difference that they make, the most severe first.
KEYS = {
    DifferenceKind.SETTINGS: ("normalizer", "pre_tokenizer"),
    DifferenceKind.SPECIAL_TOKENS: ("post_processor",),
    DifferenceKind.DECODER_ONLY: ("decoder", "truncation", "padding"),
}


@dataclass(frozen=True)
class Difference:
    """The first difference between two tokenizers; `text` describes it for a message."""

    kind: DifferenceKind
    text: str


def tokenizer_file(folder: Path) -> Path | None:
    """The file of a folder that holds the vocabulary."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
    return next((folder / name for name in names if (folder / name).is_file()), None)


def source_tokenizer(source: Source) -> Path | None:
    """The vocabulary file of a source: an adapter's own, or that of its base."""
    return tokenizer_file(source.folder) or tokenizer_file(source.checkpoint.folder)


def carried_files(folder: Path, names=(*TOKENIZER_FILES, GENERATION_CONFIG)) -> dict[str, bytes]:
    """The content of some files of a folder by name, of those that exist; the tokenizer's class as both transformers know it."""
    paths = [path for name in names for path in (template_files(folder) if name == TEMPLATES else [folder / name])]
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths if path.is_file()}
    if CONFIG in files:
        files[CONFIG] = with_portable_class(files[CONFIG])
    return files


def template_files(folder: Path) -> list[Path]:
    """The chat templates besides the default one, such as those for tools or retrieval."""
    return sorted(path for path in (folder / TEMPLATES).glob("*.jinja") if path.is_file())


def with_portable_class(content: bytes) -> bytes:
    """A tokenizer_config.json with the class name that transformers 4 and 5 know, if transformers 5 has written its own."""
    try:
        settings = json.loads(content)
    except ValueError:
        return content
    if not isinstance(settings, dict) or settings.get("tokenizer_class") != "TokenizersBackend":
        return content
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    return (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()


def named_source(recipe: Recipe, experts: list[Source]) -> Source | None:
    """The expert that `tokenizer_source` names; None for the base and for `union`."""
    return next((expert for expert in experts if expert.name == recipe.tokenizer_source), None)


def tokenizer_of_mixture(recipe: Recipe, base: Source, experts: list[Source]) -> Source | None:
    """The source whose tokenizer a mixture gets: by `tokenizer_source`, else the base or the longest that extends it.

    None if no source has a tokenizer.
    """
    if recipe.tokenizer_source not in (None, "union"):
        return named_source(recipe, experts) or base
    best: tuple[Source, Path] | None = None
    for source in [base, *experts]:
        file = source_tokenizer(source)
        if file is not None and (best is None or extends(best[1], file)):
            best = source, file
    return best and best[0]


def mixture_tokenizer(recipe: Recipe, base: Source, experts: list[Source]) -> dict[str, bytes]:
    """The tokenizer's files of a mixture, and generation_config.json of the base or of the expert that provides both."""
    settings, best = named_source(recipe, experts) or base, tokenizer_of_mixture(recipe, base, experts)
    files: dict[str, bytes] = {}
    for folder in (settings.checkpoint.folder, settings.folder):
        files |= carried_files(folder, [GENERATION_CONFIG])
    file = source_tokenizer(best) if best else None
    return files | (carried_files(file.parent, TOKENIZER_FILES) if file else {})


def tokenizer_settings(source: Source) -> dict[str, Any]:
    """What decides how texts are encoded besides the vocabulary: special tokens, what is added, the chat template."""
    settings: dict[str, Any] = {}
    folder = source.folder if tokenizer_file(source.folder) else source.checkpoint.folder
    for name, keys in (
        ("special_tokens_map.json", SPECIAL_TOKENS),
        ("tokenizer_config.json", (*SPECIAL_TOKENS, *ENCODING_SETTINGS)),
        ("chat_template.json", ("chat_template",)),
    ):
        if (folder / name).is_file():
            content = read_json(folder / name)
            settings |= {key: content[key] for key in keys if content.get(key) is not None}
    if (folder / "chat_template.jinja").is_file():
        settings["chat_template"] = (folder / "chat_template.jinja").read_text(encoding="utf-8", errors="replace")
    for path in template_files(folder):
        settings[f"{TEMPLATES}/{path.name}"] = path.read_text(encoding="utf-8", errors="replace")
    return {
        key: value["content"] if isinstance(value, dict) and "content" in value else value
        for key, value in settings.items()
    }


def compare_settings(first: Source, other: Source) -> list[str]:
    """The names of the settings of two tokenizers that differ."""
    ours, theirs = tokenizer_settings(first), tokenizer_settings(other)
    return [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]


def compare_generation(first: Source, other: Source) -> list[str]:
    """The fields of generation_config.json that differ, as `generation_config (temperature)`; empty if none do."""

    def settings(source: Source) -> dict[str, Any]:
        paths = (folder / GENERATION_CONFIG for folder in (source.folder, source.checkpoint.folder))
        content = next((read_json(path) for path in paths if path.is_file()), {})
        return {key: value for key, value in content.items() if value is not None and key not in VERSION_FIELDS}

    ours, theirs = settings(first), settings(other)
    changed = [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]
    return [f"generation_config ({join_names(changed)})"] if changed else []


def extends(first: Path, other: Path) -> bool:
    """Whether the other tokenizer is the first one with more tokens at its end."""
    difference = compare(first, other)
    if difference is None or difference.kind is not DifferenceKind.SUPERSET:
        return False
    return len(vocabulary(read_tokenizer(other))) > len(vocabulary(read_tokenizer(first)))


def read_tokenizer(file: Path) -> dict[str, Any]:
    """Reads a tokenizer's JSON; raises a `MergeError` if it has no readable vocabulary and merges."""
    try:
        content = json.loads(file.read_bytes())
        vocabulary(content)
        merges(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        message = f"{file} is not a readable tokenizer ({short_reason(error)}). Copy or download it again."
        raise MergeError(message) from error
    return content


def compare(first: Path, other: Path) -> Difference | None:
    """Compares two tokenizer files: None if they are equivalent, otherwise the first difference.

    Raises a `MergeError` if a file cannot be read.
    """
    if read_bytes(first) == read_bytes(other):
        return None
    if first.suffix != ".json" or other.suffix != ".json" or first.name != other.name:
        text = f"{first.name} and {other.name} differ and cannot be compared token by token"
        return Difference(DifferenceKind.TOKENS, text)
    one, two = read_tokenizer(first), read_tokenizer(other)
    a, b = vocabulary(one), vocabulary(two)
    if a != b:
        return compare_vocabularies(a, b)
    if merges(one) != merges(two) or (first.name == "vocab.json" and read_bytes(first)[1:] != read_bytes(other)[1:]):
        return Difference(DifferenceKind.MERGES, "same tokens, different merges")
    ours, theirs = model_settings(one), model_settings(two)
    changed = [f"model.{key}" for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]
    flags = [key for key in ADDED_FLAGS if added_flags(one, key) != added_flags(two, key)]
    if flags:
        return Difference(DifferenceKind.SPECIAL_TOKENS, f"added tokens differ in {', '.join(flags)}")
    for kind, keys in KEYS.items():
        changed += [key for key in keys if one.get(key) != two.get(key)]
        if changed:
            return Difference(kind, f"same tokens, different {', '.join(changed)}")
    return None


def read_bytes(file: Path) -> list[bytes]:
    """The content of the file, and of merges.txt that older tokenizers store next to it."""
    try:
        merges_file = file.with_name("merges.txt") if file.name == "vocab.json" else None
        return [path.read_bytes() for path in (file, merges_file) if path and path.is_file()]
    except OSError as error:
        raise MergeError(f"{file} cannot be read: {error.strerror or error}.") from error


def compare_vocabularies(a: dict[str, int], b: dict[str, int]) -> Difference:
    """The difference of two unequal vocabularies: one has more tokens at the end, or ids represent other tokens."""
    shared = min(len(a), len(b))
    moved = {token for token, i in a.items() if i < shared and b.get(token) != i}
    moved |= {token for token, i in b.items() if i < shared and a.get(token) != i}
    if not moved and len(a) != len(b):
        longer, shorter = (b, a) if len(b) > len(a) else (a, b)
        extra = sorted(longer.keys() - shorter.keys(), key=longer.__getitem__)
        tokens = ", ".join(map(repr, extra[:3])) + (", ..." if len(extra) > 3 else "")
        text = f"only one has the last {len(extra):,} token{'s' * (len(extra) > 1)}: {tokens}"
        return Difference(DifferenceKind.SUPERSET, text)
    moved = moved or {token for token in {*a, *b} if a.get(token) != b.get(token)}
    token = min(moved, key=lambda t: (min(a.get(t, 1 << 60), b.get(t, 1 << 60)), t))
    ours, theirs = a.get(token, "none"), b.get(token, "none")
    text = f"{len(moved):,} tokens differ, the first is {token!r}: id {theirs} instead of {ours}"
    return Difference(DifferenceKind.TOKENS, text)


def model_of(tokenizer: dict) -> dict[str, Any]:
    """The part with vocabulary and merges; a vocab.json is all vocabulary."""
    model = tokenizer.get("model")
    return model if isinstance(model, dict) else {"vocab": {**tokenizer}}


def source_vocabulary(source: Source) -> dict[str, int] | None:
    """Token -> id; None if a source has no tokenizer whose tokens can be listed."""
    file = source_tokenizer(source)
    return vocabulary(read_tokenizer(file)) if file and file.suffix == ".json" else None


def vocabulary(tokenizer: dict) -> dict[str, int]:
    """Token -> id, with the added tokens."""
    vocab, added = model_of(tokenizer)["vocab"], tokenizer.get("added_tokens")
    if isinstance(vocab, list):  # Unigram: [[token, score], ...]
        vocab = {token: i for i, (token, _) in enumerate(vocab)}
    tokens = {**vocab, **{token["content"]: token["id"] for token in (added if isinstance(added, list) else [])}}
    if not all(type(i) is int for i in tokens.values()):
        raise ValueError("tokens without ids")
    return tokens


def added_flags(tokenizer: dict, flag: str) -> dict[str, bool]:
    """Added token -> whether it has a flag."""
    added = tokenizer.get("added_tokens")
    return {token["content"]: bool(token.get(flag)) for token in added} if isinstance(added, list) else {}


def merges(tokenizer: dict) -> list:
    """The merges as pairs (newer files hold lists, older ones strings with a space); the scores of a Unigram model."""
    model = model_of(tokenizer)
    if isinstance(model["vocab"], list):
        return [score for _, score in model["vocab"]]
    pairs = model["merges"] if isinstance(model.get("merges"), list) else []
    return [tuple(p.split(" ", 1)) if isinstance(p, str) else tuple(p) for p in pairs]


def model_settings(tokenizer: dict) -> dict[str, Any]:
    """The other settings that decide how a word is split, without those that are off."""
    model = model_of(tokenizer)
    return {key: value for key, value in model.items() if key not in ("vocab", "merges") and value not in (None, False)}
