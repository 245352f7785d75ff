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

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tokenizers import PreTokenizedString, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<unk>", "<blank>", "<s>", "</s>")  # ids 0 to 3
END_PHRASE, PRESENT, ABSENT, DIGIT, TITLE_END = MARKS = (";", "<p_start>", "<a_start>", "<digit>", "<eot>")

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

    Raises:
        ValueError: for a vocabulary without the words above, also in `from_pretrained`.
    """

    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab: dict[str, int] | None = None, **kwargs):
        if vocab is not None:
            kwargs["tokenizer_object"] = Tokenizer(models.WordLevel(vocab, unk_token=SPECIAL[0]))
        names = dict(zip(("unk_token", "pad_token", "bos_token", "eos_token"), SPECIAL, strict=True))
        # "</s>" in a text does not end it
        super().__init__(**{"split_special_tokens": True, **names, **kwargs})
        self._tokenizer.normalizer, self._tokenizer.pre_tokenizer = _NORMALIZER, _SPLIT
        if missing := [word for word in MARKS if self._tokenizer.token_to_id(word) is None]:
            raise ValueError(f"The vocabulary has no {', '.join(missing)}, which targets need. Add them to your words.")

    @classmethod
    def from_texts(cls, texts: Iterable[str | Sequence[str]], vocab_size: int = 50_000, **kwargs) -> "ExhirdTokenizer":
        """A tokenizer with the most frequent words of sources and targets.

        Args:
            texts: titles, texts, keyphrases, in any order; a list of strings counts as one text.
            vocab_size: number of words, including `;` and the other marks, and not the four special tokens. Words of
                equal frequency are taken in alphabetical order.

        Raises:
            ValueError: for a single string.
        """
        if isinstance(texts, str):
            raise ValueError(f"texts is a single string, {texts!r:.40}. Pass a list of strings.")
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(word for word, _, _ in split_words(text if isinstance(text, str) else " ".join(text)))
        frequent = sorted((-n, word) for word, n in counts.items() if word not in MARKS)
        return cls.from_words([*MARKS, *(word for _, word in frequent[: vocab_size - len(MARKS)])], **kwargs)

    @classmethod
    def from_words(cls, words: Sequence[str], **kwargs) -> "ExhirdTokenizer":
        """A tokenizer of a list of words in the order of their ids; the four special tokens come first, or are added."""
        return cls({word: i for i, word in enumerate(dict.fromkeys([*SPECIAL, *words]))}, **kwargs)

    end_phrase_token_id = mark_id(END_PHRASE, "the token after the last word of a phrase")
    present_token_id = mark_id(PRESENT, "the token before a present phrase")
    absent_token_id = mark_id(ABSENT, "the token before an absent phrase")
    title_end_token_id = mark_id(TITLE_END, "the token between title and text")

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
        """Extended ids -> words: those of the vocabulary, or `len(tokenizer)` + k for the k-th of a source's `oov_words`."""
        size = len(self)
        return [self._tokenizer.id_to_token(i) if i < size else oov_words[i - size] for i in ids]


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
    """The words of a text with start and end, by the rule above.

    >>> split_words("Naïve k-NN, 10-20 times")
    [('naive', 0, 5), ('k', 6, 7), ('nn', 8, 10), (',', 10, 11), ('<digit>', 12, 17), ('times', 18, 23)]
    """
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


ExhirdTokenizer.register_for_auto_class("AutoTokenizer")
