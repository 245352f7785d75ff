"""Tables of benchmarks/results, one module per system; each public function returns the Markdown of one table."""

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, stdev

RESULTS = Path(__file__).resolve().parent.parent / "results"
DOCS = "https://github.com/lexperts/lexperts/blob/main/docs"  # a package index shows the README without the files beside it


def load(name: str) -> dict:
    """The content of results/NAME.json."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def table(header: Iterable[str], rows: Iterable[Iterable]) -> list[str]:
    """The lines of a table."""
    header = list(header)
    lines = ["|" + "|".join(f" {cell} " if cell else " " for cell in header) + "|", "|" + " --- |" * len(header)]
    return [*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)]


def page(lines: list[str], record: dict, command: str, note: str = "") -> str:
    """Lines, and under them where the numbers come from."""
    return "\n".join([*lines, "", f"{note}{provenance(record)} `python benchmarks/{command}`"])


def provenance(record: dict) -> str:
    """A sentence with the date, commits, versions and machine of a result."""
    machine = record["machine"]
    versions = record["versions"]
    rows = record["results"] if isinstance(record["results"], list) else []
    commits = sorted({row["commit"] for row in rows if "commit" in row}) or [record["commit"]]
    if machine["accelerator"]:
        hardware = f"on one {machine['accelerator']}"
    else:
        processors = sorted({row.get("processor", machine["processor"]) for row in rows}) or [machine["processor"]]
        threads = machine["threads"]
        hardware = f"{threads} {'thread' if threads == 1 else 'threads'} of {' and '.join(processors)}"
        on_gpu = [row for row in rows if row.get("device") == "cuda"]
        if on_gpu:
            hardware += f", {len(on_gpu)} of {len([row for row in rows if 'device' in row])} runs on one {record['settings']['gpu']}"
    return (
        f"Measured {record['date']} at {', '.join(commits)} with torch {versions['torch']}, transformers "
        f"{versions['transformers']}, {hardware}."
    )


def rows_of(record: dict, what: str) -> list[dict]:
    """The rows of a part."""
    return [row for row in record["results"] if row["what"] == what]


def grouped(rows: Iterable[dict], *names: str) -> dict:
    """The rows by the values of some names, of one name or tuples of several, in the order in which they occur."""
    groups: dict = {}
    for row in rows:
        key = tuple(row[name] for name in names)
        groups.setdefault(key if len(names) > 1 else key[0], []).append(row)
    return groups


def milliseconds(row: dict, *names: str) -> list[float]:
    """Median times of candidates, of all by default."""
    return [row["times"][name]["median_ms"] for name in names or row["times"]]


def ratio(row: dict, first: str, second: str) -> float:
    """The time of a candidate divided by that of another."""
    above, below = milliseconds(row, first, second)
    return above / below


def spread(values: list[float], places: int = 1) -> str:
    """Mean and standard deviation."""
    return f"{mean(values):.{places}f}" + (f" ± {stdev(values):.{places}f}" if len(values) > 1 else "")
