"""`pipeline("keyphrase-extraction", model=...)`: texts in, ranked keyphrases with their places out.

Works with any token classifier whose labels are B, I and O, with or without types (`B-KEY`, `B`, `I-ORG`, ...).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

import torch
from transformers import Pipeline

from .decoding import B, I, O, rank_phrases
from .windows import NO_LIMIT, WordProbabilities, check_window, encode_windows
from .words import split_words

BATCHES_AT_A_TIME = 16  # so many batches of documents are sorted by length together


class KeyphraseExtractionPipeline(Pipeline):
    """Draws keyphrases from texts.

    Args:
        inputs: a text; a list of texts; any other iterable of texts (a generator, a `datasets` column), which is read as
            it is asked for. With `is_split_into_words=True` a text is a list of words.
        top_k (`int`, default 10): at most so many phrases a document, `None` for all.
        min_score (`float`, default 0): leave out phrases with a lower score.
        threshold (`float`, default the model's own, `config.keyphrase_threshold`): a word belongs to a keyphrase where its
            probability of B or I reaches it. Where neither says anything, the likeliest label decides.
        batch_size (`int`, default 8): windows that the model reads at once. Documents are sorted by length first.
        on_long (default `"window"`): documents beyond the model's limit are read in overlapping windows, and a word's
            label is taken from the window in which it stands furthest from a cut edge; `"error"` refuses them,
            `"truncate"` reads their beginning only.
        overlap (`int`, default a quarter of a window): sub-tokens that neighbouring windows share.
        max_length (`int`, default the model's limit): sub-tokens a window.
        is_split_into_words (`bool`, default `False`): texts are lists of words; offsets then refer to `" ".join(words)`.

    Returns:
        For each document a list, best first, of `{"keyphrase", "score", "start", "end", "mentions"}`, where
        `text[start:end] == keyphrase`: the first of the `mentions` (`{"start", "end", "score"}`) whose stems are equal.
        One such list for a text, a list of them for a list, an iterator for anything else.

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

    def _sanitize_parameters(
        self,
        top_k="unset",
        min_score=None,
        threshold=None,
        on_long=None,
        overlap=None,
        max_length=None,
        is_split_into_words=None,
        **unknown,
    ):
        if unknown:
            raise TypeError(
                f"keyphrase-extraction got {', '.join(map(repr, unknown))}. It takes top_k, min_score, threshold, "
                "batch_size, on_long, overlap, max_length and is_split_into_words."
            )
        reading = {"on_long": on_long, "overlap": overlap, "max_length": max_length, "split": is_split_into_words}
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
        if isinstance(inputs, str) or (reading.get("split") and _is_words(inputs)):
            return next(self._stream([inputs], batch_size, reading, choosing))
        if not isinstance(inputs, Iterable) or isinstance(inputs, (bytes, Mapping)):
            raise TypeError(
                f"keyphrase-extraction reads a text or an iterable of texts, not a {type(inputs).__name__}: {inputs!r:.60}."
            )
        results = self._stream(inputs, batch_size, reading, choosing)
        return list(results) if isinstance(inputs, (list, tuple)) else results

    def _stream(self, documents: Iterable, batch_size: int, reading: dict, choosing: dict) -> Iterator[list[dict]]:
        """Documents -> results, in order, some batches at a time."""
        documents, first = iter(documents), 0
        self.model.eval()
        while chunk := list(islice(documents, BATCHES_AT_A_TIME * batch_size)):
            prepared = self.preprocess(chunk, first=first, **reading)
            # longest first: a document's shorter last window then comes after the others, as a draw between windows wants
            windows = sorted(prepared["windows"], key=lambda window: len(window.word_starts), reverse=True)
            for start in range(0, len(windows), batch_size):
                self._read(windows[start : start + batch_size], prepared["said"])
            yield from self.postprocess(prepared, **choosing)
            first += len(chunk)

    def preprocess(self, documents: Sequence, *, first=0, split=False, on_long="window", overlap=None, max_length=None):
        """Documents -> their texts, words and windows, and room for what the model will say of each word."""
        texts, words = [], []
        for number, document in enumerate(documents, start=first):
            text, found = read_document(document, number, split)
            texts.append(text)
            words.append(found)
        spans = [[(start, end) for _, start, end in found] for found in words]
        limit = check_window(self.tokenizer, min(max_length or self._limit, self._limit), overlap, on_long)[0]
        windows = encode_windows(
            texts, spans, self.tokenizer, max_length=limit, overlap=overlap, on_long=on_long, first=first
        )
        said = WordProbabilities([len(found) for found in words])
        return {"texts": texts, "words": words, "windows": windows, "said": said}

    def _read(self, windows: list, said: WordProbabilities) -> None:
        """The model reads a batch of windows."""
        batch = self.tokenizer.pad([window.inputs for window in windows], padding_side="right", return_tensors="pt")
        probabilities = self.forward(dict(batch))["probabilities"]  # (n, S, 3)
        for window, row, mask in zip(windows, probabilities, batch["attention_mask"], strict=True):
            said.add(window, row[mask.bool()].numpy())

    def _forward(self, batch: dict) -> dict:
        """A padded batch -> probabilities (n, S, 3) of O, B and I, in float32."""
        p = self.model(**batch).logits.float().softmax(-1)  # (n, S, C)
        three = p.new_zeros(*p.shape[:2], 3)
        return {"probabilities": three.index_add(-1, torch.tensor(self._tag_of_label, device=p.device), p)}

    def postprocess(
        self, prepared: dict, *, top_k: int | None = 10, min_score: float = 0.0, threshold: float | None = None
    ) -> list[list[dict]]:
        """What the model said of each word -> each document's keyphrases, best first."""
        if threshold is None:
            threshold = getattr(self.model.config, "keyphrase_threshold", None)
        results = []
        for number, (text, words) in enumerate(zip(prepared["texts"], prepared["words"], strict=True)):
            phrases = rank_phrases(text, words, prepared["said"].document(number), threshold)
            results.append([phrase for phrase in phrases if phrase["score"] >= min_score][:top_k])
        return results


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


def read_document(document, number: int, split: bool) -> tuple[str, list[tuple[str, int, int]]]:
    """A text, or with `split` a list of words -> the text and its words with their places."""
    if not split:
        if not isinstance(document, str):
            raise TypeError(
                f"Document {number} is a {type(document).__name__}, not a text: {document!r:.60}. "
                "Pass strings, or lists of words with is_split_into_words=True."
            )
        return document, split_words(document)
    if not _is_words(document):
        raise TypeError(
            f"Document {number} is not a list of words: {document!r:.60}. With is_split_into_words=True pass lists of "
            "strings; leave it out for texts."
        )
    words, place = [], 0
    for word in document:
        words.append((word, place, place + len(word)))
        place += len(word) + 1
    return " ".join(document), words


def _is_words(document) -> bool:
    return isinstance(document, (list, tuple)) and all(isinstance(word, str) for word in document)
