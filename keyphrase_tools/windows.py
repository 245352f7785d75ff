"""Documents of any length as windows of sub-tokens, and which sub-token begins which word.

The text is tokenised as it stands, not word by word: a fine-tuned model then sees in the stock token-classification
pipeline exactly what it saw in training, and hyphens stay visible to the backbone though they are no words.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .titles import MAX_TITLE_LENGTH, cut_titles, title_masks, title_overlaps

ON_LONG = ("window", "error", "truncate")
NO_LIMIT = 1_000_000  # tokenizers without a limit of their own say something like 1e30


@dataclass
class Window:
    """One row for the model.

    Attributes:
        document: which of the texts it is cut from.
        number: which of the document's windows it is.
        inputs: what the tokenizer gave, without padding; each value a list of length S. Where titles are read as meta-text,
            `meta_mask` and `main_mask` as well: 1 on the first special token and the title, 1 on the text.
        word_starts: for each sub-token the word that it begins, else -1 (special tokens, later pieces, no word, a title).
        edge_distance: for each sub-token how many others stand between it and the nearer cut edge of the window. An end
            of the document is no cut. In a pair of title and text, -1 outside the text.
        joined: words that share a sub-token with the word before them, and so begin none of their own.
    """

    document: int
    inputs: dict[str, list[int]]
    word_starts: np.ndarray
    edge_distance: np.ndarray
    joined: Sequence[int] = ()
    number: int = 0

    @property
    def key(self) -> tuple[int, int]:
        return self.document, self.number


def encode_windows(
    texts: Sequence[str],
    word_spans: Sequence[Sequence[tuple[int, int]]],
    tokenizer,
    *,
    max_length: int | None = None,
    overlap: int | None = None,
    on_long: str = "window",
    first: int = 0,
    titles: Sequence[str | None] | None = None,
    max_title_length: int = MAX_TITLE_LENGTH,
) -> list[Window]:
    """Tokenises each text and cuts it into windows that overlap.

    Args:
        texts: the documents.
        word_spans: for each document the (start, end) of its words, in order.
        tokenizer: a fast tokenizer.
        max_length: sub-tokens a window, special ones included; by default the tokenizer's `model_max_length`.
        overlap: sub-tokens that neighbouring windows share; by default a quarter of `max_length`, or less where a title
            leaves less room.
        on_long: what to do with a document that needs more than one window: `"window"`, `"error"` or `"truncate"`.
        first: the number of the first text, for messages.
        titles: for each document its title, which is read as meta-text: the tokenizer's pair (title, text), in each window
            the whole title and a piece of the text. `None` or blank where a document has none: its text stands alone.
        max_title_length: sub-tokens of a title; longer ones are cut, with a warning.

    Raises:
        ValueError: for a slow tokenizer, no known limit, an overlap or a title that leaves no room, a long document under
            "error", and titles of another number than texts.
    """
    asked = overlap is not None
    max_length, overlap = check_window(tokenizer, max_length, overlap, on_long)
    if titles is not None and len(titles) != len(texts):
        raise ValueError(
            f"There are {len(titles)} titles for {len(texts)} texts. Pass one each, None where there is none."
        )
    if not texts:
        return []
    texts, overlaps, masked = [readable(text) for text in texts], [overlap] * len(texts), titles is not None
    if not masked:
        titles = [""] * len(texts)
    else:
        titles, lengths = cut_titles([title and readable(title) for title in titles], tokenizer, max_title_length)
        overlaps = title_overlaps(lengths, tokenizer, max_length, overlap, asked=asked, first=first)
    spans = [np.asarray(s, dtype=np.int64).reshape(-1, 2) for s in word_spans]
    # a call of the tokenizer takes only pairs or only texts, and one overlap
    calls, windows = defaultdict(list), defaultdict(list)
    for document, (title, shared) in enumerate(zip(titles, overlaps, strict=True)):
        calls[bool(title), shared].append(document)
    for (paired, shared), documents in calls.items():
        sides = [[side[document] for document in documents] for side in ((titles, texts) if paired else (texts,))]
        encoded = _tokenise(tokenizer, sides, max_length, shared)
        for row, document, is_first, is_last in _rows(encoded.pop("overflow_to_sample_mapping"), documents):
            if is_first and not is_last and on_long == "error":
                beside = " beside a title" if paired else ""
                raise ValueError(
                    f"Document {first + document} ({len(texts[document])} characters{beside}) is longer than {max_length} "
                    "sub-tokens. Use on_long='window' to read it in overlapping windows, or on_long='truncate' to cut it."
                )
            if is_first or on_long != "truncate":
                window = _window(encoded, row, document, spans[document], is_first, is_last, paired, masked)
                window.number = len(windows[document])
                windows[document].append(window)
    return [window for document in range(len(texts)) for window in windows[document]]


def _tokenise(tokenizer, sides: list[list[str]], max_length: int, overlap: int):
    """Texts, or titles and texts -> windows of sub-tokens; of a pair only the text is cut."""
    side, tokenizer.truncation_side = tokenizer.truncation_side, "right"  # from the left, windows come backwards
    try:
        return tokenizer(
            *sides,
            truncation="only_second" if len(sides) == 2 else True,
            max_length=max_length,
            stride=overlap,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
        )
    finally:
        tokenizer.truncation_side = side


def _rows(sources: Sequence[int], documents: Sequence[int]) -> Iterator[tuple[int, int, bool, bool]]:
    """Which of `documents` each row is of -> row, document, whether it is the document's first and its last."""
    for row, source in enumerate(sources):
        is_first = row == 0 or sources[row - 1] != source
        is_last = row + 1 == len(sources) or sources[row + 1] != source
        yield row, documents[source], is_first, is_last


