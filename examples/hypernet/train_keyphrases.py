"""Fine-tunes the hypernetwork (or a baseline) to extract keyphrases from texts by their titles, with the stock Trainer.

    python examples/hypernet/train_keyphrases.py examples/hypernet/inspec_cpu.yml --train_files train.jsonl --test_files test.jsonl
    python examples/hypernet/train_keyphrases.py examples/hypernet/keyphrases_paper.yml --dataset_name midas/inspec

A YAML file gives arguments; those on the command line win. Start the same command again after an interruption: training
goes on from the last checkpoint. The output folder holds the best model, its code and its pipeline; results.json the scores
of every epoch and of the test set: exact phrase-level micro F1 of the best paths, as in the paper, and, with F1@5 and F1@10, of
the words whose probability reaches the threshold that does best on the validation documents, if any does better.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

from cli_args import parse_arguments, run_or_exit
from datasets import Dataset, load_dataset
from run_folder import RunFolderArguments, fingerprint, open_run, replace_file, what_ran
from systems import ModelArguments, PathTrainer, build, find_backbone, open_tokenizer
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments, pipeline, set_seed

from keyphrase_tools.clean_text import CleanText
from keyphrase_tools.decoding import tag_spans
from keyphrase_tools.documents import NAME_COLUMNS, coverage, read_jsonl
from keyphrase_tools.evaluation import THRESHOLDS, ExtractionMetrics, evaluate_pipeline, keep_best
from keyphrase_tools.labels import encode, tag
from keyphrase_tools.words import split_words
from modeling_hypernet import HypernetCollator, StatesDataset


@dataclass
class DataArguments:
    dataset_name: str | None = field(default=None, metadata={"help": "data set on the Hub, such as midas/inspec"})
    train_files: list[str] | None = field(default=None, metadata={"help": "JSON Lines with title, text, keyphrases"})
    validation_files: list[str] | None = field(default=None, metadata={"help": "likewise; otherwise a share of train"})
    test_files: list[str] | None = field(default=None, metadata={"help": "likewise; scored after training"})
    validation_share: float = field(default=0.2, metadata={"help": "share of train that validates, without a file"})
    text_column: str = field(default="text", metadata={"help": "texts, or lists of words"})
    title_column: str = field(default="title", metadata={"help": "titles"})
    keyphrases_column: str = field(default="keyphrases", metadata={"help": "lists of keyphrases, or ;-joined strings"})
    max_length: int = field(default=256, metadata={"help": "sub-tokens of title and text"})
    cache_states: bool = field(default=True, metadata={"help": "compute a frozen backbone's states once"})
    states_dir: str | None = field(default=None, metadata={"help": "where they are kept; otherwise in output_dir"})
    early_stopping_patience: int = field(default=5, metadata={"help": "epochs without a gain, 0 for no limit"})
    show: int = field(default=3, metadata={"help": "test documents whose keyphrases are printed at the end"})
    traceback: bool = field(default=False, metadata={"help": "show the traceback of an error"})


def load_documents(args: DataArguments) -> dict[str, dict[str, list]]:
    """Split -> titles, texts and keyphrases, from files or from the Hub."""
    required = (args.text_column, args.keyphrases_column)
    if args.dataset_name:
        hub = load_dataset(args.dataset_name)
        rows = {split: hub[split].to_list() for split in ("train", "validation", "test") if split in hub}
    elif args.train_files:
        files = {"train": args.train_files, "validation": args.validation_files, "test": args.test_files}
        rows = {split: read_jsonl(paths, required, hint=NAME_COLUMNS) for split, paths in files.items() if paths}
    else:
        raise ValueError("There is nothing to train on. Pass --train_files train.jsonl or --dataset_name midas/inspec.")
    missing = [name for name in required if name not in rows["train"][0]]
    if missing:
        raise ValueError(
            f"There is no {', '.join(map(repr, missing))}; the columns are {', '.join(map(repr, rows['train'][0]))}. "
            f"{NAME_COLUMNS}"
        )
    if "validation" not in rows:
        parts = Dataset.from_dict({"i": range(len(rows["train"]))}).train_test_split(args.validation_share, seed=42)
        rows["train"], rows["validation"] = ([rows["train"][i] for i in parts[part]["i"]] for part in ("train", "test"))
    return {split: columns_of(documents, args) for split, documents in rows.items()}


def columns_of(rows: list[dict], args: DataArguments) -> dict[str, list]:
    texts = [row[args.text_column] for row in rows]
    return {
        "title": [row.get(args.title_column) for row in rows],
        "text": [text if isinstance(text, str) else " ".join(text) for text in texts],
        "keyphrases": [row[args.keyphrases_column] for row in rows],
    }


def prepare(model_args: ModelArguments, data_args: DataArguments, folder_args: RunFolderArguments, training_args):
    """Everything before training, and so every error that the user can fix -> the run folder, the trainer and the documents."""
    output, documents = Path(training_args.output_dir), load_documents(data_args)
    backbone = find_backbone(model_args.backbone)
    folder = open_run(
        "hypernet/train_keyphrases.py", training_args, model_args, data_args,
        overwrite=folder_args.overwrite_output_dir, clear=("states*",), backbone=fingerprint(backbone),
    )  # fmt: skip
    tokenizer = open_tokenizer(backbone, data_args.max_length)
    windows = encode(documents["train"], tokenizer, title_as="meta")
    print(
        f"train: {len(documents['train']['text']):,} documents in {len(windows['labels']):,} windows; {coverage(windows)}"
    )
    set_seed(training_args.seed)
    model = build("keyphrases", model_args, backbone)
    validation = documents["validation"]
    metrics = ExtractionMetrics(
        validation["text"],
        validation["keyphrases"],
        tokenizer,
        model.config.id2label,
        titles=validation["title"],
        spans=True,
        thresholds=(None, *THRESHOLDS),
    )
    rows = {"train": Dataset.from_dict(windows), "validation": Dataset.from_dict(metrics.rows)}
    rows = {split: r.remove_columns(["document", "num_keyphrases", "num_present"]) for split, r in rows.items()}
    collator = HypernetCollator(tokenizer, id2label=model.config.id2label)
    if data_args.cache_states and model_args.freeze_backbone:
        states = Path(data_args.states_dir or output)
        rows = {split: StatesDataset(model, r, collator, states / f"states-{split}") for split, r in rows.items()}
    keep_best(training_args, "span_f1")
    trainer = PathTrainer(
        model=model,
        args=training_args,
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        compute_metrics=metrics,
        data_collator=collator,
        processing_class=tokenizer,
    )
    trainer.backbone_lr = model_args.backbone_lr
    if data_args.early_stopping_patience:
        trainer.add_callback(EarlyStoppingCallback(data_args.early_stopping_patience))
    return folder, trainer, documents.get("test")


def best_threshold(state) -> float | None:
    """That of the best model's validation score, `None` where the best path was better than any."""
    evaluations = [entry for entry in state.log_history if "eval_span_f1" in entry]
    return max(evaluations, key=lambda entry: entry["eval_span_f1"]).get("eval_threshold")


