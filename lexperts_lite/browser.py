"""The same extractor in a browser, where a page runs the graph and the tokenizer: Python by Pyodide, onnxruntime-web, @huggingface/tokenizers.

The page calls `prepare`, runs the graph on each window that it returns, since that is asynchronous there, and calls `keyphrases`.
"""

import json
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np

from .batches import Block
from .runtime import KeyphraseExtractor
from .tokenizer import FastTokenizer
from .windows import Window

CONTINUES = "##"  # begins a word piece that continues a word
UNKNOWN = "[UNK]"
DROPPED = ("Cc", "Cf", "Co", "Cs")  # categories; a newer Unicode may have what is unassigned here
CHINESE = ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x2FA1F))
SPECIAL = (UNKNOWN, "[PAD]", "[CLS]", "[SEP]", "[MASK]")


def normalised(text: str) -> list[tuple[str, int]]:
    """The characters of a text as BERT's normaliser has them, lower case without accents, and the place of each."""
    characters = []
    for place, character in enumerate(text):
        category = unicodedata.category(character)
        if character in "\t\n\r\u2028\u2029" or category == "Zs":
            characters.append((" ", place))
        elif character != "\ufffd" and category not in DROPPED:
            for part in unicodedata.normalize("NFD", character):
                if unicodedata.category(part) != "Mn":
                    characters += [(lower, place) for lower in part.lower()]
    return characters


def stands_alone(character: str) -> bool:
    """Whether BERT's pre-tokenizer makes a word of this character: punctuation, and Chinese characters."""
    code, kind = ord(character), unicodedata.category(character)[0]
    return kind == "P" or (kind == "S" and code < 128) or any(first <= code <= last for first, last in CHINESE)


def piece_spans(text: str, pieces: Sequence[str]) -> list[tuple[int, int]]:
    """The places `(start, end)` of a text's word pieces, which a tokenizer returns without them.

    Raises:
        ValueError: if the pieces are not those of the text.

    >>> piece_spans("Café au lait", ["cafe", "au", "la", "##it"])
    [(0, 4), (5, 7), (8, 10), (10, 12)]
    """
    characters = normalised(text)
    line, spans, position = "".join(character for character, _ in characters), [], 0
    for piece in pieces:
        begins = not piece.startswith(CONTINUES) or len(piece) == len(CONTINUES)
        while begins and position < len(line) and line[position] == " ":
            position += 1
        end = position + len(piece) - (0 if begins else len(CONTINUES))
        if piece in SPECIAL and text.startswith(piece, characters[position][1]):
            pass  # a special token that the text contains
        elif piece == UNKNOWN:
            end = position + 1
            while end < len(line) and not (line[end] == " " or stands_alone(line[end - 1]) or stands_alone(line[end])):
                end += 1
        elif line[position:end] != (piece if begins else piece[len(CONTINUES) :]):
            raise ValueError(f"The word piece {piece!r} is not at {line[position : position + 20]!r}.")
        spans.append((characters[position][1], characters[end - 1][1] + 1))
        position = end
    return spans


@dataclass
class Encoding:
    """The fields of `tokenizers.Encoding` that `FastTokenizer` reads: there is one text, and padding is added later."""

    ids: list[int]
    offsets: list[tuple[int, int]]
    special_tokens_mask: list[int]
    overflowing: list["Encoding"] = field(default_factory=list)
    type_ids = property(lambda self: [0] * len(self.ids))
    attention_mask = property(lambda self: [1] * len(self.ids))


