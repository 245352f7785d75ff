"""Summaries of texts of any length, by any encoder with a decoder: MoeSumm, or a stock BART or PEGASUS."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from .routing_moesumm import dataset_ids_of
from .texts_moesumm import readable, sentence_spans, split_to_fit, trim_to_sentence

logger = logging.getLogger(__name__)

ON_LONG = ("window", "error", "truncate")
NO_LIMIT = 1_000_000  # tokenizers without a limit of their own say something like 1e30
DEFAULT_LENGTH = 256  # where neither the call nor the model's generation_config says anything
DEFAULT_BEAMS = 4
SHORTEST = 8  # tokens that a share of a short text is at least
LENGTHS = ("max_length", "min_length", "max_new_tokens", "min_new_tokens")


class RowLengths(LogitsProcessor):
    """Each row's own least and greatest length: rows of one batch need not agree, and each is written as it is alone.

    Args:
        shortest, longest: tokens of each of B rows, counted as `generate` counts `min_length` and `max_length`.
        eos: the tokens that end a summary; the first of them is the one that is forced.
    """

    def __init__(self, shortest: list[int], longest: list[int], eos: list[int]):
        self.shortest, self.longest, self.eos = torch.tensor(shortest), torch.tensor(longest), eos

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """input_ids (B * beams, T), scores (B * beams, V) -> scores."""
        beams, written = len(scores) // len(self.longest), input_ids.shape[1]
        early = (written < self.shortest).repeat_interleave(beams).to(scores.device)
        last = (written >= self.longest - 1).repeat_interleave(beams).to(scores.device)
        scores = scores.clone()
        for token in self.eos:
            scores[:, token] = scores[:, token].masked_fill(early, -torch.inf)
        if last.any():
            scores = scores.masked_fill(last[:, None], -torch.inf)
            scores[:, self.eos[0]] = scores[:, self.eos[0]].masked_fill(last, 0.0)
        return scores


@dataclass
class Piece:
    """What the model reads at once: a text, or a window of it, and how long its summary may be."""

    text: int
    ids: list[int]
    dataset: str | None
    shortest: int
    longest: int


class Summarizer:
    """Writes summaries; its arguments are those of `MoeSummForConditionalGeneration.summarize`.

    Args:
        clean_up_tokenization_spaces: as `tokenizer.decode` takes it.

    Raises:
        ValueError: for lengths that the decoder has no positions for, and for options that cannot be.
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
            raise ValueError(f"batch_size={batch_size}: the model reads one text at a time or more.")
        self.model, self.tokenizer, self.on_long, self.batch_size = model, tokenizer, on_long, batch_size
        self.clean_up = clean_up_tokenization_spaces
        self.limit = source_limit(model, tokenizer)
        self.room = self.limit - tokenizer.num_special_tokens_to_add()
        if self.room < 1:
            raise ValueError(f"The encoder reads {self.limit} tokens, and the tokenizer's special ones leave no room.")
        for kind, value in (("max", max_length), ("min", min_length)):
            if value is not None and generate_kwargs.get(f"{kind}_new_tokens") is not None:
                raise ValueError(f"Both {kind}_length and {kind}_new_tokens were given. Pass one of them.")
        options = given_options(generate_kwargs)
        self.set_lengths(max_length, min_length, options)
        self.options = {name: value for name, value in options.items() if name not in LENGTHS}
        defaults = model.generation_config
        if self.setting("num_beams") is None and not self.setting("do_sample"):
            self.options["num_beams"] = DEFAULT_BEAMS
        self.processors = list(self.options.pop("logits_processor", None) or [])
        eos = self.options.get("eos_token_id", defaults.eos_token_id)
        self.eos = [] if eos is None else list(eos) if isinstance(eos, (list, tuple)) else [int(eos)]

    def setting(self, name: str):
        return self.options.get(name, getattr(self.model.generation_config, name, None))

    def set_lengths(self, longest, shortest, options: dict):
        """The call's lengths, else those of its generation options, else the model's own, else a default."""
        self.positions = decoder_positions(self.model.config)
        longest = check_length("max_length", length_of(options, "max") if longest is None else longest)
        shortest = check_length("min_length", length_of(options, "min") if shortest is None else shortest)
        for name, value in (("max_length", longest), ("min_length", shortest)):
            if isinstance(value, int) and value > self.positions:
                raise ValueError(
                    f"{name}={value}: the decoder has positions for {self.positions} tokens. Use {name}="
                    f"{self.positions} or less, or a share of the source, as in {name}=0.2: each window of a long "
                    "text then has its own."
                )
        if type(longest) is type(shortest) and longest is not None and shortest > longest:
            raise ValueError(f"min_length={shortest} is more than max_length={longest}. Exchange them.")
        own = vars(self.model.generation_config)
        if longest is None:
            longest = min(length_of(own, "max") or DEFAULT_LENGTH, self.positions)
        if shortest is None:
            shortest = length_of(own, "min") or 0
        self.longest, self.shortest = longest, shortest

    def __call__(self, texts: list, dataset=None, first: int = 0) -> list[str]:
        """Texts -> their summaries.

        Args:
            dataset: one name for all, or a list with one a text; `None` for no dataset.
            first: the number of the first text, for messages.
        """
        texts = [check_text(text, number) for number, text in enumerate(texts, start=first)]
        names = self.names(dataset, len(texts))
        summaries = [""] * len(texts)
        todo = dict(enumerate(texts))
        sizes: dict[int, int] = {}  # tokens, as last read
        self.sources: dict[int, int] = {}  # and as they were in the beginning
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            while todo:
                todo = self.one_pass(todo, names, sizes, summaries, first)
        finally:
            for module in training:
                module.training = True
        return summaries

    def one_pass(self, todo: dict[int, str], names: list, sizes: dict[int, int], summaries: list[str], first: int):
        """Reads all texts once. What is then still too long is returned, to be read again."""
        pieces = self.pieces(todo, names, sizes, first)
        written: dict[int, list[str]] = {number: [] for number in todo}
        for piece, summary in zip(pieces, self.write(pieces), strict=True):
            written[piece.text].append(summary)
        again = {}
        for number, own in written.items():
            summaries[number] = " ".join(filter(None, own))
            if len(own) == 1 or isinstance(self.longest, float):
                continue
            size = self.count([summaries[number]])[0] + self.limit - self.room
            if size <= self.longest:
                continue
            if size < 0.9 * sizes[number]:
                again[number] = summaries[number]
            else:  # what the model writes takes as many tokens as what it reads
                summaries[number] = self.beginning(summaries[number], first + number)
        return again

    def pieces(self, todo: dict[int, str], names: list, sizes: dict[int, int], first: int) -> list[Piece]:
        """Texts, by their numbers, as what the model reads at once; `sizes` takes their tokens."""
        numbers, texts = list(todo), list(todo.values())
        for number, size in zip(numbers, self.count(texts), strict=True):
            if not size:
                raise ValueError(
                    f"Text {first + number} has no tokens for this tokenizer: {todo[number]!r:.60}. Leave it out."
                )
            sizes[number] = size
            if size > self.room and self.on_long == "error":
                raise ValueError(
                    f"Text {first + number} has {size + self.limit - self.room:,} tokens, and the model reads "
                    f"{self.limit:,}. Use on_long='window' to have it read in windows, or on_long='truncate' to cut it."
                )
        windows = [
            split_to_fit(text, self.room, self.count)
            if sizes[number] > self.room and self.on_long == "window"
            else [text]
            for number, text in zip(numbers, texts, strict=True)
        ]
        flat = [window.strip() for some in windows for window in some]
        cut = self.on_long == "truncate"
        ids = self.tokenizer(flat, truncation=cut, max_length=self.limit if cut else None, verbose=False)["input_ids"]
        pieces, place = [], 0
        for number, some in zip(numbers, windows, strict=True):
            own = ids[place : place + len(some)]
            place += len(some)
            read = [len(one) - (self.limit - self.room) for one in own]
            source = self.sources.setdefault(number, sum(read))
            for one, tokens in zip(own, read, strict=True):
                if not tokens:
                    continue  # signs that the tokenizer drops, a window full of them
                shortest, longest = self.lengths(tokens, source, len(own))
                pieces.append(Piece(number, one, names[number], shortest, longest))
        return pieces

    def lengths(self, tokens: int, source: int, windows: int) -> tuple[int, int]:
        """The least and greatest length of the summary of `tokens` tokens, one of the windows of a text.

        source: the tokens of the text before it was first summarised.
        """
        if isinstance(self.longest, float):
            longest = max(int(self.longest * tokens), SHORTEST)
        elif windows == 1:
            longest = self.longest
        else:  # at most half of what is read, so that reading again comes to an end
            longest = min(self.longest, max(self.room // 2, SHORTEST))
        longest = min(longest, self.positions)
        if isinstance(self.shortest, float):
            shortest = int(self.shortest * (tokens if isinstance(self.longest, float) else source / windows))
        else:
            shortest = -(-self.shortest // windows)
        return min(shortest, longest), longest

    def write(self, pieces: list[Piece]) -> list[str]:
        """The summary of each piece; those of similar length are read together."""
        order = sorted(range(len(pieces)), key=lambda i: (len(pieces[i].ids), pieces[i].longest), reverse=True)
        written = [""] * len(pieces)
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            for i, summary in zip(batch, self.generate([pieces[i] for i in batch]), strict=True):
                written[i] = summary
        return written

    def generate(self, pieces: list[Piece]) -> list[str]:
        # On the right: positions are counted from the beginning of the row.
        rows = self.tokenizer.pad({"input_ids": [p.ids for p in pieces]}, padding_side="right", return_tensors="pt")
        options = dict(self.options)
        if any(piece.dataset is not None for piece in pieces):
            options["dataset"] = [piece.dataset for piece in pieces]
        longest, processors = [piece.longest for piece in pieces], []
        if self.eos:
            processors = [RowLengths([piece.shortest for piece in pieces], longest, self.eos)]
        sequences = self.model.generate(
            input_ids=rows["input_ids"].to(self.model.device),
            attention_mask=rows["attention_mask"].to(self.model.device),
            max_length=max(longest),
            min_length=0,
            max_new_tokens=None,
            min_new_tokens=None,
            logits_processor=LogitsProcessorList([*self.processors, *processors]),
            num_return_sequences=1,
            return_dict_in_generate=False,
            **options,
        )
        return [self.read(ids, limit) for ids, limit in zip(sequences.tolist(), longest, strict=True)]

    def read(self, ids: list[int], longest: int) -> str:
        """What was written, up to a sentence end where the length limit stopped it."""
        ends = [place for place, token in enumerate(ids) if place and token in self.eos]
        length = min(ends[0] + 1 if ends else len(ids), longest)
        text = self.tokenizer.decode(ids[:length], skip_special_tokens=True, clean_up_tokenization_spaces=self.clean_up)
        text = text.replace("<n>", "\n").strip()  # PEGASUS writes its line breaks so
        return trim_to_sentence(text) if length == longest else text

    def beginning(self, text: str, number: int) -> str:
        logger.warning(
            "The summaries of the windows of text %d did not become shorter than %d tokens when they were summarised "
            "again: it ends before its last windows.",
            number,
            self.longest,
        )
        kept, room = "", self.longest - (self.limit - self.room)
        spans = sentence_spans(text)
        for size, (start, end) in zip(self.count([text[a:b] for a, b in spans]), spans, strict=True):
            if size > room and kept:
                break
            kept, room = f"{kept} {text[start:end]}".strip(), room - size
        return kept

    def count(self, texts: list[str]) -> list[int]:
        """Tokens of each text, without special ones."""
        return [len(ids) for ids in self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]]

    def names(self, dataset, number: int) -> list[str | None]:
        """One name a text, all of them known to the model."""
        names = [dataset] * number if dataset is None or isinstance(dataset, str) else list(dataset)
        known = getattr(self.model.config, "datasets", None)
        if known is None and any(name is not None for name in names):
            raise ValueError(
                f"dataset={dataset!r:.60} was given, but a {self.model.config.model_type!r} model knows no datasets. "
                "Leave dataset out, or use a MoeSumm model."
            )
        if known is None:
            return [None] * number
        dataset_ids_of(self.model.config, names, number)
        return names


def given_options(options: dict) -> dict:
    """What `generate` is to get: a generation_config as options of their own, which go over the model's."""
    options = dict(options)
    for name in ("num_return_sequences", "return_dict_in_generate"):
        if options.pop(name, None) not in (None, False, 1):
            raise ValueError(
                f"{name} was given, but summaries are texts, one for each. Call model.generate() for more."
            )
    if options.pop("dataset_ids", None) is not None:
        raise ValueError("dataset_ids was given. Pass names, dataset=[...], one a text.")
    config = options.pop("generation_config", None)
    if config is None:
        return options
    given = {name: value for name, value in config.to_diff_dict().items() if name != "transformers_version"}
    return {**given, **options}


def length_of(options: dict, kind: str) -> int | float | None:
    """max_length or min_length of generation options."""
    new = options.get(f"{kind}_new_tokens")
    return options.get(f"{kind}_length") if new is None else new + 1  # with the token that the decoder starts with


def source_limit(model, tokenizer) -> int:
    """Tokens that the encoder reads, special ones included."""
    names = ("max_encoder_position_embeddings", "max_position_embeddings")
    limits = [value for name in names if isinstance(value := getattr(model.config, name, None), int)][:1]
    if tokenizer.model_max_length < NO_LIMIT:
        limits.append(tokenizer.model_max_length)
    return min(limits, default=NO_LIMIT)


def decoder_positions(config) -> int:
    names = ("max_decoder_position_embeddings", "max_position_embeddings")
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), NO_LIMIT)


def check_on_long(on_long: str, known: tuple[str, ...]):
    if on_long not in known:
        raise ValueError(f"on_long={on_long!r} is not known. Use one of {', '.join(map(repr, known))}.")


def check_length(name: str, value):
    """Whole tokens, or a share of the source."""
    if value is None:
        return None
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= (2 if name == "max_length" else 0)
    if not whole and not (isinstance(value, float) and 0 < value < 1):
        raise ValueError(
            f"{name}={value!r}: it is a number of tokens, as 60, or a share of the source between 0 and 1, as 0.2."
        )
    return value


def check_text(text, number: int) -> str:
    if not isinstance(text, str):
        raise TypeError(f"Text {number} is a {type(text).__name__}, not a text: {text!r:.60}. Pass strings.")
    if not text.strip():
        raise ValueError(f"Text {number} is empty: there is nothing to summarise. Leave it out.")
    return readable(text).strip()


def check_texts(texts) -> list:
    """An iterable of texts as a list."""
    if not isinstance(texts, Iterable) or isinstance(texts, (bytes, Mapping)):
        raise TypeError(f"Texts are a string or an iterable of strings, not a {type(texts).__name__}: {texts!r:.60}.")
    return list(texts)
