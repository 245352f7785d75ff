"""Experts of low rank: the difference of an expert's MLP from the base's, as two thin matrices per linear layer, as in FlexMoRE
(arXiv 2602.08818).

For a matrix W_i (m, n) of expert i and the base's W, with the singular value decomposition W_i - W = U S V', the r largest
singular values S_r and their vectors:

    B = U_r S_r^1/2  (m, r),   A = S_r^1/2 V_r'  (r, n),   energy = sum(S_r^2) / sum(S^2)
"""

import numpy as np
import torch

from run_tools.errors import UserError

from .sources import Source


def spectrum(difference: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The squared singular values of a matrix (m, n), ascending, and the singular vectors of its shorter side as columns; float64."""
    small = difference if difference.shape[0] <= difference.shape[1] else difference.T
    squares, vectors = np.linalg.eigh(small @ small.T)
    return np.maximum(squares, 0), vectors


def decompose(difference: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray, float]:
    """(m, n) float64 -> A (rank, n), B (m, rank) and the energy that B A keeps; of a matrix of zeros the energy is 1."""
    squares, vectors = spectrum(difference)
    energy = squares[-rank:].sum() / squares.sum() if squares.any() else 1.0
    chosen, sigma = vectors[:, -rank:][:, ::-1], np.sqrt(squares[-rank:][::-1])
    root = np.sqrt(sigma)
    inverse = np.divide(1, root, out=np.zeros_like(root), where=root > 0)
    if difference.shape[0] <= difference.shape[1]:  # the vectors are U
        return (chosen.T @ difference) * inverse[:, None], chosen * root, float(energy)
    return (chosen * root).T, (difference @ chosen) * inverse, float(energy)


class Factors:
    """The factors of the experts' matrices over a base's, in the mixture's `dtype`, once for both halves, and the energies that they keep."""

    def __init__(self, base: Source, rank: int, dtype: str | None = None):
        self.base, self.rank, self.dtype = base, rank, dtype
        self.energies: dict[str, list[float]] = {}  # name of an expert -> of each matrix
        self._known: tuple[Source, str] | None = None
        self._halves: dict[str, np.ndarray] = {}

    def means(self) -> dict[str, float]:
        """Name of an expert -> the mean energy that its factors keep."""
        return {name: round(sum(own) / len(own), 4) for name, own in self.energies.items()}

    def take(self, expert: Source, name: str, half: str) -> torch.Tensor:
        """A or B of the matrix of an expert that is called `name` in a dense model; float64."""
        if self._known != (expert, name):
            base = self.base[name].to(getattr(torch, self.dtype)) if self.dtype else self.base[name]
            difference = expert[name].double().numpy() - base.double().numpy()
            if not np.isfinite(difference).all():
                raise UserError(f"{expert.name}: {name} holds NaN or infinity. Use an earlier checkpoint.")
            self._halves["A"], self._halves["B"], energy = decompose(difference, self.rank)
            self.energies.setdefault(expert.name, []).append(energy)
            self._known = expert, name
        return torch.from_numpy(np.ascontiguousarray(self._halves[half]))
