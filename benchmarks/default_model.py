"""The installed default model: scores on all sets, time to the first result, the README's first output, long documents, diversity.

    python benchmarks/default_model.py --data PATH          # PATH/keyphrases/...; about half an hour on two cores
    python benchmarks/default_model.py --data PATH --only sets

Scores on all sets, without and with the style of each, come with the counts of each document, so that differences to the free tools
of `keyphrase_peers.py` have intervals, and with calibration errors by length. Long documents are put together from neighbouring test documents, `joined` of them each. There
the default ranking is compared with reading the beginning only (`on_long="truncate"`), with the best mention's score, which needs no
ranker, and with YAKE (`pip install yake`). Scores by `diversity=` are those of the first test documents of three sets, each with its
own style.
"""

import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from common import Record, make_parser, peer_versions, write
from keyphrase_sets import SPLIT_OF_SET, STYLE_OF_SET, STYLES, Documents, data_file, describe_f1, yake_phrases
from transformers import pipeline

import lexperts  # noqa: F401  (registers the pipeline)
from keyphrase_tools.evaluation import score_phrases
from lexperts.recipes.seke.scoring import join_neighbours
from run_tools.fingerprints import fingerprint
from run_tools.packaged import find_packaged

PARAGRAPH = Path(__file__).resolve().parent.parent / "examples" / "corpus" / "paragraph.txt"
FIRST = f"""
import lexperts
from transformers import pipeline
extract = pipeline("keyphrase-extraction")
extract(open({str(PARAGRAPH)!r}).read(), top_k=3)
"""
JOINED = {"nus": 15, "semeval2010": 15, "krapivin": 15, "kpcrowd500": 6}  # test documents per long document

DIVERSE = {"inspec": 300, "kpcrowd500": 40, "stackexchange": 60}  # first test documents
STRENGTHS = (0, 0.3, 0.5, 1)  # of `diversity=`


def seconds_to_first_result(rounds: int) -> list[float]:
    """Wall time of a new process that prints the keyphrases of a paragraph."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", FIRST], check=True, capture_output=True)
        seconds.append(time.perf_counter() - start)
    return seconds


def long_documents(options, name: str) -> tuple[list[str], list[list[str]]]:
    """Long documents of a test set, and their gold keyphrases by the rules of the paper."""
    documents = Documents(data_file(options.data, name, "test"))
    texts, gold = documents.texts, documents.gold["seke"]
    joined = join_neighbours(texts, gold, [0] * len(texts), JOINED[name])[: options.long_documents]
    return [text for text, _, _ in joined], [phrases for _, phrases, _ in joined]


def score_long(options, extract, name: str) -> dict:
    """F1@5 and F1@10 of each way to read long documents, and the seconds per 1,000 words of the default."""
    texts, gold = long_documents(options, name)
    words = sum(len(text.split()) for text in texts)
    start = time.perf_counter()
    ranked = extract(texts, batch_size=16)
    seconds = time.perf_counter() - start
    found = {
        "default": ranked,
        "beginning": extract(texts, batch_size=16, on_long="truncate"),
        "best mention": extract(texts, batch_size=16, threshold=0.2, min_score=0.0),
        "YAKE": yake_phrases(texts),
    }
    scores = {way: score_phrases(phrases, gold, k=(5, 10)) for way, phrases in found.items()}
    print(f"{name}, long: " + "; ".join(f"{way} {describe_f1(one)}" for way, one in scores.items()), flush=True)
    row = {"documents": len(texts), "words": words / len(texts), "seconds_per_1000_words": 1000 * seconds / words}
    return row | {"joined": JOINED[name], "scores": scores}


def score_diversity(options, extract, name: str) -> dict:
    """Scores of the first test documents of a set by the strength of `diversity=`."""
    documents, style, scores = Documents(data_file(options.data, name, "test"), DIVERSE[name]), STYLES[name], {}
    for strength in STRENGTHS:
        phrases = extract(documents.texts, batch_size=16, style=style, diversity=strength)
        scores[strength] = documents.score(phrases)
        print(f"{name}, diversity {strength}: {describe_f1(scores[strength])}", flush=True)
    return {"documents": len(documents.texts), "style": style, "scores": scores}


def score_set(options, extract, limit: int | None, **key) -> dict:
    """Scores on a set without a style and with its own, the counts of each document, and the processor seconds per document."""
    name = key["set"]
    documents, style = Documents(data_file(options.data, name, SPLIT_OF_SET[name]), limit), STYLE_OF_SET[name]
    start = time.process_time()
    found = {"unstyled": extract(documents.texts, batch_size=16)}
    seconds = (time.process_time() - start) / len(documents.texts)
    found["styled"] = extract(documents.texts, batch_size=16, style=style)
    row = {"documents": len(documents.texts), "cpu_seconds_per_document": seconds, "style": style}
    for way, phrases in found.items():
        row[way] = {"seke": documents.score(phrases), "by_document": documents.count(phrases)}
        row[way]["scores"] = documents.check_scores(phrases)
    f1 = "   ".join(f"{way} {describe_f1(row[way]['seke'])}" for way in found)
    print(f"{name}: {f1}   {seconds:.3f} s per document", flush=True)
    return row


def measure_sets(options, extract, weights: str) -> None:
    """Adds the rows of all sets to NAME_sets.json."""
    data = {name: data_file(options.data, name, split).parent for name, split in SPLIT_OF_SET.items()}
    record = Record(f"{options.name}_sets", overwrite=options.overwrite, weights=weights, data=data)
    keys = [{"set": name, "limit": options.documents} for name in options.sets]
    record.replace(partial(score_set, options, extract), keys, "limit")


def measure_defaults(options, extract) -> tuple[dict, dict]:
    """Results and settings of the default options."""
    seconds = seconds_to_first_result(options.rounds)
    print(f"first result after {statistics.median(seconds):.1f} s")
    results = {"first_result_seconds": seconds, "first_screen": extract(PARAGRAPH.read_text(encoding="utf-8"), top_k=3)}
    results["long"] = {name: score_long(options, extract, name) for name in JOINED}
    return results, {"rounds": options.rounds, "long_documents": options.long_documents, "peers": peer_versions()}


def measure_diversity(options, extract) -> tuple[dict, dict]:
    """Results of all sets by the strength of `diversity=`; there are no settings."""
    return {name: score_diversity(options, extract, name) for name in DIVERSE}, {}


PARTS = {"defaults": measure_defaults, "diversity": measure_diversity}


def main():
    """Runs the benchmark."""
    parser = make_parser(__doc__, "default_model", "keyphrases/NAME/")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=("sets", *PARTS),
        default=["sets", *PARTS],
        help="others than defaults: NAME_PART.json",
    )
    parser.add_argument("--sets", nargs="+", choices=SPLIT_OF_SET, default=list(SPLIT_OF_SET))
    parser.add_argument("--documents", type=int, help="first documents of each set; all by default")
    parser.add_argument("--long_documents", type=int, default=6, help="long documents of each set")
    parser.add_argument("--rounds", type=int, default=5, help="of the time to the first result")
    options = parser.parse_args()
    extract = pipeline("keyphrase-extraction")
    weights = fingerprint(Path(find_packaged("default")) / "model.safetensors")
    if "sets" in options.only:
        measure_sets(options, extract, weights)
    for part in PARTS.keys() & set(options.only):
        results, settings = PARTS[part](options, extract)
        name = options.name if part == "defaults" else f"{options.name}_{part}"
        write(name, results, weights=weights, **settings)


if __name__ == "__main__":
    main()
