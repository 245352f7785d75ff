"""Tokenizers compared by their files: token by token, then by their merges and settings."""

import json
from dataclasses import dataclass
from pathlib import Path

from .sources import TOKENIZER_FILES

SETTINGS = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding")


@dataclass(frozen=True)
class Difference:
    """How a tokenizer differs from the first: `kind` is "longer" (more tokens at the end), "tokens", "merges" or
    "settings", from harmless to not."""

    kind: str
    text: str


def tokenizer_file(folder: Path) -> Path | None:
    for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"):
        if (folder / name).is_file():
            return folder / name
    return None


def compare(first: Path, other: Path) -> Difference | None:
    """Two tokenizer files: None where they do the same, else the first thing that differs."""
    ours, theirs = first.read_bytes(), other.read_bytes()
    if ours == theirs:
        return None
    if first.suffix != ".json" or other.suffix != ".json" or first.name != other.name:
        return Difference("tokens", f"{other.name} is another file than {first.name}, and cannot be compared by tokens")
    one, two = json.loads(ours), json.loads(theirs)
    a, b = vocabulary(one), vocabulary(two)
    if a != b:
        shared_ids = min(len(a), len(b))
        moved = [token for token, i in a.items() if i < shared_ids and b.get(token) != i]
        moved += [token for token, i in b.items() if i < shared_ids and a.get(token) != i and token not in moved]
        if moved:
            token = min(moved, key=lambda t: min(a.get(t, 1 << 60), b.get(t, 1 << 60)))
            return Difference(
                "tokens",
                f"{len(moved):,} tokens differ, the first {token!r}: id {a.get(token, 'none')} and {b.get(token, 'none')}",
            )
        more, fewer = (b, a) if len(b) > len(a) else (a, b)
        extra = sorted(set(more) - set(fewer), key=more.get)
        return Difference("longer", f"{len(extra):,} tokens stand at the end of one only, from {extra[0]!r}")
    if merges(one) != merges(two):
        return Difference("merges", "the same tokens, joined by other merges")
    changed = [name for name in SETTINGS if one.get(name) != two.get(name)]
    if changed:
        return Difference("settings", f"the same tokens, another {', '.join(changed)}")
    return None


def vocabulary(tokenizer: dict) -> dict[str, int]:
    """token -> id, added tokens among them."""
    model = tokenizer.get("model", tokenizer)
    vocab = model.get("vocab", model)
    if isinstance(vocab, list):  # Unigram: [[token, score], ...]
        vocab = {token: i for i, (token, _) in enumerate(vocab)}
    added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
    return {**vocab, **added}


def merges(tokenizer: dict) -> list:
    """As pairs: newer files hold lists, older ones strings with a space."""
    pairs = tokenizer.get("model", {}).get("merges") or []
    return [tuple(pair.split(" ", 1)) if isinstance(pair, str) else tuple(pair) for pair in pairs]


def tokenizer_files(folder: Path) -> list[Path]:
    return [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
