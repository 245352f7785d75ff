"""Keyphrase generators on real documents: encoders, masks, relative attention and a warm start; repeats with exclusion and without.

    python benchmarks/exhird_quality.py --data PATH --work FOLDER       # PATH/keyphrases/kp20k_sample and the others

Trained on kp20k_sample, stackexchange and inspec together (6,387 documents), each system for as many epochs and with the plateau
rule; the best of all epochs by loss on kp20k_sample's validation documents is tested. By the scripts of examples/exhird. A run
that lies in the work folder, and a row that stands in results/exhird_quality.json, is not made again.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import Record

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "exhird"
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


def call(script: str, arguments: dict, log: Path):
    """Runs one of the examples; what it prints goes into the log."""
    command = [sys.executable, str(EXAMPLES / script)]
    for name, value in arguments.items():
        command += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("a", encoding="utf-8") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
    if done.returncode:
        raise RuntimeError(f"{script} failed: see {log}")


def prepare(options, warm: bool) -> Path:
    folder = Path(options.work).resolve() / ("data-minilm" if warm else "data")
    if not (folder / "validation").exists():
        folder.mkdir(parents=True, exist_ok=True)
        data = Path(options.data) / "keyphrases"
        given = {"train_files": [data / name / "train.jsonl" for name in TRAIN]}
        given |= {"validation_files": [data / "kp20k_sample" / "validation.jsonl"], "output_dir": folder}
        call("prepare.py", given | ({"pieces": "minilm"} if warm else {}), folder / "log.txt")
    return folder


def run(options, system: str, seed: int) -> dict:
    """One training and its test scores, with exclusion and without."""
    settings = SYSTEMS[system]
    folder = Path(options.work).resolve() / f"{system.replace(' ', '-').replace(',', '')}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    if not (folder / "model.safetensors").exists():
        data = prepare(options, settings["encoder_type"] == "pretrained")
        given = {"data": data, "output_dir": folder, "seed": seed, "use_cpu": options.device == "cpu"}
        call("train.py", SHARED | settings | given, folder / "log.txt")
        for checkpoint in folder.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
    found = {}
    for name in TEST:
        for what, window in (("exclusion", WINDOWS.get(name, 1)), ("none", 0)):
            output = folder / f"test-{what}-{name}"
            if not (output / "scores.json").exists():
                files = f"{name}={Path(options.data) / 'keyphrases' / name / 'test.jsonl'}"
                given = {"model": folder, "test_files": files, "output_dir": output, "exclusion_window": window}
                call("evaluate.py", given | ({"max_rows": options.rows} if options.rows else {}), folder / "log.txt")
            found.setdefault(what, {})[name] = json.loads((output / "scores.json").read_text(encoding="utf-8"))[name]
    seconds = time.perf_counter() - start
    row = {
        "system": system,
        "seed": seed,
        "device": options.device,
        "settings": settings,
        "scores": found,
        "seconds": seconds,
    }
    present = "   ".join(f"{name} {100 * s['present']['F1@M']:.1f}" for name, s in found["exclusion"].items())
    print(f"{system}, seed {seed}: present F1@M {present}   ({seconds:.0f} s)", flush=True)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--work", required=True)
    parser.add_argument("--systems", nargs="+", choices=tuple(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", type=int, help="test documents of each set; by default all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="for training")
    parser.add_argument("--jobs", type=int, default=2, help="at once, of one thread each")
    parser.add_argument("--name", default="exhird_quality", help="of the file in results/")
    options = parser.parse_args()
    record = Record(options.name, shared=SHARED, rows=options.rows, device=options.device)
    for warm in sorted({SYSTEMS[name]["encoder_type"] == "pretrained" for name in options.systems}):
        prepare(options, warm)
    places = [(system, seed) for seed in options.seeds for system in options.systems]
    left = [(system, seed) for system, seed in places if not record.find(system=system, seed=seed)]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda place: record.add(run(options, *place)), left))


if __name__ == "__main__":
    main()
