"""Generation: the limits on phrases and words, `generate` of transformers under them, and phrase by phrase without it.

Letters: B documents, I phrases, J steps within a phrase, V words of the vocabulary, O words of the batch's documents that it
lacks.
"""

import copy

import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessor

from .decoder_exhird import DecoderState, Memory, Step
from .outputs_exhird import GeneratedRows
from .words_exhird import TINY

BANNED = -1e20
LIMITS = ("max_phrases", "max_phrase_length", "exclusion_window")


class Limits:
    """What may be said when: the numbers of phrases and steps, and which words are out of place.

    Args:
        config: with the special words' ids, and the limits that are not given.
        max_phrases, max_length: I and J at most.
        window: K_D, 0 for no exclusion and -1 for all phrases before.
        beams: hypotheses of each phrase, the likeliest of which is kept.

    Raises:
        ValueError: for a number out of range.
    """

    def __init__(
        self,
        config,
        max_phrases: int | None = None,
        max_length: int | None = None,
        window: int | None = None,
        beams: int = 1,
    ):
        given = zip(LIMITS, (max_phrases, max_length, window), (1, 3, -1), strict=True)
        given = [(name, getattr(config, name) if value is None else value, least) for name, value, least in given]
        for name, value, least in (*given, ("num_beams", beams, 1)):
            if value < least:
                raise ValueError(f"{name}={value}: it must be {least} or more.")
        self.max_phrases, self.max_length, self.window = (value for _, value, _ in given)
        self.beams = beams
        self.end, self.stop, self.pad = config.end_phrase_token_id, config.eos_token_id, config.pad_token_id

    @property
    def max_tokens(self) -> int:
        """Of a flat sequence: `<s>`, each phrase's words and the `;` after the last one allowed, `</s>`."""
        return 2 + self.max_phrases * (self.max_length + 1)

    def apply(self, p: torch.Tensor, phrase: int, step: int, firsts: list[torch.Tensor], value: float):
        """P, or log P, (n, V + O), which it overwrites: what is out of place gets the value.

        Exclusive search, the hard exclusion of ExHiRD-h (Chen et al. 2020, "ES" in Fig. 2, no numbered equation):

            P_i(y_1 = w) = 0   for every w that is y_1 of one of the phrases i - K_D, ..., i - 1

        y_1 is a phrase's first word, at step 1, after its start. The rest is not normalised again. K_D is the window
        size of the exclusive search, "history" in the reference code; the soft exclusion of ExHiRD-s, "EL" in Fig. 2, is the
        exclusive loss L_ex in training.

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


class PhraseLimits(LogitsProcessor):
    """`Limits` for flat sequences: what may follow a prefix `<s> start words ; start words ; ...`.

    A phrase of J words without `;` gets one, and I phrases are followed by `</s>`, both with log P = 0, since nothing else
    can follow. Where other processors left nothing that may follow, their choice stands.
    """

    def __init__(self, limits: Limits):
        self.limits = limits

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """input_ids (n, T), scores (n, V + O) -> scores with -inf for what is out of place."""
        limits, nothing = self.limits, -torch.inf
        there, ends = input_ids != limits.pad, input_ids == limits.end
        place = there.cumsum(1)
        begin = torch.where(ends | (there & (place == 1)), place, 0).cummax(1).values  # where the phrase begins
        step, phrase = place[:, -1] - begin[:, -1], ends.sum(1)  # of the next word
        first = step == 0
        limited = scores.clone()
        limited[:, limits.pad] = nothing
        limited[:, limits.end] = limited[:, limits.end].masked_fill(first, nothing)
        limited[:, limits.stop] = limited[:, limits.stop].masked_fill(~first | (phrase == 0), nothing)
        if limits.window:
            before = torch.cat([torch.zeros_like(begin[:, :1]), begin[:, :-1]], 1)
            first_words = there & (place - before == 2) & (before > 0)  # each phrase's first word
            if limits.window > 0:
                first_words = first_words & (ends.cumsum(1) - ends.long() >= phrase[:, None] - limits.window)
            first_words = first_words & (step == 1)[:, None]
            limited.scatter_(1, input_ids.masked_fill(~first_words, limits.pad), nothing)
        if scores.amin() == nothing:  # others have forbidden words too
            limited = torch.where(limited.amax(1, keepdim=True) == nothing, scores, limited)
        for rows, word in (
            (step >= limits.max_length, limits.end),
            (first & (phrase >= limits.max_phrases), limits.stop),
        ):
            rows = rows.nonzero().squeeze(1)
            limited[rows] = nothing
            limited[rows, word] = 0
        return limited


class PhraseGenerationMixin(GenerationMixin):
    """transformers' `generate` for the hierarchical decoder, whose state is a function of the flat prefix."""

    def set_generation_defaults(self):
        """The configuration's special words, and room for all phrases unless a length is set.

        A generation config with other special words is that of a pretrained encoder, which says nothing about this
        decoder. The length is explicit because Seq2SeqTrainer writes 20 into a generation config without one.
        """
        names = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
        ids, own = {name: getattr(self.config, name) for name in names}, self.generation_config
        if any(getattr(own, name) not in (None, value) for name, value in ids.items()):
            own = self.generation_config = GenerationConfig.from_model_config(self.config)
        own.update(**ids)
        if own.max_length is None:
            own.max_length = Limits(self.config).max_tokens
        own._from_model_config = False  # or fields of ours are not read from a file

    def adjust_generation_fn(self, *args, **kwargs):
        """`from_pretrained` reads `generation_config.json` here; older checkpoints have none."""
        super().adjust_generation_fn(*args, **kwargs)
        self.set_generation_defaults()

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config=None,
        logits_processor=None,
        *,
        max_phrases: int | None = None,
        max_phrase_length: int | None = None,
        exclusion_window: int | None = None,
        **kwargs,
    ):
        """Sequences of extended ids: `<s>`, each phrase's start, words and `;`, one phrase after the other, `</s>`, and padding.

        Greedy search, sampling and beam search over whole sequences, as in transformers. Greedy search writes what
        `generate_rows` writes; a phrase that is cut at the limit is given a `;`.

        Args:
            inputs, generation_config, logits_processor, kwargs: as in `GenerationMixin.generate`: what `forward` reads
                (`input_ids`, `attention_mask`, `copy_ids`, ...) and `max_length`, `max_new_tokens`, `min_length`, `num_beams`,
                `num_return_sequences`, `do_sample`, `temperature`, `top_k`, `top_p`, `length_penalty`, `early_stopping`,
                `repetition_penalty`, `no_repeat_ngram_size`, `return_dict_in_generate`, ... `max_length` is by default what
                the phrases can fill.
            max_phrases, max_phrase_length, exclusion_window: by default those of `generation_config`, and else the model's
                configuration.

        Returns:
            `(B * num_return_sequences, T)`, or transformers' `ModelOutput` with `sequences`.

        Raises:
            ValueError: for an argument that is not supported, or out of range; it is named.
        """
        given = copy.deepcopy(generation_config)

        def setting(name):
            found = (kwargs.get(name), getattr(given, name, None), getattr(self.generation_config, name, None))
            return next((value for value in found if value is not None), None)

        refuse_unsupported(setting)
        own = {"max_phrases": max_phrases, "max_phrase_length": max_phrase_length, "exclusion_window": exclusion_window}
        limits = Limits(self.config, *(setting(name) if value is None else value for name, value in own.items()))
        length = kwargs.pop("max_length", None) or getattr(given, "max_length", None)
        new = kwargs.pop("max_new_tokens", None) or getattr(given, "max_new_tokens", None)
        if new is not None:
            length = self.prompt_length(kwargs.get("decoder_input_ids")) + new
        elif length is None and self.generation_config.max_length in (None, Limits(self.config).max_tokens):
            length = limits.max_tokens
        if given is not None:
            given.max_length, given.max_new_tokens = length, None
        elif length is not None:
            kwargs["max_length"] = length
        if kwargs.get("copy_ids") is None:
            kwargs["copy_ids"] = kwargs.get("input_ids") if inputs is None else inputs
        processors = [*(logits_processor or ()), PhraseLimits(limits)]
        return super().generate(inputs, given, processors, max_phrase_length=limits.max_length, **kwargs)

    def prompt_length(self, decoder_input_ids: torch.Tensor | None) -> int:
        """What `max_new_tokens` come after: the start, which is put before a prompt without it."""
        if decoder_input_ids is None:
            return 1
        without = bool((decoder_input_ids[:, 0] != self.config.decoder_start_token_id).all())
        return decoder_input_ids.shape[1] + without

    def _prepare_cache_for_generation(self, *args, **kwargs):
        """Nothing: the first step makes a `DecoderState`."""

    @staticmethod
    def _reorder_cache(past_key_values: DecoderState, beam_idx: torch.Tensor) -> DecoderState:
        return past_key_values.take(beam_idx)

    def compute_transition_scores(
        self,
        sequences: torch.Tensor,
        scores: tuple[torch.Tensor, ...],
        beam_indices: torch.Tensor | None = None,
        normalize_logits: bool = False,
    ) -> torch.Tensor:
        """As in transformers, which takes the scores to be of V words; these are of V + O."""
        steps = torch.stack(scores, 1)  # (hypotheses, T, V + O)
        if normalize_logits:
            steps = steps.log_softmax(-1)
        if beam_indices is None:
            beam_indices = torch.arange(len(steps), device=steps.device)[:, None].expand(-1, steps.shape[1])
        none = beam_indices < 0
        length = int((~none).sum(1).max())
        rows, none = beam_indices[:, :length].clamp(min=0), none[:, :length]
        words = sequences[:, sequences.shape[1] - length :]
        found = steps[rows, torch.arange(length, device=steps.device), words]
        return found.masked_fill(none, 0)


