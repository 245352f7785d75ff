"""How well a token classifier extracts keyphrases: F1@k and F1 of spans, from the Trainer's predictions or a pipeline."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from .clean_text import clean
from .decoding import rank_phrases, tag_spans, word_tags
from .documents import full_text, read_jsonl
from .labels import label_windows, present, tag
from .metrics import keyphrase_f1
from .pipeline_keyphrase_extraction import read_labels
from .titles import MAX_TITLE_LENGTH
from .windows import WordProbabilities, encode_windows
from .words import join_title, normalise, split_words

THRESHOLDS = (0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05)


class ExtractionMetrics:
    """`compute_metrics` for the stock Trainer: its logits as the keyphrases of whole documents, scored.

    Args:
        texts, keyphrases: the documents of the evaluation set, in order.
        tokenizer: a fast tokenizer.
        id2label: the model's labels.
        max_length, overlap: windows, as in `labels.encode`.
        rules: by which the gold is found in the text, "lexperts" or "seke".
        convention, k: as in `metrics.keyphrase_f1`.
        thresholds: tried each time; the one with the best F1 at the last k is reported as `threshold`, with its
            scores. It belongs into `model.config.keyphrase_threshold`. `(None,)` takes the likeliest labels.
        titles: of the documents, `None` where there is none, for models that read them as meta-text; `texts` are then what
            is labelled, joined to the title beforehand if the model has `title_in_main`.
        max_title_length: as in `labels.encode`.
        spans: also report `span_precision`, `span_recall` and `span_f1`, by `span_scores`, of the labels chosen; the threshold
            is then the one with the best `span_f1`. If `None` is among the thresholds, `path_span_f1` is what it gives.

    Attributes:
        rows: the evaluation set that belongs to it, as a dict of lists: `Dataset.from_dict(metrics.rows)`.

    Example:

    ```python
    >>> metrics = ExtractionMetrics(texts, keyphrases, tokenizer, model.config.id2label)
    >>> trainer = Trainer(model, eval_dataset=Dataset.from_dict(metrics.rows), compute_metrics=metrics, ...)
    >>> trainer.evaluate()["eval_f1@10"]
    ```
    """

    def __init__(
        self,
        texts: Sequence[str],
        keyphrases: Sequence[Sequence[str]],
        tokenizer,
        id2label: dict[int, str],
        *,
        max_length: int | None = None,
        overlap: int | None = None,
        rules: str = "lexperts",
        convention: str = "seke",
        k: Sequence[int | str] = (5, 10),
        thresholds: Sequence[float | None] = THRESHOLDS,
        titles: Sequence[str | None] | None = None,
        max_title_length: int = MAX_TITLE_LENGTH,
        spans: bool = False,
    ):
        self._texts = [clean(text) for text in texts]
        self._words = [split_words(text) for text in self._texts]
        self._gold = [
            present(words, phrases, rules=rules) for words, phrases in zip(self._words, keyphrases, strict=True)
        ]
        self._tag_of_label = np.array(read_labels(id2label))
        self._scoring, self._thresholds = {"convention": convention, "k": k}, thresholds
        self._gold_tags = None
        if spans:
            tagged = zip(self._words, keyphrases, strict=True)
            self._gold_tags = [tag(words, phrases, rules=rules) for words, phrases in tagged]
        self._windows = encode_windows(
            self._texts,
            [[(start, end) for _, start, end in words] for words in self._words],
            tokenizer,
            max_length=max_length,
            overlap=overlap,
            titles=titles and [title and clean(title) for title in titles],
            max_title_length=max_title_length,
        )
        self.rows = label_windows(self._windows, self._words, keyphrases, rules=rules)

    def __call__(self, prediction) -> dict[str, float]:
        """`EvalPrediction` with logits (windows, S, C) -> precision, recall and F1 at each k, and of spans if asked for.

        Where predictions are a pair of logits and paths (windows, S), label ids of a model that decodes and -1 where no word
        begins, the paths decide wherever no threshold does, as in the pipeline.
        """
        given = prediction.predictions if isinstance(prediction.predictions, tuple) else (prediction.predictions,)
        logits, paths = given[0], given[1] if len(given) > 1 and given[1].ndim == 2 else None
        said = WordProbabilities([len(words) for words in self._words])
        if prediction.label_ids is not None:
            self._check_order(prediction.label_ids)
        for number, (window, row) in enumerate(zip(self._windows, logits, strict=True)):
            row = row[: len(window.word_starts)].astype(np.float64)
            row = np.exp(row - row.max(-1, keepdims=True))
            row /= row.sum(-1, keepdims=True)
            three = np.stack([row[:, self._tag_of_label == tag].sum(-1) for tag in range(3)], axis=-1)
            tags = None
            if paths is not None:
                path = paths[number][: len(row)]
                tags = np.where(path < 0, 0, self._tag_of_label[path])
            said.add(window, three, tags)
        documents = [
            (text, words, said.document(number), said.tags(number))
            for number, (text, words) in enumerate(zip(self._texts, self._words, strict=True))
        ]
        tried = []
        for threshold in self._thresholds:
            phrases = [
                rank_phrases(text, words, p, threshold, tags if threshold is None else None)
                for text, words, p, tags in documents
            ]
            scores = score_phrases(phrases, self._gold, **self._scoring)
            if self._gold_tags is not None:
                chosen = [
                    word_tags(p, threshold) if tags is None or threshold is not None else tags
                    for _, _, p, tags in documents
                ]
                of_spans = span_scores(chosen, self._gold_tags)
                scores |= {f"span_{name}": score for name, score in of_spans.items()}
            tried.append(scores if threshold is None else {**scores, "threshold": threshold})
        by = f"f1@{self._scoring['k'][-1]}" if self._gold_tags is None else "span_f1"
        best = max(tried, key=lambda scores: scores[by])
        if self._gold_tags is None or None not in self._thresholds:
            return best
        return best | {"path_span_f1": tried[self._thresholds.index(None)]["span_f1"]}

    def _check_order(self, label_ids: np.ndarray) -> None:
        """The labels that came back must be those of `rows`, in their order and from the left."""
        expected = self.rows["labels"]
        same = len(label_ids) == len(expected) and all(
            np.array_equal(found[: len(row)], row) for found, row in zip(label_ids, expected, strict=True)
        )
        if not same:
            raise ValueError(
                "The labels that the Trainer evaluated are not those of ExtractionMetrics.rows. Pass "
                "eval_dataset=Dataset.from_dict(metrics.rows), a collator that pads on the right "
                "(tokenizer.padding_side='right'), and no train_sampling_strategy='group_by_length', which sorts these rows too."
            )


def score_phrases(phrases: Sequence[Sequence[dict]], gold: Sequence[Sequence[str]], top_k: int = 10, **scoring) -> dict:
    """Pipeline results against gold of `labels.present`; both read hyphens and slashes as spaces."""
    predictions = [[normalise(phrase["keyphrase"]) for phrase in document[:top_k]] for document in phrases]
    scores = keyphrase_f1(predictions, gold, **scoring)
    return {name: value for name, value in scores.items() if name.split("@")[0] in ("precision", "recall", "f1")}


def span_scores(predicted: Sequence[Sequence[int]], gold: Sequence[Sequence[int]]) -> dict[str, float]:
    """Labels of each document's words, 0 (O), 1 (B) or 2 (I) -> micro `precision`, `recall` and `f1` of their spans.

    A span is right if both of its ends are; over all documents. Spans are those of `decoding.tag_spans`, where an I without
    a B before it begins one, as conlleval and seqeval's default mode have it. A share of nothing is 0.

    >>> span_scores([[1, 2, 0, 1]], [[1, 2, 0, 0]])
    {'precision': 0.5, 'recall': 1.0, 'f1': 0.6666666666666666}

    Raises:
        ValueError: for another number of documents, or of words in one.
    """
    right = found = wanted = 0
    for number, (tags, true_tags) in enumerate(zip(predicted, gold, strict=True)):
        if len(tags) != len(true_tags):
            raise ValueError(
                f"Document {number} has {len(tags)} predicted labels and {len(true_tags)} gold ones. Give one a word in both."
            )
        spans, true_spans = set(tag_spans(tags)), set(tag_spans(true_tags))
        right, found, wanted = right + len(spans & true_spans), found + len(spans), wanted + len(true_spans)
    shares = {"precision": (right, found), "recall": (right, wanted), "f1": (2 * right, found + wanted)}
    return {name: part / whole if whole else 0.0 for name, (part, whole) in shares.items()}


def evaluate_pipeline(
    extract,
    texts: Sequence[str],
    keyphrases: Sequence[Sequence[str]],
    *,
    rules: str = "lexperts",
    batch_size: int = 16,
    k: Sequence[int | str] = (5, 10),
    titles: Sequence[str | None] | None = None,
    **scoring,
) -> dict[str, float]:
    """Precision, recall and F1 at each k of a keyphrase-extraction pipeline on documents with keyphrases.

    With `titles` the pipeline reads mappings of title and text. Gold is what stands in the text that it searches: the joined
    one if its model has titles joined (`extract.joins_titles`), else the text.
    """
    documents = texts = list(texts)
    if titles is not None:
        documents = [{"title": title, "text": text} for title, text in zip(titles, texts, strict=True)]
        if getattr(extract, "joins_titles", False):
            texts = [join_title(title, text) for title, text in zip(titles, texts, strict=True)]
    words = [split_words(clean(text)) for text in texts]
    gold = [present(own, phrases, rules=rules) for own, phrases in zip(words, keyphrases, strict=True)]
    return score_phrases(extract(documents, batch_size=batch_size), gold, k=k, **scoring)


def score_files(predictions: str | Path, gold: str | Path, *, rules: str = "lexperts", **scoring) -> dict[str, float]:
    """Precision, recall and F1 at each k of one file of keyphrases against another; both JSON Lines, in the same order.

    Args:
        predictions: rows with `keyphrases`, texts or `{"keyphrase", ...}`, best first; a row that could not be read (with
            `error`) has none.
        gold: rows with `text`, perhaps `title`, and `keyphrases`, of which those that stand in title or text count.
        rules, scoring: as in `evaluate_pipeline`.

    Raises:
        ValueError: for files of different documents.
    """
    said, rows = read_jsonl(predictions), read_jsonl(gold, ("text", "keyphrases"))
    if len(said) != len(rows):
        raise ValueError(
            f"{predictions} has {len(said):,} documents and {gold} {len(rows):,}. Score files of the same documents."
        )
    for number, (one, other) in enumerate(zip(said, rows, strict=True)):
        if "id" in other and one.get("id") != other["id"]:
            raise ValueError(
                f"Document {number} is {one.get('id')!r} in {predictions} and {other['id']!r} in {gold}. Score files of the "
                "same documents in the same order."
            )
        if "keyphrases" not in one and "error" not in one:
            raise ValueError(
                f"{predictions}, document {number}: there is no 'keyphrases'; it has {', '.join(map(repr, one))}."
            )
    phrases = [
        [phrase if isinstance(phrase, Mapping) else {"keyphrase": phrase} for phrase in row.get("keyphrases", ())]
        for row in said
    ]
    wanted = [present(split_words(full_text(row)), row["keyphrases"], rules=rules) for row in rows]
    return score_phrases(phrases, wanted, **scoring)


def keep_best(args, metric: str, greater_is_better: bool = True) -> None:
    """`TrainingArguments` by which a run ends with the model that does best on validation rows; each epoch is scored where nothing
    else is said.

    Raises:
        ValueError: where checkpoints and scores do not come together, so that the best might not be there any more.
    """
    from transformers.trainer_utils import IntervalStrategy

    if args.eval_strategy == "no":
        args.eval_strategy = args.save_strategy = IntervalStrategy.EPOCH
    if args.eval_strategy != args.save_strategy or (
        args.eval_strategy == "steps" and args.save_steps % args.eval_steps
    ):
        said = (
            f"eval_strategy={args.eval_strategy.value!r} (eval_steps={args.eval_steps}) and "
            f"save_strategy={args.save_strategy.value!r} (save_steps={args.save_steps})"
        )
        raise ValueError(
            f"{said}: the best model is kept only if scores and checkpoints come together. Make them equal."
        )
    args.do_eval = args.load_best_model_at_end = True
    args.metric_for_best_model, args.greater_is_better = f"eval_{metric}", greater_is_better
