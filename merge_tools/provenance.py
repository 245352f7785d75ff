"""merge_record.json: the sources of a mixture with their hashes and licences, and the recipe."""

import json
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from run_tools.errors import escape

from .checkpoints import Source
from .errors import MergeError
from .source_scan import ScanResult

RECORD = "merge_record.json"
MAX_LICENCES, LONGEST_LICENCE = 10, 200
RECORD_KEYS = ("made_by", "family", "format", "recipe", "base", "experts", "gates")


def package_version() -> str:
    """The version of the installed distribution."""
    try:
        return version("lexperts")
    except PackageNotFoundError:
        return "unknown"


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
    except (ValueError, OSError) as error:
        raise MergeError(f"{path} cannot be read ({error}). Copy or compose the mixture again.") from error
    missing = [key for key in RECORD_KEYS if not isinstance(record, dict) or key not in record]
    if missing:
        raise MergeError(f"{path} is missing the key {missing[0]!r}. Copy or compose the mixture again.")
    return record
