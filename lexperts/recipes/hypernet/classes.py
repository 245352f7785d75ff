"""Fine-tunes the hypernetwork to classify texts with titles.

    lexperts train hypernet-classes news_cpu --train-files train.jsonl --test-files test.jsonl
    lexperts train hypernet-classes news_paper --dataset-name fancyzhx/ag_news

Each line of a file is an object such as {"title": "...", "text": "...", "label": "..."}. The output folder contains the
best model with its code, and the accuracy in results.json.
"""

import numpy as np
from datasets import ClassLabel, Dataset, load_dataset

from keyphrase_tools.evaluation import keep_best
from modeling_hypernet import DataCollatorForTextPairs, HypernetForSequenceClassification, tokenize_pairs
from run_tools.errors import UserError

from ..data import Rows, hold_out_validation, load_splits
from ..training import RecipeTrainer, fit, write_results
from .arguments import ClassificationDataArguments, ModelArguments
from .models import build_model, make_trainer, open_tokenizer, save_pipeline


def load_texts(args: ClassificationDataArguments) -> tuple[Rows, list[str]]:
    """Rows of each split, with classes as numbers, and the names of the classes. Raises a `UserError` for labels of several types,
    and for a class without training rows.
    """
    rows, label = load_splits(args, (args.text_column, args.label_column)), args.label_column
    kinds = {type(row[label]): row[label] for row in rows["train"]}
    if len(kinds) > 1 or not kinds.keys() <= {str, int, float, bool}:
        shown = ", ".join(f"{example!r:.60}" for example in kinds.values())
        raise UserError(f"The labels of the training rows are not of one type, texts or numbers: {shown}.")
    classes = sorted({row[label] for row in rows["train"]})
    names = [str(name) for name in classes]
    if args.dataset_name:
        feature = load_dataset(args.dataset_name, split="train").features[label]
        if isinstance(feature, ClassLabel):
            classes, names = list(range(feature.num_classes)), feature.names
    numbers = {(type(name), str(name)): number for number, name in enumerate(classes)}
    for row in (row for split in rows.values() for row in split):
        if (name := (type(row[label]), str(row[label]))) not in numbers:
            raise UserError(f"The label {row[label]!r:.60} is in no training row. Those have {', '.join(names):.200}.")
        row[label] = numbers[name]
    hold_out_validation(rows, args.validation_share)
    limits = {"train": args.max_train_rows, "test": args.max_test_rows}
    return {split: own[: limits.get(split) or len(own)] for split, own in rows.items()}, names


def tokenize_texts(rows: list[dict], args: ClassificationDataArguments, tokenizer) -> Dataset:
    """Rows for the model."""
    titles, texts = ([row.get(name) for row in rows] for name in (args.title_column, args.text_column))
    columns = tokenize_pairs(titles, texts, tokenizer, max_length=args.max_length)
    return Dataset.from_dict({**columns, "labels": [row[args.label_column] for row in rows]})


def accuracy(prediction) -> dict[str, float]:
    """For the Trainer's `compute_metrics`."""
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    return {"accuracy": float(np.mean(logits.argmax(-1) == prediction.label_ids))}


def train(model_args: ModelArguments, data_args: ClassificationDataArguments, training_args, checkpoint) -> None:
    """Trains, scores and saves a model."""
    rows, names = load_texts(data_args)
    tokenizer = open_tokenizer(model_args.backbone, data_args.max_length)
    data = {split: tokenize_texts(texts, data_args, tokenizer) for split, texts in rows.items()}
    print(f"{len(names)} classes; " + ", ".join(f"{split}: {len(texts):,} texts" for split, texts in data.items()))
    options = {"id2label": dict(enumerate(names))}
    model = build_model(HypernetForSequenceClassification, model_args, training_args.seed, **options)
    keep_best(training_args, "accuracy")
    collator = DataCollatorForTextPairs(tokenizer)
    arguments = RecipeTrainer, model, model_args, data_args, training_args, data, collator
    trainer, splits = make_trainer(*arguments, compute_metrics=accuracy)
    fit(trainer, checkpoint)
    results = {"best_validation_accuracy": trainer.state.best_metric}
    if "test" in splits:
        results["test"] = trainer.predict(splits["test"], metric_key_prefix="test").metrics
        print(f"test, {len(splits['test']):,} texts: accuracy {100 * results['test']['test_accuracy']:.1f}")
    save_pipeline("text-classification", trainer)
    write_results(trainer, **results)
