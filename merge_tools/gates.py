"""The first values of gates: drawn, or computed from texts of each expert in one run of the base model, see `gate_modes`."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .checkpoints import Source
from .encoding import open_encoder
from .errors import MergeError
from .gate_modes import GATE_MODES, DrawnMode, TextMode, mean_state
from .layout import RoutedPart, Shape
from .recipe import ExpertRecipe, Recipe, gated_parts
from .texts import prompt_of, read_texts

MAX_SAMPLES = 256  # texts of an expert that its centroid is computed from
CARD_PROMPTS = 2  # prompts per expert in the model card
CARD_WIDTH = 80
PARALLEL = 1 - 1e-9  # cosine of two rows from which they are the same for a router
BATCH_TOKENS = 4096


@dataclass
class Gates:
    """`values`: name of a gate -> `(E, d)`, float32. `info`: how they were made, for the merge record."""

    values: dict[str, np.ndarray]
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Text:
    """A text of an expert, given by its index, with its token ids."""

    text: str
    expert: int
    negative: bool
    shown: bool  # in the model card
    tokens: list[int]


def make_gates(recipe: Recipe, base: Source) -> Gates:
    """The gates of a recipe."""
    parts, count = gated_parts(recipe, base.shape), len(recipe.experts)
    if isinstance(GATE_MODES[recipe.gate_mode], DrawnMode):
        values = {part.gate: drawn_gate(recipe, part, base.shape, range(count)) for part in parts}
        return Gates(values, {"mode": recipe.gate_mode})
    return gates_from_texts(recipe, base, parts, recipe.experts)


def drawn_gate(recipe: Recipe, part: RoutedPart, shape: Shape, experts: Iterable[int]) -> np.ndarray:
    """The rows of a gate that needs no texts, `(E, d)`, for experts given by the numbers that seed their rows.

    For other modes zeros of the same shape.
    """
    mode = GATE_MODES[recipe.gate_mode]
    mode = mode if isinstance(mode, DrawnMode) else DrawnMode("zeros")
    seed = [recipe.seed, part.layer, *part.part.encode()]
    return mode.rows(seed, part.input_size(shape), experts).astype(np.float32)


def texts_of(recipe: Recipe, expert: ExpertRecipe) -> tuple[list[str], list[str]]:
    """The texts of an expert, and the texts that do not belong to it."""
    if GATE_MODES[recipe.gate_mode].texts == "samples":
        return read_samples(Path(expert.samples or ""), recipe.seed), []
    return expert.positive_prompts, expert.negative_prompts


def read_samples(path: Path, seed: int) -> list[str]:
    """Reads a .txt or .jsonl file (`text`, `prompt`, or `term` and `context`); of more than MAX_SAMPLES texts a random sample.

    Raises a `MergeError` if the file is missing, not UTF-8, empty, or has rows without text.
    """
    if not path.is_file():
        raise MergeError(f"samples={str(path)!r} does not exist. Give a .jsonl or .txt file.")

    texts = read_texts(
        path, lambda row: row.get("text") or row.get("prompt") or prompt_of(row), "text, prompt, or term and context"
    )
    if not texts:
        raise MergeError(f"{path} has no samples. Add some, or use gate_mode: random.")
    if len(texts) > MAX_SAMPLES:
        indices = np.random.default_rng(seed).choice(len(texts), MAX_SAMPLES, replace=False)
        texts = [texts[i] for i in sorted(indices)]
    return texts


def gates_from_texts(recipe: Recipe, base: Source, parts: list[RoutedPart], experts: list[ExpertRecipe]) -> Gates:
    """Computes a row per expert from its texts, in one run of the base model that is streamed text by text."""
    mode = GATE_MODES[recipe.gate_mode]
    assert isinstance(mode, TextMode)
    groups = [texts_of(recipe, expert) for expert in experts]
    fields = [
        (text, expert, negative, not negative and number < CARD_PROMPTS)
        for expert, pair in enumerate(groups)
        for negative, group in zip((False, True), pair, strict=True)
        for number, text in enumerate(group)
    ]
    tokens = tokenize(base, [text for text, *_ in fields], like_mergekit=mode.like_mergekit)
    texts = [Text(*of_text, ids) for of_text, ids in zip(fields, tokens, strict=True)]
    statistics = {part.gate: mode.statistics(len(experts), part.input_size(base.shape)) for part in parts}
    # index of a text -> gate -> its vector at the router
    previews: dict[int, dict[str, np.ndarray]] = {i: {} for i, text in enumerate(texts) if text.shown}
    states = embeddings(base, parts, texts) if mode.state == "embedding" else run_base(base, parts, texts, mode.state)
    for part, kind, index, x in states:
        gate = statistics[part.gate]
        if kind == mode.state:
            gate.add(texts[index].expert, texts[index].negative, x)
        if kind != "layer" and index in previews:
            previews[index][part.gate] = gate.vector(x) if kind == mode.state else mean_state(x)
    values = {part.gate: statistics[part.gate].rows().astype(np.float32) for part in parts}
    info: dict[str, Any] = {"mode": mode.name, "model": base.origin, "experts": recipe.names}
    if previews:
        info["prompts"] = routing_preview(values, [(shorten(texts[i].text), inputs) for i, inputs in previews.items()])
    return Gates(values, info)


def find_equal_rows(gates: Gates, names: list[str]) -> str | None:
    """A warning if experts have parallel or zero gate rows computed from texts, so that a router cannot tell them apart."""
    if isinstance(GATE_MODES[gates.info["mode"]], DrawnMode):
        return None
    for gate, values in gates.values.items():
        rows = values.astype(np.float64)
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        if (zero := np.flatnonzero(norms[:, 0] == 0)).size:
            return f"the row of {names[zero[0]]} in {gate} is zero: its texts cancel out. Use other texts."
        cosines = (rows / norms) @ (rows / norms).T - np.eye(len(rows))
        first, other = np.unravel_index(int(cosines.argmax()), cosines.shape)
        if cosines[first, other] > PARALLEL:
            return (
                f"the rows of {names[min(first, other)]} and {names[max(first, other)]} in {gate} are equal or parallel: the "
                "router cannot tell these experts apart. Use different texts for them."
            )
    return None


def shorten(text: str) -> str:
    """The beginning of a text, at most CARD_WIDTH characters."""
    return text if len(text) <= CARD_WIDTH else text[: CARD_WIDTH - 1] + "…"


def routing_preview(gates: dict[str, np.ndarray], prompts: list[tuple[str, dict[str, np.ndarray]]]) -> list[dict]:
    """For each prompt, the share of routers that select each expert for its mean vector."""
    rows, count = [], len(next(iter(gates.values())))
    for text, vectors in prompts:
        selected = [int(np.argmax(gates[name] @ vector)) for name, vector in vectors.items()]
        rows.append({"prompt": text, "shares": [round(selected.count(e) / len(selected), 4) for e in range(count)]})
    return rows


def tokenize(base: Source, texts: list[str], *, like_mergekit: bool = False) -> list[list[int]]:
    """Token ids of each text with special tokens, or `like_mergekit` with the first one only.

    Raises a `MergeError` without a tokenizer, and for an unusable text.
    """
    encode, first = open_encoder(base)
    longest = base.config.get("max_position_embeddings") or 2048
    tokens = [encode(first + text, False) if like_mergekit else encode(text, True) for text in texts]
    for text, ids in zip(texts, tokens, strict=True):
        if not ids:
            raise MergeError("A prompt has no tokens. Remove it, or use a longer text.")
        if len(ids) > longest:
            raise MergeError(f"The prompt {shorten(text)!r} has {len(ids)} tokens; the limit is {longest}. Shorten it.")
    return tokens


States = Iterator[tuple[RoutedPart, str, int, Any]]  # part, kind of state, index of a text, its states `(T, d)`


def embeddings(base: Source, parts: list[RoutedPart], texts: list[Text]) -> States:
    """Yields the embeddings of each text, the same for every router."""
    import torch

    from .dense_run import embed

    for index, text in enumerate(texts):
        states = embed(base, torch.tensor([text.tokens]))[0]
        yield from ((part, "embedding", index, states) for part in parts)


def run_base(base: Source, parts: list[RoutedPart], texts: list[Text], state: str) -> States:
    """Runs the base model as far as needed. Yields the input of each router and, for the state "layer", that of its layer too."""
    from .dense_run import DenseRun

    run, start = DenseRun(base), 0
    by_module = {(part.layer, part.module.split(".", 3)[3]): [part] for part in parts}
    routers = set(by_module)
    if state == "layer":
        for part in parts:
            by_module.setdefault((part.layer, ""), []).append(part)
    for batch in in_batches([text.tokens for text in texts]):
        left = set(routers)
        for layer, module, x in run.module_inputs(batch):
            for part in by_module.get((layer, module), ()):
                for index, states in enumerate(x.split([len(ids) for ids in batch]), start):
                    yield part, "router" if module else "layer", index, states
            left.discard((layer, module))
            if not left:
                break
        start += len(batch)


def in_batches(tokens: list[list[int]]) -> Iterator[list[list[int]]]:
    """The texts in their order, as batches of at most BATCH_TOKENS tokens, or of one text."""
    batch: list[list[int]] = []
    for ids in tokens:
        if batch and sum(map(len, batch)) + len(ids) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(ids)
    yield batch
