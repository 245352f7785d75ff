"""Speed, quality, size, start-up time and memory of the default model in PyTorch, ONNX and OpenVINO, beside YAKE and KeyBERT.

    python benchmarks/export.py --data PATH --work FOLDER       # PATH/keyphrases/inspec; pip install 'lexperts[onnx,openvino]' yake keybert

Each system runs in a process of its own, from texts to keyphrases, on the same test documents of Inspec; systems take turns, and
the median of the rounds counts. int8 is calibrated and checked on validation documents. KeyBERT reads the first documents only.
"""

import argparse
import statistics
import time

from common import make_parser, peer_versions, write
from keyphrase_sets import BASELINES, Documents, data_file
from timing import describe, in_new_process, resident

from keyphrase_tools.rows import full_text
from run_tools.jsonl import read_jsonl

GRAPHS = [(f, p) for f in ("onnx", "openvino") for p in ("fp32", "int8")]
TORCH = ("PyTorch float32", "PyTorch bfloat16", "PyTorch compiled")
SYSTEMS = (*TORCH, *(f"{f} {p}" for f, p in GRAPHS), *BASELINES)
NUM_KEYBERT = 50
WARM_UP = 48  # documents


def export_graphs(options) -> dict[str, dict]:
    """Writes the graphs, and returns what `export_model` says of each."""
    from keyphrase_tools.export import export_model
    from run_tools.packaged import find_packaged

    rows = read_jsonl(data_file(options.data, "inspec", "validation"))[: options.checked]
    rows = [{"text": full_text(row), "keyphrases": row["keyphrases"]} for row in rows]
    reports = {}
    for format, precision in GRAPHS:
        folder = options.work / f"{format}-{precision}"
        report = export_model(find_packaged("default"), folder, format=format, precision=precision, evaluation=rows)
        reports[f"{format} {precision}"] = report
        print(f"{format} {precision}: {report}", flush=True)
    return reports


def open_system(system: str, options):
    """A function from texts to keyphrases."""
    if system in BASELINES:
        return BASELINES[system]
    import torch
    from transformers import pipeline

    import lexperts  # noqa: F401  (registers the pipeline)

    if system in TORCH:
        dtype = torch.bfloat16 if system == "PyTorch bfloat16" else torch.float32
        extract = pipeline("keyphrase-extraction", dtype=dtype, device="cpu")
        if system == "PyTorch compiled":
            extract.model.backbone.compile(dynamic=True)
    else:
        extract = pipeline("keyphrase-extraction", model=str(options.work / system.replace(" ", "-")))
    return lambda texts: extract(texts, batch_size=8)


def run_system(system: str, options: argparse.Namespace, started: float) -> dict[str, float]:
    """Speed, start-up time, peak memory and F1 of a system. Call it in a new process, which was started at `started`."""
    limit = min(options.documents, NUM_KEYBERT) if system == "KeyBERT" else options.documents
    documents = Documents(data_file(options.data, "inspec", "test"), limit)
    texts = documents.texts
    extract = open_system(system, options)
    extract(texts[:1])
    startup = time.time() - started
    if system not in BASELINES:
        extract(texts[:WARM_UP])  # compiled code, and buffers for other shapes
    start = time.perf_counter()
    phrases = extract(texts)
    seconds, memory = time.perf_counter() - start, resident("VmHWM")
    figures = {"documents": len(texts), "per_second": len(texts) / seconds, "startup": startup, "megabytes": memory}
    return figures | {"f1@10": documents.score(phrases)["f1@10"]}


def main():
    """Runs the benchmark."""
    parser = make_parser(__doc__, "export", "keyphrases/NAME/", work=True)
    parser.add_argument("--documents", type=int, default=500, help="test documents")
    parser.add_argument("--checked", type=int, default=200, help="validation documents of the exporter's quality check")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    reports, rounds = export_graphs(options), {system: [] for system in SYSTEMS}
    for _ in range(options.rounds):
        for system, rows in rounds.items():
            rows.append(in_new_process(run_system, system, options, time.time()))
            print(f"{system}: {describe(rows[-1])}", flush=True)
    results = {}
    for system, rows in rounds.items():
        medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        results[system] = medians | {"export": reports.get(system)}
    settings = {"documents": options.documents, "checked": options.checked, "rounds": options.rounds}
    write(options.name, results, **settings, peers=peer_versions())


if __name__ == "__main__":
    main()
