"""Fine-tunes the hypernetwork to classify texts with titles.

    lexperts train hypernet-classes news_cpu --train-files train.jsonl --test-files test.jsonl
    lexperts train hypernet-classes news_paper --dataset-name fancyzhx/ag_news

Each line of a file is an object such as {"title": "...", "text": "...", "label": "..."}. The output folder contains the
best model with its code, and the accuracy in results.json.
"""

import numpy as np
from datasets import Dataset
from transformers import set_seed

from keyphrase_tools.evaluation import keep_best
from modeling_hypernet import DataCollatorForTextPairs, tokenize_pairs
from run_tools.errors import RESUME

from ..common.arguments import command
from ..common.run_folder import write_results
from ..common.training import RecipeTrainer, train_or_resume
from .arguments import ClassificationDataArguments, ModelArguments
from .data import load_texts
from .systems import build_model, make_trainer, open_folder, open_tokenizer, save_pipeline


def tokenize_texts(rows: list[dict], args: ClassificationDataArguments, tokenizer) -> Dataset:
    """Rows for the model."""
    titles, texts = ([row.get(name) for row in rows] for name in (args.title_column, args.text_column))
    columns = tokenize_pairs(titles, texts, tokenizer, max_length=args.max_length)
    return Dataset.from_dict({**columns, "labels": [row[args.label_column] for row in rows]})


def accuracy(prediction) -> dict[str, float]:
    """For the Trainer's `compute_metrics`."""
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    return {"accuracy": float(np.mean(logits.argmax(-1) == prediction.label_ids))}


def prepare(model_args: ModelArguments, data_args: ClassificationDataArguments, folder_args, training_args):
    """The run folder, the trainer, and the test rows: everything before training, where errors of users occur."""
    rows, names = load_texts(data_args)
    folder, backbone = open_folder("train_classification", model_args, data_args, folder_args, training_args)
    tokenizer = open_tokenizer(backbone, data_args.max_length)
    data = {split: tokenize_texts(texts, data_args, tokenizer) for split, texts in rows.items()}
    print(f"{len(names)} classes; " + ", ".join(f"{split}: {len(texts):,} texts" for split, texts in data.items()))
    set_seed(training_args.seed)
    model = build_model("classes", model_args, backbone, id2label=dict(enumerate(names)))
    keep_best(training_args, "accuracy")
    arguments = (model, model_args, data_args, training_args, data, DataCollatorForTextPairs(tokenizer))
    trainer, splits = make_trainer(RecipeTrainer, *arguments, compute_metrics=accuracy)
    return folder, trainer, splits.get("test")


def train(model_args, *groups) -> None:
    """Runs the command."""
    folder, trainer, test = prepare(model_args, *groups)
    train_or_resume(trainer, folder)
    results = {"best_validation_accuracy": trainer.state.best_metric}
    if test is not None:
        results["test"] = trainer.predict(test, metric_key_prefix="test").metrics
        print(f"test, {len(test):,} texts: accuracy {100 * results['test']['test_accuracy']:.1f}")
    save_pipeline("text-classification", folder, trainer)
    write_results(folder, trainer, **results)


main = command("hypernet", "train_classification", train, RESUME)
