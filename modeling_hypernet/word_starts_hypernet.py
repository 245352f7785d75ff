"""Which tokens begin words, by their ids alone: for callers that pass no `word_start_mask`, such as the stock pipeline.

Letters: B rows, S tokens of a padded row, V size of the vocabulary.

The words are those of `keyphrase_tools.words.split_words`, as far as ids determine them: runs of letters, digits and
marks with apostrophes and decimal points inside ("Bayes's", "802.11"), any other visible character alone, and no word for
hyphens and slashes. The ids of WordPiece and of whole words do not show blanks; there a blank is assumed beside a comma
("1, 2") and beside an apostrophe, unless the ending of a contraction follows ("the 'graph cut'", but "don't"). With word ends
instead of prefixes, in old BPE vocabularies, apostrophes and points always separate words.
"""

from collections.abc import Callable
from functools import partial

import regex
import torch
from tokenizers import decoders, models
from torch import nn
from transformers import AutoTokenizer
from transformers import initialization as init
from transformers.utils import logging

# The bits of a token's kind.
IN_WORD = 1  # it is part of a word
CONTINUES = 2  # it may be part of the same word as the token before it
OPEN = 4  # the token after it may be part of the same word
APOSTROPHE, TAIL = 8, 16  # it is an apostrophe; it may be part of a word after one
POINT, DIGIT_FIRST, DIGIT_LAST = 32, 64, 128  # it is a decimal point; its first or last character is a digit

_SPACELESS = r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]"  # one word per character
_CHARACTER = rf"(?!{_SPACELESS})[\p{{L}}\p{{N}}\p{{M}}_\u200c\u200d\u00ad\ufffd]"  # U+FFFD: a part of a character
_CONTINUES = regex.compile(rf"{_CHARACTER}|['\u2019](?=[\p{{L}}\p{{N}}])")
_OPEN = regex.compile(rf"{_CHARACTER}\Z")
_DIGIT_LAST = regex.compile(r"\p{Nd}\Z")
_ENDINGS = frozenset(("s", "t", "d", "m", "ll", "re", "ve"))  # of contractions
_NO_WORD = regex.compile(r"[\s\p{C}/\-\u2010-\u2013\u2217]*\Z")
_BYTE = regex.compile(r"<0x([0-9A-F]{2})>")
METASPACE, BYTE_SPACE = "\u2581", "\u0120"  # the blank in SentencePiece's tokens ("▁graph") and in bytes' ("Ġgraph")

TOKENIZER_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
TOKENIZER_OPTIONS += ("trust_remote_code", "code_revision")

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
        init.zeros_(self.kinds)

    def resize(self, vocab_size: int):
        """Shortens or extends the table; added tokens are words of their own."""
        added = self.kinds.new_full((max(vocab_size - len(self.kinds), 0),), IN_WORD)
        self.kinds = torch.cat([self.kinds[:vocab_size], added])

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(B, S) -> (B, S), bool: the tokens that begin words."""
        kinds = self.kinds[input_ids]
        none = torch.zeros_like(kinds[:, :1])
        before, after = torch.cat([none, kinds[:, :-1]], 1), torch.cat([kinds[:, 1:], none], 1)

        def all_of(*pairs):
            return torch.stack([x & bit != 0 for x, bit in pairs]).all(0)

        inner = all_of((kinds, APOSTROPHE), (before, OPEN), (after, TAIL))
        inner |= all_of((kinds, POINT), (before, DIGIT_LAST), (after, DIGIT_FIRST))
        continues = all_of((kinds, CONTINUES), (before, OPEN))
        continues |= inner | torch.cat([none != 0, inner[:, :-1]], 1)
        return (kinds & IN_WORD != 0) & ~continues


class WordStartsMixin:
    """What a model with a table `word_starts` (or `None`) adds to its base class."""

    @classmethod
    def from_backbone(cls, name_or_path, **options):
        """As for the other heads; the backbone's tokenizer says which tokens begin words (`set_word_starts`)."""
        model = super().from_backbone(name_or_path, **options)
        loading = {name: options[name] for name in TOKENIZER_OPTIONS if name in options}
        try:
            model.set_word_starts(AutoTokenizer.from_pretrained(name_or_path, **loading))
        except (OSError, ValueError, ImportError) as error:
            logger.warning(f"The model needs word_start_mask in every call: it has no table of word starts. {error}")
        return model

    def set_word_starts(self, tokenizer):
        """Makes the table of the tokens that begin words, for calls without `word_start_mask`; saved with the model.

        Raises:
            ValueError: for a slow tokenizer, and one with more tokens than the model.
        """
        kinds = token_kinds(tokenizer, self.get_input_embeddings().num_embeddings)
        self.word_starts = WordStarts(len(kinds)).to(self.device)
        self.word_starts.kinds.copy_(kinds)
        self.config.has_word_starts = True

    def resize_token_embeddings(self, *args, **kwargs):
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        if self.word_starts is not None:
            self.word_starts.resize(embeddings.num_embeddings)
        return embeddings

    def find_word_starts(self, input_ids, word_start_mask) -> torch.Tensor:
        """The mask if there is one, or else by the table -> the tokens that begin words (B, S), bool.

        Raises:
            ValueError: for a mask of another shape; without a mask if the table or the ids are missing.
        """
        if word_start_mask is not None:
            if input_ids is not None and word_start_mask.shape != input_ids.shape:
                raise ValueError(
                    f"word_start_mask has the shape {tuple(word_start_mask.shape)}, but input_ids "
                    f"{tuple(input_ids.shape)}: it needs one value per token. HypernetCollator pads it."
                )
            return word_start_mask.bool()
        if self.word_starts is None or input_ids is None:
            why = "inputs_embeds do not show it" if input_ids is None else "this model has no table of its tokens"
            raise ValueError(
                f"word_start_mask=None, and {why}: which tokens begin words is not known. Pass word_start_mask, or "
                "input_ids to a model that has a table, by model.set_word_starts(tokenizer)."
            )
        return self.word_starts(input_ids)


