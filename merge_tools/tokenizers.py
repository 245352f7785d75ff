"""Tokenizers compared by their files: token by token, then by their merges and settings."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import MergeError, reason
from .sources import TOKENIZER_FILES

# What cuts a text into other tokens, what only puts special tokens around it, and what does neither.
CUTTING = ("normalizer", "pre_tokenizer")
AROUND = ("post_processor",)
HARMLESS = ("decoder", "truncation", "padding")


@dataclass(frozen=True)
class Difference:
    """How a tokenizer differs from the first: `kind` is "tokens", "merges" or "settings" where the same ids mean other
    texts or the same text gives other ids, "longer" for more tokens at the end, "around" for other special tokens around
    a text, "harmless"."""

    kind: str
    text: str


def tokenizer_file(folder: Path) -> Path | None:
    for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"):
        if (folder / name).is_file():
            return folder / name
    return None


def read_tokenizer(file: Path) -> dict[str, Any]:
    """A tokenizer's JSON.

    Raises:
        MergeError: where it is none, or its tokens and merges cannot be told.
    """
    try:
        content = json.loads(file.read_bytes())
        vocabulary(content)
        merges(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise MergeError(
            f"{file} is no tokenizer that can be read ({reason(error)}). Copy or download it again."
        ) from error
    return content


def compare(first: Path, other: Path) -> Difference | None:
    """Two tokenizer files: None where they do the same, else the first thing that differs.

    Raises:
        MergeError: for a file that cannot be read.
    """
    if contents(first) == contents(other):
        return None
    if first.suffix != ".json" or other.suffix != ".json" or first.name != other.name:
        what = "has other bytes" if first.name == other.name else f"is not comparable with {first.name}"
        return Difference("tokens", f"{other.name} {what}, and its tokens cannot be held side by side")
    one, two = read_tokenizer(first), read_tokenizer(other)
    a, b = vocabulary(one), vocabulary(two)
    if a != b:
        return compare_vocabularies(a, b)
    if merges(one) != merges(two) or (first.name == "vocab.json" and contents(first)[1:] != contents(other)[1:]):
        return Difference("merges", "the same tokens, joined by other merges")
    ours, theirs = model_settings(one), model_settings(two)
    changed = [f"model.{key}" for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]
    for kind, keys in (("settings", CUTTING), ("around", AROUND), ("harmless", HARMLESS)):
        changed += [key for key in keys if one.get(key) != two.get(key)]
        if changed:
            return Difference(kind, f"the same tokens, another {', '.join(changed)}")
    return None


def contents(file: Path) -> list[bytes]:
    """Of the file, and of the merges beside it that older tokenizers keep apart."""
    try:
        apart = file.with_name("merges.txt") if file.name == "vocab.json" else None
        return [path.read_bytes() for path in (file, apart) if path and path.is_file()]
    except OSError as error:
        raise MergeError(f"{file} cannot be read: {error.strerror or error}.") from error


def compare_vocabularies(a: dict[str, int], b: dict[str, int]) -> Difference:
    """Two vocabularies that are not equal: one goes on where the other ends, or ids mean other tokens."""
    shared = min(len(a), len(b))
    moved = {token for token, i in a.items() if i < shared and b.get(token) != i}
    moved |= {token for token, i in b.items() if i < shared and a.get(token) != i}
    if not moved and len(a) != len(b):
        more, fewer = (b, a) if len(b) > len(a) else (a, b)
        extra = sorted(more.keys() - fewer.keys(), key=more.__getitem__)
        return Difference(
            "longer", f"{len(extra):,} token{'s' * (len(extra) > 1)} at the end of one only: {shown(extra)}"
        )
    moved = moved or {token for token in {*a, *b} if a.get(token) != b.get(token)}
    token = min(moved, key=lambda t: (min(a.get(t, 1 << 60), b.get(t, 1 << 60)), t))
    ours, theirs = a.get(token, "none"), b.get(token, "none")
    return Difference("tokens", f"{len(moved):,} tokens differ, the first {token!r}: id {theirs} here, {ours} there")


def shown(tokens: list[str]) -> str:
    return ", ".join(map(repr, tokens[:3])) + (", ..." if len(tokens) > 3 else "")


def model_of(tokenizer: dict) -> dict[str, Any]:
    """The part with vocabulary and merges; a vocab.json is all vocabulary."""
    model = tokenizer.get("model")
    return model if isinstance(model, dict) else {"vocab": {**tokenizer}}


def vocabulary(tokenizer: dict) -> dict[str, int]:
    """token -> id, added tokens among them."""
    vocab, added = model_of(tokenizer)["vocab"], {}
    if isinstance(vocab, list):  # Unigram: [[token, score], ...]
        vocab = {token: i for i, (token, _) in enumerate(vocab)}
    if isinstance(tokenizer.get("added_tokens"), list):
        added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    tokens = {**vocab, **added}
    if not all(type(i) is int for i in tokens.values()):
        raise ValueError("tokens without ids")
    return tokens


def merges(tokenizer: dict) -> list:
    """As pairs (newer files hold lists, older ones strings with a space); of a Unigram its scores."""
    model = model_of(tokenizer)
    if isinstance(model["vocab"], list):
        return [score for _, score in model["vocab"]]
    pairs = model.get("merges")
    return (
        [tuple(p.split(" ", 1)) if isinstance(p, str) else tuple(p) for p in pairs] if isinstance(pairs, list) else []
    )


def model_settings(tokenizer: dict) -> dict[str, Any]:
    """What else decides how a word is cut, without what is off."""
    model = model_of(tokenizer)
    return {key: value for key, value in model.items() if key not in ("vocab", "merges") and value not in (None, False)}


def tokenizer_files(folder: Path) -> list[Path]:
    return [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
