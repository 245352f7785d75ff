# SPDX-License-Identifier: Apache-2.0
"""Keyphrases of a stock decoder such as Llama: greedy `generate` with a logits processor, and the probabilities of given phrases.

Letters: n sequences, T tokens, V vocabulary, P tokens of a prompt, K tokens of phrases.
"""

import math
import re
from collections.abc import Sequence

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from .data_exhird import has_words, phrase_words
from .exclusion_exhird import ExclusionLogitsProcessor
from .generation_exhird import Document, KeyphraseGenerator, Written
from .prompts_exhird import EncodedPrompt, PromptFormat
from .search_exhird import check_limits

logger = logging.get_logger(__name__)

MAX_TOKENS = 512  # of the phrases that are read in one pass
MASKED = ("eager", "sdpa")  # attention that takes any mask


class PhraseLogitsProcessor(ExclusionLogitsProcessor):
    """Exclusive search, and the limits of phrases, for greedy search of one batch of documents.

    After the last token allowed of a phrase a separator is certain, and EOS after the last phrase.

    Args:
        written: the marks and the limits, which the others replace unless they are `None`.
        prompt_length: width of the prompts.
        min_phrases: of a document: EOS is forbidden before the last of them.

    Attributes:
        log_p: for each token (n,) its log P; of one that ends a phrase, that the phrase ends there, with whichever token. P of other
            tokens is not renormalised.

    Raises:
        ValueError: for a number out of range, and for scores that are NaN.
    """

    def __init__(
        self,
        written: PromptFormat,
        prompt_length: int,
        max_phrases: int | None = None,
        max_tokens_per_phrase: int | None = None,
        exclusion_window: int | None = None,
        min_phrases: int = 0,
    ):
        given = {"max_phrases": max_phrases, "max_tokens_per_phrase": max_tokens_per_phrase}
        given |= {"exclusion_window": exclusion_window}
        limits = {name: getattr(written.settings, name) if value is None else value for name, value in given.items()}
        check_limits({"exclusion_window": -1, "min_phrases": 0}, limits | {"min_phrases": min_phrases})
        self.max_phrases, self.max_tokens, window = limits.values()
        super().__init__(None, [written.separator, written.absent], window, prompt_length=prompt_length)
        self.written, self.min_phrases, self.log_p = written, min_phrases, list[torch.Tensor]()

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """input_ids (n, T), scores (n, V) -> log P, with -inf for forbidden tokens."""
        if scores.isnan().any():
            raise ValueError("The model's probabilities are NaN. Check its weights, or open it with dtype='float32'.")
        answer, ends = input_ids[:, self.prompt_length :], torch.tensor(self.written.ends, device=scores.device)
        log_p = super().__call__(input_ids, scores.float().log_softmax(-1))
        at_ends = log_p[:, ends].logsumexp(1)
        ended = torch.isin(answer, ends)
        phrase = ended.sum(1)  # of the next token
        step = (~ended).flip(1).int().cumprod(1).sum(1)  # tokens of its phrase so far
        stops = self.written.stops
        early = phrase < self.min_phrases - (step > 0).int()
        limited = log_p.clone()
        limited[:, stops] = limited[:, stops].masked_fill(early[:, None], -torch.inf)
        done, full = (phrase >= self.max_phrases) & (step == 0), step >= self.max_tokens
        for rows, token in ((full, self.written.separator), (done, stops[0])):
            limited[rows] = -torch.inf
            limited[rows, token] = 0
        own, chosen = limited.max(1)
        own = torch.where(torch.isin(chosen, ends), at_ends, own)
        self.log_p.append(own.masked_fill(done | full, 0))
        return limited


