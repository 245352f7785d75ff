"""The small model on lexperts-lite beside the default model and free tools: F1, documents a second, start, memory and size.

    pip wheel --no-deps ./lite && python -m venv ENV && ENV/bin/pip install lexperts_lite-*.whl
    python benchmarks/lite.py --data PATH --work FOLDER --python ENV/bin/python

All systems run in one process on one thread, but for the time to the first keyphrase and memory, for which each has a process of its
own; that of lexperts-lite in the environment that has nothing else. Times are medians of rounds in turns.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from common import Record, make_parser, peer_versions
from keyphrase_peers import CORPORA, PEERS, Inputs, frequencies_of, read_tokens, tagger
from keyphrase_sets import SPLIT_OF_SET, Documents, data_file, describe_f1
from timing import interleaved
from transformers import pipeline

import lexperts  # noqa: F401  (registers the pipeline)
from keyphrase_tools.export import export_model
from run_tools.fingerprints import fingerprint
from run_tools.packaged import find_packaged, locate_model

SETS = ("inspec", "kp20k_sample", "semeval2010", "krapivin", "nus", "kpcrowd500", "duc2001", "stackexchange")
TIMED = {"abstracts": ("inspec", 100), "news": ("duc2001", 30)}  # set, first documents
TEXT = "Graph cuts solve energy minimisation problems in computer vision."
FIRST = {  # what prints the first keyphrases
    "tiny, int8": f"from lexperts_lite import extract_keyphrases; print(extract_keyphrases({TEXT!r}))",
    "default, int8": f"from lexperts_lite import KeyphraseExtractor; print(KeyphraseExtractor(sys.argv[1])({TEXT!r}))",
    "tiny, float32": f"import lexperts; from transformers import pipeline; from run_tools.packaged import locate_model; "
    f"print(pipeline('keyphrase-extraction', model=locate_model('tiny'))({TEXT!r}))",
    "default, float32": f"import lexperts; from transformers import pipeline; print(pipeline('keyphrase-extraction')({TEXT!r}))",
    "YAKE": f"import yake; print(yake.KeywordExtractor().extract_keywords({TEXT!r}))",
}
# of this process: getrusage has the peak of the process that started it, too
PEAK = "; print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"


def free_tool(options, system: str, texts: list[str], name: str) -> list[list[dict]]:
    """Keyphrases by a free tool, its tags included."""
    peer = PEERS[system]
    tokens = [read_tokens(document) for document in tagger().pipe(texts, batch_size=32)] if peer.tags else []
    corpus = data_file(options.data, CORPORA.get(name, name), "train")
    return peer.extract(Inputs(texts, tokens, frequencies_of(corpus) if system == "TF-IDF" else ({}, 0)))


def open_systems(options) -> dict[str, Callable[[list[str], str], list[list[dict]]]]:
    """Each system as a function of texts and the name of their set."""
    sys.path.insert(0, str(options.lite))
    from lexperts_lite import KeyphraseExtractor

    models = {
        "tiny, int8": KeyphraseExtractor(),
        "tiny, float32": pipeline("keyphrase-extraction", model=locate_model("tiny"), device="cpu"),
        "default, int8": KeyphraseExtractor(options.int8),
        "default, float32": pipeline("keyphrase-extraction", device="cpu"),
    }
    systems = {
        name: lambda texts, _, extract=extract: extract(texts, batch_size=16) for name, extract in models.items()
    }
    return systems | {name: partial(free_tool, options, name) for name in ("YAKE", "TF-IDF", "PositionRank", "KeyBERT")}


def quality(options, systems) -> list[dict]:
    """F1 of each system on the first documents of each set."""
    rows = []
    for name in SETS:
        for system, extract in systems.items():
            limit = min(options.documents, 50) if system == "KeyBERT" else options.documents
            documents = Documents(data_file(options.data, name, SPLIT_OF_SET[name]), limit)
            phrases = [found[:10] for found in extract(documents.texts, name)]
            row = {"system": system, "set": name, "documents": len(documents.texts), "seke": documents.score(phrases)}
            print(f"{name}, {system}: {describe_f1(row['seke'])}", flush=True)
            rows.append(row | {"by_document": documents.count(phrases)})
    return rows


def speed(options, systems) -> list[dict]:
    """Documents a second on one thread, in turns."""
    rows = []
    for kind, (name, number) in TIMED.items():
        texts = Documents(data_file(options.data, name, SPLIT_OF_SET[name]), number).texts
        few = texts[:10]  # for KeyBERT, which takes seconds
        calls = {
            system: partial(extract, few if system == "KeyBERT" else texts, name) for system, extract in systems.items()
        }
        for system, times in interleaved(calls, options.rounds).items():
            documents = len(few if system == "KeyBERT" else texts)
            rate = 1e3 * documents / times["median_ms"]
            print(f"{kind}, {system}: {rate:.1f} documents a second", flush=True)
            rows.append({"system": system, "kind": kind, "documents": documents, "per_second": rate, **times})
    return rows


def start(options, systems) -> list[dict]:
    """Seconds from the start of a process to its first keyphrases, and its peak memory."""
    rows = []
    for system, code in FIRST.items():
        on_lite = system.endswith("int8")
        command = [
            str(options.python) if on_lite else sys.executable,
            "-c",
            f"import sys; {code}{PEAK}",
            str(options.int8),
        ]
        seconds, peaks = [], []
        for _ in range(options.rounds):
            begin = time.perf_counter()
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            seconds.append(time.perf_counter() - begin)
            peaks.append(int(done.stdout.split()[-1]) / 1024)
        row = {"system": system, "seconds": statistics.median(seconds), "peak_mib": statistics.median(peaks)}
        print(f"{system}: {row['seconds']:.2f} s, {row['peak_mib']:.0f} MiB", flush=True)
        rows.append(row | {"rounds_s": seconds})
    return rows


def size(options, systems) -> list[dict]:
    """Megabytes of the files of each model, and of the environment of lexperts-lite."""
    folders = {"tiny, int8": options.lite / "lexperts_lite" / "model", "default, int8": options.int8}
    folders |= {"tiny, float32": Path(locate_model("tiny")), "default, float32": Path(find_packaged("default"))}
    folders |= {"environment of lexperts-lite": Path(options.python).parent.parent}
    suffixes = {".onnx", ".safetensors", ".json"}
    rows = []
    for system, folder in folders.items():
        files = [file for file in folder.rglob("*") if file.is_file() and not file.is_symlink()]
        if not system.startswith("env"):
            files = [file for file in files if file.suffix in suffixes and file.name != "results.json"]
        rows.append({"system": system, "mb": sum(file.stat().st_size for file in files) / 1e6})
        print(f"{system}: {rows[-1]['mb']:.1f} MB", flush=True)
    return rows


PARTS = {"size": size, "start": start, "speed": speed, "quality": quality}


def main():
    """Runs the benchmark."""
    parser = make_parser(__doc__, "lite", "keyphrases/NAME/", work=True)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--python", type=Path, required=True, help="Python of an environment with lexperts-lite alone")
    parser.add_argument("--documents", type=int, default=200, help="first documents of each set; 50 for KeyBERT")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    where = "import json, lexperts_lite; print(json.dumps(lexperts_lite.__path__[0]))"
    found = subprocess.run([options.python, "-c", where], check=True, capture_output=True, text=True).stdout
    options.lite = Path(json.loads(found)).parent
    options.int8 = options.work / "default-int8"
    if not (options.int8 / "config.json").exists():
        export_model(find_packaged("default"), options.int8, precision="int8", max_loss=None)
    weights = {
        "tiny": fingerprint(Path(locate_model("tiny")) / "model.safetensors"),
        "default": fingerprint(Path(find_packaged("default")) / "model.safetensors"),
    }
    settings = {"documents": options.documents, "rounds": options.rounds, "weights": weights, "peers": peer_versions()}
    record = Record(options.name, overwrite=options.overwrite, **settings)
    systems = open_systems(options)
    for part in options.only:
        rows = PARTS[part](options, systems)
        record.remove(what=part)
        for row in rows:
            record.add({"what": part, **row})


if __name__ == "__main__":
    main()