def score_mentions(extract, documents: dict[str, list]) -> dict[str, float]:
    """Micro precision, recall and F1 of the mentions that a pipeline names, against the gold labels' spans."""
    right = named = gold = 0
    given = [{"title": title, "text": text} for title, text in zip(documents["title"], documents["text"], strict=True)]
    for text, keyphrases, phrases in zip(
        documents["text"], documents["keyphrases"], extract(given, top_k=None, batch_size=16), strict=True
    ):
        source = CleanText(text)
        words = split_words(source.text)
        spans = {source.source_span(words[a][1], words[b - 1][2]) for a, b in tag_spans(tag(words, keyphrases))}
        mentions = [mention for phrase in phrases for mention in phrase["mentions"]]
        found = {(m["start"], m["end"]) for m in mentions if m.get("field", "text") == "text"}
        right, named, gold = right + len(spans & found), named + len(found), gold + len(spans)
    precision, recall = right / max(named, 1), right / max(gold, 1)
    return {"precision": precision, "recall": recall, "f1": 2 * right / max(named + gold, 1)}


def report(trainer: Trainer, extract, documents: dict[str, list] | None, show: int):
    """Writes results.json; prints the test scores and some documents' keyphrases."""
    config, state = extract.model.config, trainer.state
    results = {"best_validation_span_f1": state.best_metric, "threshold": config.keyphrase_threshold}
    results |= {"ran": what_ran(trainer.args, state), "epochs": state.log_history}
    if documents:
        results["test"] = {"spans": score_mentions(extract, documents)}
        threshold, config.keyphrase_threshold = config.keyphrase_threshold, None
        results["test"]["paths"] = score_mentions(extract, documents)
        config.keyphrase_threshold = threshold
        for rules in ("lexperts", "seke"):
            results["test"][rules] = evaluate_pipeline(
                extract, documents["text"], documents["keyphrases"], titles=documents["title"], rules=rules
            )
        scores = results["test"]["lexperts"]
        at = "   ".join(f"F1@{k} {100 * scores[f'f1@{k}']:.1f}" for k in (5, 10))
        spans, paths = (100 * results["test"][name]["f1"] for name in ("spans", "paths"))
        print(f"test, {len(documents['text']):,} documents: F1 of spans {spans:.1f} (best paths {paths:.1f})   {at}")
        for title, text in list(zip(documents["title"], documents["text"], strict=True))[:show]:
            phrases = extract({"title": title, "text": text})
            print(f"\n{title}\n{text}\n  -> " + "; ".join(f"{p['keyphrase']} ({p['score']:.2f})" for p in phrases))
    replace_file(Path(trainer.args.output_dir) / "results.json", json.dumps(results, indent=1))


def main():
    kinds = (ModelArguments, DataArguments, RunFolderArguments, TrainingArguments)
    model_args, data_args, folder_args, training_args = parse_arguments(kinds, __doc__)
    given = (model_args, data_args, folder_args, training_args)
    folder, trainer, documents = run_or_exit(prepare, *given, traceback=data_args.traceback)
    output = training_args.output_dir
    trainer.train(resume_from_checkpoint=folder.start)
    trainer.model.config.keyphrase_threshold = best_threshold(trainer.state)
    extract = pipeline("keyphrase-extraction", model=trainer.model, tokenizer=trainer.processing_class)
    if model_args.reader == "hypernet":
        extract.save_pretrained(output)
    report(trainer, extract, documents, data_args.show)
    folder.mark_finished(ran=what_ran(training_args, trainer.state))
    if model_args.reader == "hypernet":
        print(f"\nThe model is in {output}: pipeline('keyphrase-extraction', model={output!r})")


if __name__ == "__main__":
    main()