class PromptedKeyphraseGenerator(KeyphraseGenerator):
    """`KeyphraseGenerator` for a stock decoder whose configuration has `keyphrase_generation`, and its tokenizer. Its options are those of
    `PhraseLogitsProcessor`.
    """

    def set_up(self):
        """See `KeyphraseGenerator`."""
        self.format = PromptFormat(self.tokenizer, self.model.config)
        self.known_words = set(self.format.settings.frequent_words.split())
        self.least_known = 0.08 if self.known_words else 0.0

    def encode(self, documents: Sequence[Document]) -> list[EncodedPrompt]:
        """See `KeyphraseGenerator`. Warns of documents that are not read to their end."""
        limit = self.format.settings.max_source_length
        prompts = self.format.encode([document[:2] for document in documents], [limit] * len(documents))
        if truncated := sum(prompt.dropped > 0 for prompt in prompts):
            logger.warning(
                f"{truncated:,} of {len(prompts):,} documents have more than max_source_length={limit:,} tokens: their end is not read."
            )
        return prompts

    @torch.no_grad()
    def generate_batch(self, sources: Sequence[EncodedPrompt]) -> list[list[Written]]:
        """See `KeyphraseGenerator`."""
        written, model = self.format, self.model
        width = max(len(source.input_ids) for source in sources)
        ids = torch.tensor([[written.pad_id] * (width - len(each.input_ids)) + each.input_ids for each in sources])
        mask = torch.tensor([[0] * (width - len(each.input_ids)) + [1] * len(each.input_ids) for each in sources])
        processor = PhraseLogitsProcessor(written, width, **self.generate_kwargs)
        length = processor.max_phrases * (processor.max_tokens + 1)
        tokens = {"eos_token_id": written.stops, "pad_token_id": written.pad_id}
        config = GenerationConfig(do_sample=False, num_beams=1, use_cache=True, max_new_tokens=length, **tokens)
        inputs = {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}
        found = model.generate(**inputs, generation_config=config, logits_processor=[processor])[:, width:].tolist()
        scores = torch.stack(processor.log_p, 1).tolist()
        return [self.split(*answer) for answer in zip(found, scores, strict=True)]

    def split(self, ids: list[int], scores: list[float]) -> list[Written]:
        """An answer's tokens and their log P -> its phrases, without empty ones and without those that go in circles."""
        phrases, start, ends = list[Written](), 0, set(self.format.ends)
        plain = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        for i, token in enumerate(ids):
            if token in ends or i + 1 == len(ids):
                whole = self.tokenizer.decode(ids[start : i if token in ends else i + 1], **plain)
                read = self.read_phrases(whole, sum(scores[start : i + 1]))
                phrases += [p for p in read if self.raw or max(map(p.words.count, p.words)) < 3]
                start = i + 1
            if token in self.format.stops:
                break
        return phrases

    def read_phrases(self, text: str, log_p: float | None = None) -> list[Written]:
        """The phrases of a text: tokens other than the marks contain `;` and `|`, too."""
        parts = [" ".join(part.split()) for part in re.split(r"[;|]", text)]
        # evaluation counts every number as <digit>
        read = [Written(phrase_words(part, known_numbers=not self.raw), part, log_p) for part in parts]
        return [phrase for phrase in read if phrase.words]

    def read_candidates(self, document: Document) -> list[Written]:
        """The candidates of a document, and the known keyphrases that occur in its title; those that have no words are left out with a
        warning.
        """
        read = list[Written]()
        for text in [*(document.candidates or ()), *self.format.known_in(document.title)]:
            read += (phrases := self.read_phrases(text))
            if not any(has_words(phrase.words) for phrase in phrases):
                logger.warning_once(f"A candidate without a Latin letter or a digit is left out: {text!r:.60}.")
        return read

    def score(self, phrases: Sequence[str], absent: Sequence[bool], source: EncodedPrompt) -> list[float | None]:
        """The probability of each phrase as the first one, or of one that does not occur, as the first after the mark of these; `None` for
        a phrase of too many tokens.
        """
        limit, ids = self.format.settings.max_tokens_per_phrase, self.format.phrase_ids(phrases)
        for text, own in zip(phrases, ids, strict=True):
            if len(own) > limit:
                logger.warning_once(f"{text!r:.60} is left out: it has more than max_tokens_per_phrase={limit} tokens.")
        kept = [i for i, own in enumerate(ids) if len(own) <= limit]
        given = [ids[i] for i in kept], [absent[i] for i in kept]
        found = dict(zip(kept, score_phrases(self.model, self.format, source.input_ids, *given), strict=True))
        return [math.exp(found[i]) if i in found else None for i in range(len(phrases))]


