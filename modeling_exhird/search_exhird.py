# SPDX-License-Identifier: Apache-2.0
"""Greedy search phrase by phrase, and what it may not write.

Letters: B documents, I phrases, J steps within a phrase (its start and its words, or words and `;`), n documents that go on, V words
of the vocabulary, O out-of-vocabulary words of the batch's documents.
"""

from typing import NamedTuple

import torch

from .decoder_exhird import EPS, EncoderMemory, WordStep


class ExhirdGenerateOutput(NamedTuple):
    """The phrases of a batch of documents.

    Attributes:
        ids (`(B, I, J)`): extended ids: the start, words and `;` of each phrase. A document's last row is `</s>`. Padding
            elsewhere.
        log_probs (`(B, I)`): log-probability of each phrase, given the preceding ones: the sum over its tokens.
    """

    ids: torch.LongTensor
    log_probs: torch.FloatTensor


def check_limits(least: dict[str, int], limits: dict[str, int]) -> None:
    """Raises a `ValueError` for a limit of generation below its least value."""
    for name, value in limits.items():
        if value < least.get(name, 1):
            raise ValueError(f"{name}={value} must be at least {least.get(name, 1)}.")
    if limits.get("min_phrases", 0) > limits["max_phrases"]:
        raise ValueError(f"min_phrases={limits['min_phrases']} exceeds max_phrases={limits['max_phrases']}.")


class DecodingConstraints:
    """Limits on phrases and words, and the tokens forbidden at each step.

    Args:
        config: a model's configuration, with the ids of special tokens and the default limits.
        max_phrases, max_words_per_phrase: at most I phrases, of at most J - 1 words.
        exclusion_window: K_D, 0 for no exclusion and -1 for all preceding phrases.
        min_phrases: `</s>` is forbidden before so many.

    Raises:
        ValueError: for a number out of range.
    """

    def __init__(self, config, max_phrases=None, max_words_per_phrase=None, exclusion_window=None, min_phrases=1):
        given = {"max_phrases": max_phrases, "max_words_per_phrase": max_words_per_phrase}
        given |= {"exclusion_window": exclusion_window}
        limits = {name: getattr(config, name) if value is None else value for name, value in given.items()}
        check_limits({"exclusion_window": -1}, limits | {"min_phrases": min_phrases})
        self.max_phrases, words, self.exclusion_window = limits.values()
        # J: the start and the words of a phrase. A `;` after the last word allowed is certain, and not decoded.
        self.max_steps, self.min_phrases = words + 1, min_phrases
        self.end_id, self.stop_id, self.pad_id = config.end_phrase_token_id, config.eos_token_id, config.pad_token_id

    def apply(self, p: torch.Tensor, phrase: int, step: int, first_words: list[torch.Tensor]) -> torch.Tensor:
        """Sets P (n, V + O) of forbidden tokens to -1.

        Exclusive search is the hard exclusion of ExHiRD-h, see `exclusion_exhird`. y_1 is a phrase's first word, at step 1,
        after its start. The soft exclusion of ExHiRD-s, "EL" in Fig. 2, is the exclusive loss L_ex in training.

        Args:
            p: the probabilities.
            phrase, step: indices of both.
            first_words: the first word of each preceding phrase, (n,) extended ids, -1 for none.
        """
        forbidden = [self.stop_id] if step else [self.end_id]
        if not step and phrase < self.min_phrases:
            forbidden = [self.end_id, self.stop_id]
        p[:, [self.pad_id, *forbidden]] = -1.0  # padding could be copied from a document without words
        K = self.exclusion_window
        for words in first_words[-K if K > 0 else 0 :] if K and step == 1 else ():
            rows = (words >= 0).nonzero().squeeze(1)
            p[rows, words[rows]] = -1.0
        return p


@torch.no_grad()
def search_phrases(
    model, memory: EncoderMemory, start: torch.Tensor, constraints: DecodingConstraints
) -> ExhirdGenerateOutput:
    """All phrases of a batch of documents; finished documents leave the batch.

    Args:
        model: an `ExhirdForKeyphraseGeneration`.
        memory, start: encoder states and h_0 of B documents.
        constraints: the limits.

    Raises:
        ValueError: if a probability is NaN.
    """
    B, num_oov = len(start), memory.num_oov(model.config.vocab_size)
    rows, scores = [], []
    active = torch.arange(B, device=start.device)
    h, end_vectors = start, torch.zeros_like(start)
    first_words: list[torch.Tensor] = []
    for phrase in range(constraints.max_phrases):
        h = model.decoder.next_phrase(end_vectors, h)
        ids, log_p, end_vectors = greedy_phrase(model, memory, h, num_oov, constraints, phrase, first_words)
        if log_p.isnan().any():
            raise ValueError("The model's probabilities are NaN. Check its weights, or open it with dtype='float32'.")
        rows.append(ids.new_full((B, constraints.max_steps), constraints.pad_id).index_copy(0, active, ids))
        scores.append(log_p.new_zeros(B).index_copy(0, active, log_p))
        unfinished = (ids[:, 0] != constraints.stop_id).nonzero().squeeze(1)
        if not len(unfinished):
            break
        first_words = [*first_words, torch.where(ids[:, 1] == constraints.pad_id, -1, ids[:, 1])]
        if len(unfinished) < len(active):
            active, memory, h = active[unfinished], memory.take(unfinished), h[unfinished]
            end_vectors = end_vectors[unfinished]
            first_words = [words[unfinished] for words in first_words]
    return ExhirdGenerateOutput(torch.stack(rows, 1), torch.stack(scores, 1))


def greedy_phrase(model, memory: EncoderMemory, h, num_oov: int, constraints: DecodingConstraints, phrase, first_words):
    """One phrase of every document, h_i (n, d), with the most probable word at each step.

    Returns:
        Ids (n, J), their log-probability (n,), the vector at the end of the phrase (n, d).
    """
    query, current = model.decoder.phrase_attention(h), WordStep(h, torch.zeros_like(h), None)
    word = h.new_full((len(h),), model.config.bos_token_id, dtype=torch.long)
    ids, end_vectors = word.new_full((len(h), constraints.max_steps), constraints.pad_id), torch.zeros_like(h)
    total, unfinished = h.new_zeros(len(h)), torch.ones_like(word, dtype=torch.bool)
    for step in range(constraints.max_steps):
        current = model.decoder.step(model.word_gates(word), current, query, memory)
        p = model.generator.probabilities(current.vector, current.attention, memory.copy_ids, num_oov)
        best, word = constraints.apply(p, phrase, step, first_words).max(1)
        ids[:, step] = torch.where(unfinished, word, constraints.pad_id)
        total = total + torch.where(unfinished, (best + EPS).log(), 0.0)
        end_vectors = torch.where(unfinished[:, None], current.vector, end_vectors)
        unfinished = unfinished & (word != constraints.end_id) & (word != constraints.stop_id)
        if not unfinished.any():
            break
    return ids, total, end_vectors
