# SPDX-License-Identifier: Apache-2.0
"""Documents as training rows, and rows as batches.

A document's labels are one row per keyphrase, present ones in the order of the text, then absent ones: `<p_start>` or
`<a_start>`, the phrase's words, `;`. The last row is `</s>`. Words outside the vocabulary that occur in the source have
their extended ids (see `EncodedSource`), so that the model can learn to copy them.

Letters: B documents, L source words, T words of a target.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.utils import logging

from .tokenization_exhird import DIGIT, MARKS, TITLE_END, EncodedSource, ExhirdTokenizer, split_words

logger = logging.get_logger(__name__)

_NO_WORDS = frozenset(MARKS) - {DIGIT}
_SEPARATORS = frozenset(
    "-\u2010\u2011\u2012\u2013\u2014_/\\|\"\u201c\u201d\u201e'\u2018\u2019`\u00b4[]{}\u2026\u00b7\u2022"
)


@cache
def _stemmer():
    from nltk.stem.porter import PorterStemmer  # with it come scikit-learn, pandas and SciPy

    return PorterStemmer()


@lru_cache(maxsize=1 << 18)
def stem(word: str) -> str:
    """One word -> its lower-cased Porter stem."""
    return _stemmer().stem(word)


def split_keyphrases(keyphrases: Sequence[str] | str | None) -> list[str]:
    """Keyphrases as texts, without `?` and without text in parentheses; a `;` separates phrases."""
    phrases = []
    for text in [keyphrases] if isinstance(keyphrases, str) else keyphrases or ():
        text, previous = (text or "").replace("?", ""), None
        while text != previous:
            text, previous = re.sub(r"\([^()]*\)", " ", text), text
        phrases += text.split(";")
    return phrases


def clean_keyphrases(keyphrases: Sequence[str] | str | None, max_words: int | None = 6) -> list[list[str]]:
    """The words of keyphrases, see `split_keyphrases`.

    Phrases of more than `max_words` words, and those without a letter or digit, are dropped.

    >>> clean_keyphrases("Graph cuts (GC); min-cut?;")
    [['graph', 'cuts'], ['min', 'cut']]
    """
    phrases = map(phrase_words, split_keyphrases(keyphrases))
    return [words for words in phrases if has_words(words) and (max_words is None or len(words) <= max_words)]


def phrase_words(text: str, known_numbers: bool = False) -> list[str]:
    """The normalised words of a keyphrase, without marks; with `known_numbers` a number is itself, and not `<digit>`."""
    words = [split for split in split_words(text) if split[0] not in _NO_WORDS]
    return [text[start:end] if known_numbers and word == DIGIT else word for word, start, end in words]


def signs_of(text: str) -> str:
    """What a text has beside words and separators: phrases that differ in it are different, as C, C++ and C# are.

    >>> signs_of("C++"), signs_of("min-cut")
    ('++', '')
    """
    covered = {i for _, start, end in split_words(text) for i in range(start, end)}
    signs = (sign for i, sign in enumerate(text) if i not in covered and not sign.isspace())
    return "".join(sign for sign in signs if sign not in _SEPARATORS)


def find_text(phrase: str, text: str) -> tuple[int, int] | None:
    """The first place of a phrase in a text in this spelling, except for case and spaces: start and end."""
    pattern = r"\s+".join(map(re.escape, phrase.split()))
    found = re.search(rf"(?<!\w){pattern}(?!\w)", text, re.IGNORECASE)
    return found and found.span()


def has_words(words: Iterable[str]) -> bool:
    """Whether there is more than punctuation and marks."""
    return any(word not in _NO_WORDS and any(map(str.isalnum, word)) for word in words)


def find_phrase(stems: Sequence[str], phrase: Sequence[str]) -> int | None:
    """The first position in a source's stems at which a phrase's stems occur in a row; `<eot>` matches nothing."""
    own = [stem(word) for word in phrase]
    if not own or TITLE_END in own:
        return None
    starts = (i for i, first in enumerate(stems) if first == own[0])
    return next((i for i in starts if list(stems[i : i + len(own)]) == own), None)


def split_present_absent(
    source_words: Sequence[str], phrases: Sequence[Sequence[str]]
) -> tuple[list[list[str]], list[list[str]]]:
    """Phrases -> those that occur in the source, sorted by position and length, and the others in the given order.

    Words are equal if their stems are. Of equal phrases the first is kept.

    >>> split_present_absent(["deep", "graph", "cuts"], [["trees"], ["graph", "cut"], ["tree"], ["deep"]])
    ([['deep'], ['graph', 'cut']], [['trees']])
    """
    stems = [stem(word) for word in source_words]
    present, absent, seen = [], [], set()
    for phrase in map(list, phrases):
        key = tuple(map(stem, phrase))
        if key in seen:
            continue
        seen.add(key)
        position = find_phrase(stems, phrase)
        if position is None:
            absent.append(phrase)
        else:
            present.append((position, len(phrase), phrase))
    return [phrase for _, _, phrase in sorted(present, key=lambda entry: entry[:2])], absent


def drop_unlearnable(
    absent: Sequence[Sequence[str]], source_words: Sequence[str], tokenizer: ExhirdTokenizer
) -> list[list[str]]:
    """Drops absent phrases without a single word of the vocabulary or the source."""
    to_id, source = tokenizer.backend_tokenizer.token_to_id, set(source_words)
    return [list(phrase) for phrase in absent if any(to_id(word) is not None or word in source for word in phrase)]


def make_labels(
    present: Sequence[Sequence[str]], absent: Sequence[Sequence[str]], source: EncodedSource, tokenizer: ExhirdTokenizer
) -> list[list[int]]:
    """Labels as extended ids: one row `[<p_start> or <a_start>, words, ;]` per phrase, and `[</s>]`. A word that neither the
    vocabulary nor the source has is `<unk>`.
    """
    size, unknown = len(tokenizer), tokenizer.unk_token_id
    source_ids = {word: size + k for k, word in enumerate(source.oov_words)}
    end, rows = tokenizer.end_phrase_token_id, []
    for start, phrases in ((tokenizer.present_token_id, present), (tokenizer.absent_token_id, absent)):
        for phrase in phrases:
            ids = ((word, tokenizer.backend_tokenizer.token_to_id(word)) for word in phrase)
            rows.append([start, *(source_ids.get(word, unknown) if i is None else i for word, i in ids), end])
    return [*rows, [tokenizer.eos_token_id]]


def tokenize_documents(
    batch: Mapping[str, Sequence],
    tokenizer: ExhirdTokenizer,
    *,
    max_source_length: int | None = 400,
    max_target_length: int | None = 80,
    max_words: int | None = 6,
) -> dict[str, list]:
    """Documents -> rows for training, for `datasets.Dataset.map`.

    Long documents, those whose text has no words, and those without a keyphrase that could be learnt, are dropped. A warning
    gives the numbers of dropped documents and keyphrases.

    ```python
    >>> options = {"fn_kwargs": {"tokenizer": tokenizer}, "remove_columns": dataset.column_names}
    >>> dataset.map(tokenize_documents, batched=True, **options)
    ```

    Args:
        batch: columns `text`, `keyphrases` (lists, or strings with `;` between keyphrases) and, optionally, `title`. A text
            may also be a list of words.
        tokenizer: the model's.
        max_source_length: words of title and text, `<eot>` included. `None` for no limit.
        max_target_length: words of all keyphrases, including each one's start and `;`. `None` for no limit.
        max_words: words of a keyphrase; longer ones are dropped. `None` for no limit.

    Returns:
        `input_ids`, `copy_ids` and `labels` (a document's rows).
    """
    counts: Counter[str] = Counter(documents=len(batch["text"]))
    rows: dict[str, list] = {"input_ids": [], "copy_ids": [], "labels": []}
    for title, text, keyphrases in documents_of(batch):
        source = tokenizer.encode_source(text, title)
        if not has_words(word for word, at in zip(source.words, source.offsets, strict=True) if at and at[0] == "text"):
            counts["wordless"] += 1
            continue
        labels = document_labels(keyphrases, source, tokenizer, max_words, counts)
        too_long = max_source_length is not None and len(source.words) > max_source_length
        too_long |= max_target_length is not None and sum(map(len, labels[:-1])) > max_target_length
        if len(labels) == 1 or too_long:
            counts["unlabelled" if len(labels) == 1 else "long"] += 1
            continue
        for name, values in zip(rows, (source.input_ids, source.copy_ids, labels), strict=True):
            rows[name].append(values)
    warn_of(
        counts,
        wordless="documents have no words in their text and were dropped",
        long_phrases=f"phrases have more than {max_words} words and were dropped",
        unlabelled="documents have no keyphrase that could be learnt and were dropped",
        long=f"documents are longer than {max_source_length} words or {max_target_length} target words and were dropped",
    )
    return rows


def documents_of(batch: Mapping[str, Sequence]) -> Iterator[tuple[str, str, Sequence[str] | str | None]]:
    """Title, text and keyphrases of each document of a batch; the title may be missing."""
    texts = batch["text"]
    for title, text, keyphrases in zip(batch.get("title", [""] * len(texts)), texts, batch["keyphrases"], strict=True):
        yield join_words(title), join_words(text), keyphrases


def join_words(text: str | Sequence[str] | None) -> str:
    """A text, or its words joined by spaces."""
    return text if isinstance(text, str) else " ".join(text or ())


def document_labels(
    keyphrases, source: EncodedSource, tokenizer, max_words: int | None, counts: Counter
) -> list[list[int]]:
    """A document's rows of labels, not yet limited in their total length; dropped long phrases are counted."""
    cleaned = clean_keyphrases(keyphrases, None)
    phrases = [phrase for phrase in cleaned if max_words is None or len(phrase) <= max_words]
    counts["phrases"] += len(cleaned)
    counts["long_phrases"] += len(cleaned) - len(phrases)
    present, absent = split_present_absent(source.words, phrases)
    absent = drop_unlearnable(absent, source.words, tokenizer)
    return make_labels(present, absent, source, tokenizer)


def warn_of(counts: Counter, **reasons: str):
    """Logs how many documents or phrases there are for each reason, of how many."""
    for reason, description in reasons.items():
        if counts[reason]:
            logger.warning(f"{counts[reason]:,} of {counts[description.partition(' ')[0]]:,} {description}.")


class DataCollatorForKeyphraseGeneration:
    """Rows of `tokenize_documents` -> `input_ids`, `attention_mask`, `copy_ids` (B, L) and `labels` (B, T), padded with -100.

    The label rows of a document are concatenated, in the layout that `generate` returns. Sources are padded on the tokenizer's
    padding side, labels on the right. Rows without labels make batches without labels. All other columns are ignored.

    Args:
        tokenizer: the model's.
    """

    def __init__(self, tokenizer: ExhirdTokenizer):
        self.tokenizer = tokenizer

    def __call__(self, rows: Sequence[Mapping]) -> dict[str, torch.Tensor]:
        """Rows -> a padded batch."""
        side, pad_id = self.tokenizer.padding_side, self.tokenizer.pad_token_id
        sources = [row["input_ids"] for row in rows]
        batch = {
            "input_ids": pad(sources, pad_id, side),
            "attention_mask": pad([[1] * len(source) for source in sources], 0, side),
            "copy_ids": pad([row["copy_ids"] for row in rows], pad_id, side),
        }
        if all(row.get("labels") is not None for row in rows):
            targets = [torch.cat([to_tensor(phrase) for phrase in row["labels"]]) for row in rows]
            batch["labels"] = pad(targets, -100)
        return batch


def pad(rows: Sequence, value: int, side: str = "right") -> torch.Tensor:
    """Rows of numbers -> (B, L)."""
    return pad_sequence([to_tensor(row) for row in rows], batch_first=True, padding_value=value, padding_side=side)


def to_tensor(values: Sequence[int] | np.ndarray | torch.Tensor) -> torch.Tensor:
    """Numbers of a dataset in any format; arrays are copied, because those of a dataset may be read-only."""
    return values if torch.is_tensor(values) else torch.from_numpy(np.array(values, dtype=np.int64))
