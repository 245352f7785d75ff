# SPDX-License-Identifier: Apache-2.0
"""From documents to keyphrases: `generate` of transformers, phrase-by-phrase generation, and keyphrases with offsets.

Letters: B documents, I phrases, V words of the vocabulary, O out-of-vocabulary words of the batch's documents.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

import torch
from transformers import GenerationConfig, GenerationMixin

from .data_exhird import DataCollatorForKeyphraseGeneration, find_phrase, find_text, has_words, signs_of, stem
from .decoder_exhird import DecoderState
from .search_exhird import DecodingConstraints, ExhirdGenerateOutput, PhraseConstraintsLogitsProcessor, search_phrases
from .tokenization_exhird import DIGIT

SORT_WINDOW = 16  # number of batches whose documents are sorted by length together

# Arguments of `generate` that the hierarchical decoder does not support, with the values that switch them off.
UNSUPPORTED = {
    "assistant_model": None, "prompt_lookup_num_tokens": None, "cache_implementation": None, "cache": None,
    "past_key_values": None,
    "inputs_embeds": None, "negative_prompt_ids": None, "guidance_scale": 1, "watermarking_config": None,
    "stop_strings": None, "token_healing": False, "prefill_chunk_size": None, "low_memory": False, "penalty_alpha": 0,
    "dola_layers": None, "constraints": None, "force_words_ids": None, "num_beam_groups": 1, "diversity_penalty": 0,
}  # fmt: skip


class PhraseGenerationMixin(GenerationMixin):
    """transformers' `generate` for the hierarchical decoder, and `generate_phrases`."""

    def set_generation_defaults(self):
        """Sets the configuration's special tokens, and a `max_length` for all phrases unless one is set.

        A generation config with other special tokens belongs to a pretrained encoder, and is replaced. The length must be
        explicit, because Seq2SeqTrainer writes 20 into a generation config without one.
        """
        names = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
        ids, defaults = {name: getattr(self.config, name) for name in names}, self.generation_config
        if any(getattr(defaults, name) not in (None, value) for name, value in ids.items()):
            defaults = self.generation_config = GenerationConfig.from_model_config(self.config)
        defaults.update(**ids)
        if defaults.max_length is None:
            defaults.max_length = DecodingConstraints(self.config).max_tokens
        defaults._from_model_config = False  # otherwise custom fields are not read from a file

    def adjust_generation_fn(self, *args, **kwargs):
        """Called by `from_pretrained` to read `generation_config.json`, which may be missing."""
        super().adjust_generation_fn(*args, **kwargs)
        self.set_generation_defaults()

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config=None,
        logits_processor=None,
        *,
        max_phrases: int | None = None,
        max_words_per_phrase: int | None = None,
        exclusion_window: int | None = None,
        min_phrases: int | None = None,
        **kwargs,
    ):
        """Flat sequences of extended ids: `<s>`, the start, words and `;` of each phrase, `</s>`, and padding.

        Greedy search, sampling and beam search over whole sequences, as in transformers. Greedy search returns the phrases of
        `generate_phrases`; a phrase that reaches the limit gets a `;`.

        Args:
            inputs, generation_config, logits_processor, kwargs: as in `GenerationMixin.generate`: the arguments of `forward`
                (`input_ids`, `attention_mask`, `copy_ids`, ...) and `max_length`, `max_new_tokens`, `min_length`,
                `num_beams`, `num_return_sequences`, `do_sample`, `temperature`, `top_k`, `top_p`, `length_penalty`,
                `early_stopping`, `repetition_penalty`, `no_repeat_ngram_size`, `return_dict_in_generate`, ... The default
                `max_length` has room for all phrases.
            max_phrases, max_words_per_phrase, exclusion_window: default to `generation_config`, then to the model's
                configuration.
            min_phrases: of a document; defaults to `generation_config`, then to 1.

        Returns:
            `(B * num_return_sequences, T)`, or transformers' `ModelOutput` with `sequences`.

        Raises:
            ValueError: for an argument that is not supported, or out of range.
        """
        generation_config = copy.deepcopy(generation_config)

        def setting(name):
            of_configs = (getattr(config, name, None) for config in (generation_config, self.generation_config))
            return next((value for value in (kwargs.get(name), *of_configs) if value is not None), None)

        check_supported(setting)
        end = kwargs.get("eos_token_id", self.config.eos_token_id)
        if end not in (self.config.eos_token_id, [self.config.eos_token_id]):
            raise ValueError(
                f"generate() of a keyphrase generator does not support eos_token_id={end!r}: its documents end with "
                f"{self.config.eos_token_id}. Leave it out; max_phrases and max_length limit what is generated."
            )
        limits = {"max_phrases": max_phrases, "max_words_per_phrase": max_words_per_phrase}
        limits |= {"exclusion_window": exclusion_window, "min_phrases": min_phrases}
        limits = {name: setting(name) if value is None else value for name, value in limits.items()}
        constraints = DecodingConstraints(self.config, **{**limits, "min_phrases": limits["min_phrases"] or 1})
        length = kwargs.pop("max_length", None) or getattr(generation_config, "max_length", None)
        new = kwargs.pop("max_new_tokens", None) or getattr(generation_config, "max_new_tokens", None)
        default_length = DecodingConstraints(self.config).max_tokens
        if new is not None:
            length = self.prompt_length(kwargs.get("decoder_input_ids")) + new
        elif length is None and self.generation_config.max_length in (None, default_length):
            length = constraints.max_tokens
        if generation_config is not None:
            generation_config.max_length, generation_config.max_new_tokens = length, None
        elif length is not None:
            kwargs["max_length"] = length
        if kwargs.get("copy_ids") is None:
            kwargs["copy_ids"] = kwargs.get("input_ids") if inputs is None else inputs
        # under a name of its own: arguments with names of generation_config do not reach forward
        kwargs["max_tokens_per_phrase"] = constraints.max_steps
        processors = [*(logits_processor or ()), PhraseConstraintsLogitsProcessor(constraints)]
        return super().generate(inputs, generation_config, processors, **kwargs)

    @torch.no_grad()
    def generate_phrases(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        copy_ids: torch.Tensor | None = None,
        subword_ids: torch.Tensor | None = None,
        subword_mask: torch.Tensor | None = None,
        subword_word_ids: torch.Tensor | None = None,
        max_phrases: int | None = None,
        max_words_per_phrase: int | None = None,
        exclusion_window: int | None = None,
        num_beams: int = 1,
        min_phrases: int = 1,
    ) -> ExhirdGenerateOutput:
        """Generates phrase by phrase, with the log-probability of each phrase. The pipeline returns them as text.

        Args:
            input_ids, attention_mask, copy_ids, subword_ids, subword_mask, subword_word_ids: as in `forward`.
            max_phrases, max_words_per_phrase, exclusion_window: default to the configuration.
            num_beams: 1 is greedy search; more is beam search over each phrase.
            min_phrases: of a document.

        Raises:
            ValueError: for a number out of range.
        """
        limits = (max_phrases, max_words_per_phrase, exclusion_window, num_beams, min_phrases)
        constraints = DecodingConstraints(self.config, *limits)
        subwords = {"subword_ids": subword_ids, "subword_mask": subword_mask, "subword_word_ids": subword_word_ids}
        memory, start = self.encode(input_ids, attention_mask, copy_ids, **subwords)
        return search_phrases(self, memory, start, memory.num_oov(self.config.vocab_size), constraints)

    def prompt_length(self, decoder_input_ids: torch.Tensor | None) -> int:
        """Length of the prompt, including the start token that transformers prepends if it is missing."""
        if decoder_input_ids is None:
            return 1
        no_start = bool((decoder_input_ids[:, 0] != self.config.decoder_start_token_id).all())
        return decoder_input_ids.shape[1] + no_start

    def _prepare_cache_for_generation(self, *args, **kwargs):
        """Does nothing: the first step makes a `DecoderState`."""

    @staticmethod
    def _reorder_cache(cache: DecoderState, beam_idx: torch.Tensor) -> DecoderState:
        return cache.take(beam_idx)

    def compute_transition_scores(
        self,
        sequences: torch.Tensor,
        scores: tuple[torch.Tensor, ...],
        beam_indices: torch.Tensor | None = None,
        normalize_logits: bool = False,
    ) -> torch.Tensor:
        """As in transformers, which assumes scores of V words; these have V + O."""
        steps = torch.stack(scores, 1)  # (hypotheses, T, V + O)
        if normalize_logits:
            steps = steps.log_softmax(-1)
        if beam_indices is None:
            beam_indices = torch.arange(len(steps), device=steps.device)[:, None].expand(-1, steps.shape[1])
        unused = beam_indices < 0
        length = int((~unused).sum(1).max())
        rows, unused = beam_indices[:, :length].clamp(min=0), unused[:, :length]
        words = sequences[:, sequences.shape[1] - length :]
        return steps[rows, torch.arange(length, device=steps.device), words].masked_fill(unused, 0)


