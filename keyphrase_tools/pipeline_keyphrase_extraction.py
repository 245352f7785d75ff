"""`pipeline("keyphrase-extraction", model=...)`: texts in, ranked keyphrases with their places out.

Works with any token classifier whose labels are B, I and O, with or without types (`B-KEY`, `B`, `I-ORG`, ...). A model
whose forward names `meta_mask` reads titles beside the text; one with `decode(..., return_outputs=True)`, which gives
label ids and its output, chooses its labels by that.
"""

import inspect
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from transformers import Pipeline

from .decoding import B, I, O, rank_phrases
from .input_documents import blocks, is_words, read_document
from .titles import MASKS, MAX_TITLE_LENGTH, pad_masks
from .windows import NO_LIMIT, Window, WordProbabilities, check_window, encode_windows

GROWTH = 4  # so many times as many short windows as long ones are read at once
BATCHES_AT_A_TIME = 16  # so many batches of documents are sorted by length together

Values = tuple[np.ndarray, np.ndarray | None]  # of a window's sub-tokens: probabilities (S, 3) of O, B and I; tags (S)


class BatchRead(NamedTuple):
    """What one batch of `KeyphraseExtractionPipeline.read_block` has given; documents are numbered within the block.

    Attributes:
        finished: the keyphrases of each document whose last window this was.
        shares: for each document in the batch, the share of its windows that were in it.
        windows: of the documents not finished yet, {(document, window): what the model gave}.
    """

    finished: dict[int, list[dict]]
    shares: dict[int, float]
    windows: dict[tuple[int, int], Values]


