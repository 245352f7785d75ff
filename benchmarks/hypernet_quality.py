"""The hypernetwork against other ways of reading the same states: keyphrases, classes and answers, on MiniLM-L6.

    python benchmarks/hypernet_quality.py --data PATH --work FOLDER       # PATH/keyphrases, classification, qa

Each reader has the same encoder, head, rows and epochs, states of the same size (512) and the rate that does best on validation
rows with the first seed and the frozen encoder (bbc_news takes ag_news's, squad_v2 squad_v1's): the hypernetwork as in the
paper (one way), and both ways with weights that all texts share, a BiLSTM, for keyphrases the title-guided encoder and a
BiLSTM over states that know no title (both at the BiLSTM's rate), for classes and answers the states as they are (classes by
their mean), and for classes LSTMs whose states' mean is classified in place of the last one. Frozen and fine-tuned, where the
encoder has a rate of its own, by the scripts of examples/hypernet. Keyphrases are chosen by the best path or by a threshold of
probability, whichever does better on validation documents; the best paths alone are a row of their own.

A run that lies in the work folder or stands in results/hypernet_quality.json is not made again.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from common import Record

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "hypernet"
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
    "hypernet, shared weights": BOTH_WAYS | {"base_weights": True},
    "bilstm": {"reader": "bilstm"},
    "title-guided": {"reader": "title_guided"},
    "bilstm, without titles": {"reader": "bilstm", "title_column": "no such column"},
    "hypernet": ONE_WAY,
    "hypernet, mean": ONE_WAY | {"readout": "mean"},
    "bilstm, mean": {"reader": "bilstm", "readout": "mean"},
    "plain": {"reader": "plain", "readout": "mean"},  # its last state would be that of one word
}
TUNED_AS = {
    "title-guided": "bilstm",
    "bilstm, without titles": "bilstm",
    "bilstm, mean": "bilstm",
    "hypernet, mean": "hypernet",
}  # whose rate they take
TUNED_ON = {"bbc_news": "ag_news", "squad_v2": "squad_v1"}  # whose rates are taken
CLASSIFIERS = ("hypernet, shared weights", "plain", "bilstm", "bilstm, mean", "hypernet", "hypernet, mean")


def questions(place: str) -> tuple:
    files = {"train_files": "train", "validation_files": "held_out", "test_files": "validation"}
    arguments = {"max_length": 256, "stride": 64, "num_train_epochs": 2, "max_train_rows": 2000, "max_test_rows": 1000}
    arguments |= {"save_strategy": "no", "show": 0}
    return "train_qa.py", ("plain", "bilstm", "hypernet"), files, place, arguments, (0,)


# name -> script, readers, files, their folder below --data, arguments, seeds
TASKS = {
    "inspec": (
        "train_keyphrases.py",
        ("hypernet, shared weights", "bilstm", "hypernet", "title-guided", "bilstm, without titles"),
        {"train_files": "train", "validation_files": "validation", "test_files": "test"},
        "keyphrases/inspec",
        {
            "max_length": 256,
            "num_train_epochs": 7,
            "head_dropout": 0.3,
            "show": 0,
            "early_stopping_patience": 0,
            **EVERY_EPOCH,
        },
        (0, 1, 2),
    ),
    "ag_news": (
        "train_classification.py",
        CLASSIFIERS,
        {"train_files": "train", "test_files": "test"},
        "classification/ag_news",
        {"max_length": 128, "num_train_epochs": 3, "max_train_rows": 3000, "max_test_rows": 2000, **EVERY_EPOCH},
        (0,),
    ),
    "bbc_news": (
        "train_classification.py",
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
}  # readers and epochs: fewer, as an epoch costs ten times as much
RATES = {
    "train_keyphrases.py": (4e-3, 8e-3, 1.6e-2),
    "train_classification.py": (2e-3, 8e-3),
    "train_qa.py": (2e-3, 8e-3),
}
BACKBONE_RATE = 1e-4
HELD_OUT = 400


def run(options, task: str, reader: str, way: str, rate: float, seed: int) -> dict:
    """One training -> its results.json."""
    script, _, files, _, arguments, _ = TASKS[task]
    folder = (
        Path(options.work).resolve() / task / f"{way}-{reader.replace(', ', '-').replace(' ', '-')}-{rate:g}-{seed}"
    )
    if not (folder / "results.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        data = files_of(options, task)
        given = SHARED | arguments | WAYS[way] | {name: data / f"{split}.jsonl" for name, split in files.items()}
        if way == "fine-tuned":
            given["num_train_epochs"] = FINE_TUNED[task][1]
        given |= READERS[reader] | {"learning_rate": rate, "seed": seed, "output_dir": folder}
        states = "states, no titles" if "title_column" in READERS[reader] else "states"
        given |= {"backbone_lr": BACKBONE_RATE, "states_dir": folder.parent / states}
        command = [sys.executable, str(EXAMPLES / script)]
        for name, value in given.items():
            command += [f"--{name}", str(value)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        start = time.perf_counter()
        with (folder / "log.txt").open("a", encoding="utf-8") as log:
            done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        if done.returncode:
            raise RuntimeError(f"{script} failed: see {folder / 'log.txt'}")
        print(f"{task} {folder.name}: {time.perf_counter() - start:.0f} s", flush=True)
        for checkpoint in [*folder.glob("checkpoint-*"), *folder.glob("*.safetensors")]:
            shutil.rmtree(checkpoint) if checkpoint.is_dir() else checkpoint.unlink()
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def hold_out(options) -> None:
    """Questions have no validation split of their own: the last training rows are held out for choosing rates."""
    for task in ("squad_v1", "squad_v2"):
        origin, folder = Path(options.data) / TASKS[task][3], files_of(options, task)
        folder.mkdir(parents=True, exist_ok=True)
        rows = (origin / "train.jsonl").read_text(encoding="utf-8").strip("\n").split("\n")
        (folder / "train.jsonl").write_text("\n".join(rows[:-HELD_OUT]), encoding="utf-8")
        (folder / "held_out.jsonl").write_text("\n".join(rows[-HELD_OUT:]), encoding="utf-8")
        shutil.copy(origin / "validation.jsonl", folder)


def files_of(options, task: str) -> Path:
    script, _, _, place, *_ = TASKS[task]
    return Path(options.work).resolve() / "data" / task if script == "train_qa.py" else Path(options.data) / place


def validation_score(results: dict) -> float:
    """What a rate is chosen by."""
    if "best_validation_span_f1" in results:
        return results["best_validation_span_f1"]
    if "best_validation_accuracy" in results:
        return results["best_validation_accuracy"]
    return results["validation"]["f1"]


def test_scores(results: dict) -> dict[str, float]:
    """In per cent."""
    test = results["test"]
    if "spans" in test:
        scores = {"F1 of spans": 100 * test["spans"]["f1"], "F1 of spans, best paths": 100 * test["paths"]["f1"]}
        return scores | {f"F1@{k}, {r}": 100 * test[r][f"f1@{k}"] for r in ("lexperts", "seke") for k in (5, 10)}
    if "test_accuracy" in test:
        return {"accuracy": 100 * test["test_accuracy"]}
    return {name: test[name] for name in ("exact", "f1", "HasAns_f1", "NoAns_f1") if name in test}


def get(record: Record, options, **place) -> dict:
    """The row of a run; made where there is none."""
    if row := record.find(**place):
        return row
    results = run(options, **place)
    row = {**place, "validation": validation_score(results), "test": test_scores(results)}
    said = "   ".join(f"{name} {value:.1f}" for name, value in row["test"].items())
    print(f"{', '.join(map(str, place.values()))}: {said}", flush=True)
    return record.add(row)


def tuning(task: str, reader: str) -> list[dict]:
    """The runs by which a reader's rate is chosen: all rates with the first seed and the frozen encoder."""
    task, reader = TUNED_ON.get(task, task), TUNED_AS.get(reader, reader)
    place = {"task": task, "reader": reader, "way": "frozen", "seed": TASKS[task][-1][0]}
    return [place | {"rate": rate} for rate in RATES[TASKS[task][0]]]


