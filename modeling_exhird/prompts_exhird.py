# SPDX-License-Identifier: Apache-2.0
"""Documents as prompts of a stock decoder such as Llama, keyphrases as its answers; rows for training, and batches.

An answer is ` graph cuts ; max flow | image segmentation` and EOS: present phrases in the order of the text, ` |`, absent phrases. Both
marks are single tokens that the decoder has already. The configuration of a model that writes such answers has the field
`keyphrase_generation`: those of `PromptSettings` that differ from their defaults.

Prompts are the lines `Title: TITLE`, `Text: TEXT` and `Keyphrases:`.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .data_exhird import (
    DataCollatorForKeyphraseGeneration,
    documents_of,
    has_words,
    pad,
    phrase_words,
    split_keyphrases,
    split_present_absent,
    warn_of,
)
from .exclusion_exhird import token_id
from .search_exhird import check_limits
from .shared_exhird import score_answers_only
from .tokenization_exhird import DIGIT, replace_surrogates, split_document

FIELD = "keyphrase_generation"  # of the configuration
SEPARATOR, ABSENT = " ;", " |"
IGNORED = -100
# the name of a special token is plain text, and the length of a text is ours to limit
PLAIN = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}


@dataclass(frozen=True)
class PromptSettings:
    """How a decoder writes keyphrases.

    Args:
        max_source_length: tokens of the prompt in generation; the end of a longer text is not read.
        max_phrases, max_tokens_per_phrase: limits of generation: phrases of a document, and tokens of a phrase without its separator.
        exclusion_window: K: a phrase does not begin with the first token of any of the K preceding phrases. 0 for no exclusion, -1 for
            all preceding phrases.
        known_keyphrases: of the training documents, with `;` between them; one that occurs in a document's title is a candidate.
        frequent_words: of the training documents, with spaces between them; a text with hardly any of them is reported.

    Raises:
        TypeError, ValueError: for an unknown field, and a value out of range.
    """

    max_source_length: int = 512
    max_phrases: int = 20
    max_tokens_per_phrase: int = 16
    exclusion_window: int = 1
    known_keyphrases: str = ""
    frequent_words: str = ""

    def __post_init__(self):
        check_limits({"exclusion_window": -1}, {name: n for name, n in vars(self).items() if isinstance(n, int)})

    @classmethod
    def of(cls, config) -> "PromptSettings":
        """Those of a model's configuration. Raises a `ValueError` for a model that was not trained to write keyphrases."""
        given = getattr(config, FIELD, None)
        if given is None:
            raise ValueError(
                f"This {config.model_type!r} was not trained to write keyphrases: its configuration has no {FIELD}. Train it, see "
                "`lexperts train exhird --help`, or set model.config.keyphrase_generation = {}."
            )
        return cls(**given)


class EncodedPrompt(NamedTuple):
    """What a decoder reads of a document.

    Attributes:
        input_ids: the prompt; empty for a document without words.
        dropped: number of tokens at the text's end that it does not contain.
        words, offsets: of the whole document, as in `EncodedSource`.
    """

    input_ids: list[int]
    dropped: int
    words: list[str]
    offsets: list[tuple[str, int, int] | None]


