"""Fine-tunes the hypernetwork (or a baseline) to answer questions from texts, with the stock Trainer.

    python examples/hypernet/train_qa.py examples/hypernet/squad_paper.yml --dataset_name rajpurkar/squad_v2
    python examples/hypernet/train_qa.py examples/hypernet/squad_cpu.yml --train_files train.jsonl --test_files validation.jsonl

A YAML file gives arguments; those on the command line win. Start the same command again after an interruption: training
goes on from the last checkpoint. The output folder holds the model, its code and its pipeline; results.json has SQuAD's
exact match and F1, and the answers.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

from cli_args import parse_arguments, run_or_exit
from datasets import Dataset, load_dataset
from run_folder import RunFolderArguments, fingerprint, open_run, replace_file, what_ran
from squad import squad_scores
from systems import ModelArguments, TwoRatesTrainer, build, find_backbone, open_tokenizer
from tqdm import tqdm
from transformers import TrainingArguments, pipeline, set_seed

from keyphrase_tools.documents import read_jsonl
from modeling_hypernet import HypernetCollator, StatesDataset, encode_questions

EXAMPLE = '{"question": "...", "context": "...", "answers": {"text": ["..."], "answer_start": [0]}}'
COLUMNS = ("question", "context", "answers")


@dataclass
class DataArguments:
    dataset_name: str | None = field(default=None, metadata={"help": "data set on the Hub, such as rajpurkar/squad"})
    train_files: list[str] | None = field(default=None, metadata={"help": "JSON Lines with SQuAD's columns"})
    validation_files: list[str] | None = field(default=None, metadata={"help": "likewise; scored after training"})
    test_files: list[str] | None = field(default=None, metadata={"help": "likewise"})
    max_length: int = field(default=384, metadata={"help": "tokens of a window"})
    stride: int = field(default=128, metadata={"help": "tokens that neighbouring windows share"})
    max_train_rows: int | None = field(default=None, metadata={"help": "questions to learn from, the first ones"})
    max_test_rows: int | None = field(default=None, metadata={"help": "questions that are scored, the first ones"})
    cache_states: bool = field(default=False, metadata={"help": "compute a frozen backbone's states once"})
    states_dir: str | None = field(default=None, metadata={"help": "where they are kept; otherwise in output_dir"})
    show: int = field(default=3, metadata={"help": "questions that are printed with their answers at the end"})
    traceback: bool = field(default=False, metadata={"help": "show the traceback of an error"})


def load_questions(args: DataArguments) -> dict[str, list[dict]]:
    """Train and test rows, from files or from the Hub, whose validation split is for testing."""
    if args.dataset_name:
        hub = load_dataset(args.dataset_name)
        rows = {"train": hub["train"].to_list(), "test": hub["validation"].to_list()}
    elif args.train_files:
        files = {"train": args.train_files, "validation": args.validation_files, "test": args.test_files}
        rows = {split: read_jsonl(paths, COLUMNS, EXAMPLE) for split, paths in files.items() if paths}
    else:
        raise ValueError(
            "There is nothing to train on. Pass --train_files train.jsonl or --dataset_name rajpurkar/squad."
        )
    limits = {"train": args.max_train_rows, "test": args.max_test_rows}
    return {split: of[: limits.get(split) or len(of)] for split, of in rows.items()}


def prepare(model_args: ModelArguments, data_args: DataArguments, folder_args: RunFolderArguments, training_args):
    """Everything before training, and so every error that the user can fix -> the run folder, the trainer and the questions to score."""
    rows = load_questions(data_args)
    backbone = find_backbone(model_args.backbone)
    folder = open_run(
        "hypernet/train_qa.py", training_args, model_args, data_args,
        overwrite=folder_args.overwrite_output_dir, clear=("states*",), backbone=fingerprint(backbone),
    )  # fmt: skip
    tokenizer = open_tokenizer(backbone, data_args.max_length)
    batch = {name: [row[name] for row in rows["train"]] for name in [*COLUMNS, *["id"] * ("id" in rows["train"][0])]}
    train = Dataset.from_dict(
        encode_questions(batch, tokenizer, max_length=data_args.max_length, stride=data_args.stride)
    )
    print(f"train: {len(rows['train']):,} questions in {len(train):,} windows")
    set_seed(training_args.seed)
    model = build("answers", model_args, backbone)
    collator = HypernetCollator(tokenizer)
    if data_args.cache_states and model_args.freeze_backbone:
        train = StatesDataset(model, train, collator, Path(data_args.states_dir or training_args.output_dir) / "states")
    trainer = TwoRatesTrainer(
        model=model, args=training_args, train_dataset=train, data_collator=collator, processing_class=tokenizer
    )
    trainer.backbone_lr = model_args.backbone_lr
    del rows["train"]
    return folder, trainer, rows


def report(trainer, answer, scored: dict[str, list[dict]], args: DataArguments):
    """Writes results.json; prints the scores and some answers."""
    results: dict = {"ran": what_ran(trainer.args, trainer.state), "log": trainer.state.log_history}
    for split, rows in scored.items():
        gold = [list(row["answers"]["text"]) for row in rows]
        options = {"max_length": args.max_length, "stride": args.stride, "batch_size": 16}
        options["handle_impossible_answer"] = not all(gold)
        asked = ({"question": row["question"], "context": row["context"]} for row in rows)
        found = list(tqdm(answer(asked, **options), total=len(rows), unit="question", desc=split))
        results[split] = squad_scores([one["answer"] for one in found], gold)
        names = [str(row.get("id", i)) for i, row in enumerate(rows)]
        results[f"{split}_answers"] = dict(zip(names, (one["answer"] for one in found), strict=True))
        print(f"{split}: " + "   ".join(f"{name} {value:.1f}" for name, value in results[split].items()))
        for row, one, right in list(zip(rows, found, gold, strict=True))[: args.show]:
            said = f"{one['answer'] or 'no answer'} ({one['score']:.2f})"
            print(f"\n{row['question']}\n  -> {said}; gold: {right or 'no answer'}")
    replace_file(Path(trainer.args.output_dir) / "results.json", json.dumps(results, indent=1))


def main():
    kinds = (ModelArguments, DataArguments, RunFolderArguments, TrainingArguments)
    model_args, data_args, folder_args, training_args = parse_arguments(kinds, __doc__)
    given = (model_args, data_args, folder_args, training_args)
    folder, trainer, scored = run_or_exit(prepare, *given, traceback=data_args.traceback)
    output = training_args.output_dir
    trainer.train(resume_from_checkpoint=folder.start)
    answer = pipeline("extractive-qa", model=trainer.model, tokenizer=trainer.processing_class)
    if model_args.reader == "hypernet":
        answer.save_pretrained(output)
        print(f"\nThe model is in {output}: pipeline('extractive-qa', model={output!r})")
    report(trainer, answer, scored, data_args)
    folder.mark_finished(ran=what_ran(training_args, trainer.state))


if __name__ == "__main__":
    main()
