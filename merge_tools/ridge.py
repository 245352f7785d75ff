"""Gates in closed form: ridge regression of each token's expert on the inputs of the router, as in DUME (arXiv 2603.29765).

For the router inputs X (n, d) of the samples of all E experts, each expert weighted equally, and their one-hot experts Y (n, E):

    W = (X'X + lambda I)^-1 X'Y,   gate = s W'

X'X and X'Y are sums over experts, so each expert keeps its own: experts are added and removed without the texts of the others. lambda
and the scale s come from held-out tokens: lambda by the squared error, s by the likelihood of softmax(s W'x).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from run_tools.errors import UserError

RIDGES = tuple(10.0**power for power in range(-5, 1))  # of lambda, relative to the mean diagonal of X'X
MAX_SCALE = 1e4
NEWTON_STEPS = 50
HELD_OUT_TOKENS = 512  # of an expert, at most
BLOCK = 1024  # tokens whose products are summed in float32; blocks are summed in float64


@dataclass(frozen=True)
class Moments:
    """The inputs of one router on one expert's samples.

    Attributes:
        count: the number n of tokens.
        mean: (d,), float64.
        second: (d (d + 1) / 2,), float32: the rows of the upper triangle of X'X / n.
        held_out: (m, d), float32: inputs of tokens that are not among the n.
    """

    count: int
    mean: np.ndarray
    second: np.ndarray
    held_out: np.ndarray

    def matrix(self) -> np.ndarray:
        """X'X / n, (d, d), float64."""
        d = len(self.mean)
        full = np.empty((d, d))
        start = 0
        for row in range(d):
            stop = start + d - row
            full[row, row:] = full[row:, row] = self.second[start:stop]
            start = stop
        return full


class MomentSum:
    """Accumulates the moments of router inputs, in float64."""

    def __init__(self, width: int):
        self.count, self.total, self.gram = 0, np.zeros(width), np.zeros((width, width))
        self._block: list[Any] = []  # tensors
        self._held_out: list[Any] = []

    def add(self, states: Any, held_out: bool) -> None:
        """Adds inputs, a tensor (n, d); `held_out` if they are not for X."""
        if held_out:
            self._held_out.append(states)
        elif len(states):
            self._block.append(states)
            if sum(map(len, self._block)) >= BLOCK:
                self._sum_block()

    def _sum_block(self) -> None:
        import torch

        if self._block:
            x = torch.cat(self._block).float()
            self.count += len(x)
            self.total += x.double().sum(0).cpu().numpy()
            self.gram += (x.T @ x).cpu().numpy()
            self._block = []

    def moments(self) -> Moments:
        """What was accumulated.

        Raises:
            UserError: if there are no inputs of one kind, or they are not finite numbers.
        """
        import torch

        self._sum_block()
        if not self.count or not sum(map(len, self._held_out)):
            raise UserError("its samples have too few tokens to hold some out. Add samples.")
        if not (np.isfinite(self.gram).all() and np.isfinite(self.total).all()):
            raise UserError("its states on its samples are not finite. Use an earlier checkpoint, or not float16.")
        second = np.concatenate([row[i:] for i, row in enumerate(self.gram / self.count)])
        held_out = torch.cat(self._held_out).float().cpu().numpy()
        chosen = np.linspace(0, len(held_out) - 1, min(len(held_out), HELD_OUT_TOKENS)).round().astype(int)
        return Moments(self.count, self.total / self.count, second.astype(np.float32), held_out[chosen])


def solve(experts: Sequence[Moments], ridges: Sequence[float]) -> list[np.ndarray]:
    """W' (E, d) for each lambda, which is relative to the mean diagonal of X'X."""
    gram = sum(expert.matrix() for expert in experts)
    means = np.stack([expert.mean for expert in experts], axis=1)
    diagonal, mean = gram.diagonal().copy(), gram.trace() / len(gram)
    found = []
    for ridge in ridges:
        np.fill_diagonal(gram, diagonal + ridge * mean)
        found.append(np.linalg.solve(gram, means).T)
    return found


def held_out_logits(experts: Sequence[Moments], weights: np.ndarray) -> list[np.ndarray]:
    """W'x of each expert's held-out tokens, (m, E)."""
    return [expert.held_out.astype(np.float64) @ weights.T for expert in experts]


def squared_error(logits: Sequence[np.ndarray]) -> float:
    """The mean over experts of the mean squared error of their held-out tokens against one-hot targets."""
    targets = np.eye(len(logits))
    return float(np.mean([((rows - targets[e]) ** 2).sum(1).mean() for e, rows in enumerate(logits)]))


def fit_scale(logits: Sequence[np.ndarray]) -> float:
    """The scale s >= 0 with the largest mean log-likelihood of softmax(s logits), which is concave in s, by Newton's method."""
    rows = np.concatenate(logits)
    targets = np.repeat(np.arange(len(logits)), [len(part) for part in logits])
    weights = np.concatenate([np.full(len(part), 1 / len(part)) for part in logits]) / len(logits)
    wanted, scale = rows[np.arange(len(rows)), targets], 1.0
    for _ in range(NEWTON_STEPS):
        shares = np.exp(scale * (rows - rows.max(1, keepdims=True)))
        shares /= shares.sum(1, keepdims=True)
        mean = (shares * rows).sum(1)
        slope = weights @ (wanted - mean)
        curvature = weights @ ((shares * rows**2).sum(1) - mean**2)
        step = slope / max(curvature, 1e-12)
        new = min(max(scale + step, scale / 4, 1e-3), scale * 4, MAX_SCALE)
        if abs(new - scale) <= 1e-6 * scale:
            return float(new)
        scale = new
    return float(scale)


def fit_gate(experts: Sequence[Moments], ridges: Sequence[float] = RIDGES) -> tuple[np.ndarray, dict[str, float]]:
    """The gate (E, d) of one router, and the `ridge` and `scale` that were chosen.

    Raises:
        UserError: if all inputs are zero, so that the matrix is singular for any lambda.
    """
    try:
        weights = solve(experts, ridges)
    except np.linalg.LinAlgError as error:
        raise UserError("the router's inputs are zero on all samples. Use samples of the experts' own data.") from error
    errors = [squared_error(held_out_logits(experts, found)) for found in weights]
    best = int(np.argmin(errors))
    scale = fit_scale(held_out_logits(experts, weights[best]))
    return (scale * weights[best]).astype(np.float32), {"ridge": ridges[best], "scale": round(scale, 3)}


def confusion(experts: Sequence[Moments], gate: np.ndarray) -> np.ndarray:
    """(E, E): the share of expert i's held-out tokens whose largest logit is that of expert j."""
    counts = [np.bincount(rows.argmax(1), minlength=len(experts)) for rows in held_out_logits(experts, gate)]
    return np.stack([count / max(count.sum(), 1) for count in counts])
