"""The losses of MoeSumm, summed over tokens (MoeSumm, Eq. 8-9; the form of the margin is that of Miao et al. 2021).

Letters: n tokens of a batch, padding among them, V vocabulary, y_t the gold token.
"""

import torch
import torch.nn.functional as F


def token_losses(logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
    """-log P(y_t), with label smoothing eps -(1 - eps) log P(y_t) - eps / V sum_v log P(v).

    logits (n, V), labels (n,) -> (n,), in float32 or better, and 0 where the label is -100.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)


def margin_losses(full: torch.Tensor, main: torch.Tensor) -> torch.Tensor:
    """m_t = P_full(y_t) - P_main(y_t);  L_m = (1 - P_full(y_t)) (1 - m_t^5) / 2   (MoeSumm, Eq. 8-9)

    -log P_full(y_t) (n,), -log P_main(y_t) (n,) -> (n,).
    """
    p_full, p_main = (-full).exp(), (-main).exp()
    return (1 - p_full) * (1 - (p_full - p_main) ** 5) / 2
