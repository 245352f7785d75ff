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

import argparse
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from common import Record, add_record_arguments, run_once

COMMANDS = {
    "train_keyphrases": "hypernet-keyphrases",
    "train_classification": "hypernet-classes",
    "train_qa": "hypernet-qa",
}  # of `lexperts train`
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


def questions(data_folder: str) -> tuple:
    """Entry of TASKS for a question answering data set."""
    files = {"train_files": "train", "validation_files": "held_out", "test_files": "validation"}
    arguments = {
        "max_seq_len": 256,
        "doc_stride": 64,
        "num_train_epochs": 2,
        "max_train_rows": 2000,
        "max_test_rows": 1000,
    }
    arguments |= {"save_strategy": "no", "show": 0}
    return "train_qa", ("plain", "bilstm", "hypernet"), files, data_folder, arguments, (0,)


# task -> module, readers, files, their folder in --data, arguments, seeds
TASKS = {
    "inspec": (
        "train_keyphrases",
        ("hypernet, shared weights", "bilstm", "hypernet", "title-guided", "bilstm, without titles"),
        {"train_files": "train", "validation_files": "validation", "test_files": "test"},
        "keyphrases/inspec",
        {
            "max_length": 256,
            "num_train_epochs": 7,
            "classifier_dropout": 0.3,
            "show": 0,
            "early_stopping_patience": 0,
            **EVERY_EPOCH,
        },
        (0, 1, 2),
    ),
    "ag_news": (
        "train_classification",
        CLASSIFIERS,
        {"train_files": "train", "test_files": "test"},
        "classification/ag_news",
        {"max_length": 128, "num_train_epochs": 3, "max_train_rows": 3000, "max_test_rows": 2000, **EVERY_EPOCH},
        (0,),
    ),
    "bbc_news": (
        "train_classification",
        CLASSIFIERS,
        {"train_files": "train", "test_files": "test"},
        "classification/bbc_news",
        {"max_length": 128, "num_train_epochs": 3, **EVERY_EPOCH},
        (0,),
    ),
    "squad_v1": questions("qa/squad_v1"),
    "squad_v2": questions("qa/squad_v2"),
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
FINE_TUNED = {
    "inspec": (("hypernet", "bilstm", "title-guided"), 3),
    "ag_news": (("hypernet", "plain", "bilstm"), 2),
    "bbc_news": (("hypernet", "plain", "bilstm"), 2),
    "squad_v1": (("hypernet", "plain"), 2),
    "squad_v2": (("hypernet", "plain"), 2),
}  # readers and epochs: fewer, because an epoch costs ten times as much
RATES = {"train_keyphrases": (4e-3, 8e-3, 1.6e-2), "train_classification": (2e-3, 8e-3), "train_qa": (2e-3, 8e-3)}
BACKBONE_RATE = 1e-4
HELD_OUT = 400


def run(options, task: str, reader: str, way: str, rate: float, seed: int) -> dict:
    """Trains one reader, unless its folder holds the finished run, and returns its results.json."""
    name = f"{way}-{reader.replace(', ', '-').replace(' ', '-')}-{rate:g}-{seed}"
    folder = Path(options.work).resolve() / task / name
    settings = training_settings(options, task, reader, way, folder) | {"learning_rate": rate, "seed": seed}
    command = COMMANDS[TASKS[task][0]]
    run_once("train", command, output=folder, done="results.json", options=settings, overwrite=options.overwrite)
    for checkpoint in [*folder.glob("checkpoint-*"), *folder.glob("*.safetensors")]:
        shutil.rmtree(checkpoint) if checkpoint.is_dir() else checkpoint.unlink()
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def training_settings(options, task: str, reader: str, way: str, folder: Path) -> dict:
    """The command's options, except learning rate and seed."""
    _, _, files, _, arguments, _ = TASKS[task]
    data = data_folder_of(options, task)
    settings = SHARED | arguments | WAYS[way] | {name: data / f"{split}.jsonl" for name, split in files.items()}
    if way == "fine-tuned":
        settings["num_train_epochs"] = FINE_TUNED[task][1]
    states = "states, no titles" if "title_column" in READERS[reader] else "states"
    settings |= {"backbone_lr": BACKBONE_RATE, "states_dir": folder.parent / states}
    return settings | READERS[reader]


def hold_out(options) -> None:
    """Writes the question answering files: they have no validation split, so the last training rows choose the rates."""
    for task in ("squad_v1", "squad_v2"):
        origin, folder = Path(options.data) / TASKS[task][3], data_folder_of(options, task)
        folder.mkdir(parents=True, exist_ok=True)
        rows = (origin / "train.jsonl").read_text(encoding="utf-8").strip("\n").split("\n")
        (folder / "train.jsonl").write_text("\n".join(rows[:-HELD_OUT]), encoding="utf-8")
        (folder / "held_out.jsonl").write_text("\n".join(rows[-HELD_OUT:]), encoding="utf-8")
        shutil.copy(origin / "validation.jsonl", folder)


def data_folder_of(options, task: str) -> Path:
    """The folder of a task's files."""
    module, _, _, data_folder, *_ = TASKS[task]
    return Path(options.work).resolve() / "data" / task if module == "train_qa" else Path(options.data) / data_folder


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


def get(record: Record, options, **key) -> dict:
    """The row of a run. The run is made if the row does not exist."""
    if row := record.find(**key):
        return row
    results = run(options, **key)
    row = {**key, "validation": validation_score(results), "test": test_scores(results)}
    scores = "   ".join(f"{name} {value:.1f}" for name, value in row["test"].items())
    print(f"{', '.join(map(str, key.values()))}: {scores}", flush=True)
    return record.add(row)


def tuning(task: str, reader: str) -> list[dict]:
    """Keys of the runs that choose a reader's rate: all rates with the first seed and the frozen encoder."""
    task, reader = TUNED_ON.get(task, task), TUNED_AS.get(reader, reader)
    key = {"task": task, "reader": reader, "way": "frozen", "seed": TASKS[task][-1][0]}
    return [key | {"rate": rate} for rate in RATES[TASKS[task][0]]]


def testing(record: Record, task: str, way: str, reader: str) -> list[dict]:
    """Keys of the runs at the best rate: all seeds, or the first one if the encoder is fine-tuned."""
    rate = max((record.find(**key) for key in tuning(task, reader)), key=lambda row: row["validation"])["rate"]
    seeds = TASKS[task][-1] if way == "frozen" else TASKS[task][-1][:1]
    return [{"task": task, "reader": reader, "way": way, "rate": rate, "seed": seed} for seed in seeds]


def unique(keys: list[dict]) -> list[dict]:
    """The keys without duplicates, in order."""
    return list({tuple(sorted(key.items())): key for key in keys}.values())


def main():
    """Runs what is missing in the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="folder with keyphrases/, classification/ and qa/")
    parser.add_argument("--work", required=True, help="folder for runs")
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    parser.add_argument("--readers", nargs="+", choices=tuple(READERS), default=list(READERS))
    parser.add_argument("--jobs", type=int, default=2, help="number of runs at the same time, with one thread each")
    add_record_arguments(parser, "hypernet_quality")
    options = parser.parse_args()
    hold_out(options)
    rates = {f"{module}.py": rates for module, rates in RATES.items()}  # the names that the results file has
    settings = {"rates": rates, "backbone_rate": BACKBONE_RATE}
    settings["data"] = {task: data_folder_of(options, task) for task in TASKS}
    record = Record(options.name, overwrite=options.overwrite, **settings)
    readers = {
        "frozen": {task: TASKS[task][1] for task in TASKS},
        "fine-tuned": {task: names for task, (names, _) in FINE_TUNED.items()},
    }
    wanted = [(task, way, reader) for task in options.tasks for way in options.ways for reader in readers[way][task]]
    wanted = [entry for entry in wanted if entry[2] in options.readers]
    with ThreadPoolExecutor(options.jobs) as pool:
        make = partial(pool.map, lambda key: get(record, options, **key))
        list(make(unique([key for task, _, reader in wanted for key in tuning(task, reader)])))
        list(make([key for entry in wanted for key in testing(record, *entry)]))


if __name__ == "__main__":
    main()
