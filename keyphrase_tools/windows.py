"""Documents of any length as windows of sub-tokens, and which sub-token begins which word.

The text is tokenised as it stands, not word by word: a fine-tuned model then sees in the stock token-classification
pipeline exactly what it saw in training, and hyphens stay visible to the backbone though they are no words.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ON_LONG = ("window", "error", "truncate")
NO_LIMIT = 1_000_000  # tokenizers without a limit of their own say something like 1e30


@dataclass
class Window:
    """One row for the model.

    Attributes:
        document: which of the texts it is cut from.
        inputs: what the tokenizer gave, without padding; each value a list of length S.
        word_starts: for each sub-token the word that it begins, else -1 (special tokens, later pieces, no word).
        edge_distance: for each sub-token how many others stand between it and the nearer cut edge of the window. An end
            of the document is no cut.
        joined: words that share a sub-token with the word before them, and so begin none of their own.
    """

    document: int
    inputs: dict[str, list[int]]
    word_starts: np.ndarray
    edge_distance: np.ndarray
    joined: Sequence[int] = ()


def encode_windows(
    texts: Sequence[str],
    word_spans: Sequence[Sequence[tuple[int, int]]],
    tokenizer,
    *,
    max_length: int | None = None,
    overlap: int | None = None,
    on_long: str = "window",
    first: int = 0,
) -> list[Window]:
    """Tokenises each text and cuts it into windows that overlap.

    Args:
        texts: the documents.
        word_spans: for each document the (start, end) of its words, in order.
        tokenizer: a fast tokenizer.
        max_length: sub-tokens a window, special ones included; by default the tokenizer's `model_max_length`.
        overlap: sub-tokens that neighbouring windows share; by default a quarter of `max_length`.
        on_long: what to do with a document that needs more than one window: `"window"`, `"error"` or `"truncate"`.
        first: the number of the first text, for messages.

    Raises:
        ValueError: for a slow tokenizer, no known limit, an overlap that leaves no room, a long document under "error".
    """
    max_length, overlap = check_window(tokenizer, max_length, overlap, on_long)
    if not texts:
        return []
    side, tokenizer.truncation_side = tokenizer.truncation_side, "right"  # from the left, windows come backwards
    try:
        encoded = tokenizer(
            [readable(text) for text in texts],
            truncation=True,
            max_length=max_length,
            stride=overlap,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
        )
    finally:
        tokenizer.truncation_side = side
    offsets, special = encoded.pop("offset_mapping"), encoded.pop("special_tokens_mask")
    documents = encoded.pop("overflow_to_sample_mapping")
    spans = [np.asarray(s, dtype=np.int64).reshape(-1, 2) for s in word_spans]
    windows, seen = [], {}
    for row, document in enumerate(documents):
        number = seen[document] = seen.get(document, -1) + 1
        is_last = row + 1 == len(documents) or documents[row + 1] != document
        if number == 0 and not is_last and on_long == "error":
            raise ValueError(
                f"Document {first + document} ({len(texts[document])} characters) is longer than {max_length} sub-tokens. "
                "Use on_long='window' to read it in overlapping windows, or on_long='truncate' to cut it."
            )
        if number > 0 and on_long == "truncate":
            continue
        real = np.flatnonzero(np.asarray(special[row]) == 0)
        starts = find_word_starts(np.asarray(offsets[row]), real, spans[document], is_first=number == 0)
        distance = edge_distances(len(offsets[row]), real, is_first=number == 0, is_last=is_last)
        inputs = {name: values[row] for name, values in encoded.items()}
        joined = find_joined(np.asarray(offsets[row])[real], spans[document])
        windows.append(Window(document, inputs, starts, distance, joined))
    return windows


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

    A word takes the word of the window in which it stands furthest from a cut edge (of the earlier one, in a draw).

    Args:
        lengths: words in each document.
    """

    def __init__(self, lengths: Sequence[int]):
        self._probabilities = [np.tile(np.array([1.0, 0.0, 0.0]), (length, 1)) for length in lengths]
        self._distance = [np.full(length, -1) for length in lengths]
        self._joined = [set() for _ in lengths]

    def add(self, window: Window, probabilities: np.ndarray) -> None:
        """probabilities (S, 3) of O, B and I for the sub-tokens of a window, without padding."""
        self._joined[window.document].update(window.joined)
        begins = window.word_starts >= 0
        word, distance = window.word_starts[begins], window.edge_distance[begins]
        best = self._distance[window.document]
        closer = distance > best[word]
        best[word[closer]] = distance[closer]
        self._probabilities[window.document][word[closer]] = probabilities[begins][closer]

    def document(self, number: int) -> np.ndarray:
        """(W, 3). A word that shares a sub-token goes on as the word before it; one that no window covers is O."""
        p = self._probabilities[number]
        for w in sorted(self._joined[number]):
            if self._distance[number][w] < 0:
                p[w] = p[w - 1][0], 0.0, p[w - 1][1:].max()
        return p


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
