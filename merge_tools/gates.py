"""The first values of gates: drawn, or computed from texts of each expert in one run of the base model, see `gate_modes`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .anchors import anchored_gates
from .checkpoints import Source
from .gate_modes import GATE_MODES, AnchorMode, DrawnMode, RidgeMode, TextMode, mean_state
from .gate_statistics import FILE, read_statistics, ridge_gates, statistics_of
from .gate_texts import encode_texts, run_base, shorten, texts_of
from .layout import RoutedPart, Shape
from .mixture import Mixture
from .plan import Gates
from .recipe import ExpertRecipe, Recipe, gated_parts
from .shard_writer import Progress

PARALLEL = 1 - 1e-9  # cosine of two rows from which they are the same for a router


def make_gates(recipe: Recipe, base: Source, experts: list[Source], progress: Progress | None = None) -> Gates:
    """The gates of a recipe, whose sources these are."""
    parts = gated_parts(recipe, base.shape)
    if isinstance(GATE_MODES[recipe.gate_mode], RidgeMode):
        return ridge_gates(parts, statistics_of(recipe, base, parts, recipe.experts, experts, progress))
    numbers = range(len(experts))
    return separate_rows(recipe, lambda: base, parts, base.shape, recipe.experts, experts, numbers, progress)


def separate_rows(
    recipe: Recipe,
    open_base: Callable[[], Source],
    parts: list[RoutedPart],
    shape: Shape,
    experts: list[ExpertRecipe],
    sources: list[Source],
    numbers: Iterable[int],
    progress: Progress | None = None,
) -> Gates:
    """The rows of some experts in a mode whose rows do not depend on the other experts.

    Args:
        open_base: opens the base, if the mode needs it.
        sources, numbers: of the experts; a number seeds a random row.
    """
    mode = GATE_MODES[recipe.gate_mode]
    if isinstance(mode, DrawnMode):
        rows = {part.gate: drawn_gate(recipe, part, shape, numbers) for part in parts}
        return Gates(rows, {"mode": recipe.gate_mode})
    if isinstance(mode, AnchorMode):
        return anchored_gates(parts, open_base(), sources, [expert.name for expert in experts])
    return gates_from_texts(recipe, open_base(), parts, experts, progress or Progress())


def drawn_gate(recipe: Recipe, part: RoutedPart, shape: Shape, experts: Iterable[int]) -> np.ndarray:
    """The rows of a gate that needs no texts, `(E, d)`, for experts given by the numbers that seed their rows.

    For other modes zeros of the same shape.
    """
    mode = GATE_MODES[recipe.gate_mode]
    mode = mode if isinstance(mode, DrawnMode) else DrawnMode("zeros")
    seed = [recipe.seed, part.layer, *part.part.encode()]
    return mode.rows(seed, part.input_size(shape), experts).astype(np.float32)


def gates_from_texts(
    recipe: Recipe, base: Source, parts: list[RoutedPart], experts: list[ExpertRecipe], progress: Progress
) -> Gates:
    """Computes a row per expert from its texts, in one run of the base model that is streamed text by text."""
    mode = GATE_MODES[recipe.gate_mode]
    assert isinstance(mode, TextMode)
    texts = encode_texts(recipe, base, [texts_of(recipe, expert) for expert in experts])
    progress.start("gates", len(parts) * sum(len(text.tokens) for text in texts))
    statistics = {part.gate: mode.statistics(len(experts), part.input_size(base.shape)) for part in parts}
    # index of a text -> gate -> its vector at the router
    previews: dict[int, dict[str, np.ndarray]] = {i: {} for i, text in enumerate(texts) if text.shown}
    for part, kind, index, x in run_base(mode, base, parts, texts):
        gate = statistics[part.gate]
        if kind == mode.state:
            gate.add(texts[index].expert, texts[index].negative, x)
            progress.advance("gates", len(x))
        if kind != "layer" and index in previews:
            previews[index][part.gate] = gate.vector(x) if kind == mode.state else mean_state(x)
    values = {part.gate: statistics[part.gate].rows().astype(np.float32) for part in parts}
    info: dict[str, Any] = {"mode": mode.name, "model": base.origin, "experts": recipe.names}
    if previews:
        info["prompts"] = routing_preview(values, [(shorten(texts[i].text), inputs) for i, inputs in previews.items()])
    return Gates(values, info, warnings=list(find_equal_rows(values, recipe.names)))


def gates_with(recipe: Recipe, old: Mixture, source: Source) -> Gates:
    """The gates with a row for the last expert of the recipe, equal to those of a new compose."""
    new = recipe.experts[-1:]
    if not old.gated:
        return Gates()
    if isinstance(GATE_MODES[recipe.gate_mode], RidgeMode):
        known = read_statistics(old.folder, old.record["gates"])
        return ridge_gates(old.gated, [*known, *statistics_of(recipe, old.open_base(), old.gated, new, [source])])
    rows = separate_rows(recipe, old.open_base, old.gated, old.shape, new, [source], [old.next_row]).values
    return Gates({gate: np.concatenate([old.gates()[gate], row]) for gate, row in rows.items()})


def gates_without(old: Mixture, kept: Sequence[int]) -> Gates:
    """The gates of some of the experts: their rows; rows of ridge regression, unless they were tuned, as if there were no others."""
    rows, tuned = {gate: values[list(kept)] for gate, values in old.gates().items()}, "tuned" in old.record
    if isinstance(GATE_MODES[old.recipe.gate_mode], RidgeMode) and old.gated:
        if tuned and not (old.folder / FILE).exists():
            return Gates(rows, {"mode": old.recipe.gate_mode})
        known = read_statistics(old.folder, old.record["gates"])
        gates = ridge_gates(old.gated, [known[e] for e in kept])
        return replace(gates, values=rows) if tuned else gates
    return Gates(rows)


def find_equal_rows(gates: dict[str, np.ndarray], names: list[str]) -> Iterator[str]:
    """A warning if experts have parallel or zero rows in a gate, so that a router cannot tell them apart."""
    for gate, values in gates.items():
        rows = values.astype(np.float64)
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        if (zero := np.flatnonzero(norms[:, 0] == 0)).size:
            yield f"the row of {names[zero[0]]} in {gate} is zero: its texts cancel out. Use other texts."
            return
        cosines = (rows / norms) @ (rows / norms).T - np.eye(len(rows))
        first, other = np.unravel_index(int(cosines.argmax()), cosines.shape)
        if cosines[first, other] > PARALLEL:
            yield (
                f"the rows of {names[min(first, other)]} and {names[max(first, other)]} in {gate} are equal or parallel: the "
                "router cannot tell these experts apart. Use different texts for them."
            )
            return


def routing_preview(gates: dict[str, np.ndarray], prompts: list[tuple[str, dict[str, np.ndarray]]]) -> list[dict]:
    """For each prompt, the share of routers that select each expert for its mean vector."""
    rows, count = [], len(next(iter(gates.values())))
    for text, vectors in prompts:
        selected = [int(np.argmax(gates[name] @ vector)) for name, vector in vectors.items()]
        rows.append({"prompt": text, "shares": [round(selected.count(e) / len(selected), 4) for e in range(count)]})
    return rows
