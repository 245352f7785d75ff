"""Tables from benchmarks/results, a module for each system: every function gives the Markdown of one."""

import json
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "results"


def load(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def provenance(record: dict) -> str:
    where = record["machine"]
    versions = record["versions"]
    rows = record["results"] if isinstance(record["results"], list) else []
    commits = sorted({row["commit"] for row in rows if "commit" in row}) or [record["commit"]]
    if where["accelerator"]:
        place = f"on one {where['accelerator']}"
    else:
        processors = sorted({row.get("processor", where["processor"]) for row in rows}) or [where["processor"]]
        place = f"{where['threads']} threads of {' and '.join(processors)}"
        on_gpu = [row for row in rows if row.get("device") == "cuda"]
        if on_gpu:
            place += f", {len(on_gpu)} of {len([row for row in rows if 'device' in row])} runs on one {record['settings']['gpu']}"
    return (
        f"Measured {record['date']} at {', '.join(commits)} with torch {versions['torch']}, transformers "
        f"{versions['transformers']}, {place}."
    )
