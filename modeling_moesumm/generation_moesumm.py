# SPDX-License-Identifier: Apache-2.0
"""Summaries of texts of any length, by MoeSumm or a stock model such as BART, PEGASUS or Llama."""

import logging
from dataclasses import dataclass

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
from transformers.utils.logging import tqdm

from .prompts_moesumm import PLAIN, PromptFormat, pad_prompts
from .routing_moesumm import dataset_names_to_ids
from .sentences_moesumm import replace_surrogates, sentence_spans, split_to_fit, trim_to_sentence

logger = logging.getLogger(__name__)

ON_LONG = ("window", "error", "truncate")
NO_LIMIT = 1_000_000  # tokenizers without a limit report a huge one, such as 1e30
DEFAULT_LENGTH = 256  # unless the call or the model's generation_config has another
DEFAULT_BEAMS = 4
MIN_LENGTH = 8  # the least number of tokens for a length that is a fraction of a short text
LENGTHS = ("max_length", "min_length", "max_new_tokens", "min_new_tokens")


class PerRowLengthLogitsProcessor(LogitsProcessor):
    """Minimum and maximum lengths of each of B rows, counted as `generate` counts `min_length` and `max_length`: a row of a
    batch is written as it would be alone. `eos` are the tokens that end a summary; the first one is forced at the maximum.
    Of a decoder, the `skipped` first tokens, which are all tokens of the prompt but the last, do not count.
    """

    def __init__(self, min_lengths: list[int], max_lengths: list[int], eos: list[int], skipped: int = 0):
        self.min_lengths, self.max_lengths, self.eos = torch.tensor(min_lengths), torch.tensor(max_lengths), eos
        self.skipped = skipped

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores `(B * beams, V)` after `input_ids` `(B * beams, T)`."""
        beams, length = len(scores) // len(self.max_lengths), input_ids.shape[1] - self.skipped
        early = (length < self.min_lengths).repeat_interleave(beams).to(scores.device)
        last = (length >= self.max_lengths - 1).repeat_interleave(beams).to(scores.device)
        scores = scores.clone()
        for token in self.eos:
            scores[:, token] = scores[:, token].masked_fill(early, -torch.inf)
        if last.any():
            scores = scores.masked_fill(last[:, None], -torch.inf)
            scores[:, self.eos[0]] = scores[:, self.eos[0]].masked_fill(last, 0.0)
        return scores


class RefuseNaN(LogitsProcessor):
    """Raises a `ValueError` for scores that are NaN, of which `generate` would take the first token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores `(B * beams, V)`."""
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
UNSAMPLED = {
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
}  # chat models sample unless told otherwise
REPETITION = {
    "no_repeat_ngram_size": (0, NoRepeatNGramLogitsProcessor),
    "repetition_penalty": (1.0, RepetitionPenaltyLogitsProcessor),
}


@dataclass
class Window:
    """One input of the model: a text or a part of it, and the length limits of its summary."""

    text: int  # the number of its text
    ids: list[int]
    dataset: str | None
    min_length: int
    max_length: int


class Summarizer:
    """Summarises lists of texts; the engine of `MoeSummarizationPipeline`, which describes the arguments. The positions of a
    decoder are shared by the prompt and its summary.

    Raises a `ValueError` for lengths beyond the decoder's positions, and for invalid options.
    """

    def __init__(
        self,
        model,
        tokenizer,
        max_length: int | float | None = None,
        min_length: int | float | None = None,
        on_long: str = "window",
        batch_size: int = 8,
        clean_up_tokenization_spaces: bool | None = None,
        **generate_kwargs,
    ):
        check_on_long(on_long, ON_LONG)
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1.")
        self.model, self.tokenizer, self.on_long, self.batch_size = model, tokenizer, on_long, batch_size
        self.clean_up = clean_up_tokenization_spaces
        self.prompt = PromptFormat.of(tokenizer, model.config) if is_decoder_only(model.config) else None
        self.plain = {"add_special_tokens": False} if self.prompt is None else PLAIN
        self.max_source_length = source_limit(model, tokenizer)
        # around a text, and around a summary: a decoder's has EOS, and by the count of `generate` the token before it
        self.num_special = tokenizer.num_special_tokens_to_add() if self.prompt is None else len(self.prompt)
        self.num_target_special = self.num_special if self.prompt is None else 2
        if self.max_source_length - self.num_special < (1 if self.prompt is None else MIN_LENGTH + 1):
            raise ValueError(
                f"The {self.reader} has {self.max_source_length} positions, of which {self.num_special} are for special "
                "tokens and the prompt. Use a tokenizer with a larger model_max_length."
            )
        for kind, value in (("max", max_length), ("min", min_length)):
            if value is not None and generate_kwargs.get(f"{kind}_new_tokens") is not None:
                raise ValueError(f"Both {kind}_length and {kind}_new_tokens were given. Pass one of them.")
        options = merge_generation_options(generate_kwargs)
        if not options.get("do_sample"):
            options = UNSAMPLED | options
        self.set_lengths(max_length, min_length, options)
        self.window_size = self.max_window_size()
        self.options = {name: value for name, value in options.items() if name not in LENGTHS}
        if self.setting("num_beams") is None and not self.options["do_sample"]:
            self.options["num_beams"] = DEFAULT_BEAMS
        self.processors = list(self.options.pop("logits_processor", None) or [])
        eos = self.options.get("eos_token_id", model.generation_config.eos_token_id)
        self.eos = [] if eos is None else list(eos) if isinstance(eos, (list, tuple)) else [int(eos)]

    @property
    def reader(self) -> str:
        """What reads the texts, for messages."""
        return "encoder" if self.prompt is None else "model"

    def max_window_size(self) -> int:
        """Tokens of a text in one window; of a decoder, those that the prompt and the longest summary leave."""
        size = self.max_source_length - self.num_special
        if self.prompt is None:
            return size
        if isinstance(self.max_length, float):
            return min(int(size / (1 + self.max_length)), size - MIN_LENGTH)
        return size - self.max_length + 1

    def setting(self, name: str):
        """A generation option of the call, else of the model."""
        return self.options.get(name, getattr(self.model.generation_config, name, None))

    def set_lengths(self, max_length, min_length, options: dict):
        """Sets the lengths: the call's, else those of its generation options, else the model's, else the defaults."""
        self.positions = max_positions(self.model.config, "decoder")
        default = min(DEFAULT_LENGTH, self.positions)
        if self.prompt is not None:  # with one token of a text at least
            self.positions = self.max_source_length - self.num_special
            default = min(DEFAULT_LENGTH, self.positions // 2)
        max_length = check_length("max_length", length_of(options, "max") if max_length is None else max_length)
        min_length = check_length("min_length", length_of(options, "min") if min_length is None else min_length)
        for name, value in (("max_length", max_length), ("min_length", min_length)):
            if isinstance(value, int) and value > self.positions:
                raise ValueError(
                    f"{name}={value} exceeds the decoder's {self.positions} positions. Use "
                    f"{name}={self.positions} or less, "
                    f"or a fraction of the source such as {name}=0.2, which applies to each window of a long text."
                )
        if type(max_length) is type(min_length) and max_length is not None and min_length > max_length:
            raise ValueError(f"min_length={min_length} exceeds max_length={max_length}. Use a smaller min_length.")
        defaults = vars(self.model.generation_config)
        if self.prompt is not None:  # whose max_length counts the prompt
            defaults = {name: value for name, value in defaults.items() if name not in ("max_length", "min_length")}
        if max_length is None:
            max_length = min(length_of(defaults, "max") or default, self.positions)
            if isinstance(min_length, int) and min_length > max_length:
                raise ValueError(
                    f"min_length={min_length} exceeds the model's max_length={max_length}. Pass a max_length, too."
                )
        if min_length is None:
            min_length = length_of(defaults, "min") or 0
        self.max_length, self.min_length = max_length, min_length

    def __call__(self, texts: list, dataset=None, first: int = 0) -> list[str]:
        """One summary per text; `dataset` is one name for all texts, or one per text. Messages number texts from `first`."""
        texts = [check_text(text, number) for number, text in enumerate(texts, start=first)]
        names = self.dataset_names(dataset, len(texts))
        summaries = [""] * len(texts)
        remaining = dict(enumerate(texts))
        sizes: dict[int, int] = {}  # tokens of each text in the last pass
        self.sources: dict[int, int] = {}  # tokens of each original text
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            while remaining:
                remaining = self.summarize_once(remaining, names, sizes, summaries, first)
        finally:
            for module in training:
                module.training = True
        return summaries

    def summarize_once(self, texts: dict[int, str], names: list, sizes: dict, summaries: list[str], first: int):
        """Summarises all windows of the texts once, into `summaries`. Returns the summaries that are still too long."""
        windows = self.make_windows(texts, names, sizes, first)
        parts: dict[int, list[str]] = {number: [] for number in texts}
        for window, summary in zip(windows, self.summarize_windows(windows), strict=True):
            parts[window.text].append(summary)
        too_long = {}
        for number, text_parts in parts.items():
            summaries[number] = " ".join(filter(None, text_parts))
            if len(text_parts) == 1 or isinstance(self.max_length, float):
                continue
            size = self.count_tokens([summaries[number]])[0] + self.num_target_special
            if size <= self.max_length:
                continue
            if size < 0.9 * sizes[number]:
                too_long[number] = summaries[number]
            else:  # the model does not shorten the text
                summaries[number] = self.truncate_at_sentence(summaries[number], first + number)
        return too_long

    def make_windows(self, texts: dict[int, str], names: list, sizes: dict[int, int], first: int) -> list[Window]:
        """The windows of the texts, which are given by their numbers; stores their numbers of tokens in `sizes`."""
        for number, size in zip(texts, self.count_tokens(list(texts.values())), strict=True):
            if not size:
                raise ValueError(f"Text {first + number} has no tokens: {texts[number]!r:.60}. Leave it out.")
            sizes[number] = size
            if size > self.window_size and self.on_long == "error":
                raise ValueError(
                    f"Text {first + number} has {size + self.num_special:,} tokens, and the {self.reader} has "
                    f"{self.window_size + self.num_special:,} positions{'' if self.prompt is None else ' for them'}. Use on_long='window' to split it, or on_long='truncate'."
                )
        if self.on_long == "truncate" and (longer := [n for n in texts if sizes[n] > self.window_size]):
            logger.warning(
                f"{len(longer):,} of {len(texts):,} texts have more than {self.window_size:,} tokens: their end is not read. "
                "on_long='window' reads them whole."
            )
        parts = [
            split_to_fit(text, self.window_size, self.count_tokens)
            if sizes[number] > self.window_size and self.on_long == "window"
            else [text]
            for number, text in texts.items()
        ]
        flat = [part.strip() for text_parts in parts for part in text_parts]
        ids = iter(self.encode(flat))
        windows = []
        for number, text_parts in zip(texts, parts, strict=True):
            rows = [next(ids) for _ in text_parts]
            counts = [len(row) - self.num_special for row in rows]
            source = self.sources.setdefault(number, sum(counts))
            for row, tokens in zip(rows, counts, strict=True):
                if tokens:  # a tokenizer may drop all characters of a window
                    lengths = self.length_limits(tokens, source, len(rows))
                    windows.append(Window(number, row, names[number], *lengths))
        return windows

    def encode(self, parts: list[str]) -> list[list[int]]:
        """The token ids of the inputs for parts of texts, under `on_long="truncate"` truncated."""
        truncate = self.on_long == "truncate"
        if self.prompt is None:
            limit = {"truncation": truncate, "max_length": self.max_source_length if truncate else None}
            return self.tokenizer(parts, **limit, verbose=False)["input_ids"]
        rows = self.tokenizer(parts, **self.plain, verbose=False)["input_ids"]
        return [self.prompt.join(ids[: self.window_size] if truncate else ids) for ids in rows]

    def length_limits(self, tokens: int, source: int, num_windows: int) -> tuple[int, int]:
        """Minimum and maximum length of the summary of a window of `tokens` tokens; `source` are those of the original text."""
        if isinstance(self.max_length, float):
            max_length = max(int(self.max_length * tokens), MIN_LENGTH)
        elif num_windows == 1:
            max_length = self.max_length
        else:  # at most half of a window, so that repeated summarisation ends
            max_length = min(self.max_length, max(self.window_size // 2, MIN_LENGTH))
        max_length = min(max_length, self.positions)
        if isinstance(self.min_length, float):
            min_length = int(self.min_length * (tokens if isinstance(self.max_length, float) else source / num_windows))
        else:
            min_length = -(-self.min_length // num_windows)
        return min(min_length, max_length), max_length

    def summarize_windows(self, windows: list[Window]) -> list[str]:
        """One summary per window; windows of similar length are in the same batch. Texts of several windows have a progress bar."""
        order = sorted(range(len(windows)), key=lambda i: (len(windows[i].ids), windows[i].max_length), reverse=True)
        summaries = {}
        several = len({window.text for window in windows}) < len(windows)
        with tqdm(total=len(order), unit=" windows", leave=False, disable=not several) as bar:
            for start in range(0, len(order), self.batch_size):
                batch = order[start : start + self.batch_size]
                summaries |= zip(batch, self.generate([windows[i] for i in batch]), strict=True)
                bar.update(len(batch))
        return [summaries[i] for i in range(len(windows))]

    def generate(self, windows: list[Window]) -> list[str]:
        """One summary per window of a batch."""
        ids, skipped = [window.ids for window in windows], 0
        if self.prompt is None:  # padded on the right, because positions are counted from the beginning of the row
            rows = dict(self.tokenizer.pad({"input_ids": ids}, padding_side="right", return_tensors="pt"))
        else:
            rows = pad_prompts(ids, self.tokenizer)
            skipped = rows["input_ids"].shape[1] - 1
        options, processors = dict(self.options), [RefuseNaN(), *self.processors]
        if any(window.dataset is not None for window in windows):
            options["dataset"] = [window.dataset for window in windows]
        for name, (off, processor) in REPETITION.items() if self.prompt is not None else ():
            if (value := self.setting(name)) not in (None, off):
                processors.append(OfSummary(processor(value), skipped + 1))
                options[name] = off
        max_lengths = [window.max_length for window in windows]
        if self.eos:
            min_lengths = [window.min_length for window in windows]
            processors.append(PerRowLengthLogitsProcessor(min_lengths, max_lengths, self.eos, skipped))
        sequences = self.model.generate(
            **{name: values.to(self.model.device) for name, values in rows.items()},
            max_length=skipped + max(max_lengths),
            min_length=0,
            max_new_tokens=None,
            min_new_tokens=None,
            logits_processor=LogitsProcessorList(processors),
            num_return_sequences=1,
            return_dict_in_generate=False,
            **options,
        )
        summaries = sequences[:, skipped:].tolist()
        return [self.decode(ids, limit) for ids, limit in zip(summaries, max_lengths, strict=True)]

    def decode(self, ids: list[int], max_length: int) -> str:
        """The text of generated tokens after the first, which was given; cut at a sentence end if they reached the limit."""
        ends = [index for index, token in enumerate(ids) if index and token in self.eos]
        length = min(ends[0] + 1 if ends else len(ids), max_length)
        text = self.tokenizer.decode(
            ids[1:length], skip_special_tokens=True, clean_up_tokenization_spaces=self.clean_up
        )
        text = text.replace("<n>", "\n").strip()  # PEGASUS's line breaks
        return trim_to_sentence(text) if length == max_length else text

    def truncate_at_sentence(self, text: str, number: int) -> str:
        """The first sentences of a joined summary that repeated summarisation does not shorten; logs a warning."""
        message = (
            "The window summaries of text %d did not become shorter than %d tokens; the last windows are left out."
        )
        logger.warning(message, number, self.max_length)
        kept, remaining = "", self.max_length - self.num_target_special
        spans = sentence_spans(text)
        for size, (start, end) in zip(self.count_tokens([text[a:b] for a, b in spans]), spans, strict=True):
            if size > remaining and kept:
                break
            kept, remaining = f"{kept} {text[start:end]}".strip(), remaining - size
        return kept

    def count_tokens(self, texts: list[str]) -> list[int]:
        """Tokens of each text, without special tokens."""
        return [len(ids) for ids in self.tokenizer(texts, **self.plain, verbose=False)["input_ids"]]

    def dataset_names(self, dataset, number: int) -> list[str | None]:
        """One dataset name per text; raises a `ValueError` for names that the model does not have."""
        names = [dataset] * number if dataset is None or isinstance(dataset, str) else list(dataset)
        datasets = getattr(self.model.config, "datasets", None)
        if datasets is not None:
            dataset_names_to_ids(datasets, names, number)
            return names
        if any(name is not None for name in names):
            raise ValueError(
                f"dataset={dataset!r:.60} was given, but a {self.model.config.model_type!r} model has no datasets. Leave "
                "dataset out, or use a MoeSumm model."
            )
        return [None] * number


def merge_generation_options(options: dict) -> dict:
    """Options for `generate`, including those of a `generation_config`, which override the model's."""
    options = dict(options)
    if (config := options.pop("generation_config", None)) is not None:
        changed = {name: value for name, value in config.to_diff_dict().items() if name != "transformers_version"}
        options = {**changed, **options}
    for name in ("num_return_sequences", "return_dict_in_generate"):
        if options.pop(name, None) not in (None, False, 1):
            raise ValueError(f"{name} is not supported: there is one summary per text. Call model.generate() for more.")
    if options.pop("dataset_ids", None) is not None:
        raise ValueError("dataset_ids is not supported. Pass names: dataset=[...], one per text.")
    return options


