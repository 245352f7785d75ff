"""merge_record.json: the sources of a mixture with their hashes and licences, and the recipe."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from run_tools.errors import escape, short_reason, short_repr

from .checkpoints import Source
from .errors import MergeError
from .families import MIXTURES
from .source_scan import ScanResult

RECORD = "merge_record.json"
MAX_LICENCES, LONGEST_LICENCE = 10, 200
RECORD_KEYS = ("made_by", "family", "format", "recipe", "base", "experts", "gates")


def source_record(source: Source, scans: dict[Path, ScanResult]) -> dict[str, Any]:
    """The path or Hub id of a source, its licence, and the size and hashes of every file that was read."""
    record: dict[str, Any] = {"name": source.name, "source": source.origin}
    if source.adapter:
        record["adapter_over"] = str(source.checkpoint.folder)
    license = read_license(source.folder) or read_license(source.checkpoint.folder)
    if license:
        record["license"] = license
    record["files"] = [scans[file].record for file in source.files]
    return record


def read_license(folder: Path) -> str | None:
    """The licence in the metadata of README.md; its unparsed line if the metadata is not valid YAML."""
    readme = folder / "README.md"
    if not readme.is_file():
        return None
    import yaml
    from huggingface_hub import metadata_load

    try:
        license = (metadata_load(readme) or {}).get("license")
    except (yaml.YAMLError, ValueError):
        metadata = readme.read_text(encoding="utf-8", errors="replace").partition("\n---")[0]
        line = re.search(r"^license:(.*)$", metadata, re.MULTILINE) if metadata.startswith("---") else None
        license = line and line[1].strip().strip("\"'")
    parts = license if isinstance(license, list) else [license]
    text = ", ".join(escape(part) for part in parts[:MAX_LICENCES] if isinstance(part, str))  # not lists of aliases
    return text[:LONGEST_LICENCE] or None


def read_record(folder: Path) -> dict[str, Any]:
    """Reads the record of a mixture; raises a `MergeError` if the folder has no record, or an incomplete one."""
    path = folder / RECORD
    if not folder.is_dir():
        raise MergeError(f"Folder {str(folder)!r} does not exist. Give a folder that merge-experts wrote.")
    if not path.is_file():
        raise MergeError(f"{folder} has no {RECORD}. Give a folder that merge-experts has written.")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise MergeError(
            f"{path} cannot be read ({short_reason(error)}). Copy or compose the mixture again."
        ) from error
    if not isinstance(record, dict):
        raise MergeError(f"{path} is damaged: it holds a {type(record).__name__}. Copy or compose the mixture again.")
    missing = [key for key in RECORD_KEYS if key not in record]
    if missing:
        raise MergeError(f"{path} is missing the key {missing[0]!r}. Copy or compose the mixture again.")
    for key, value, valid in record_values(record):
        if not valid:
            raise MergeError(f"{path} is damaged: {key} is {short_repr(value)}. Copy or compose the mixture again.")
    return record


def record_values(record: dict[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """The keys and values of a record, and whether each is of its type."""
    for key in ("made_by", "family", "format"):
        yield key, record[key], isinstance(record[key], str) and bool(record[key])
    yield "format", record["format"], record["format"] in (*MIXTURES, "lexicon")
    for key in ("recipe", "gates"):
        yield key, record[key], isinstance(record[key], dict)
    experts = record["experts"]
    yield "experts", experts, isinstance(experts, list) and bool(experts)
    if "statistics" in record["gates"]:
        yield from statistics_values(record["gates"], len(experts))
    for where, source in [("base", record["base"]), *((f"experts[{i}]", one) for i, one in enumerate(experts))]:
        yield where, source, isinstance(source, dict)
        for key in ("name", "source"):
            yield f"{where}.{key}", source.get(key), isinstance(source.get(key), str) and bool(source[key])
        for key in ("license", "adapter_over"):
            yield f"{where}.{key}", source.get(key), isinstance(source.get(key, ""), str)
        files = source.get("files")
        yield f"{where}.files", files, isinstance(files, list) and bool(files)
        for file in files:
            yield f"{where}.files", file, isinstance(file, dict)
            hashes = [file.get(key, "") for key in ("name", "xxh3", "sha256")]
            yield f"{where}.files", file, all(isinstance(text, str) for text in hashes) and bool(file.get("name"))
            yield f"{where}.files.bytes", file.get("bytes"), type(file.get("bytes")) is int and file["bytes"] >= 0
    written, rows, shared = (record.get(key) for key in ("written", "gate_rows", "shared_from"))
    yield "written", written, written is None or (isinstance(written, dict) and all(map(is_text, written.values())))
    is_rows = (
        isinstance(rows, list) and len(rows) == len(experts) and all(type(row) is int and row >= 0 for row in rows)
    )
    yield "gate_rows", rows, rows is None or is_rows
    yield "shared_from", shared, shared is None or (isinstance(shared, list) and all(map(is_text, shared)))


def statistics_values(gates: dict[str, Any], count: int) -> Iterator[tuple[str, Any, bool]]:
    """Those of gates with statistics: a list with a value per expert for each key, and the table of their held-out tokens."""
    for key, kind in (("experts", str), ("tokens", int), ("samples", str)):
        values = gates.get(key)
        right = isinstance(values, list) and len(values) == count and all(type(value) is kind for value in values)
        yield f"gates.{key}", values, right
    yield "gates.statistics", gates["statistics"], is_text(gates["statistics"])
    table = gates.get("confusion")
    rows = table if isinstance(table, list) and len(table) == count else [None]
    right = all(
        isinstance(row, list) and len(row) == count and all(type(x) in (int, float) for x in row) for row in rows
    )
    yield "gates.confusion", table, right


def is_text(value: Any) -> bool:
    """Whether a value is a text."""
    return isinstance(value, str)
