# SPDX-License-Identifier: Apache-2.0
"""ExHiRD's word tokenizer: the rule for sources and keyphrases, the vocabulary, and out-of-vocabulary words to copy.

The rule is the reference's text preparation, with CoreNLP's tokenizer replaced by rules. Letters are lower-cased, text in
[...] and {...} is dropped, words are runs of a-z 0-9 _, each of `, ( ) . ' < >` is a word, and everything else separates
words. A word that begins with a digit becomes `<digit>`, and adjacent `<digit>` are merged. `<digit>`, `<eot>`,
`<p_start>`, `<a_start>` in a text are kept whole, so that prepared data is read unchanged; `<unk>` and the other special
tokens are not special in a text.

It differs from the reference where the reference would join words or lose letters:

- Line ends, tabs, brackets and symbols outside ASCII (dashes, quotes) separate words. The reference deletes them, which
  turns "graph\\ncuts" into "graphcuts".
- Accents are removed and ligatures resolved ("naïve" becomes "naive"). The reference deletes the letter. Other letters
  that are not Latin, such as Greek ones, are deleted as in the reference, and so are control characters.
"""

import copy
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tokenizers import PreTokenizedString, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import logging

logger = logging.get_logger(__name__)

SPECIAL = ("<unk>", "<blank>", "<s>", "</s>")  # ids 0 to 3
END_PHRASE, PRESENT, ABSENT, DIGIT, TITLE_END = MARKS = (";", "<p_start>", "<a_start>", "<digit>", "<eot>")
SUBWORD_FOLDER = "subword_tokenizer"  # in the folder of the tokenizer
UNLIMITED = 10**9  # a model_max_length above it means no limit

_TAIL = r"[a-z0-9_]*+(?:[.,][0-9][a-z0-9_]*+)*+"
_NUMBER = rf"(?:{DIGIT}|(?<![a-z0-9_.])\.[0-9]{_TAIL}|(?<![a-z0-9_])[0-9]{_TAIL})"
_NUMBERS = rf"{_NUMBER}(?:[^a-z0-9_<>,().']*+{_NUMBER})*+"
_WORD = rf"{DIGIT}|{TITLE_END}|{PRESENT}|{ABSENT}|[a-z0-9_]++|[<>,().']"
_BRACKETS = normalizers.Replace(Regex(r"\[[^\[\]]*\]|\{[^{}]*\}"), " ")
_CLEAN = normalizers.Sequence(
    [
        normalizers.Replace(Regex("[\u2120\u2122]"), " "),  # trade marks would become letters of the preceding word
        normalizers.NFKD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex("[\u2018\u2019]"), "'"),
        _BRACKETS,
        _BRACKETS,  # twice, for nested brackets
        normalizers.Replace(Regex(r"[^\p{P}\p{S}\p{Z}\x09-\x0d\x20-\x7e\x{85}]+"), ""),
    ]
)
_NORMALIZER = normalizers.Sequence([_CLEAN, normalizers.Replace(Regex(_NUMBERS), DIGIT)])
_SPLIT = pre_tokenizers.Split(Regex(_WORD), "removed", invert=True)
_SPLIT_WITH_NUMBERS = pre_tokenizers.Split(Regex(f"{_NUMBERS}|{_WORD}"), "removed", invert=True)


class EncodedSource(NamedTuple):
    """A document's words. V is the size of the vocabulary.

    Attributes:
        words: title, `<eot>` and text, or the text alone.
        input_ids: ids of the vocabulary, `<unk>` for other words.
        copy_ids: extended ids: V + k for the k-th out-of-vocabulary word (from 0, by first occurrence), else `input_ids`.
        oov_words: the out-of-vocabulary words.
        offsets: ("title" or "text", start, end) of each word, and `None` for `<eot>`.
    """

    words: list[str]
    input_ids: list[int]
    copy_ids: list[int]
    oov_words: list[str]
    offsets: list[tuple[str, int, int] | None]


def mark_id(mark: str, meaning: str) -> property:
    """The id of a mark in the vocabulary of an `ExhirdTokenizer`."""
    return property(lambda self: self._tokenizer.token_to_id(mark), doc=f"The id of `{mark}`, {meaning}.")


