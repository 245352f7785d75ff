"""Fine-tunes the hypernetwork (or a baseline) to classify texts by their titles, with the stock Trainer.

    python examples/hypernet/train_classification.py examples/hypernet/news_paper.yml --dataset_name fancyzhx/ag_news
    python examples/hypernet/train_classification.py examples/hypernet/news_cpu.yml --train_files train.jsonl --test_files test.jsonl

A YAML file gives arguments; those on the command line win. Start the same command again after an interruption: training
goes on from the last checkpoint. The output folder holds the best model and its code; results.json the accuracy.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import numpy as np
from cli_args import parse_arguments, run_or_exit
from datasets import ClassLabel, Dataset, load_dataset
from run_folder import RunFolderArguments, fingerprint, open_run, replace_file, what_ran
from systems import ModelArguments, TwoRatesTrainer, build, find_backbone, open_tokenizer
from transformers import TrainingArguments, pipeline, set_seed

from keyphrase_tools.documents import read_jsonl
from keyphrase_tools.evaluation import keep_best
from modeling_hypernet import HypernetCollator, StatesDataset, encode_pairs

EXAMPLE = '{"title": "...", "text": "...", "label": "..."}'
NAME_COLUMNS = "Name yours with --text_column, --title_column and --label_column."


@dataclass
class DataArguments:
    dataset_name: str | None = field(default=None, metadata={"help": "data set on the Hub, such as fancyzhx/ag_news"})
    train_files: list[str] | None = field(default=None, metadata={"help": "JSON Lines with title, text, label"})
    validation_files: list[str] | None = field(default=None, metadata={"help": "likewise; otherwise a share of train"})
    test_files: list[str] | None = field(default=None, metadata={"help": "likewise; scored after training"})
    validation_share: float = field(default=0.1, metadata={"help": "share of train that validates, without a file"})
    text_column: str = field(default="text", metadata={"help": "texts"})
    title_column: str = field(default="title", metadata={"help": "titles; a text without one is read without"})
    label_column: str = field(default="label", metadata={"help": "names or numbers of classes"})
    max_length: int = field(default=512, metadata={"help": "tokens of title and text"})
    max_train_rows: int | None = field(default=None, metadata={"help": "texts to learn from, the first ones"})
    max_test_rows: int | None = field(default=None, metadata={"help": "texts that are scored, the first ones"})
    cache_states: bool = field(default=False, metadata={"help": "compute a frozen backbone's states once"})
    states_dir: str | None = field(default=None, metadata={"help": "where they are kept; otherwise in output_dir"})
    traceback: bool = field(default=False, metadata={"help": "show the traceback of an error"})


def load_texts(args: DataArguments) -> tuple[dict[str, list[dict]], list[str]]:
    """Split -> rows, from files or from the Hub, and the names of the classes."""
    required, names = (args.text_column, args.label_column), None
    if args.dataset_name:
        hub = load_dataset(args.dataset_name)
        rows = {split: hub[split].to_list() for split in ("train", "validation", "test") if split in hub}
        feature = hub["train"].features.get(args.label_column)
        names = feature.names if isinstance(feature, ClassLabel) else None
    elif args.train_files:
        files = {"train": args.train_files, "validation": args.validation_files, "test": args.test_files}
        rows = {split: read_jsonl(paths, required, EXAMPLE, NAME_COLUMNS) for split, paths in files.items() if paths}
    else:
        raise ValueError(
            "There is nothing to train on. Pass --train_files train.jsonl or --dataset_name fancyzhx/ag_news."
        )
    missing = [name for name in required if name not in rows["train"][0]]
    if missing:
        raise ValueError(
            f"There is no {', '.join(map(repr, missing))}; the columns are {', '.join(map(repr, rows['train'][0]))}. "
            f"{NAME_COLUMNS}"
        )
    if names is None:
        found = sorted({row[args.label_column] for row in rows["train"]})
        if found != list(range(len(found))):
            rows = {
                s: [{**row, args.label_column: number_of(row[args.label_column], found)} for row in of]
                for s, of in rows.items()
            }
        names = [str(name) for name in found]
    if "validation" not in rows:
        parts = Dataset.from_dict({"i": range(len(rows["train"]))}).train_test_split(args.validation_share, seed=42)
        rows["train"], rows["validation"] = ([rows["train"][i] for i in parts[part]["i"]] for part in ("train", "test"))
    limits = {"train": args.max_train_rows, "test": args.max_test_rows}
    return {split: of[: limits.get(split) or len(of)] for split, of in rows.items()}, names


def number_of(label, names: list) -> int:
    if label not in names:
        raise ValueError(f"The label {label!r} is in no training row; the classes are {', '.join(map(repr, names))}.")
    return names.index(label)


def encoded(rows: list[dict], args: DataArguments, tokenizer) -> Dataset:
    titles, texts = ([row.get(name) for row in rows] for name in (args.title_column, args.text_column))
    columns = encode_pairs(titles, texts, tokenizer, max_length=args.max_length)
    return Dataset.from_dict({**columns, "labels": [row[args.label_column] for row in rows]})


def accuracy(prediction) -> dict[str, float]:
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    return {"accuracy": float(np.mean(logits.argmax(-1) == prediction.label_ids))}


def prepare(model_args: ModelArguments, data_args: DataArguments, folder_args: RunFolderArguments, training_args):
    """Everything before training, and so every error that the user can fix -> the run folder, the trainer and the test rows."""
    rows, names = load_texts(data_args)
    backbone = find_backbone(model_args.backbone)
    folder = open_run(
        "hypernet/train_classification.py", training_args, model_args, data_args,
        overwrite=folder_args.overwrite_output_dir, clear=("states*",), backbone=fingerprint(backbone),
    )  # fmt: skip
    tokenizer = open_tokenizer(backbone, data_args.max_length)
    data = {split: encoded(of, data_args, tokenizer) for split, of in rows.items()}
    print(f"{len(names)} classes; " + ", ".join(f"{split}: {len(of):,} texts" for split, of in data.items()))
    set_seed(training_args.seed)
    model = build("classes", model_args, backbone, id2label=dict(enumerate(names)))
    collator = HypernetCollator(tokenizer)
    if data_args.cache_states and model_args.freeze_backbone:
        states = Path(data_args.states_dir or training_args.output_dir)
        data = {split: StatesDataset(model, of, collator, states / f"states-{split}") for split, of in data.items()}
    keep_best(training_args, "accuracy")
    trainer = TwoRatesTrainer(
        model=model,
        args=training_args,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        compute_metrics=accuracy,
        data_collator=collator,
        processing_class=tokenizer,
    )
    trainer.backbone_lr = model_args.backbone_lr
    return folder, trainer, data.get("test")


def main():
    kinds = (ModelArguments, DataArguments, RunFolderArguments, TrainingArguments)
    model_args, data_args, folder_args, training_args = parse_arguments(kinds, __doc__)
    given = (model_args, data_args, folder_args, training_args)
    folder, trainer, test = run_or_exit(prepare, *given, traceback=data_args.traceback)
    output = training_args.output_dir
    trainer.train(resume_from_checkpoint=folder.start)
    ran = what_ran(training_args, trainer.state)
    results = {"best_validation_accuracy": trainer.state.best_metric, "ran": ran, "log": trainer.state.log_history}
    if test is not None:
        results["test"] = trainer.predict(test, metric_key_prefix="test").metrics
        print(f"test, {len(test):,} texts: accuracy {100 * results['test']['test_accuracy']:.1f}")
    if model_args.reader == "hypernet":
        pipeline("text-classification", model=trainer.model, tokenizer=trainer.processing_class).save_pretrained(output)
        print(f"\nThe model is in {output}: pipeline('text-classification', model={output!r})")
    replace_file(Path(output) / "results.json", json.dumps(results, indent=1))
    folder.mark_finished(ran=ran)


if __name__ == "__main__":
    main()
