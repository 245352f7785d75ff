# SPDX-License-Identifier: Apache-2.0
"""`pipeline("keyphrase-extraction", model=...)`: extracts ranked keyphrases with their offsets from texts.

Works with any token classifier whose labels are B, I and O, with or without types (`B-KEY`, `B`, `I-ORG`, ...). Titles are
passed separately to a model whose forward has an argument `meta_mask`. A model with `decode(..., return_outputs=True)`, which
returns label ids and outputs, chooses the labels by it.
"""

import inspect
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np
import torch

from .batches import BatchRead, Block, pad_windows, prepare_ahead, split_windows, to_device, to_host
from .call_options import UNSET, check_batch_size, check_call_options, check_share, check_temperature
from .dataframes import read_documents, tabulate
from .decoding import O
from .diversity import WordStates, last_states
from .exported_model import ExportedModel
from .input_documents import InputDocument, is_words, read_document, split_into_blocks
from .phrase_features import MIN_PROBABILITY
from .pipeline_base import TextPipeline
from .ranking import PhraseRanker, read_rankers, select_phrases
from .titles import MAX_TITLE_LENGTH
from .token_classifiers import (
    DEFAULT_WINDOW,
    known_limit,
    read_labels,
    unwrap_model,
    warn_if_all_outside,
    without_hooks,
)
from .windows import Window, WordProbabilities, encode_windows
from .word_classes import read_word_classes
from .words import check_language

PREPROCESS_OPTIONS = ("on_long", "overlap", "max_length", "max_title_length")
SORT_WINDOW = 16  # documents of 16 batches are sorted by length together

DEFAULT_BATCH = (8, 64)  # windows per batch, on a CPU and on an accelerator


