"""Evaluation of keyphrase extraction: F1@k and F1 of spans, from the Trainer's predictions, a pipeline or lists of phrases."""

from collections.abc import Sequence

import numpy as np

from lexperts_lite.call_options import UNSET
from lexperts_lite.clean import clean
from lexperts_lite.decoding import read_labels, tag_spans, word_tags
from lexperts_lite.ranking import rank_phrases
from lexperts_lite.reader import warn_if_all_outside
from lexperts_lite.windows import WordProbabilities, encode_windows
from lexperts_lite.words import check_language, join_title, normalise, split_words
from run_tools.errors import UserError

from .labels import label_windows, present_keyphrases, tag_words
from .metrics import check_cuts, check_gold, keyphrase_f1
from .phrase_lists import read_phrases

THRESHOLDS = (0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05)


class ExtractionMetrics:
    """`compute_metrics` for the stock Trainer: decodes its logits into keyphrases of whole documents and scores them.

    Args:
        texts, keyphrases: the documents of the evaluation set, in order.
        tokenizer: a fast tokenizer.
        id2label: the model's labels.
        rules: how gold keyphrases are matched to the text, "lexperts" or "seke".
        convention, k: as in `metrics.keyphrase_f1`.
        thresholds: tried in each evaluation. The one with the best F1 at the last k is reported as `threshold`, with its
            scores; save it as `model.config.keyphrase_threshold`. `(None,)` uses the most likely labels.
        titles: titles of the documents (`None` for a document without), for models that read them as meta-text. `texts` are
            then what is labelled; for a model with `title_in_main` they must already contain the title.
        spans: also report `span_precision`, `span_recall` and `span_f1` (see `span_scores`), and choose the threshold by
            `span_f1`.
        language: of the stems by which phrases are found and compared, see `words.stem`.
        windows: `max_length`, `overlap` and `max_title_length`, see `lexperts_lite.windows.encode_windows`.

    Attributes:
        rows: the evaluation set, as a dict of lists: `Dataset.from_dict(metrics.rows)`.

    Raises:
        ValueError: if no gold keyphrase occurs in its text.

    Example:

    ```python
    >>> metrics = ExtractionMetrics(texts, keyphrases, tokenizer, model.config.id2label)
    >>> trainer = Trainer(model, eval_dataset=Dataset.from_dict(metrics.rows), compute_metrics=metrics, ...)
    >>> trainer.evaluate()["eval_f1@10"]
    ```
    """

    def __init__(
        self, texts: Sequence[str], keyphrases: Sequence[Sequence[str]], tokenizer, id2label: dict[int, str], *,
        rules: str = "lexperts", convention: str = "seke", k: Sequence[int | str] = (5, 10),
        thresholds: Sequence[float | None] = THRESHOLDS, titles: Sequence[str | None] | None = None, spans: bool = False,
        language: str | None = "english", **windows,
    ):  # fmt: skip
        labelling = {"rules": rules, "language": check_language(language)}
        keyphrases = read_lists(texts, keyphrases)
        self._texts = [clean(text) for text in texts]
        self._words = [split_words(text) for text in self._texts]
        documents = list(zip(self._words, keyphrases, strict=True))
        self._gold = [present_keyphrases(words, phrases, **labelling) for words, phrases in documents]
        check_gold(self._gold)
        self._tag_of_label = np.array(read_labels(id2label))
        self._scoring, self._thresholds = {"convention": convention, "k": k, "language": language}, thresholds
        self._gold_tags = [tag_words(words, phrases, **labelling) for words, phrases in documents] if spans else None
        titles = titles and [title and clean(title) for title in titles]
        places = [[(start, end) for _, start, end in words] for words in self._words]
        self._windows = encode_windows(self._texts, places, tokenizer, titles=titles, **windows)
        self.rows = label_windows(self._windows, self._words, keyphrases, **labelling)

    def __call__(self, prediction) -> dict[str, float]:
        """Computes precision, recall and F1 at each k, and optionally of spans.

        Args:
            prediction: an `EvalPrediction` with logits `(windows, S, C)`, or with a pair of logits and paths `(windows, S)`:
                the label ids that the model decoded, -1 where no word begins. As in the pipeline, paths are used
                without a threshold.
        """
        outputs = prediction.predictions if isinstance(prediction.predictions, tuple) else (prediction.predictions,)
        if prediction.label_ids is not None:
            self._check_order(prediction.label_ids)
        probabilities = self._read_logits(outputs[0], outputs[1] if len(outputs) > 1 and outputs[1].ndim == 2 else None)
        documents = [(probabilities.document(i), probabilities.tags(i)) for i in range(len(self._texts))]
        if not any(np.any(word_tags(p) if tags is None else tags) for p, tags in documents):
            warn_if_all_outside(sum(map(len, self._words)))
        results = [self._score(documents, threshold) for threshold in self._thresholds]
        criterion = f"f1@{self._scoring['k'][-1]}" if self._gold_tags is None else "span_f1"
        return max(results, key=lambda scores: scores[criterion])

    def _read_logits(self, logits: np.ndarray, paths: np.ndarray | None) -> WordProbabilities:
        """The probabilities of the documents' words."""
        probabilities = WordProbabilities([len(words) for words in self._words])
        for number, (window, row) in enumerate(zip(self._windows, logits, strict=True)):
            row = row[: len(window.word_starts)].astype(np.float64)
            row = np.exp(row - row.max(-1, keepdims=True))
            row /= row.sum(-1, keepdims=True)
            p = np.stack([row[:, self._tag_of_label == tag].sum(-1) for tag in range(3)], axis=-1)
            path = None if paths is None else paths[number][: len(row)]
            probabilities.add(window, p, None if path is None else np.where(path < 0, 0, self._tag_of_label[path]))
        return probabilities

    def _score(self, documents: Sequence[tuple], threshold: float | None) -> dict[str, float]:
        """The scores with a threshold, of the probabilities and decoded tags of each document."""
        language, phrases, predicted = self._scoring["language"], [], []
        for text, words, (p, tags) in zip(self._texts, self._words, documents, strict=True):
            tags = tags if threshold is None else None
            phrases.append(rank_phrases(text, words, p, threshold, tags, language=language))
            predicted.append(word_tags(p, threshold) if tags is None else tags)
        scores = score_phrases(phrases, self._gold, **self._scoring)
        if self._gold_tags is not None:
            scores |= {f"span_{name}": score for name, score in span_scores(predicted, self._gold_tags).items()}
        return scores if threshold is None else {**scores, "threshold": threshold}

    def _check_order(self, label_ids: np.ndarray) -> None:
        """Raises a `ValueError` unless the evaluated labels are those of `rows`, in order and padded on the right."""
        expected = self.rows["labels"]
        same = len(label_ids) == len(expected) and all(
            np.array_equal(labels[: len(row)], row) for labels, row in zip(label_ids, expected, strict=True)
        )
        if not same:
            raise ValueError(
                "The evaluated labels are not those of ExtractionMetrics.rows in their order, padded on the right: "
                "padding_side='right', and no train_sampling_strategy='group_by_length', which also sorts these rows."
            )


