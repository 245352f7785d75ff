"""Initial gates of routers: random, zero, or computed from texts of each expert.

A gate is a matrix `(E, d)` with one row per expert, from the base model's states on expert e's prompts, without padding:

- `hidden`, as in mergekit-moe: the layer's input at the last token, averaged over the prompts, minus that of the negative
  prompts, divided by its length.
- `cheap_embed`, as in mergekit-moe: the sum of the token embeddings, divided by its length, minus that of the negative prompts,
  divided by its length.
- `router_input`, `centroid`: the mean of the router's input, i.e. of the input of the routed module after the norm.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from run_tools.errors import short_repr

from .checkpoints import Source
from .encoding import open_encoder
from .errors import MergeError
from .layout import RoutedPart, Shape, gated_parts
from .recipe import ExpertRecipe, Recipe

LIKE_MERGEKIT = ("hidden", "cheap_embed")  # the same values as in mergekit-moe
GATE_STD = 0.02  # with N(0, 1), logits would be of the order of sqrt(d) and an untrained router overconfident
MAX_SAMPLES = 256  # texts of an expert that its centroid is computed from
CARD_PROMPTS = 2  # prompts per expert in the model card
CARD_WIDTH = 80
PARALLEL = 1 - 1e-9  # cosine of two rows from which they are the same for a router
BATCH_TOKENS = 4096


@dataclass
class Gates:
    """`values`: name of a gate -> `(E, d)`, float32. `info`: how they were made, for the merge record."""

    values: dict[str, np.ndarray]
    info: dict = field(default_factory=dict)


def make_gates(recipe: Recipe, base: Source) -> Gates:
    """The gates of a recipe."""
    shape = Shape.from_config(base.config)
    parts = gated_parts(recipe, shape)
    if recipe.gate_mode in ("zeros", "random", "none"):
        values = {part.gate: gate_without_texts(recipe, part, shape, range(len(recipe.experts))) for part in parts}
        return Gates(values, {"mode": recipe.gate_mode})
    groups = [prompts_for(recipe, expert) for expert in recipe.experts]
    return gates_from_texts(recipe, base, parts, groups)


def gate_without_texts(recipe: Recipe, part: RoutedPart, shape: Shape, experts: Iterable[int]) -> np.ndarray:
    """A gate of zeros or, with `gate_mode: random`, of rows from N(0, 0.02) for these experts.

    Rows are seeded by router and expert, so adding an expert does not change the other rows.
    """
    width, rows = part.input_size(shape), []
    for expert in experts:
        generator = np.random.default_rng([recipe.seed, part.layer, *part.part.encode(), expert])
        rows.append(generator.standard_normal(width) * GATE_STD if recipe.gate_mode == "random" else np.zeros(width))
    return np.stack(rows).astype(np.float32)


def prompts_for(recipe: Recipe, expert: ExpertRecipe) -> tuple[list[str], list[str]]:
    """The texts of an expert, and the texts that do not belong to it."""
    if recipe.gate_mode == "centroid":
        return read_samples(Path(expert.samples), recipe.seed), []
    return expert.positive_prompts, expert.negative_prompts


def read_samples(path: Path, seed: int) -> list[str]:
    """Reads a .txt file (one text per line) or a .jsonl file (`text`, `prompt`, or `term` and `context`).

    Lines end at line feeds only, because texts can contain other Unicode line separators. Of more than MAX_SAMPLES texts
    some are selected at random.

    Raises:
        MergeError: if the file is missing, not UTF-8, empty, or has rows without text.
    """
    if not path.is_file():
        raise MergeError(f"samples={str(path)!r} does not exist. Give a .jsonl or .txt file.")
    try:
        lines = path.read_bytes().decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise MergeError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}). Convert it to UTF-8.") from error
    if path.suffix == ".jsonl":
        from modeling_lexicon.data_lexicon import format_prompt  # imports torch, which takes seconds

    texts = []
    for number, line in enumerate((line.removesuffix("\r") for line in lines), 1):
        if not line.strip():
            continue
        if path.suffix == ".jsonl":
            try:
                row = json.loads(line)
                line = row.get("text") or row.get("prompt") or format_prompt(row["term"], row["context"])
            except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
                raise MergeError(f"{path}, line {number} needs text, prompt, or term and context.") from error
            if not isinstance(line, str):
                raise MergeError(f"{path}, line {number}: {short_repr(line)} is not a text. Put it in quotes.")
        texts.append(line)
    if not texts:
        raise MergeError(f"{path} has no samples. Add some, or use gate_mode: random.")
    if len(texts) > MAX_SAMPLES:
        indices = np.random.default_rng(seed).choice(len(texts), MAX_SAMPLES, replace=False)
        texts = [texts[i] for i in sorted(indices)]
    return texts


def gates_from_texts(
    recipe: Recipe, base: Source, parts: list[RoutedPart], groups: list[tuple[list[str], list[str]]]
) -> Gates:
    """Computes gates from one pair (positive texts, negative texts) per expert, in one run of the base model."""
    mode, texts = recipe.gate_mode, [text for pair in groups for texts in pair for text in texts]
    tokens = tokenize(base, texts, like_mergekit=mode in LIKE_MERGEKIT)
    if mode == "cheap_embed":
        vectors = inputs = sum_embeddings(base, parts, tokens)
    else:
        vectors, inputs = run_base(base, parts, tokens, mode == "hidden")
    # samples are weighted by their number of tokens, prompts equally
    weights = np.array([len(t) if mode == "centroid" else 1 for t in tokens], np.float64)
    bounds = np.cumsum([0, *(len(texts) for pair in groups for texts in pair)])
    spans = [slice(*span) for span in pairwise(bounds)]  # positive and negative texts in turn
    positive, negative = spans[::2], spans[1::2]

    def mean(gate: str, span: slice):
        if span.stop == span.start:
            return 0
        row = np.average(vectors[gate][span], axis=0, weights=weights[span])
        return with_length_1(row) if mode == "cheap_embed" else row

    values = {}
    for part in parts:
        rows = [mean(part.gate, a) - mean(part.gate, b) for a, b in zip(positive, negative, strict=True)]
        rows = map(with_length_1, rows) if mode in LIKE_MERGEKIT else rows
        values[part.gate] = np.stack(list(rows)).astype(np.float32)
    info = {"mode": mode, "model": base.origin, "experts": recipe.names}
    previews = [
        (shorten(text), {part.gate: inputs[part.gate][span.start + i] for part in parts})
        for (texts, _), span in zip(groups, positive, strict=True)
        for i, text in enumerate(texts[:CARD_PROMPTS])
    ]
    if previews:
        info["prompts"] = routing_preview(values, previews)
    return Gates(values, info)


def find_equal_rows(gates: Gates, names: list[str]) -> str | None:
    """A warning if experts have parallel or zero gate rows computed from texts, so that a router cannot tell them apart."""
    if gates.info.get("mode") in ("random", "zeros", "none"):
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


def with_length_1(row: np.ndarray) -> np.ndarray:
    """A vector divided by its length, or by 1e-8 if it is shorter, as in mergekit-moe."""
    return row / max(float(np.linalg.norm(row)), 1e-8)


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


def sum_embeddings(base: Source, parts: list[RoutedPart], tokens: list[list[int]]) -> dict[str, np.ndarray]:
    """The sum of each text's token embeddings `(texts, d)`, the same for every router."""
    import torch

    from .dense_run import embed

    sums = np.stack([embed(base, torch.tensor([ids]))[0].double().sum(0).numpy() for ids in tokens])
    return {part.gate: sums for part in parts}


