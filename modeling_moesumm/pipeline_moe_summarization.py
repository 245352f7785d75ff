# SPDX-License-Identifier: Apache-2.0
"""`pipeline("moe-summarization", model=...)`: summaries of texts of any length, by MoeSumm and stock models."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from .configuration_moesumm import MoeSummConfig
from .generation_moesumm import Summarizer
from .shared_moesumm import TextPipeline

SORT_WINDOW = 16  # batches of texts that are sorted by length together


class MoeSummarizationPipeline(TextPipeline):
    """Summarises texts.

    Args:
        inputs: a text, a list or a `datasets` column of texts, or another iterable or PyTorch data set, which is read lazily.
        dataset: the name of the dataset that the texts resemble, or an iterable with one per text; `None` for the main expert.
        max_length, min_length (or `max_new_tokens`, `min_new_tokens`): tokens of a summary as `generate` counts them.
            Defaults: the model's `generation_config`, else 256 and 0.
        on_long (default `"window"`): what to do with a text that is longer than the model's positions. `"window"` splits it
            at sentence ends into windows, whose summaries are joined, and summarised once more if they are together longer
            than `max_length`. `"error"` raises an error. `"truncate"` reads only its beginning, with a warning.
        batch_size (`int`, default 8): texts and windows per batch, sorted by length.
        generate_kwargs: arguments of `generate`; `num_beams` is 4 unless `generation_config` has another.

    Returns: `[{"summary_text": ...}]` for one text; a list with one such dictionary per text for a list, and an iterator of
    them for other iterables. A summary at its length limit ends at a sentence end; sentences that say nothing new are left out.

    Raises:
        TypeError: for an input of another form.
        ValueError: for an empty text, unknown names and options, lengths beyond the positions, and with `on_long="error"`.

    Example:

    ```python
    >>> summarize = pipeline("moe-summarization", model="my-moesumm")
    >>> summarize("The council met on Monday. ...", dataset="news", max_length=60)
    [{'summary_text': 'The council agreed on a new bridge.'}]
    ```
    """

    def _sanitize_parameters(self, **options):
        return {}, options, {}

    def __call__(self, inputs, batch_size: int | None = None, num_workers: int | None = None, **kwargs):
        """Summarises texts; arguments as for the class."""
        options = dict(self._forward_params)
        for names in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
            if any(name in kwargs for name in names):  # either name overrides both of the pipeline's
                options = {name: value for name, value in options.items() if name not in names}
        options |= kwargs | {"batch_size": self._batch_size or 8 if batch_size is None else batch_size}
        dataset = options.pop("dataset", None)
        if isinstance(inputs, str):
            return list(self._stream([inputs], dataset, options))
        texts = self.iterate(inputs, "a text")
        if isinstance(inputs, Sequence) and not (dataset is None or isinstance(dataset, str)):
            dataset = list(dataset)
            if len(dataset) != len(inputs):
                raise ValueError(f"dataset has {len(dataset)} names for {len(inputs)} texts. Pass one name per text.")
        results = self._stream(texts, dataset, options)
        return list(results) if isinstance(inputs, Sequence) else results

    def _stream(self, texts: Iterable, dataset, options: dict) -> Iterator[dict]:
        """The results in order, computed a few batches at a time."""
        texts, first = iter(texts), 0
        one_name = dataset is None or isinstance(dataset, str)
        names = iter(() if one_name else dataset)
        while chunk := list(islice(texts, SORT_WINDOW * max(options["batch_size"], 1))):
            chunk_names = dataset if one_name else list(islice(names, len(chunk)))
            model_inputs = self.preprocess(chunk, dataset=chunk_names, first=first)
            with self.device_placement():
                summaries = self._forward(model_inputs, **options)
            yield from self.postprocess(summaries)
            first += len(chunk)

    def save_pretrained(self, save_directory, **kwargs):
        """As in transformers; a stock model is saved without this pipeline, so that it does not need this code."""
        if self.model.config.model_type == MoeSummConfig.model_type:
            return super().save_pretrained(save_directory, **kwargs)
        self.model.save_pretrained(save_directory, **kwargs)
        self.tokenizer.save_pretrained(save_directory, **kwargs)

    def preprocess(self, texts: list, dataset=None, first: int = 0) -> dict:
        """Arguments of `Summarizer.__call__`."""
        return {"texts": texts, "dataset": dataset, "first": first}

    def _forward(self, model_inputs: dict, **options) -> list[str]:
        return Summarizer(self.model, self.tokenizer, **options)(**model_inputs)

    def postprocess(self, summaries: list[str]) -> list[dict[str, str]]:
        """One dictionary per summary."""
        return [{"summary_text": summary} for summary in summaries]
