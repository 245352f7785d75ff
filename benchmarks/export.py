"""Speed, quality, size, start-up time and memory of the default model in PyTorch, ONNX and OpenVINO, beside YAKE and KeyBERT.

    python benchmarks/export.py --data PATH --work FOLDER       # PATH/keyphrases/inspec; pip install lexperts[onnx,openvino] yake keybert

Each system runs in a process of its own, from texts to keyphrases, on the same test documents of Inspec; systems take turns, and
the median of the rounds counts. int8 is calibrated and checked on validation documents. KeyBERT reads the first documents only.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

from common import peer_versions, write
from keyphrase_sets import BASELINES, Documents, data_file

from keyphrase_tools.rows import full_text
from run_tools.jsonl import read_jsonl

GRAPHS = [(f, p) for f in ("onnx", "openvino") for p in ("fp32", "int8")]
SYSTEMS = (
    "PyTorch float32",
    "PyTorch bfloat16",
    "PyTorch compiled",
    *(f"{f} {p}" for f, p in GRAPHS),
    "YAKE",
    "KeyBERT",
)
NUM_KEYBERT = 50
WARM_UP = 48  # documents


def export_graphs(options) -> dict[str, dict]:
    """Writes the graphs, and returns what `export_model` says of each."""
    from keyphrase_tools.default_model import find_default_model
    from keyphrase_tools.export import export_model

    rows = read_jsonl(data_file(options.data, "inspec", "validation"))[: options.checked]
    rows = [{"text": full_text(row), "keyphrases": row["keyphrases"]} for row in rows]
    reports = {}
    for format, precision in GRAPHS:
        folder = Path(options.work) / f"{format}-{precision}"
        report = export_model(find_default_model(), folder, format=format, precision=precision, evaluation=rows)
        reports[f"{format} {precision}"] = report
        print(f"{format} {precision}: {report}", flush=True)
    return reports


def open_system(system: str, work: str):
    """A function from texts to keyphrases."""
    if system in ("YAKE", "KeyBERT"):
        return BASELINES[system]
    import torch
    from transformers import pipeline

    import lexperts  # noqa: F401  (registers the pipeline)

    if system.startswith("PyTorch"):
        dtype = torch.bfloat16 if system == "PyTorch bfloat16" else torch.float32
        extract = pipeline("keyphrase-extraction", dtype=dtype, device="cpu")
        if system == "PyTorch compiled":
            extract.model.backbone.compile(dynamic=True)
    else:
        extract = pipeline("keyphrase-extraction", model=str(Path(work) / system.replace(" ", "-")))
    return lambda texts: extract(texts, batch_size=8)


def run_system(options) -> None:
    """Prints the figures of one system as JSON."""
    limit = min(options.documents, NUM_KEYBERT) if options.run == "KeyBERT" else options.documents
    documents = Documents(data_file(options.data, "inspec", "test"), limit)
    texts = documents.texts
    extract = open_system(options.run, options.work)
    extract(texts[:1])
    startup = time.time() - options.started
    if options.run not in ("YAKE", "KeyBERT"):
        extract(texts[:WARM_UP])  # compiled code, and buffers for other shapes
    start = time.perf_counter()
    phrases = extract(texts)
    seconds = time.perf_counter() - start
    status = Path("/proc/self/status").read_text(encoding="utf-8")  # ru_maxrss would start with the parent's
    memory = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024
    f1 = documents.score(phrases)["f1@10"]
    figures = {"documents": len(texts), "per_second": len(texts) / seconds, "startup": startup, "megabytes": memory}
    print(json.dumps(figures | {"f1@10": f1}))


def main():
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="folder with keyphrases/NAME/")
    parser.add_argument("--work", required=True, help="folder for the graphs")
    parser.add_argument("--documents", type=int, default=500, help="test documents")
    parser.add_argument("--checked", type=int, default=200, help="validation documents of the exporter's quality check")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--run", choices=SYSTEMS, help="measure one system, in this process")
    parser.add_argument("--started", type=float, help="with --run: the time at which the process was started")
    options = parser.parse_args()
    if options.run:
        return run_system(options)
    reports, rounds = export_graphs(options), {system: [] for system in SYSTEMS}
    for _ in range(options.rounds):
        for system in SYSTEMS:
            command = [sys.executable, *sys.argv, "--run", system, "--started", str(time.time())]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{system}: {done.stderr[-2000:]}")
            rounds[system].append(json.loads(done.stdout.splitlines()[-1]))
            print(system, rounds[system][-1], flush=True)
    results = {}
    for system, figures in rounds.items():
        medians = {name: statistics.median(row[name] for row in figures) for name in figures[0]}
        results[system] = medians | {"export": reports.get(system)}
    settings = {"documents": options.documents, "checked": options.checked, "rounds": options.rounds}
    settings["peers"] = peer_versions()
    return write("export", results, **settings)


if __name__ == "__main__":
    main()