class Scoring(NamedTuple):
    """What gives the phrases of a call and their scores.

    Attributes:
        ranker: of phrases; `None` for labels.
        threshold: of labels; `None` for the path that the model decodes, or the most likely labels.
        temperature: of the scores.
    """

    ranker: PhraseRanker | None
    threshold: float | None
    temperature: float | None


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
            `words.LANGUAGES`, or `None` for no stemming.
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
        self._rankers, weights = read_rankers(self.model.config), read_word_classes(self.model.config)
        self._word_classes = None if weights is None else tuple(map(torch.from_numpy, weights))
        self.reads_titles = "meta_mask" in self._forward_names
        self.joins_titles = not self.reads_titles or bool(getattr(self.model.config, "title_in_main", False))

    def __getstate__(self) -> dict:
        return without_hooks(self.__dict__)

    @property
    def language(self) -> str | None:
        """The language of stems in calls that name none.

        Raises:
            ValueError: if `config.keyphrase_language` is not a language.
        """
        if "language" in self._postprocess_params:
            return self._postprocess_params["language"]
        return check_language(getattr(self.model.config, "keyphrase_language", "english"))

    def scoring(self, *, style: str | None = None, threshold: float | None = None, candidates=None, **_) -> Scoring:
        """What scores the phrases of a call with these options: the style's ranker, or else the model's. A threshold chooses labels
        instead, and candidates have scores of labels. The model's temperature is that of its rankers, or without a ranker, of its
        labels.
        """
        ranker = None
        if threshold is None and candidates is None:
            ranker = self._rankers.get(style, self._rankers.get(None))
        config = self.model.config
        if (
            ranker is None
            and threshold is None
            and (threshold := getattr(config, "keyphrase_threshold", None)) is not None
        ):
            threshold = check_share("config.keyphrase_threshold", threshold, "the probability of a word", inside=True)
        temperature = getattr(config, "keyphrase_temperature", None)
        if temperature is not None and (ranker is None) == bool(self._rankers):
            temperature = None
        return Scoring(ranker, threshold, None if temperature is None else check_temperature(temperature))

    def has_temperature(self, batch_size: int | None = None, **options) -> bool:
        """Whether the model's temperature, if it has one, is applied to the scores of a call with these options."""
        return (self.scoring(**self._merge_parameters(**options)[1]).ranker is not None) == bool(self._rankers)

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

    def __call__(self, inputs, batch_size: int | None = UNSET, num_workers: int | None = None, **kwargs):
        """Extracts the keyphrases of documents; the arguments are those of the class."""
        preprocess_params, postprocess_params = self._merge_parameters(**kwargs)
        batch_size = self._batch_size if batch_size is UNSET else check_batch_size(batch_size)
        batch_size = batch_size or DEFAULT_BATCH[self.device.type != "cpu"]
        is_document = isinstance(inputs, (str, Mapping)) or (preprocess_params.get("split") and is_words(inputs))
        inputs = inputs if is_document else read_documents(inputs)
        candidates = postprocess_params.get("candidates")
        if candidates is not None and (is_document or hasattr(inputs, "__len__")):
            candidates.check_number(None if is_document else len(inputs))
        if is_document:
            return next(self._stream([inputs], batch_size, preprocess_params, postprocess_params))
        documents = self.iterate(inputs, "a text, {'title': ..., 'text': ...}")
        results = self._stream(documents, batch_size, preprocess_params, postprocess_params)
        return list(results) if isinstance(inputs, (list, tuple)) else results

    def to_dataframe(self, inputs, batch_size: int | None = UNSET, **kwargs):
        """The keyphrases of documents as a pandas DataFrame, one row per keyphrase; see `dataframes.tabulate`.

        Args:
            inputs, batch_size, kwargs: as in a call of the pipeline.

        Raises:
            ImportError: without pandas.
        """
        return tabulate(self, inputs, batch_size=batch_size, **kwargs)

    def _merge_parameters(self, **kwargs) -> tuple[dict, dict]:
        """The parameters of a call, with those of the pipeline as defaults."""
        preprocess_params, _, postprocess_params = self._sanitize_parameters(**kwargs) if kwargs else ({}, {}, {})
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
        found = found or self.scoring(**options).ranker is not None
        first = words = 0

        def prepare(documents: Sequence) -> Block:
            nonlocal first
            begin, first = first, first + len(documents)
            return self.preprocess(documents, first=begin, **preprocess_params)

        blocks = split_into_blocks(documents, SORT_WINDOW * batch_size)
        for block in prepare_ahead(blocks, prepare, self._ahead) if self._ahead else map(prepare, blocks):
            finished: dict[int, list[dict]] = {}
            due, unread = 0, len(block.documents)
            words += sum(len(document.words) for document in block.documents)
            for read in self._read_prepared(block, batch_size, postprocess_params):
                finished |= read.finished
                unread -= len(read.finished)
                found = found or any(read.finished.values())
                if not found and not unread:
                    found = warn_if_all_outside(words)
                while due in finished:
                    yield finished.pop(due)
                    due += 1
        if options.get("candidates") is not None and not isinstance(documents, Sequence):
            options["candidates"].check_number(first)

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

    def _read_prepared(self, block: Block, batch_size: int, options: dict) -> Iterator[BatchRead]:
        """Reads the block that `preprocess` returned."""
        scoring = self.scoring(**options)
        if (candidates := options.get("candidates")) is not None:
            candidates.check_lengths(self.tokenizer, block)
            block.mentions = candidates.find(block, options["language"], options.get("match_case", "auto"))
        if options.get("diversity"):
            threshold = scoring.threshold if scoring.ranker is None else MIN_PROBABILITY
            block.states = WordStates(len(block.documents), threshold, block.mentions)
        counts = Counter(window.document for window in block.windows)
        pending = Counter(counts)
        decode = scoring.ranker is None and scoring.threshold is None
        for windows in self.read_windows(block, batch_size=batch_size, decode=decode):
            numbers = Counter(window.document for window in windows)
            pending -= numbers
            complete = [number for number in numbers if number not in pending]
            finished = dict(zip(complete, self.postprocess(block, complete, scoring, **options), strict=True))
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
    ) -> Block:
        """Cleans and tokenizes documents.

        Args:
            documents: as in a call of the pipeline, or split into words already.
            first: the index of the first document, for error messages.
            split: texts are lists of words.
            on_long, overlap, max_length, max_title_length: as in a call of the pipeline.
            style_id: the row of the model's style embedding.
        """
        read = [
            document
            if isinstance(document, InputDocument)
            else read_document(document, number, split, self.joins_titles)
            for number, document in enumerate(documents, start=first)
        ]
        max_length = max_length or self._limit or DEFAULT_WINDOW
        max_length = max_length if self._limit is None else min(max_length, self._limit)
        windows = encode_windows(
            [document.text for document in read],
            [[(start, end) for _, start, end in document.words] for document in read],
            self.tokenizer,
            max_length=max_length,
            overlap=overlap,
            on_long=on_long,
            first=first,
            titles=[document.title for document in read] if self.reads_titles else None,
            max_title_length=max_title_length,
        )
        probabilities = WordProbabilities([len(document.words) for document in read])
        return Block(read, windows, max_length, probabilities, first, style_id)

    def read_windows(
        self, block: Block, *, batch_size: int = 8, decode: bool = False, gates: bool = False
    ) -> Iterator[list[Window]]:
        """Runs the model on the windows of a block, the longest first, and adds to the block what it computes for words.

        Args:
            block: as `preprocess` returns it; if it has `states`, hidden states are computed.
            batch_size: windows per batch.
            decode: let a model that has `decode` choose the labels.
            gates: also compute the router's probabilities, if the model has experts.

        Yields:
            The windows of each batch, once they have been added.
        """
        self.model.eval()
        windows = sorted(block.windows, key=lambda window: len(window.word_starts), reverse=True)
        batches = split_windows(windows, batch_size, same_number=self.reads_titles)
        due: deque[tuple[list[Window], Callable]] = deque()  # what the device computes
        for batch in chain(batches, repeat(None, self._ahead)):  # None: there is nothing more to launch
            if batch is not None:
                inputs = pad_windows(batch, self.tokenizer, self._forward_names)
                if block.style_id:
                    inputs["style_ids"] = torch.full((len(batch),), block.style_id)
                if self.device.type != "cpu" and self._pack_tokens is not None:
                    inputs["packed_tokens"] = self._pack_tokens(inputs["attention_mask"])
                if self.device.type != "cpu":
                    inputs = to_device(inputs, self.device)
                with self.device_placement(), torch.no_grad():
                    options = {"decode": decode, "with_states": block.states is not None, "with_gates": gates}
                    outputs = self._forward(inputs, **options)
                    due.append((batch, to_host(outputs)))
            if due and (batch is None or len(due) > self._ahead):
                read, wait = due.popleft()
                arrays = wait()
                for row, window in enumerate(read):
                    block.add(window, {name: of[row, : len(window.word_starts)] for name, of in arrays.items()})
                yield read

    def read(self, documents: Sequence, *, batch_size: int = 8, gates: bool = False, **options) -> Block:
        """Documents with what the model computes for their words, whether or not they are in phrases.

        Args:
            documents: as in a call of the pipeline, or `input_documents.InputDocument`.
            batch_size, options: as in a call of the pipeline.
            gates: see `read_windows`.
        """
        block = self.preprocess(documents, **self._merge_parameters(**options)[0])
        for _ in self.read_windows(block, batch_size=batch_size, gates=gates):
            pass
        return block

    def read_words(self, documents: Sequence, **options) -> list[tuple[list, np.ndarray]]:
        """For each document its words, as `words.split_words` returns them, and their probabilities `(W, 3)` of O, B and I.

        Args:
            documents, options: as in `read`.
        """
        block = self.read(documents, **options)
        return [(document.words, block.probabilities.document(i)) for i, document in enumerate(block.documents)]

    def _forward(self, batch: dict, decode: bool = False, with_states: bool = False, with_gates: bool = False) -> dict:
        """`probabilities` `(n, S, 3)` of O, B and I in float32 for a padded batch. With `decode` also the `tags` `(n, S)` of a model
        that decodes them, `with_states` the backbone's last hidden `states` `(n, S, d)`, `with_gates` the router's probabilities
        `(n, S, E)` as `gates`, if the model has experts, and of a model with word classes their probabilities, `classes` `(n, S, 3)`.
        """
        labels: Any = None
        outputs: Any = None
        classify = self._word_classes is not None
        batch = batch | ({"output_hidden_states": True} if with_states or classify else {})
        if decode and callable(self._model_decode):
            labels, outputs = self._model_decode(**batch, return_outputs=True)  # -1 where no word begins
        outputs = outputs or self.model(**batch)
        p = outputs.logits.float().softmax(-1)  # (n, S, C)
        if self._tag_of_label.device != p.device:
            self._tag_of_label = self._tag_of_label.to(p.device)
        zeros, tag_of_label = p.new_zeros(*p.shape[:2], 3), self._tag_of_label
        results = {"probabilities": zeros.index_add(-1, tag_of_label, p)}
        if labels is not None:
            results["tags"] = torch.where(labels < 0, O, tag_of_label[labels.clamp(min=0)])
        if with_states or classify:
            states = last_states(outputs, type(self.model).__name__)
            if with_states:
                results["states"] = states
            if self._word_classes is not None:
                weight, bias = self._word_classes = tuple(part.to(states.device) for part in self._word_classes)
                results["classes"] = torch.nn.functional.linear(states, weight, bias).softmax(-1)
        if with_gates and getattr(outputs, "router_logits", None) is not None:
            results["gates"] = outputs.router_logits.float().softmax(-1)
        return results

    def postprocess(
        self, block: Block, numbers: Sequence[int], scoring: Scoring, *, language: str | None, **options
    ) -> list[list[dict]]:
        """The keyphrases of some documents of a block, best first; `options` are those of a call."""
        for used in ("style", "threshold", "match_case"):
            options.pop(used, None)
        ranker, threshold, temperature = scoring
        options |= {"language": language, "threshold": threshold, "temperature": temperature}
        found = [block.probabilities.document(number) for number in numbers]
        ranked: Sequence[Any] = [None] * len(numbers)
        if ranker is not None:
            read = [block.documents[number] for number in numbers]
            words = [(document.text, document.words, p) for document, p in zip(read, found, strict=True)]
            classes = [block.probabilities.classes(number) for number in numbers] if ranker.reads_shape else None
            ranked = ranker.rank(words, language, temperature, classes)
        return [select_phrases(block, *one, **options) for one in zip(numbers, found, ranked, strict=True)]
