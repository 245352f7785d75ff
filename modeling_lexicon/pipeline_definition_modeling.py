# SPDX-License-Identifier: Apache-2.0
"""`pipeline("definition-modeling", model=...)`: terms in context in, definitions out, for mixtures and dense Llamas."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from .generation_lexicon import DefinitionGenerator
from .shared_lexicon import TextPipeline

OPTIONS = ("best_of", "num_definitions", "reward_model", "domain_ids", "embedder", "max_new_tokens", "batch_size")
SORT_WINDOW = 16  # batches whose rows are sorted by length together


class DefinitionModelingPipeline(TextPipeline):
    """Defines terms as they are used in their contexts.

    Args:
        inputs: `{"term", "context"}`; a list or a `datasets` column of them; or any other iterable or a PyTorch data set of
            them, which is read lazily.
        best_of (`int`, default 1, or 8 for several definitions): number of definitions that are sampled per row; the best one
            is returned. With 1, decoding is greedy (unless `do_sample=True`).
        num_definitions (`int`, default 1): maximum number of definitions to return, best first. They are all different, so
            there can be fewer. An empty definition is returned only if all samples are empty.
        reward_model: an `AutoModelForSequenceClassification` with one label that reads prompt and definition, or its folder or
            Hub id. It ranks the samples; by default they are ranked by the mean log-probability of their tokens.
        domain_ids: the expert for all rows, or one per row, if the model routes by domain. By default the expert of the
            nearest centroid, or the one that the model's domain gate selects.
        embedder: the sentence embedder of the centroids, as in `assign_domains`; by default the configuration's.
        max_new_tokens (`int`, default 64): maximum length of a definition in tokens. A context that leaves no room for them is
            truncated on both sides of the term, with a warning.
        batch_size (`int`, default 8): number of rows per forward pass, sorted by length.
        generate_kwargs: for `generate`. Samples use temperature 0.6, top_k 50, top_p 0.9 and repetition_penalty 1.05, as in
            the paper, unless they are set.

    Returns:
        `{"term", "definition", "score"}` per row, or a list of them with `num_definitions` above 1; a list of these for a
        list, and an iterator for other iterables. `score` is the geometric mean of the token probabilities, or the reward. If
        centroids selected the expert, also `domain` and its `distance`.

    Raises:
        TypeError: for an input of another form, with its row number in the message.
        ValueError: for an unknown option, or one out of range; and for fewer `domain_ids` than rows, or more than a list has rows.

    Example:

    ```python
    >>> define = pipeline("definition-modeling", model="my-lexicon")
    >>> define({"term": "bank", "context": "They sat on the bank of the river."}, best_of=8)
    {'term': 'bank', 'definition': 'the land along a river', 'score': 0.41, 'domain': 2, 'distance': 0.83}
    ```
    """

    def _sanitize_parameters(self, **options):
        return {}, options, {}

    def __call__(self, inputs, batch_size: int | None = None, num_workers: int | None = None, **kwargs):
        """See the class."""
        options = {**self._forward_params, **self._sanitize_parameters(batch_size=batch_size, **kwargs)[1]}
        options = {name: value for name, value in options.items() if value is not None or name not in OPTIONS}
        batch_size = options.pop("batch_size", self._batch_size or 8)
        is_single = isinstance(inputs, Mapping)
        rows = [inputs] if is_single else self.iterate(inputs, "{'term': ..., 'context': ...}")
        count = len(rows) if isinstance(rows, Sequence) else None
        results = self._stream(rows, batch_size, options, count)
        if is_single:
            return next(results)
        return list(results) if isinstance(inputs, Sequence) else results

    def _stream(self, rows: Iterable, batch_size: int, options: dict, count: int | None) -> Iterator:
        generator = self.preprocess(options)
        if count is not None:
            generator.check_domains(count)
        rows, first = iter(rows), 0
        with self.device_placement():
            while chunk := list(islice(rows, SORT_WINDOW * max(batch_size, 1))):
                yield from self.postprocess(self._forward(generator, chunk, first=first, batch_size=batch_size))
                first += len(chunk)

    # The generator sorts and batches rows itself, so that these steps of `Pipeline` have little to do.

    def preprocess(self, options: dict) -> DefinitionGenerator:
        """The generator with the options of this call."""
        return DefinitionGenerator(self.model, self.tokenizer, **options)

    def _forward(self, generator: DefinitionGenerator, rows: list, **options) -> list:
        return generator(rows, **options)

    def postprocess(self, outputs: list) -> list:
        """The outputs, unchanged."""
        return outputs
