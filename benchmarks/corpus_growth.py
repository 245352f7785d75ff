"""Memory of each process, documents a second, and lost rows of `lexperts keyphrases extract` by the number of documents and workers.

    python benchmarks/corpus_growth.py --data DIR                               # about an hour on two cores
    python benchmarks/corpus_growth.py --data DIR --documents 100000 --workers 0

DIR/*/test.jsonl are data sets with id, title and text. Their documents, repeated with new ids, go from one Parquet file to another;
one in a thousand has no text. 0 workers are the local engine, others are those of Ray; each has one core. The model is tiny, with
random weights, so that the time is that of reading, tokenising, ranking and writing. Memory is the resident size of the processes,
every two seconds.
"""

import tempfile
from functools import partial
from pathlib import Path

from common import Record, make_parser
from many_documents import BAD, EXTRACT, check, make_source, run, worker_memory
from pyarrow import parquet
from timing import describe
from tiny_model import read_documents, save_tiny_model


def bad_rows_reported(output: Path, source: Path) -> bool:
    """Whether the rows with an error are exactly those without a text."""
    found = parquet.read_table(output, columns=["id", "error"])
    given = parquet.read_table(source, columns=["id", "text"])
    bad = given.filter(given["text"].is_null())["id"].to_pylist()
    return sorted(found.filter(found["error"].is_valid())["id"].to_pylist()) == sorted(bad)


def measure(source: Path, model: Path, documents: int, workers: int) -> dict:
    """Runs a number of workers on the documents."""
    output = source.with_name(f"{documents}-{workers}.parquet")
    engine = ["--engine", "ray", "--workers", str(workers)] if workers else []
    result = run([*EXTRACT, str(source), str(output), "--model", str(model), *engine])
    row = {**result, **worker_memory(result), **check(output, source, None)}
    row |= {"documents_per_second": documents / row["seconds"], "bad_rows_reported": bad_rows_reported(output, source)}
    print(describe({"workers": workers} | {name: value for name, value in row.items() if name != "memory"}), flush=True)
    return row


def main() -> None:
    """Runs each number of workers on each number of documents."""
    parser = make_parser(__doc__, "corpus_growth", "data sets")
    parser.add_argument("--documents", type=int, nargs="+", default=[25_000, 50_000, 100_000, 200_000])
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    record = Record(args.name, overwrite=args.overwrite, bad_rows=BAD)
    with tempfile.TemporaryDirectory() as folder:
        source, model = Path(folder, "in.parquet"), Path(folder, "model")
        save_tiny_model(model, read_documents(args.data))
        for documents in args.documents:
            make_source(args.data, documents, source)
            keys = [{"documents": documents, "workers": workers} for workers in args.workers]
            record.complete(partial(measure, source, model), keys)


if __name__ == "__main__":
    main()