def check_supported(setting):
    """Raises a `ValueError` for arguments of `generate` that the hierarchical decoder does not support.

    Args:
        setting: a function from the name of an argument to its value, or `None`.
    """
    for name, off in UNSUPPORTED.items():
        value = setting(name)
        if value is not None and value != off:
            raise ValueError(
                f"generate() of a keyphrase generator does not support {name}={value!r:.60}. Leave it out."
            )
    if setting("do_sample") and (setting("num_beams") or 1) > 1:
        raise ValueError(
            f"generate() of a keyphrase generator does not support do_sample=True with num_beams={setting('num_beams')}. "
            "Leave one of them out."
        )


def check_document(document, index: int) -> tuple[str | None, str]:
    """A text, or {"title", "text", "candidates"} -> title and text.

    Raises:
        TypeError: for anything else.
    """
    if isinstance(document, str):
        return None, document
    if isinstance(document, Mapping) and isinstance(document.get("text"), str):
        title = document.get("title")
        if title is None or isinstance(title, str):
            return title, document["text"]
    raise TypeError(
        f"Document {index} is {document!r:.60}. Pass a text, or a dictionary with 'text' and optionally 'title'."
    )


def check_candidates(document, index: int) -> list[str] | None:
    """The phrases that compete with the generated ones, if the document has a list of them.

    Raises:
        TypeError: for anything else.
    """
    given = document.get("candidates") if isinstance(document, Mapping) else None
    if given is None or (isinstance(given, (list, tuple)) and all(isinstance(phrase, str) for phrase in given)):
        return given if given is None else list(given)
    raise TypeError(f"Document {index} has candidates={given!r:.60}. Pass a list of phrases, or leave it out.")


