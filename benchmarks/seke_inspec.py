"""How well does SEKE on MiniLM extract Inspec's keyphrases, epoch by epoch, beside the vanilla head?

    python benchmarks/seke_inspec.py --data PATH      # PATH/keyphrases/inspec/{train,validation,test}.jsonl

Runs examples/seke/train.py once a head (about 20 minutes each on two free cores; a finished run is not repeated) with the
paper's recipe, on 1,200 of the 1,500 training and validation documents, and keeps the scores of every epoch. Then, for the
checkpoints that are left, the test scores by the likeliest labels and at the threshold that is best on the 300
validation documents.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from common import write
from phrase_scores import word_probabilities
from transformers import pipeline

from keyphrase_tools.decoding import rank_phrases
from keyphrase_tools.documents import full_text
from keyphrase_tools.evaluation import THRESHOLDS, score_phrases
from keyphrase_tools.labels import present
from keyphrase_tools.words import split_words

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples" / "seke"))
from recipe import DataArguments, load_documents  # noqa: E402

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
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def by_epoch(results: dict) -> list[dict]:
    """One row an epoch: test F1@5 and F1@10, validation F1@10."""
    rows = {}
    for entry in results["epochs"]:
        row = rows.setdefault(round(entry.get("epoch", 0)), {})
        for name in ("test_f1@5", "test_f1@10", "eval_f1@5", "eval_f1@10"):
            if name in entry:
                row[name] = round(100 * entry[name], 2)
    return [{"epoch": epoch, **row} for epoch, row in sorted(rows.items()) if "test_f1@5" in row]


class Split:
    """Documents with what a model says of their words, so that thresholds can be tried without reading them again."""

    def __init__(self, documents: list[dict], extract):
        self.texts = [full_text(row) for row in documents]
        self.words = [split_words(text) for text in self.texts]
        self.gold = [present(w, row["keyphrases"]) for w, row in zip(self.words, documents, strict=True)]
        self.said = word_probabilities(extract, self.texts)

    def f1(self, threshold: float | None) -> dict[int, float]:
        documents = zip(self.texts, self.words, self.said, strict=True)
        scores = score_phrases([rank_phrases(*row, threshold) for row in documents], self.gold, k=(5, 10))
        return {k: round(100 * scores[f"f1@{k}"], 2) for k in (5, 10)}


def score_checkpoints(head: str, data: Path, output: Path) -> list[dict]:
    """Test F1 of the checkpoints that are left, by labels and at the threshold found on the validation documents."""
    files = {split: str(data / "keyphrases" / "inspec" / f"{split}.jsonl") for split in ("train", "validation", "test")}
    pooled = DataArguments(train_files=[files["train"], files["validation"]], test_files=[files["test"]])
    documents = load_documents(pooled)
    folders = (output / f"inspec_{head}").glob("checkpoint-*")
    found = []
    for folder in sorted(folders, key=lambda folder: int(folder.name.removeprefix("checkpoint-"))):
        extract = pipeline("keyphrase-extraction", model=str(folder))
        validation, test = Split(documents["validation"], extract), Split(documents["test"], extract)
        tried = {threshold: validation.f1(threshold)[10] for threshold in THRESHOLDS}
        best = max(tried, key=tried.get)
        epoch = round(json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["epoch"])
        row = {"epoch": epoch, "validation_f1@10": tried, "threshold": best}
        for name, threshold in (("labels", None), ("threshold", best)):
            row |= {f"{name}_f1@{k}": value for k, value in test.f1(threshold).items()}
        f1 = "   ".join(f"F1@{k} {row[f'threshold_f1@{k}']:.1f}" for k in (5, 10))
        print(f"{head:8} epoch {epoch}, threshold {best}   {f1}")
        found.append(row)
    return found


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
        found[head] = {"epochs": by_epoch(results), "checkpoints": score_checkpoints(head, args.data, args.output)}
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
