# SPDX-License-Identifier: Apache-2.0
"""Documents in, ranked keyphrases out, whatever runs the model: the part of the keyphrase pipeline that needs neither PyTorch nor
transformers.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np

from .batches import Block, pad_windows, prepare_ahead, split_windows
from .call_options import UNSET, check_batch_size, check_call_options, check_number, check_temperature
from .clean import known_words
from .diversity import WordStates
from .features import MIN_PROBABILITY
from .input_documents import InputDocument, read_document, split_into_blocks
from .ranking import PhraseRanker, select_phrases
from .titles import MAX_TITLE_LENGTH
from .windows import Window, WordProbabilities, encode_windows
from .words import FUNCTION_WORDS, check_language

PREPROCESS_OPTIONS = ("overlap", "max_length", "max_title_length")
SORT_WINDOW = 16  # documents of 16 batches are sorted by length together
DEFAULT_BATCH = (8, 64)  # windows per batch, on a CPU and on an accelerator
DEFAULT_WINDOW = 512  # sub-tokens, where neither the model nor the tokenizer has a limit
ENOUGH_WORDS = 200  # a trained model finds a keyphrase in as many words of nearly all texts
SAMPLE, PROSE = 200, 20  # words of a document by which its language is guessed, and the fewest that suffice
FUNCTIONAL, KNOWN = 0.2, 0.6  # least shares of English words: a list has few function words, but known ones
FOREIGN, NOT_ASCII = 0.05, 0.25  # least shares of foreign function words, and of words with other letters
_FOREIGN = """
    der die und das ist nicht mit von dem ein eine auf sich les des une est dans pour que los las del por con una como il di che per
    della sono nie jest na w z się och att som på det av til ikke het een voor zijn os uma não ve bir bu şi este și az egy je na
