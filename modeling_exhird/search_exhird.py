# SPDX-License-Identifier: Apache-2.0
"""Decoding phrase by phrase: its constraints, greedy search and beam search over each phrase.

Letters: B documents, I phrases, J steps within a phrase (its start and its words, or words and `;`), V words of the
vocabulary, O out-of-vocabulary words of the batch's documents.
"""

from typing import NamedTuple

import torch
from transformers import LogitsProcessor

from .decoder_exhird import EPS, EncoderMemory, WordStep
from .exclusion_exhird import exclude_first_tokens, exclude_first_words, keep_possible

NEG_INF = -1e20


class ExhirdGenerateOutput(NamedTuple):
    """The phrases of a batch of documents.

    Attributes:
        ids (`(B, I, J)`): extended ids: the start, words and `;` of each phrase. A document's last row is `</s>`. Padding
            elsewhere.
        log_probs (`(B, I)`): log-probability of each phrase, given the preceding ones: the sum over its tokens.
    """

    ids: torch.LongTensor
    log_probs: torch.FloatTensor


def check_phrase_limits(min_phrases: int, max_phrases: int):
    """Raises a `ValueError` if at least so many phrases are more than at most so many."""
    if min_phrases > max_phrases:
        raise ValueError(f"min_phrases={min_phrases} exceeds max_phrases={max_phrases}. Raise max_phrases too.")


class DecodingConstraints:
    """Limits on phrases and words, and the tokens forbidden at each step.

    Args:
        config: a model's configuration, with the ids of special tokens and the default limits.
        max_phrases, max_words_per_phrase: at most I phrases, of at most J - 1 words.
        min_phrases: `</s>` is forbidden before so many.
        exclusion_window: K_D, 0 for no exclusion and -1 for all preceding phrases.
        num_beams: hypotheses of each phrase.

    Raises:
        ValueError: for a number out of range.
    """

    def __init__(
        self,
        config,
        max_phrases: int | None = None,
        max_words_per_phrase: int | None = None,
        exclusion_window: int | None = None,
        num_beams: int = 1,
        min_phrases: int = 1,
    ):
        self.max_phrases = config.max_phrases if max_phrases is None else max_phrases
        self.max_words_per_phrase = (
            config.max_words_per_phrase if max_words_per_phrase is None else max_words_per_phrase
        )
        self.exclusion_window = config.exclusion_window if exclusion_window is None else exclusion_window
        self.num_beams, self.min_phrases = num_beams, min_phrases
        minima = {"max_phrases": 1, "max_words_per_phrase": 1, "exclusion_window": -1, "num_beams": 1, "min_phrases": 1}
        for name, minimum in minima.items():
            if getattr(self, name) < minimum:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {minimum}.")
        check_phrase_limits(self.min_phrases, self.max_phrases)
        self.end_id, self.stop_id, self.pad_id = config.end_phrase_token_id, config.eos_token_id, config.pad_token_id

    @property
    def max_steps(self) -> int:
        """J: the start and the words of a phrase. A `;` after the last word allowed is certain, and not decoded."""
        return self.max_words_per_phrase + 1

    @property
    def max_tokens(self) -> int:
        """Length of a flat sequence: `<s>`, the tokens of each phrase with `;`, `</s>`."""
        return 2 + self.max_phrases * (self.max_steps + 1)

    def apply(self, p: torch.Tensor, phrase: int, step: int, first_words: list[torch.Tensor], value: float):
        """Overwrites P, or log P, (n, V + O) of forbidden tokens with a value.

        Exclusive search is the hard exclusion of ExHiRD-h, see `exclusion_exhird`. y_1 is a phrase's first word, at step 1,
        after its start. The soft exclusion of ExHiRD-s, "EL" in Fig. 2, is the exclusive loss L_ex in training.

        Args:
            p: the probabilities.
            phrase, step: indices of both.
            first_words: the first word of each preceding phrase, (n,) extended ids, -1 for none.
            value: the value to set.
        """
        forbidden = [self.stop_id] if step else [self.end_id]
        if not step and phrase < self.min_phrases:
            forbidden = [self.end_id, self.stop_id]
        p[:, [self.pad_id, *forbidden]] = value  # padding could be copied from a document without words
        return exclude_first_words(p, first_words, self.exclusion_window, value) if step == 1 else p