class PromptFormat:
    """Prompts of documents, and answers.

    Args:
        tokenizer, config: of the decoder; the configuration has `keyphrase_generation`.

    Attributes:
        separator, absent: the tokens that end a phrase, and the present phrases.
        stops: the tokens after which a document ends.

    Raises:
        ValueError: for a model that was not trained to write keyphrases or has no EOS, and a tokenizer of another vocabulary or without
            the marks.
    """

    def __init__(self, tokenizer, config):
        self.tokenizer, self.settings, eos = tokenizer, PromptSettings.of(config), config.eos_token_id
        if len(tokenizer) > config.vocab_size:
            raise ValueError(
                f"The tokenizer has {len(tokenizer):,} tokens, but the model has {config.vocab_size:,}. Load both from the same "
                "checkpoint."
            )
        if eos is None:
            raise ValueError("eos_token_id=None, but answers end with EOS. Set model.config.eos_token_id.")
        self.separator, self.absent = token_id(tokenizer, SEPARATOR), token_id(tokenizer, ABSENT)
        self.stops = list(eos) if isinstance(eos, list | tuple) else [eos]
        self.pad_id = self.stops[0] if config.pad_token_id is None else config.pad_token_id
        bos = tokenizer.bos_token_id
        self.start = [bos] if bos is not None and tokenizer("")["input_ids"][:1] == [bos] else []
        self.end = tokenizer("\nKeyphrases:", **PLAIN)["input_ids"]
        known = [phrase.strip() for phrase in self.settings.known_keyphrases.split(";")]
        longest_first = "|".join(map(re.escape, sorted(filter(None, known), key=len, reverse=True)))
        # as titles write them: with hyphens or line breaks for blanks, numbers for DIGIT, and in the plural
        for stored, pattern in ((r"s\ ", r"['’]?s\ "), (r"\ ", r"[\s\-–'’.]+"), ("DIGIT", r"[\d.]*\d")):
            longest_first = longest_first.replace(stored, pattern)
        longest_first = re.sub(r"([a-z]{4})(?=\||$)", r"\1s?", longest_first)
        self.known = re.compile(rf"(?<![\w+#])(?:{longest_first})(?![\w+#])", re.IGNORECASE)

    @property
    def ends(self) -> list[int]:
        """The tokens that end a phrase."""
        return [self.separator, self.absent, *self.stops]

    def encode(self, documents: Sequence[tuple[str | None, str]], limits: Sequence[int]) -> list[EncodedPrompt]:
        """Titles and texts -> prompts of at most so many tokens. Raises a `ValueError` for a limit without room for the text."""
        bodies = [replace_surrogates(f"Title: {title or ''}\nText: {text}") for title, text in documents]
        encoded = self.tokenizer(bodies, **PLAIN)["input_ids"] if bodies else []
        prompts, fixed = [], len(self.start) + len(self.end)
        for (title, text), body, limit in zip(documents, encoded, limits, strict=True):
            if limit <= fixed:
                raise ValueError(f"max_source_length={limit} has no room for the text beside {fixed} other tokens.")
            words, offsets = document_words(title, text)
            ids = [*self.start, *body[: limit - fixed], *self.end] if has_words(words) else []
            prompts.append(EncodedPrompt(ids, max(len(body) - limit + fixed, 0), words, offsets))
        return prompts

    def known_in(self, title: str | None) -> list[str]:
        """The known keyphrases that occur in a title."""
        return list(filter(None, self.known.findall(title or "")))

    def phrase_ids(self, phrases: Sequence[str]) -> list[list[int]]:
        """The tokens of each phrase: they are tokenised separately, so that no token crosses its end."""
        texts = [replace_surrogates(f" {text}") for text in phrases]
        return self.tokenizer(texts, **PLAIN)["input_ids"] if texts else []

    def encode_answer(self, present: Sequence[str], absent: Sequence[str]) -> list[int]:
        """Phrases -> the answer's tokens."""
        ids = []
        for number, phrase in enumerate(self.phrase_ids([*present, *absent])):
            ids += [self.absent] if number == len(present) else [self.separator] if number else []
            ids += phrase
        return [*ids, self.stops[0]]

    def document_answer(self, title: str, text: str, keyphrases, max_words: int | None, counts: Counter):
        """The answer of a document, or `None` if it has no words or no keyphrases; dropped phrases are counted."""
        source, texts = document_words(title, text)[0], dict[tuple[str, ...], str]()
        for phrase in split_keyphrases(keyphrases):
            words, phrase = phrase_words(phrase, known_numbers=True), replace_surrogates(" ".join(phrase.split()))
            if not has_words(words):
                continue
            counts["phrases"] += 1
            (ids,) = self.phrase_ids([phrase])
            if (max_words is not None and len(words) > max_words) or len(ids) > self.settings.max_tokens_per_phrase:
                counts["long_phrases"] += 1
            elif set(self.ends) & set(ids):
                counts["marked"] += 1
            else:
                texts.setdefault(tuple(words), phrase)
        present, absent = split_present_absent(source, list(texts))
        if not has_words(source) or not texts:
            return None
        return self.encode_answer(*([texts[tuple(words)] for words in part] for part in (present, absent)))


