"""`pipeline("definition-modeling", model=...)`: terms in contexts in, definitions out, of a mixture or of a dense Llama."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from transformers import Pipeline

from .defining_lexicon import Definer

BATCHES_AT_A_TIME = 16  # so many batches of rows are sorted by length together


class DefinitionModelingPipeline(Pipeline):
    """Defines terms as they are used in their contexts.

    Args:
        inputs: `{"term", "context"}`; a list or a `datasets` column of them; any other iterable, which is read as it is asked for.
        best_of (`int`, default 1): definitions that are sampled for a row, of which the best is taken. With 1, the likeliest
            token at each step (unless `do_sample=True`).
        num_definitions (`int`, default 1): how many of them are returned at most, best first. No two are the same text, so
            that there can be fewer; an empty one is returned only where all are empty.
        reward_model: an `AutoModelForSequenceClassification` of one label that reads prompt and definition, or its folder or
            Hub id, by which the best are chosen; by default the likeliest, by the mean log-probability of their tokens.
        domain_ids: the expert for a row, or one for each, where the model routes by domain; by default the nearest of the
            model's centroids, or its learnt gate.
        embedder: for the centroids, as `assign_domains` takes it; by default the configuration's.
        max_new_tokens (`int`, default 64): of a definition.
        on_long (default `"cut"`): a context that the model has no positions for is cut on both sides of the term, with a
            warning; `"error"` refuses it.
        batch_size (`int`, default 8): rows that the model reads at once, sorted by length.
        generate_kwargs: for `generate`. Samples are drawn with temperature 0.6, top_k 50, top_p 0.9 and repetition_penalty
            1.05, as the paper draws them, unless these say otherwise.

    Returns:
        `{"term", "definition", "score"}` for a row, or with `num_definitions` above 1 a list of them; a list with one such
        answer a row for a list, and an iterator for anything else. `score` is the geometric mean of the tokens' probabilities,
        or the reward. Where centroids chose an expert, also `domain` and its `distance`.

    Raises:
        TypeError: for a row of another form; it is named by its number.

    Example:

    ```python
    >>> define = pipeline("definition-modeling", model="my-lexicon")
    >>> define({"term": "bank", "context": "They sat on the bank of the river."}, best_of=8)
    {'term': 'bank', 'definition': 'the land along a river', 'score': 0.41, 'domain': 2, 'distance': 0.83}
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
        options = {**self._forward_params, **kwargs}
        batch_size = batch_size or self._batch_size or 8
        one = isinstance(inputs, Mapping)
        if not one and (not isinstance(inputs, Iterable) or isinstance(inputs, (str, bytes))):
            raise TypeError(
                "definition-modeling reads {'term': ..., 'context': ...} or an iterable of them, not a "
                f"{type(inputs).__name__}: {inputs!r:.60}."
            )
        results = self._stream([inputs] if one else inputs, batch_size, options)
        if one:
            return next(results)
        return list(results) if isinstance(inputs, Sequence) else results

    def _stream(self, rows: Iterable, batch_size: int, options: dict) -> Iterator:
        definer = self.preprocess(options)
        rows, first = iter(rows), 0
        with self.device_placement():
            while chunk := list(islice(rows, BATCHES_AT_A_TIME * batch_size)):
                yield from self.postprocess(self._forward(definer, chunk, first=first, batch_size=batch_size))
                first += len(chunk)

    def preprocess(self, options: dict) -> Definer:
        return Definer(self.model, self.tokenizer, **options)

    def _forward(self, definer: Definer, rows: list, **place) -> list:
        return definer(rows, **place)

    def postprocess(self, found: list) -> list:
        return found
