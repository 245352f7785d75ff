"""One text, read once: the probabilities of its words, and the experts that read them.

What an interface needs to choose another threshold, or to colour words by expert, without running the model again.
"""

from typing import NamedTuple

import numpy as np

from .input_documents import InputDocument
from .pipeline_keyphrase_extraction import KeyphraseExtractionPipeline


class WordExperts(NamedTuple):
    """What a model computes for the W words of a text.

    Attributes:
        document: the cleaned text, its words, and the mapping of offsets to the user's text.
        probabilities: of O, B and I, `(W, 3)`.
        gates: the router's probabilities of E experts, `(W, E)`, nan for a word that begins no sub-token; `None` for a model without
            experts.
    """

    document: InputDocument
    probabilities: np.ndarray
    gates: np.ndarray | None

    def experts(self) -> list[tuple[int, int, int]]:
        """(start, end, preferred expert) of each word in the user's text; a word without an expert of its own is left out."""
        if self.gates is None:
            return []
        spans = []
        for (_, start, end), gate in zip(self.document.words, self.gates, strict=True):
            if not np.isnan(gate[0]):
                place = self.document.to_source(start, end)
                spans.append((place["start"], place["end"], int(gate.argmax())))
        return spans


def read_word_experts(
    extract: KeyphraseExtractionPipeline, text: str, *, style: str | None = None, batch_size: int = 8
) -> WordExperts:
    """Reads a text without a title by a keyphrase pipeline.

    Args:
        extract: the pipeline.
        text: of any length; long ones are read in overlapping windows.
        style: as in a call of the pipeline.
        batch_size: windows per batch.

    Raises:
        ValueError: if the model does not have the style.
    """
    block = extract.read([text], style=style, batch_size=batch_size, gates=True)
    return WordExperts(block.documents[0], block.probabilities.document(0), block.gates.get(0))