@torch.no_grad()
def score_phrases(
    model, written: PromptFormat, prompt: list[int], phrases: Sequence[list[int]], absent: Sequence[bool]
) -> list[float]:
    """log P(phrase | prompt) of each phrase as the answer's first one; of one that does not occur in the document as the first after
    the mark of these, which is what a decoder writes of a document without present keyphrases.

    A phrase ends with any token that may end one, as in `PhraseLogitsProcessor`.

    Args:
        model, written: a decoder, and its marks.
        prompt: token ids.
        phrases: token ids of each, at least one.
        absent: whether each phrase does not occur in the document.

    Raises:
        ValueError: for an attention that takes no mask of its own.
    """
    if (kind := model.config._attn_implementation) not in MASKED:
        raise ValueError(
            f"attn_implementation={kind!r} cannot score candidates. Open the model with 'sdpa' or 'eager'."
        )
    scores, start = list[float](), 0
    for end in range(1, len(phrases) + 1):
        if end == len(phrases) or sum(map(len, phrases[start : end + 1])) > MAX_TOKENS:
            scores += read_side_by_side(model, written, prompt, phrases[start:end], absent[start:end])
            start = end
    return scores


def read_side_by_side(model, written: PromptFormat, prompt, phrases, absent) -> list[float]:
    """`score_phrases` in one pass over the prompt, the mark, and all phrases side by side.

    A token reads the prompt and its own phrase only, at the positions that it would have alone, so that each phrase has the probability
    that it has alone.
    """
    P = len(prompt)
    lengths = torch.tensor([len(ids) for ids in phrases])
    ids = torch.tensor([*prompt, written.absent, *(token for phrase in phrases for token in phrase)])
    phrase = torch.arange(len(phrases)).repeat_interleave(lengths)  # (K,)
    after_mark = torch.tensor(absent)[phrase].long()  # (K,)
    place = torch.arange(len(phrase)) - (lengths.cumsum(0) - lengths)[phrase]  # in its phrase
    positions = torch.cat([torch.arange(P + 1), P + after_mark + place])
    of_phrase = torch.cat([torch.full((P,), -1), torch.tensor([-2]), phrase])
    of_absent = torch.cat([torch.zeros(P, dtype=torch.bool), torch.tensor([True]), after_mark.bool()])
    reads = (of_phrase[:, None] == of_phrase) | (of_phrase == -1) | (of_absent[:, None] & (of_phrase == -2))
    mask = torch.zeros(reads.shape, dtype=model.dtype).masked_fill(~reads.tril(), torch.finfo(model.dtype).min)
    given = {"input_ids": ids, "position_ids": positions, "attention_mask": mask[None]}
    given = {name: value[None].to(model.device) for name, value in given.items()}
    logits = model(**given, use_cache=False, logits_to_keep=len(phrase) + 2).logits[0].float().cpu()  # (K + 2, V)
    total = logits.logsumexp(1)
    # row 0 is the prompt's last token, 1 the mark; these predict the first token of a phrase, then each the next one
    rows = torch.where(place == 0, after_mark, torch.arange(len(phrase)) + 1)
    log_p = logits[rows, ids[P + 1 :]] - total[rows]
    last = lengths.cumsum(0) + 1
    at_ends = logits[last[:, None], torch.tensor(written.ends)].logsumexp(1) - total[last]
    return at_ends.index_add(0, phrase, log_p).tolist()
