# SPDX-License-Identifier: Apache-2.0
"""Decoding a decoder phrase by phrase, greedily or with beam search over each phrase, as `search_exhird` does for ExHiRD.

All documents of a batch begin a phrase together. While some still write theirs, the others read padding that no token attends to.

Letters: n sequences, K hypotheses of a phrase, J tokens of a phrase with the one that ends it, T tokens, V vocabulary.
"""

import torch

from .cache_exhird import CACHE
from .exclusion_exhird import exclude_first_words, keep_possible
from .search_exhird import NEG_INF, ExhirdGenerateOutput, check_phrase_limits, refuse_nan


class Continuation:
    """Sequences that a decoder has read, and can go on with.

    Args:
        model: a decoder.
        ids, mask (`(n, T)`): prompts, padded on either side.

    Attributes:
        logits (`(n, V)`): of the next token, in float32.
        mask (`(n, T)`): which columns of the cache are tokens of a sequence.
    """

    def __init__(self, model, ids: torch.Tensor, mask: torch.Tensor):
        order = mask.bool().long().argsort(dim=1, stable=True)  # padding first
        ids, self.mask = ids.gather(1, order), mask.bool().gather(1, order)
        self.model, self.cache, self.logits = model, None, None
        self._read(ids, (self.mask.cumsum(1) - 1).clamp(min=0))

    def _read(self, ids: torch.Tensor, positions: torch.Tensor):
        options = {
            "attention_mask": self.mask.long(),
            "position_ids": positions,
            "use_cache": True,
            "logits_to_keep": 1,
        }
        outputs = self.model(input_ids=ids, **options, **{CACHE: self.cache})
        self.cache, self.logits = outputs[CACHE], outputs.logits[:, -1].float()
        refuse_nan(self.logits)

    def append(self, words: torch.Tensor, real: torch.Tensor):
        """Reads a token (n,) of each sequence; where `real` (n,) is false it is padding, and nothing changes."""
        before, self.mask = self.logits, torch.cat([self.mask, real[:, None]], 1)
        self._read(words[:, None], self.mask.sum(1, keepdim=True) - 1)
        self.logits = torch.where(real[:, None], self.logits, before)

    def take(self, rows: torch.Tensor):
        """Keeps these sequences, by an index."""
        self.cache.batch_select_indices(rows)
        self.mask, self.logits = self.mask[rows], self.logits[rows]


