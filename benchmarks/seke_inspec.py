"""How well does SEKE on MiniLM extract Inspec's keyphrases, epoch by epoch, compared with the vanilla head?

    python benchmarks/seke_inspec.py --data PATH --work FOLDER      # PATH/keyphrases/inspec/{train,validation,test}.jsonl

Runs `lexperts train seke` once per head (about 20 minutes each on two free cores; a finished run
with the same settings, data and versions is reused) with the
paper's recipe on 1,200 of the 1,500 training and validation documents, and records the scores of every epoch. Then scores the
remaining checkpoints on the test documents, with the most likely labels and at the best threshold on the 300 validation
documents.
"""

import json
from pathlib import Path

from common import make_parser, write
from keyphrase_sets import HEADS, data_files, train_seke
from transformers import pipeline

from keyphrase_tools.evaluation import THRESHOLDS, gold_phrases, score_phrases
from keyphrase_tools.ranking import rank_phrases
from keyphrase_tools.rows import full_text
from lexperts.recipes.seke.arguments import DataArguments
from lexperts.recipes.seke.data import load_documents


def train(head: str, args) -> dict:
    """Trains a head, unless its folder holds the finished run, and returns the record of the run."""
    files = data_files(args.data, "inspec")
    options = {
        "train_files": [files["train"], files["validation"]], "test_files": [files["test"]], "test_every_epoch": True,
        "num_train_epochs": args.epochs, "lr_scheduler_type": "constant", "seed": args.seed,
    }  # fmt: skip
    return train_seke("minilm_cpu", args.work / f"inspec_{head}", head, options, overwrite=args.overwrite, threads=None)


def by_epoch(results: dict) -> list[dict]:
    """One row per epoch: test F1@5 and F1@10, validation F1@10."""
    rows = {}
    for entry in results["epochs"]:
        row = rows.setdefault(round(entry.get("epoch", 0)), {})
        for name in ("test_f1@5", "test_f1@10", "eval_f1@5", "eval_f1@10"):
            if name in entry:
                row[name] = round(100 * entry[name], 2)
    return [{"epoch": epoch, **row} for epoch, row in sorted(rows.items()) if "test_f1@5" in row]


class Split:
    """Documents with their words' probabilities, so that thresholds can be tried without running the model again."""

    def __init__(self, documents: list[dict], extract):
        self.texts = [full_text(row) for row in documents]
        self.gold = gold_phrases(self.texts, [row["keyphrases"] for row in documents], "lexperts")
        self.words = extract.read_words(self.texts, batch_size=16)

    def f1(self, threshold: float | None) -> dict[int, float]:
        """Test F1@5 and F1@10 at a threshold, or with the most likely labels."""
        documents = zip(self.texts, self.words, strict=True)
        scores = score_phrases([rank_phrases(text, *read, threshold) for text, read in documents], self.gold, k=(5, 10))
        return {k: round(100 * scores[f"f1@{k}"], 2) for k in (5, 10)}


def score_checkpoints(head: str, data: Path, work: Path) -> list[dict]:
    """Test F1 of the remaining checkpoints, with the most likely labels and at the best threshold on validation documents."""
    files = {split: str(path) for split, path in data_files(data, "inspec").items()}
    pooled = DataArguments(train_files=[files["train"], files["validation"]], test_files=[files["test"]])
    documents = load_documents(pooled)
    folders = (work / f"inspec_{head}").glob("checkpoint-*")
    rows = []
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
        rows.append(row)
    return rows


def main():
    """Runs the benchmark."""
    parser = make_parser(__doc__, "seke_inspec", "keyphrases/inspec/", work=True)
    parser.add_argument("--heads", nargs="+", default=["moe_rnn", "vanilla"], choices=HEADS)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    results = {}
    for head in args.heads:
        results[head] = {"epochs": by_epoch(train(head, args))}
        results[head]["checkpoints"] = score_checkpoints(head, args.data, args.work)
        for row in results[head]["epochs"]:
            print(f"{head:8} epoch {row['epoch']}   F1@5 {row['test_f1@5']:.1f}   F1@10 {row['test_f1@10']:.1f}")
    recipe = {"backbone": "all-MiniLM-L6-v2", "recipe": "LoRA r 16, lr 2e-4"}
    write(args.name, results, epochs=args.epochs, seed=args.seed, **recipe)


if __name__ == "__main__":
    main()
