"""Keyphrases of sets and domains that the model was not trained for: leave one set out in turn, then train on all.

    python benchmarks/seke_domains.py --data PATH --work FOLDER             # PATH/keyphrases/...

Each of five training sets is left out in turn: `lexperts train seke default` trains on the other four, fits its ranker on their
validation documents, and is scored on the test documents of the set left out. The last model is trained on all five and scored on
all seven test sets, of which two (krapivin, nus) have no training documents, without and with the style of each. No test document is
used for any choice. Whole papers of a set are among the validation documents with it, and the crowd's keyphrases count without a style if they are noun
phrases by a spaCy pipeline, which `--tagger` names. Rows in results/seke_domains.json and runs in the work folder are reused if their
settings, data and versions are the same. What to compare with is measured by `keyphrase_peers.py`.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import Record, make_parser
from keyphrase_algorithms import TAGGER
from keyphrase_sets import (
    HEADS,
    STYLES,
    STYLES_OF_TESTS,
    Documents,
    data_file,
    describe_f1,
    mixture_of_sets,
    train_seke,
)
from transformers import pipeline

import keyphrase_tools  # noqa: F401  (registers the pipeline)


def train(options, left_out: str | None, head: str, seed: int) -> tuple[Path, dict]:
    """Trains on all sets but one, unless the folder holds the finished run; the folder, and its results.json."""
    tests = {left_out: left_out}  # name in the results -> set
    if not left_out:
        tests = {name: name for name in STYLES_OF_TESTS}
        tests |= {f"{name}:{style}": name for name, style in STYLES_OF_TESTS.items()}
    settings, files = mixture_of_sets(options.data, [name for name in STYLES if name != left_out], options.tagger)
    files["test_files"] = [data_file(options.data, name, "test") for name in tests.values()]
    settings |= {
        "test_files": [f"{name}={path}" for name, path in zip(tests, files["test_files"], strict=True)],
        "num_train_epochs": options.left_out_epochs if left_out else options.epochs,
        "seed": seed,
    }
    folder = options.work / f"{head}-without-{left_out or 'none'}-{seed}"
    return folder, train_seke(
        "default", folder, head, settings, overwrite=options.overwrite, threads=options.threads, **files
    )


def read_set(folder: Path, path: Path) -> dict[str, dict]:
    """The counts of each document of a file by the model of a run, and its scores by length."""
    documents = Documents(path)
    phrases = pipeline("keyphrase-extraction", model=str(folder))(documents.texts, batch_size=16)
    return {"by_document": documents.count(phrases), "scores": documents.check_scores(phrases)}


def measure(options, record: Record, left_out: str | None, head: str, seed: int) -> None:
    """Adds the rows of one training; that of a set left out has the counts of each document and its scores by length."""
    folder, result = train(options, left_out, head, seed)
    for name, scores in result["test_files"].items():
        name, _, style = name.partition(":")
        if left_out:
            scores |= read_set(folder, data_file(options.data, name, "test"))
        record.add({"system": head, "left_out": left_out, "set": name, "style": style or None, "seed": seed, **scores})
        f1 = describe_f1(scores["seke"])
        print(f"{head} without {left_out}, seed {seed}, on {name}, style {style or 'none'}: {f1}", flush=True)


def main():
    """Runs the benchmark."""
    parser = make_parser(__doc__, "seke_domains", "keyphrases/NAME/", work=True)
    parser.add_argument("--left_out", nargs="*", choices=("none", *STYLES), default=["none", *STYLES])
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=["moe_rnn"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--tagger", default=TAGGER, help="spaCy pipeline for --tagger of the recipe; default: %(default)s"
    )
    parser.add_argument("--epochs", type=float, default=3, help="of the model that is trained on all sets")
    parser.add_argument(
        "--left_out_epochs", type=float, default=1, help="of the models that are trained on all sets but one"
    )
    parser.add_argument("--threads", type=int, default=1, help="of each run")
    options = parser.parse_args()
    data = {name: data_file(options.data, name, "test").parent for name in STYLES_OF_TESTS}
    settings = {
        "epochs": options.epochs,
        "left_out_epochs": options.left_out_epochs,
        "data": data,
        "tagger": options.tagger,
    }
    record = Record(options.name, overwrite=options.overwrite, **settings)
    left_out = [None if name == "none" else name for name in options.left_out]
    runs = [(name, head, seed) for seed in options.seeds for head in options.heads for name in left_out]
    pending = [run for run in runs if not record.find(system=run[1], left_out=run[0], seed=run[2])]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda run: measure(options, record, *run), pending))


if __name__ == "__main__":
    main()