"""
FOREIGN_WORDS = frozenset(_FOREIGN.split()) - FUNCTION_WORDS
LONG_DOCUMENT, INTERVAL = 50, 20  # windows of a document whose progress is shown, every so many seconds
logger = logging.getLogger(__name__)


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


class KeyphraseReader(ABC):
    """Reads documents with a token classifier. Subclasses run it: `launch`, and set the attributes.

    Attributes:
        model: with its configuration as `config`.
        tokenizer: called as a fast tokenizer of transformers.
        reads_titles: the model reads titles as meta-text, see `KeyphraseExtractionPipeline`.
        joins_titles: keyphrases are also extracted from titles.
        _limit: the longest window in sub-tokens, `None` for no limit.
        _ahead: batches and blocks in advance; 0 on a CPU.
        _forward_names: the names of the model's inputs.
        _rankers: see `ranking.read_rankers`.
        _batch_size, _preprocess_params, _postprocess_params: defaults of calls.
        iterate: see `shared_seke.TextPipeline`.
    """

    model: Any
    tokenizer: Any
    reads_titles: bool
    joins_titles: bool
    _limit: int | None
    _ahead: int
    _forward_names: set[str]
    _rankers: Mapping[str | None, PhraseRanker]
    _batch_size: int | None
    _preprocess_params: dict
    _postprocess_params: dict
    iterate: Callable[..., Iterable]
    _warned_of_language = False

    @abstractmethod
    def launch(
        self, batch: dict[str, np.ndarray], decode: bool, with_states: bool, with_gates: bool
    ) -> Callable[[], dict[str, np.ndarray]]:
        """Starts the model on a padded batch `(n, S)`, and returns a function that waits for what it computes.

        Args:
            batch: the inputs of the model.
            decode: let a model that decodes labels choose them.
            with_states: also return the backbone's last hidden states.
            with_gates: also return the router's probabilities, if the model has experts.

        Returns:
            `probabilities` `(n, S, 3)` of O, B and I, and if they were computed `tags` `(n, S)`, `classes` `(n, S, 3)`, see
            `features.CLASSES`, `states` `(n, S, d)` and `gates` `(n, S, E)`.
        """

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
        if ranker is None and threshold is None:
            threshold = getattr(config, "keyphrase_threshold", None)
            threshold = check_number("config.keyphrase_threshold", threshold, inside=True)
        temperature = getattr(config, "keyphrase_temperature", None)
        if temperature is not None and (ranker is None) == bool(self._rankers):
            temperature = None
        return Scoring(ranker, threshold, check_temperature(temperature))

    def has_temperature(self, batch_size: int | None = None, **options) -> bool:
        """Whether the model's temperature, if it has one, is applied to the scores of a call with these options."""
        return (self.scoring(**self.merge_options(**options)[1]).ranker is not None) == bool(self._rankers)

    def _sanitize_parameters(self, **options):
        given = check_call_options(**options)
        preprocess_params = {name: given.pop(name) for name in PREPROCESS_OPTIONS if name in given}
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
        preprocess_params, postprocess_params = self.merge_options(**kwargs)
        batch_size = self._batch_size if batch_size is UNSET else check_batch_size(batch_size)
        batch_size = batch_size or DEFAULT_BATCH[bool(self._ahead)]
        if isinstance(inputs, (str, Mapping)):
            return next(self._stream([inputs], batch_size, preprocess_params, postprocess_params))
        if hasattr(inputs, "columns"):
            raise TypeError("Pass the rows of a table: a column, or table[['title', 'text']].to_dict('records').")
        documents = self.iterate(inputs, "a text, {'title': ..., 'text': ...}")
        results = self._stream(documents, batch_size, preprocess_params, postprocess_params)
        return list(results) if isinstance(inputs, (list, tuple)) else results

    def merge_options(self, **kwargs) -> tuple[dict, dict]:
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
        for block in prepare_ahead(blocks, prepare) if self._ahead else map(prepare, blocks):
            finished: dict[int, list[dict]] = {}
            due, unread = 0, len(block.documents)
            words += sum(len(document.words) for document in block.documents)
            for read in self._read_prepared(block, batch_size, postprocess_params):
                finished |= read
                unread -= len(read)
                found = found or any(read.values())
                if not found and not unread:
                    found = warn_if_all_outside(words)
                while due in finished:
                    yield finished.pop(due)
                    due += 1

    def read_block(
        self, documents: Sequence, *, batch_size: int = 8, first: int = 0, **options
    ) -> Iterator[dict[int, list[dict]]]:
        """Reads a block of documents, sorted by length. Yields after each batch the keyphrases of the documents that it completes, by
        their numbers in the block.

        Args:
            documents: a block of `input_documents.split_into_blocks`.
            batch_size, options: as in a call of the pipeline.
            first: the index of the first document, for error messages.
        """
        check_batch_size(batch_size)
        preprocess_params, postprocess_params = self.merge_options(**options)
        block = self.preprocess(documents, first=first, **preprocess_params)
        return self._read_prepared(block, batch_size, postprocess_params)

    def _read_prepared(self, block: Block, batch_size: int, options: dict) -> Iterator[dict[int, list[dict]]]:
        """Reads the block that `preprocess` returned."""
        scoring = self.scoring(**options)
        if (candidates := options.get("candidates")) is not None:
            block.mentions = [candidates.find(document.words, options["language"]) for document in block.documents]
        if options.get("diversity"):
            threshold = scoring.threshold if scoring.ranker is None else MIN_PROBABILITY
            block.states = WordStates(len(block.documents), threshold, block.mentions)
        if options["language"] == "english" and not self._warned_of_language:
            self._warned_of_language = warn_if_not_english(block)
        pending = Counter(window.document for window in block.windows)
        decode = scoring.ranker is None and scoring.threshold is None
        is_long, start, shown = max(pending.values(), default=0) > LONG_DOCUMENT, time.monotonic(), 0.0
        for windows in self.read_windows(block, batch_size=batch_size, decode=decode):
            numbers = Counter(window.document for window in windows)
            pending -= numbers
            seconds, left = time.monotonic() - start, pending.total() / len(block.windows)
            if is_long and left and seconds - shown >= INTERVAL:
                rest, shown = seconds / (1 - left) * left, seconds
                logger.warning(f"Long documents: {1 - left:.0%} is read, the rest takes about {rest / 60:.1f} minutes.")
            complete = [number for number in numbers if number not in pending]
            yield dict(zip(complete, self.postprocess(block, complete, scoring, **options), strict=True))

    def preprocess(
        self,
        documents: Sequence,
        *,
        first=0,
        overlap=None,
        max_length=None,
        max_title_length=MAX_TITLE_LENGTH,
        style_id=0,
    ) -> Block:
        """Cleans and tokenizes documents.

        Args:
            documents: as in a call of the pipeline, or split into words already.
            first: the index of the first document, for error messages.
            overlap, max_length, max_title_length: as in a call of the pipeline.
            style_id: the row of the model's style embedding.
        """
        read = [
            document if isinstance(document, InputDocument) else read_document(document, number, self.joins_titles)
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
            titles=[document.title for document in read] if self.reads_titles else None,
            max_title_length=max_title_length,
        )
        probabilities = WordProbabilities([len(document.words) for document in read])
        return Block(read, windows, max_length, probabilities, first, style_id)

    def batches(self, block: Block, batch_size: int) -> Iterator[tuple[list[Window], dict[str, np.ndarray]]]:
        """The batches of a block's windows, the longest first, and the inputs of the model for each."""
        windows = sorted(block.windows, key=lambda window: len(window.word_starts), reverse=True)
        for batch in split_windows(windows, batch_size, same_number=self.reads_titles):
            inputs = pad_windows(batch, self.tokenizer, self._forward_names)
            if block.style_id:
                inputs["style_ids"] = np.full(len(batch), block.style_id, dtype=np.int64)
            yield batch, inputs

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
        due: deque[tuple[list[Window], Callable]] = deque()  # what the device computes
        for batch in chain(self.batches(block, batch_size), repeat(None, self._ahead)):  # None: nothing more to launch
            if batch is not None:
                windows, inputs = batch
                due.append((windows, self.launch(inputs, decode, block.states is not None, gates)))
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
        block = self.preprocess(documents, **self.merge_options(**options)[0])
        for _ in self.read_windows(block, batch_size=batch_size, gates=gates):
            pass
        return block

    def postprocess(
        self, block: Block, numbers: Sequence[int], scoring: Scoring, *, language: str | None, **options
    ) -> list[list[dict]]:
        """The keyphrases of some documents of a block, best first; `options` are those of a call."""
        for used in ("style", "threshold"):
            options.pop(used, None)
        ranker, threshold, temperature = scoring
        options |= {"language": language, "threshold": threshold, "temperature": temperature}
        found = [block.probabilities.document(number) for number in numbers]
        ranked: Sequence[Any] = [None] * len(numbers)
        if ranker is not None:
            documents = [block.documents[number] for number in numbers]
            read = [(document.text, document.words, p) for document, p in zip(documents, found, strict=True)]
            classes = [block.probabilities.classes(number) for number in numbers] if ranker.reads_classes else None
            ranked = ranker.rank(read, language, temperature, classes)
        return [select_phrases(block, *one, **options) for one in zip(numbers, found, ranked, strict=True)]


