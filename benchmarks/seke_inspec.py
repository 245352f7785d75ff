"""How well does SEKE on MiniLM extract Inspec's keyphrases, epoch by epoch, beside the vanilla head?

    python benchmarks/seke_inspec.py --data PATH      # PATH/keyphrases/inspec/{train,validation,test}.jsonl

Runs examples/seke/train.py once a head (about 20 minutes each on two free cores; a finished run is not repeated) with the
paper's recipe, on 1,200 of the 1,500 training and validation documents, and keeps the scores of every epoch.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from common import write

ROOT = Path(__file__).resolve().parent.parent
HEADS = {
    "moe_rnn": {},
    "vanilla": {"use_moe": False, "use_rnn": False},
    "rnn": {"use_moe": False},
    "moe": {"use_rnn": False},
}


def train(head: str, data: Path, output: Path, epochs: int, seed: int) -> dict:
    folder = output / f"inspec_{head}"
    if not (folder / "results.json").exists():
        files = {split: data / "keyphrases" / "inspec" / f"{split}.jsonl" for split in ("train", "validation", "test")}
        options = {
            "num_train_epochs": epochs, "lr_scheduler_type": "constant", "test_every_epoch": True, "seed": seed,
            "output_dir": folder, **HEADS[head],
        }  # fmt: skip
        command = [sys.executable, ROOT / "examples/seke/train.py", ROOT / "examples/seke/minilm_cpu.yml"]
        command += ["--train_files", files["train"], files["validation"], "--test_files", files["test"]]
        command += [str(part) for name, value in options.items() for part in (f"--{name}", value)]
        subprocess.run(list(map(str, command)), check=True)
    return json.loads((folder / "results.json").read_text())


def by_epoch(results: dict) -> list[dict]:
    """One row an epoch: test F1@5 and F1@10, validation F1@10."""
    rows = {}
    for entry in results["epochs"]:
        row = rows.setdefault(round(entry.get("epoch", 0)), {})
        for name in ("test_f1@5", "test_f1@10", "eval_f1@5", "eval_f1@10"):
            if name in entry:
                row[name] = round(100 * entry[name], 2)
    return [{"epoch": epoch, **row} for epoch, row in sorted(rows.items()) if "test_f1@5" in row]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--heads", nargs="+", default=["moe_rnn", "vanilla"], choices=HEADS)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("runs"))
    args = parser.parse_args()
    found = {}
    for head in args.heads:
        results = train(head, args.data, args.output, args.epochs, args.seed)
        found[head] = {"epochs": by_epoch(results), "best": results["test"]}
        for row in found[head]["epochs"]:
            print(f"{head:8} epoch {row['epoch']}   F1@5 {row['test_f1@5']:.1f}   F1@10 {row['test_f1@10']:.1f}")
    write(
        "seke_inspec",
        found,
        epochs=args.epochs,
        seed=args.seed,
        backbone="all-MiniLM-L6-v2",
        recipe="LoRA r 16, lr 2e-4",
    )


if __name__ == "__main__":
    main()
