"""Where the time of keyphrase extraction goes, before and after, and how it grows.

    python benchmarks/pipeline_profile.py --data PATH --before 95093b2      # PATH/keyphrases/inspec, the default model of HEAD

Stages: `clean` (and split into words), `tokenize` (and cut into windows), `pad`, `model` (forward pass to probabilities), `rank`
(probabilities to phrases) and `rest`. Each revision runs in a process of its own, in turns; medians count. Then, for HEAD alone:
documents a second by words per document and by batch size, and the memory of a long stream.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path

from common import commit, write
from revisions import checkout, short_hash

STAGES = {
    "clean": "read_document",
    "tokenize": "encode_windows",
    "pad": "pad_windows",
    "model": "_forward",
    "rank": "_phrases",
}
WORDS = (50, 150, 500, 1500, 5000)
BATCHES = (1, 8, 64)


def timed(function, stage: str, seconds: dict[str, float]):
    """The function, adding its time to a stage."""

    def run(*args, **kwargs):
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[stage] += time.perf_counter() - start

    return run


def open_pipeline(options):
    """The pipeline of the revision that is on the path."""
    from transformers import pipeline

    import lexperts  # noqa: F401  (registers the pipeline)

    return pipeline(
        "keyphrase-extraction", device=options.device, **({"model": options.model} if options.model else {})
    )


def read_texts(options) -> list[str]:
    """Titles and texts of the test documents."""
    lines = Path(options.data, "keyphrases", "inspec", "test.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[: options.documents]]
    return [f"{row.get('title') or ''}. {row['text']}" for row in rows]


def run_stages(options) -> dict:
    """Milliseconds per document of each stage; the first pass over the texts is not counted."""
    import keyphrase_tools.pipeline_keyphrase_extraction as module

    extract, texts = open_pipeline(options), read_texts(options)
    extract(texts, batch_size=options.batch_size)
    seconds = dict.fromkeys(STAGES, 0.0)
    for stage, name in STAGES.items():
        owner = extract if name.startswith("_") else module
        setattr(owner, name, timed(getattr(owner, name), stage, seconds))
    start = time.perf_counter()
    extract(texts, batch_size=options.batch_size)
    total = time.perf_counter() - start
    seconds["rest"] = total - sum(seconds.values())
    return {stage: 1000 * value / len(texts) for stage, value in seconds.items()} | {"total": 1000 * total / len(texts)}


def run_growth(options) -> dict:
    """Words a second by words per document, documents a second by batch size, and megabytes during a long stream."""
    extract, texts = open_pipeline(options), read_texts(options)
    words = " ".join(texts).split()
    growth = {"words": {}, "batch_size": {}, "stream": []}
    for length in WORDS:
        documents = [" ".join(words[i : i + length]) for i in range(0, min(len(words) - length, 40_000), length)]
        extract(documents[:1])
        start = time.perf_counter()
        extract(documents)
        growth["words"][length] = sum(len(document.split()) for document in documents) / (time.perf_counter() - start)
    for size in BATCHES:
        start = time.perf_counter()
        extract(texts[:200], batch_size=size)
        growth["batch_size"][size] = 200 / (time.perf_counter() - start)
    short = [" ".join(text.split()[:12]) for text in texts]
    stream = extract(islice(cycle(short), options.stream), batch_size=options.batch_size)
    for number, _ in enumerate(stream):
        if number % (options.stream // 10) == options.stream // 10 - 1:
            growth["stream"].append({"documents": number + 1, "megabytes": resident()})
    return growth


def resident() -> float:
    """Megabytes of memory of this process."""
    return int(re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))[1]) / 1024


def measure(options, folder: Path, what: str) -> dict:
    """Runs this script with the code of a folder."""
    environment = os.environ | {"PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *sys.argv, "--run", what]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{folder}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main():
    """Compares the revisions and measures the growth."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="folder with keyphrases/inspec/test.jsonl")
    parser.add_argument("--before", default="HEAD~1", help="the earlier revision")
    parser.add_argument("--model", help="checkpoint or exported folder; by default the default model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--documents", type=int, default=300)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--stream", type=int, default=20_000, help="documents of the long stream, of 12 words each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--run", choices=("stages", "growth"), help="measure in this process")
    options = parser.parse_args()
    if options.run:
        print(json.dumps(run_stages(options) if options.run == "stages" else run_growth(options)))
        return
    rounds: dict[str, list] = {"before": [], "after": []}
    with tempfile.TemporaryDirectory() as folder:
        revisions = {"before": short_hash(options.before), "after": commit().split()[0]}
        for name, revision in revisions.items():
            checkout(revision, Path(folder) / name)
        for _ in range(options.rounds):
            for name, results in rounds.items():
                results.append(measure(options, Path(folder) / name, "stages"))
                print(name, {stage: round(value, 2) for stage, value in results[-1].items()}, flush=True)
        growth = measure(options, Path(folder) / "after", "growth")
    stages = {
        name: {s: statistics.median(r[s] for r in results) for s in results[0]} for name, results in rounds.items()
    }
    settings = {
        name: getattr(options, name) for name in ("model", "device", "documents", "batch_size", "stream", "rounds")
    }
    write("pipeline_profile", {**stages, "growth": growth}, **revisions, **settings)


if __name__ == "__main__":
    main()