def refuse_nan(scores: torch.Tensor):
    """Raises a `ValueError` if a score is NaN."""
    if scores.isnan().any():
        raise ValueError("The model's probabilities are NaN. Check its weights, or open it with dtype='float32'.")


@torch.no_grad()
def search_phrases(
    model, memory: EncoderMemory, start: torch.Tensor, num_oov: int, constraints: DecodingConstraints
) -> ExhirdGenerateOutput:
    """All phrases of a batch of documents; finished documents leave the batch.

    Args:
        model: an `ExhirdForKeyphraseGeneration`.
        memory, start: encoder states and h_0 of B documents.
        num_oov: O.
        constraints: limits and number of beams.
    """
    B = len(start)
    rows, scores = [], []
    active = torch.arange(B, device=start.device)
    h, end_vectors = start, torch.zeros_like(start)
    first_words: list[torch.Tensor] = []
    search = greedy_phrase if constraints.num_beams == 1 else beam_search_phrase
    for phrase in range(constraints.max_phrases):
        h = model.decoder.next_phrase(end_vectors, h)
        ids, log_p, end_vectors = search(model, memory, h, num_oov, constraints, phrase, first_words)
        refuse_nan(log_p)
        rows.append(ids.new_full((B, constraints.max_steps), constraints.pad_id).index_copy(0, active, ids))
        scores.append(log_p.new_zeros(B).index_copy(0, active, log_p))
        unfinished = (ids[:, 0] != constraints.stop_id).nonzero().squeeze(1)
        if not len(unfinished):
            break
        first_words = [*first_words, torch.where(ids[:, 1] == constraints.pad_id, -1, ids[:, 1])]
        if constraints.exclusion_window > 0:
            first_words = first_words[-constraints.exclusion_window :]
        if len(unfinished) < len(active):
            active, memory, h = active[unfinished], memory.take(unfinished), h[unfinished]
            end_vectors = end_vectors[unfinished]
            first_words = [words[unfinished] for words in first_words]
    return ExhirdGenerateOutput(torch.stack(rows, 1), torch.stack(scores, 1))


def start_phrase(model, h: torch.Tensor, constraints: DecodingConstraints) -> tuple:
    """h_i (n, d) -> W_P h_i (n, d), the state before the first step, `<s>` (n,), room for ids (n, J), and zeros (n, d)."""
    word = h.new_full((len(h),), model.config.bos_token_id, dtype=torch.long)
    ids = word.new_full((len(h), constraints.max_steps), constraints.pad_id)
    zeros = torch.zeros_like(h)
    return model.decoder.phrase_attention(h), WordStep(h, zeros, None), word, ids, zeros


def greedy_phrase(model, memory: EncoderMemory, h, num_oov: int, constraints: DecodingConstraints, phrase, first_words):
    """One phrase of every document, with the most probable word at each step.

    Returns:
        Ids (n, J), their log-probability (n,), the vector at the end of the phrase (n, d).
    """
    query, current, word, ids, end_vectors = start_phrase(model, h, constraints)
    total, unfinished = h.new_zeros(len(h)), torch.ones_like(word, dtype=torch.bool)
    for step in range(constraints.max_steps):
        current = model.decoder.step(model.word_gates(word), current, query, memory)
        p = model.generator.probabilities(current.vector, current.attention, memory.copy_ids, num_oov)
        best, word = constraints.apply(p, phrase, step, first_words, -1.0).max(1)
        ids[:, step] = torch.where(unfinished, word, constraints.pad_id)
        total = total + torch.where(unfinished, (best + EPS).log(), 0.0)
        end_vectors = torch.where(unfinished[:, None], current.vector, end_vectors)
        unfinished = unfinished & (word != constraints.end_id) & (word != constraints.stop_id)
        if not unfinished.any():
            break
    return ids, total, end_vectors