UNSUPPORTED = {
    "assistant_model": None,
    "prompt_lookup_num_tokens": None,
    "cache_implementation": None,
    "past_key_values": None,
    "inputs_embeds": None,
    "negative_prompt_ids": None,
    "guidance_scale": 1,
    "watermarking_config": None,
    "stop_strings": None,
    "token_healing": False,
    "prefill_chunk_size": None,
    "low_memory": False,
    "penalty_alpha": 0,
    "dola_layers": None,
    "constraints": None,
    "force_words_ids": None,
    "num_beam_groups": 1,
    "diversity_penalty": 0,
}


def refuse_unsupported(setting):
    """setting(name) -> the value of an argument of `generate`, or None.

    Raises:
        ValueError: for the first that the hierarchical decoder does not support.
    """
    for name, harmless in UNSUPPORTED.items():
        value = setting(name)
        if value is not None and value != harmless:
            raise ValueError(
                f"generate() of a keyphrase generator does not support {name}={value!r:.60}. Leave it out."
            )
    if setting("do_sample") and (setting("num_beams") or 1) > 1:
        raise ValueError(
            f"generate() of a keyphrase generator does not support do_sample=True with num_beams={setting('num_beams')}: where "
            "only `;` or `</s>` can follow, there is too little to draw from. Leave one of them out."
        )
