# SPDX-License-Identifier: Apache-2.0
"""`pipeline("keyphrase-extraction", model=...)`: extracts ranked keyphrases with their offsets from texts.

Works with any token classifier whose labels are B, I and O, with or without types (`B-KEY`, `B`, `I-ORG`, ...). Titles are
passed separately to a model whose forward has an argument `meta_mask`. A model with `decode(..., return_outputs=True)`, which
returns label ids and outputs, chooses the labels by it.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from lexperts_lite.batches import Block
from lexperts_lite.call_options import check_batch_size
from lexperts_lite.decoding import O, read_labels
from lexperts_lite.ranking import read_rankers, read_word_classes
from lexperts_lite.reader import KeyphraseReader
from lexperts_lite.windows import Window
from modeling_seke.shared_seke import TextPipeline

from .token_classifiers import known_limit, last_states, unwrap_model, without_hooks


class KeyphraseExtractionPipeline(KeyphraseReader, TextPipeline):
    """Extracts keyphrases from texts, with or without titles.

    How titles are used depends on the model. If its forward has no argument `meta_mask`, title and text are joined by
    `words.join_title`, and keyphrases are extracted from both, but never across the two. If it has, the title is meta-text,
    the first sequence of the tokenizer's pair, and keyphrases are extracted from the text only, or with
    `config.title_in_main` from the joined text. In all cases `start` and `end` are offsets in the user's own string, the one
    named by `field`.

    Texts are cleaned first (see `lexperts_lite.clean`): words hyphenated at a line end are joined, soft hyphens are removed, and HTML
    entities are decoded. Offsets are those of the original text. Documents beyond the model's limit are read in overlapping windows;
    a word's label is that of the window in which it is furthest from an edge.

    All options may be given to `pipeline(...)`, as defaults of this pipeline, and to each call. `None` in a call means the
    default that is named here, also where the pipeline has another.

    Args:
        inputs: a document, a list of documents, or any other iterable of them (a generator, a column of `datasets` or pandas, a
            PyTorch data set), which is read lazily. A document is a text or a mapping `{"title": ..., "text": ...}`, whose title may
            be missing or `None`.
        top_k (`int`, default 10): the maximum number of keyphrases per document, `None` for all.
        min_phrases (`int`, default 5): a model with `config.keyphrase_ranker` returns as many keyphrases as give the highest expected
            F1, but not fewer than these if the text has so many that are not parts of better ones; other models return all.
        min_score (`float`): return instead all keyphrases with this score or a higher one, up to `top_k`.
        style (`str`, default none): one of `config.styles`, the style of annotation that is asked for, such as "terms". Its
            ranker in `config.style_rankers` is used, if there is one, or else `config.keyphrase_ranker`.
        threshold (`float`, default `config.keyphrase_threshold`): a word belongs to a keyphrase if its probability of B or I
            reaches the threshold. A model with a ranker ranks by all evidence of the document instead (see `ranking`), unless a
            threshold is given. Without a threshold the model's `decode` chooses the labels (such as the
            best path of a CRF), or if it has none, the most likely labels are used.
        candidates (`list[str]`): phrases to score, whether or not the model would extract them; see `candidates.Candidates`.
        diversity (`float`, default 0): chooses the `top_k` by maximal marginal relevance on the model's hidden states, from 0
            (by score only) to 1, among the keyphrases that would be returned without `top_k`. See `diversity.diversify`.
        nested (`bool`, default `True`): whether a keyphrase may be inside another ("webhook" and "webhook endpoint"); with
            `False` the better of the two is returned.
        language (default `config.keyphrase_language`, or "english"): the stemmer by which phrases are compared, one of
            `words.LANGUAGES`, or `None` for no stemming.
        batch_size (`int`, default 8, on a GPU 64): windows per batch. Documents are sorted by length first. A batch of shorter windows
            has more rows, as many as fit into the memory of `batch_size` of the longest, at most four times as many.
        overlap (`int`, default a quarter of a window): sub-tokens that neighbouring windows share.
        max_length (`int`, default the model's limit): sub-tokens per window. A model with relative positions and a tokenizer
            without `model_max_length` have no limit; the default is then 512.
        max_title_length (`int`, default 64): sub-tokens of a title that is meta-text, at most a quarter of a window; longer titles
            are truncated, with a warning.

    Returns:
        For each document a list, best first, of `{"keyphrase", "score", "start", "end", "mentions"}`. The `mentions`
        (`{"start", "end", "score"}`) are all occurrences with equal stems; `keyphrase`, `start` and `end` are those of the
        first, or of the first without a possessive 's. If the document has a title, a keyphrase and each of its mentions also have
        `"field"`, `"title"` or `"text"`. `document[field][start:end]` is the keyphrase, except that white space is a single blank in
        `keyphrase`, and for what cleaning removes. With a ranker a score is the probability that the phrase is a keyphrase;
        otherwise it is the mean probability of the words' labels. If the model has a temperature, `config.keyphrase_temperature`, it
        is applied to the scores of its rankers, or if it has none, of its labels (see `calibration.calibrate`). The result is one
        such list for a document, a list of them for a list, and an iterator otherwise.

        With `candidates` every candidate is returned as the user wrote it, unless `top_k` or `min_score` is given; of those with
        equal stems only the first. Candidates without mentions come last; their `score`, `start` and `end` are `None`, and they are
        left out by a `min_score` above 0. Scores of candidates are always mean probabilities of labels.

    Raises:
        TypeError: for a document of another type or with other keys; the message gives its index.
        ValueError: for an argument with an invalid value (see `call_options`), such as a candidate without words.

    Example:

    ```python
    >>> extract = pipeline("keyphrase-extraction", model="my-seke")
    >>> extract("Graph cuts solve energy minimisation problems.", top_k=1)
    [{'keyphrase': 'Graph cuts', 'score': 0.66, 'start': 0, 'end': 10, 'mentions': [{'start': 0, 'end': 10, 'score': 0.66}]}]
    ```
    """

    def __init__(self, *args, **kwargs):
        kwargs.pop("local_files_only", None)  # transformers has used it, and passes it on
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

    def read_windows(self, block: Block, **options) -> Iterator[list[Window]]:
        """As in `KeyphraseReader`, with the model in its mode for prediction."""
        self.model.eval()
        return super().read_windows(block, **options)

    def launch(
        self, batch: dict[str, np.ndarray], decode: bool, with_states: bool, with_gates: bool
    ) -> Callable[[], dict[str, np.ndarray]]:
        """See `KeyphraseReader`."""
        inputs: dict[str, Any] = {name: torch.from_numpy(rows) for name, rows in batch.items()}
        if self.device.type != "cpu":
            if self._pack_tokens is not None:
                inputs["packed_tokens"] = self._pack_tokens(inputs["attention_mask"])
            inputs = {name: value.to(self.device, non_blocking=True) for name, value in inputs.items()}
        with self.device_placement(), torch.no_grad():
            outputs = self._forward(inputs, decode=decode, with_states=with_states, with_gates=with_gates)
        return lambda: {name: value.cpu().numpy() for name, value in outputs.items()}

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
