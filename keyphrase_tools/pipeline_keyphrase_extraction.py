"""`pipeline("keyphrase-extraction", model=...)`: texts in, ranked keyphrases with their places out.

Works with any token classifier whose labels are B, I and O, with or without types (`B-KEY`, `B`, `I-ORG`, ...). A model
whose forward names `meta_mask` reads titles beside the text; one with `decode(..., return_outputs=True)`, which gives
label ids and its output, chooses its labels by that.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

import torch
from transformers import Pipeline

from .decoding import B, I, O, rank_phrases
from .titles import MASKS, MAX_TITLE_LENGTH, pad_masks
from .windows import NO_LIMIT, WordProbabilities, check_window, encode_windows
from .words import join_title, split_words

KEYS = ("title", "text")  # of a document that is a mapping
GROWTH = 4  # so many times as many short windows as long ones are read at once
BATCHES_AT_A_TIME = 16  # so many batches of documents are sorted by length together


class KeyphraseExtractionPipeline(Pipeline):
    """Draws keyphrases from texts, with or without titles.

    How a title is read is up to the model. If its forward names no `meta_mask`, title and text are joined by
    `words.join_title`, and keyphrases are sought in both. If it does, the title is meta-text, the first of the tokenizer's
    pair, and keyphrases are sought in the text alone; with `config.title_in_main` in the joined text, beside the title.
    Places refer to what keyphrases are sought in: the text, or where a title was joined to it `join_title(title, text)`.

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
        is_split_into_words (`bool`, default `False`): texts are lists of words; offsets then refer to `" ".join(words)`.

    Returns:
        For each document a list, best first, of `{"keyphrase", "score", "start", "end", "mentions"}`, where
        `text[start:end] == keyphrase`: the first of the `mentions` (`{"start", "end", "score"}`) whose stems are equal.
        A score is the words' mean probability of their labels, at the temperature `config.keyphrase_temperature` if the
        model has one, which `calibration.calibrate` finds. One such list for a document, a list of them for a list, an iterator for anything else.

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
        if isinstance(inputs, (str, Mapping)) or (reading.get("split") and _is_words(inputs)):
            return next(self._stream([inputs], batch_size, reading, choosing))
        if not isinstance(inputs, Iterable) or isinstance(inputs, bytes):
            raise TypeError(
                f"keyphrase-extraction reads a text or an iterable of texts, not a {type(inputs).__name__}: {inputs!r:.60}."
            )
        results = self._stream(inputs, batch_size, reading, choosing)
        return list(results) if isinstance(inputs, (list, tuple)) else results

    def _stream(self, documents: Iterable, batch_size: int, reading: dict, choosing: dict) -> Iterator[list[dict]]:
        """Documents -> results, in order, some batches at a time."""
        documents, first = iter(documents), 0
        self.model.eval()
        decode = callable(self._model_decode) and self._threshold(choosing.get("threshold")) is None
        while chunk := list(islice(documents, BATCHES_AT_A_TIME * batch_size)):
            prepared = self.preprocess(chunk, first=first, **reading)
            # longest first: a document's shorter last window then comes after the others, as a draw between windows wants
            windows = sorted(prepared["windows"], key=lambda window: len(window.word_starts), reverse=True)
            for batch in self._batches(windows, batch_size):
                self._read(batch, prepared["said"], decode)
            yield from self.postprocess(prepared, **choosing)
            first += len(chunk)

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
        titles, texts, words = zip(*read, strict=True) if read else ((), (), ())
        limit = check_window(self.tokenizer, min(max_length or self._limit, self._limit), overlap, on_long)[0]
        windows = encode_windows(
            texts,
            [[(start, end) for _, start, end in found] for found in words],
            self.tokenizer,
            max_length=limit,
            overlap=overlap,
            on_long=on_long,
            first=first,
            titles=titles if self.reads_titles else None,
            max_title_length=max_title_length,
        )
        said = WordProbabilities([len(found) for found in words])
        return {"texts": texts, "words": words, "windows": windows, "said": said}

    def _read(self, windows: list, said: WordProbabilities, decode: bool = False) -> None:
        """The model reads a batch of windows."""
        batch = self._batch(windows)
        heard = self.forward(batch, decode=decode)  # (n, S, 3) and, with `decode`, (n, S)
        for row, (window, mask) in enumerate(zip(windows, batch["attention_mask"].bool(), strict=True)):
            said.add(window, *(values[row][mask].numpy() for values in heard.values()))

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

    def postprocess(
        self, prepared: dict, *, top_k: int | None = 10, min_score: float = 0.0, threshold: float | None = None
    ) -> list[list[dict]]:
        """What the model said of each word -> each document's keyphrases, best first."""
        said, results = prepared["said"], []
        temperature = getattr(self.model.config, "keyphrase_temperature", None)
        for number, (text, words) in enumerate(zip(prepared["texts"], prepared["words"], strict=True)):
            # tags were asked for only if no threshold decides
            p, tags = said.document(number), said.tags(number)
            phrases = rank_phrases(text, words, p, self._threshold(threshold), tags, temperature)
            results.append([phrase for phrase in phrases if phrase["score"] >= min_score][:top_k])
        return results


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


def read_document(document, number: int, split: bool, join: bool) -> tuple[str | None, str, list[tuple[str, int, int]]]:
    """A document -> its title, if any, the text in which keyphrases are sought, and its words with their places.

    Args:
        document: a text (with `split` a list of words), or a mapping with a "text" and perhaps a "title".
        number: its number, for messages.
        join: put the title before the text.

    Raises:
        TypeError: for anything else.
    """
    if not isinstance(document, Mapping):
        return None, *read_text(document, number, split)
    unknown = [key for key in document if key not in KEYS]
    if unknown or "text" not in document:
        wrong = f"has {', '.join(map(repr, unknown))}" if unknown else "has no 'text'"
        raise TypeError(f"Document {number} {wrong}. A document with a title is {{'title': ..., 'text': ...}}.")
    title = document.get("title")
    if title is not None and not isinstance(title, str):
        raise TypeError(
            f"The title of document {number} is a {type(title).__name__}, not a string: {title!r:.60}. Pass a string, or "
            "None for no title."
        )
    text, words = read_text(document["text"], number, split)
    if not join or not (title or "").strip():
        return title, text, words
    joined = join_title(title, text)
    if not split:
        return title, joined, split_words(joined)
    begin, outer = len(joined) - len(text.strip()), len(text) - len(text.lstrip())
    moved = [(w, max(start - outer, 0) + begin, min(end - outer + begin, len(joined))) for w, start, end in words]
    return title, joined, split_words(joined[:begin]) + [word for word in moved if word[0].strip()]


def read_text(text, number: int, split: bool) -> tuple[str, list[tuple[str, int, int]]]:
    """A text, or with `split` a list of words -> the text and its words with their places."""
    if not split:
        if not isinstance(text, str):
            raise TypeError(
                f"Document {number} is a {type(text).__name__}, not a text: {text!r:.60}. "
                "Pass strings, or lists of words with is_split_into_words=True."
            )
        return text, split_words(text)
    if not _is_words(text):
        raise TypeError(
            f"Document {number} is not a list of words: {text!r:.60}. With is_split_into_words=True pass lists of "
            "strings; leave it out for texts."
        )
    words, place = [], 0
    for word in text:
        words.append((word, place, place + len(word)))
        place += len(word) + 1
    return " ".join(text), words


def _is_words(document) -> bool:
    return isinstance(document, (list, tuple)) and all(isinstance(word, str) for word in document)