def _window(encoded, row, document, spans, is_first, is_last, paired, masked) -> Window:
    """One row of what the tokenizer gave; spans (W, 2) of the document's words."""
    beside = ("offset_mapping", "special_tokens_mask")
    offsets, special = (np.asarray(encoded[name][row]) for name in beside)
    special = special.astype(bool)
    inputs = {name: values[row] for name, values in encoded.items() if name not in beside}
    main = ~special
    if masked:
        meta, main = title_masks(encoded.sequence_ids(row), special, paired=paired)
        inputs |= {"meta_mask": meta.astype(int).tolist(), "main_mask": main.astype(int).tolist()}
    real = np.flatnonzero(main)
    starts = find_word_starts(offsets, real, spans, is_first=is_first)
    distance = edge_distances(len(offsets), real, is_first=is_first, is_last=is_last)
    if paired:
        distance[~main] = -1
    return Window(document, inputs, starts, distance, find_joined(offsets[real], spans))


def find_word_starts(offsets: np.ndarray, real: np.ndarray, spans: np.ndarray, *, is_first: bool) -> np.ndarray:
    """offsets (S, 2) of sub-tokens, `real` the indices of those that are not special, spans (W, 2) of words -> (S,).

    A sub-token belongs to the first word that it touches, and begins it if the one before belongs to another. The first
    sub-token of a later window may be the middle of a word: it begins the word only if it covers its first character.
    """
    starts = np.full(len(offsets), -1)
    if len(real) == 0 or len(spans) == 0:
        return starts
    begin, end = offsets[real].T
    word = np.searchsorted(spans[:, 1], begin, side="right").clip(max=len(spans) - 1)  # first word that ends later
    touches = (spans[word, 0] < end) & (spans[word, 1] > begin) & (end > begin)
    word = np.where(touches, word, -1)
    begins = (word >= 0) & (word != np.concatenate(([-1], word[:-1])))
    if not is_first and begins[0]:
        begins[0] = begin[0] <= spans[word[0], 0]
    starts[real[begins]] = word[begins]
    return starts


def find_joined(offsets: np.ndarray, spans: np.ndarray) -> list[int]:
    """offsets (n, 2) of sub-tokens, spans (W, 2) of words -> the words that share a sub-token with the word before them."""
    begin, end = offsets.reshape(-1, 2).T
    first = np.searchsorted(spans[:, 1], begin, side="right")  # first word that ends later
    last = np.searchsorted(spans[:, 0], end, side="left")  # first word that begins later
    return [w for t in np.flatnonzero(last - first > 1) for w in range(first[t] + 1, last[t])]


