"""What the next word is: a word of the vocabulary, or one of the source copied; and the losses on it.

Extended ids: 0 to V - 1 are the vocabulary's words, V + k is the k-th word of a document that the vocabulary lacks.
"""

import torch
import torch.nn.functional as F
from torch import nn

TINY = 1e-20


class WordMixture(nn.Module):
    """P(y) = (1 - g) softmax(W_V a + b_V)[y] + g sum of alpha over the places where the source says y

    g = sigmoid(w_g a + b_g), the probability of copying; the pad's logit is -inf.   (Chen et al. 2020, Sect. 3.3)
    """

    def __init__(self, hidden_size: int, vocab_size: int, pad_id: int):
        super().__init__()
        self.vocabulary = nn.Linear(hidden_size, vocab_size)
        self.copy = nn.Linear(hidden_size, 1)
        self.pad_id = pad_id

    def logits(self, a: torch.Tensor) -> torch.Tensor:
        """a (n, d) -> (n, V), in float32 or better."""
        logits = self.vocabulary(a)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits[:, self.pad_id] = -torch.inf
        return logits

    def probabilities(self, a: torch.Tensor, alpha: torch.Tensor, copy_ids: torch.Tensor, extra: int) -> torch.Tensor:
        """a (n, d), alpha and copy_ids (n, L) -> P over all words, those that the vocabulary lacks included, (n, V + extra)."""
        g, p = self.copy(a).sigmoid(), self.logits(a)
        if extra:
            p = F.pad(p, (0, extra), value=-torch.inf)
        if p.requires_grad:
            p = p.softmax(-1) * (1 - g)
        else:  # in place: for many words at once most of the time is that of new memory
            p.sub_(p.amax(-1, keepdim=True)).exp_()
            p.mul_((1 - g) / p.sum(-1, keepdim=True))
        return p.scatter_add_(1, copy_ids, (alpha * g).to(p.dtype))

    def forward(self, a, alpha, copy_ids, rows, words) -> torch.Tensor:
        """P of given words only, without all others' P.

        Args:
            a (`(n, d)`), alpha and copy_ids (`(n, L)`): of n steps.
            rows, words (`(p,)`): a step's number, and a word as extended id.

        Returns: (p,)
        """
        V = self.vocabulary.out_features
        logits = self.logits(a)
        written = (logits[rows, words.clamp(max=V - 1)] - logits.logsumexp(1)[rows]).exp()
        copied = (alpha[rows] * (copy_ids[rows] == words[:, None])).sum(1)
        g = self.copy(a).sigmoid().squeeze(1)[rows]
        return (1 - g) * written * (words < V) + g * copied


def label_rows(labels: torch.Tensor, end_id: int, limit: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """A document's labels one after the other (B, T) -> a row for each phrase (B, I, J), and which labels (B, T) they hold.

    A row ends with `;` (`end_id`) or where the labels do; -100 is nothing. Both hold the same labels in the same order.

    Args:
        limit: J at most. The `;` after J words is left out: nothing else can follow, and so it is not scored.
    """
    there, ends = labels != -100, labels == end_id
    place = there.cumsum(1)
    last_end = torch.where(ends, place, 0).cummax(1).values
    step = place - 1 - torch.cat([torch.zeros_like(last_end[:, :1]), last_end[:, :-1]], 1)
    if limit is not None:
        there = there & (step < limit)
    phrase, (document, column) = ends.cumsum(1) - ends.long(), there.nonzero(as_tuple=True)
    phrase, step = phrase[document, column], step[document, column]
    I, J = (int(x.max()) + 1 if len(x) else 1 for x in (phrase, step))
    rows = labels.new_full((len(labels), I, max(J, 2)), -100)  # with room for a first word
    rows[document, phrase, step] = labels[document, column]
    return rows, there


def exclusive_pairs(labels: torch.Tensor, vocab_size: int, unk_id: int, window: int):
    """Which first words a phrase should not begin with: those of up to `window` phrases before it (-1: all). The pairs i, k of
    the exclusive loss (Chen et al. 2020, Sect. 3.5), with K_L = `window`.

    Words are compared by their ids in the vocabulary, as in the reference: two that it lacks are one and the same.

    Args:
        labels (`(B, I, J)`): extended ids, -100 for nothing. Step 1 is a phrase's first word.

    Returns: for each pair the document (p,), the phrase (p,), and the earlier phrase's first word as extended id (p,).
    """
    first = labels[:, :, 1] if labels.shape[2] > 1 else labels.new_full(labels.shape[:2], -100)  # (B, I)
    known = first.masked_fill(first >= vocab_size, unk_id)
    places = torch.arange(first.shape[1], device=labels.device)
    back = places[:, None] - places  # i - k
    near = (back >= 1) & ((back <= window) if window >= 0 else (back >= 1))
    there = first != -100
    wanted = near & there[:, :, None] & there[:, None, :] & (known[:, :, None] != known[:, None, :])  # (B, i, k)
    document, phrase, earlier = wanted.nonzero(as_tuple=True)
    return document, phrase, first[document, earlier]
