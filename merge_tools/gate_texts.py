"""The texts that gates are computed from, and the states of models on them."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .checkpoints import Source
from .encoding import open_encoder
from .errors import MergeError
from .gate_modes import GATE_MODES, TextMode
from .layout import RoutedPart
from .recipe import ExpertRecipe, Recipe
from .texts import prompt_of, read_texts

CARD_PROMPTS = 2  # prompts per expert in the model card
CARD_WIDTH = 80
BATCH_TOKENS = 4096
BEGINNING = 128  # tokens of a long text that are used before other texts are


@dataclass(frozen=True)
class Text:
    """A text of an expert, given by its index, with its token ids, or the first of them."""

    text: str
    expert: int
    negative: bool
    shown: bool  # in the model card
    tokens: list[int]


def texts_of(recipe: Recipe, expert: ExpertRecipe) -> tuple[list[str], list[str]]:
    """The texts of an expert, and the texts that do not belong to it."""
    mode = GATE_MODES[recipe.gate_mode]
    if mode.texts == "samples":
        assert isinstance(mode, TextMode)
        texts = read_samples(Path(expert.samples or ""), recipe.seed, mode.max_samples)
        if mode.enough_tokens:  # the first are used: of a sorted file they would be of one kind
            texts = [texts[i] for i in np.random.default_rng(recipe.seed).permutation(len(texts))]
        return texts, []
    return expert.positive_prompts, expert.negative_prompts


def read_samples(path: Path, seed: int, limit: int) -> list[str]:
    """The different texts of a .txt or .jsonl file (`text`, `prompt`, or `term` and `context`); of more than `limit` a random sample.

    Raises a `MergeError` if the file is missing, not UTF-8, empty, or has rows without text.
    """
    if not path.is_file():
        raise MergeError(f"samples={str(path)!r} does not exist. Give a .jsonl or .txt file.")

    texts = read_texts(path, sample_of, "text, prompt, or term and context")
    if not texts:
        raise MergeError(f"{path} has no samples. Add some, or use gate_mode: random.")
    texts = list(dict.fromkeys(texts))  # a text that is held out must not be among the others too
    if len(texts) > limit:
        indices = np.random.default_rng(seed).choice(len(texts), limit, replace=False)
        texts = [texts[i] for i in sorted(indices)]
    return texts


def sample_of(row: dict[str, Any]) -> Any:
    """The text of a row: the first of `text`, `prompt`, and the prompt for `term` and `context` that it has."""
    for name in ("text", "prompt"):
        if row.get(name) is not None:
            return row[name]
    return prompt_of(row)


def encode_texts(recipe: Recipe, base: Source, groups: list[tuple[list[str], list[str]]]) -> list[Text]:
    """The texts of all experts with their tokens; `groups` holds those of each expert, and those that do not belong to it.

    A mode with `enough_tokens` gets so many tokens per dimension of each expert's texts, or `gate_tokens` in all, if there are as many,
    as `encode_beginnings` cuts them.

    Raises a `MergeError` without a tokenizer, and for an unusable text.
    """
    mode = GATE_MODES[recipe.gate_mode]
    assert isinstance(mode, TextMode)
    encode, first = open_encoder(base)
    longest = base.config.get("max_position_embeddings") or 2048
    texts = []
    for expert, pair in enumerate(groups):
        if mode.enough_tokens:
            enough = recipe.gate_tokens or mode.enough_tokens * base.shape.hidden_size
            beginnings = encode_beginnings(pair[0], lambda text: encode(text, True), enough, min(longest, BATCH_TOKENS))
            texts += [Text(text, expert, False, False, ids) for text, ids in zip(pair[0], beginnings, strict=False)]
            continue
        for negative, group in zip((False, True), pair, strict=True):
            for number, text in enumerate(group):
                ids = encode(first + text, False) if mode.like_mergekit else encode(text, True)
                check_tokens(text, ids, longest)
                texts.append(Text(text, expert, negative, not negative and number < CARD_PROMPTS, ids))
    return texts


def encode_beginnings(
    texts: Sequence[str], encode: Callable[[str], list[int]], enough: int, longest: int
) -> list[list[int]]:
    """The first tokens of each text until there are enough: at most BEGINNING of one, and more of each only if there are not enough texts,
    so that a few long texts do not outweigh the others. Raises a `MergeError` for a text without tokens.

    A model reads a text from its beginning, and what the first tokens do there reaches all that follow. Pieces from the middle would have
    other states, and put other tokens at the beginning.
    """
    encoded: list[list[int]] = []
    size, left = min(BEGINNING, longest), enough
    for text in texts:
        if left <= 0:
            break
        encoded.append(encode(text))
        check_tokens(text, encoded[-1], len(encoded[-1]))
        left -= min(len(encoded[-1]), size)
    if left > 0:
        size = bisect_left(range(longest), enough, size, key=lambda size: sum(min(len(ids), size) for ids in encoded))
    return [ids[:size] for ids in encoded]


def check_tokens(text: str, ids: list[int], longest: int) -> None:
    """Raises a `MergeError` for a text without tokens, or with more than fit."""
    if not ids:
        raise MergeError("A prompt has no tokens. Remove it, or use a longer text.")
    if len(ids) > longest:
        raise MergeError(f"The prompt {shorten(text)!r} has {len(ids)} tokens; the limit is {longest}. Shorten it.")


def shorten(text: str) -> str:
    """The beginning of a text, at most CARD_WIDTH characters."""
    return text if len(text) <= CARD_WIDTH else text[: CARD_WIDTH - 1] + "…"


States = Iterator[tuple[RoutedPart, str, int, Any]]  # part, kind of state, index of a text, its states `(T, d)`


def run_base(mode: TextMode, base: Source, parts: list[RoutedPart], texts: list[Text]) -> States:
    """Yields the states of the base that a mode asks for."""
    if mode.state == "embedding":
        return embeddings(base, parts, texts)
    return run_dense(base, parts, texts, mode.state)


def embeddings(base: Source, parts: list[RoutedPart], texts: list[Text]) -> States:
    """Yields the embeddings of each text, the same for every router."""
    import torch

    from .dense_run import embed

    for index, text in enumerate(texts):
        states = embed(base, torch.tensor([text.tokens]))[0]
        yield from ((part, "embedding", index, states) for part in parts)


def run_dense(
    source: Source, parts: list[RoutedPart], texts: list[Text], state: str, dtype: str | None = None
) -> States:
    """Runs a model on texts as far as needed, in its own dtype or another (safetensors' name). Yields the input of each router and,
    for the state "layer", that of its layer too.
    """
    from .dense_run import DenseRun

    run = DenseRun(source, dtype)
    by_module = {(part.layer, part.module.split(".", 3)[3]): [part] for part in parts}
    routers = set(by_module)
    if state == "layer":
        for part in parts:
            by_module.setdefault((part.layer, ""), []).append(part)
    for batch in in_batches(texts):
        left, tokens = set(routers), [text.tokens for _, text in batch]
        for layer, module, x in run.module_inputs(tokens):
            for part in by_module.get((layer, module), ()):
                for (index, _), states in zip(batch, x.split([len(ids) for ids in tokens]), strict=True):
                    yield part, "router" if module else "layer", index, states
            left.discard((layer, module))
            if not left:
                break


def in_batches(texts: list[Text]) -> Iterator[list[tuple[int, Text]]]:
    """The texts with their indices in their order, as batches of at most BATCH_TOKENS tokens, or of one text."""
    batch: list[tuple[int, Text]] = []
    size = 0
    for index, text in enumerate(texts):
        if batch and size + len(text.tokens) > BATCH_TOKENS:
            yield batch
            batch, size = [], 0
        batch.append((index, text))
        size += len(text.tokens)
    yield batch
