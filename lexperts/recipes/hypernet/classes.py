"""Fine-tunes the hypernetwork to classify texts with titles.

    lexperts train hypernet-classes news_cpu --train-files train.jsonl --test-files test.jsonl
    lexperts train hypernet-classes news_paper --dataset-name fancyzhx/ag_news

Each line of a file is an object such as {"title": "...", "text": "...", "label": "..."}. The output folder contains the
best model with its code, and the accuracy in results.json.
"""

import numpy as np
from datasets import ClassLabel, Dataset, load_dataset

from keyphrase_tools.evaluation import keep_best
from modeling_hypernet import HypernetForSequenceClassification, tokenize_pairs
from run_tools.errors import UserError

from ..data import Rows, hold_out_validation, load_splits
from ..training import save_pipeline, write_results
from .arguments import ClassificationDataArguments, ModelArguments
from .models import build_model, fit_model


def load_texts(args: ClassificationDataArguments) -> tuple[Rows, list[str]]:
    """Rows of each split, with classes as numbers, and their names. Raises a `UserError` for an unknown class."""
    rows, label = load_splits(args, (args.text_column, args.label_column)), args.label_column
    kinds = sorted({type(row[label]).__name__ for row in rows["train"]})
    if len(kinds) > 1 or kinds[0] not in ("str", "int", "float", "bool"):
        raise UserError(f"--label-column {label}: labels must be texts or numbers, not {' and '.join(kinds)}.")
    classes = sorted({row[label] for row in rows["train"]})
    names = [str(name) for name in classes]
    if args.dataset_name:
        feature = load_dataset(args.dataset_name, split="train").features[label]
        if isinstance(feature, ClassLabel):
            classes, names = list(range(feature.num_classes)), feature.names
    for row in (row for split in rows.values() for row in split):
        if row[label] not in classes:
            raise UserError(f"The label {row[label]!r:.60} is in no training row. Those have {', '.join(names):.200}.")
        row[label] = classes.index(row[label])
    hold_out_validation(rows, 0.1)
    return rows, names


def accuracy(prediction) -> dict[str, float]:
    """For the Trainer's `compute_metrics`."""
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    return {"accuracy": float(np.mean(logits.argmax(-1) == prediction.label_ids))}


def train(model_args: ModelArguments, data_args: ClassificationDataArguments, training_args, checkpoint) -> None:
    """Trains, scores and saves a model."""
    rows, names = load_texts(data_args)
    options = {"seed": training_args.seed, "id2label": dict(enumerate(names))}
    model, tokenizer = build_model(HypernetForSequenceClassification, model_args, data_args.max_length, **options)
    data, columns = {}, (data_args.title_column, data_args.text_column, data_args.label_column)
    for split, own in rows.items():
        titles, texts, labels = ([row.get(name) for row in own] for name in columns)
        data[split] = Dataset.from_dict({**tokenize_pairs(titles, texts, tokenizer), "labels": labels})
    print(f"{len(names)} classes; " + ", ".join(f"{split}: {len(texts):,} texts" for split, texts in data.items()))
    keep_best(training_args, "accuracy")
    test = data.pop("test", None)
    trainer = fit_model(model, tokenizer, model_args, training_args, data, checkpoint, compute_metrics=accuracy)
    results = {"best_validation_accuracy": trainer.state.best_metric}
    if test is not None:
        results["test"] = trainer.predict(test, metric_key_prefix="test").metrics
        print(f"test, {len(test):,} texts: accuracy {100 * results['test']['test_accuracy']:.1f}")
    save_pipeline("text-classification", trainer.model, tokenizer, training_args.output_dir)
    write_results(trainer, **results)
