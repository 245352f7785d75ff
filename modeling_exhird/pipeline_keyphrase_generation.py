"""`pipeline("keyphrase-generation", model=...)`: texts of any length in, keyphrases out, present and absent."""

from collections.abc import Iterable, Mapping, Sequence

from transformers import Pipeline

from .keyphrases_exhird import KeyphraseWriter


class KeyphraseGenerationPipeline(Pipeline):
    """Generates the keyphrases of texts.

    Args:
        inputs: a text, or `{"title": ..., "text": ...}`; a list of them; any other iterable of them, such as a `datasets`
            column, which is read as it is asked for.
        num_keyphrases: the likeliest so many, in the order in which they were generated; by default all.
        batch_size (`int`, default 8): documents that the model reads at once, sorted by length.
        max_phrases, max_phrase_length, exclusion_window: by default the model's configuration.
        num_beams (default 1): hypotheses of each phrase.

    Returns:
        A list of `{"keyphrase", "present", "score", "start", "end"}` for a document, a list of such lists for a list, and
        an iterator of them for anything else. `score` is the phrase's probability after those before it; `start` and
        `end` are places in the text, `None` for absent ones. With a title there is also `field`, which says whether the
        places are the title's or the text's.

    Example:

    ```python
    >>> generate = pipeline("keyphrase-generation", model="my-exhird")
    >>> generate({"title": "Graph cuts", "text": "They segment images. ..."}, num_keyphrases=5)
    ```
    """

    _load_tokenizer = True
    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False

    def _upload_modified_files(self, working_dir, repo_id, *args, **kwargs):
        # the last step of push_to_hub, with transformers' blank card in place
        if hasattr(self.model, "write_model_card"):
            self.model.write_model_card(working_dir, repo_id=repo_id)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)

    def _sanitize_parameters(self, **options):
        return {}, options, {}

    def __call__(self, inputs, batch_size: int | None = None, num_workers: int | None = None, **kwargs):
        options = {**self._forward_params, **self._sanitize_parameters(**kwargs)[1]}
        options["batch_size"] = batch_size if batch_size is not None else self._batch_size or 8
        one = isinstance(inputs, (str, Mapping))
        if not one and (not isinstance(inputs, Iterable) or isinstance(inputs, bytes)):
            raise TypeError(
                f"keyphrase-generation reads a text, a dictionary with 'title' and 'text', or an iterable of them, not a "
                f"{type(inputs).__name__}: {inputs!r:.60}."
            )
        results = self._stream([inputs] if one else inputs, options)
        if one:
            return next(results)
        return list(results) if isinstance(inputs, Sequence) else results

    def _stream(self, documents: Iterable, options: dict):
        with self.device_placement():
            yield from self.postprocess(self._forward(self.preprocess(documents), **options))

    def preprocess(self, documents: Iterable) -> Iterable:
        return documents

    def _forward(self, documents: Iterable, **options) -> Iterable[list[dict]]:
        return KeyphraseWriter(self.model, self.tokenizer, **options).stream(documents)

    def postprocess(self, found: Iterable[list[dict]]) -> Iterable[list[dict]]:
        return found
