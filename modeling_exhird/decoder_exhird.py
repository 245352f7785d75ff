# SPDX-License-Identifier: Apache-2.0
"""The hierarchical decoder: a GRU over phrases, a GRU over each phrase's words, attention, copying, and the losses.

Chen et al. 2020, Fig. 2: the phrase-level decoder (PD) and the word-level decoder (WD). The paper's h_{i,j} is s_{i,j} below,
and its WD attentional vector h~_{i,j} is a_{i,j}.

Letters: B documents, L words of the source, i phrases (I of them), j steps within a phrase (J of them), d hidden size, V words
of the vocabulary, m encoder states; W_P, W_A, W_O, W_V and g as in Chen et al. 2020.

Extended ids: 0 to V - 1 are the words of the vocabulary, V + k is the k-th out-of-vocabulary word of a document.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

EPS = 1e-20


class EncoderMemory(NamedTuple):
    """What the decoder attends to: m (B, L, d), a bias of the scores (B, L), 0 or very small, and extended ids (B, L)."""

    states: torch.Tensor
    bias: torch.Tensor
    copy_ids: torch.Tensor

    def take(self, rows) -> "EncoderMemory":
        """A subset of the documents, by an index (n,) or a slice."""
        return EncoderMemory(*(x[rows] for x in self))

    def num_oov(self, vocab_size: int) -> int:
        """O, the largest number of out-of-vocabulary words of a document."""
        return max(0, int(self.copy_ids.max()) + 1 - vocab_size)


class WordStep(NamedTuple):
    """After a step: the word state s (B, d), the attentional vector a (B, d), attention alpha (B, L)."""

    state: torch.Tensor
    vector: torch.Tensor
    attention: torch.Tensor | None


def gru_cell(input_gates: torch.Tensor, state_gates: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """PyTorch's GRU cell: the parts of the gates r, z, n from the input and from the state (B, 3 d), h (B, d) -> the next h."""
    r, z, n = input_gates.chunk(3, 1)
    r_h, z_h, n_h = state_gates.chunk(3, 1)
    new = torch.tanh(n + (r + r_h).sigmoid() * n_h)
    return new + (z + z_h).sigmoid() * (h - new)


