"""Documents in, keyphrases out: what a keyphrase generator's rows are in words, and where they stand in the text."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

import torch

from .data_exhird import ExHirdCollator
from .targets_exhird import find_phrase, has_words, stem
from .tokenization_exhird import DIGIT

BATCHES_AT_A_TIME = 16  # so many batches of documents are sorted by length together


def check_document(document, number: int) -> tuple[str | None, str]:
    """A text, or {"title", "text"} -> title and text.

    Raises:
        TypeError: for anything else.
    """
    if isinstance(document, str):
        return None, document
    if isinstance(document, Mapping) and isinstance(document.get("text"), str):
        title = document.get("title")
        if title is None or isinstance(title, str):
            return title, document["text"]
    raise TypeError(
        f"Document {number} is {document!r:.60}. Pass a text, or a dictionary with 'text' and, where there is one, 'title'."
    )


class KeyphraseWriter:
    """Writes keyphrases; its arguments are those of `ExHirdForKeyphraseGeneration.generate_keyphrases`.

    Raises:
        ValueError: for a vocabulary that is not the model's, and options that cannot be.
    """

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
                raise ValueError(f"{name}={value}: it must be 1 or more.")
        if len(tokenizer) != model.config.vocab_size:
            raise ValueError(
                f"The tokenizer has {len(tokenizer):,} words, and the model {model.config.vocab_size:,}: it is of another "
                "checkpoint. Open both from the same folder."
            )
        self.model, self.tokenizer, self.collate = model, tokenizer, ExHirdCollator(tokenizer)
        self.num_keyphrases, self.batch_size, self.raw = num_keyphrases, batch_size, raw
        self.options = generate_kwargs

    def stream(self, documents: Iterable) -> Iterator[list[dict]]:
        """Documents -> their keyphrases, in order, some batches at a time."""
        documents, first = iter(documents), 0
        while chunk := list(islice(documents, BATCHES_AT_A_TIME * self.batch_size)):
            yield from self([check_document(document, first + i) for i, document in enumerate(chunk)])
            first += len(chunk)

    def __call__(self, documents: Sequence[tuple[str | None, str]]) -> list[list[dict]]:
        """Titles and texts -> their keyphrases."""
        sources = [self.tokenizer.read_source(text, title) for title, text in documents]
        found: list[list[dict]] = [[] for _ in documents]
        order = [i for i in range(len(sources)) if sources[i].input_ids]
        order.sort(key=lambda i: len(sources[i].input_ids), reverse=True)
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            for start in range(0, len(order), self.batch_size):
                batch = order[start : start + self.batch_size]
                rows = self.generate([documents[i] for i in batch], [sources[i] for i in batch])
                for i, ids, log_probs in zip(batch, rows.ids.tolist(), rows.log_probs.tolist(), strict=True):
                    found[i] = self.phrases(ids, log_probs, sources[i], documents[i])
                    if self.raw:
                        found[i] = [words for _, words in self.spoken(ids, sources[i])]
        finally:
            for module in training:
                module.training = True
        return found

    def generate(self, documents, sources):
        rows = [{"input_ids": source.input_ids, "copy_ids": source.copy_ids} for source in sources]
        if self.tokenizer.pieces is not None:
            rows = [
                {**row, **self.tokenizer.read_pieces(text, title, source=source)}
                for row, source, (title, text) in zip(rows, sources, documents, strict=True)
            ]
        batch = {name: x.to(self.model.device) for name, x in self.collate(rows).items()}
        return self.model.generate_rows(**batch, **self.options)

    def spoken(self, ids: list[list[int]], source) -> list[tuple[int, list[str]]]:
        """Rows of extended ids -> the number and the words of each phrase, without marks; empty phrases left out."""
        config = self.model.config
        marks = {config.present_token_id, config.absent_token_id, config.title_end_token_id, config.bos_token_id}
        marks |= {config.pad_token_id, config.eos_token_id, config.end_phrase_token_id}
        rows = [[i for i in row if i not in marks] for row in ids]
        return [(number, self.tokenizer.surface(row, source.oov_words)) for number, row in enumerate(rows) if row]

    def phrases(self, ids: list[list[int]], log_probs: list[float], source, document) -> list[dict]:
        """Rows of extended ids -> keyphrases, each once by its stems.

        Left out are those of signs alone, those with `<unk>`, and absent ones with `<digit>`, which stands for any number.
        """
        title, text = document
        stems, seen, found = [stem(word) for word in source.words], set(), []
        for number, words in self.spoken(ids, source):
            key, log_p = tuple(map(stem, words)), log_probs[number]
            if not has_words(words) or self.tokenizer.unk_token in words or key in seen:
                continue
            seen.add(key)
            place = find_phrase(stems, words)
            if place is None and DIGIT in words:
                continue
            phrase = {"keyphrase": " ".join(words), "present": place is not None, "score": math.exp(log_p)}
            phrase |= {"start": None, "end": None}
            if place is not None:
                field, start, _ = source.places[place]
                end = source.places[place + len(words) - 1][2]
                phrase |= {"keyphrase": (title if field == "title" else text)[start:end], "start": start, "end": end}
                if title:
                    phrase["field"] = field
            found.append(phrase)
        if self.num_keyphrases is not None and len(found) > self.num_keyphrases:
            best = sorted(found, key=lambda phrase: -phrase["score"])[: self.num_keyphrases]
            found = [phrase for phrase in found if any(phrase is one for one in best)]
        return found


@torch.no_grad()
def write_keyphrases(model, documents, tokenizer, **options) -> list:
    """`ExHirdForKeyphraseGeneration.generate_keyphrases`."""
    writer = KeyphraseWriter(model, tokenizer, **options)
    if isinstance(documents, (str, Mapping)):
        return next(writer.stream([documents]))
    return list(writer.stream(documents))