def length_of(options: dict, kind: str) -> int | float | None:
    """max_length or min_length of generation options; `kind` is "max" or "min"."""
    new_tokens = options.get(f"{kind}_new_tokens")
    return options.get(f"{kind}_length") if new_tokens is None else new_tokens + 1  # with the decoder's start token


def is_decoder_only(config) -> bool:
    """Whether a model continues prompts, and has no encoder."""
    return getattr(config, "is_encoder_decoder", True) is False


def max_positions(config, part: str) -> int:
    """The maximum number of tokens of a part, "encoder" or "decoder"."""
    names = (f"max_{part}_position_embeddings", "max_position_embeddings")
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), NO_LIMIT)


def source_limit(model, tokenizer) -> int:
    """The encoder's maximum number of tokens, including special tokens. 512 if neither the model nor the tokenizer has a
    limit, as for T5's relative positions.
    """
    limit = min(max_positions(model.config, "encoder"), tokenizer.model_max_length, NO_LIMIT)
    return limit if limit < NO_LIMIT else 512


def check_on_long(on_long: str, choices: tuple[str, ...]):
    """Raises a `ValueError` for an unknown value."""
    if on_long not in choices:
        raise ValueError(f"on_long={on_long!r} is not known. Use one of {', '.join(map(repr, choices))}.")


def check_length(name: str, value):
    """A length in tokens or as a fraction; raises a `ValueError` for other values."""
    if value is None:
        return None
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= (2 if name == "max_length" else 0)
    if not whole and not (isinstance(value, float) and 0 < value < 1):
        raise ValueError(f"{name}={value!r} must be a token count (60) or a fraction of the source in (0, 1) (0.2).")
    return value


def check_text(text, number: int) -> str:
    """A text that tokenizers accept; raises an error for an empty text, and for other types."""
    if not isinstance(text, str):
        raise TypeError(f"Text {number} must be a string, got {type(text).__name__}: {text!r:.60}.")
    if not text.strip():
        raise ValueError(f"Text {number} is empty. Leave it out.")
    return replace_surrogates(text).strip()