class ExhirdTokenizer(PreTrainedTokenizerFast):
    """A word tokenizer; it adds no special tokens around a text.

    The ids of `<unk>`, `<blank>` (padding), `<s>` and `</s>` are 0 to 3. The vocabulary also contains `;`, which ends a
    phrase and is never read from a text, `<p_start>`, `<a_start>`, `<digit>` and `<eot>`.

    ```python
    >>> tokenizer = ExhirdTokenizer.from_texts([*titles, *texts, *keyphrases], vocab_size=50_000)
    >>> tokenizer.encode_source("It finds min-cuts.", title="Graph cuts").words
    ['graph', 'cuts', '<eot>', 'it', 'finds', 'min', 'cuts', '.']
    ```

    It returns offsets like every fast tokenizer, but those of a number cover its last character only. The offsets of
    `split_words` and `encode_source` cover the whole number.

    Args:
        vocab: {word: id}, made by `from_texts` and `from_words`.
        subword_tokenizer: the fast tokenizer of a pretrained encoder, for `encode_subwords`. It is saved with this one, in
            the folder "subword_tokenizer".

    Raises:
        ValueError: for a vocabulary without the words above, also in `from_pretrained`.
    """

    model_input_names = ["input_ids", "attention_mask"]

    def __init__(
        self, vocab: dict[str, int] | None = None, *, subword_tokenizer: PreTrainedTokenizerFast | None = None, **kwargs
    ):
        if vocab is not None:
            kwargs["tokenizer_object"] = Tokenizer(models.WordLevel(vocab, unk_token=SPECIAL[0]))
        names = dict(zip(("unk_token", "pad_token", "bos_token", "eos_token"), SPECIAL, strict=True))
        self.subword_tokenizer = check_subword_tokenizer(subword_tokenizer)
        # "</s>" in a text does not end it
        super().__init__(**{"split_special_tokens": True, "subword_folder": None, **names, **kwargs})
        self._tokenizer.normalizer, self._tokenizer.pre_tokenizer = _NORMALIZER, _SPLIT
        misplaced = [word for i, word in enumerate(SPECIAL) if self._tokenizer.token_to_id(word) != i]
        missing = [word for word in MARKS if self._tokenizer.token_to_id(word) is None]
        if misplaced or missing:
            without = f" has no {', '.join(missing)}" if missing else ""
            order = f" does not begin with {', '.join(SPECIAL)}" if misplaced else ""
            raise ValueError(
                f"The vocabulary{without}{' and' if without and order else ''}{order}; targets need these words."
                " Use ExhirdTokenizer.from_texts, or add them to your words."
            )

    @classmethod
    def from_texts(
        cls, texts: Iterable[str | Sequence[str]], vocab_size: int = 50_000, min_count: int = 1, **kwargs
    ) -> "ExhirdTokenizer":
        """A tokenizer with the most frequent words of sources and targets.

        Args:
            texts: titles, texts, keyphrases, in any order; a list of strings counts as one text.
            vocab_size: number of words, including `;` and the other marks, and not the four special tokens. Words of
                equal frequency are taken in alphabetical order.
            min_count: rarer words are dropped.

        Raises:
            ValueError: for a single string, texts without words, and a `vocab_size` without room for the marks.
        """
        if isinstance(texts, str):
            raise ValueError(f"texts is a single string, {texts!r:.40}. Pass a list of strings.")
        if vocab_size < len(MARKS):
            raise ValueError(
                f"vocab_size={vocab_size} has no room for the {len(MARKS)} marks. Use {len(MARKS)} or more."
            )
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(word for word, _, _ in split_words(text if isinstance(text, str) else " ".join(text)))
        if not counts:
            raise ValueError("No words found in texts, so the vocabulary would be empty. Pass texts with words.")
        frequent = sorted((-n, word) for word, n in counts.items() if word not in MARKS and n >= min_count)
        return cls.from_words([*MARKS, *(word for _, word in frequent[: vocab_size - len(MARKS)])], **kwargs)

    @classmethod
    def from_words(cls, words: Sequence[str], **kwargs) -> "ExhirdTokenizer":
        """A tokenizer of a list of words in the order of their ids; the four special tokens come first, or are added.

        Raises:
            ValueError: for a word that occurs twice.
        """
        words = list(words)
        if tuple(words[: len(SPECIAL)]) != SPECIAL:
            words = [*SPECIAL, *words]
        repeated = [word for word, n in Counter(words).items() if n > 1]
        if repeated:
            raise ValueError(
                f"{repeated[0]!r} would have two ids. List each word once, and {', '.join(SPECIAL)} first or not at all."
            )
        return cls({word: i for i, word in enumerate(words)}, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *inputs, **kwargs) -> "ExhirdTokenizer":
        """As in transformers; also loads the sub-word tokenizer, if one was saved with this one.

        Raises:
            ValueError: for a `subword_tokenizer` that is a name.
        """
        hub_options = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")
        options = {name: kwargs[name] for name in hub_options if name in kwargs}
        options["trust_remote_code"] = bool(kwargs.get("trust_remote_code"))  # None: transformers would ask
        folder = os.path.join(kwargs.get("subfolder") or "", SUBWORD_FOLDER)
        subword_tokenizer = kwargs.get("subword_tokenizer")
        if isinstance(subword_tokenizer, str | os.PathLike):
            name = str(subword_tokenizer)
            raise ValueError(f"subword_tokenizer={name!r} is a name. Pass AutoTokenizer.from_pretrained({name!r}).")
        tokenizer = super().from_pretrained(pretrained_model_name_or_path, *inputs, **kwargs)
        if subword_tokenizer is None and tokenizer.init_kwargs.get("subword_folder"):
            try:
                tokenizer.subword_tokenizer = load_subword_tokenizer(pretrained_model_name_or_path, folder, options)
            except OSError as error:
                logger.warning(
                    f"The sub-word tokenizer of {pretrained_model_name_or_path} is missing ({error}). If the model reads "
                    "sub-words, set it: tokenizer.with_subword_tokenizer(AutoTokenizer.from_pretrained(...))."
                )
        return tokenizer

    def _save_pretrained(self, save_directory, file_names, *args, **kwargs) -> tuple[str, ...]:
        names = super()._save_pretrained(save_directory, file_names, *args, **kwargs)
        if self.subword_tokenizer is None:
            return names
        return (*names, *self.subword_tokenizer.save_pretrained(os.path.join(save_directory, SUBWORD_FOLDER)))

    def with_subword_tokenizer(self, subword_tokenizer: PreTrainedTokenizerFast | None) -> "ExhirdTokenizer":
        """A copy with the tokenizer of a pretrained encoder, see `encode_subwords`, or without one."""
        other = copy.deepcopy(self)
        other.subword_tokenizer = check_subword_tokenizer(subword_tokenizer)
        return other

    @property
    def subword_folder(self) -> str | None:
        """The folder of the sub-word tokenizer, as tokenizer_config.json records it."""
        return None if self.subword_tokenizer is None else SUBWORD_FOLDER

    end_phrase_token_id = mark_id(END_PHRASE, "the token after the last word of a phrase")
    present_token_id = mark_id(PRESENT, "the token before a present phrase")
    absent_token_id = mark_id(ABSENT, "the token before an absent phrase")
    title_end_token_id = mark_id(TITLE_END, "the token between title and text")

    def split_words(self, text: str) -> list[tuple[str, int, int]]:
        """The normalised words of a text, in the vocabulary or not, with start and end in the original text.

        >>> tokenizer.split_words("Naïve k-NN, 10-20 times")
        [('naive', 0, 5), ('k', 6, 7), ('nn', 8, 10), (',', 10, 11), ('<digit>', 12, 17), ('times', 18, 23)]
        """
        return split_words(text)

    def encode_source(self, text: str, title: str | None = None) -> EncodedSource:
        """Encodes title, `<eot>` and text, or the text alone if the title has no words. Both may be empty."""
        words = split_document(text, title)
        input_ids, copy_ids, unknown, size = [], [], self.unk_token_id, len(self)
        oov_words: dict[str, int] = {}
        for word, _ in words:
            index = self._tokenizer.token_to_id(word)
            input_ids.append(unknown if index is None else index)
            copy_ids.append(size + oov_words.setdefault(word, len(oov_words)) if index is None else index)
        return EncodedSource(
            [word for word, _ in words], input_ids, copy_ids, list(oov_words), [offset for _, offset in words]
        )

    def convert_ids_to_words(self, ids: Iterable[int], oov_words: Sequence[str]) -> list[str]:
        """Extended ids -> words.

        Args:
            ids: of the vocabulary, or `len(tokenizer)` + k for the k-th of `oov_words`.
            oov_words: the out-of-vocabulary words of the source.

        Raises:
            ValueError: for an id that is neither.
        """
        words, size = [], len(self)
        for i in map(int, ids):
            if not 0 <= i < size + len(oov_words):
                raise ValueError(
                    f"{i} is not the id of a word: the vocabulary has {size} words, and oov_words {len(oov_words)} more."
                )
            words.append(self._tokenizer.id_to_token(i) if i < size else oov_words[i - size])
        return words

    def encode_subwords(
        self, text: str, title: str | None = None, max_length: int | None = None, *, source: EncodedSource | None = None
    ) -> dict[str, list[list[int]]]:
        """A document in sub-words: `subword_ids`, `subword_mask` and `subword_word_ids`, one row per window.

        `subword_word_ids` has the index in `encode_source(text, title).words` of each sub-word's word, and -1 for special
        tokens and for text that is not part of a word. Title and text are encoded as a pair; `<eot>` has no sub-word.

        Args:
            text, title: the document.
            max_length: sub-words of a window, by default `subword_tokenizer.model_max_length`, or 512. A longer text is split into
                windows that overlap by an eighth. Each contains the title, unless the title fills half of a window.
            source: the output of `encode_source`, if it has been computed already; it may have been truncated.

        Raises:
            ValueError: without a sub-word tokenizer.
        """
        if self.subword_tokenizer is None:
            raise ValueError(
                "subword_tokenizer=None: this tokenizer cannot encode sub-words. Use "
                "tokenizer.with_subword_tokenizer(AutoTokenizer.from_pretrained(...)) with the encoder's name."
            )
        source = source or self.encode_source(text, title)
        fields = [field for field in ("title", "text") if any(p and p[0] == field for p in source.offsets)] or ["text"]
        texts = {"title": replace_surrogates(title), "text": replace_surrogates(text)}
        limit = max_length or self.subword_tokenizer.model_max_length
        limit = limit if limit < UNLIMITED else 512
        inputs = [fields]
        if len(fields) == 2:
            title_ids = self.subword_tokenizer(texts["title"], add_special_tokens=False, verbose=False)["input_ids"]
            inputs = [fields] if len(title_ids) <= limit // 2 else [["title"], ["text"]]
        outputs: dict[str, list[list[int]]] = {"subword_ids": [], "subword_mask": [], "subword_word_ids": []}
        for names in inputs:
            for window in self.subword_windows([texts[name] for name in names], limit):
                word_ids = subword_word_ids(window, names, source.offsets)
                if not outputs["subword_ids"] or max(word_ids) >= 0:  # skips what truncation has removed
                    outputs["subword_ids"].append(window.ids)
                    outputs["subword_mask"].append([1] * len(window.ids))
                    outputs["subword_word_ids"].append(word_ids)
        return outputs

    def subword_windows(self, texts: list[str], limit: int) -> list:
        """A text, or a title and a text -> encodings of at most `limit` sub-words."""
        truncation = "only_first" if len(texts) == 1 else "only_second"
        options = {"truncation": truncation, "max_length": limit, "stride": limit // 8}
        options["return_overflowing_tokens"] = True
        return self.subword_tokenizer(*texts, verbose=False, **options).encodings


def split_document(text: str, title: str | None = None) -> list[tuple[str, tuple[str, int, int] | None]]:
    """The words of title, `<eot>` and text, or of the text alone if the title has no words, each with its offset as in
    `EncodedSource`.
    """
    words: list[tuple[str, tuple[str, int, int] | None]]
    words = [(word, ("title", start, end)) for word, start, end in split_words(title or "")]
    if words:
        words.append((TITLE_END, None))
    return words + [(word, ("text", start, end)) for word, start, end in split_words(text)]


def split_words(text: str) -> list[tuple[str, int, int]]:
    """The words of a text with start and end, by the rule above."""
    string = PreTokenizedString(replace_surrogates(text))
    string.normalize(lambda part: _CLEAN.normalize(part))
    _SPLIT_WITH_NUMBERS.pre_tokenize(string)
    return [
        (DIGIT if is_number(word) else word, start, end)
        for word, (start, end), _ in string.get_splits("original", "char")
    ]


def is_number(word: str) -> bool:
    """Whether a word becomes `<digit>`."""
    return word[0] in "0123456789" or word.startswith(DIGIT) or (word[0] == "." and len(word) > 1)


def replace_surrogates(text: str | None) -> str:
    """The text with unpaired surrogates replaced, which tokenizers refuse; "" for `None`."""
    text = text or ""
    return text if text.isascii() else re.sub("[\ud800-\udfff]", "\ufffd", text)


def subword_word_ids(encoding, fields: list[str], offsets: list[tuple[str, int, int] | None]) -> list[int]:
    """The index of the first word that each sub-word overlaps, or -1."""
    spans = {
        field: [(p[1], p[2], i) for i, p in enumerate(offsets) if p is not None and p[0] == field] for field in fields
    }
    positions, word_ids = dict.fromkeys(fields, 0), []
    for sequence, (start, end) in zip(encoding.sequence_ids, encoding.offsets, strict=True):
        index = -1
        if sequence is not None and start < end:
            field = fields[sequence]
            words, position = spans[field], positions[field]
            while position < len(words) and words[position][1] <= start:
                position += 1
            positions[field] = position
            if position < len(words) and words[position][0] < end:
                index = words[position][2]
        word_ids.append(index)
    return word_ids


def check_subword_tokenizer(tokenizer):
    """The tokenizer. Raises a `ValueError` if it is not a fast one."""
    if tokenizer is not None and not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{type(tokenizer).__name__} is not a fast tokenizer, and so it cannot give the offsets of sub-words. "
            "Use AutoTokenizer.from_pretrained."
        )
    return tokenizer


def load_subword_tokenizer(name, folder: str, options: dict):
    """The tokenizer in a subfolder of a checkpoint or Hub repository. Raises an `OSError` if it is missing."""
    path = os.path.join(name, folder)
    if os.path.isdir(name):
        if not os.path.isdir(path):
            raise FileNotFoundError(f"no folder {path}")
        return AutoTokenizer.from_pretrained(path, **options)
    return AutoTokenizer.from_pretrained(name, subfolder=folder, **options)


ExhirdTokenizer.register_for_auto_class("AutoTokenizer")
