"""The hierarchical decoder: a GRU over phrases, a GRU over each phrase's words, attention of both, and copying.

Chen et al. 2020, Fig. 2: the phrase-level decoder (PD) and the word-level decoder (WD). The paper's h_{i,j} is s_{i,j} below,
and its WD attentional vector h~_{i,j} is a_{i,j}.

Letters: B documents, L words of the source, i phrases (I of them), j steps within a phrase (J of them), d hidden size, V words
of the vocabulary, m memory; W_P, W_A, W_O, W_V and g as in Chen et al. 2020.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


class Memory(NamedTuple):
    """What the decoder reads: m (B, L, d), the bias of its scores (B, L), 0 or very small, and extended ids (B, L)."""

    states: torch.Tensor
    bias: torch.Tensor
    copy_ids: torch.Tensor

    def take(self, rows) -> "Memory":
        """Some of the documents: an index (n,), or a slice."""
        return Memory(*(x[rows] for x in self))

    def extra(self, vocab_size: int) -> int:
        """O, words of these documents that a vocabulary of that size lacks."""
        return max(0, int(self.copy_ids.max()) + 1 - vocab_size)


class Step(NamedTuple):
    """After a step: the word state s (B, d), the attentional vector a (B, d), attention alpha (B, L)."""

    state: torch.Tensor
    vector: torch.Tensor
    attention: torch.Tensor


class DecoderState(NamedTuple):
    """The hierarchical decoder after a prefix of a flat sequence, for one step at a time.

    Attributes:
        phrase, word, vector (`(B, d)`): h_i, s_{i,j} and a_{i,j}.
        position (`(B,)`): inputs of the phrase so far, its start included; 0 before the first one.
        seen: columns that were read.
        extra: O, words of the batch's documents that the vocabulary lacks.
    """

    phrase: torch.Tensor
    word: torch.Tensor
    vector: torch.Tensor
    position: torch.Tensor
    seen: int
    extra: int

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def take(self, rows: torch.Tensor) -> "DecoderState":
        """Some of the hypotheses, by their numbers (n,)."""
        return DecoderState(*(x.index_select(0, rows) for x in self[:4]), self.seen, self.extra)


def gru(given: torch.Tensor, recurrent: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """PyTorch's cell: the input's and the state's part of the gates r, z, n (B, 3 d), and h (B, d) -> the next h."""
    r, z, n = given.chunk(3, 1)
    r_h, z_h, n_h = recurrent.chunk(3, 1)
    new = torch.tanh(n + (r + r_h).sigmoid() * n_h)
    return new + (z + z_h).sigmoid() * (h - new)


