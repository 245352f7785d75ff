# SPDX-License-Identifier: Apache-2.0
"""`pipeline("keyphrase-generation", model=...)`: documents of any length to present and absent keyphrases."""

from collections.abc import Iterable, Mapping, Sequence

from .generation_exhird import KeyphraseGenerator
from .prompted_generation_exhird import PromptedKeyphraseGenerator
from .shared_exhird import TextPipeline

OPTIONS = ("num_keyphrases", "batch_size", "max_phrases", "exclusion_window", "min_phrases")


def make_generator(model, tokenizer, **options) -> KeyphraseGenerator:
    """The engine for a model: an `ExhirdForKeyphraseGeneration`, or a stock decoder."""
    kind = KeyphraseGenerator if model.config.is_encoder_decoder else PromptedKeyphraseGenerator
    return kind(model, tokenizer, **options)


class KeyphraseGenerationPipeline(TextPipeline):
    """Generates the keyphrases of documents.

    Args:
        inputs: a text, or `{"title": ..., "text": ...}`; a list or a `datasets` column of them; or any other iterable or a
            PyTorch data set of them, which is read lazily. A document may have `candidates`, a list of phrases, which a stock
            decoder scores beside those that it generates.
        num_keyphrases (`int`, *optional*): the n most probable phrases, in the order in which they were generated; by
            default all.
        batch_size (`int`, default 8): number of documents per batch; documents are sorted by length.
        max_phrases, max_words_per_phrase, exclusion_window: default to the model's configuration; for a stock decoder
            the second is `max_tokens_per_phrase`.
        min_phrases (`int`): phrases to generate at least, for more suggestions than the model would make; duplicates among them
            are dropped.

    Returns:
        A list of `{"keyphrase", "present", "score", "start", "end"}` for one document, a list of such lists for a list, and
        an iterator over them for any other iterable. `score` is the probability of the phrase given the preceding ones. Of a
        document with `candidates` the most probable come first, each with the probability that the answer begins with it, or if it
        does not occur in the document, that the absent phrases do.
        `start` and `end` are offsets in the text, `None` for absent phrases. If the document has a title, present phrases
        also have `field`: "title" or "text", to which the offsets refer. A document without words has no keyphrases.

    Raises:
        TypeError: for an input that is neither a text, nor a dictionary with one, nor an iterable of them, and for an unknown
            option.
        ValueError: for an option out of range, and a tokenizer of another checkpoint.

    Example:

    ```python
    >>> generate = pipeline("keyphrase-generation", model="my-exhird")
    >>> generate({"title": "Graph cuts", "text": "They segment images. ..."}, num_keyphrases=5)
    ```
    """

    def save_pretrained(self, save_directory, **kwargs):
        """As in transformers, with this code for an `ExhirdForKeyphraseGeneration`. A stock decoder stays one: `pipeline` then needs
        Lexperts.
        """
        if self.model.config.is_encoder_decoder:
            return super().save_pretrained(save_directory, **kwargs)
        for part in (self.model, self.tokenizer):
            part.save_pretrained(save_directory, **kwargs)

    def _sanitize_parameters(self, **options):
        of_phrase = "max_words_per_phrase" if self.model.config.is_encoder_decoder else "max_tokens_per_phrase"
        self.check_options(options, (*OPTIONS, of_phrase))
        return {}, options, {}

    def __call__(self, inputs, batch_size: int | None = None, num_workers: int | None = None, **kwargs):
        """See the class. `num_workers` is ignored."""
        options = {**self._forward_params, **self._sanitize_parameters(batch_size=batch_size, **kwargs)[1]}
        options = {name: value for name, value in options.items() if value is not None}  # None: the option's default
        options.setdefault("batch_size", self._batch_size or 8)
        is_single = isinstance(inputs, (str, Mapping))
        documents = [inputs] if is_single else self.iterate(inputs, "a text, {'title': ..., 'text': ...}")
        results = self._stream(documents, options)
        if is_single:
            return next(results)
        return list(results) if isinstance(inputs, Sequence) else results

    def _stream(self, documents: Iterable, options: dict):
        with self.device_placement():
            yield from self._forward(documents, **options)

    def _forward(self, documents: Iterable, **options) -> Iterable[list[dict]]:
        return make_generator(self.model, self.tokenizer, **options).stream(documents)

    def preprocess(self, documents: Iterable) -> Iterable:
        """Returns its input: `KeyphraseGenerator` tokenizes."""
        return documents

    def postprocess(self, keyphrases: Iterable[list[dict]]) -> Iterable[list[dict]]:
        """Returns its input: `KeyphraseGenerator` returns keyphrases."""
        return keyphrases
