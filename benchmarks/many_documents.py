"""Documents a second and memory of the ways to process many documents: this process, Ray with one and two workers.

    python benchmarks/many_documents.py --data DIR --documents 2000

DIR/*/test.jsonl are data sets with id, title and text. Their documents, repeated with new ids up to --documents, are written to one
Parquet file; one in a thousand has no text. Each way reads this file and writes keyphrases to Parquet, in rounds (A B C A B
C). Every process has one core. Times are those of the whole command, start-up included, and of the processing alone; memory is the
resident size of each process that has loaded the model, every two seconds. All outputs are compared: no document is lost or
occurs twice, each bad row is reported, and the keyphrases are the same.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from threading import Event, Thread

import psutil
import pyarrow
from common import make_parser, write
from pyarrow import parquet
from tiny_model import read_documents

ROOT = Path(__file__).resolve().parents[1]
BAD = 1000  # one row in so many has no text
LOADED = 300e6  # bytes of a process that has loaded the model
EXTRACT = [sys.executable, "-m", "lexperts", "keyphrases", "extract"]


WAYS = ("local", "ray, 1 worker", "ray, 2 workers")


def make_source(data: Path, documents: int, path: Path) -> None:
    """The Parquet file."""
    rows = read_documents(data)
    columns = {"id": [f"{i:09d}" for i in range(documents)]}
    for name in ("title", "text"):
        columns[name] = [rows[i % len(rows)].get(name) for i in range(documents)]
    columns["text"][::BAD] = [None] * len(columns["text"][::BAD])
    parquet.write_table(pyarrow.table(columns), path)


def command_of(way: str, source: Path, folder: Path) -> tuple[list[str], Path]:
    """The command of a way, and its output."""
    output = folder / "out.parquet"
    engine = ["--engine", "ray", "--workers", way.split()[1]] if way.startswith("ray") else []
    return [*EXTRACT, str(source), str(output), *engine], output


def run(command: list[str]) -> dict:
    """Runs a command -> seconds, and the megabytes of each of its large Python processes over time."""
    cores = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    sizes: dict[int, list] = {}
    begin, done = time.perf_counter(), Event()
    process = subprocess.Popen(
        command, env={**os.environ, **cores}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )

    def watch():
        while not done.wait(2):
            for child in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
                try:
                    name, size = child.name(), child.memory_info().rss
                except psutil.Error:
                    continue
                if size > LOADED:
                    seconds = round(time.perf_counter() - begin)
                    sizes.setdefault(child.pid, [name]).append((seconds, round(size / 1e6)))

    watcher = Thread(target=watch)
    watcher.start()
    errors = process.stderr.read()
    process.wait()
    done.set()
    watcher.join()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{errors[-3000:]}")
    megabytes = [{"process": name, "seconds_megabytes": thin(values)} for name, *values in sizes.values()]
    return {"seconds": time.perf_counter() - begin, "memory": megabytes}


def worker_memory(result: dict) -> dict:
    """Megabytes of the command and of its largest worker, soon after the start and at the end. Without workers the command works."""
    command, *workers = sorted(result["memory"], key=lambda process: process["seconds_megabytes"][0][0])

    def tenths(process: dict) -> tuple[float, float]:
        """The medians of the second tenth of the time, when the model has been loaded, and of the last one."""
        sizes = [size for _, size in process["seconds_megabytes"]]
        step = max(len(sizes) // 10, 1)
        return statistics.median(sizes[step : 2 * step] or sizes), statistics.median(sizes[-step:])

    early, late = zip(*map(tenths, workers or [command]), strict=True)
    return {
        "worker_megabytes_early": max(early),
        "worker_megabytes_late": max(late),
        "command_megabytes": max(size for _, size in command["seconds_megabytes"]),
    }


def thin(values: list, most: int = 50) -> list:
    """At most `most` of the values, evenly spaced."""
    return values[:: -(-len(values) // most)]


def check(path: Path, source: Path, reference: Path | None) -> dict:
    """Counts the rows of an output, and compares its keyphrases with those of the reference."""
    table = parquet.read_table(path).sort_by("id")
    ids, expected = table["id"].to_pylist(), parquet.read_table(source, columns=["id"])["id"].to_pylist()
    errors = len(table) - table["error"].null_count
    found = {
        "rows": len(ids),
        "lost": len(set(expected) - set(ids)),
        "twice": len(ids) - len(set(ids)),
        "errors": errors,
    }
    if reference is not None:
        other = parquet.read_table(reference).sort_by("id")["keyphrases"].to_pylist()
        same = [names(a) == names(b) for a, b in zip(table["keyphrases"].to_pylist(), other, strict=True)]
        found["same_keyphrases"] = sum(same) / len(same)
    return found


def names(phrases: list[dict] | None) -> list[str] | None:
    """The keyphrases without scores, whose last digit depends on the batch."""
    return phrases and [phrase["keyphrase"] for phrase in phrases]


def measure(way: str, documents: int, folder: Path, reference: Path | None) -> tuple[dict, Path]:
    """One run of a way -> its row, and its output. Start-up is the time of the same command on two documents."""
    seconds = {}
    for name in ("start", "in"):
        source, output = folder.parent / f"{name}.parquet", folder / name
        output.mkdir(parents=True)
        command, path = command_of(way, source, output)
        result = run(command)
        seconds[name] = result["seconds"]
    row = {**result, **worker_memory(result), "start_seconds": seconds["start"], **check(path, source, reference)}
    row["documents_per_second"] = documents / (seconds["in"] - seconds["start"])
    print(f"{way:16} {row['documents_per_second']:7.1f} documents/s  {row['seconds']:7.1f} s", end="  ")
    print(f"{row['rows']:,} rows, {row['lost']} lost, {row['twice']} twice, {row['errors']} errors", flush=True)
    return row, path


def main() -> None:
    """Runs the ways in turns, and compares their outputs with the first one's."""
    parser = make_parser(__doc__, "many_documents", "data sets")
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    args = parser.parse_args()
    rows, reference = {way: [] for way in args.ways}, None
    with tempfile.TemporaryDirectory() as folder:
        for name, documents in (("start", 2), ("in", args.documents)):
            make_source(args.data, documents, Path(folder, f"{name}.parquet"))
        for number in range(args.rounds):
            for way in args.ways:
                row, path = measure(way, args.documents, Path(folder, f"{number}-{WAYS.index(way)}"), reference)
                rows[way].append(row)
                reference = reference or path
    rates = {way: statistics.median(row["documents_per_second"] for row in found) for way, found in rows.items()}
    first = rates[args.ways[0]]
    results = {
        way: {"rounds": rows[way], "documents_per_second": rate, "ratio_to_first": rate / first}
        for way, rate in rates.items()
    }
    write(args.name, results, documents=args.documents, rounds=args.rounds, bad_rows=-(-args.documents // BAD))


if __name__ == "__main__":
    main()
