"""Keyphrase generators on real documents: encoders, masks, relative attention, a warm start; repeats with and without exclusion.

    python benchmarks/exhird_quality.py --data PATH --work FOLDER       # PATH/keyphrases/kp20k_sample and the others

All systems are trained by `lexperts train exhird` on kp20k_sample, stackexchange and inspec together (6,387 documents), for the
same number of epochs and with the plateau schedule. The checkpoint with the lowest loss on kp20k_sample's validation documents
is tested. Runs in the work folder and rows in results/exhird_quality.json are reused if their settings, data and versions are
the same.
"""

import json
import shutil
import time
from functools import partial
from pathlib import Path

from common import Record, make_parser, run_once
from keyphrase_sets import data_file

TRAIN = ("kp20k_sample", "stackexchange", "inspec")
TEST = ("kp20k_sample", "inspec", "krapivin", "nus", "semeval2010")
WINDOWS = {"inspec": 4}  # K_D of the reference's scripts; 1 elsewhere
SHARED = {
    "hidden_size": 300,
    "num_train_epochs": 4,
    "bf16": True,
    "per_device_train_batch_size": 16,
    "per_device_eval_batch_size": 16,
    "train_sampling_strategy": "group_by_length",
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "save_total_limit": 1,
    "logging_steps": 50,
    "report_to": "none",
    "disable_tqdm": True,
}
TRANSFORMER = {"encoder_type": "transformer", "num_hidden_layers": 4, "num_attention_heads": 6, "learning_rate": 3e-4}
FULL = {"use_lead": False, "use_window": False, "use_top_k": False}
SYSTEMS = {
    "warm start, MiniLM-L6": {"encoder_type": "pretrained", "learning_rate": 1e-3, "backbone_lr": 1e-4},
    "BiGRU": {"encoder_type": "bigru", "num_hidden_layers": 2, "embedding_size": 100, "learning_rate": 1e-3},
    "Transformer + SM + RMHA": TRANSFORMER,
    "Transformer": TRANSFORMER | FULL | {"relative_attention": "off"},
    "Transformer + SM": TRANSFORMER | {"relative_attention": "off"},
    "Transformer + RMHA": TRANSFORMER | FULL,
}


def prepare(options, warm: bool) -> Path:
    """Prepares the documents once, with sub-words for a warm start."""
    folder = options.work / ("data-minilm" if warm else "data")
    settings = {"train_files": [data_file(options.data, name, "train") for name in TRAIN]}
    settings |= {"validation_files": [data_file(options.data, "kp20k_sample", "validation")]}
    settings |= {"backbone": "minilm"} if warm else {}
    run_once("train", "exhird-data", output=folder, done="validation", options=settings, overwrite=options.overwrite)
    return folder


def test(options, model: Path, name: str, mode: str) -> dict:
    """Scores of a trained model on a test set, with or without exclusion."""
    output, file = model.parent / "scores" / f"{model.name}-{mode}-{name}", data_file(options.data, name, "test")
    window = WINDOWS.get(name, 1) if mode == "exclusion" else 0
    settings = {"model": model, "test_files": f"{name}={file}", "exclusion_window": window}
    settings |= {"max_rows": options.rows} if options.rows else {}
    run = {"output": output, "done": "scores.json", "options": settings, "overwrite": options.overwrite}
    run_once("evaluate", "exhird", **run, test_files={name: file})
    return json.loads((output / "scores.json").read_text(encoding="utf-8"))[name]


def measure(options, system: str, seed: int) -> dict:
    """One training and its test scores, with and without exclusion."""
    settings = SYSTEMS[system]
    folder = options.work / f"{system.replace(' ', '-').replace(',', '')}-{seed}"
    start = time.perf_counter()
    data = prepare(options, settings["encoder_type"] == "pretrained")
    arguments = SHARED | settings | {"data": data, "seed": seed, "use_cpu": options.device == "cpu"}
    run_once("train", "exhird", output=folder, done="model.safetensors", options=arguments, overwrite=options.overwrite)
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    scores = {mode: {name: test(options, folder, name, mode) for name in TEST} for mode in ("exclusion", "none")}
    seconds = time.perf_counter() - start
    present = "   ".join(f"{name} {100 * s['present']['F1@M']:.1f}" for name, s in scores["exclusion"].items())
    print(f"{system}, seed {seed}: present F1@M {present}   ({seconds:.0f} s)", flush=True)
    return {"device": options.device, "settings": settings, "scores": scores, "seconds": seconds}


def main():
    """Runs what is missing in the results."""
    parser = make_parser(__doc__, "exhird_quality", "keyphrases/", work=True)
    parser.add_argument("--systems", nargs="+", choices=tuple(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", type=int, help="number of test documents of each set; by default all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device for training")
    options = parser.parse_args()
    settings = {"shared": SHARED, "rows": options.rows, "device": options.device}
    settings["data"] = {name: data_file(options.data, name, "train") for name in TRAIN}
    settings["data"] |= {f"{name}, test": data_file(options.data, name, "test") for name in TEST}
    record = Record(options.name, overwrite=options.overwrite, **settings)
    for warm in sorted({SYSTEMS[system]["encoder_type"] == "pretrained" for system in options.systems}):
        prepare(options, warm)  # before the jobs, of which several need it
    keys = [{"system": system, "seed": seed} for seed in options.seeds for system in options.systems]
    record.complete(partial(measure, options), keys, options.jobs)


if __name__ == "__main__":
    main()
