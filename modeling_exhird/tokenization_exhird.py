"""ExHiRD's words: one rule for sources and keyphrases, the vocabulary, and words outside it that can be copied.

The rule is the reference's text preparation, with CoreNLP's tokeniser replaced by rules. Letters are lower-cased, what
stands in [...] and {...} is left out, words are runs of a-z 0-9 _, each of `, ( ) . ' < >` is a word, and all else
parts words. Whatever begins with a digit is `<digit>`, and neighbours of that kind are one. `<digit>`, `<eot>`,
`<p_start>`, `<a_start>` in a text stay whole, so that prepared data is read as it is; `<unk>` and the like are not
special there.

It departs where the letter of the reference would join words or lose letters:

- Line ends, tabs, brackets and signs outside ASCII (dashes, quotes) part words; the reference deletes them, so that
  "graph\\ncuts" would be "graphcuts".
- Accents are taken off and ligatures resolved ("naïve" is "naive"), where the reference deletes the letter. Letters
  that are not Latin even so, such as Greek ones, are deleted as there, and so are control characters.
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
PIECES = "pieces"  # folder of the second tokenizer
UNLIMITED = 10**9  # a model_max_length above it stands for none

_TAIL = r"[a-z0-9_]*+(?:[.,][0-9][a-z0-9_]*+)*+"
_NUMBER = rf"(?:{DIGIT}|(?<![a-z0-9_.])\.[0-9]{_TAIL}|(?<![a-z0-9_])[0-9]{_TAIL})"
_NUMBERS = rf"{_NUMBER}(?:[^a-z0-9_<>,().']*+{_NUMBER})*+"
_WORD = rf"{DIGIT}|{TITLE_END}|{PRESENT}|{ABSENT}|[a-z0-9_]++|[<>,().']"
_BRACKETS = normalizers.Replace(Regex(r"\[[^\[\]]*\]|\{[^{}]*\}"), " ")
_CLEAN = normalizers.Sequence(
    [
        normalizers.Replace(Regex("[\u2120\u2122]"), " "),  # trade marks, else letters of the word before
        normalizers.NFKD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex("[\u2018\u2019]"), "'"),
        _BRACKETS,
        _BRACKETS,  # twice: brackets in brackets
        normalizers.Replace(Regex(r"[^\p{P}\p{S}\p{Z}\x09-\x0d\x20-\x7e\x{85}]+"), ""),
    ]
)
_NORMALIZER = normalizers.Sequence([_CLEAN, normalizers.Replace(Regex(_NUMBERS), DIGIT)])
_SPLIT = pre_tokenizers.Split(Regex(_WORD), "removed", invert=True)
_SPLIT_WITH_NUMBERS = pre_tokenizers.Split(Regex(f"{_NUMBERS}|{_WORD}"), "removed", invert=True)


class Source(NamedTuple):
    """A document's words, V the size of the vocabulary.

    - `words`: title, `<eot>` and text, or the text alone.
    - `input_ids`: `<unk>`'s for a word outside the vocabulary.
    - `copy_ids`: V + k for the k-th word outside it (from 0, by first occurrence), else the same.
    - `oov_words`: these words.
    - `places`: where each stands, as ("title" or "text", start, end), and None for `<eot>`.
    """

    words: list[str]
    input_ids: list[int]
    copy_ids: list[int]
    oov_words: list[str]
    places: list[tuple[str, int, int] | None]


class ExHirdTokenizer(PreTrainedTokenizerFast):
    """Texts -> words -> ids; no special tokens are put around a text.

    `<unk>`, `<blank>` (padding), `<s>` and `</s>` are 0 to 3. The vocabulary also holds `;`, which ends a phrase and is
    never read from a text, `<p_start>`, `<a_start>`, `<digit>` and `<eot>`.

    ```python
    >>> tokenizer = ExHirdTokenizer.from_texts([*titles, *texts, *keyphrases], vocab_size=50_000)
    >>> tokenizer.read_source("It finds min-cuts.", title="Graph cuts").words
    ['graph', 'cuts', '<eot>', 'it', 'finds', 'min', 'cuts', '.']
    ```

    As every fast tokenizer it gives offsets, but for a number only its last character's; `words` has the whole.

    Args:
        vocab: {word: id}. `from_texts` and `from_words` make it.
        pieces: the fast tokenizer of a pretrained encoder that reads the same texts in sub-words; it is saved with this
            one, in the folder "pieces".

    Raises:
        ValueError: for a vocabulary without the words above, which are named; `from_pretrained` does so, too.
    """

    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab: dict[str, int] | None = None, *, pieces: PreTrainedTokenizerFast | None = None, **kwargs):
        if vocab is not None:
            kwargs["tokenizer_object"] = Tokenizer(models.WordLevel(vocab, unk_token=SPECIAL[0]))
        names = dict(zip(("unk_token", "pad_token", "bos_token", "eos_token"), SPECIAL, strict=True))
        self.pieces = checked_pieces(pieces)
        # "</s>" in a text is no end of it
        super().__init__(**{"split_special_tokens": True, "pieces_folder": None, **names, **kwargs})
        self._tokenizer.normalizer, self._tokenizer.pre_tokenizer = _NORMALIZER, _SPLIT
        misplaced = [word for i, word in enumerate(SPECIAL) if self._tokenizer.token_to_id(word) != i]
        missing = [word for word in MARKS if self._tokenizer.token_to_id(word) is None]
        if misplaced or missing:
            without = f" has no {', '.join(missing)}" if missing else ""
            order = f" does not begin with {', '.join(SPECIAL)}" if misplaced else ""
            raise ValueError(
                f"The vocabulary{without}{' and' if without and order else ''}{order}: targets are made of these words."
                " Use ExHirdTokenizer.from_texts, or add them to your words."
            )

    @classmethod
    def from_texts(
        cls, texts: Iterable[str | Sequence[str]], vocab_size: int = 50_000, min_count: int = 1, **kwargs
    ) -> "ExHirdTokenizer":
        """The most frequent words of sources and targets together, the four special tokens on top of `vocab_size`.

        Args:
            texts: titles, texts, keyphrases, in any order; lists of strings are read as one text.
            vocab_size: words, `;` and the other marks among them. Of equally frequent ones the alphabet's first.
            min_count: rarer words are left out.
        """
        if isinstance(texts, str):
            raise ValueError(f"texts is one string, {texts!r:.40}: its characters would be the texts. Pass a list.")
        if vocab_size < len(MARKS):
            raise ValueError(f"vocab_size={vocab_size}: there are {len(MARKS)} marks. Use {len(MARKS)} or more.")
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(word for word, _, _ in split(text if isinstance(text, str) else " ".join(text)))
        if not counts:
            raise ValueError("The texts have no words, so that there is nothing to make a vocabulary of.")
        frequent = sorted((-n, word) for word, n in counts.items() if word not in MARKS and n >= min_count)
        return cls.from_words([*MARKS, *(word for _, word in frequent[: vocab_size - len(MARKS)])], **kwargs)

    @classmethod
    def from_words(cls, words: Sequence[str], **kwargs) -> "ExHirdTokenizer":
        """A list of words in the order of their ids, with the four special tokens at its head or without them."""
        words = list(words)
        if tuple(words[: len(SPECIAL)]) != SPECIAL:
            words = [*SPECIAL, *words]
        repeated = [word for word, n in Counter(words).items() if n > 1]
        if repeated:
            raise ValueError(
                f"{repeated[0]!r} would have two ids. List each word once, and {', '.join(SPECIAL)} first or not."
            )
        return cls({word: i for i, word in enumerate(words)}, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *inputs, **kwargs) -> "ExHirdTokenizer":
        """As every tokenizer's, and the second tokenizer with it where one was saved."""
        shared = (
            "cache_dir",
            "force_download",
            "local_files_only",
            "proxies",
            "revision",
            "token",
            "trust_remote_code",
        )
        options = {name: kwargs[name] for name in shared if name in kwargs}
        folder = os.path.join(kwargs.get("subfolder") or "", PIECES)
        given = kwargs.get("pieces")
        if isinstance(given, str | os.PathLike):
            raise ValueError(f"pieces={given!r} is a name. Pass AutoTokenizer.from_pretrained({str(given)!r}) itself.")
        tokenizer = super().from_pretrained(pretrained_model_name_or_path, *inputs, **kwargs)
        if given is None and tokenizer.init_kwargs.get("pieces_folder"):
            try:
                tokenizer.pieces = load_pieces(pretrained_model_name_or_path, folder, options)
            except OSError as error:
                logger.warning(
                    f"{pretrained_model_name_or_path} was saved with a second tokenizer, which is not there ({error}). "
                    "Set it by with_pieces where the model reads sub-words."
                )
        return tokenizer

    def _save_pretrained(self, save_directory, file_names, *args, **kwargs) -> tuple[str, ...]:
        names = super()._save_pretrained(save_directory, file_names, *args, **kwargs)
        if self.pieces is None:
            return names
        return (*names, *self.pieces.save_pretrained(os.path.join(save_directory, PIECES)))

    def with_pieces(self, pieces: PreTrainedTokenizerFast | None) -> "ExHirdTokenizer":
        """A copy that also reads texts in the sub-words of a pretrained encoder, see `read_pieces`."""
        other = copy.deepcopy(self)
        other.pieces = checked_pieces(pieces)
        return other

    @property
    def pieces_folder(self) -> str | None:
        return None if self.pieces is None else PIECES

    @property
    def end_phrase_token_id(self) -> int:
        """The id of `;`, after a phrase's last word."""
        return self._tokenizer.token_to_id(END_PHRASE)

    @property
    def present_token_id(self) -> int:
        """The id of `<p_start>`, before a phrase that stands in the source."""
        return self._tokenizer.token_to_id(PRESENT)

    @property
    def absent_token_id(self) -> int:
        """The id of `<a_start>`, before a phrase that does not."""
        return self._tokenizer.token_to_id(ABSENT)

    @property
    def title_end_token_id(self) -> int:
        """The id of `<eot>`, between title and text."""
        return self._tokenizer.token_to_id(TITLE_END)

    def words(self, text: str) -> list[tuple[str, int, int]]:
        """Each word as it would be in the vocabulary, whether or not it is, and its place in the text as it is given.

        >>> tokenizer.words("Naïve k-NN, 10-20 times")
        [('naive', 0, 5), ('k', 6, 7), ('nn', 8, 10), (',', 10, 11), ('<digit>', 12, 17), ('times', 18, 23)]
        """
        return split(text)

    def read_source(self, text: str, title: str | None = None) -> Source:
        """Title, `<eot>` and text as ids, or the text alone where the title has no words. Both may be empty."""
        read = [(word, ("title", start, end)) for word, start, end in self.words(title or "")]
        if read:
            read.append((TITLE_END, None))
        read += [(word, ("text", start, end)) for word, start, end in self.words(text)]
        ids, new, unknown, size = [], {}, self.unk_token_id, len(self)
        copies = []
        for word, _ in read:
            known = self._tokenizer.token_to_id(word)
            ids.append(unknown if known is None else known)
            copies.append(size + new.setdefault(word, len(new)) if known is None else known)
        return Source([word for word, _ in read], ids, copies, list(new), [place for _, place in read])

    def surface(self, ids: Iterable[int], oov_words: Sequence[str]) -> list[str]:
        """Ids, also those of a source's words outside the vocabulary, -> words.

        Raises:
            ValueError: for an id beyond them.
        """
        words, size = [], len(self)
        for i in map(int, ids):
            if not 0 <= i < size + len(oov_words):
                raise ValueError(
                    f"{i} is the id of no word: the vocabulary has {size}, this source {len(oov_words)} of its own."
                )
            words.append(self._tokenizer.id_to_token(i) if i < size else oov_words[i - size])
        return words

    def read_pieces(
        self, text: str, title: str | None = None, max_length: int | None = None, *, source: Source | None = None
    ) -> dict[str, list[list[int]]]:
        """A document in sub-words of the second tokenizer, as `piece_ids`, `piece_mask` and `piece_words`, a row a window.

        `piece_words` has for each the place in `read_source(text, title).words` of the word that it stands in, -1 for a
        special token or what is in no word. Title and text are a pair; `<eot>` has no sub-word.

        Args:
            max_length: sub-words of a window, by default `pieces.model_max_length`. A longer text is read in windows
                that share an eighth, each after the title, or after none where the title fills half of a window.
            source: of `read_source`, where it is at hand.
        """
        if self.pieces is None:
            raise ValueError(
                "The tokenizer has no second one for sub-words. Use tokenizer.with_pieces(of_the_encoder)."
            )
        source = source or self.read_source(text, title)
        fields = [field for field in ("title", "text") if any(p and p[0] == field for p in source.places)] or ["text"]
        written = {"title": readable(title), "text": readable(text)}
        limit = max_length or self.pieces.model_max_length
        together = [fields]
        if len(fields) == 2 and limit < UNLIMITED:
            of_title = len(self.pieces(written["title"], add_special_tokens=False, verbose=False)["input_ids"])
            together = [fields] if of_title <= limit // 2 else [["title"], ["text"]]
        found: dict[str, list[list[int]]] = {"piece_ids": [], "piece_mask": [], "piece_words": []}
        for own in together:
            for window in self.windows([written[field] for field in own], limit):
                words = words_of_pieces(window, own, source.places)
                if not found["piece_ids"] or max(words) >= 0:  # of a source that was cut, no more than its words
                    found["piece_ids"].append(window.ids)
                    found["piece_mask"].append([1] * len(window.ids))
                    found["piece_words"].append(words)
        return found

    def windows(self, texts: list[str], limit: int) -> list:
        """One text, or a title and a text that goes on in windows -> the second tokenizer's encodings."""
        if limit >= UNLIMITED:
            return self.pieces(*texts, verbose=False).encodings
        cut = "only_first" if len(texts) == 1 else "only_second"
        options = {"truncation": cut, "max_length": limit, "stride": limit // 8, "return_overflowing_tokens": True}
        return self.pieces(*texts, verbose=False, **options).encodings


def split(text: str) -> list[tuple[str, int, int]]:
    """The words of a text with their places, by the rule above."""
    string = PreTokenizedString(readable(text))
    string.normalize(lambda part: _CLEAN.normalize(part))
    _SPLIT_WITH_NUMBERS.pre_tokenize(string)
    return [
        (DIGIT if is_number(word) else word, start, end)
        for word, (start, end), _ in string.get_splits("original", "char")
    ]


def is_number(word: str) -> bool:
    return word[0] in "0123456789" or word.startswith(DIGIT) or (word[0] == "." and len(word) > 1)


def readable(text: str | None) -> str:
    """The text, "" for none; halves of surrogate pairs, which are no characters, replaced."""
    text = text or ""
    return text if text.isascii() else re.sub("[\ud800-\udfff]", "\ufffd", text)


def words_of_pieces(encoding, fields: list[str], places: list[tuple[str, int, int] | None]) -> list[int]:
    """For each sub-word the word that it overlaps with, the first of several, or -1."""
    spans = {
        field: [(p[1], p[2], i) for i, p in enumerate(places) if p is not None and p[0] == field] for field in fields
    }
    reached, found = dict.fromkeys(fields, 0), []
    for sequence, (start, end) in zip(encoding.sequence_ids, encoding.offsets, strict=True):
        index = -1
        if sequence is not None and start < end:
            field = fields[sequence]
            own, at = spans[field], reached[field]
            while at < len(own) and own[at][1] <= start:
                at += 1
            reached[field] = at
            if at < len(own) and own[at][0] < end:
                index = own[at][2]
        found.append(index)
    return found


def checked_pieces(pieces):
    if pieces is not None and not getattr(pieces, "is_fast", False):
        raise ValueError(
            f"{type(pieces).__name__} is no fast tokenizer, and only these know where a sub-word stands. "
            "Use AutoTokenizer.from_pretrained."
        )
    return pieces


def load_pieces(name, folder: str, options: dict):
    path = os.path.join(name, folder)
    if os.path.isdir(name):
        if not os.path.isdir(path):
            raise FileNotFoundError(f"no folder {path}")
        return AutoTokenizer.from_pretrained(path, **options)
    return AutoTokenizer.from_pretrained(name, subfolder=folder, **options)


ExHirdTokenizer.register_for_auto_class("AutoTokenizer")
