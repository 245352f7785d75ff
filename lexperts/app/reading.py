"""A text that the model has read once. Another threshold only selects among what was found."""

from keyphrase_tools.ranking import rank_phrases
from keyphrase_tools.word_experts import WordExperts, read_word_experts

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
        """Runs the model.

        Raises:
            ValueError: if the model does not have the style.
        """
        words = read_word_experts(self.extract, text, style=style)
        language, (ranker, _, temperature) = self.extract.language, self.extract.scoring(style=style)
        if ranker is not None:
            document = words.document
            (ranked,) = ranker.rank([(document.text, document.words, words.probabilities)], language, temperature)
            number = max(sum(score >= FLOOR for score in ranked.scores), ranked.best_number)
            phrases = [document.phrase_to_source(phrase) for phrase in ranked.phrases(min(number, LISTED))]
            return Reading(text, words, phrases[: ranked.best_number], phrases)
        automatic = self.extract(text, top_k=LISTED, **({} if style is None else {"style": style}))
        return Reading(text, words, automatic, None, {"temperature": temperature, "language": language})


class Reading:
    """The keyphrases of a text at any threshold.

    Attributes:
        text: as the user gave it.
        experts: (start, end, expert) of each word; empty for a model without experts.
        num_experts: 0 for a model without experts.
    """

    def __init__(self, text: str, words: WordExperts, automatic: list[dict], phrases: list[dict] | None, options=None):
        self.text, self.experts = text, words.experts()
        self.num_experts = 0 if words.gates is None else words.gates.shape[1]
        self._words, self._automatic, self._phrases, self._options = words, automatic, phrases, options

    def keyphrases(self, threshold: float | None = None) -> list[dict]:
        """Those that the model returns by itself, or those that a threshold selects; best first, as the pipeline returns them."""
        if threshold is None:
            return self._automatic
        if self._phrases is not None:
            return [phrase for phrase in self._phrases if phrase["score"] >= threshold]
        document = self._words.document
        found = rank_phrases(document.text, document.words, self._words.probabilities, threshold, **self._options)
        return [document.phrase_to_source(phrase) for phrase in found[:LISTED]]