def document_words(title: str | None, text: str) -> tuple[list[str], list[tuple[str, int, int] | None]]:
    """Words and offsets as in `EncodedSource`, but numbers are themselves, and not `<digit>`."""
    texts, split = {"title": title or "", "text": text}, split_document(text, title)
    words = [texts[at[0]][at[1] : at[2]] if at and word == DIGIT else word for word, at in split]
    return words, [at for _, at in split]


def tokenize_prompts(
    batch: Mapping[str, Sequence],
    tokenizer,
    config,
    *,
    max_length: int = 640,
    max_words: int | None = 6,
) -> dict[str, list]:
    """Documents -> rows for training a stock decoder, for `datasets.Dataset.map`; the loss is on the answer alone.

    The end of a text is left out if a row would be longer than `max_length` tokens, or its prompt longer than `max_source_length`.
    Keyphrases of more than `max_words` words or `max_tokens_per_phrase` tokens, those that contain a mark, and documents without words,
    without keyphrases, or without room for their text, are dropped. A warning gives the numbers.

    Args:
        batch: columns as for `tokenize_documents`.
        tokenizer, config: of the model; see `PromptFormat`.
        max_length: tokens of prompt and answer.
        max_words: words of a keyphrase. `None` for no limit.

    Returns:
        `input_ids` and `labels`, which are -100 in the prompt.

    Raises:
        ValueError: as `PromptFormat`.
    """
    written, counts = PromptFormat(tokenizer, config), Counter(documents=len(batch["text"]))
    documents, answers = [], []
    for title, text, keyphrases in documents_of(batch):
        answer = written.document_answer(title, text, keyphrases, max_words, counts)
        if answer is None:
            counts["unlabelled"] += 1
        elif max_length - len(answer) <= len(written.start) + len(written.end):
            counts["long"] += 1
        else:
            documents.append((title, text))
            answers.append(answer)
    limits = [min(written.settings.max_source_length, max_length - len(answer)) for answer in answers]
    rows: dict[str, list] = {"input_ids": [], "labels": []}
    for prompt, answer in zip(written.encode(documents, limits), answers, strict=True):
        counts["truncated"] += prompt.dropped > 0
        rows["input_ids"].append([*prompt.input_ids, *answer])
        rows["labels"].append([*[IGNORED] * len(prompt.input_ids), *answer])
    warn_of(
        counts,
        long_phrases=f"phrases have more than {max_words} words or max_tokens_per_phrase tokens and were dropped",
        marked="phrases contain a token that ends a phrase and were dropped",
        unlabelled="documents have no words or no keyphrases and were dropped",
        long=f"documents have more keyphrases than fit in {max_length:,} tokens and were dropped",
        truncated=f"documents are longer than {max_length:,} tokens or max_source_length: their end is left out",
    )
    return rows


class DataCollatorForPrompts(DataCollatorForKeyphraseGeneration):
    """Rows of `tokenize_prompts` -> `input_ids`, `attention_mask` and `labels`, padded on the right, labels with -100; logits are computed
    for answers alone, see `score_answers_only`.
    """

    def __call__(self, rows: Sequence[Mapping]) -> dict[str, torch.Tensor | int]:
        """Rows -> a padded batch."""
        pad_id, ids = self.tokenizer.pad_token_id, [row["input_ids"] for row in rows]
        pad_id = (self.tokenizer.eos_token_id or 0) if pad_id is None else pad_id
        batch = {
            "input_ids": pad(ids, pad_id),
            "attention_mask": pad([[1] * len(row) for row in ids], 0),
            "labels": pad([row["labels"] for row in rows], IGNORED),
        }
        return score_answers_only(batch)
