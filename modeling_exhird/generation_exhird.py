# SPDX-License-Identifier: Apache-2.0
"""From documents to keyphrases with offsets: the engine of the pipeline."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from transformers.utils import logging

from .data_exhird import DataCollatorForKeyphraseGeneration, find_phrase, find_text, has_words, signs_of, stem
from .tokenization_exhird import DIGIT

logger = logging.get_logger(__name__)

LEAST_SCORE = 0.01  # of a known keyphrase that was not generated
SORT_WINDOW = 8  # number of batches whose documents are sorted by length together


class Document(NamedTuple):
    """A title or `None`, a text, and phrases that compete with the generated ones, or `None`."""

    title: str | None
    text: str
    candidates: list[str] | None


class Written(NamedTuple):
    """A phrase: its words, its text (`None` if it has `<digit>`, which could be any number), and its log P, `None` of a candidate."""

    words: list[str]
    text: str | None
    log_p: float | None


def check_document(document, index: int) -> Document:
    """A text, or {"title", "text", "candidates"}. Raises a `TypeError` for anything else."""
    given = {"text": document} if isinstance(document, str) else document
    if not isinstance(given, Mapping) or not isinstance(given.get("text"), str):
        raise TypeError(f"Document {index} is {document!r:.60}. Pass a text, or a dictionary with 'text'.")
    title, candidates = given.get("title"), given.get("candidates")
    if title is not None and not isinstance(title, str):
        raise TypeError(f"Document {index} has title={title!r:.60}. Pass a text, or leave it out.")
    is_list = isinstance(candidates, (list, tuple)) and all(isinstance(phrase, str) for phrase in candidates)
    if candidates is not None and not is_list:
        raise TypeError(f"Document {index} has candidates={candidates!r:.60}. Pass a list of phrases, or leave it out.")
    return Document(title, given["text"], candidates if candidates is None else list(candidates))


def describe_phrase(phrase: Written, stems: Sequence[str], offsets, document: Document) -> dict | None:
    """A keyphrase as the pipeline returns it: `keyphrase`, `present`, `score`, `start` and `end`, and of a present one `field`, if
    there is a title; `None` for an absent phrase without a text. `stems` and `offsets` are those of the document's words.
    """
    words, written, score = phrase.words, phrase.text, math.exp(phrase.log_p or 0)
    fields = {"title": document.title or "", "text": document.text}
    place: tuple | None = None
    if written is not None and signs_of(written):  # as C++, which words do not have
        places = ((field, find_text(written, source)) for field, source in fields.items())
        place = next(((field, *span) for field, span in places if span), None)
    elif (position := find_phrase(stems, words)) is not None:
        field, start, _ = offsets[position]
        place = field, start, offsets[position + len(words) - 1][2]
    if place is None:
        absent = {"keyphrase": written, "present": False, "score": score, "start": None, "end": None}
        return None if written is None else absent
    field, start, end = place
    found = {"keyphrase": fields[field][start:end], "present": True, "score": score, "start": start, "end": end}
    return found | ({"field": field} if fields["title"] else {})


class KeyphraseGenerator:
    """Generates keyphrases of documents.

    Args:
        model, tokenizer: of one checkpoint.
        num_keyphrases: the n most probable phrases, in the order in which they were generated; by default all.
        batch_size: number of documents per batch.
        raw: return each document's phrases as lists of words, unfiltered, for evaluation.
        generate_kwargs: options of `generate_phrases`.

    Raises:
        ValueError: for a tokenizer with another vocabulary, and numbers out of range.
    """

    score: Callable | None = None  # of a model that can: phrases, whether they are absent, a source -> their P

    def __init__(
        self,
        model,
        tokenizer,
        num_keyphrases: int | None = None,
        batch_size: int = 8,
        raw: bool = False,
        **generate_kwargs,
    ):
        for name, value in (("batch_size", batch_size), ("num_keyphrases", num_keyphrases)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        self.model, self.tokenizer = model, tokenizer
        self.num_keyphrases, self.batch_size, self.raw = num_keyphrases, batch_size, raw
        self.generate_kwargs = generate_kwargs
        self.set_up()

    def set_up(self):
        """Checks that model and tokenizer belong together, and makes what batches need."""
        if len(self.tokenizer) != self.model.config.vocab_size:
            raise ValueError(
                f"The tokenizer has {len(self.tokenizer):,} words, but the model has {self.model.config.vocab_size:,}. "
                "Load both from the same checkpoint."
            )
        self.collator = DataCollatorForKeyphraseGeneration(self.tokenizer)
        self.known_words, self.least_known = self.tokenizer.get_vocab(), 0.5
        # a model that was trained too little may write a word in place of a phrase's start: one too many
        self.max_words = self.generate_kwargs.get("max_words_per_phrase") or self.model.config.max_words_per_phrase

    def stream(self, documents: Iterable) -> Iterator[list]:
        """Documents -> their keyphrases, in order; reads `SORT_WINDOW` batches at a time. Of a document with `candidates` these and the
        generated phrases, the most probable first.

        Raises:
            TypeError: for what is not a document.
            ValueError: for candidates, if the model cannot score given phrases.
        """
        documents, start = iter(documents), 0
        while chunk := list(islice(documents, SORT_WINDOW * self.batch_size)):
            yield from self.generate_all([check_document(each, start + i) for i, each in enumerate(chunk)])
            start += len(chunk)

    def generate_all(self, documents: Sequence[Document]) -> list[list]:
        """The keyphrases of each document, longest documents first. The model is in eval mode meanwhile."""
        if self.score is None and any(document.candidates is not None for document in documents):
            raise ValueError(f"{type(self.model).__name__} scores no candidates: only a pretrained decoder does.")
        sources = self.encode(documents)
        results: list[list] = [[] for _ in documents]
        order = [i for i in range(len(sources)) if sources[i].input_ids]
        order.sort(key=lambda i: len(sources[i].input_ids), reverse=True)
        if odd := [documents[i].text for i in sorted(order) if self.is_odd(sources[i].words)]:
            logger.warning(
                f"{len(odd):,} of {len(documents):,} documents are too short, or have few words of the training documents, as in another "
                f"language: their keyphrases mean little. The first is {odd[0]!r:.60}."
            )
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            for start in range(0, len(order), self.batch_size):
                batch = order[start : start + self.batch_size]
                for i, phrases in zip(batch, self.generate_batch([sources[i] for i in batch]), strict=True):
                    raw = [phrase.words for phrase in phrases]
                    results[i] = raw if self.raw else self.choose(phrases, sources[i], documents[i])
        finally:
            for module in training:
                module.training = True
        return results

    def is_odd(self, words: Sequence[str]) -> bool:
        """Whether a document has hardly any words, or few that the model knows."""
        words = [word for word in words if word.isalpha()]
        known = sum(word in self.known_words for word in words)
        return len(words) < 3 or (len(words) >= 8 and known < self.least_known * len(words))

    def encode(self, documents: Sequence[Document]) -> list:
        """What the model reads of documents, with `input_ids`, and their `words` and `offsets`."""
        return [self.tokenizer.encode_source(document.text, document.title) for document in documents]

    def generate_batch(self, sources: Sequence) -> list[list[Written]]:
        """The phrases of each source, without marks and without empty ones."""
        batch = self.collator([source._asdict() for source in sources])
        batch = {name: x.to(self.model.device) for name, x in batch.items()}
        found, config = self.model.generate_phrases(**batch, **self.generate_kwargs), self.model.config
        marks = {config.present_token_id, config.absent_token_id, config.title_end_token_id, config.bos_token_id}
        marks |= {config.pad_token_id, config.eos_token_id, config.end_phrase_token_id}
        results = []
        for source, rows, scores in zip(sources, found.ids.tolist(), found.log_probs.tolist(), strict=True):
            phrases = []
            for row, log_p in zip(rows, scores, strict=True):
                ids = [i for i in row if i not in marks]
                words = self.tokenizer.convert_ids_to_words(ids, source.oov_words)
                words = words if self.raw else words[: self.max_words]
                phrases += [Written(words, None if DIGIT in words else " ".join(words), log_p)] if words else []
            results.append(phrases)
        return results

    def choose(self, phrases: list[Written], source, document: Document) -> list[dict]:
        """Keyphrases without duplicates by stems and signs, phrases with `<unk>`, and phrases without a letter, a digit or a text."""
        ranked = document.candidates is not None
        unique: dict[tuple, Written] = {}
        for phrase in [*phrases, *self.read_candidates(document)]:
            if has_words(phrase.words) and self.tokenizer.unk_token not in phrase.words:
                unique.setdefault((tuple(map(stem, phrase.words)), signs_of(phrase.text or "")), phrase)
        stems, kept = [stem(word) for word in source.words], list(unique.values())
        found = [describe_phrase(phrase, stems, source.offsets, document) for phrase in kept]
        unscored = [i for i, phrase in enumerate(kept) if ranked or phrase.log_p is None]
        if self.score is not None and unscored:
            absent = [not found[i]["present"] for i in unscored]
            for i, score in zip(unscored, self.score([kept[i].text for i in unscored], absent, source), strict=True):
                is_kept = score is not None and (ranked or score >= LEAST_SCORE)
                found[i] = found[i] | {"score": score} if is_kept else None
        found = [one for one in found if one is not None]
        best = sorted(found, key=lambda one: -one["score"])[: self.num_keyphrases]
        return best if ranked else [one for one in found if any(one is other for other in best)]

    def read_candidates(self, document: Document) -> list[Written]:
        """Candidates as phrases; of a model that scores none there are none."""
        return []