class CausalPhraseSearch:
    """Phrases of prompts. Each ends with a mark of the configuration or with EOS, which also ends the document.

    Args:
        model: an `ExhirdForCausalLM`.
        max_phrases, max_tokens_per_phrase, exclusion_window: default to the configuration.
        num_beams: K.
        min_phrases: of a document: EOS is forbidden before the last of them.

    Raises:
        ValueError: for a number out of range, and if the configuration does not name the tokens between phrases.
    """

    def __init__(
        self, model, max_phrases=None, max_tokens_per_phrase=None, exclusion_window=None, num_beams=1, min_phrases=0
    ):
        config = model.config
        given = {"max_phrases": max_phrases, "max_tokens_per_phrase": max_tokens_per_phrase}
        given |= {"exclusion_window": exclusion_window}
        values = {name: getattr(config, name) if value is None else value for name, value in given.items()}
        least = {"exclusion_window": -1, "min_phrases": 0}
        for name, value in {**values, "num_beams": num_beams, "min_phrases": min_phrases}.items():
            if value < (minimum := least.get(name, 1)):
                raise ValueError(f"{name}={value} must be at least {minimum}.")
        check_phrase_limits(min_phrases, values["max_phrases"])
        self.model, self.K, self.min_phrases = model, num_beams, min_phrases
        self.max_phrases, self.max_tokens, self.window = values.values()
        self.separator, self.stops = config.marks[0], config.ends
        self.pad = self.separator if config.pad_token_id is None else config.pad_token_id
        self.ends = torch.tensor([*config.marks, *self.stops], device=model.device)

    def __call__(self, ids: torch.Tensor, mask: torch.Tensor) -> ExhirdGenerateOutput:
        """Prompts (n, T) -> ids (n, I, J): the tokens of each phrase with the one that ends it, padded; of a document whose last
        phrase ends with EOS, the other rows are padding. And the log-probability of each phrase (n, I).
        """
        state, n = Continuation(self.model, ids, mask), len(ids)
        rows, scores, active = [], [], torch.arange(n, device=ids.device)
        first_words: list[torch.Tensor] = []
        stops = torch.tensor(self.stops, device=ids.device)
        for _ in range(self.max_phrases):
            words, log_p = self.next_phrase(state, first_words)
            rows.append(words.new_full((n, words.shape[1]), self.pad).index_copy(0, active, words))
            scores.append(log_p.new_zeros(n).index_copy(0, active, log_p))
            first_words.append(words[:, 0])
            length = (~torch.isin(words, self.ends)).int().cumprod(1).sum(1, keepdim=True)  # padding may be EOS, too
            kept = (~torch.isin(words.gather(1, length), stops)).squeeze(1).nonzero().squeeze(1)
            if not len(kept):
                break
            if len(kept) < len(active):
                active, first_words = active[kept], [first[kept] for first in first_words]
                state.take(kept)
        return ExhirdGenerateOutput(torch.stack(rows, 1), torch.stack(scores, 1))

    def next_phrase(self, state: Continuation, first_words: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The hypothesis with the highest mean log-probability per token: ids (n, J) and log-probability (n,), that the phrase ends
        there, with whichever token. The state has read it afterwards. `first_words` has the first token (n,) of each preceding phrase.
        """
        n, K = len(state.mask), self.K
        groups = torch.arange(n, device=state.mask.device)[:, None]
        if K > 1:
            state.take(groups.flatten().repeat_interleave(K))
            first_words = [words.repeat_interleave(K) for words in first_words]
        total = state.logits.new_full((n, K), NEG_INF)
        total[:, 0] = 0  # all hypotheses start equal, so only one is expanded
        ids = groups.new_full((n * K, self.max_tokens + 1), self.pad)
        unfinished, length = torch.ones_like(ids[:, 0], dtype=torch.bool), total.new_zeros(n * K)
        others = total.new_zeros(n * K)  # what the other tokens that may end a phrase add to its log P
        for step in range(self.max_tokens + 1):
            log_p = self.next_log_p(state, step, first_words, unfinished)
            at_ends = log_p[:, self.ends].logsumexp(1)
            # P of other phrases is not renormalised, as in exclusive search
            if len(first_words) < self.min_phrases - (step > 0):
                log_p[:, self.stops] = torch.where(unfinished[:, None], -torch.inf, log_p[:, self.stops])
            length = length + (unfinished & (step < self.max_tokens))
            # compared by the mean per token: a sum would prefer short phrases
            sums = (total.reshape(-1, 1) + log_p).reshape(n, -1)
            means = sums.reshape(n, K, -1) / length.reshape(n, K, 1).clamp(min=1)
            best = means.reshape(n, -1).topk(K, dim=1).indices
            total, own = sums.gather(1, best), log_p.reshape(n, -1).gather(1, best).flatten()
            words = (best % log_p.shape[1]).flatten()
            if K > 1:
                parents = (best // log_p.shape[1] + groups * K).flatten()
                state.take(parents)
                ids, unfinished, length, others = (x[parents] for x in (ids, unfinished, length, others))
                at_ends = at_ends[parents]
            ended = unfinished & torch.isin(words, self.ends)
            others = others + torch.where(ended & own.isfinite(), at_ends - own, 0)
            ids[:, step] = torch.where(unfinished, words, self.pad)
            state.append(ids[:, step], unfinished)
            unfinished = unfinished & ~ended
            if not unfinished.any():
                break
        best = (total / length.reshape(n, K).clamp(min=1)).argmax(1)
        chosen = best + groups.squeeze(1) * K
        if K > 1:
            state.take(chosen)
        return ids[chosen], (total.flatten() + others)[chosen]

    def next_log_p(self, state: Continuation, step: int, first_words, unfinished: torch.Tensor) -> torch.Tensor:
        """Log P (n K, V) of the next token. After the last token allowed, a separator is certain, and padding after the end."""
        certain = torch.full_like(state.logits, -torch.inf)
        if step == self.max_tokens:
            certain[:, self.separator] = 0
            return certain
        log_p = state.logits.log_softmax(-1)
        if step == 0:
            log_p = keep_possible(exclude_first_words(log_p.clone(), first_words, self.window, -torch.inf), log_p)
        certain[:, self.pad] = 0
        return torch.where(unfinished[:, None], log_p, certain)
