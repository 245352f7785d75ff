"""A tokenizer as the metadata of a GGUF file: byte-level BPE as llama.cpp's `gpt2`, SentencePiece BPE as its `llama`.

Both are read from the backend of transformers' tokenizer, so that the file has what transformers does, also if the folder has
a `tokenizer.model` only. What llama.cpp cannot reproduce is refused: it has no general normalizers or pre-tokenizers.
"""

import json
import logging
import re
from pathlib import Path
from typing import Any

from run_tools.errors import short_reason

from .errors import MergeError

SPACE = "▁"  # a space in SentencePiece's tokens
BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# The start and the end of the patterns by which byte-level tokenizers split a text.
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
)
# (pattern, whether a word that is a token is not split) -> its name in llama.cpp (llama-vocab.cpp of its b-series with gguf
# 0.19.0). None: either.
PATTERNS = {
    (WORDS + r"\p{N}{1,3}" + REST, True): "llama-bpe",
    (WORDS + r"\p{N}{1,3}" + REST, False): "dbrx",
    (WORDS + r"\p{N}" + REST, False): "qwen2",
    (CASED + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+", True): "tekken",
}


class UnsupportedError(ValueError):
    """A tokenizer that llama.cpp does not have. The message is the end of a sentence."""


def add_tokenizer(writer, folder: Path, rows: int):
    """Adds the tokenizer of a folder to a `gguf.GGUFWriter`.

    Args:
        rows: rows of the embeddings; those without a token are unused tokens.

    Raises:
        MergeError: if the folder has no tokenizer, or llama.cpp cannot represent it.
    """
    import gguf

    from run_tools.model_loading import open_tokenizer

    try:
        tokenizer = open_tokenizer(folder)
        content = json.loads(tokenizer.backend_tokenizer.to_str())
    except Exception as error:  # tokenizers raises a bare Exception for JSON that is not a tokenizer
        raise MergeError(
            f"{folder} has no tokenizer that can be opened ({short_reason(error)}). Save one there."
        ) from error
    try:
        fields = describe(content)
    except UnsupportedError as error:
        raise MergeError(
            f"The tokenizer in {folder} {error}, which is not supported. Convert the folder by llama.cpp's own converter: "
            "--converter PATH/convert_hf_to_gguf.py."
        ) from error
    tokens, types = list_tokens(content, rows, gguf.TokenType)
    writer.add_tokenizer_model(fields["model"])
    writer.add_tokenizer_pre(fields["pre"])
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if fields["model"] == "llama":
        writer.add_token_scores([fields["scores"].get(token, 0.0) for token in tokens])
        writer.add_add_space_prefix(fields["prefix"])
    logging.getLogger("gguf.vocab").setLevel(logging.ERROR)  # it warns about templates for pairs of texts
    special = gguf.SpecialVocab(folder, n_vocab=rows)
    special.merges = [" ".join(pair) for pair in pairs_of(content)] if fields["model"] == "gpt2" else []
    ids = tokenizer("a")["input_ids"]  # the defaults of llama.cpp depend on the kind of tokenizer
    special.add_special_token |= {
        "bos": tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id is not None and ids[-1] == tokenizer.eos_token_id,
    }
    special.add_to_gguf(writer, quiet=True)


def describe(content: dict[str, Any]) -> dict[str, Any]:
    """Model and pre-tokenizer of llama.cpp for a tokenizer.json; raises an `UnsupportedError` if it has none."""
    model = content["model"]
    if model["type"] != "BPE":
        raise UnsupportedError(f"is a {model['type']} model")
    if model.get("dropout"):
        raise UnsupportedError("drops merges at random")
    steps, normalizers = flatten(content.get("pre_tokenizer")), flatten(content.get("normalizer"))
    if any(step["type"] == "ByteLevel" for step in steps):
        if unknown := [step["type"] for step in normalizers if step["type"] != "NFC"]:
            raise UnsupportedError(f"normalises texts by {unknown[0]}")
        return {"model": "gpt2", "pre": pre_tokenizer(steps, bool(model.get("ignore_merges")))}
    if not model.get("byte_fallback"):
        raise UnsupportedError("is a BPE neither of bytes nor with byte fallback")
    prefix = False
    for step in normalizers:
        if step["type"] == "Prepend" and step["prepend"] == SPACE:
            prefix = True
        elif step["type"] != "Replace" or step["pattern"] != {"String": " "} or step["content"] != SPACE:
            raise UnsupportedError(f"normalises texts by {step['type']}")
    for step in steps:
        if step["type"] != "Metaspace" or step["replacement"] != SPACE:
            raise UnsupportedError(f"splits texts by {step['type']}")
        prefix |= step.get("prepend_scheme", "always") != "never"
    # llama.cpp merges the pair whose result has the largest score.
    ranks: dict[str, float] = {}
    for rank, pair in enumerate(pairs_of(content)):
        ranks.setdefault("".join(pair), -float(rank))
    return {"model": "llama", "pre": "default", "scores": ranks, "prefix": prefix}


def flatten(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as a list of its steps."""
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return [inner for item in step.get("pretokenizers") or step.get("normalizers") or [] for inner in flatten(item)]


def pre_tokenizer(steps: list[dict[str, Any]], ignore_merges: bool) -> str:
    """The name in llama.cpp of a byte-level pre-tokenizer; raises an `UnsupportedError` if it is not known."""
    *before, last = steps
    if last["type"] != "ByteLevel" or last.get("add_prefix_space"):
        raise UnsupportedError("adds a space in front of texts, or splits bytes further")
    splits = last.get("use_regex", True)
    if splits and not before and not ignore_merges:
        return "gpt-2"
    if splits and [step.get("individual_digits") for step in before] == [True] and not ignore_merges:
        return "smollm"
    pattern = before[0].get("pattern", {}).get("Regex") if len(before) == 1 and not splits else None
    isolated = before and before[0].get("behavior") == "Isolated" and not before[0].get("invert")
    if pattern is not None and isolated and (pattern, ignore_merges) in PATTERNS:
        return PATTERNS[pattern, ignore_merges]
    raise UnsupportedError("splits texts by a pattern that is not one of gpt-2, Llama 3, Qwen2, SmolLM or Tekken")


def pairs_of(content: dict[str, Any]) -> list[list[str]]:
    """The merges as pairs; older files have strings with a space."""
    merges = content["model"]["merges"]
    return [pair.split(" ", 1) if isinstance(pair, str) else list(pair) for pair in merges]


def list_tokens(content: dict[str, Any], rows: int, kinds) -> tuple[list[str], list[int]]:
    """The tokens by id and their kinds (`gguf.TokenType`); raises a `MergeError` for more ids than rows."""
    model, added = content["model"], {token["id"]: token for token in content.get("added_tokens", [])}
    texts = {i: text for text, i in model["vocab"].items()} | {i: token["content"] for i, token in added.items()}
    if max(texts) >= rows:
        raise MergeError(
            f"The tokenizer has ids up to {max(texts)}, but the embeddings have {rows} rows. Copy it again."
        )
    tokens, types = [], []
    for i in range(rows):
        text = texts.get(i)
        if text is None:
            text, kind = f"[PAD{i}]", kinds.UNUSED
        elif text == model.get("unk_token") and model.get("byte_fallback"):
            kind = kinds.UNKNOWN
        elif i in added:
            kind = kinds.CONTROL if added[i]["special"] else kinds.USER_DEFINED
            text = text if added[i]["special"] else text.replace(SPACE, " ")
        else:
            kind = kinds.BYTE if model.get("byte_fallback") and BYTE.fullmatch(text) else kinds.NORMAL
        tokens.append(text)
        types.append(int(kind))
    return tokens, types
