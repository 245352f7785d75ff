"""One text, read once: the probabilities of its words, and the weights of the experts that read them.

What an interface needs to choose another threshold, or to colour words by expert, without running the model again.
"""

from typing import NamedTuple

import numpy as np

from .batches import split_windows
from .input_documents import InputDocument
from .pipeline_keyphrase_extraction import KeyphraseExtractionPipeline


class WordExperts(NamedTuple):
    """What a model computes for the W words of a text.

    Attributes:
        document: the cleaned text, its words, and the mapping of offsets to the user's text.
        probabilities: of O, B and I, `(W, 3)`.
        gates: the weight of each of E experts, `(W, E)`, 0 for those that were not chosen, nan for a word that begins no sub-token;
            `None` for a model without experts.
    """

    document: InputDocument
    probabilities: np.ndarray
    gates: np.ndarray | None

    def experts(self) -> list[tuple[int, int, int]]:
        """(start, end, expert) of each word in the user's text; a word without an expert of its own is left out."""
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
    extract.model.eval()
    block = extract.preprocess([text], **extract._merge_parameters(style=style)[0])
    windows = sorted(block["windows"], key=lambda window: len(window.word_starts), reverse=True)
    gates, distance = None, np.full(len(block["words"][0]), -1)
    for batch in split_windows(windows, batch_size, same_number=extract.reads_titles):
        for window, (p, _, *found) in zip(
            batch, extract._read(batch, style_id=block["style_id"], with_gates=True), strict=True
        ):
            block["word_probabilities"].add(window, p)
            if not found:
                continue
            if gates is None:
                gates = np.full((len(distance), found[0].shape[-1]), np.nan)
            index = np.flatnonzero(window.word_starts >= 0)
            index = index[window.edge_distance[index] > distance[window.word_starts[index]]]
            words = window.word_starts[index]
            gates[words], distance[words] = found[0][index], window.edge_distance[index]
    return WordExperts(block["documents"][0], block["word_probabilities"].document(0), gates)