def score_phrases(phrases: Sequence, gold: Sequence[Sequence[str]], **scoring) -> dict[str, float]:
    """Scores predicted phrases against gold phrases of `labels.present_keyphrases`; hyphens and slashes count as spaces.

    Args:
        phrases: for each document, results of the pipeline or other forms of `phrase_lists.read_phrases`, best first. All are
            scored: pass as many as the largest k needs.
        gold: for each document, its gold phrases.
        scoring: arguments of `metrics.keyphrase_f1`, such as `k` and `language`.

    Raises:
        ValueError: if no document has a gold phrase.
    """
    check_gold(gold)
    lists = [read_phrases(document, where=f"predictions of document {i}") for i, document in enumerate(phrases)]
    scores = keyphrase_f1([[normalise(phrase) for phrase in document] for document in lists], gold, **scoring)
    return {name: value for name, value in scores.items() if name.split("@")[0] in ("precision", "recall", "f1")}


def read_lists(texts: Sequence[str], keyphrases: Sequence) -> list[list[str]]:
    """`phrase_lists.read_phrases` of each document.

    Raises:
        ValueError: for keyphrases in another form, or another number of them than of texts.
    """
    if len(texts) != len(keyphrases):
        raise UserError(f"There are {len(keyphrases)} lists of keyphrases for {len(texts)} texts, not one per text.")
    pairs = enumerate(zip(texts, keyphrases, strict=True))
    return [read_phrases(phrases, text, f"keyphrases of document {i}") for i, (text, phrases) in pairs]


def gold_phrases(
    texts: Sequence[str],
    keyphrases: Sequence,
    rules: str = "lexperts",
    language: str | None = "english",
    where: str = "",
) -> list[list[str]]:
    """For each document the gold of extraction: those of its keyphrases that occur in its text, see `labels.present_keyphrases`.

    Raises:
        ValueError: if no keyphrase occurs in its text; the message names `where` they are.
    """
    lists = zip(texts, read_lists(texts, keyphrases), strict=True)
    options = {"rules": rules, "language": check_language(language)}
    gold = [present_keyphrases(split_words(clean(text)), phrases, **options) for text, phrases in lists]
    check_gold(gold, where)
    return gold