def beam_search_phrase(
    model, memory: EncoderMemory, h, num_oov: int, constraints: DecodingConstraints, phrase, first_words
):
    """As `greedy_phrase`, but the hypothesis with the highest mean log-probability per token. Not in the papers."""
    n, K = len(h), constraints.num_beams
    expanded = torch.arange(n, device=h.device).repeat_interleave(K)
    memory, h = memory.take(expanded), h[expanded]
    first_words = [words[expanded] for words in first_words]
    query, current, word, ids, end_vectors = start_phrase(model, h, constraints)
    total = h.new_full((n, K), NEG_INF)
    total[:, 0] = 0  # all hypotheses start equal, so only one is expanded
    unfinished, length = torch.ones_like(word, dtype=torch.bool), h.new_zeros(n * K)
    for step in range(constraints.max_steps):
        current = model.decoder.step(model.word_gates(word), current, query, memory)
        p = model.generator.probabilities(current.vector, current.attention, memory.copy_ids, num_oov)
        log_p = constraints.apply((p + EPS).log(), phrase, step, first_words, NEG_INF)
        finished_log_p = torch.full_like(log_p, NEG_INF)
        finished_log_p[:, constraints.pad_id] = 0  # a finished phrase is only padded
        log_p = torch.where(unfinished[:, None], log_p, finished_log_p)
        end_vectors = torch.where(unfinished[:, None], current.vector, end_vectors)
        length = length + unfinished
        # compared by the mean per token: a sum would prefer short phrases
        sums = (total.reshape(-1, 1) + log_p).reshape(n, -1)
        mean = (sums.reshape(n, K, -1) / length.reshape(n, K, 1).clamp(min=1)).reshape(n, -1)
        best = mean.topk(K, dim=1).indices
        total = sums.gather(1, best)
        parent = (best // log_p.shape[1] + torch.arange(n, device=h.device)[:, None] * K).flatten()
        word = (best % log_p.shape[1]).flatten()
        current = WordStep(current.state[parent], current.vector[parent], None)
        ids, end_vectors, unfinished, length = ids[parent], end_vectors[parent], unfinished[parent], length[parent]
        ids[:, step] = torch.where(unfinished, word, constraints.pad_id)
        unfinished = unfinished & (word != constraints.end_id) & (word != constraints.stop_id)
        if not unfinished.any():
            break
    best = (total / length.reshape(n, K).clamp(min=1)).argmax(1) + torch.arange(n, device=h.device) * K
    return ids[best], total.flatten()[best], end_vectors[best]


class PhraseConstraintsLogitsProcessor(LogitsProcessor):
    """`DecodingConstraints` for flat sequences `<s> start words ; start words ; ... </s>`, for `generate`.

    A phrase of J tokens without `;` gets one, and I phrases are followed by `</s>`, both with log P = 0, since no other token
    can follow. If other processors allow no token that the constraints allow, their choice is kept.
    """

    def __init__(self, constraints: DecodingConstraints):
        self.constraints = constraints

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """input_ids (n, T), scores (n, V + O) -> scores with -inf for forbidden tokens."""
        constraints, forbidden = self.constraints, -torch.inf
        end_id, stop_id, pad_id = constraints.end_id, constraints.stop_id, constraints.pad_id
        valid, ends = input_ids != pad_id, input_ids == end_id
        position = valid.cumsum(1)
        phrase_start = torch.where(ends | (valid & (position == 1)), position, 0).cummax(1).values
        step, phrase = position[:, -1] - phrase_start[:, -1], ends.sum(1)  # of the next token
        begins = step == 0
        limited = scores.clone()
        limited[:, pad_id] = forbidden
        limited[:, end_id] = limited[:, end_id].masked_fill(begins, forbidden)
        limited[:, stop_id] = limited[:, stop_id].masked_fill(~begins | (phrase < constraints.min_phrases), forbidden)
        previous_start = torch.cat([torch.zeros_like(phrase_start[:, :1]), phrase_start[:, :-1]], 1)
        first_words = valid & (position - previous_start == 2) & (previous_start > 0)  # of each phrase
        exclude_first_tokens(limited, input_ids, ends, first_words, step == 1, constraints.exclusion_window)
        if scores.amin() == forbidden:  # other processors have forbidden tokens too
            limited = keep_possible(limited, scores)
        for rows, token in (
            (step >= constraints.max_steps, end_id),
            (begins & (phrase >= constraints.max_phrases), stop_id),
        ):
            rows = rows.nonzero().squeeze(1)
            limited[rows] = forbidden
            limited[rows, token] = 0
        return limited