class HierarchicalDecoder(nn.Module):
    """h_i = GRU_P(f_{i-1}, h_{i-1})                                     f_{i-1}: the vector a at the end of phrase i - 1
    s_{i,j} = GRU_W([e(y_{i,j-1}); a_{i,j-1}], s_{i,j-1}),  s_{i,0} = h_i,  a_{i,0} = 0
    alpha_l ~ exp(m_l W_A s_{i,j}) exp(m_l W_P h_i)                      WD-attention, rescaled by PD-attention beta_i
    a_{i,j} = tanh(W_O [sum_l alpha_l m_l; s_{i,j}])

    The normalised product of the two attentions is one softmax over the sum of both scores. The input weights of GRU_W are
    split: the part of the words does not depend on the state, and is computed for all words at once.
    """

    def __init__(self, word_size: int, hidden_size: int):
        super().__init__()
        d = hidden_size
        self.phrase_input, self.phrase_state = nn.Linear(d, 3 * d), nn.Linear(d, 3 * d)
        self.word_input, self.word_state = nn.Linear(word_size, 3 * d), nn.Linear(d, 3 * d)
        self.word_feedback = nn.Linear(d, 3 * d, bias=False)
        self.phrase_attention = nn.Linear(d, d, bias=False)
        self.word_attention = nn.Linear(d, d, bias=False)
        self.output = nn.Linear(2 * d, d, bias=False)

    def next_phrase(self, end_vectors: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        """f_{i-1} (B, d), h_{i-1} (B, d) -> h_i."""
        return gru_cell(self.phrase_input(end_vectors), self.phrase_state(h), h)

    def step(
        self, word_gates: torch.Tensor, previous: WordStep, phrase_query: torch.Tensor, memory: EncoderMemory
    ) -> WordStep:
        """One word of every document.

        Args:
            word_gates (`(B, 3 d)`): `word_input` of the previous word.
            previous: the previous step; its attention is not read.
            phrase_query (`(B, d)`): W_P h_i.
            memory: the encoded documents.
        """
        s = gru_cell(word_gates + self.word_feedback(previous.vector), self.word_state(previous.state), previous.state)
        query = self.word_attention(s) + phrase_query
        scores = torch.baddbmm(memory.bias[:, None], query[:, None], memory.states.mT)  # (B, 1, L)
        alpha = scores.softmax(-1)
        context = torch.bmm(alpha, memory.states).squeeze(1)
        return WordStep(s, self.output(torch.cat([context, s], 1)).tanh(), alpha.squeeze(1))

    def forward(self, embedded, labels, start, memory: EncoderMemory, end_ids: tuple[int, int]):
        """All phrases of all documents with teacher forcing.

        Args:
            embedded (`(B, I, J, E)`): embeddings of the previous words.
            labels (`(B, I, J)`): the target of each step; -100 beyond the end of a phrase, and beyond the last phrase.
            start (`(B, d)`): h_0.
            memory: the encoded documents.
            end_ids: ids of `;` and `</s>`; the vectors of their steps are the input of the next phrase.

        Returns:
            Vectors a (B, I, J, d) and attention alpha (B, I, J, L), 0 beyond a document's last phrase.
        """
        num_phrases = (labels != -100).any(2).sum(1)  # (B,)
        order = num_phrases.argsort(descending=True, stable=True)  # active documents come first
        active = (num_phrases[:, None] > torch.arange(labels.shape[1], device=labels.device)).sum(0).tolist()
        lengths = (labels != -100).sum(2).amax(0).tolist()  # steps of the longest phrase in each row
        is_end = (labels == end_ids[0]) | (labels == end_ids[1])
        last = (labels != -100).sum(2).clamp(min=1) - 1
        ends = torch.where(is_end.any(2), is_end.int().argmax(2), last)[order]  # (B, I): the step that ends each phrase

        if not any(active):  # no document has a target
            return start.new_zeros(*labels.shape, start.shape[1]), start.new_zeros(*labels.shape, memory.bias.shape[1])

        memory = memory.take(order)
        # unbind: the gradient of a slice would be as large as all words together, at every step
        gates = [phrase.unbind(1) for phrase in self.word_input(embedded)[order].unbind(1)]
        h, end_vectors = start[order], torch.zeros_like(start)
        vectors, weights = [], []
        for i, n in enumerate(active):
            if not n:
                break
            if n < len(memory.states):
                memory, h, end_vectors = memory.take(slice(n)), h[:n], end_vectors[:n]
            h = self.next_phrase(end_vectors, h)
            query, current = self.phrase_attention(h), WordStep(h, torch.zeros_like(h), None)
            a, alpha = [], []
            for j in range(lengths[i]):
                current = self.step(gates[i][j][:n], current, query, memory)
                a.append(current.vector)
                alpha.append(current.attention)
            a = torch.stack(a, 1)  # (n, J_i, d)
            end_vectors = a.gather(1, ends[:n, i, None, None].expand(-1, -1, a.shape[2])).squeeze(1)
            padding = (0, 0, 0, labels.shape[2] - a.shape[1], 0, len(labels) - n)
            vectors.append(F.pad(a, padding))
            weights.append(F.pad(torch.stack(alpha, 1), padding))
        original = order.argsort()
        padding = (0, 0, 0, 0, 0, labels.shape[1] - len(vectors))
        return F.pad(torch.stack(vectors, 1), padding)[original], F.pad(torch.stack(weights, 1), padding)[original]


class CopyGenerator(nn.Module):
    """P(y) = (1 - g) softmax(W_V a + b_V)[y] + g sum of alpha over the positions of y in the source

    A pointer-generator (Chen et al. 2020, Sect. 3.3): g = sigmoid(w_g a + b_g) is the probability of copying. The logit of
    padding is -inf.
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

    def probabilities(self, a: torch.Tensor, alpha: torch.Tensor, copy_ids: torch.Tensor, num_oov: int) -> torch.Tensor:
        """a (n, d), alpha and copy_ids (n, L) -> P of all words, including out-of-vocabulary ones, (n, V + O)."""
        g, p = self.copy(a).sigmoid(), self.logits(a)
        if num_oov:
            p = F.pad(p, (0, num_oov), value=-torch.inf)
        if p.requires_grad:
            p = p.softmax(-1) * (1 - g)
        else:  # in place: otherwise allocating memory takes most of the time
            p.sub_(p.amax(-1, keepdim=True)).exp_()
            p.mul_((1 - g) / p.sum(-1, keepdim=True))
        return p.scatter_add_(1, copy_ids, (alpha * g).to(p.dtype))

    def forward(self, a, alpha, copy_ids, rows, words) -> torch.Tensor:
        """P of some words, without computing that of all others.

        Args:
            a (`(n, d)`), alpha and copy_ids (`(n, L)`): of n steps.
            rows, words (`(p,)`): index of a step, and a word as extended id.

        Returns:
            `(p,)`.
        """
        V = self.vocabulary.out_features
        logits = self.logits(a)
        generated = (logits[rows, words.clamp(max=V - 1)] - logits.logsumexp(1)[rows]).exp()
        copied = (alpha[rows] * (copy_ids[rows] == words[:, None])).sum(1)
        g = self.copy(a).sigmoid().squeeze(1)[rows]
        return (1 - g) * generated * (words < V) + g * copied


def labels_by_phrase(labels: torch.Tensor, end_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat labels (B, T) -> one row per phrase (B, I, J), and a mask (B, T) of the labels that the rows contain.

    A row ends with `;` (`end_id`) or at the end of the labels; -100 is ignored. The order of the labels is kept.
    """
    valid, ends = labels != -100, labels == end_id
    count = valid.cumsum(1)
    last_end = torch.where(ends, count, 0).cummax(1).values
    step = count - 1 - torch.cat([torch.zeros_like(last_end[:, :1]), last_end[:, :-1]], 1)
    phrase, (document, column) = ends.cumsum(1) - ends.long(), valid.nonzero(as_tuple=True)
    phrase, step = phrase[document, column], step[document, column]
    I, J = (int(x.max()) + 1 if len(x) else 1 for x in (phrase, step))
    rows = labels.new_full((len(labels), I, max(J, 2)), -100)  # with room for a first word
    rows[document, phrase, step] = labels[document, column]
    return rows, valid


def exclusive_pairs(labels: torch.Tensor, vocab_size: int, unk_id: int, window: int):
    """The pairs i, k of the exclusive loss (Chen et al. 2020, Sect. 3.5), with K_L = `window`: for each phrase the first words
    of up to K_L preceding phrases (-1: all).

    As in the reference, words are compared by their ids in the vocabulary, so all out-of-vocabulary words are equal.

    Args:
        labels (`(B, I, J)`): extended ids, -100 is ignored. Step 1 is a phrase's first word.
        vocab_size, unk_id, window: V, the id of `<unk>`, K_L.

    Returns:
        For each pair the document (p,), the phrase (p,), and the earlier phrase's first word as extended id (p,).
    """
    first = labels[:, :, 1] if labels.shape[2] > 1 else labels.new_full(labels.shape[:2], -100)  # (B, I)
    vocabulary_id = first.masked_fill(first >= vocab_size, unk_id)
    index = torch.arange(first.shape[1], device=labels.device)
    distance = index[:, None] - index  # i - k
    near = (distance >= 1) & ((distance <= window) if window >= 0 else (distance >= 1))
    valid = first != -100
    different = vocabulary_id[:, :, None] != vocabulary_id[:, None, :]
    document, phrase, earlier = (near & valid[:, :, None] & valid[:, None, :] & different).nonzero(as_tuple=True)
    return document, phrase, first[document, earlier]


def score_labels(generator: CopyGenerator, config, a, alpha, copy_ids, rows):
    """log P of each label, and the sum of the exclusive loss.

    L_ex = -sum of log(1 - P_i(y_k)) over phrases i and the first words y_k of the K_L preceding phrases   (the exclusive
    loss of ExHiRD-s, the soft exclusion: Chen et al. 2020, Sect. 3.5, "EL" in Fig. 2)

    Args:
        generator, config: of the model.
        a (`(n, d)`), alpha and copy_ids (`(n, L)`): of n labels.
        rows (`(B, I, J)`): the labels.

    Returns:
        (n,) and a scalar.
    """
    scored = rows != -100
    words = rows[scored]
    n = len(words)
    steps = torch.arange(n, device=words.device)
    if config.exclusive_loss_coef and config.exclusive_loss_window:
        step_index = torch.zeros_like(rows)
        step_index[scored] = steps
        document, phrase, first = exclusive_pairs(
            rows, config.vocab_size, config.unk_token_id, config.exclusive_loss_window
        )
        steps, words = torch.cat([steps, step_index[document, phrase, 1]]), torch.cat([words, first])
    p = generator(a, alpha, copy_ids, steps, words)
    return (p[:n] + EPS).log(), -(1 - p[n:] + EPS).log().sum()