class KeyphraseExtractionPipeline(Pipeline):
    """Draws keyphrases from texts, with or without titles.

    How a title is read is up to the model. If its forward names no `meta_mask`, title and text are joined by
    `words.join_title`, and keyphrases are sought in both, none across the two. If it does, the title is meta-text, the first
    of the tokenizer's pair, and keyphrases are sought in the text alone; with `config.title_in_main` in the joined text,
    beside the title. Either way `start` and `end` are offsets in the caller's own string, the one that `field` names.

    Texts are cleaned before they are read, see `clean_text`: words hyphenated at a line end are joined, soft hyphens left
    out and HTML entities read as characters. Offsets stay those of the original text.

    Args:
        inputs: a document; a list of documents; any other iterable of them (a generator, a `datasets` column), which is
            read as it is asked for. A document is a text or a mapping `{"title": ..., "text": ...}`, whose title may be
            missing or `None`. With `is_split_into_words=True` a text is a list of words; a title never is.
        top_k (`int`, default 10): at most so many phrases a document, `None` for all.
        min_score (`float`, default 0): leave out phrases with a lower score.
        threshold (`float`, default the model's own, `config.keyphrase_threshold`): a word belongs to a keyphrase where its
            probability of B or I reaches it. Where neither says anything, the model's `decode` decides, such as the best
            path of a CRF, or, if it has none, the likeliest label.
        batch_size (`int`, default 8): windows that the model reads at once. Documents are sorted by length first, and of
            shorter windows as many are read as fit into the room of so many of the longest, up to four times as many.
        on_long (default `"window"`): documents beyond the model's limit are read in overlapping windows, and a word's
            label is taken from the window in which it stands furthest from a cut edge; `"error"` refuses them,
            `"truncate"` reads their beginning only. A title that is meta-text stands in each window.
        overlap (`int`, default a quarter of a window): sub-tokens that neighbouring windows share.
        max_length (`int`, default the model's limit): sub-tokens a window.
        max_title_length (`int`, default 64): sub-tokens of a title that is meta-text; longer ones are cut, with a warning.
        is_split_into_words (`bool`, default `False`): texts are lists of words, which are read as they are; offsets then refer
            to `" ".join(words)`.

    Returns:
        For each document a list, best first, of `{"keyphrase", "score", "start", "end", "mentions"}`: the form and the place
        of the first of its `mentions` (`{"start", "end", "score"}`), which are all those of equal stems. If the document has
        a title, a keyphrase and each of its mentions also have `"field"`, `"title"` or `"text"`. `document[field][start:end]`
        is the keyphrase, but for white space, which is a single blank in `keyphrase`, and for what cleaning takes out.
        A score is the words' mean probability of their labels, at the temperature `config.keyphrase_temperature` if the
        model has one, which `calibration.calibrate` finds. One such list for a document, a list of them for a list, an
        iterator for anything else.

    Raises:
        TypeError: for a document of another type or with other keys; it is named by its number.

    Example:

    ```python
    >>> extract = pipeline("keyphrase-extraction", model="my-seke")
    >>> extract("Graph cuts solve energy minimisation problems.", top_k=1)
    [{'keyphrase': 'Graph cuts', 'score': 0.93, 'start': 0, 'end': 10, 'mentions': [{'start': 0, 'end': 10, 'score': 0.93}]}]
    ```
    """

    _load_tokenizer = True
    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._tag_of_label = read_labels(self.model.config.id2label)
        self._limit = length_limit(self.tokenizer, self.model)
        model = unwrapped(self.model)
        self._forward_names = set(inspect.signature(model.forward).parameters)
        self._model_decode = getattr(model, "decode", None)

    @property
    def reads_titles(self) -> bool:
        """Whether the model reads titles as meta-text."""
        return "meta_mask" in self._forward_names

    @property
    def joins_titles(self) -> bool:
        """Whether titles are joined to the texts, so that keyphrases are sought in them."""
        return not self.reads_titles or bool(getattr(self.model.config, "title_in_main", False))

    def _upload_modified_files(self, working_dir, repo_id, *args, **kwargs):
        # the last step of push_to_hub, with transformers' blank card in place
        if hasattr(self.model, "write_model_card"):
            self.model.write_model_card(working_dir, repo_id=repo_id)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)

    def _sanitize_parameters(
        self,
        top_k="unset",
        min_score=None,
        threshold=None,
        on_long=None,
        overlap=None,
        max_length=None,
        max_title_length=None,
        is_split_into_words=None,
        **unknown,
    ):
        if unknown:
            raise TypeError(
                f"keyphrase-extraction got {', '.join(map(repr, unknown))}. It takes top_k, min_score, threshold, "
                "batch_size, on_long, overlap, max_length, max_title_length and is_split_into_words."
            )
        reading = {
            "on_long": on_long,
            "overlap": overlap,
            "max_length": max_length,
            "max_title_length": max_title_length,
            "split": is_split_into_words,
        }
        choosing = {} if min_score is None else {"min_score": min_score}
        if threshold is not None:
            if not 0 < threshold < 1:
                raise ValueError(f"threshold={threshold}: it is a probability, between 0 and 1.")
            choosing["threshold"] = threshold
        if top_k != "unset":
            if top_k is not None and top_k < 1:
                raise ValueError(f"top_k={top_k}: ask for at least one phrase, or for all of them with top_k=None.")
            choosing["top_k"] = top_k
        return *({k: v for k, v in part.items() if v is not None} for part in (reading, {})), choosing

    def __call__(self, inputs, batch_size: int | None = None, num_workers: int | None = None, **kwargs):
        reading, _, choosing = self._sanitize_parameters(**kwargs)
        reading = {**self._preprocess_params, **reading}
        choosing = {**self._postprocess_params, **choosing}
        batch_size = batch_size or self._batch_size or 8
        if isinstance(inputs, (str, Mapping)) or (reading.get("split") and is_words(inputs)):
            return next(self._stream([inputs], batch_size, reading, choosing))
        if not isinstance(inputs, Iterable) or isinstance(inputs, bytes):
            raise TypeError(
                f"keyphrase-extraction reads a text or an iterable of texts, not a {type(inputs).__name__}: {inputs!r:.60}."
            )
        results = self._stream(inputs, batch_size, reading, choosing)
        return list(results) if isinstance(inputs, (list, tuple)) else results

    def _stream(self, documents: Iterable, batch_size: int, reading: dict, choosing: dict) -> Iterator[list[dict]]:
        """Documents -> results, in order, some batches at a time."""
        first = 0
        for block in blocks(documents, BATCHES_AT_A_TIME * batch_size):
            waiting, due = {}, 0
            for read in self._read_block(block, batch_size, reading, choosing, first):
                waiting |= read.finished
                while due in waiting:
                    yield waiting.pop(due)
                    due += 1
            first += len(block)

    def read_block(
        self,
        documents: Sequence,
        *,
        batch_size: int = 8,
        first: int = 0,
        done: Collection[int] = (),
        known: Mapping[tuple[int, int], Values] | None = None,
        **options,
    ) -> Iterator[BatchRead]:
        """Reads some documents, sorted by length together, and yields what each batch has given as soon as it is read.

        The batches are the same whatever is done or known already, so that their results are, too, bit for bit.

        Args:
            documents: as many as `input_documents.blocks` puts together.
            batch_size, options: of a call of the pipeline.
            first: the number of the first document, for messages.
            done: documents whose results are not wanted any more.
            known: of windows that an earlier call has read, what `BatchRead.windows` gave.
        """
        reading, _, choosing = self._sanitize_parameters(**options)
        reading, choosing = {**self._preprocess_params, **reading}, {**self._postprocess_params, **choosing}
        return self._read_block(documents, batch_size, reading, choosing, first, done, known or {})

    def _read_block(self, documents, batch_size, reading, choosing, first, done=(), known=None) -> Iterator[BatchRead]:
        self.model.eval()
        decode = callable(self._model_decode) and self._threshold(choosing.get("threshold")) is None
        prepared = self.preprocess(documents, first=first, **reading)
        windows, said, known = prepared["windows"], prepared["said"], known or {}
        counts = Counter(window.document for window in windows)
        left = {number: count for number, count in counts.items() if number not in done}
        windows = sorted(windows, key=lambda window: len(window.word_starts), reverse=True)

        def take(some: list, values: Mapping[tuple[int, int], Values], is_new: bool = True) -> BatchRead:
            taken = [window for window in some if window.document in left and window.key in values]
            for window in taken:
                said.add(window, *values[window.key])
            numbers = Counter(window.document for window in taken)
            for number, n in numbers.items():
                left[number] -= n
            finished = {number: self._phrases(prepared, number, **choosing) for number in numbers if not left[number]}
            kept = {window.key: values[window.key] for window in taken if is_new and left[window.document]}
            return BatchRead(finished, {number: n / counts[number] for number, n in numbers.items()}, kept)

        if known:
            yield take(windows, known, is_new=False)
        for batch in self._batches(windows, batch_size):
            wanted = [window for window in batch if window.document in left and window.key not in known]
            if wanted:
                read = dict(zip([window.key for window in batch], self._read(batch, decode), strict=True))
                yield take(wanted, read)

    def _batches(self, windows: list, batch_size: int) -> Iterator[list]:
        """Windows, longest first -> batches that take, padded, no more room than so many of the longest."""
        most = batch_size if self.reads_titles else GROWTH * batch_size  # a title's own weights take the same room each
        room, start = batch_size * len(windows[0].word_starts) if windows else 0, 0
        while start < len(windows):
            count = min(max(batch_size, room // max(1, len(windows[start].word_starts))), most)
            yield windows[start : start + count]
            start += count

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
    ):
        """Documents -> their texts, words and windows, and room for what the model will say of each word."""
        read = [
            read_document(document, number, split, self.joins_titles)
            for number, document in enumerate(documents, start=first)
        ]
        texts, words = [document.text for document in read], [document.words for document in read]
        limit = check_window(self.tokenizer, min(max_length or self._limit, self._limit), overlap, on_long)[0]
        windows = encode_windows(
            texts,
            [[(start, end) for _, start, end in found] for found in words],
            self.tokenizer,
            max_length=limit,
            overlap=overlap,
            on_long=on_long,
            first=first,
            titles=[document.title for document in read] if self.reads_titles else None,
            max_title_length=max_title_length,
        )
        said = WordProbabilities([len(found) for found in words])
        return {"documents": read, "texts": texts, "words": words, "windows": windows, "said": said}

    def _read(self, windows: list[Window], decode: bool = False) -> list[Values]:
        """The model reads a batch of windows."""
        batch = self._batch(windows)
        outputs = self.forward(batch, decode=decode)  # (n, S, 3) and, with `decode`, (n, S)
        probabilities, tags = outputs["probabilities"], outputs.get("tags")
        return [
            (probabilities[row][mask].numpy(), None if tags is None else tags[row][mask].numpy())
            for row, mask in enumerate(batch["attention_mask"].bool())
        ]

    def _batch(self, windows: list) -> dict[str, torch.Tensor]:
        """Windows -> tensors (n, S), with those masks that the model's forward names."""
        inputs = [{name: row for name, row in window.inputs.items() if name not in MASKS} for window in windows]
        batch = dict(self.tokenizer.pad(inputs, padding_side="right", return_tensors="pt"))
        masks = {"word_start_mask": [window.word_starts >= 0 for window in windows]}
        if self.reads_titles:
            masks |= {name: [window.inputs[name] for window in windows] for name in MASKS}
        length = batch["input_ids"].shape[1]
        given = {name: rows for name, rows in masks.items() if name in self._forward_names}
        return batch | {name: torch.from_numpy(pad_masks(rows, length)) for name, rows in given.items()}

    def _forward(self, batch: dict, decode: bool = False) -> dict:
        """A padded batch -> probabilities (n, S, 3) of O, B and I, in float32; with `decode` also tags (n, S)."""
        labels, outputs = None, None
        if decode:
            labels, outputs = self._model_decode(**batch, return_outputs=True)  # -1 where no word begins
        p = (outputs or self.model(**batch)).logits.float().softmax(-1)  # (n, S, C)
        three, tag_of_label = p.new_zeros(*p.shape[:2], 3), torch.tensor(self._tag_of_label, device=p.device)
        heard = {"probabilities": three.index_add(-1, tag_of_label, p)}
        if decode:
            heard["tags"] = torch.where(labels < 0, O, tag_of_label[labels.clamp(min=0)])
        return heard

    def _threshold(self, threshold: float | None) -> float | None:
        """The call's threshold, or else the model's own."""
        return getattr(self.model.config, "keyphrase_threshold", None) if threshold is None else threshold

    def postprocess(self, prepared: dict, **choosing) -> list[list[dict]]:
        """What the model said of each word -> each document's keyphrases, best first."""
        return [self._phrases(prepared, number, **choosing) for number in range(len(prepared["documents"]))]

    def _phrases(
        self, prepared: dict, number: int, *, top_k: int | None = 10, min_score: float = 0.0, threshold=None
    ) -> list[dict]:
        """One document's."""
        document, said = prepared["documents"][number], prepared["said"]
        temperature = getattr(self.model.config, "keyphrase_temperature", None)
        # tags were asked for only if no threshold decides
        p, tags = said.document(number), said.tags(number)
        phrases = rank_phrases(document.text, document.words, p, self._threshold(threshold), tags, temperature)
        return [document.placed(phrase) for phrase in phrases if phrase["score"] >= min_score][:top_k]


def unwrapped(model):
    """The model inside a wrapper of peft, which takes any argument and hands it on; else the model itself."""
    inside = getattr(model, "get_base_model", None)
    return inside() if callable(inside) else model


def read_labels(id2label: dict[int, str]) -> list[int]:
    """Label names -> 0 (O), 1 (B) or 2 (I) for each label id, whatever types they carry."""
    tags = {"O": O, "OUTSIDE": O, "B": B, "I": I}
    names = [id2label[i] for i in sorted(id2label)]
    try:
        read = [tags[name.upper().replace("_", "-").split("-")[0]] for name in names]
    except KeyError:
        read = []
    if set(read) != {O, B, I}:
        raise ValueError(
            f"The model's labels are {', '.join(map(repr, names))}: keyphrase-extraction needs one that begins a phrase (B or "
            "B-...), one that goes on (I or I-...) and O. If the model was trained with such labels, name them: "
            "model.config.id2label = {0: 'O', 1: 'B-KEY', 2: 'I-KEY'}."
        )
    return read


def length_limit(tokenizer, model) -> int:
    """The longest window that both the tokenizer and the model's position embeddings take."""
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    limits = [limit] if isinstance(limit, int) and limit > 0 else []
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
            padding = module.padding_idx  # RoBERTa and its kin number positions from padding_idx + 1
            limits.append(module.num_embeddings - (0 if padding is None else padding + 1))
    if tokenizer.model_max_length < NO_LIMIT:
        limits.append(tokenizer.model_max_length)
    return min(limits, default=NO_LIMIT)
