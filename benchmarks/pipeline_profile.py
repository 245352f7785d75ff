"""Where the time of keyphrase extraction goes, and how it grows.

    python benchmarks/pipeline_profile.py --data PATH      # PATH/keyphrases/inspec, the default model

Stages: `clean` (and split into words), `tokenize` (and cut into windows), `pad`, `model` (forward pass to probabilities), `rank`
(probabilities to phrases) and `rest`; medians of rounds. Then documents a second by words per document and by batch size, and the
memory of a long stream.
"""

import statistics
import time
from itertools import cycle, islice

from common import make_parser, write
from keyphrase_sets import Documents, data_file
from timing import describe, resident
from transformers import pipeline

import keyphrase_tools.pipeline_keyphrase_extraction as module
import lexperts  # noqa: F401  (registers the pipeline)

STAGES = {
    "clean": "read_document",
    "tokenize": "encode_windows",
    "pad": "pad_windows",
    "model": "_forward",
    "rank": "postprocess",
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


def measure_stages(extract, texts: list[str], options) -> dict[str, float]:
    """Milliseconds per document of each stage, medians of rounds; the first pass over the texts is not counted."""
    seconds, rounds = dict.fromkeys(STAGES, 0.0), []
    extract(texts, batch_size=options.batch_size)
    owners = {name: extract if hasattr(extract, name) else module for name in STAGES.values()}
    originals = {name: getattr(owner, name) for name, owner in owners.items()}
    for stage, name in STAGES.items():
        setattr(owners[name], name, timed(originals[name], stage, seconds))
    for _ in range(options.rounds):
        seconds.update(dict.fromkeys(STAGES, 0.0))
        start = time.perf_counter()
        extract(texts, batch_size=options.batch_size)
        total = time.perf_counter() - start
        rounds.append({**seconds, "rest": total - sum(seconds.values()), "total": total})
    for name, owner in owners.items():
        setattr(owner, name, originals[name])
    return {stage: 1000 * statistics.median(one[stage] for one in rounds) / len(texts) for stage in rounds[0]}


def rate(extract, documents: list[str], **options) -> float:
    """Documents a second."""
    start = time.perf_counter()
    extract(documents, **options)
    return len(documents) / (time.perf_counter() - start)


def measure_growth(extract, texts: list[str], options) -> dict:
    """Words a second by words per document, documents a second by batch size, and megabytes during a long stream."""
    words = " ".join(texts).split()
    growth = {"words": {}, "batch_size": {}, "stream": []}
    for length in WORDS:
        documents = [" ".join(words[i : i + length]) for i in range(0, min(len(words) - length, 40_000), length)]
        extract(documents[:1])
        growth["words"][length] = length * rate(extract, documents)
    growth["batch_size"] = {size: rate(extract, texts[:200], batch_size=size) for size in BATCHES}
    short = [" ".join(text.split()[:12]) for text in texts]
    stream = extract(islice(cycle(short), options.stream), batch_size=options.batch_size)
    for number, _ in enumerate(stream, start=1):
        if number % (options.stream // 10) == 0:
            growth["stream"].append({"documents": number, "megabytes": resident("VmRSS")})
    return growth


def main():
    """Measures the stages and the growth."""
    parser = make_parser(__doc__, "pipeline_profile", "keyphrases/inspec/test.jsonl")
    parser.add_argument("--model", help="checkpoint or exported folder; by default the default model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--documents", type=int, default=300)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--stream", type=int, default=20_000, help="documents of the long stream, of 12 words each")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    texts = Documents(data_file(options.data, "inspec", "test"), options.documents).texts
    model = {"model": options.model} if options.model else {}
    extract = pipeline("keyphrase-extraction", device=options.device, **model)
    stages = measure_stages(extract, texts, options)
    print(describe(stages), flush=True)
    names = ("model", "device", "documents", "batch_size", "stream", "rounds")
    settings = {name: getattr(options, name) for name in names}
    write(options.name, {"after": stages, "growth": measure_growth(extract, texts, options)}, **settings)


if __name__ == "__main__":
    main()