def describe_phrase(
    words: Sequence[str], written: str | None, score: float, stems: Sequence[str], offsets, document
) -> dict | None:
    """A keyphrase as the pipeline returns it.

    Args:
        words: of the phrase.
        written: its text, for a phrase that the document does not contain or that has signs, as C++; `None` if it has none.
        score: of the phrase.
        stems, offsets: of the document's words, as in `EncodedSource`.
        document: title and text.

    Returns:
        `keyphrase`, `present`, `score`, `start` and `end`, and if there is a title, of a present one `field`; `None` for an absent
        phrase without a text.
    """
    fields = {"title": document[0] or "", "text": document[1]}
    place: tuple | None = None
    if written is not None and signs_of(written):  # which words do not have
        places = ((field, find_text(written, source)) for field, source in fields.items())
        place = next(((field, *span) for field, span in places if span), None)
    elif (position := find_phrase(stems, words)) is not None:
        field, start, _ = offsets[position]
        place = field, start, offsets[position + len(words) - 1][2]
    if place is None:
        absent = {"keyphrase": written, "present": False, "score": score, "start": None, "end": None}
        return None if written is None else absent
    field, start, end = place
    phrase = {"keyphrase": fields[field][start:end], "present": True, "score": score, "start": start, "end": end}
    return phrase | ({"field": field} if fields["title"] else {})


