"""A text that the model has read once. Another threshold only selects among what was found."""

import numpy as np

from keyphrase_tools.batches import Block
from keyphrase_tools.ranking import rank_phrases

LISTED = 200  # phrases that a threshold can show at most
FLOOR = 0.01  # the lowest threshold


class Reader:
    """Reads texts with a keyphrase pipeline.

    Attributes:
        styles: the model's styles of annotation.
        ranks: whether scores are probabilities of phrases, among which a threshold selects. Otherwise the threshold is that of
            each word.
    """

    def __init__(self, extract):
        self.extract = extract
        self.styles = list(getattr(extract.model.config, "styles", None) or [])
        self.ranks = extract.scoring().ranker is not None

    def read(self, text: str, style: str | None = None) -> "Reading":
        """Runs the model. Raises a `ValueError` if the model does not have the style."""
        block = self.extract.read([text], style=style, gates=True)
        language, (ranker, _, temperature) = self.extract.language, self.extract.scoring(style=style)
        if ranker is not None:
            document = block.documents[0]
            (ranked,) = self.extract.rank(block, [0], ranker, language, temperature)
            number = max(sum(score >= FLOOR for score in ranked.scores), ranked.best_number)
            phrases = [document.phrase_to_source(phrase) for phrase in ranked.phrases(min(number, LISTED))]
            return Reading(text, block, phrases[: ranked.best_number], phrases)
        automatic = self.extract(text, top_k=LISTED, **({} if style is None else {"style": style}))
        return Reading(text, block, automatic, None, {"temperature": temperature, "language": language})


class Reading:
    """The keyphrases of a text at any threshold.

    Attributes:
        text: as the user gave it.
        experts: (start, end, preferred expert) of each word, except those that begin no sub-token; empty for a model without experts.
        num_experts: 0 for a model without experts.
    """

    def __init__(self, text: str, block: Block, automatic: list[dict], phrases: list[dict] | None, options=None):
        document, gates = block.documents[0], block.gates.get(0, np.zeros((0, 0)))
        self.text, self.num_experts, self.experts = text, gates.shape[1], []
        for (_, start, end), gate in zip(document.words, gates, strict=False):
            if not np.isnan(gate[0]):
                place = document.to_source(start, end)
                self.experts.append((place["start"], place["end"], int(gate.argmax())))
        self._block, self._automatic, self._phrases, self._options = block, automatic, phrases, options

    def keyphrases(self, threshold: float | None = None) -> list[dict]:
        """Those that the model returns by itself, or those that a threshold selects; best first, as the pipeline returns them."""
        if threshold is None:
            return self._automatic
        if self._phrases is not None:
            return [phrase for phrase in self._phrases if phrase["score"] >= threshold]
        document, p = self._block.documents[0], self._block.probabilities.document(0)
        found = rank_phrases(document.text, document.words, p, threshold, **self._options)
        return [document.phrase_to_source(phrase) for phrase in found[:LISTED]]
