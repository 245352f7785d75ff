"""Fine-tunes the hypernetwork to extract keyphrases from texts with titles.

    lexperts train hypernet-keyphrases inspec_cpu --train-files train.jsonl --test-files test.jsonl
    lexperts train hypernet-keyphrases keyphrases_paper --dataset-name midas/inspec

Each line of a file is an object such as {"title": "...", "text": "...", "keyphrases": ["..."]}. The output folder
contains the best model with its code and pipeline.

results.json has the scores of every epoch and of the test set. "paths" is the phrase-level micro F1 of the most likely
label sequences, as in the paper. "spans" is the same with the threshold that is best on validation documents, if one
improves F1 there. "lexperts" and "seke" are F1@5 and F1@10 with this threshold, by two sets of scoring rules.
"""

import numpy as np
from datasets import Dataset
from transformers import EarlyStoppingCallback

from keyphrase_tools.evaluation import THRESHOLDS, ExtractionMetrics, evaluate_pipeline, gold_phrases, keep_best
from keyphrase_tools.labels import RULES, tag_words, tokenize_documents
from keyphrase_tools.rows import describe_coverage
from lexperts_lite.clean import CleanText
from lexperts_lite.decoding import tag_spans
from lexperts_lite.words import check_language, split_words
from modeling_hypernet import HypernetForTokenClassification

from ..data import hold_out_validation, load_documents, to_columns
from ..training import RecipeTrainer, best_evaluation, save_pipeline, write_results
from .arguments import KeyphraseDataArguments, ModelArguments
from .models import build_model, fit_model

COUNTS = ["document", "num_keyphrases", "num_present"]


class ViterbiTrainer(RecipeTrainer):
    """Evaluates the most likely paths, as the pipeline does: predictions are logits and paths."""

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """As in transformers, with the paths of `decode`."""
        inputs = self._prepare_inputs(inputs)
        with self.accelerator.autocast():  # accelerate wraps only forward
            paths, outputs = self.accelerator.unwrap_model(model).decode(**inputs, return_outputs=True)
        return outputs.loss, None if prediction_loss_only else (outputs.logits, paths), inputs.get("labels")


def make_rows(documents: dict[str, dict], tokenizer, id2label: dict, language: str | None):
    """The rows of training and validation, and the metrics of the latter."""
    windows = tokenize_documents(documents["train"], tokenizer, title_as="meta", language=language)
    count, validation = len(documents["train"]["text"]), documents["validation"]
    print(f"train: {count:,} documents in {len(windows['labels']):,} windows; {describe_coverage(windows)}")
    metrics = ExtractionMetrics(
        validation["text"], validation["keyphrases"], tokenizer, id2label, titles=validation["title"], spans=True,
        thresholds=(None, *THRESHOLDS), language=language,
    )  # fmt: skip
    rows = {"train": windows, "validation": metrics.rows}
    return {split: Dataset.from_dict(own).remove_columns(COUNTS) for split, own in rows.items()}, metrics


def score_mentions(extract, documents: dict[str, list]) -> dict[str, float]:
    """Micro precision, recall and F1 of the mentions that a pipeline extracts, against the spans of the gold labels."""
    counts = np.zeros(3)
    inputs = [{"title": title, "text": text} for title, text in zip(documents["title"], documents["text"], strict=True)]
    found = extract(inputs, top_k=None, batch_size=16)
    for text, keyphrases, phrases in zip(documents["text"], documents["keyphrases"], found, strict=True):
        source = CleanText(text)
        words = split_words(source.text)
        spans = {
            source.source_span(words[a][1], words[b - 1][2])
            for a, b in tag_spans(tag_words(words, keyphrases, language=extract.language))
        }
        mentions = (mention for phrase in phrases for mention in phrase["mentions"])
        extracted = {(m["start"], m["end"]) for m in mentions if m.get("field", "text") == "text"}
        counts += len(spans & extracted), len(extracted), len(spans)
    correct, predicted, gold = counts.tolist()
    ratios = {"precision": (correct, predicted), "recall": (correct, gold), "f1": (2 * correct, predicted + gold)}
    return {name: part / max(total, 1) for name, (part, total) in ratios.items()}


def score(extract, documents: dict[str, list]) -> dict:
    """The scores of the test documents, which are printed."""
    config, scores = extract.model.config, {"spans": score_mentions(extract, documents)}
    threshold, config.keyphrase_threshold = config.keyphrase_threshold, None
    scores["paths"] = score_mentions(extract, documents)
    config.keyphrase_threshold = threshold
    columns = documents["text"], documents["keyphrases"]
    for rules in RULES:
        scores[rules] = evaluate_pipeline(extract, *columns, titles=documents["title"], rules=rules)
    at_k = "   ".join(f"F1@{k} {100 * scores['lexperts'][f'f1@{k}']:.1f}" for k in (5, 10))
    spans, paths = (100 * scores[name]["f1"] for name in ("spans", "paths"))
    print(f"test, {len(documents['text']):,} documents: F1 of spans {spans:.1f} (best paths {paths:.1f})   {at_k}")
    return scores


def train(model_args: ModelArguments, data_args: KeyphraseDataArguments, training_args, checkpoint) -> None:
    """Trains, scores and saves a model."""
    language = check_language(None if data_args.language == "none" else data_args.language)
    rows = load_documents(data_args)
    hold_out_validation(rows)
    documents = {split: to_columns(own) for split, own in rows.items()}
    if test := documents.get("test"):  # before the training
        gold_phrases(test["text"], test["keyphrases"], RULES[1], language, "the test documents")
    model, tokenizer = build_model(HypernetForTokenClassification, model_args, data_args.max_length, training_args.seed)
    model.config.keyphrase_language = language
    data, metrics = make_rows(documents, tokenizer, model.config.id2label, language)
    keep_best(training_args, "span_f1")
    patience = data_args.early_stopping_patience
    trainer = fit_model(
        model, tokenizer, model_args, training_args, data, checkpoint, kind=ViterbiTrainer, compute_metrics=metrics,
        callbacks=[EarlyStoppingCallback(patience)] if patience else [],
    )  # fmt: skip
    # none if the most likely path was better than any threshold
    threshold = best_evaluation(trainer, "eval_span_f1").get("eval_threshold")
    trainer.model.config.keyphrase_threshold = threshold
    extract = save_pipeline("keyphrase-extraction", trainer.model, tokenizer, training_args.output_dir)
    results = {"test": score(extract, test)} if test else {}
    write_results(trainer, best_validation_span_f1=trainer.state.best_metric, threshold=threshold, **results)
