# SPDX-License-Identifier: Apache-2.0
"""Documents as prompts and answers of a decoder, rows as batches, and answers as keyphrases.

An answer is ` graph cuts ; max flow | image segmentation` and EOS: present phrases in the order of the text, ` |`, absent phrases.

Letters: B rows, T tokens, K last positions with a label.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from transformers.utils import logging

from .answers_exhird import score_answers_only
from .candidates_exhird import score_phrases
from .data_exhird import (
    DataCollatorForKeyphraseGeneration,
    find_columns,
    has_words,
    join_words,
    phrase_words,
    split_keyphrases,
    split_present_absent,
    stem,
)
from .generation_exhird import KeyphraseGenerator, describe_phrase, phrase_key
from .search_exhird import ExhirdGenerateOutput
from .tokenization_exhird import DIGIT, replace_surrogates, split_document

logger = logging.get_logger(__name__)

IGNORED = -100
# the name of a special token is plain text, and the length of a text is ours to limit
PLAIN = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}


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
        tokenizer: of the decoder.
        config: an `ExhirdCausalConfig`.
    """

    def __init__(self, tokenizer, config):
        self.tokenizer, self.config = tokenizer, config
        self.before, _, rest = config.prompt_template.partition("{title}")
        self.between, _, after = rest.partition("{text}")
        bos = tokenizer.bos_token_id
        self.start = [bos] if bos is not None and tokenizer("")["input_ids"][:1] == [bos] else []
        self.end = tokenizer(after, **PLAIN)["input_ids"] if after else []

    @property
    def num_fixed(self) -> int:
        """The number of tokens that no prompt is without."""
        return len(self.start) + len(self.end)

    def encode(self, documents: Sequence[tuple[str | None, str]], limits: Sequence[int]) -> list[EncodedPrompt]:
        """Titles and texts -> prompts of at most so many tokens. Raises a `ValueError` for a limit without room for the text."""
        bodies = [replace_surrogates(f"{self.before}{title or ''}{self.between}{text}") for title, text in documents]
        encoded = self.tokenizer(bodies, **PLAIN)["input_ids"] if bodies else []
        prompts = []
        for (title, text), body, limit in zip(documents, encoded, limits, strict=True):
            room = limit - self.num_fixed
            if room < 1:
                raise ValueError(
                    f"A prompt of {limit} tokens has no room for the text beside {self.num_fixed} other tokens. Raise "
                    "max_source_length."
                )
            words, offsets = document_words(title, text)
            ids = [*self.start, *body[:room], *self.end] if has_words(words) else []
            prompts.append(EncodedPrompt(ids, max(len(body) - room, 0), words, offsets))
        return prompts

    def encode_answer(self, present: Sequence[str], absent: Sequence[str]) -> list[int]:
        """Phrases -> the answer's tokens. Each phrase is tokenised separately, so that no token crosses its end."""
        texts = [f" {phrase}" for phrase in (*present, *absent)]
        phrases = self.tokenizer(texts, **PLAIN)["input_ids"] if texts else []
        separator, mark = self.config.marks
        ids = []
        for number, phrase in enumerate(phrases):
            ids += [mark] if number == len(present) else [separator] if number else []
            ids += phrase
        return [*ids, *self.config.ends[:1]]

    def decode(self, ids: Sequence[int]) -> str:
        """The tokens of a phrase up to its end -> its text."""
        ends = {*self.config.marks, *self.config.ends, self.config.pad_token_id}
        length = next((i for i, token in enumerate(ids) if token in ends), len(ids))
        text = self.tokenizer.decode(ids[:length], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return " ".join(text.split())


def tokenize_prompts(
    batch: Mapping[str, Sequence],
    tokenizer,
    config,
    *,
    text_column: str = "text",
    title_column: str | None = "title",
    keyphrases_column: str = "keyphrases",
    max_length: int = 640,
    max_words: int | None = 6,
) -> dict[str, list]:
    """Documents -> rows for training an `ExhirdForCausalLM`, for `datasets.Dataset.map`; the loss is on the answer alone.

    The end of a text is left out if a row would be longer than `max_length` tokens, or its prompt longer than
    `config.max_source_length`. Keyphrases of more than `max_words` words or `config.max_tokens_per_phrase` tokens, those that
    contain a mark, and documents without words, without keyphrases, or without room for their text, are dropped. A warning gives
    the numbers.

    Args:
        batch: columns of texts, of lists of keyphrases (or strings with `;` between keyphrases) and, optionally, of titles.
        tokenizer, config: of the model.
        text_column, title_column, keyphrases_column: names of the columns; a missing column "title" is ignored.
        max_length: tokens of prompt and answer.
        max_words: words of a keyphrase. `None` for no limit.

    Returns:
        `input_ids` and `labels`, which are -100 in the prompt.

    Raises:
        ValueError: for a missing column, and a model without EOS or without the tokens between phrases.
    """
    if not config.ends:
        raise ValueError("eos_token_id=None, but answers end with EOS. Set model.config.eos_token_id.")
    title_column = find_columns(batch, text_column, title_column, keyphrases_column)
    written, counts = PromptFormat(tokenizer, config), Counter(documents=len(batch[text_column]))
    documents, answers = [], []
    for index, text in enumerate(batch[text_column]):
        document = join_words(batch[title_column][index] if title_column else None), join_words(text)
        answer = document_answer(document, batch[keyphrases_column][index], written, max_words, counts)
        if answer is None:
            counts["unlabelled"] += 1
        elif max_length - len(answer) <= written.num_fixed:
            counts["long"] += 1
        else:
            documents.append(document)
            answers.append(answer)
    limits = [min(config.max_source_length, max_length - len(answer)) for answer in answers]
    rows: dict[str, list] = {"input_ids": [], "labels": []}
    for prompt, answer in zip(written.encode(documents, limits), answers, strict=True):
        counts["truncated"] += prompt.dropped > 0
        rows["input_ids"].append([*prompt.input_ids, *answer])
        rows["labels"].append([*[IGNORED] * len(prompt.input_ids), *answer])
    log_counts(counts, max_length, max_words)
    return rows


def document_words(title: str | None, text: str) -> tuple[list[str], list[tuple[str, int, int] | None]]:
    """Words and offsets as in `EncodedSource`, but numbers are themselves, and not `<digit>`."""
    texts, split = {"title": title or "", "text": text}, split_document(text, title)
    words = [texts[at[0]][at[1] : at[2]] if at and word == DIGIT else word for word, at in split]
    return words, [at for _, at in split]


def generator_class(config) -> type[KeyphraseGenerator]:
    """The `KeyphraseGenerator` for a model's configuration."""
    return KeyphraseGenerator if config.is_encoder_decoder else CausalKeyphraseGenerator


def document_answer(document, keyphrases, written: PromptFormat, max_words: int | None, counts: Counter):
    """The answer of a document, or `None` if it has no words or no keyphrases; dropped phrases are counted."""
    title, text = document
    source, texts, config = document_words(title, text)[0], {}, written.config
    for phrase in split_keyphrases(keyphrases):
        words, phrase = phrase_words(phrase, known_numbers=True), replace_surrogates(" ".join(phrase.split()))
        if not has_words(words):
            continue
        counts["phrases"] += 1
        ids = written.tokenizer(f" {phrase}", **PLAIN)["input_ids"]
        if (max_words is not None and len(words) > max_words) or len(ids) > config.max_tokens_per_phrase:
            counts["long_phrases"] += 1
        elif {*config.marks, *config.ends} & set(ids):
            counts["marked"] += 1
        else:
            texts.setdefault(tuple(words), phrase)
    present, absent = split_present_absent(source, list(texts))
    if not has_words(source) or not texts:
        return None
    return written.encode_answer(*([texts[tuple(words)] for words in part] for part in (present, absent)))


def log_counts(counts: Counter, max_length: int, max_words: int | None):
    """Warns of what was dropped and truncated."""
    limit = (
        "max_tokens_per_phrase tokens" if max_words is None else f"{max_words} words or max_tokens_per_phrase tokens"
    )
    for reason, description, total in (
        ("long_phrases", f"keyphrases have more than {limit} and were dropped", "phrases"),
        ("marked", "keyphrases contain a token that ends a phrase and were dropped", "phrases"),
        ("unlabelled", "documents have no words or no keyphrases and were dropped", "documents"),
        ("long", f"documents have more keyphrases than fit in {max_length:,} tokens and were dropped", "documents"),
        (
            "truncated",
            f"documents are longer than {max_length:,} tokens or max_source_length: their end is left out",
            "documents",
        ),
    ):
        if counts[reason]:
            logger.warning(f"{counts[reason]:,} of {counts[total]:,} {description}.")


class DataCollatorForPrompts(DataCollatorForKeyphraseGeneration):
    """Rows of `tokenize_prompts` -> `input_ids`, `attention_mask` and `labels` (B, T), padded on the right; labels with -100.

    Args:
        tokenizer: the model's.
        answers_only: see `score_answers_only`.
        pad_to_multiple_of: pads rows to a multiple of it.
    """

    def __init__(self, tokenizer, answers_only: bool = False, pad_to_multiple_of: int | None = None):
        super().__init__(tokenizer, pad_to_multiple_of)
        self.answers_only = answers_only

    def __call__(self, rows: Sequence[Mapping]) -> dict[str, torch.Tensor | int]:
        """Rows -> a padded batch."""
        pad_id, ids = self.tokenizer.pad_token_id, [row["input_ids"] for row in rows]
        pad_id = (self.tokenizer.eos_token_id or 0) if pad_id is None else pad_id
        batch = {
            "input_ids": self.pad(ids, pad_id, "right"),
            "attention_mask": self.pad([[1] * len(row) for row in ids], 0, "right"),
            "labels": self.pad([row["labels"] for row in rows], IGNORED, "right"),
        }
        return score_answers_only(batch) if self.answers_only else batch


class CausalKeyphraseGenerator(KeyphraseGenerator):
    """`KeyphraseGenerator` for an `ExhirdForCausalLM` and its tokenizer."""

    max_words = None  # of a phrase; its tokens are limited

    def set_up(self):
        """See `KeyphraseGenerator`."""
        if len(self.tokenizer) > self.model.config.vocab_size:
            raise ValueError(
                f"The tokenizer has {len(self.tokenizer):,} tokens, but the model has {self.model.config.vocab_size:,}. Load both "
                "from the same checkpoint."
            )
        self.format = PromptFormat(self.tokenizer, self.model.config)

    def encode(self, documents: Sequence[tuple[str | None, str]]) -> list[EncodedPrompt]:
        """See `KeyphraseGenerator`. Warns of documents that are not read to their end."""
        limit = self.model.config.max_source_length
        prompts = self.format.encode(documents, [limit] * len(documents))
        if truncated := sum(prompt.dropped > 0 for prompt in prompts):
            logger.warning(
                f"{truncated:,} of {len(prompts):,} documents have more than max_source_length={limit:,} tokens: their end is not "
                "read. Raise model.config.max_source_length if the model was trained on longer ones."
            )
        return prompts

    def generate_batch(self, documents, sources) -> ExhirdGenerateOutput:
        """See `KeyphraseGenerator`."""
        prompts = [torch.tensor(source.input_ids) for source in sources]
        width = max(map(len, prompts))
        ids = torch.stack([torch.nn.functional.pad(prompt, (width - len(prompt), 0)) for prompt in prompts])
        mask = torch.arange(width) >= width - torch.tensor([[len(prompt)] for prompt in prompts])
        device = self.model.device
        return self.model.generate_phrases(ids.to(device), mask.long().to(device), **self.generate_kwargs)

    def rank(self, ids: list[list[int]], candidates: list[str], source, document) -> list[dict]:
        """Rows of ids and candidates -> keyphrases, the most probable first: `score` is the probability of a phrase as the first one, or,
        of one that does not occur, as the first after the mark of these. Of equal phrases the first is kept, a generated one before
        a candidate.
        """
        given = [(words, written) for _, words, written in self.decode_rows(ids, source) if self.is_phrase(words)]
        for text in candidates:
            if self.is_phrase(words := phrase_words(text, known_numbers=True)):
                given.append((words, " ".join(text.split())))
            else:
                logger.warning_once(f"A candidate without a Latin letter or a digit is left out: {text!r:.60}.")
        unique: dict[tuple, tuple[list[str], str]] = {}
        for words, written in given:
            unique.setdefault(phrase_key(words, written), (words, written))
        if not unique:
            return []
        stems, limit = [stem(word) for word in source.words], self.model.config.max_tokens_per_phrase
        phrases, tokens = [], []
        written_ids = self.tokenizer([replace_surrogates(f" {text}") for _, text in unique.values()], **PLAIN)[
            "input_ids"
        ]
        for (words, written), ids_of_phrase in zip(unique.values(), written_ids, strict=True):
            if len(ids_of_phrase) > limit:
                logger.warning_once(
                    f"A phrase of more than max_tokens_per_phrase={limit} tokens is left out: {written!r:.60}."
                )
                continue
            phrases.append(describe_phrase(words, written, 0.0, stems, source.offsets, document))
            tokens.append(ids_of_phrase)
        scores = score_phrases(self.model, source.input_ids, tokens, [not phrase["present"] for phrase in phrases])
        ranked = [phrase | {"score": math.exp(score)} for phrase, score in zip(phrases, scores, strict=True)]
        return sorted(ranked, key=lambda phrase: -phrase["score"])[: self.num_keyphrases]

    def decode_rows(self, ids: list[list[int]], source) -> list[tuple[int, list[str], str | None]]:
        """See `KeyphraseGenerator`."""
        phrases = [(number, self.format.decode(row)) for number, row in enumerate(ids)]
        # scores count every number as <digit>
        split = [(number, phrase_words(text, known_numbers=not self.raw), text) for number, text in phrases]
        return [row for row in split if row[1]]
