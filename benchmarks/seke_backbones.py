"""What a larger backbone gains and costs: `train seke default` over MiniLM-L6 and `train seke default_base` over all-mpnet-base-v2.

    python benchmarks/seke_backbones.py --data PATH --work FOLDER --mpnet all-mpnet-base-v2     # on a GPU, if there is one

Both train on all training sets as the default model does, with the same seeds, and are scored without a style on the first
documents of each set, with the counts of each document. Their speed is that of the whole pipeline on one thread of the CPU, in
turns. What is trained is read from the work folder if it is there with the same settings.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

import torch
from common import Record, make_parser
from keyphrase_algorithms import TAGGER
from keyphrase_sets import SPLIT_OF_SET, STYLES, Documents, data_file, describe_f1, mixture_of_sets, train_seke
from timing import interleaved
from transformers import pipeline

import keyphrase_tools  # noqa: F401  (registers the pipeline)

RECIPES = {"MiniLM-L6": "default", "all-mpnet-base-v2": "default_base"}
WHOLE = 25  # of the sets of whole papers
HEAD = "moe_rnn"


def folder_of(options, backbone: str, seed: int) -> Path:
    """The folder of a run."""
    return options.work / f"{RECIPES[backbone]}-{seed}"


def measure(options, backbone: str, seed: int) -> list[dict]:
    """Trains a model, unless it is there; a row for each set."""
    torch.set_num_threads(options.threads)
    settings, files = mixture_of_sets(options.data, list(STYLES), options.tagger)
    settings |= {"seed": seed, "num_train_epochs": options.epochs}
    if folder := options.folders.get(backbone):
        settings["backbone"] = files["backbone"] = folder
    train_seke(
        RECIPES[backbone], folder_of(options, backbone, seed), HEAD, settings, overwrite=options.overwrite,
        threads=options.threads, **files,
    )  # fmt: skip
    extract, rows = pipeline("keyphrase-extraction", model=str(folder_of(options, backbone, seed))), []
    for name, split in SPLIT_OF_SET.items():
        limit = WHOLE if name.endswith("_full") else options.documents
        documents = Documents(data_file(options.data, name, split), limit)
        phrases = extract(documents.texts, batch_size=16)
        row = {"set": name, "documents": len(documents.texts), "seke": documents.score(phrases)}
        row |= {"by_document": documents.count(phrases), "scores": documents.check_scores(phrases)["all"]}
        print(f"{backbone}, seed {seed}, {name}: {describe_f1(row['seke'])}", flush=True)
        rows.append(row)
    return rows


def speed(options) -> dict:
    """Parameters, and milliseconds per abstract of the whole pipeline on one thread."""
    torch.set_num_threads(1)
    texts = Documents(data_file(options.data, "inspec", "test"), options.timed).texts
    models = {
        name: pipeline("keyphrase-extraction", model=str(folder_of(options, name, options.seeds[0])), device="cpu")
        for name in RECIPES
    }
    times = interleaved({name: lambda extract=extract: extract(texts) for name, extract in models.items()}, rounds=5)
    parameters = {name: extract.model.num_parameters() for name, extract in models.items()}
    per_text = {name: one["median_ms"] / len(texts) for name, one in times.items()}
    return {"parameters": parameters, "ms_per_abstract": per_text, "abstracts": len(texts), "times": times}


def main():
    """Runs the benchmark."""
    parser = make_parser(__doc__, "seke_backbones", "keyphrases/NAME/", work=True)
    parser.add_argument("--mpnet", type=Path, help="folder of all-mpnet-base-v2; from the Hub by default")
    parser.add_argument("--minilm", type=Path, help="folder of MiniLM-L6; that of lexperts[offline] by default")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--documents", type=int, default=500, help="first documents of each set")
    parser.add_argument("--timed", type=int, default=32, help="abstracts whose time is measured")
    parser.add_argument("--threads", type=int, default=1, help="of each run")
    parser.add_argument("--tagger", default=TAGGER, help="spaCy pipeline for --tagger of the recipe")
    options = parser.parse_args()
    options.folders = {"MiniLM-L6": options.minilm, "all-mpnet-base-v2": options.mpnet}
    data = {name: data_file(options.data, name, split).parent for name, split in SPLIT_OF_SET.items()}
    record = Record(
        options.name, overwrite=options.overwrite, data=data, epochs=options.epochs, documents=options.documents
    )
    keys = [{"backbone": name, "seed": seed} for seed, name in product(options.seeds, RECIPES)]
    pending = [key for key in keys if not record.find(**key)]
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for key, future in [(key, pool.submit(measure, options, **key)) for key in pending]:
            for row in future.result():
                record.add({**key, **row})
    if not record.find(what="speed"):
        record.add({"what": "speed", **speed(options)})


if __name__ == "__main__":
    main()
