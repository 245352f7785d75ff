"""From labels to keyphrases: B opens a phrase, I continues it, an I with no phrase before it opens one.

Phrases with punctuation are dropped, and so are repeats, compared by their Porter stems: the first form stays.
"""

import unicodedata
from collections.abc import Sequence

import numpy as np

from .stemming import stem_phrase
from .words import APOSTROPHES, JOINERS

O, B, I = range(3)
SEKE_PUNCTUATION = frozenset("!#$%&'()*+,.:;<=>?@[\\]^_`{|}~")


def word_tags(probabilities: np.ndarray, threshold: float | None = None) -> np.ndarray:
    """probabilities (W, 3) of O, B and I for each word -> labels (W,).

    Without a threshold the likeliest label; with one, B or I (the likelier) where the two together reach it. A model that
    is unsure where phrases begin splits its belief between B and I, and O wins words that most likely belong to one.
    """
    if threshold is None:
        return probabilities.argmax(-1)
    inside = np.where(probabilities[:, I] > probabilities[:, B], I, B)
    return np.where(1 - probabilities[:, O] >= threshold, inside, O)


def tag_spans(tags: Sequence[int]) -> list[tuple[int, int]]:
    """One label a word (0 O, 1 B, 2 I) -> the phrases as spans of words `(start, end)`, in text order.

    >>> tag_spans([1, 2, 0, 2, 1])
    [(0, 2), (3, 4), (4, 5)]
    """
    spans, start = [], None
    for i, label in enumerate([*tags, O]):
        if label != I and start is not None:
            spans.append((start, i))
            start = None
        if label == B or (label == I and start is None):
            start = i
    return spans


def is_phrase(words: Sequence[str]) -> bool:
    """Whether words make a keyphrase: no punctuation or symbol but an apostrophe inside a word or a point between digits."""
    return bool(words) and not any(_is_mark(word) for word in words)


def _is_mark(word: str) -> bool:
    inner = word.strip(APOSTROPHES + JOINERS)
    if inner != word or not inner:
        return True
    if word.isalnum():
        return False
    for i, c in enumerate(word):
        between_digits = word[max(i - 1, 0) : i].isdigit() and word[i + 1 : i + 2].isdigit()
        allowed = c in APOSTROPHES + JOINERS or (c in ".," and between_digits)
        if not allowed and (c in SEKE_PUNCTUATION or unicodedata.category(c)[0] in "PS"):
            return True
    return False


def pieces_to_phrases(
    tags: Sequence[int],
    word_ids: Sequence[int | None],
    words: Sequence[str],
    *,
    rules: str = "lexperts",
    max_phrases: int | None = 10,
) -> list[str]:
    """Labels of sub-tokens -> keyphrases, in text order.

    Args:
        tags (S): a label for each sub-token, 0 (O), 1 (B) or 2 (I).
        word_ids (S): the word of each sub-token, None for special ones, as `encoding.word_ids()` gives them.
        words: the document's words.
        rules: `"lexperts"` reads the label of each word's first sub-token. `"seke"` follows the reference's walk over
            the sub-tokens: a B inside a word ends the phrase before it, and apostrophes count as punctuation. The
            reference's own order is that of a Python set; here it is the text's.
        max_phrases: how many to keep, None for all.
    """
    if rules == "seke":
        return _unique(_seke_phrases(tags, word_ids, words), _seke_keeps)[:max_phrases]
    if rules != "lexperts":
        raise ValueError(f"rules={rules!r} is not known. Use rules='lexperts' or rules='seke'.")
    labels = np.zeros(len(words), dtype=int)
    for tag, w, before in zip(tags, word_ids, [None, *word_ids], strict=False):
        if w is not None and w != before:
            labels[w] = tag
    return _unique((words[start:end] for start, end in tag_spans(labels)), is_phrase)[:max_phrases]


def mention_scores(probabilities: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """How sure the model is of each span: its words' mean probability of being labelled B, then I, as they are.

    probabilities (W, 3) of O, B, I for each word, spans (M) of `(start, end)` -> (M,).
    """
    begins = np.array([probabilities[start, B] for start, _ in spans])
    inside = np.array([probabilities[start + 1 : end, I].sum() for start, end in spans])
    return (begins + inside) / np.array([end - start for start, end in spans])


def tempered(p: np.ndarray, temperature: float) -> np.ndarray:
    """Probabilities with their log-odds divided by a temperature: above 1 less sure, below 1 surer, in the same order."""
    p = np.clip(p, 1e-7, 1 - 1e-7)
    return 1 / (1 + np.exp(-np.log(p / (1 - p)) / temperature))


def rank_phrases(
    text: str,
    words: Sequence[tuple[str, int, int]],
    probabilities: np.ndarray,
    threshold: float | None = None,
    tags: Sequence[int] | None = None,
    temperature: float | None = None,
) -> list[dict]:
    """A document's word probabilities -> its keyphrases, best first.

    Args:
        text: the document.
        words (W): as `split_words` gives them.
        probabilities (W, 3): of O, B and I for each word.
        threshold: as in `word_tags`.
        tags (W): 0 (O), 1 (B) or 2 (I) for each word, where something else than `word_tags` chose them, such as the best
            path of a CRF; the probabilities then only score, and there is nothing for a threshold to decide.
        temperature: of the scores, see `tempered`; found by `calibration.fit_temperature`.

    Returns:
        A list of `{"keyphrase", "score", "start", "end", "mentions": [{"start", "end", "score"}]}`. Mentions of equal
        stems are one keyphrase, whose form, with single blanks, and place are the first mention's and whose score is the
        best mention's; ties go to the earlier phrase.
    """
    chosen = word_tags(probabilities, threshold) if tags is None else tags
    spans = [span for span in tag_spans(chosen) if is_phrase([word for word, _, _ in words[slice(*span)]])]
    if not spans:
        return []
    grouped, scores = {}, mention_scores(probabilities, spans)
    if temperature is not None:
        scores = tempered(scores, temperature)
    for (start, end), score in zip(spans, scores, strict=True):
        stems = stem_phrase(" ".join(word for word, _, _ in words[start:end]))
        mention = {"start": words[start][1], "end": words[end - 1][2], "score": round(float(score), 6)}
        grouped.setdefault(stems, []).append(mention)
    phrases = [
        {
            "keyphrase": " ".join(text[mentions[0]["start"] : mentions[0]["end"]].split()),
            "score": max(mention["score"] for mention in mentions),
            "start": mentions[0]["start"],
            "end": mentions[0]["end"],
            "mentions": mentions,
        }
        for mentions in grouped.values()
    ]
    return sorted(phrases, key=lambda phrase: (-phrase["score"], phrase["start"]))


def _unique(phrases, keep) -> list[str]:
    kept = {}
    for words in phrases:
        if keep(words):
            phrase = " ".join(words)
            kept.setdefault(stem_phrase(phrase), phrase)
    return list(kept.values())


def _seke_keeps(words: Sequence[str]) -> bool:
    return not SEKE_PUNCTUATION.intersection(" ".join(words))


def _seke_phrases(tags, word_ids, words):
    """The reference's walk over sub-tokens, phrase by phrase."""
    open_phrase = []
    for place, (tag, w, before) in enumerate(zip(tags, word_ids, [None, *word_ids], strict=False)):
        opens_word = w is not None and w != before and not (tag == I and place == 0)
        if open_phrase and (tag == B or (tag == O and w != before)):
            yield open_phrase
            open_phrase = []
        if tag in (B, I) and opens_word:
            open_phrase.append(words[w])
    if open_phrase:
        yield open_phrase
