# SPDX-License-Identifier: Apache-2.0
"""Finds the tokens that begin words from token ids alone, for callers without a `word_start_mask`, such as the stock pipeline.

Letters: B rows, S tokens of a padded row, V size of the vocabulary.

The words are those of `lexperts_lite.words.split_words`, as far as ids determine them: runs of letters, digits and
marks, with apostrophes and decimal points inside ("Bayes's", "802.11"); any other visible character is a word, except
hyphens and slashes. The ids of WordPiece and of whole words do not show spaces; there a space is assumed next to a comma
("1, 2") and next to an apostrophe, unless the ending of a contraction follows ("the 'graph cut'", but "don't"). In old BPE
vocabularies with word-end suffixes, apostrophes and points always separate words.
"""

from collections.abc import Callable
from functools import partial

import regex
import torch
from tokenizers import decoders, models
from torch import nn
from transformers import initialization as init
from transformers.utils import logging

from .saving_hypernet import lexperts_tools

# The bits of a token's kind.
IN_WORD = 1  # part of a word
CONTINUES = 2  # may be in the same word as the previous token
OPEN = 4  # may be in the same word as the next token
APOSTROPHE, TAIL = 8, 16  # an apostrophe; may follow one inside a word
POINT, DIGIT_FIRST, DIGIT_LAST = 32, 64, 128  # a decimal point; the first or last character is a digit

_SPACELESS = r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]"  # one word per character
_CHARACTER = rf"(?!{_SPACELESS})[\p{{L}}\p{{N}}\p{{M}}_\u200c\u200d\u00ad\ufffd]"  # U+FFFD: a part of a character
_CONTINUES = regex.compile(rf"{_CHARACTER}|['\u2019](?=[\p{{L}}\p{{N}}])")
_OPEN = regex.compile(rf"{_CHARACTER}\Z")
_DIGIT_LAST = regex.compile(r"\p{Nd}\Z")
_ENDINGS = frozenset(("s", "t", "d", "m", "ll", "re", "ve"))  # of contractions
_NO_WORD = regex.compile(r"[\s\p{C}/\-\u2010-\u2013\u2217]*\Z")
_BYTE = regex.compile(r"<0x([0-9A-F]{2})>")
METASPACE = "\u2581"  # a space in tokens of SentencePiece ("▁graph")
BYTE_SPACE = "\u0120"  # a space in byte-level tokens ("Ġgraph")

logger = logging.get_logger(__name__)


class WordStarts(nn.Module):
    """start_t = IN_WORD_t and not (CONTINUES_t and OPEN_{t-1}) and not inner_t and not inner_{t-1}

    inner_t = APOSTROPHE_t and OPEN_{t-1} and TAIL_{t+1}, or POINT_t and DIGIT_LAST_{t-1} and DIGIT_FIRST_{t+1}, with the bits
    of each token id in a table.

    Args:
        vocab_size: V.

    Attributes:
        kinds (`(V,)`, uint8): each token's bits. Zeros until a tokenizer or a checkpoint fills the table.
    """

    def __init__(self, vocab_size: int):
        super().__init__()
        self.register_buffer("kinds", torch.zeros(vocab_size, dtype=torch.uint8))

    def reset_parameters(self):
        """Fills the table with zeros, unless it was loaded."""
        init.zeros_(self.kinds)

    def resize(self, vocab_size: int):
        """Shortens or extends the table; added tokens are single words."""
        added = self.kinds.new_full((max(vocab_size - len(self.kinds), 0),), IN_WORD)
        self.kinds = torch.cat([self.kinds[:vocab_size], added])

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(B, S) -> (B, S), bool: the tokens that begin words."""
        kinds = self.kinds[input_ids]
        none = torch.zeros_like(kinds[:, :1])
        previous, following = torch.cat([none, kinds[:, :-1]], 1), torch.cat([kinds[:, 1:], none], 1)

        def all_of(*pairs):
            return torch.stack([x & bit != 0 for x, bit in pairs]).all(0)

        inner = all_of((kinds, APOSTROPHE), (previous, OPEN), (following, TAIL))
        inner |= all_of((kinds, POINT), (previous, DIGIT_LAST), (following, DIGIT_FIRST))
        continues = all_of((kinds, CONTINUES), (previous, OPEN))
        continues |= inner | torch.cat([none != 0, inner[:, :-1]], 1)
        return (kinds & IN_WORD != 0) & ~continues


class WordStartsMixin:
    """For models with a table `word_starts` (or `None`)."""

    @classmethod
    def from_backbone(cls, name_or_path, **options):
        """As for the other heads; also makes the table of word starts from the backbone's tokenizer (`set_word_starts`)."""
        loaded = super().from_backbone(name_or_path, **options)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        tools = lexperts_tools("backbones", "from_backbone()")
        try:
            model.set_word_starts(tools.open_tokenizer(name_or_path, **tools.hub_options(options)))
        except (OSError, ValueError, ImportError) as error:
            logger.warning(
                f"The model has no table of word starts, so every call needs word_start_mask. Cause: {error}"
            )
        return loaded

    def set_word_starts(self, tokenizer):
        """Makes the table of the tokens that begin words, for calls without `word_start_mask`. It is saved with the model.

        Raises:
            ValueError: for a slow tokenizer, and for one with more tokens than the model.
        """
        kinds = token_kinds(tokenizer, self.get_input_embeddings().num_embeddings)
        self.word_starts = WordStarts(len(kinds)).to(self.device)
        self.word_starts.kinds.copy_(kinds)
        self.config.has_word_starts = True

    def resize_token_embeddings(self, *args, **kwargs):
        """As in transformers; also resizes the table."""
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        if self.word_starts is not None:
            self.word_starts.resize(embeddings.num_embeddings)
        return embeddings

    def find_word_starts(self, input_ids, word_start_mask) -> torch.Tensor:
        """The tokens that begin words (B, S), bool: from the mask, or else from the table.

        Raises:
            ValueError: for a mask of another shape; without a mask, if the table or the ids are missing.
        """
        if word_start_mask is not None:
            if input_ids is not None and word_start_mask.shape != input_ids.shape:
                raise ValueError(
                    f"word_start_mask has the shape {tuple(word_start_mask.shape)}, but input_ids "
                    f"{tuple(input_ids.shape)}: it needs one value per token. Pad it with DataCollatorForTextPairs."
                )
            return word_start_mask.bool()
        if self.word_starts is None or input_ids is None:
            cause = "there are no input_ids" if input_ids is None else "the model has no table of word starts"
            raise ValueError(
                f"word_start_mask=None and {cause}, so the tokens that begin words are unknown. Pass word_start_mask, or call "
                "model.set_word_starts(tokenizer) and pass input_ids."
            )
        return self.word_starts(input_ids)