class HierarchicalDecoder(nn.Module):
    """h_i = GRU_P(f_{i-1}, h_{i-1})                                     f_{i-1}: the vector a that ended phrase i - 1
    s_{i,j} = GRU_W([e(y_{i,j-1}); a_{i,j-1}], s_{i,j-1}),  s_{i,0} = h_i,  a_{i,0} = 0
    alpha_l ~ exp(m_l W_A s_{i,j}) exp(m_l W_P h_i)                      WD-attention, rescaled by PD-attention beta_i
    a_{i,j} = tanh(W_O [sum_l alpha_l m_l; s_{i,j}])

    The two attentions' product, normalised, is one softmax over the sum of both scores: their own sums cancel. The gates'
    parts have weights of their own, since that of the words waits for no state and is one product for all of them.
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

    def next_phrase(self, ended: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        """f_{i-1} (B, d), h_{i-1} (B, d) -> h_i."""
        return gru(self.phrase_input(ended), self.phrase_state(h), h)

    def step(self, read: torch.Tensor, before: Step, phrase_query: torch.Tensor, memory: Memory) -> Step:
        """One word of every document.

        Args:
            read (`(B, 3 d)`): of `word_input`, the word before.
            before: the step before; its attention is not read.
            phrase_query (`(B, d)`): W_P h_i.
        """
        s = gru(read + self.word_feedback(before.vector), self.word_state(before.state), before.state)
        query = self.word_attention(s) + phrase_query
        scores = torch.baddbmm(memory.bias[:, None], query[:, None], memory.states.mT)  # (B, 1, L)
        alpha = scores.softmax(-1)
        context = torch.bmm(alpha, memory.states).squeeze(1)
        return Step(s, self.output(torch.cat([context, s], 1)).tanh(), alpha.squeeze(1))

    def advance(self, read, state: DecoderState, memory: Memory, begins, still) -> tuple[DecoderState, torch.Tensor]:
        """One input of every hypothesis, each at a place of its own.

        Args:
            read (`(B, 3 d)`): of `word_input`, the input, or `<s>` where a phrase begins.
            begins (`(B,)`): where the input begins a phrase.
            still (`(B,)`): where the input changes nothing.

        Returns: the state after it, and alpha (B, L).
        """
        begins, still = begins[:, None], still[:, None]
        h = torch.where(begins, self.next_phrase(state.vector, state.phrase), state.phrase)
        before = Step(torch.where(begins, h, state.word), state.vector.masked_fill(begins, 0), None)
        now = self.step(read, before, self.phrase_attention(h), memory)
        position = state.position.masked_fill(begins[:, 0], 0) + 1
        new = (h, now.state, now.vector, position[:, None])
        old = (state.phrase, state.word, state.vector, state.position[:, None])
        *vectors, position = (torch.where(still, a, b) for a, b in zip(old, new, strict=True))
        return DecoderState(*vectors, position[:, 0], state.seen + 1, state.extra), now.attention

    def phrase_weights(self, h: torch.Tensor, memory: Memory) -> torch.Tensor:
        """beta_i = softmax_l(m_l W_P h_i)   (B, d) -> (B, L)."""
        scores = torch.baddbmm(memory.bias[:, None], self.phrase_attention(h)[:, None], memory.states.mT)
        return scores.softmax(-1).squeeze(1)

    def forward(self, embedded, labels, start, memory: Memory, end_ids: tuple[int, int]):
        """All phrases of all documents, each word after the right one before it.

        Args:
            embedded (`(B, I, J, E)`): of the words before each step.
            labels (`(B, I, J)`): what each step should say; -100 beyond a phrase's end, and beyond the last phrase.
            start (`(B, d)`): h_0.
            end_ids: of `;` and `</s>`, whose steps' vectors go on to the next phrase.

        Returns: vectors a (B, I, J, d) and attention alpha (B, I, J, L), 0 beyond a document's last phrase.
        """
        phrases = (labels != -100).any(2).sum(1)  # (B,)
        order = phrases.argsort(descending=True, stable=True)  # documents that go on stand first
        going = (phrases[:, None] > torch.arange(labels.shape[1], device=labels.device)).sum(0).tolist()
        lengths = (labels != -100).sum(2).amax(0).tolist()  # steps of each row's longest phrase
        ends = ((labels == end_ids[0]) | (labels == end_ids[1])).int().argmax(2)  # (B, I): the step that ends each
        missing = ~((labels == end_ids[0]) | (labels == end_ids[1])).any(2)
        ends = torch.where(missing, (labels != -100).sum(2).clamp(min=1) - 1, ends)[order]

        if not any(going):  # nobody says anything
            return start.new_zeros(*labels.shape, start.shape[1]), start.new_zeros(*labels.shape, memory.bias.shape[1])

        memory = memory.take(order)
        # unbound: a slice's gradient would be as large as all words together, at every step
        read = [phrase.unbind(1) for phrase in self.word_input(embedded)[order].unbind(1)]
        h, ended = start[order], torch.zeros_like(start)
        vectors, weights = [], []
        for i, n in enumerate(going):
            if not n:
                break
            if n < len(memory.states):
                memory, h, ended = memory.take(slice(n)), h[:n], ended[:n]
            h = self.next_phrase(ended, h)
            query, now = self.phrase_attention(h), Step(h, torch.zeros_like(h), None)
            a, alpha = [], []
            for j in range(lengths[i]):
                now = self.step(read[i][j][:n], now, query, memory)
                a.append(now.vector)
                alpha.append(now.attention)
            a = torch.stack(a, 1)  # (n, J_i, d)
            ended = a.gather(1, ends[:n, i, None, None].expand(-1, -1, a.shape[2])).squeeze(1)
            space = (0, 0, 0, labels.shape[2] - a.shape[1], 0, len(labels) - n)
            vectors.append(F.pad(a, space))
            weights.append(F.pad(torch.stack(alpha, 1), space))
        back = order.argsort()
        shape = (0, 0, 0, 0, 0, labels.shape[1] - len(vectors))
        return F.pad(torch.stack(vectors, 1), shape)[back], F.pad(torch.stack(weights, 1), shape)[back]