def needed_phrases(k: int | str | Sequence[int | str], gold: Sequence[Sequence[str]]) -> int | None:
    """How many phrases of each document the cutoffs k of `metrics.keyphrase_f1` count; `None` for all."""
    cuts = check_cuts(k)
    return None if "M" in cuts else max(max(map(len, gold)) if cut == "k" else cut for cut in cuts)


def span_scores(predicted: Sequence[Sequence[int]], gold: Sequence[Sequence[int]]) -> dict[str, float]:
    """Micro-averaged `precision`, `recall` and `f1` of spans over all documents.

    A predicted span is correct if both of its ends are. Spans are those of `decoding.tag_spans`: an I without a B before it
    begins a span, as in conlleval and in seqeval's default mode. A ratio with denominator 0 is 0.

    Args:
        predicted, gold: for each document, one label per word: 0 (O), 1 (B) or 2 (I).

    >>> span_scores([[1, 2, 0, 1]], [[1, 2, 0, 0]])
    {'precision': 0.5, 'recall': 1.0, 'f1': 0.6666666666666666}

    Raises:
        ValueError: if the numbers of documents, or of words in a document, differ.
    """
    right = found = wanted = 0
    for number, (tags, true_tags) in enumerate(zip(predicted, gold, strict=True)):
        if len(tags) != len(true_tags):
            raise ValueError(f"Document {number} has {len(tags)} predicted labels and {len(true_tags)} gold labels.")
        spans, true_spans = set(tag_spans(tags)), set(tag_spans(true_tags))
        right, found, wanted = right + len(spans & true_spans), found + len(spans), wanted + len(true_spans)
    ratios = {"precision": (right, found), "recall": (right, wanted), "f1": (2 * right, found + wanted)}
    return {name: part / total if total else 0.0 for name, (part, total) in ratios.items()}


def evaluate_pipeline(
    extract,
    texts: Sequence[str],
    keyphrases: Sequence[Sequence[str]],
    *,
    rules: str = "lexperts",
    batch_size: int = 16,
    k: Sequence[int | str] = (5, 10),
    titles: Sequence[str | None] | None = None,
    language: str | None = UNSET,
    **scoring,
) -> dict[str, float]:
    """Precision, recall and F1 at each k of a keyphrase-extraction pipeline on documents with keyphrases.

    Gold keyphrases are those that occur in the text from which the pipeline extracts: title and text joined if its model
    reads them so (`extract.joins_titles`), else the text. The pipeline is asked for as many phrases as the largest k needs,
    unless it was opened with a `top_k`.

    Args:
        extract: the pipeline.
        texts, keyphrases: the documents and their gold keyphrases.
        rules: how gold keyphrases are matched to the text, "lexperts" or "seke".
        batch_size: windows per batch.
        k, scoring: as in `metrics.keyphrase_f1`.
        titles: titles of the documents (`None` for a document without).
        language: of the stems by which phrases are found and compared; by default the pipeline's.

    Raises:
        ValueError: if no gold keyphrase occurs in its text.
    """
    documents = texts = list(texts)
    keyphrases = read_lists(texts, keyphrases)
    if titles is not None:
        documents = [{"title": title, "text": text} for title, text in zip(titles, texts, strict=True)]
        if getattr(extract, "joins_titles", False):
            texts = [join_title(title, text) for title, text in zip(titles, texts, strict=True)]
    options = {} if language is UNSET else {"language": language}
    language = getattr(extract, "language", "english") if language is UNSET else check_language(language)
    gold = gold_phrases(texts, keyphrases, rules, language)
    if "top_k" not in getattr(extract, "_postprocess_params", {}):
        options["top_k"] = needed_phrases(k, gold)
    return score_phrases(extract(documents, batch_size=batch_size, **options), gold, k=k, language=language, **scoring)


def keep_best(args, metric: str, greater_is_better: bool = True) -> None:
    """Changes `TrainingArguments` so that training ends with the model that is best on the validation set, evaluated after each epoch
    unless `eval_strategy` is set. Raises a `UserError` if a checkpoint is not saved with each evaluation.
    """
    from transformers.trainer_utils import IntervalStrategy

    if args.eval_strategy == "no":
        args.eval_strategy = args.save_strategy = IntervalStrategy.EPOCH
    if args.eval_strategy != args.save_strategy or (
        args.eval_strategy == "steps" and args.save_steps % args.eval_steps
    ):
        raise UserError(
            f"eval_strategy={args.eval_strategy.value!r} (eval_steps={args.eval_steps}) and save_strategy="
            f"{args.save_strategy.value!r} (save_steps={args.save_steps}) differ: the best model has to be saved when it is evaluated."
        )
    args.do_eval = args.load_best_model_at_end = True
    args.metric_for_best_model, args.greater_is_better = f"eval_{metric}", greater_is_better
