"""A tokenizer as the metadata of a GGUF file: byte-level BPE as llama.cpp's `gpt2`, SentencePiece BPE as its `llama`.

Both are read from the backend of transformers' tokenizer, so that the file has what transformers does. llama.cpp has no general
normalizers or pre-tokenizers: what it cannot reproduce is refused.
"""

import logging
import re
from pathlib import Path
from typing import Any

import gguf

from run_tools.errors import UserError

from .sources import read_tokenizer

SPACE = "▁"  # a space in SentencePiece's tokens
BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# the start and the end of the patterns by which byte-level tokenizers split a text
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
)
# (pattern, whether a word that is a token is not split) -> its name in llama.cpp (llama-vocab.cpp of its b-series with gguf 0.19.0)
PATTERNS = {
    (WORDS + r"\p{N}{1,3}" + REST, True): "llama-bpe",
    (WORDS + r"\p{N}{1,3}" + REST, False): "dbrx",
    (WORDS + r"\p{N}" + REST, False): "qwen2",
    (CASED + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+", True): "tekken",
}


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, rows: int) -> None:
    """Adds the tokenizer of a folder to a file whose embeddings have these rows; those without a token are unused tokens.

    Raises a `UserError` if the folder has no tokenizer, or llama.cpp cannot represent it.
    """
    tokenizer, content = read_tokenizer(folder)
    model = content["model"]
    if model["type"] != "BPE" or model.get("dropout"):
        raise unsupported(f"is a {model['type']} model" if model["type"] != "BPE" else "drops merges at random")
    normalizers, steps = (flatten(content.get(part)) for part in ("normalizer", "pre_tokenizer"))
    byte_level = any(step["type"] == "ByteLevel" for step in steps)
    tokens, types = list_tokens(model, {token["id"]: token for token in content["added_tokens"]}, rows)
    writer.add_tokenizer_model("gpt2" if byte_level else "llama")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    logging.getLogger("gguf.vocab").setLevel(logging.ERROR)  # it warns about templates for pairs of texts
    special = gguf.SpecialVocab(folder, n_vocab=rows)
    if byte_level:
        writer.add_tokenizer_pre(byte_level_name(normalizers, steps, bool(model.get("ignore_merges"))))
        special.merges = [" ".join(pair) for pair in model["merges"]]
    else:
        writer.add_tokenizer_pre("default")
        writer.add_add_space_prefix(adds_space(model, normalizers, steps))
        ranks: dict[str, float] = {}  # llama.cpp merges the pair whose result has the largest score
        for rank, pair in enumerate(model["merges"]):
            ranks.setdefault("".join(pair), -float(rank))
        writer.add_token_scores([ranks.get(token, 0.0) for token in tokens])
    ids = tokenizer("a")["input_ids"]  # the defaults of llama.cpp depend on the kind of tokenizer
    special.add_special_token |= {
        "bos": tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id is not None and ids[-1] == tokenizer.eos_token_id,
    }
    special.add_to_gguf(writer, quiet=True)


def unsupported(problem: str) -> UserError:
    """The error for a tokenizer that llama.cpp does not have."""
    return UserError(f"llama.cpp cannot represent the mixture's tokenizer: it {problem}.")


def flatten(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as a list of its steps."""
    if step is None or step["type"] != "Sequence":
        return [step] if step else []
    return [inner for item in step.get("pretokenizers") or step.get("normalizers") or [] for inner in flatten(item)]


def byte_level_name(normalizers: list[dict[str, Any]], steps: list[dict[str, Any]], ignore_merges: bool) -> str:
    """The name in llama.cpp of the pre-tokenizer of a byte-level BPE. Raises a `UserError` if it has none."""
    if unknown := [step["type"] for step in normalizers if step["type"] != "NFC"]:
        raise unsupported(f"normalises texts by {unknown[0]}")
    *before, last = steps
    if last["type"] != "ByteLevel" or last.get("add_prefix_space"):
        raise unsupported("adds a space in front of texts, or splits bytes further")
    if last.get("use_regex", True) and not ignore_merges:
        if not before:
            return "gpt-2"
        if [step.get("individual_digits") for step in before] == [True]:
            return "smollm"
    elif not last.get("use_regex", True) and [step.get("behavior") for step in before] == ["Isolated"]:
        pattern = before[0].get("pattern", {}).get("Regex")
        if not before[0].get("invert") and (pattern, ignore_merges) in PATTERNS:
            return PATTERNS[pattern, ignore_merges]
    raise unsupported("splits texts by a pattern that is not one of gpt-2, Llama 3, Qwen2, SmolLM or Tekken")


def adds_space(model: dict[str, Any], normalizers: list[dict[str, Any]], steps: list[dict[str, Any]]) -> bool:
    """Whether a SentencePiece BPE puts a space in front of a text. Raises a `UserError` for any other model."""
    if not model.get("byte_fallback"):
        raise unsupported("is a BPE neither of bytes nor with byte fallback")
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepend = {"type": "Prepend", "prepend": SPACE}
    if unknown := [step["type"] for step in normalizers if step not in (replace, prepend)]:
        raise unsupported(f"normalises texts by {unknown[0]}")
    if unknown := [step["type"] for step in steps if step["type"] != "Metaspace" or step["replacement"] != SPACE]:
        raise unsupported(f"splits texts by {unknown[0]}")
    return prepend in normalizers or any(step.get("prepend_scheme", "always") != "never" for step in steps)


def list_tokens(model: dict[str, Any], added: dict[int, dict], rows: int) -> tuple[list[str], list[int]]:
    """The tokens by id, and their kinds. Raises a `UserError` for more ids than rows."""
    texts = {i: text for text, i in model["vocab"].items()} | {i: token["content"] for i, token in added.items()}
    if max(texts) >= rows:
        raise UserError(f"The tokenizer has ids up to {max(texts)}, but the embeddings have {rows} rows.")
    kinds, fallback = gguf.TokenType, model.get("byte_fallback")
    tokens, types = [texts.get(i, f"[PAD{i}]") for i in range(rows)], [kinds.UNUSED] * rows
    for i, text in texts.items():
        if fallback and text == model.get("unk_token"):
            types[i] = kinds.UNKNOWN
        elif i not in added:
            types[i] = kinds.BYTE if fallback and BYTE.fullmatch(text) else kinds.NORMAL
        elif added[i]["special"]:
            types[i] = kinds.CONTROL
        else:
            types[i], tokens[i] = kinds.USER_DEFINED, text.replace(SPACE, " ")
    return tokens, [int(kind) for kind in types]