def token_kinds(tokenizer, vocab_size: int) -> torch.Tensor:
    """The kind of each token, (V,), uint8.

    Args:
        tokenizer: a fast tokenizer of any type: WordPiece, BPE on bytes or characters, Unigram, whole words.
        vocab_size: V, the number of the model's embeddings; those without a token count as single words.

    Raises:
        ValueError: for a slow tokenizer, and for one with more tokens than the model.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{type(tokenizer).__name__} is a slow tokenizer, whose vocabulary does not show where words begin. Use a fast "
            "tokenizer, or pass word_start_mask to the model."
        )
    vocabulary = tokenizer.get_vocab()
    size = max(vocabulary.values(), default=-1) + 1
    if size > vocab_size:
        raise ValueError(
            f"The tokenizer has {size} tokens, but the model's vocabulary has {vocab_size}. Use the tokenizer of the "
            "backbone, or call model.resize_token_embeddings(len(tokenizer)) first."
        )
    kind_of, special = token_classifier(tokenizer.backend_tokenizer.model, vocabulary)
    kinds = torch.full((vocab_size,), IN_WORD, dtype=torch.uint8)
    ids = torch.tensor(list(vocabulary.values()), dtype=torch.long)
    kinds[ids] = torch.tensor([kind_of(token) for token in vocabulary], dtype=torch.uint8)
    kinds[list(tokenizer.added_tokens_decoder)] = IN_WORD
    kinds[[i for i in tokenizer.all_special_ids if i != tokenizer.unk_token_id]] = special
    return kinds


def token_classifier(model, vocabulary) -> tuple[Callable[[str], int], int]:
    """A function from a token to its kind, and the kind of special tokens, for a model of the library tokenizers."""
    prefix = getattr(model, "continuing_subword_prefix", None)
    suffix = getattr(model, "end_of_word_suffix", None)
    if prefix or isinstance(model, models.WordLevel):
        return partial(kind_without_spaces, prefix=prefix or ""), OPEN
    if suffix:
        return lambda token: kind_with_spaces(token.replace(suffix, " ")), 0
    if BYTE_SPACE in vocabulary and METASPACE not in vocabulary:
        decoder = decoders.ByteLevel()
        return lambda token: kind_with_spaces(decoder.decode([token])), 0
    return lambda token: kind_with_spaces(_BYTE.sub(_character, token).replace(METASPACE, " ")), 0


def kind_without_spaces(token: str, prefix: str) -> int:
    """The kind of a token that continues a word if it has the prefix, and otherwise does not show whether a space precedes it.

    All are open: a token with the prefix continues a word even at the beginning of a window.
    """
    text = token.removeprefix(prefix)
    kind = (kind_with_spaces(text) & (DIGIT_FIRST | DIGIT_LAST | APOSTROPHE)) | word_bit(text) | OPEN
    if text != token:
        return kind | IN_WORD | CONTINUES
    return kind | (POINT if text == "." else 0) | (TAIL if text in _ENDINGS else 0)


def word_bit(text: str) -> int:
    """IN_WORD, or 0 for spaces, hyphens and slashes."""
    return 0 if _NO_WORD.match(text) else IN_WORD


def kind_with_spaces(text: str) -> int:
    """The kind of a token whose text shows the spaces around it."""
    kind = word_bit(text)
    for bit, holds in (
        (CONTINUES, _CONTINUES.match(text)),
        (OPEN, _OPEN.search(text)),
        (APOSTROPHE, text in ("'", "\u2019")),
        (TAIL, text[:1].isalnum() and _CONTINUES.match(text)),
        (POINT, text in (".", ",")),
        (DIGIT_FIRST, text[:1].isdecimal()),
        (DIGIT_LAST, _DIGIT_LAST.search(text)),
    ):
        kind |= bit if kind and holds else 0
    return kind


def _character(match) -> str:
    """The character of a token of one byte; U+FFFD for a part of one."""
    byte = int(match[1], 16)
    return chr(byte) if byte < 128 else "\ufffd"
