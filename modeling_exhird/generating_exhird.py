"""Phrases one after the other: greedy or by beams within a phrase, none of which begins as one shortly before it.

Letters: B documents, I phrases, J steps within a phrase, V words of the vocabulary, O words of the batch's documents that it
lacks.
"""

import torch

from .decoder_exhird import Memory, Step
from .outputs_exhird import GeneratedRows
from .words_exhird import TINY

BANNED = -1e20


class Limits:
    """What may be said when: the numbers of phrases and steps, and which words are out of place.

    Args:
        config: with the special words' ids.
        max_phrases, max_length: I and J at most.
        window: K_D, 0 for no exclusion and -1 for all phrases before.
        beams: hypotheses of each phrase, the likeliest of which is kept.

    Raises:
        ValueError: for a number out of range.
    """

    def __init__(self, config, max_phrases: int, max_length: int, window: int, beams: int = 1):
        given = (("max_phrases", max_phrases, 1), ("max_phrase_length", max_length, 3), ("num_beams", beams, 1))
        for name, value, least in (*given, ("exclusion_window", window, -1)):
            if value < least:
                raise ValueError(f"{name}={value}: it must be {least} or more.")
        self.max_phrases, self.max_length, self.window, self.beams = max_phrases, max_length, window, beams
        self.end, self.stop, self.pad = config.end_phrase_token_id, config.eos_token_id, config.pad_token_id

    def apply(self, p: torch.Tensor, phrase: int, step: int, firsts: list[torch.Tensor], value: float):
        """P, or log P, (n, V + O), which it overwrites: what is out of place gets the value.

        Args:
            firsts: each phrase before's first word, (n,) extended ids, -1 for none.
        """
        banned = [self.stop] if step else [self.end]
        if step == phrase == 0:
            banned = [self.end, self.stop]
        p[:, [self.pad, *banned]] = value  # padding can be copied where a document has nothing else
        if step == 1 and self.window:
            for words in firsts if self.window < 0 else firsts[-self.window :]:
                said = (words >= 0).nonzero().squeeze(1)
                p[said, words[said]] = value
        return p


@torch.no_grad()
def generate_rows(model, memory: Memory, start: torch.Tensor, extra: int, limits: Limits) -> GeneratedRows:
    """All phrases of a batch of documents; documents that are done leave it.

    Args:
        model: with `decoder`, `mixture` and `read_words`.
        memory, start: memory and h_0 of B documents.
        extra: O.
    """
    B = len(start)
    rows, scores = [], []
    alive = torch.arange(B, device=start.device)
    h, ended = start, torch.zeros_like(start)
    firsts: list[torch.Tensor] = []
    for phrase in range(limits.max_phrases):
        h = model.decoder.next_phrase(ended, h)
        write = write_phrase if limits.beams == 1 else write_phrase_by_beams
        ids, log_p, ended = write(model, memory, h, extra, limits, phrase, firsts)
        rows.append(ids.new_full((B, limits.max_length), limits.pad).index_copy(0, alive, ids))
        scores.append(log_p.new_zeros(B).index_copy(0, alive, log_p))
        on = (ids[:, 0] != limits.stop).nonzero().squeeze(1)
        if not len(on):
            break
        first = torch.where(ids[:, 1] == limits.pad, -1, ids[:, 1])
        firsts = [*firsts, first]
        if limits.window > 0:
            firsts = firsts[-limits.window :]
        if len(on) < len(alive):
            alive, memory, h, ended = alive[on], memory.take(on), h[on], ended[on]
            firsts = [words[on] for words in firsts]
    return GeneratedRows(torch.stack(rows, 1), torch.stack(scores, 1))


def write_phrase(model, memory: Memory, h, extra: int, limits: Limits, phrase: int, firsts):
    """One phrase of every document, the likeliest word at each step.

    Returns: ids (n, J), their log-probability (n,), the vector that ended the phrase (n, d).
    """
    n = len(h)
    query, now = model.decoder.phrase_attention(h), Step(h, torch.zeros_like(h), None)
    word = h.new_full((n,), model.config.bos_token_id, dtype=torch.long)
    ids = word.new_full((n, limits.max_length), limits.pad)
    total, ended, open_ = h.new_zeros(n), torch.zeros_like(h), torch.ones_like(word, dtype=torch.bool)
    for step in range(limits.max_length):
        now = model.decoder.step(model.read_words(word), now, query, memory)
        p = model.mixture.probabilities(now.vector, now.attention, memory.copy_ids, extra)
        best, word = limits.apply(p, phrase, step, firsts, -1.0).max(1)
        ids[:, step] = torch.where(open_, word, limits.pad)
        total = total + torch.where(open_, (best + TINY).log(), 0.0)
        ended = torch.where(open_[:, None], now.vector, ended)
        open_ = open_ & (word != limits.end) & (word != limits.stop)
        if not open_.any():
            break
    return ids, total, ended


def write_phrase_by_beams(model, memory: Memory, h, extra: int, limits: Limits, phrase: int, firsts):
    """As `write_phrase`, the likeliest of several hypotheses by its mean log-probability a word. Not in the papers."""
    n, K = len(h), limits.beams
    wide = torch.arange(n, device=h.device).repeat_interleave(K)
    memory, h = memory.take(wide), h[wide]
    firsts = [words[wide] for words in firsts]
    query, now = model.decoder.phrase_attention(h), Step(h, torch.zeros_like(h), None)
    word = h.new_full((n * K,), model.config.bos_token_id, dtype=torch.long)
    ids = word.new_full((n * K, limits.max_length), limits.pad)
    total = h.new_full((n, K), BANNED)
    total[:, 0] = 0  # all begin alike: one of them is enough
    ended, open_, length = torch.zeros_like(h), torch.ones_like(word, dtype=torch.bool), h.new_zeros(n * K)
    for step in range(limits.max_length):
        now = model.decoder.step(model.read_words(word), now, query, memory)
        p = model.mixture.probabilities(now.vector, now.attention, memory.copy_ids, extra)
        log_p = limits.apply((p + TINY).log(), phrase, step, firsts, BANNED)
        stay = torch.full_like(log_p, BANNED)
        stay[:, limits.pad] = 0  # a phrase that has ended goes on as it is
        log_p = torch.where(open_[:, None], log_p, stay)
        ended = torch.where(open_[:, None], now.vector, ended)
        length = length + open_
        # compared by the mean a word: a sum would prefer phrases that have just begun to end
        grown = (total.reshape(-1, 1) + log_p).reshape(n, -1)
        mean = (grown.reshape(n, K, -1) / length.reshape(n, K, 1).clamp(min=1)).reshape(n, -1)
        chosen = mean.topk(K, dim=1).indices
        total = grown.gather(1, chosen)
        parent = (chosen // log_p.shape[1] + torch.arange(n, device=h.device)[:, None] * K).flatten()
        word = (chosen % log_p.shape[1]).flatten()
        now = Step(now.state[parent], now.vector[parent], None)
        ids, ended, open_, length = ids[parent], ended[parent], open_[parent], length[parent]
        ids[:, step] = torch.where(open_, word, limits.pad)
        open_ = open_ & (word != limits.end) & (word != limits.stop)
        if not open_.any():
            break
    best = (total / length.reshape(n, K).clamp(min=1)).argmax(1) + torch.arange(n, device=h.device) * K
    return ids[best], total.flatten()[best], ended[best]