def token_kinds(tokenizer, vocab_size: int) -> torch.Tensor:
    """The kind of each token of a tokenizer -> (V,), uint8.

    Args:
        tokenizer: a fast one, of any model: WordPiece, BPE on bytes or characters, Unigram, whole words.
        vocab_size: V, the rows of the model's embeddings; those without a token are words of their own.

    Raises:
        ValueError: for a slow tokenizer, and one with more tokens than the model.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{type(tokenizer).__name__} is a slow tokenizer, whose tokens do not show where words begin. Use a fast one, "
            "or pass word_start_mask to the model."
        )
    vocabulary = tokenizer.get_vocab()
    size = max(vocabulary.values(), default=-1) + 1
    if size > vocab_size:
        raise ValueError(
            f"The tokenizer has {size} tokens, but the model's vocabulary has {vocab_size}. Use the tokenizer of the "
            "backbone, or call model.resize_token_embeddings(len(tokenizer)) first."
        )
    kind_of, special = token_reader(tokenizer.backend_tokenizer.model, vocabulary)
    kinds = torch.full((vocab_size,), IN_WORD, dtype=torch.uint8)
    ids = torch.tensor(list(vocabulary.values()), dtype=torch.long)
    kinds[ids] = torch.tensor([kind_of(token) for token in vocabulary], dtype=torch.uint8)
    kinds[list(tokenizer.added_tokens_decoder)] = IN_WORD
    kinds[[i for i in tokenizer.all_special_ids if i != tokenizer.unk_token_id]] = special
    return kinds


def token_reader(model, vocabulary) -> tuple[Callable[[str], int], int]:
    """A model of the library tokenizers, and its tokens -> what gives a token's kind, and the kind of special tokens."""
    prefix = getattr(model, "continuing_subword_prefix", None)
    suffix = getattr(model, "end_of_word_suffix", None)
    if prefix or isinstance(model, models.WordLevel):
        return partial(_without_blanks, prefix=prefix or ""), OPEN
    if suffix:
        return lambda token: _inside(token.replace(suffix, " ")), 0
    if BYTE_SPACE in vocabulary and METASPACE not in vocabulary:
        read = decoders.ByteLevel()
        return lambda token: _inside(read.decode([token])), 0
    return lambda token: _inside(_BYTE.sub(_character, token).replace(METASPACE, " ")), 0


def _without_blanks(token: str, prefix: str) -> int:
    """The kind of a token that continues a word if it has the prefix, and otherwise does not show whether a blank is before it.

    All are open: a piece with the prefix continues a word even at the beginning of a window.
    """
    text = token.removeprefix(prefix)
    kind = (_inside(text) & (DIGIT_FIRST | DIGIT_LAST | APOSTROPHE)) | _whole(text) | OPEN
    if text != token:
        return kind | IN_WORD | CONTINUES
    return kind | (POINT if text == "." else 0) | (TAIL if text in _ENDINGS else 0)


def _whole(text: str) -> int:
    """The kind of a token that is a word, if it is anything."""
    return 0 if _NO_WORD.match(text) else IN_WORD


def _inside(text: str) -> int:
    """The kind of a token whose text shows the blanks around it."""
    kind = _whole(text)
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