def warn_if_not_english(block: Block) -> bool:
    """Warns of the first document that seems not to be English, by its share of function words. Returns whether it has warned."""
    for number, document in enumerate(block.documents, block.first):
        words = [word.lower() for word, _, _ in document.words[:SAMPLE] if any(map(str.isalpha, word))]
        if len(words) < PROSE or sum(word in FUNCTION_WORDS for word in words) >= FUNCTIONAL * len(words):
            continue
        foreign, other = sum(word in FOREIGN_WORDS for word in words), sum(not word.isascii() for word in words)
        is_foreign = foreign >= FOREIGN * len(words) or other >= NOT_ASCII * len(words)
        if is_foreign and sum(word in known_words() for word in words) < KNOWN * len(words):
            logger.warning(
                f"Document {number} seems not to be English: few of its words are English function words. A model that was trained on "
                "English texts finds little in it; language= sets the stemmer only."
            )
            return True
    return False


def warn_if_all_outside(words: int) -> bool:
    """For a model that labels so many words, and all as O, as one does that was trained too little: warns unless they are few.
    Returns whether it has warned.
    """
    if words < ENOUGH_WORDS:
        return False
    logger.warning(
        f"The model labels all {words:,} words as O, so there are no keyphrases. If it is newly trained, train it longer or "
        "with a higher learning rate (1e-3 with LoRA, 1e-4 without), or set model.config.keyphrase_threshold, such as 0.1."
    )
    return True
