"""The hypernetwork compared with other readers of the same states: keyphrases, classes and answers, on MiniLM-L6.

    python benchmarks/hypernet_quality.py --data PATH --work FOLDER       # PATH/keyphrases, classification, qa

All readers have the same encoder, head, rows, epochs and number of states (512). Each uses the learning rate that is best on
validation rows with the first seed and the frozen encoder (bbc_news uses the rate of ag_news, squad_v2 that of squad_v1):

- the hypernetwork as in the paper (one direction), and in both directions with weights shared by all texts;
- a BiLSTM;
- for keyphrases, the title-guided encoder and a BiLSTM over states without titles (both at the BiLSTM's rate);
- for classes and answers, the unchanged encoder states (classes from their mean);
- for classes, LSTMs that classify from the mean of their states instead of the last one.

The encoder is frozen or fine-tuned; fine-tuned, it has its own learning rate. Training runs through `lexperts train`. Keyphrases
are selected by the best path or by a probability threshold, whichever is better on validation documents; the scores of the best
paths alone are a separate row.

Runs in the work folder and rows in results/hypernet_quality.json are reused if their settings, data and versions are the same;
otherwise the script stops and names the difference.
"""

import json
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common import Record, make_parser, run_once
from timing import describe

SHARED = {
    "per_device_train_batch_size": 16,
    "per_device_eval_batch_size": 16,
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
    "weight_decay": 0.01,
    "warmup_steps": 0.1,  # a share
    "adam_beta2": 0.98,
    "backbone": "minilm",
}
EVERY_EPOCH = {"eval_strategy": "epoch", "save_strategy": "epoch", "save_total_limit": 1, "logging_steps": 50}

ONE_WAY = {"reader": "hypernet"}
BOTH_WAYS = ONE_WAY | {"bidirectional": True, "hidden_size": 256}
READERS = {
    "hypernet, shared weights": BOTH_WAYS | {"shared_base_weights": True},
    "bilstm": {"reader": "bilstm"},
    "title-guided": {"reader": "title_guided"},
    "bilstm, without titles": {"reader": "bilstm", "title_column": "no such column"},
    "hypernet": ONE_WAY,
    "hypernet, mean": ONE_WAY | {"pooling": "mean"},
    "bilstm, mean": {"reader": "bilstm", "pooling": "mean"},
    "plain": {"reader": "plain", "pooling": "mean"},  # the last state would be that of a single word
}
TUNED_AS = {
    "title-guided": "bilstm",
    "bilstm, without titles": "bilstm",
    "bilstm, mean": "bilstm",
    "hypernet, mean": "hypernet",
}  # readers that use another reader's rate
TUNED_ON = {"bbc_news": "ag_news", "squad_v2": "squad_v1"}  # tasks that use another task's rates
CLASSIFIERS = ("hypernet, shared weights", "plain", "bilstm", "bilstm, mean", "hypernet", "hypernet, mean")


@dataclass(frozen=True)
class Task:
    """A data set: the command of `lexperts train`, the readers, and how they are trained.

    `fine_tuned` are the readers that are also trained with the encoder, and their epochs: fewer, because an epoch costs ten times
    as much. `rates` are tried on validation rows.
    """

    command: str
    folder: str  # in --data
    files: dict[str, str]
    readers: tuple[str, ...]
    arguments: dict[str, Any]
    rates: tuple[float, ...]
    fine_tuned: tuple[tuple[str, ...], int]
    seeds: tuple[int, ...] = (0,)


def classification(name: str, **rows) -> Task:
    """A task of text classification; `rows` limit the rows of its splits."""
    files = {"train_files": "train", "test_files": "test"}
    arguments = {"max_length": 128, "num_train_epochs": 3, **rows, **EVERY_EPOCH}
    fine_tuned = (("hypernet", "plain", "bilstm"), 2)
    folder = f"classification/{name}"
    return Task("hypernet-classes", folder, files, CLASSIFIERS, arguments, (2e-3, 8e-3), fine_tuned)


def questions(name: str) -> Task:
    """A task of question answering."""
    files = {"train_files": "train", "validation_files": "held_out", "test_files": "validation"}
    arguments = {"max_seq_len": 256, "doc_stride": 64, "num_train_epochs": 2, "save_strategy": "no", "show": 0}
    arguments |= {"max_train_rows": 2000, "max_test_rows": 1000}
    fine_tuned, readers = (("hypernet", "plain"), 2), ("plain", "bilstm", "hypernet")
    return Task("hypernet-qa", f"qa/{name}", files, readers, arguments, (2e-3, 8e-3), fine_tuned)


INSPEC = {"max_length": 256, "num_train_epochs": 7, "classifier_dropout": 0.3, "show": 0, "early_stopping_patience": 0}
TASKS = {
    "inspec": Task(
        "hypernet-keyphrases",
        "keyphrases/inspec",
        {"train_files": "train", "validation_files": "validation", "test_files": "test"},
        ("hypernet, shared weights", "bilstm", "hypernet", "title-guided", "bilstm, without titles"),
        INSPEC | EVERY_EPOCH,
        rates=(4e-3, 8e-3, 1.6e-2),
        fine_tuned=(("hypernet", "bilstm", "title-guided"), 3),
        seeds=(0, 1, 2),
    ),
    "ag_news": classification("ag_news", max_train_rows=3000, max_test_rows=2000),
    "bbc_news": classification("bbc_news"),
    "squad_v1": questions("squad_v1"),
    "squad_v2": questions("squad_v2"),
}
WAYS = {
    "frozen": {"freeze_backbone": True, "cache_states": True},
    "fine-tuned": {
        "freeze_backbone": False,
        "attention_dropout": 0.0,
        "bf16": True,
        "train_sampling_strategy": "group_by_length",
    },
}
BACKBONE_RATE = 1e-4
HELD_OUT = 400


