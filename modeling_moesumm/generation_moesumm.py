# SPDX-License-Identifier: Apache-2.0
"""Summaries of texts of any length, by MoeSumm or a stock model such as BART, PEGASUS or Llama."""

import re
from itertools import groupby
from typing import NamedTuple

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
from transformers.utils import logging

from .prompts_moesumm import (
    InputFormat,
    check_on_long,
    is_decoder_only,
    max_positions,
    pad_inputs,
    source_limit,
    tokenize,
)
from .routing_moesumm import dataset_names_to_ids
from .sentences_moesumm import split_to_fit, trim_to_sentence, without_repeats

logger = logging.get_logger(__name__)

DEFAULT_LENGTH = 256  # unless the call or the model's generation_config has another
DEFAULT_BEAMS = 4
FEW_TOKENS = 10  # of a text
# words of this list are at least 0.17 of each of our English texts, and hardly more than 0.1 of others
FREQUENT = " a an and are as at be but by can for from has have his in is it its my not of on one or she that the they this to was we were with you "
MIN_LENGTH = 8  # of the summary of a window, whatever the number of windows
LENGTHS = ("max_length", "min_length", "max_new_tokens", "min_new_tokens")
UNSAMPLED = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}  # chat models have other values


class RefuseNaN(LogitsProcessor):
    """Raises a `ValueError` for scores `(B * beams, V)` that are NaN, of which `generate` would take the first token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores."""
        if scores.isnan().any():
            raise ValueError("The model's probabilities are NaN. Check its weights, or open it with dtype='float32'.")
        return scores