def edge_distances(length: int, real: np.ndarray, *, is_first: bool, is_last: bool) -> np.ndarray:
    """(S,): for each sub-token the distance to the nearer edge where the document was cut."""
    place = np.arange(length)
    far = np.full(length, np.iinfo(np.int64).max)
    if len(real) == 0:
        return far
    left = far if is_first else place - real[0]
    right = far if is_last else real[-1] - place
    return np.minimum(left, right)


class WordProbabilities:
    """What a model says of each word of some documents, gathered window by window.

    A word's probabilities are those of the window in which it is furthest from a cut edge (the earlier one, in a draw),
    whatever the order in which windows are added.

    Args:
        lengths: words in each document.
    """

    def __init__(self, lengths: Sequence[int]):
        self._probabilities = [np.tile(np.array([1.0, 0.0, 0.0]), (length, 1)) for length in lengths]
        self._tags = [None] * len(lengths)  # of documents for which some were given: (W,)
        self._distance = [np.full(length, -1) for length in lengths]
        self._window = [np.full(length, np.iinfo(np.int64).max) for length in lengths]
        self._joined = [set() for _ in lengths]

    def add(self, window: Window, probabilities: np.ndarray, tags: np.ndarray | None = None) -> None:
        """probabilities (S, 3) of O, B and I for the sub-tokens of a window, without padding; tags (S), each 0, 1 or 2.

        Tags are the choice of a model that reads words together, as a CRF does; give them for all windows or for none.
        """
        number = window.document
        self._joined[number].update(window.joined)
        begins = window.word_starts >= 0
        word, distance = window.word_starts[begins], window.edge_distance[begins]
        best, of_window = self._distance[number], self._window[number]
        closer = (distance > best[word]) | ((distance == best[word]) & (window.number < of_window[word]))
        best[word[closer]], of_window[word[closer]] = distance[closer], window.number
        self._probabilities[number][word[closer]] = probabilities[begins][closer]
        if tags is not None:
            if self._tags[number] is None:
                self._tags[number] = np.zeros(len(best), dtype=np.int64)
            self._tags[number][word[closer]] = tags[begins][closer]

    def document(self, number: int) -> np.ndarray:
        """(W, 3). A word that shares a sub-token goes on as the word before it; one that no window covers is O."""
        p = self._probabilities[number]
        for w in self._going_on(number):
            p[w] = p[w - 1][0], 0.0, p[w - 1][1:].max()
        return p

    def tags(self, number: int) -> np.ndarray | None:
        """(W,), by the rule of `document`; None where no tags were given."""
        tags = self._tags[number]
        if tags is not None:
            for w in self._going_on(number):
                tags[w] = 2 if tags[w - 1] else 0
        return tags

    def _going_on(self, number: int) -> list[int]:
        """Words that begin no sub-token in any window, but share one with the word before."""
        return [w for w in sorted(self._joined[number]) if self._distance[number][w] < 0]


def check_window(tokenizer, max_length: int | None, overlap: int | None, on_long: str) -> tuple[int, int]:
    """Fills in the defaults of `max_length` and `overlap` and refuses what cannot work."""
    if on_long not in ON_LONG:
        raise ValueError(f"on_long={on_long!r} is not known. Use one of {', '.join(map(repr, ON_LONG))}.")
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} is a slow tokenizer, which cannot tell where its sub-tokens stand in the text. "
            "Use a fast one: AutoTokenizer.from_pretrained(name), or PreTrainedTokenizerFast for a tokenizer.json."
        )
    if max_length is None:
        max_length = tokenizer.model_max_length
        if max_length > NO_LIMIT:
            raise ValueError(
                "The tokenizer has no model_max_length, so nothing says how long a window may be. Pass max_length=512, or "
                "set tokenizer.model_max_length."
            )
    room = max_length - tokenizer.num_special_tokens_to_add()
    if room < 1:
        raise ValueError(f"max_length={max_length} leaves no room beside the tokenizer's special tokens.")
    if overlap is None:
        overlap = min(max_length // 4, room - 1)
    if not 0 <= overlap < room:
        raise ValueError(
            f"overlap={overlap} does not fit into windows of max_length={max_length}: windows must move on. "
            f"Use 0 to {room - 1}; a quarter of max_length is a good choice."
        )
    return max_length, overlap


def readable(text: str) -> str:
    """The text with lone surrogates replaced one for one, so that offsets stay: tokenizers refuse to read them."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)
    return text