class PieceTokenizer:
    """What `FastTokenizer` calls of `tokenizers.Tokenizer`, over a function without places, truncation and windows.

    Args:
        path: of a tokenizer.json of BERT's word pieces.
        encode: for a text the ids and the word pieces, without special tokens.

    Raises:
        ValueError: for another kind of tokenizer.
    """

    def __init__(self, path: str, encode: Callable[[str], tuple[list[int], list[str]]]):
        settings = json.loads(Path(path).read_text(encoding="utf-8"))
        kinds = settings["model"]["type"], (settings["normalizer"] or {}).get("type")
        if kinds != ("WordPiece", "BertNormalizer") or not settings["normalizer"]["lowercase"]:
            raise ValueError(f"{path} is a tokenizer of {kinds}, not one of BERT's word pieces in lower case.")
        self._vocabulary, self._encode = settings["model"]["vocab"], encode
        self._first, self._last = self._vocabulary["[CLS]"], self._vocabulary["[SEP]"]
        self._window: tuple[int, int] | None = None

    def no_padding(self) -> None:
        """There is none."""

    def no_truncation(self) -> None:
        """A text is one window."""
        self._window = None

    def enable_truncation(self, max_length: int, stride: int) -> None:
        """Windows of at most `max_length` word pieces, special tokens included, that share `stride`."""
        self._window = max_length - self.num_special_tokens_to_add(False), stride

    def num_special_tokens_to_add(self, is_pair: bool) -> int:
        """Of one text, or of a pair."""
        return 2 + is_pair

    def token_to_id(self, token: str) -> int | None:
        """The id of a token of the vocabulary."""
        return self._vocabulary.get(token)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[Encoding]:
        """The first window of each text, the others as its `overflowing`."""
        return [self._encode_one(text, add_special_tokens) for text in texts]

    def _encode_one(self, text: str, special: bool) -> Encoding:
        ids, pieces = self._encode(text.replace("Σ", "σ"))  # which JavaScript lowers to ς at the end of a word
        spans = piece_spans(text, pieces)
        room, stride = self._window or (len(ids), 0)
        starts = [0, *range(room - stride, len(ids) - stride, room - stride)] if len(ids) > room else [0]
        windows = []
        for start in starts:
            window, places = ids[start : start + room], spans[start : start + room]
            if special:
                window, places = [self._first, *window, self._last], [(0, 0), *places, (0, 0)]
            edges = [special] + [False] * (len(window) - 2) + [special] if special else [False] * len(window)
            windows.append(Encoding(window, places, list(map(int, edges))))
        windows[0].overflowing = windows[1:]
        return windows[0]


class BrowserExtractor(KeyphraseExtractor):
    """A `KeyphraseExtractor` whose graph and tokenizer are run by the page.

    Args:
        model: a folder with config.json, tokenizer.json and tokenizer_config.json.
        encode: see `PieceTokenizer`.
        inputs: the names of the graph's inputs.
    """

    def __init__(self, model: str, encode: Callable[[str], tuple[list[int], list[str]]], inputs: Sequence[str]):
        self._encode, self._inputs = encode, list(inputs)
        super().__init__(model)

    def _open_tokenizer(self) -> FastTokenizer:
        return FastTokenizer(self.folder, lambda path: PieceTokenizer(path, self._encode))

    def _start(self) -> None:
        self._forward_names = set(self._inputs)

    def batches(self, block: Block, batch_size: int) -> Iterator[tuple[list[Window], dict[str, np.ndarray]]]:
        """Each window by itself, as int8 graphs read them."""
        return chain.from_iterable(
            super(BrowserExtractor, self).batches(replace(block, windows=[w]), 1) for w in block.windows
        )

    def prepare(self, text: str, **options) -> list[dict[str, np.ndarray]]:
        """The inputs of the graph for each window of a text; `options` are those of a call."""
        preprocess_params, self._options = self.merge_options(**options)
        self._block = self.preprocess([text], **preprocess_params)
        return [self.feeds(inputs) for _, inputs in self.batches(self._block, 1)]

    def launch(self, batch, decode, with_states, with_gates):
        """What the page has computed for the next window."""
        results = self.results(*next(self._outputs))
        return lambda: results

    def keyphrases(self, outputs: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[dict]:
        """The keyphrases of the text, given logits and last hidden states for each window that `prepare` has returned."""
        self._outputs = iter(outputs)
        for read in self._read_prepared(self._block, 1, self._options):
            for phrases in read.values():
                return phrases
        return []
