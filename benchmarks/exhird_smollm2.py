"""Keyphrases that the text does not contain: ExHiRD over SmolLM2 against its GRU and a warm start on the same rows, and an extractor.

    pip install ./models/smollm2 ./models/exhird-smollm2
    python benchmarks/exhird_smollm2.py --data PATH --work FOLDER --systems default extractor neighbours     # as installed: half an hour
    python benchmarks/exhird_smollm2.py --data PATH --work FOLDER                                 # hours on two cores
    python benchmarks/exhird_smollm2.py --data PATH --work FOLDER --systems default --rows 500 --name exhird_smollm2_windows \\
        --modes "no exclusion" "window 1" "window 4" "all preceding"

`extractor` is the default model of extraction with the style of the set, `neighbours` the tags that are most frequent among the nearest training
rows, by MiniLM-L6 (each weighted by its similarity), `examples` the generator with the training rows as `--examples`. All other systems are trained on the training rows of one set: `default` is the
packaged generator, trained on stackexchange, `decoder` the same recipe (`smollm2_cpu.yml`), trained by this script. Scores are those of
ExHiRD's convention on whole test splits, with 95% intervals (bootstrap over documents), and differences from the first mode of a system, of
`examples` from the generator's at least 8 phrases (paired). A system generates as many phrases as it was trained
to, or at least eight, none of which begins as an earlier one.
"""

import json
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from by_document import f1_of_means
from common import Record, make_parser, run_lexperts, run_once
from exhird_quality import SHARED
from exhird_quality import SYSTEMS as TRAINED
from keyphrase_sets import STYLE_OF_SET, data_file
from tqdm import tqdm

from keyphrase_tools.metrics import keyphrase_f1_by_document
from keyphrase_tools.phrase_lists import read_labelled
from keyphrase_tools.words import stem_phrase
from lexperts.recipes.common.bootstrap import bootstrap_means, confidence_interval
from lexperts.recipes.exhird.near_examples import NearExamples
from modeling_exhird.data_exhird import clean_keyphrases
from modeling_exhird.tokenization_exhird import split_document

SETS = {"stackexchange": {"num_train_epochs": 2}, "kp20k_sample": {"num_train_epochs": 4}}
GENERATOR, EXTRACTOR, NEIGHBOURS, EXAMPLES, DECODER = "default", "extractor", "neighbours", "examples", "decoder"
SYSTEMS = (GENERATOR, EXTRACTOR, NEIGHBOURS, EXAMPLES, DECODER, "BiGRU", "warm start, MiniLM-L6")
SUGGESTED, BEST = 5, 10  # of near documents alone, and beside generated ones
LONGER, FOUND = "at least 8 phrases", "extracted"
MODES = {
    "as trained": {},
    LONGER: {"min_phrases": 8, "exclusion_window": -1},
    "no exclusion": {"exclusion_window": 0},
    "window 1": {"exclusion_window": 1},
    "window 4": {"exclusion_window": 4},
    "all preceding": {"exclusion_window": -1},
}
CUTS = (5, "M")


def extract(options, name: str, output: Path) -> None:
    """What the default model of extraction finds, in the file that `lexperts evaluate exhird` would write."""
    from transformers import pipeline

    import lexperts  # noqa: F401

    rows = read_labelled(data_file(options.data, name, "test"), hint="")[: options.rows]
    found = pipeline("keyphrase-extraction")(
        [{"title": row.get("title"), "text": row["text"]} for row in rows], style=STYLE_OF_SET[name], batch_size=32
    )
    save(output, rows, [[phrase["keyphrase"] for phrase in phrases] for phrases in found])


def near_examples(options, name: str) -> tuple[list[dict], list[dict]]:
    """The test rows, and as documents with the keyphrases of near training rows as candidates."""
    known = read_labelled(data_file(options.data, name, "train"), hint="")
    rows = read_labelled(data_file(options.data, name, "test"), hint="")[: options.rows]
    documents = [{"title": row.get("title"), "text": row["text"]} for row in rows]
    return rows, NearExamples(known, cache=options.work / "embeddings").add_candidates(documents)


def look_up(options, name: str, output: Path) -> None:
    """The keyphrases of the nearest training rows, in the file that `lexperts evaluate exhird` would write."""
    rows, documents = near_examples(options, name)
    save(output, rows, [document["candidates"][:SUGGESTED] for document in documents])


def generator_of(name: str) -> str:
    """The decoder that was trained on a set."""
    return GENERATOR if name == "stackexchange" else DECODER


def rank(options, name: str, output: Path) -> None:
    """What the set's generator writes and the keyphrases of the nearest training rows, by the generator's probability."""
    from transformers import pipeline

    import lexperts  # noqa: F401

    rows, documents = near_examples(options, name)
    generate = pipeline("keyphrase-generation", model=train(options, generator_of(name), name))
    found = generate(tqdm(documents), num_keyphrases=BEST, **MODES[LONGER])
    save(output, rows, [[phrase["keyphrase"] for phrase in phrases] for phrases in found])


def generated(options, system: str, name: str, mode: str, seed: int = 1) -> Path:
    """The file of a system's phrases."""
    folder = "-".join(map(file_name, (system, name, str(seed), mode, str(options.rows))))
    return options.work / "generated" / folder / f"{name}.jsonl"


