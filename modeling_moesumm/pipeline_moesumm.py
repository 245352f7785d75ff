"""`pipeline("moe-summarization", model=...)`: texts of any length in, summaries out, of MoeSumm and of stock models."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

import transformers
from transformers import AutoModelForSeq2SeqLM, Pipeline
from transformers.pipelines import PIPELINE_REGISTRY

from .configuration_moesumm import MoeSummConfig
from .summarizing_moesumm import Summarizer

BATCHES_AT_A_TIME = 16  # so many batches of texts are sorted by length together


class MoeSummarizationPipeline(Pipeline):
    """Summarises texts.

    Args:
        inputs: a text; a list or a `datasets` column of texts; any other iterable of texts, which is read as it is
            asked for.
        dataset: the name of the dataset that a text is from or like, `None` (the default) for none; one for all texts, or
            an iterable with one for each. A stock model knows none.
        max_length, min_length: tokens of a summary as `generate` counts them, or a share of the source's tokens between 0
            and 1. By default what the model's `generation_config` says, else 256 and 0.
        on_long (default `"window"`): a text that the encoder has no positions for is read in windows of whole sentences,
            whose summaries are joined and, where they are together longer than `max_length`, summarised again; `"error"`
            refuses it, `"truncate"` reads its beginning alone (and so does `truncation=True`).
        batch_size (`int`, default 8): texts and windows that the model reads at once, sorted by length.
        clean_up_tokenization_spaces: as `tokenizer.decode` takes it.
        generate_kwargs: for `generate`, such as `num_beams` (4 unless this or `generation_config` says otherwise),
            `do_sample`, `main_expert_only`.

    Returns:
        `[{"summary_text": ...}]` for a text; a list with one such dictionary a text for a list, and an iterator of them
        for anything else. A summary that ran into its length limit is cut at its last sentence end.

    Example:

    ```python
    >>> summarize = pipeline("moe-summarization", model="my-moesumm")
    >>> summarize("The council met on Monday. ...", dataset="news", max_length=60)
    [{'summary_text': 'The council agreed on a new bridge.'}]
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

    def _sanitize_parameters(self, truncation=None, **options):
        if truncation is not None:
            if truncation and options.get("on_long", "truncate") != "truncate":
                raise ValueError(f"truncation={truncation!r} with on_long={options['on_long']!r}. Pass one of them.")
            if truncation not in (False, "do_not_truncate"):
                options["on_long"] = "truncate"
        for name in ("return_tensors", "return_text"):
            if options.pop(name, None) not in (None, name == "return_text"):
                raise ValueError(
                    f"{name} was given: moe-summarization returns texts. Call model.generate() for tokens."
                )
        return {}, options, {}

    def __call__(self, inputs, batch_size: int | None = None, num_workers: int | None = None, **kwargs):
        made = dict(self._forward_params)
        for names in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
            if any(name in kwargs for name in names):  # the call's length goes over the pipeline's, whichever way given
                made = {name: value for name, value in made.items() if name not in names}
        options = {**made, **self._sanitize_parameters(**kwargs)[1]}
        dataset = options.pop("dataset", None)
        options["batch_size"] = batch_size if batch_size is not None else self._batch_size or 8
        if isinstance(inputs, str):
            return list(self._stream([inputs], dataset, options))
        if not isinstance(inputs, Iterable) or isinstance(inputs, (bytes, Mapping)):
            raise TypeError(
                f"moe-summarization reads a text or an iterable of texts, not a {type(inputs).__name__}: {inputs!r:.60}."
            )
        if isinstance(inputs, Sequence) and not (dataset is None or isinstance(dataset, str)):
            dataset = list(dataset)
            if len(dataset) != len(inputs):
                raise ValueError(
                    f"dataset has {len(dataset)} names for {len(inputs)} texts. Pass one name a text, or one for all."
                )
        results = self._stream(inputs, dataset, options)
        return list(results) if isinstance(inputs, Sequence) else results

    def _stream(self, texts: Iterable, dataset, options: dict) -> Iterator[dict]:
        """Texts -> results, in order, some batches at a time."""
        texts, first = iter(texts), 0
        one = dataset is None or isinstance(dataset, str)
        names = None if one else iter(dataset)
        while chunk := list(islice(texts, BATCHES_AT_A_TIME * max(options["batch_size"], 1))):
            own = dataset if one else list(islice(names, len(chunk)))
            read = self.preprocess(chunk, dataset=own, first=first)
            with self.device_placement():
                written = self._forward(read, **options)
            yield from self.postprocess(written)
            first += len(chunk)

    def save_pretrained(self, save_directory, **kwargs):
        """As in transformers; a stock model is saved as it is, since its checkpoint is to open without this code."""
        if self.model.config.model_type == MoeSummConfig.model_type:
            return super().save_pretrained(save_directory, **kwargs)
        self.model.save_pretrained(save_directory, **kwargs)
        self.tokenizer.save_pretrained(save_directory, **kwargs)

    def preprocess(self, texts: list, dataset=None, first: int = 0) -> dict:
        return {"texts": texts, "dataset": dataset, "first": first}

    def _forward(self, read: dict, **options) -> list[str]:
        return Summarizer(self.model, self.tokenizer, **options)(**read)

    def postprocess(self, written: list[str]) -> list[dict[str, str]]:
        return [{"summary_text": summary} for summary in written]


class SummarizationPipeline(MoeSummarizationPipeline):
    """The same under the name that transformers 5 has given up; see `enable_summarization_task`."""


def enable_summarization_task():
    """Makes `pipeline("summarization", ...)` work again in this process, with `MoeSummarizationPipeline`.

    transformers 5 refuses that name before it looks at what is registered: this takes it from the list of refused names,
    and registers it. It may be called more than once.
    """
    getattr(transformers.pipelines, "REMOVED_TASKS", {}).pop("summarization", None)
    register("summarization", SummarizationPipeline)


def register(task: str, kind: type[Pipeline]):
    """Makes a task known to `pipeline`; once."""
    known = PIPELINE_REGISTRY.supported_tasks.get(task)
    if known is None or known["impl"] is not kind:
        PIPELINE_REGISTRY.register_pipeline(task, pipeline_class=kind, pt_model=AutoModelForSeq2SeqLM, type="text")
