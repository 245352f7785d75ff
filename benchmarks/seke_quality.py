"""SEKE's four ablations on Inspec, three seeds each, and YAKE and KeyBERT; ranking by score and by position; calibration.

    python benchmarks/seke_quality.py --data PATH --work FOLDER      # PATH/keyphrases/inspec; pip install yake keybert

Trains MiniLM-L6 with LoRA on Inspec's train split by `lexperts train seke`; epoch, threshold and temperature are selected on its
validation split, and the test split is scored with gold keyphrases by both sets of rules. YAKE and KeyBERT have their own defaults
(KeyBERT with the same MiniLM and phrases of one to three words). Rows in results/seke_quality.json and runs in the work folder are
reused if their settings, data and versions are the same. An interrupted run is resumed.
"""

from functools import partial
from pathlib import Path

from common import Record, make_parser, peer_versions
from keyphrase_sets import BASELINES, RULES, Documents, data_files, train_seke
from timing import describe
from transformers import pipeline

import keyphrase_tools  # noqa: F401  (registers the pipeline)

UNIFORM = ", uniform"  # experts initialised as PyTorch's linear layers
HEADS = ("moe_rnn", "vanilla", "rnn", "moe", "moe_rnn" + UNIFORM, "moe" + UNIFORM)


def train(options, head: str, seed: int) -> tuple[Path, dict]:
    """Trains a head, unless its folder holds the finished run; the folder, and the run's results."""
    folder = options.work / f"{head.replace(UNIFORM, '-uniform')}-{seed}"
    settings = {f"{split}_files": path for split, path in data_files(options.data, "inspec").items()}
    settings |= {"seed": seed, "num_train_epochs": options.epochs, "show": 0, "bf16": options.bf16}
    settings |= {"disable_tqdm": True, "save_total_limit": 1, "use_cpu": options.device == "cpu"}
    settings |= {"expert_init": "uniform"} if head.endswith(UNIFORM) else {}
    head = head.removesuffix(UNIFORM)
    return folder, train_seke("minilm_cpu", folder, head, settings, overwrite=options.overwrite)


def score(documents: Documents, phrases: list[list[dict]]) -> dict[str, float]:
    """F1@5 and F1@10 by both sets of rules, in per cent."""
    scores = {rules: documents.score(phrases, rules) for rules in RULES}
    return {f"F1@{k}, {rules}": 100 * scores[rules][f"f1@{k}"] for rules in RULES for k in (5, 10)}


def measure(options, splits: dict[str, Documents], system: str, seed: int) -> dict:
    """Test and validation scores, ranked by score and by position, and the calibration that the run recorded."""
    folder, record = train(options, system, seed)
    extract = pipeline("keyphrase-extraction", model=str(folder), device=options.device)
    row = {"device": options.device, "calibration": record["calibration"], "threshold": record["threshold"]}
    row["epochs"] = max(entry.get("epoch", 0) for entry in record["epochs"])
    for name, documents in splits.items():
        ranked = extract(documents.texts, batch_size=16, top_k=None)
        best = [phrases[:10] for phrases in ranked]
        by_position = [sorted(phrases, key=lambda phrase: phrase["start"]) for phrases in ranked]
        row[name] = {"by score": score(documents, best), "by place": score(documents, by_position)}
    print(f"{system}, seed {seed}: {describe(row['test']['by score'])}", flush=True)
    return row


def measure_peer(documents: Documents, system: str, version: str) -> dict:
    """Test scores of YAKE or KeyBERT."""
    scores = score(documents, BASELINES[system](documents.texts))
    print(f"{system}: {describe(scores)}", flush=True)
    return {"test": {"by score": scores}}


def main():
    """Runs the benchmark."""
    parser = make_parser(__doc__, "seke_quality", "keyphrases/inspec/", work=True)
    parser.add_argument("--heads", nargs="*", choices=HEADS, default=list(HEADS), help="none: only YAKE and KeyBERT")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--bf16", action="store_true", help="matrix products of training in bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    files = data_files(options.data, "inspec")
    settings = {name: getattr(options, name) for name in ("epochs", "bf16", "device")}
    record = Record(options.name, overwrite=options.overwrite, **settings, data=files)
    splits = {name: Documents(files[name]) for name in ("test", "validation")}
    for system, version in peer_versions().items():
        if not record.find(system=system, version=version):
            record.remove(system=system)  # of another version
        record.complete(partial(measure_peer, splits["test"]), [{"system": system, "version": version}])
    keys = [{"system": head, "seed": seed} for seed in options.seeds for head in options.heads]
    record.complete(partial(measure, options, splits), keys, options.jobs)


if __name__ == "__main__":
    main()
