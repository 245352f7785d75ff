"""Tables of benchmarks/results, one module per system; each public function returns the Markdown of one table."""

import json
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "results"
DOCS = "https://github.com/lexperts/lexperts/blob/main/docs"  # a package index shows the README without the files beside it


def load(name: str) -> dict:
    """The content of results/NAME.json."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


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
        hardware = f"{machine['threads']} threads of {' and '.join(processors)}"
        on_gpu = [row for row in rows if row.get("device") == "cuda"]
        if on_gpu:
            hardware += f", {len(on_gpu)} of {len([row for row in rows if 'device' in row])} runs on one {record['settings']['gpu']}"
    return (
        f"Measured {record['date']} at {', '.join(commits)} with torch {versions['torch']}, transformers "
        f"{versions['transformers']}, {hardware}."
    )
