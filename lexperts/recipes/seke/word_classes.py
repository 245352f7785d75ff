"""A spaCy tagger as a teacher: which words are nouns, for the ranker, and which keyphrases are noun phrases."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from keyphrase_tools.ranker_fit import fit_word_classes
from lexperts_lite.diversity import WordStates
from lexperts_lite.features import CLASSES, CLASSIFIER, MODIFIER, NOUN, OTHER
from lexperts_lite.input_documents import read_document
from lexperts_lite.words import normalise, stem, stem_phrase

from .data import Documents

TEXTS = 400  # of the training documents, from which the classes are learned; one in five measures them
TAGS = {"NOUN": NOUN, "PROPN": NOUN, "ADJ": MODIFIER}  # Universal Dependencies
NOUN_PHRASE = re.compile(f"[{MODIFIER}{NOUN}]+{NOUN}")  # two or more words, the longest


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


def only_noun_phrases(file: Documents, tagger, language: str | None) -> Documents:
    """A copy of documents without a style, with those keyphrases that are noun phrases of two or more words there."""
    copy = Documents(file.source, file.name, "", [], [])
    read = [read_document(text, i, True) for i, text in enumerate(file.texts)]
    for i, (document, classes) in enumerate(zip(read, classes_by_tags(tagger, read), strict=True)):
        stems = [stem(word, language) for word, _, _ in document.words]
        spans = [match.span() for match in NOUN_PHRASE.finditer("".join(map(str, classes)))]
        known = {" ".join(stems[start:end]) for start, end in spans}
        if kept := [phrase for phrase in file.keyphrases[i] if stem_phrase(normalise(phrase), language) in known]:
            copy.texts.append(file.texts[i])
            copy.keyphrases.append(kept)
    return copy


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
