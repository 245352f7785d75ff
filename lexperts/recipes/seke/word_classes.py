"""A spaCy tagger as a teacher: which words are nouns, for the ranker."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from keyphrase_tools.ranker_fit import fit_word_classes
from lexperts_lite.diversity import WordStates
from lexperts_lite.features import CLASSES, CLASSIFIER, MODIFIER, NOUN, OTHER

TEXTS = 400  # of the training documents, from which the classes are learned; one in five measures them
TAGS = {"NOUN": NOUN, "PROPN": NOUN, "ADJ": MODIFIER}  # Universal Dependencies


def open_tagger(name: str):
    """A spaCy pipeline of which only the tags are used. Raises a `ValueError` for one without tags."""
    import spacy

    tagger = spacy.load(name, exclude=["parser", "ner", "lemmatizer"])
    if not tagger("A tagger.").has_annotation("POS"):
        raise ValueError(f"--tagger {name} gives words no part of speech. Use one such as en_core_web_sm.")
    return tagger


def classes_by_tags(tagger, documents: Sequence[Any]) -> list[np.ndarray]:
    """The class of each word `(W,)` of some `InputDocument`s: that of the token with its first character."""
    found = []
    for document, tagged in zip(documents, tagger.pipe(document.text for document in documents), strict=True):
        at = np.zeros(len(document.text) + 1, dtype=np.int64)
        for token in tagged:
            at[token.idx : token.idx + len(token)] = TAGS.get(token.pos_, OTHER)
        found.append(at[[start for _, start, _ in document.words]])
    return found


def add_word_classes(extract, texts: Sequence[str], tagger, seed: int) -> dict[str, float]:
    """Fits a model's word classes to the tags of some texts, and saves them in its configuration -> `accuracy` on the
    words of one text in five, which were not fitted to, and `most_frequent`, that of the most frequent class.
    """
    order = np.random.default_rng(seed).permutation(len(texts))[:TEXTS]
    block = extract.preprocess([texts[i] for i in order])
    every_word = [{"": [(0, len(document.words))]} for document in block.documents]
    block.states = WordStates(len(every_word), mentions=every_word)
    for _ in extract.read_windows(block, batch_size=16):
        pass
    states, classes, held_out = [], [], []
    for number, tags in enumerate(classes_by_tags(tagger, block.documents)):
        own = sorted(block.states.pop(number).items())
        states += [state for _, state in own]
        classes += [int(tags[word]) for word, _ in own]
        held_out += [number % 5 == 4] * len(own)
    x, y, other = np.array(states, dtype=np.float32), np.array(classes), np.array(held_out)
    fitted = fit_word_classes(x[~other], y[~other].tolist())
    setattr(extract.model.config, CLASSIFIER, fitted)
    rows = np.array([fitted[name] for name in CLASSES])
    accuracy = float(((x[other] @ rows[:, 1:].T + rows[:, 0]).argmax(1) == y[other]).mean())
    most_frequent = float((y[other] == np.bincount(y[~other]).argmax()).mean())
    print(f"word classes: right for {accuracy:.1%} of the words, the most frequent class for {most_frequent:.1%}")
    return {"accuracy": accuracy, "most_frequent": most_frequent}
