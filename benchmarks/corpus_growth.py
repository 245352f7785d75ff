"""Memory of each process, documents a second, and lost rows of `lexperts keyphrases extract` by the number of documents and workers.

    python benchmarks/corpus_growth.py --data DIR                               # about an hour on two cores
    python benchmarks/corpus_growth.py --data DIR --documents 100000 --workers 0

DIR/*/test.jsonl are data sets with id, title and text. Their documents, repeated with new ids, go from one Parquet file to another;
one in a thousand has no text. 0 workers are the local engine, others are those of Ray; each has one core. The model is tiny, with
random weights, so that the time is that of reading, tokenising, ranking and writing. Memory is the resident size of the processes,
every two seconds.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from common import Record, add_record_arguments
from many_documents import BAD, check, make_source, run, worker_memory
from pyarrow import parquet
from tiny_model import read_documents, save_tiny_model


def bad_rows_reported(output: Path, source: Path) -> bool:
    """Whether the rows with an error are exactly those without a text."""
    found, given = (
        parquet.read_table(output, columns=["id", "error"]),
        parquet.read_table(source, columns=["id", "text"]),
    )
    bad = given.filter(given["text"].is_null())["id"].to_pylist()
    return sorted(found.filter(found["error"].is_valid())["id"].to_pylist()) == sorted(bad)


def main() -> None:
    """Runs each number of workers on each number of documents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of data sets")
    parser.add_argument("--documents", type=int, nargs="+", default=[25_000, 50_000, 100_000, 200_000])
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    add_record_arguments(parser, "corpus_growth")
    args = parser.parse_args()
    record = Record(args.name, overwrite=args.overwrite, bad_rows=BAD)
    with tempfile.TemporaryDirectory() as folder:
        source, model = Path(folder, "in.parquet"), Path(folder, "model")
        save_tiny_model(model, read_documents(args.data))
        for documents in args.documents:
            make_source(args.data, documents, source)
            for workers in args.workers:
                if record.find(documents=documents, workers=workers):
                    continue
                output = Path(folder, f"{documents}-{workers}.parquet")
                command = [sys.executable, "-m", "lexperts", "keyphrases", "extract", str(source), str(output)]
                engine = ["--engine", "ray", "--workers", str(workers)] if workers else []
                result = run([*command, "--model", str(model), *engine])
                row = {
                    "documents": documents,
                    "workers": workers,
                    **result,
                    **worker_memory(result),
                    **check(output, source, None),
                }
                row["documents_per_second"] = documents / row["seconds"]
                row["bad_rows_reported"] = bad_rows_reported(output, source)
                record.add(row)
                print("  ".join(f"{key} {value}" for key, value in row.items() if key != "memory"), flush=True)


if __name__ == "__main__":
    main()
