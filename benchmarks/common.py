"""Shared by all benchmarks: a result is a JSON file with date, commit, versions and machine; each row has its commit."""

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "transformers", "peft", "yake", "keybert", "mergekit")


def make_parser(doc: str, name: str, data: str = "") -> argparse.ArgumentParser:
    """A parser with `--name` and, for a benchmark that reads data sets, `--data`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default=name, help="name of the file in benchmarks/results, without .json")
    if data:
        parser.add_argument("--data", type=Path, required=True, help=f"folder with {data}")
    return parser


def git(*arguments: str) -> str:
    """Output of a git command."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def commit() -> str:
    """The measured commit, marked if the working tree has changes; LEXPERTS_COMMIT sets it for a copy without history."""
    if "LEXPERTS_COMMIT" in os.environ:
        return os.environ["LEXPERTS_COMMIT"]
    changed = git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    return git("rev-parse", "--short", "HEAD") + (" with changes" if changed else "")


def versions() -> dict[str, str]:
    """Versions of the packages that are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict:
    """Processor, threads and accelerator; no host names."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
    }


def write(name: str, rows: list[dict], key: Sequence[str] = (), **settings) -> Path:
    """Writes results/NAME.json. With a `key`, rows of the file stay that have other values of these fields."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path, own = RESULTS / f"{name}.json", {"commit": commit(), "processor": machine()["processor"]}
    new = [{**row, **own} for row in rows]
    if key and path.exists():
        keys = [[row.get(field) for field in key] for row in new]
        old = json.loads(path.read_text(encoding="utf-8"))["results"]
        new = [row for row in old if [row.get(field) for field in key] not in keys] + new
    record = {"date": date.today().isoformat(), "commit": own["commit"], "versions": versions(), "machine": machine()}
    text = json.dumps({**record, "settings": settings, "results": new}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
    print(f"wrote {path.name}", flush=True)
    return path
