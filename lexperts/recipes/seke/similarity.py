"""A sentence encoder as a teacher: how close a phrase is to its document, for the ranker."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from keyphrase_tools.decoding import is_phrase
from keyphrase_tools.phrase_features import MAX_WORDS
from keyphrase_tools.phrase_similarity import FIELD
from merge_tools.clustering.embeddings import embed_texts

from .word_classes import TaggedDocument, is_held_out, noun_phrase_spans

TOPICS = 16  # k, rows of A
EPOCHS, RATE, DECAY = 12, 2e-3, 1e-2
ACCUMULATED = 4  # documents per step
DIGITS = 5  # of a weight


class Lesson(NamedTuple):
    """The noun phrases of a document.

    Attributes:
        phrases (`(C, d)`): the mean state of each.
        document (`(d,)`): the mean state of the document's words.
        lengths (`(C,)`): the logarithm of each phrase's number of words.
        cosines (`(C,)`): of the teacher's vectors of each phrase and of the document.
    """

    phrases: torch.Tensor
    document: torch.Tensor
    lengths: torch.Tensor
    cosines: torch.Tensor


def find_noun_phrases(document: TaggedDocument) -> dict[str, list[tuple[int, int]]]:
    """Noun phrases of at most MAX_WORDS words, as they first occur -> their spans."""
    found: dict[str, tuple[str, list[tuple[int, int]]]] = {}
    for start, end in noun_phrase_spans(document.classes.tolist()):
        start = max(start, end - MAX_WORDS)
        if all(word in document.states for word in range(start, end)):
            text = document.text[document.words[start][1] : document.words[end - 1][2]]
            found.setdefault(text.lower(), (text, []))[1].append((start, end))
    return dict(found.values())


def make_lessons(documents: Sequence[TaggedDocument], encoder: str) -> list[Lesson | None]:
    """What the teacher says of each document; `None` for one with fewer than three noun phrases, which says little."""
    phrases = [find_noun_phrases(document) for document in documents]
    texts = [document.text for document in documents]
    distinct = list(dict.fromkeys(text for found in phrases for text in found))
    vectors = dict(zip([*distinct, *texts], embed_texts([*distinct, *texts], encoder), strict=True))
    lessons: list[Lesson | None] = []
    for document, found in zip(documents, phrases, strict=True):
        if len(found) < 3:
            lessons.append(None)
            continue
        states = document.states
        means = [[np.mean([states[w] for w in range(*span)], axis=0) for span in spans] for spans in found.values()]
        counted = [state for word, state in states.items() if is_phrase([document.words[word][0]])]
        lengths = [np.log(end - start) for ((start, end), *_) in found.values()]
        cosines = [vectors[text] @ vectors[document.text] for text in found]
        columns = ([np.mean(of_phrase, axis=0) for of_phrase in means], np.mean(counted, axis=0), lengths, cosines)
        lessons.append(Lesson(*(torch.tensor(np.array(column), dtype=torch.float32) for column in columns)))
    return lessons


class Student(torch.nn.Module):
    """The formula of `keyphrase_tools.phrase_similarity` on standardised states, times a factor, and a term of the phrase's length,
    which the ranker knows by itself.
    """

    def __init__(self, size: int):
        super().__init__()
        self.topics, self.offset = torch.nn.Linear(size, TOPICS), torch.nn.Linear(size, 1)
        self.factor, self.per_length = torch.nn.Parameter(torch.tensor(0.3)), torch.nn.Parameter(torch.zeros(()))

    def forward(self, lesson: Lesson) -> torch.Tensor:
        """The cosines `(C,)` that the teacher would give, up to a constant of the document."""
        cosines = torch.cosine_similarity(self.topics(lesson.phrases), self.topics(lesson.document)[None], dim=-1)
        return self.factor * cosines + self.offset(lesson.phrases)[:, 0] + self.per_length * lesson.lengths


def train_student(lessons: Sequence[Lesson], size: int, seed: int) -> Student:
    """Least squares between the cosines of student and teacher, each less its mean over a document's phrases."""
    torch.manual_seed(seed)
    student, steps = Student(size), 0
    optimizer = torch.optim.AdamW(student.parameters(), RATE, weight_decay=DECAY)
    for epoch in range(EPOCHS):
        for index in torch.randperm(len(lessons)).tolist():
            found, taught = student(lessons[index]), lessons[index].cosines
            (100 * ((found - found.mean()) - (taught - taught.mean())).square().mean()).backward()
            steps += 1
            if steps % ACCUMULATED == 0:
                optimizer.step()
                optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] = RATE * (1 - (epoch + 1) / EPOCHS)
    return student


def add_similarity(extract, documents: Sequence[TaggedDocument], encoder: str, seed: int) -> dict[str, float]:
    """Fits a model's similarity of phrases and documents to a sentence encoder, and saves it in the model's configuration.

    Args:
        encoder: as for `embed_texts`.

    Returns:
        `documents`, the number that it was fitted to, and `correlation`, that with the teacher's cosines within each of the other
        documents, the mean over these.
    """
    lessons = make_lessons(documents, encoder)
    fitted = [lesson for number, lesson in enumerate(lessons) if lesson and not is_held_out(number)]
    others = [lesson for number, lesson in enumerate(lessons) if lesson and is_held_out(number)]
    states = torch.cat([lesson.phrases for lesson in fitted])
    mean, deviation = states.mean(0), states.std(0).clamp(min=1e-6)

    def standardised(lesson: Lesson) -> Lesson:
        return lesson._replace(
            phrases=(lesson.phrases - mean) / deviation, document=(lesson.document - mean) / deviation
        )

    student = train_student([standardised(lesson) for lesson in fitted], states.shape[1], seed)
    with torch.no_grad():
        pairs = [torch.stack([student(standardised(lesson)), lesson.cosines]) for lesson in others]
        correlation = (
            float(np.nanmean([torch.corrcoef(pair)[0, 1].item() for pair in pairs])) if pairs else float("nan")
        )
        topics, offset = (
            rows_of(student.topics, mean, deviation),
            rows_of(student.offset, mean, deviation) / student.factor,
        )
    value = {"offset": rounded(offset)[0], "topics": rounded(topics)}
    setattr(extract.model.config, FIELD, value)
    print(
        f"similarity: fitted to {len(fitted):,} documents, correlation with the encoder's within others {correlation:.2f}"
    )
    return {"documents": len(fitted), "correlation": correlation}


def rows_of(layer: torch.nn.Linear, mean: torch.Tensor, deviation: torch.Tensor) -> torch.Tensor:
    """Biases and weights of a layer on standardised states as those of one on the states, `(n, 1 + d)`."""
    weights = layer.weight / deviation
    return torch.cat([(layer.bias - weights @ mean)[:, None], weights], dim=1)


def rounded(rows: torch.Tensor) -> list[list[float]]:
    """The rows with DIGITS digits, relative to the largest."""
    digits = DIGITS - int(np.ceil(np.log10(rows.abs().max().item())))
    return np.round(rows.double().numpy(), digits).tolist()