class OfSummary(LogitsProcessor):
    """Another processor, which sees the tokens of the summaries alone, not the `prompt_length` tokens of a decoder's prompts."""

    def __init__(self, processor: LogitsProcessor, prompt_length: int):
        self.processor, self.prompt_length = processor, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores `(B * beams, V)` after `input_ids` `(B * beams, T)`."""
        return self.processor(input_ids[:, self.prompt_length :], scores)


# options against repetition, their values without effect, and what applies them; in a decoder `generate` would count the document, too
REPETITION = {
    "no_repeat_ngram_size": (0, NoRepeatNGramLogitsProcessor),
    "repetition_penalty": (1.0, RepetitionPenaltyLogitsProcessor),
}


class Window(NamedTuple):
    """One input of the model: a text or a part of it, and the minimum and maximum length of its summary."""

    text: int  # the number of its text
    ids: list[int]
    dataset: str | None
    lengths: tuple[int, int]


class Summarizer:
    """Summarises lists of texts; the engine of `MoeSummarizationPipeline`, which describes the arguments. The positions of a
    decoder are shared by the prompt and its summary.

    Raises a `ValueError` for lengths beyond the decoder's positions, and for invalid options.
    """

    def __init__(self, model, tokenizer, on_long: str = "window", batch_size: int = 8, **generate_kwargs):
        check_on_long(on_long, ("window", "error", "truncate"))
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1.")
        self.model, self.tokenizer, self.on_long, self.batch_size = model, tokenizer, on_long, batch_size
        self.is_decoder, self.format = is_decoder_only(model.config), InputFormat.of(tokenizer, model.config)
        room = source_limit(model, tokenizer) - len(self.format)
        self.positions = room if self.is_decoder else max_positions(model.config, "decoder")
        # around a summary: of a decoder EOS, and by the count of `generate` the token before it
        self.num_target_special = 2 if self.is_decoder else len(self.format)
        options = dict(generate_kwargs)
        if (config := options.pop("generation_config", None)) is not None:  # what the call has goes over it
            changed = {name: value for name, value in config.to_diff_dict().items() if name != "transformers_version"}
            lengths = [name for name in LENGTHS if length_of(options, name[:3]) is not None]
            options = {name: value for name, value in changed.items() if name not in lengths} | options
        for name, value in {"num_return_sequences": 1, "return_dict_in_generate": False, "dataset_ids": None}.items():
            if (given := options.pop(name, value)) is not value and given is not None:
                raise ValueError(f"{name}={given} is not supported: one summary per text. Call model.generate().")
        self.min_length, self.max_length = self.resolve_lengths(options)
        self.window_size = room - self.max_length + 1 if self.is_decoder else room
        options = {"do_sample": not options.keys().isdisjoint(UNSAMPLED)} | options
        if not options["do_sample"]:
            options = UNSAMPLED | options
        if (decoding := getattr(options.get("streamer"), "decode_kwargs", None)) is not None:
            decoding.setdefault("skip_special_tokens", True)
        self.options = {name: value for name, value in options.items() if name not in LENGTHS}
        if self.setting("num_beams") is None and not self.options["do_sample"]:
            self.options["num_beams"] = DEFAULT_BEAMS
        self.processors = list(self.options.pop("logits_processor", None) or [])
        eos = self.setting("eos_token_id")
        self.eos = [] if eos is None else list(eos) if isinstance(eos, (list, tuple)) else [int(eos)]

    def setting(self, name: str):
        """A generation option of the call, else of the model."""
        return self.options.get(name, getattr(self.model.generation_config, name, None))

    def resolve_lengths(self, options: dict) -> tuple[int, int]:
        """The minimum and the maximum length: the call's, else the model's, else the defaults."""
        longest, shortest = length_of(options, "max"), length_of(options, "min")
        for name, value, least in (("max_length", longest, 2), ("min_length", shortest, 0)):
            if value is not None and not (isinstance(value, int) and least <= value <= self.positions):
                raise ValueError(f"{name}={value!r} must be a number of tokens from {least} to {self.positions}.")
        defaults = vars(self.model.generation_config)
        if self.is_decoder:  # whose max_length counts the prompt
            defaults = {name: value for name, value in defaults.items() if name not in ("max_length", "min_length")}
        if longest is None:
            most = self.positions // 2 if self.is_decoder else self.positions
            longest = min(length_of(defaults, "max") or DEFAULT_LENGTH, most)
            if longest < 2:
                raise ValueError(f"model_max_length={self.tokenizer.model_max_length} leaves no room for a text.")
        if shortest is None:
            shortest = min(length_of(defaults, "min") or 0, longest)
        if shortest > longest:
            raise ValueError(f"min_length={shortest} exceeds max_length={longest}.")
        return shortest, longest

    def __call__(self, texts: list, dataset=None, first: int = 0) -> list[str]:
        """One summary per text; `dataset` is one name for all texts, or one per text. Messages number texts from `first`."""
        texts = [check_text(text, number) for number, text in enumerate(texts, start=first)]
        names = self.dataset_names(dataset, len(texts))
        was_training = self.model.training
        self.model.eval()
        try:
            windows = self.make_windows(texts, first)
            summaries = self.summarize_windows(windows, names)
            sizes, room = map(len, tokenize(self.tokenizer, summaries)), self.max_length - self.num_target_special
            long = [i for i, size in enumerate(sizes) if len(windows[i]) > 1 and size > room]
            joined = tokenize(self.tokenizer, [summaries[i] for i in long])
            joined = self.truncate(joined, "joined summaries of windows")
            shorter = self.summarize_windows([[ids] for ids in joined], [names[i] for i in long])
            for i, summary in zip(long, shorter, strict=True):
                summaries[i] = summary
        finally:
            self.model.train(was_training)
        return summaries

    def make_windows(self, texts: list[str], first: int) -> list[list[list[int]]]:
        """The token ids of each text's windows."""
        rows = tokenize(self.tokenizer, texts)
        self.warn_of_doubtful_texts(texts, rows, first)
        long = [i for i, ids in enumerate(rows) if len(ids) > self.window_size]
        if long and self.on_long == "error":
            raise ValueError(
                f"Text {first + long[0]} has {len(rows[long[0]])} tokens, more than {self.window_size} that fit the model. Use "
                "on_long='window' to split it, or on_long='truncate'."
            )
        if self.on_long == "truncate":
            rows = self.truncate(rows, "texts")
        windows = [[ids] for ids in rows]
        for i in long if self.on_long == "window" else ():
            parts = split_to_fit(
                texts[i], self.window_size, lambda parts: list(map(len, tokenize(self.tokenizer, parts)))
            )
            windows[i] = self.truncate(tokenize(self.tokenizer, [part.strip() for part in parts]), "windows")
        return windows

    def warn_of_doubtful_texts(self, texts: list[str], rows: list[list[int]], first: int):
        """Names the first text, of these token ids, that has hardly a word, or seems to be of a language that the model does not know."""
        for number, (text, ids) in enumerate(zip(texts, rows, strict=True), start=first):
            is_short, words = len(ids) < FEW_TOKENS, re.findall(r"[a-z\u00c0-\u024f]+|[^\W\d_]", text.casefold())
            if is_short or (len({*words}) > 7 and sum(f" {word} " in FREQUENT for word in words) < 0.15 * len(words)):
                reason = "has hardly a word" if is_short else "seems not to be English"
                logger.warning_once(f"Text {number} ({text!r:.40}) {reason}: its summary may be wrong.")
                return

    def truncate(self, rows: list[list[int]], kind: str) -> list[list[int]]:
        """The first tokens of each row that fit the model; logs a warning with the number of longer rows."""
        if longer := sum(len(ids) > self.window_size for ids in rows):
            logger.warning(
                f"{longer:,} of {len(rows):,} {kind} have more than {self.window_size:,} tokens: their end is not read."
            )
        return [ids[: self.window_size] for ids in rows]

    def summarize_windows(self, windows: list[list[list[int]]], names: list[str | None]) -> list[str]:
        """The summary of each text, joined from those of its windows. Windows of similar length, and summaries of the same limits, are
        in the same batch; texts of several windows have a progress bar.
        """
        inputs = [
            Window(text, ids, names[text], self.length_limits(len(parts)))
            for text, parts in enumerate(windows)
            for ids in parts
        ]
        order = sorted(range(len(inputs)), key=lambda i: (inputs[i].lengths, len(inputs[i].ids)), reverse=True)
        summaries: dict[int, str] = {}
        with logging.tqdm(total=len(inputs), unit=" windows", leave=False, disable=len(inputs) == len(windows)) as bar:
            for _, same in groupby(order, key=lambda i: inputs[i].lengths):
                group = list(same)
                for start in range(0, len(group), self.batch_size):
                    batch = group[start : start + self.batch_size]
                    summaries |= zip(batch, self.generate([inputs[i] for i in batch]), strict=True)
                    bar.update(len(batch))
        found: list[list[str]] = [[] for _ in windows]
        for i, window in enumerate(inputs):
            found[window.text].append(summaries[i])
        return [without_repeats(" ".join(filter(None, parts))) for parts in found]

    def length_limits(self, num_windows: int) -> tuple[int, int]:
        """Minimum and maximum length of the summary of each window: several together fit one window, to be summarised again."""
        if num_windows == 1:
            return self.min_length, self.max_length
        longest = min(self.max_length, max(self.window_size // num_windows, MIN_LENGTH))
        return min(-(-self.min_length // num_windows), longest), longest

    def generate(self, windows: list[Window]) -> list[str]:
        """One summary per window of a batch, all with the same limits."""
        ids = [self.format.join(window.ids) for window in windows]
        rows = pad_inputs(ids, self.tokenizer, self.model.config)
        # the last token of a decoder's prompt is the first of its summary
        skipped = rows["input_ids"].shape[1] - 1 if self.is_decoder else 0
        options, processors = dict(self.options), [RefuseNaN(), *self.processors]
        if any(window.dataset is not None for window in windows):
            options["dataset"] = [window.dataset for window in windows]
        for name, (off, processor) in REPETITION.items() if self.is_decoder else ():
            if (value := self.setting(name)) not in (None, off):
                processors.append(OfSummary(processor(value), skipped + 1))
                options[name] = off
        shortest, longest = windows[0].lengths
        options = {"forced_eos_token_id": self.eos[0] if self.eos else None} | options
        sequences = self.model.generate(
            **{name: values.to(self.model.device) for name, values in rows.items()},
            max_length=skipped + longest,
            min_length=skipped + shortest,
            max_new_tokens=None,
            min_new_tokens=None,
            logits_processor=LogitsProcessorList(processors),
            num_return_sequences=1,
            return_dict_in_generate=False,
            **options,
        )
        return [self.decode(ids, longest) for ids in sequences[:, skipped:].tolist()]

    def decode(self, ids: list[int], max_length: int) -> str:
        """The text of generated tokens after the first, which was given; cut at a sentence end if they reached the limit."""
        length = next((index + 1 for index, token in enumerate(ids) if index and token in self.eos), len(ids))
        text = self.tokenizer.decode(ids[1:length], skip_special_tokens=True)
        text = text.replace("<n>", "\n").strip()  # PEGASUS's line breaks
        return trim_to_sentence(text) if length >= max_length else text

    def dataset_names(self, dataset, number: int) -> list[str | None]:
        """One dataset name per text; raises a `ValueError` for names that the model does not have."""
        names = [dataset] * number if dataset is None or isinstance(dataset, str) else list(dataset)
        datasets = getattr(self.model.config, "datasets", None)
        if datasets is None and any(name is not None for name in names):
            raise ValueError(f"dataset={dataset!r:.60}: a {self.model.config.model_type!r} model has no datasets.")
        dataset_names_to_ids(datasets or [], names, number)
        return names


def length_of(options: dict, kind: str) -> int | None:
    """max_length or min_length of generation options; `kind` is "max" or "min"."""
    new_tokens = options.get(f"{kind}_new_tokens")
    return options.get(f"{kind}_length") if new_tokens is None else new_tokens + 1  # with the decoder's start token


def check_text(text, number: int) -> str:
    """A text; raises an error for an empty text, and for other types."""
    if not isinstance(text, str):
        raise TypeError(f"Text {number} must be a string, got {type(text).__name__}: {text!r:.60}.")
    if not text.strip():
        raise ValueError(f"Text {number} is empty. Leave it out.")
    return text.strip()
