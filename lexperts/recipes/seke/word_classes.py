"""A spaCy tagger as a teacher: which words are nouns, for the ranker, and which keyphrases are noun phrases, for models without a style."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from keyphrase_tools.diversity import WordStates
from keyphrase_tools.input_documents import read_document
from keyphrase_tools.word_classes import CLASSES, FIELD, MODIFIER, NOUN, OTHER, fit_word_classes
from keyphrase_tools.words import normalise, stem, stem_phrase
from run_tools.errors import UserError

from .data import Documents

TEXTS = 400  # of the training documents, from which the classes are learned; one in five measures them
TAGS = {"NOUN": NOUN, "PROPN": NOUN, "ADJ": MODIFIER}  # Universal Dependencies


class EveryState(WordStates):
    """The hidden states of all words."""

    def add(self, document: int, words: np.ndarray, values) -> None:
        """As in `WordStates`."""
        self._states[document] |= dict(zip(words.tolist(), values["states"], strict=True))


def open_tagger(name: str):
    """A spaCy pipeline of which only the tags are used. Raises a `UserError` if spaCy or the pipeline is not installed, or
    it has no tags.
    """
    try:
        import spacy
    except ImportError as error:
        raise UserError("--tagger needs spaCy. Install it with: pip install 'lexperts[spacy]'") from error
    try:
        tagger = spacy.load(name, exclude=["parser", "ner", "lemmatizer"])
    except OSError as error:
        raise UserError(
            f"--tagger {name!r} is not installed. Install it with: python -m spacy download {name}"
        ) from error
    if not tagger("A tagger.").has_annotation("POS"):
        raise UserError(
            f"--tagger {name!r} gives words no part of speech. Use a pipeline with a tagger: en_core_web_sm"
        )
    return tagger


def classes_by_tags(tagger, documents: Sequence[Any]) -> list[np.ndarray]:
    """The class of each word `(W,)` of some `input_documents.InputDocument`: that of the token with its first character."""
    found = []
    for document, tagged in zip(documents, tagger.pipe(document.text for document in documents), strict=True):
        at = np.zeros(len(document.text) + 1, dtype=np.int64)
        for token in tagged:
            at[token.idx : token.idx + len(token)] = TAGS.get(token.pos_, OTHER)
        found.append(at[[start for _, start, _ in document.words]])
    return found


def noun_phrase_spans(classes: Sequence[int]) -> list[tuple[int, int]]:
    """The longest spans of modifiers and nouns that end in a noun."""
    spans, start = [], 0
    for end in range(len(classes) + 1):
        if end == len(classes) or classes[end] == OTHER:
            last = end
            while last > start and classes[last - 1] != NOUN:
                last -= 1
            if last > start:
                spans.append((start, last))
            start = end + 1
    return spans


def add_noun_phrases(documents: Documents, styles: Sequence[str], tagger, language: str | None) -> Documents:
    """With another copy, without a style, of the documents of some styles, whose keyphrases are those that are noun phrases of two
    or more words there. The copies of a file have a number of their own.
    """
    chosen = [i for i, (_, style) in enumerate(documents.files) if style in styles]
    copies, read = documents.take(chosen), [read_document(documents.texts[i], i, False, True) for i in chosen]
    first = max((file for file, _ in documents.files), default=0) + 1
    numbers: dict[tuple[int, str], int] = {}
    texts, gold, files = list(documents.texts), list(documents.gold), list(documents.files)
    for number, (document, classes) in enumerate(zip(read, classes_by_tags(tagger, read), strict=True)):
        spans = [(start, end) for start, end in noun_phrase_spans(classes) if end - start > 1]
        known = {" ".join(stem(word, language) for word, _, _ in document.words[start:end]) for start, end in spans}
        kept = [phrase for phrase in copies.gold[number] if stem_phrase(normalise(phrase), language) in known]
        if kept:
            texts.append(copies.texts[number])
            gold.append(kept)
            files.append((numbers.setdefault(copies.files[number], first + len(numbers)), ""))
    return Documents(texts, gold, files)


def add_word_classes(extract, texts: Sequence[str], tagger, seed: int) -> dict[str, float]:
    """Fits a model's word classes to the tags of some of the texts, and saves them in its configuration, unless they are right less
    often than the most frequent class, of which a warning tells.

    Returns:
        `words`, the number of words that they were fitted to, and of five texts or more `accuracy` on the words of other texts and
        `most_frequent`, that of the most frequent class.
    """
    order = np.random.default_rng(seed).permutation(len(texts))[:TEXTS]
    block = extract.preprocess([texts[i] for i in order])
    block.states = EveryState(len(block.documents))
    for _ in extract.read_windows(block, batch_size=16):
        pass
    states, classes, held_out = [], [], []
    for number, tags in enumerate(classes_by_tags(tagger, block.documents)):
        for word, state in sorted(block.states.pop(number).items()):
            states.append(state)
            classes.append(int(tags[word]))
            held_out.append(number % 5 == 4)
    x, y, other = np.array(states, dtype=np.float32), np.array(classes), np.array(held_out, dtype=bool)
    fitted, number = fit_word_classes(x[~other], y[~other].tolist()), int((~other).sum())
    if not other.any():
        setattr(extract.model.config, FIELD, fitted)
        return {"words": number}
    rows = np.array([fitted[name] for name in CLASSES])
    accuracy = float(((x[other] @ rows[:, 1:].T + rows[:, 0]).argmax(1) == y[other]).mean())
    most_frequent = float((y[other] == np.bincount(y[~other]).argmax()).mean())
    print(f"word classes: fitted to {number:,} words, right for {100 * accuracy:.1f}% of {int(other.sum()):,} others")
    if accuracy >= most_frequent:
        setattr(extract.model.config, FIELD, fitted)
    else:
        warnings.warn(
            f"The word classes are right for {100 * accuracy:.1f}% of the words, the most frequent class for "
            f"{100 * most_frequent:.1f}%: they are not used, nor does the ranker read noun phrases. Use more or longer texts.",
            stacklevel=2,
        )
    return {"words": number, "accuracy": accuracy, "most_frequent": most_frequent}
