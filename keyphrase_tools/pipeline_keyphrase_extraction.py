"""`pipeline("keyphrase-extraction", model=...)`: extracts ranked keyphrases with their offsets from texts.

Works with any token classifier whose labels are B, I and O, with or without types (`B-KEY`, `B`, `I-ORG`, ...). Titles are
passed separately to a model whose forward has an argument `meta_mask`. A model with `decode(..., return_outputs=True)`, which
returns label ids and outputs, chooses the labels by it.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from .batches import BatchRead, Values, pad_windows, split_windows
from .call_options import check_batch_size, check_call_options, check_share, check_temperature
from .dataframes import read_documents, tabulate
from .decoding import O, word_tags
from .diversity import WordStates, last_states
from .exported_model import ExportedModel
from .input_documents import is_words, read_document, split_into_blocks
from .look_ahead import launch_ahead, prepare_ahead, to_device, to_host
from .phrase_features import FLOOR
from .pipeline_base import TextPipeline
from .ranking import PhraseRanker, read_rankers
from .selection import select_phrases
from .stemming import check_language
from .titles import MAX_TITLE_LENGTH
from .token_classifiers import (
    choose_window,
    expert_weights,
    known_limit,
    read_labels,
    unwrap_model,
    warn_if_all_outside,
    without_hooks,
)
from .windows import Window, WordProbabilities, check_window, encode_windows

PREPROCESS_OPTIONS = ("on_long", "overlap", "max_length", "max_title_length")
SORT_WINDOW = 16  # documents of 16 batches are sorted by length together

DEFAULT_BATCH = (8, 64)  # windows per batch, on a CPU and on an accelerator


class KeyphraseExtractionPipeline(TextPipeline):
    """Extracts keyphrases from texts, with or without titles.

    How titles are used depends on the model. If its forward has no argument `meta_mask`, title and text are joined by
    `words.join_title`, and keyphrases are extracted from both, but never across the two. If it has, the title is meta-text,
    the first sequence of the tokenizer's pair, and keyphrases are extracted from the text only, or with
    `config.title_in_main` from the joined text. In all cases `start` and `end` are offsets in the user's own string, the one
    named by `field`.

    Texts are cleaned first (see `clean_text`): words hyphenated at a line end are joined, soft hyphens are removed, and HTML
    entities are decoded. Offsets are those of the original text.

    All options may be given to `pipeline(...)`, as defaults of this pipeline, and to each call. `None` in a call means the
    default that is named here, also where the pipeline has another.

    Args:
        inputs: a document, a list of documents, or any other iterable of them (a generator, a `datasets` column, a PyTorch
            data set), which is read lazily; also a pandas Series, a DataFrame or a data set with columns `text` and optionally `title`. A
            document is a text or a mapping `{"title": ..., "text": ...}`, whose title may be missing or
            `None`. With `is_split_into_words=True` a text is a list of words; a title is always a string.
        top_k (`int`, default 10): the maximum number of keyphrases per document, `None` for all.
        min_score (`float`): leave out keyphrases with a lower score. By default a model with `config.keyphrase_ranker` returns as
            many as give the highest expected F1, and other models all.
        style (`str`, default none): one of `config.styles`, the style of annotation that is asked for, such as "tags". Its
            ranker in `config.style_rankers` is used, if there is one, or else `config.keyphrase_ranker`.
        threshold (`float`, default `config.keyphrase_threshold`): a word belongs to a keyphrase if its probability of B or I
            reaches the threshold. A model with a ranker ranks by all evidence of the document instead (see `ranking`), unless a
            threshold is given. Without a threshold the model's `decode` chooses the labels (such as the
            best path of a CRF), or if it has none, the most likely labels are used.
        candidates: phrases to score, whether or not the model would extract them: a list for all documents, a mapping from
            names to lists of synonyms, or a list of such lists or mappings, one per document. See `candidates.Candidates`.
        match_case (default `"auto"`): whether candidates differ by case; `"auto"` for those of up to four letters that are all
            capitals, so that "IT" does not match "it".
        diversity (`float`, default 0): chooses the `top_k` by maximal marginal relevance on the model's hidden states, from 0
            (by score only) to 1, among the keyphrases that would be returned without `top_k`. See `diversity.diversify`.
        nested (`bool`, default `True`): whether a keyphrase may be inside another ("webhook" and "webhook endpoint"); with
            `False` the better of the two is returned.
        language (default `config.keyphrase_language`, or "english"): the stemmer by which phrases are compared, one of
            `stemming.LANGUAGES`, or `None` for no stemming.
        batch_size (`int`, default 8, on a GPU 64): windows per batch. Documents are sorted by length first. A batch of shorter windows
            has more rows, as many as fit into the memory of `batch_size` of the longest, at most four times as many.
        on_long (default `"window"`): documents beyond the model's limit are read in overlapping windows, and a word's label
            is taken from the window in which it is furthest from an edge; `"error"` raises, `"truncate"` reads only the
            beginning. A title that is meta-text is part of each window.
        overlap (`int`, default a quarter of a window): sub-tokens that neighbouring windows share.
        max_length (`int`, default the model's limit): sub-tokens per window. A model with relative positions and a tokenizer
            without `model_max_length` have no limit; the default is then 512.
        max_title_length (`int`, default 64): sub-tokens of a title that is meta-text; longer titles are truncated, with a
            warning.
        is_split_into_words (`bool`, default `False`): texts are lists of words, which are not cleaned; offsets refer to
            `" ".join(words)`.
        backend (`"onnx"` or `"openvino"`): of a model that was exported to both; see `export.export_model`.

    Returns:
        For each document a list, best first, of `{"keyphrase", "score", "start", "end", "mentions"}`. The `mentions`
        (`{"start", "end", "score"}`) are all occurrences with equal stems; `keyphrase`, `start` and `end` are those of the
        first, or of the first without a possessive 's. If the document has a title, a keyphrase and each of its mentions also have `"field"`, `"title"` or `"text"`.
        `document[field][start:end]` is the keyphrase, except that white space is a single blank in `keyphrase`, and for
        what cleaning removes. With a ranker a score is the probability that the phrase is a keyphrase; otherwise it is the mean
        probability of the words' labels. If the model has a temperature, `config.keyphrase_temperature`, it is applied to the
        scores of its rankers, or if it has none, of its labels (see `calibration.calibrate`). The result is one such list for a
        document, a list of them for a list, a Series or a DataFrame, and an iterator otherwise.

        With `candidates` every candidate is returned, unless `top_k` or `min_score` is given. Its `keyphrase` is the name
        that the user gave, and `mentions` are the occurrences of the name and its synonyms. Candidates without mentions
        come last; their `score`, `start` and `end` are `None`, and they are left out by a `min_score` above 0. Scores of
        candidates are always mean probabilities of labels.

    Raises:
        TypeError: for a document of another type or with other keys; the message gives its index.
        ValueError: for an argument with an invalid value (see `call_options`), such as a candidate without words or longer than a
            window.

    Example:

    ```python
    >>> extract = pipeline("keyphrase-extraction", model="my-seke")
    >>> extract("Graph cuts solve energy minimisation problems.", top_k=1)
    [{'keyphrase': 'Graph cuts', 'score': 0.93, 'start': 0, 'end': 10, 'mentions': [{'start': 0, 'end': 10, 'score': 0.93}]}]
    ```
    """

    def __init__(self, *args, backend: str | None = None, **kwargs):
        kwargs.pop("local_files_only", None)  # transformers has used it, and passes it on
        model = kwargs.get("model") or args[0]
        if backend is not None and not isinstance(model, ExportedModel):
            model = ExportedModel(model.config._name_or_path, **model.__dict__.get("exported_from", {}))
        model.__dict__.pop("exported_from", None)  # a token, which is not to be pickled
        if isinstance(model, ExportedModel):
            model.open(backend, kwargs.get("tokenizer"))
            args, kwargs = (), {"device": "cpu", **kwargs, "model": model}
        check_batch_size(kwargs.get("batch_size"))
        super().__init__(*args, **kwargs)
        self._tag_of_label = torch.tensor(read_labels(self.model.config.id2label))
        self._ahead = int(self.device.type != "cpu")  # batches and blocks in advance
        self._limit = known_limit(self.tokenizer, self.model)
        model = unwrap_model(self.model)
        self._forward_names = set(inspect.signature(model.forward).parameters)
        self._model_decode: Any = getattr(model, "decode", None)
        self._pack_tokens: Any = getattr(model, "pack_tokens", None)
        self._rankers = read_rankers(self.model.config)

    def __getstate__(self) -> dict:
        return without_hooks(self.__dict__)

    @property
    def reads_titles(self) -> bool:
        """Whether the model reads titles as meta-text."""
        return "meta_mask" in self._forward_names

    @property
    def joins_titles(self) -> bool:
        """Whether titles are joined to the texts, so that keyphrases are also extracted from them."""
        return not self.reads_titles or bool(getattr(self.model.config, "title_in_main", False))

    @property
    def language(self) -> str | None:
        """The language of stems in calls that name none.

        Raises:
            ValueError: if `config.keyphrase_language` is not a language.
        """
        if "language" in self._postprocess_params:
            return self._postprocess_params["language"]
        return check_language(getattr(self.model.config, "keyphrase_language", "english"))

    def ranker(self, style: str | None = None, threshold: float | None = None) -> PhraseRanker | None:
        """What ranks phrases in a call with this style: the style's ranker, or else the model's. `None` if the model has neither,
        and with a threshold, which chooses labels instead."""
        return self._rankers.get(style, self._rankers.get(None)) if threshold is None else None

    def temperature(self, ranker: PhraseRanker | None) -> float | None:
        """The temperature of scores: it belongs to those of rankers, or if the model has no ranker, to those of labels."""
        applies = (ranker is not None) == bool(self._rankers)
        return check_temperature(getattr(self.model.config, "keyphrase_temperature", None)) if applies else None

    def has_temperature(self, batch_size: int | None = None, **options) -> bool:
        """Whether the model's temperature, if it has one, is applied to the scores of a call with these options."""
        merged = self._merge_parameters(**options)[1]
        is_ranked = merged.get("candidates") is None and self.ranker(merged.get("style"), merged.get("threshold"))
        return bool(is_ranked) == bool(self._rankers)

    def _sanitize_parameters(self, **options):
        given = check_call_options(**options)
        names = {"is_split_into_words": "split"} | {name: name for name in PREPROCESS_OPTIONS}
        preprocess_params = {names[name]: given.pop(name) for name in list(given) if name in names}
        if "style" in given:
            preprocess_params["style_id"] = 0 if given["style"] is None else self._style_id(given["style"])
        return preprocess_params, {}, given

    def _style_id(self, style: str) -> int:
        """The row of the model's style embedding."""
        styles = getattr(self.model.config, "styles", None)
        if not styles:
            raise ValueError(f"style={style!r} cannot be used: this model was trained without styles. Leave it out.")
        if style not in styles:
            raise ValueError(f"style={style!r} is not known. Use one of {', '.join(map(repr, styles))}, or none.")
        return styles.index(style) + 1

    def __call__(self, inputs, batch_size: int | None = None, num_workers: int | None = None, **kwargs):
        """Extracts the keyphrases of documents; the arguments are those of the class."""
        preprocess_params, postprocess_params = self._merge_parameters(**kwargs)
        batch_size = check_batch_size(batch_size) or self._batch_size or DEFAULT_BATCH[self.device.type != "cpu"]
        is_document = isinstance(inputs, (str, Mapping)) or (preprocess_params.get("split") and is_words(inputs))
        inputs = inputs if is_document else read_documents(inputs)
        if (candidates := postprocess_params.get("candidates")) is not None:
            candidates.check_inputs(None if is_document else inputs)
        if is_document:
            return next(self._stream([inputs], batch_size, preprocess_params, postprocess_params))
        documents = self.iterate(inputs, "a text, {'title': ..., 'text': ...}")
        results = self._stream(documents, batch_size, preprocess_params, postprocess_params)
        return list(results) if isinstance(inputs, (list, tuple)) else results

    def to_dataframe(self, inputs, batch_size: int | None = None, **kwargs):
        """The keyphrases of documents as a pandas DataFrame, one row per keyphrase; see `dataframes.tabulate`.

        Args:
            inputs, batch_size, kwargs: as in a call of the pipeline.

        Raises:
            ImportError: without pandas.
        """
        return tabulate(self, inputs, batch_size=batch_size, **kwargs)

    def _merge_parameters(self, **kwargs) -> tuple[dict, dict]:
        """The parameters of a call, with those of the pipeline as defaults."""
        preprocess_params, _, postprocess_params = self._sanitize_parameters(**kwargs)
        postprocess_params = {**self._postprocess_params, **postprocess_params}
        postprocess_params.setdefault("language", self.language)
        if postprocess_params.get("candidates") is not None:
            postprocess_params.setdefault("top_k", None)
        return {**self._preprocess_params, **preprocess_params}, postprocess_params

    def _stream(
        self, documents: Iterable, batch_size: int, preprocess_params: dict, postprocess_params: dict
    ) -> Iterator[list[dict]]:
        """Yields the results in the documents' order, block by block."""
        options = postprocess_params
        found = bool(options.get("candidates") is not None or options.get("min_score"))  # or that is not to be expected
        found = found or self.ranker(options.get("style"), options.get("threshold")) is not None
        first = words = 0

        def prepare(documents: Sequence) -> dict:
            nonlocal first
            begin, first = first, first + len(documents)
            return self.preprocess(documents, first=begin, **preprocess_params)

        blocks = split_into_blocks(documents, SORT_WINDOW * batch_size)
        for block in prepare_ahead(blocks, prepare, self._ahead):
            finished: dict[int, list[dict]] = {}
            due, unread = 0, len(block["documents"])
            words += sum(map(len, block["words"]))
            for read in self._read_prepared(block, batch_size, postprocess_params):
                finished |= read.finished
                unread -= len(read.finished)
                found = found or any(read.finished.values())
                if not found and not unread:
                    found = warn_if_all_outside(words)
                while due in finished:
                    yield finished.pop(due)
                    due += 1

    def read_block(self, documents: Sequence, *, batch_size: int = 8, first: int = 0, **options) -> Iterator[BatchRead]:
        """Reads a block of documents, sorted by length, and yields the results of each batch once computed.

        Args:
            documents: a block of `input_documents.split_into_blocks`.
            batch_size, options: as in a call of the pipeline.
            first: the index of the first document, for error messages.
        """
        check_batch_size(batch_size)
        preprocess_params, postprocess_params = self._merge_parameters(**options)
        block = self.preprocess(documents, first=first, **preprocess_params)
        return self._read_prepared(block, batch_size, postprocess_params)

    def _read_prepared(self, block: dict, batch_size: int, postprocess_params: dict) -> Iterator[BatchRead]:
        """Reads the block that `preprocess` returned."""
        self.model.eval()
        threshold = self._threshold(postprocess_params.get("threshold"))
        decode = callable(self._model_decode) and threshold is None
        first, size = block["first"], len(block["documents"])
        if (candidates := postprocess_params.get("candidates")) is not None:
            candidates.check_lengths(self.tokenizer, block["max_length"], range(first, first + size))
            how = (postprocess_params["language"], postprocess_params.get("match_case", "auto"))
            block["spans"] = candidates.find(block["words"], first, *how)
        launch = partial(self._launch, style_id=block["style_id"])
        if postprocess_params.get("diversity", 0) > 0:
            block["word_states"] = WordStates(size, block.get("spans"))
            launch = partial(launch, with_states=True)
        ranker = self.ranker(postprocess_params.get("style"), postprocess_params.get("threshold"))
        in_phrases = threshold if ranker is None else FLOOR
        windows = sorted(block["windows"], key=lambda window: len(window.word_starts), reverse=True)
        counts = Counter(window.document for window in windows)
        pending = Counter(counts)
        batches = split_windows(windows, batch_size, same_number=self.reads_titles)
        for batch, wait in launch_ahead(batches, lambda batch: launch(batch, decode), self._ahead):
            for window, (p, tags, *states) in zip(batch, self._values(batch, wait()), strict=True):
                block["word_probabilities"].add(window, p, tags)
                if states:
                    block["word_states"].add(window, *states, word_tags(p, in_phrases) if tags is None else tags)
            numbers = Counter(window.document for window in batch)
            pending -= numbers
            complete = [n for n in numbers if n not in pending]
            finished = dict(zip(complete, self._phrases(block, complete, **postprocess_params), strict=True))
            yield BatchRead(finished, {number: n / counts[number] for number, n in numbers.items()})

    def preprocess(
        self,
        documents: Sequence,
        *,
        first=0,
        split=False,
        on_long="window",
        overlap=None,
        max_length=None,
        max_title_length=MAX_TITLE_LENGTH,
        style_id=0,
    ):
        """Cleans and tokenizes documents: their texts, words and windows, and placeholders for the words' probabilities."""
        input_documents = [
            read_document(document, number, split, self.joins_titles)
            for number, document in enumerate(documents, start=first)
        ]
        texts = [document.text for document in input_documents]
        words = [document.words for document in input_documents]
        limit = check_window(self.tokenizer, choose_window(self._limit, max_length), overlap, on_long)[0]
        windows = encode_windows(
            texts,
            [[(start, end) for _, start, end in of_document] for of_document in words],
            self.tokenizer,
            max_length=limit,
            overlap=overlap,
            on_long=on_long,
            first=first,
            titles=[document.title for document in input_documents] if self.reads_titles else None,
            max_title_length=max_title_length,
        )
        return {
            "documents": input_documents,
            "first": first,
            "texts": texts,
            "words": words,
            "windows": windows,
            "max_length": limit,
            "style_id": style_id,
            "word_probabilities": WordProbabilities([*map(len, words)]),
        }

    def read_words(self, documents: Sequence, *, batch_size: int = 8, **options) -> list[tuple[list, np.ndarray]]:
        """For each document its words, as `words.split_words` returns them, and their probabilities `(W, 3)` of O, B and I.

        Args:
            documents, options: as in a call of the pipeline.
        """
        self.model.eval()
        block = self.preprocess(documents, **self._merge_parameters(**options)[0])
        windows = sorted(block["windows"], key=lambda window: len(window.word_starts), reverse=True)
        for batch in split_windows(windows, batch_size, same_number=self.reads_titles):
            for window, values in zip(batch, self._read(batch, style_id=block["style_id"]), strict=True):
                block["word_probabilities"].add(window, *values)
        return [(words, block["word_probabilities"].document(number)) for number, words in enumerate(block["words"])]

    def _launch(
        self, windows: list[Window], decode: bool = False, style_id: int = 0, **extra
    ) -> Callable[[], dict[str, np.ndarray]]:
        """Runs the model on a batch of windows. A GPU may still be running when this returns a function that gives the outputs."""
        batch = pad_windows(windows, self.tokenizer, self._forward_names)
        if style_id:
            batch["style_ids"] = torch.full((len(windows),), style_id)
        if self.device.type != "cpu" and self._pack_tokens is not None:
            batch["packed_tokens"] = self._pack_tokens(batch["attention_mask"])
        with self.device_placement(), torch.no_grad():
            return to_host(self._forward(to_device(batch, self.device), decode=decode, **extra))

    def _read(self, windows: list[Window], **options) -> list[Values]:
        """Runs the model on a batch of windows, and waits for the outputs."""
        return self._values(windows, self._launch(windows, **options)())

    def _values(self, windows: list[Window], outputs: dict[str, np.ndarray]) -> list[Values]:
        """The outputs of each window, without padding; with hidden states `(S, d)` or gates `(S, E)` if there are any."""
        p, tags = outputs["probabilities"], outputs.get("tags")
        extra = [outputs[name] for name in ("states", "gates") if name in outputs]
        return [
            (p[n, :length], None if tags is None else tags[n, :length], *(of[n, :length] for of in extra))
            for n, length in enumerate(len(window.word_starts) for window in windows)
        ]

    def _forward(self, batch: dict, decode: bool = False, with_states: bool = False, with_gates: bool = False) -> dict:
        """Probabilities `(n, S, 3)` of O, B and I in float32 for a padded batch; with `decode` also tags `(n, S)`,
        `with_states` the backbone's last hidden states `(n, S, d)`, and `with_gates` the weights `(n, S, E)` of experts."""
        labels: Any = None
        outputs: Any = None
        batch = batch | ({"output_hidden_states": True} if with_states else {})
        if decode:
            labels, outputs = self._model_decode(**batch, return_outputs=True)  # -1 where no word begins
        outputs = outputs or self.model(**batch)
        p = outputs.logits.float().softmax(-1)  # (n, S, C)
        if self._tag_of_label.device != p.device:
            self._tag_of_label = self._tag_of_label.to(p.device)
        zeros, tag_of_label = p.new_zeros(*p.shape[:2], 3), self._tag_of_label
        results = {"probabilities": zeros.index_add(-1, tag_of_label, p)}
        if decode:
            results["tags"] = torch.where(labels < 0, O, tag_of_label[labels.clamp(min=0)])
        if with_states:
            results["states"] = last_states(outputs, type(self.model).__name__)
        if with_gates and getattr(outputs, "router_logits", None) is not None:
            results["gates"] = expert_weights(outputs.router_logits.float(), getattr(outputs, "expert_index", None))
        return results

    def _threshold(self, threshold: float | None) -> float | None:
        """The threshold of the call, or else of the model."""
        own = getattr(self.model.config, "keyphrase_threshold", None)
        meaning = "the probability of a word"
        return check_share("config.keyphrase_threshold", own, meaning, inside=True) if threshold is None else threshold

    def postprocess(self, block: dict, **postprocess_params) -> list[list[dict]]:
        """The keyphrases of each document, best first."""
        return self._phrases(block, range(len(block["documents"])), **postprocess_params)

    def _phrases(
        self, block: dict, numbers: Sequence[int], *, language="english", style=None, threshold=None, **options
    ) -> list[list[dict]]:
        """The keyphrases of some documents of a block."""
        found = [block["word_probabilities"].document(number) for number in numbers]
        ranked: Sequence[Any] = [None] * len(numbers)
        ranker = None if options.get("candidates") is not None else self.ranker(style, threshold)
        temperature = self.temperature(ranker)
        if ranker is not None:
            documents = [(block["texts"][n], block["words"][n], p) for n, p in zip(numbers, found, strict=True)]
            ranked = ranker.rank(documents, language, temperature)
        options |= {"language": language, "threshold": self._threshold(threshold), "temperature": temperature}
        return [select_phrases(block, *one, **options) for one in zip(numbers, found, ranked, strict=True)]