def save(path: Path, rows: list[dict], phrases: list[list[str]]) -> None:
    """Writes phrases as `lexperts evaluate exhird` does."""
    lists = ([" ".join(words) for words in clean_keyphrases(row, max_words=None)] for row in phrases)
    lines = ({**row, "generated": own} for row, own in zip(rows, lists, strict=True))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def train(options, system: str, name: str, seed: int) -> str:
    """Trains a system on a set -> its folder."""
    if system == GENERATOR:
        return "exhird-smollm2"
    folder = options.work / f"{file_name(system)}-{name}-{seed}"
    files = {f"{split}_files": data_file(options.data, name, split) for split in ("train", "validation")}
    run = {"threads": options.threads, "overwrite": options.overwrite}
    if system == DECODER:
        given = files | SETS[name] | {"seed": seed, "use_cpu": not options.gpu, "show": 0}
        run_once("train", "exhird", "smollm2_cpu", output=folder, done="model.safetensors", options=given, **run)
        return str(folder)
    settings = TRAINED[system]
    warm = {"backbone": "minilm"} if settings["encoder_type"] == "pretrained" else {}
    data = options.work / f"data-{name}{'-minilm' if warm else ''}"
    run_once("train", "exhird-data", output=data, done="validation", options=files | warm, **run)
    given = SHARED | settings | {"data": data, "seed": seed, "use_cpu": not options.gpu}
    run_once("train", "exhird", output=folder, done="model.safetensors", options=given, **run)
    return str(folder)


def scores_of(path: Path, data: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """The scores of a file of generated phrases, with intervals; and for each score precision and recall of the documents (n, 2)."""
    generated = [json.loads(line)["generated"] for line in path.read_text(encoding="utf-8").splitlines()]
    rows = read_labelled(data, hint="")[: len(generated)]
    gold = [[" ".join(words) for words in clean_keyphrases(row["keyphrases"], max_words=None)] for row in rows]
    sources = [" ".join(word for word, _ in split_document(row["text"], row.get("title"))) for row in rows]
    by_part = keyphrase_f1_by_document(generated, gold, convention="exhird", sources=sources, k=CUTS)
    values: dict[str, np.ndarray] = {}
    result: dict = {"documents": len(rows), "phrases": float(np.mean([len(row) for row in generated]))}
    for part in ("present", "absent"):
        for cut in CUTS:
            columns = [[row[f"{kind}@{cut}"] for kind in ("precision", "recall")] for row in by_part[part]]
            name, both = f"{part} F1@{cut}", np.array(columns, dtype=float)  # (n, 2)
            values[name] = both
            low, high = confidence_interval(f1_of_means(bootstrap_means(both)))
            result[name] = [float(f1_of_means(both.mean(0))), low, high]
    stems = [[stem_phrase(phrase) for phrase in row] for row in generated]
    total = sum(map(len, stems))
    return result | {"repeats": 1 - sum(len(set(row)) for row in stems) / total if total else 0.0}, values


def differences(ours: dict[str, np.ndarray], others: dict[str, np.ndarray]) -> dict[str, list[float]]:
    """How much more each score is than another one of the same documents, with its interval."""

    def subtract(means: np.ndarray) -> np.ndarray:
        return f1_of_means(means[..., :2]) - f1_of_means(means[..., 2:])

    found = {}
    for name, values in ours.items():
        both = np.concatenate([values, others[name]], axis=1)  # (n, 4)
        found[name] = [float(subtract(both.mean(0))), *confidence_interval(subtract(bootstrap_means(both)))]
    return found


def measure(options, system: str, set: str, seed: int) -> dict:
    """One system on one set, in each mode of generation."""
    test, results = data_file(options.data, set, "test"), {}
    untrained = {EXTRACTOR: extract, NEIGHBOURS: look_up, EXAMPLES: rank}.get(system)
    model, first = None if untrained else train(options, system, set, seed), None
    if system == EXAMPLES and (path := generated(options, generator_of(set), set, LONGER)).exists():
        first = scores_of(path, test)[1]
    for mode in options.modes if model else [FOUND]:
        path, start = generated(options, system, set, mode, seed), time.perf_counter()
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            if untrained:
                untrained(options, set, path)
            else:
                given = {"model": model, "test_files": f"{set}={test}", "output_dir": path.parent} | MODES[mode]
                given |= {"max_rows": options.rows} if options.rows else {}
                log = path.parent.with_suffix(".log")
                run_lexperts("evaluate", "exhird", log=log, threads=options.threads, **given)
        scores, values = scores_of(path, test)
        results[mode] = scores | {"seconds": time.perf_counter() - start}
        if first:
            results[mode]["difference"] = differences(values, first)
        first = first or values
        print(system, set, mode, {name: value for name, value in results[mode].items() if "F1" in name}, flush=True)
    return {"system": system, "set": set, "seed": seed, "scores": results}


def file_name(text: str) -> str:
    """A name of a system or a mode in file names."""
    return text.replace(" ", "_").replace(",", "")


def main():
    """Runs what is missing in the results."""
    parser = make_parser(__doc__, "exhird_smollm2", "keyphrases/", work=True)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--sets", nargs="+", choices=tuple(SETS), default=["stackexchange"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--modes", nargs="+", choices=tuple(MODES), default=list(MODES)[:2], help="of generation")
    parser.add_argument("--rows", type=int, help="number of test documents of each set; by default all")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process")
    parser.add_argument("--gpu", action="store_true", help="train on the GPU; otherwise on the CPU")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)  # here, too, and as the results will say
    settings = {"shared": SHARED, "sets": SETS, "modes": options.modes, "rows": options.rows, "gpu": options.gpu}
    settings["data"] = {name: data_file(options.data, name, "test") for name in SETS}
    record = Record(options.name, overwrite=options.overwrite, **settings)
    keys = [
        {"system": system, "set": name, "seed": seed}
        for seed in options.seeds
        for name in options.sets
        for system in options.systems
        if system != GENERATOR or name == "stackexchange"
    ]
    record.complete(partial(measure, options), keys, options.jobs)


if __name__ == "__main__":
    main()