def phrase_key(words: Sequence[str], written: str | None) -> tuple:
    """Equal for phrases of which only one is returned: with the same stems and signs."""
    return tuple(map(stem, words)), signs_of(written or "")


class KeyphraseGenerator:
    """Generates keyphrases of documents; the engine of the pipeline.

    Args:
        model, tokenizer: of one checkpoint.
        num_keyphrases: the n most probable phrases, in the order in which they were generated; by default all.
        batch_size: number of documents per batch.
        raw: return each document's phrases as lists of words, unfiltered, for evaluation.
        generate_kwargs: options of `generate_phrases`.

    Raises:
        ValueError: for a tokenizer with another vocabulary, and numbers out of range.
    """

    rank: Callable | None = None  # rows of ids and candidates -> keyphrases; of a model that can score given phrases

    def __init__(
        self,
        model,
        tokenizer,
        num_keyphrases: int | None = None,
        batch_size: int = 8,
        raw: bool = False,
        **generate_kwargs,
    ):
        for name, value in (("batch_size", batch_size), ("num_keyphrases", num_keyphrases)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        self.model, self.tokenizer = model, tokenizer
        self.num_keyphrases, self.batch_size, self.raw = num_keyphrases, batch_size, raw
        self.generate_kwargs = generate_kwargs
        self.set_up()

    def set_up(self):
        """Checks that model and tokenizer belong together, and makes what batches need."""
        if len(self.tokenizer) != self.model.config.vocab_size:
            raise ValueError(
                f"The tokenizer has {len(self.tokenizer):,} words, but the model has {self.model.config.vocab_size:,}. "
                "Load both from the same checkpoint."
            )
        self.collator = DataCollatorForKeyphraseGeneration(self.tokenizer)
        # a model that was trained too little may write a word in place of a phrase's start: one too many
        self.max_words = self.generate_kwargs.get("max_words_per_phrase") or self.model.config.max_words_per_phrase

    def stream(self, documents: Iterable, progress: Callable[[int], object] = lambda documents: None) -> Iterator[list]:
        """Documents -> their keyphrases, in order; reads `SORT_WINDOW` batches at a time, and tells `progress` the size of each batch
        that is done.
        """
        documents, start = iter(documents), 0
        while chunk := list(islice(documents, SORT_WINDOW * max(self.batch_size, 1))):
            checked = [check_document(document, start + i) for i, document in enumerate(chunk)]
            candidates = [check_candidates(document, start + i) for i, document in enumerate(chunk)]
            yield from self(checked, progress, candidates)
            start += len(chunk)

    def __call__(
        self,
        documents: Sequence[tuple[str | None, str]],
        progress: Callable[[int], object] = lambda documents: None,
        candidates: Sequence[list[str] | None] = (),
    ) -> list[list]:
        """Titles and texts -> their keyphrases. The model is in eval mode meanwhile.

        Of a document with `candidates` these and the generated phrases, the most probable first. Raises a `ValueError` for a model
        that cannot score given phrases.
        """
        candidates = candidates or [None] * len(documents)
        if self.rank is None and any(own is not None for own in candidates):
            raise ValueError(
                f"{type(self.model).__name__} scores no candidates: only a pretrained decoder (ExhirdForCausalLM) does. Leave out "
                "'candidates'."
            )
        sources = self.encode(documents)
        results: list[list] = [[] for _ in documents]
        order = [i for i in range(len(sources)) if sources[i].input_ids]
        order.sort(key=lambda i: len(sources[i].input_ids), reverse=True)
        progress(len(sources) - len(order))
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            for start in range(0, len(order), self.batch_size):
                batch = order[start : start + self.batch_size]
                outputs = self.generate_batch([documents[i] for i in batch], [sources[i] for i in batch])
                for i, ids, log_probs in zip(batch, outputs.ids.tolist(), outputs.log_probs.tolist(), strict=True):
                    if self.raw:
                        results[i] = [words for _, words, _ in self.decode_rows(ids, sources[i])]
                    elif candidates[i] is None:
                        results[i] = self.postprocess(ids, log_probs, sources[i], documents[i])
                    else:
                        results[i] = self.rank(ids, candidates[i], sources[i], documents[i])
                progress(len(batch))
        finally:
            for module in training:
                module.training = True
        return results

    def encode(self, documents: Sequence[tuple[str | None, str]]) -> list:
        """Titles and texts -> what the model reads of them, with `input_ids`, and their `words` and `offsets`."""
        return [self.tokenizer.encode_source(text, title) for title, text in documents]

    def generate_batch(self, documents, sources) -> ExhirdGenerateOutput:
        """Collates documents and calls `generate_phrases`."""
        rows = [{"input_ids": source.input_ids, "copy_ids": source.copy_ids} for source in sources]
        if self.tokenizer.subword_tokenizer is not None:
            rows = [
                {**row, **self.tokenizer.encode_subwords(text, title, source=source)}
                for row, source, (title, text) in zip(rows, sources, documents, strict=True)
            ]
        batch = {name: x.to(self.model.device) for name, x in self.collator(rows).items()}
        return self.model.generate_phrases(**batch, **self.generate_kwargs)

    def decode_rows(self, ids: list[list[int]], source) -> list[tuple[int, list[str], str | None]]:
        """Rows of ids -> row number, words and text of each phrase, without marks and without empty phrases. The text is
        `None` for phrases with `<digit>`, which could be any number.
        """
        config = self.model.config
        marks = {config.present_token_id, config.absent_token_id, config.title_end_token_id, config.bos_token_id}
        marks |= {config.pad_token_id, config.eos_token_id, config.end_phrase_token_id}
        rows = [[i for i in row if i not in marks] for row in ids]
        phrases = [self.tokenizer.convert_ids_to_words(row, source.oov_words) for row in rows]
        written = [words[: self.max_words] for words in phrases]
        texts = [None if DIGIT in words else " ".join(words) for words in written]
        return [(i, words, text) for i, (words, text) in enumerate(zip(phrases, texts, strict=True)) if words]

    def is_phrase(self, words: list[str]) -> bool:
        """Whether there is a letter or digit, and no `<unk>`."""
        return has_words(words) and self.tokenizer.unk_token not in words

    def postprocess(self, ids: list[list[int]], log_probs: list[float], source, document) -> list[dict]:
        """Rows of ids -> keyphrases, without duplicates by stems.

        Phrases without a letter or digit, phrases with `<unk>`, and absent phrases without a text are dropped.
        """
        stems, seen, phrases = [stem(word) for word in source.words], set(), []
        for number, words, written in self.decode_rows(ids, source):
            words = words[: self.max_words]
            key = phrase_key(words, written)
            if not self.is_phrase(words) or key in seen:
                continue
            seen.add(key)
            phrase = describe_phrase(words, written, math.exp(log_probs[number]), stems, source.offsets, document)
            if phrase is None:
                continue
            phrases.append(phrase)
        if self.num_keyphrases is not None and len(phrases) > self.num_keyphrases:
            best = sorted(phrases, key=lambda phrase: -phrase["score"])[: self.num_keyphrases]
            phrases = [phrase for phrase in phrases if any(phrase is other for other in best)]
        return phrases