def run_base(
    base: Source, parts: list[RoutedPart], tokens: list[list[int]], hidden: bool
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Runs the base model on all texts, as far as its states are needed.

    Returns two times name of the gate -> `(texts, d)`: the vectors from which gates are built, with `hidden` the layer's input at the
    last token; and the mean input of each router, which the vectors are otherwise.
    """
    from .dense_run import DenseRun

    run = DenseRun(base)
    means: dict[str, list[np.ndarray]] = {part.gate: [] for part in parts}
    last: dict[str, list[np.ndarray]] = {part.gate: [] for part in parts}
    needed = {(part.layer, part.module.split(".", 3)[3]): part.gate for part in parts}
    for batch in in_batches(tokens):
        left = set(needed)
        for layer, module, x in run.module_inputs(batch):
            texts = x.split([len(ids) for ids in batch]) if not module or (layer, module) in needed else ()
            if not module and hidden:
                rows = [states[-1].double().numpy() for states in texts]
                for part in parts:
                    if part.layer == layer:
                        last[part.gate] += rows
            if (layer, module) in needed:
                means[needed[layer, module]] += [states.double().mean(0).numpy() for states in texts]
                left.discard((layer, module))
            if not left:
                break
    inputs, states = ({gate: np.stack(rows) for gate, rows in found.items() if rows} for found in (means, last))
    return (states if hidden else inputs), inputs


def in_batches(tokens: list[list[int]]) -> Iterator[list[list[int]]]:
    """The texts in their order, as batches of at most BATCH_TOKENS tokens, or of one text."""
    batch: list[list[int]] = []
    for ids in tokens:
        if batch and sum(map(len, batch)) + len(ids) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(ids)
    yield batch