def run(options, task: str, reader: str, way: str, rate: float, seed: int) -> dict:
    """Trains one reader, unless its folder holds the finished run, and returns its results.json."""
    name = f"{way}-{reader.replace(', ', '-').replace(' ', '-')}-{rate:g}-{seed}"
    folder, data = options.work / task / name, data_folder_of(options, task)
    settings = SHARED | TASKS[task].arguments | WAYS[way]
    settings |= {files: data / f"{split}.jsonl" for files, split in TASKS[task].files.items()}
    if way == "fine-tuned":
        settings["num_train_epochs"] = TASKS[task].fine_tuned[1]
    states = "states, no titles" if "title_column" in READERS[reader] else "states"
    settings |= {"backbone_lr": BACKBONE_RATE, "states_dir": folder.parent / states, **READERS[reader]}
    settings |= {"learning_rate": rate, "seed": seed}
    command = ("train", TASKS[task].command)
    run_once(*command, output=folder, done="results.json", options=settings, overwrite=options.overwrite)
    for checkpoint in [*folder.glob("checkpoint-*"), *folder.glob("*.safetensors")]:
        shutil.rmtree(checkpoint) if checkpoint.is_dir() else checkpoint.unlink()
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def hold_out(options) -> None:
    """Writes the question answering files: they have no validation split, so the last training rows choose the rates."""
    for task in ("squad_v1", "squad_v2"):
        origin, folder = options.data / TASKS[task].folder, data_folder_of(options, task)
        folder.mkdir(parents=True, exist_ok=True)
        rows = (origin / "train.jsonl").read_text(encoding="utf-8").strip("\n").split("\n")
        (folder / "train.jsonl").write_text("\n".join(rows[:-HELD_OUT]), encoding="utf-8")
        (folder / "held_out.jsonl").write_text("\n".join(rows[-HELD_OUT:]), encoding="utf-8")
        shutil.copy(origin / "validation.jsonl", folder)


def data_folder_of(options, task: str) -> Path:
    """The folder of a task's files."""
    return (
        options.work / "data" / task if "held_out" in TASKS[task].files.values() else options.data / TASKS[task].folder
    )


def validation_score(results: dict) -> float:
    """The score that chooses the learning rate."""
    if "best_validation_span_f1" in results:
        return results["best_validation_span_f1"]
    if "best_validation_accuracy" in results:
        return results["best_validation_accuracy"]
    return results["validation"]["f1"]


def test_scores(results: dict) -> dict[str, float]:
    """Test scores in percent."""
    test = results["test"]
    if "spans" in test:
        scores = {"F1 of spans": 100 * test["spans"]["f1"], "F1 of spans, best paths": 100 * test["paths"]["f1"]}
        return scores | {f"F1@{k}, {r}": 100 * test[r][f"f1@{k}"] for r in ("lexperts", "seke") for k in (5, 10)}
    if "test_accuracy" in test:
        return {"accuracy": 100 * test["test_accuracy"]}
    return {name: test[name] for name in ("exact", "f1", "HasAns_f1", "NoAns_f1") if name in test}


def measure(options, **key) -> dict:
    """Trains and scores one reader."""
    results = run(options, **key)
    test = test_scores(results)
    print(f"{', '.join(map(str, key.values()))}: {describe(test)}", flush=True)
    return {"validation": validation_score(results), "test": test}


def tuning(task: str, reader: str) -> list[dict]:
    """Keys of the runs that choose a reader's rate: all rates with the first seed and the frozen encoder."""
    task, reader = TUNED_ON.get(task, task), TUNED_AS.get(reader, reader)
    key = {"task": task, "reader": reader, "way": "frozen", "seed": TASKS[task].seeds[0]}
    return [key | {"rate": rate} for rate in TASKS[task].rates]


def testing(record: Record, task: str, way: str, reader: str) -> list[dict]:
    """Keys of the runs at the best rate: all seeds, or the first one if the encoder is fine-tuned."""
    rate = max((record.find(**key) for key in tuning(task, reader)), key=lambda row: row["validation"])["rate"]
    seeds = TASKS[task].seeds if way == "frozen" else TASKS[task].seeds[:1]
    return [{"task": task, "reader": reader, "way": way, "rate": rate, "seed": seed} for seed in seeds]


def main():
    """Runs what is missing in the results."""
    parser = make_parser(__doc__, "hypernet_quality", "keyphrases/, classification/ and qa/", work=True)
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    parser.add_argument("--readers", nargs="+", choices=tuple(READERS), default=list(READERS))
    options = parser.parse_args()
    hold_out(options)
    settings = {"rates": {task.command: task.rates for task in TASKS.values()}, "backbone_rate": BACKBONE_RATE}
    settings["data"] = {task: data_folder_of(options, task) for task in TASKS}
    record = Record(options.name, overwrite=options.overwrite, **settings)
    wanted = []
    for task in options.tasks:
        readers = {"frozen": TASKS[task].readers, "fine-tuned": TASKS[task].fine_tuned[0]}
        wanted += [(task, way, reader) for way in options.ways for reader in readers[way] if reader in options.readers]
    keys = [key for task, _, reader in wanted for key in tuning(task, reader)]
    keys = list({tuple(key.items()): key for key in keys}.values())  # several readers use the same rates
    record.complete(partial(measure, options), keys, options.jobs)
    keys = [key for entry in wanted for key in testing(record, *entry)]
    record.complete(partial(measure, options), keys, options.jobs)


if __name__ == "__main__":
    main()