def testing(record: Record, task: str, way: str, reader: str) -> list[dict]:
    """The runs at the best rate: all seeds, or the first where the encoder is fine-tuned."""
    rate = max((record.find(**place) for place in tuning(task, reader)), key=lambda row: row["validation"])["rate"]
    seeds = TASKS[task][-1] if way == "frozen" else TASKS[task][-1][:1]
    return [{"task": task, "reader": reader, "way": way, "rate": rate, "seed": seed} for seed in seeds]


def unique(places: list[dict]) -> list[dict]:
    return list({tuple(sorted(place.items())): place for place in places}.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--work", required=True)
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    parser.add_argument("--readers", nargs="+", choices=tuple(READERS), default=list(READERS))
    parser.add_argument("--jobs", type=int, default=2, help="at once, of one thread each")
    parser.add_argument("--name", default="hypernet_quality", help="of the file in results/")
    options = parser.parse_args()
    hold_out(options)
    record = Record(options.name, rates=RATES, backbone_rate=BACKBONE_RATE)
    readers = {
        "frozen": {task: TASKS[task][1] for task in TASKS},
        "fine-tuned": {t: of[0] for t, of in FINE_TUNED.items()},
    }
    wanted = [(task, way, reader) for task in options.tasks for way in options.ways for reader in readers[way][task]]
    wanted = [given for given in wanted if given[2] in options.readers]
    with ThreadPoolExecutor(options.jobs) as pool:
        make = partial(pool.map, lambda place: get(record, options, **place))
        list(make(unique([place for task, _, reader in wanted for place in tuning(task, reader)])))
        list(make([place for given in wanted for place in testing(record, *given)]))


if __name__ == "__main__":
    main()
