"""Fine-tunes the hypernetwork, or a baseline, to classify texts with titles.

    lexperts train hypernet-classes news_cpu --train-files train.jsonl --test-files test.jsonl
    lexperts train hypernet-classes news_paper --dataset-name fancyzhx/ag_news

Each line of a file is an object such as {"title": "...", "text": "...", "label": "..."}. To resume after an interruption,
start the same command again. The output folder contains the best model with its code, and the accuracy in results.json.
"""

import json
from pathlib import Path

import numpy as np
from datasets import Dataset
from transformers import pipeline, set_seed

from keyphrase_tools.evaluation import keep_best
from modeling_hypernet import DataCollatorForTextPairs, tokenize_pairs
from run_tools.errors import RESUME
from run_tools.files import write_file

from ..common.arguments import RunFolderArguments, command
from ..common.run_folder import training_summary
from ..common.training import train_or_resume, trainer_options
from .arguments import ClassificationDataArguments, ModelArguments
from .data import load_texts
from .systems import TwoRatesTrainer, build_model, cache_states, open_folder, open_tokenizer


def tokenize_texts(rows: list[dict], args: ClassificationDataArguments, tokenizer) -> Dataset:
    """Rows for the model."""
    titles, texts = ([row.get(name) for row in rows] for name in (args.title_column, args.text_column))
    columns = tokenize_pairs(titles, texts, tokenizer, max_length=args.max_length)
    return Dataset.from_dict({**columns, "labels": [row[args.label_column] for row in rows]})


def accuracy(prediction) -> dict[str, float]:
    """For the Trainer's `compute_metrics`."""
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    return {"accuracy": float(np.mean(logits.argmax(-1) == prediction.label_ids))}


def prepare(
    model_args: ModelArguments, data_args: ClassificationDataArguments, folder_args: RunFolderArguments, training_args
):
    """The groups of arguments, run folder, trainer and test rows. Does everything before training, where the errors of users occur."""
    rows, names = load_texts(data_args)
    folder, backbone = open_folder("train_classification", model_args, data_args, folder_args, training_args)
    tokenizer = open_tokenizer(backbone, data_args.max_length)
    data = {split: tokenize_texts(texts, data_args, tokenizer) for split, texts in rows.items()}
    print(f"{len(names)} classes; " + ", ".join(f"{split}: {len(texts):,} texts" for split, texts in data.items()))
    set_seed(training_args.seed)
    model = build_model("classes", model_args, backbone, id2label=dict(enumerate(names)))
    collator = DataCollatorForTextPairs(tokenizer)
    data = cache_states(model, data, collator, data_args, training_args.output_dir)
    keep_best(training_args, "accuracy")
    options = trainer_options(model, training_args, data, collator, tokenizer)
    trainer = TwoRatesTrainer(**options, compute_metrics=accuracy)
    trainer.backbone_lr = model_args.backbone_lr
    return model_args, data_args, folder, trainer, data.get("test")


def train(*groups) -> None:
    """Runs the command."""
    model_args, data_args, folder, trainer, test = prepare(*groups)
    output = trainer.args.output_dir
    train_or_resume(trainer, folder.start)
    ran = training_summary(trainer.args, trainer.state)
    results = {"best_validation_accuracy": trainer.state.best_metric, "ran": ran, "log": trainer.state.log_history}
    if test is not None:
        results["test"] = trainer.predict(test, metric_key_prefix="test").metrics
        print(f"test, {len(test):,} texts: accuracy {100 * results['test']['test_accuracy']:.1f}")
    if model_args.reader == "hypernet":
        pipeline("text-classification", model=trainer.model, tokenizer=trainer.processing_class).save_pretrained(output)
        print(f"\nThe model is in {output}: pipeline('text-classification', model={output!r})")
    write_file(Path(output) / "results.json", json.dumps(results, indent=1))
    folder.mark_finished(ran=ran)


main = command("hypernet", "train_classification", train, RESUME)
