"""merge_record.json: the recipe of a mixture and its sources with their hashes and licences, from which it is verified and edited."""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from run_tools.errors import escape, expand_user
from run_tools.versions import __version__

from .errors import MergeError
from .families import FAMILIES, FORMATS, MixtureClass
from .recipe import Recipe
from .sources import Source, read_json, weight_files
from .writer import write_json

RECORD = "merge_record.json"


class Hashes:
    """The SHA-256 of the sources' files, computed by a thread while tensors are written."""

    def __init__(self, sources: Sequence[Source]):
        self._pool = ThreadPoolExecutor(1)
        self._known: dict[Path, Future] = {}
        for path in (path for source in sources for path in files_of(source)):
            if path not in self._known:
                self._known[path] = self._pool.submit(sha256_of, path)
        self._pool.shutdown(wait=False)

    def of(self, source: Source) -> dict[str, str]:
        """Name of a file -> its SHA-256."""
        return {path.name: self._known[path].result() for path in files_of(source)}


def files_of(source: Source) -> list[Path]:
    """The weights of a source; of an adapter its own and those of its base."""
    if source.adapter is None:
        return source.files
    return [source.adapter.folder / "adapter_model.safetensors", *weight_files(source.adapter.base)]


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def source_record(source: Source, hashes: Hashes, out: str | Path) -> dict[str, Any]:
    """A source: its name, path or Hub id, where its folder is from the mixture, its licence and the hashes of its files."""
    folder = source.adapter.folder if source.adapter else source.folder
    record: dict[str, Any] = {"name": source.name, "source": source.origin, "files": hashes.of(source)}
    if os.path.isdir(expand_user(source.origin)):
        record["path"] = os.path.relpath(folder.resolve(), expand_user(out).resolve())
    if license := read_license(folder):
        record["license"] = license
    return record


def make_record(
    recipe: Recipe,
    base: Source,
    experts: Sequence[Source],
    kind: MixtureClass,
    gates: dict[str, Any],
    hashes: Hashes,
    out: str | Path,
) -> dict[str, Any]:
    """The content of merge_record.json. Each expert has the number that seeds its row of random gates."""
    return {
        "made_by": f"lexperts {__version__}",
        "family": base.config.model_type,
        "format": kind.model_type,
        "recipe": recipe.to_dict(),
        "base": source_record(base, hashes, out),
        "experts": [source_record(expert, hashes, out) | {"row": row} for row, expert in enumerate(experts)],
        "gates": gates,
    }


def read_license(folder: Path) -> str | None:
    """The licence in the metadata of README.md."""
    from huggingface_hub import metadata_load

    if not (readme := folder / "README.md").is_file():
        return None
    try:
        license = (metadata_load(readme) or {}).get("license")
    except Exception:  # of YAML: a card with broken metadata states no licence
        return None
    return escape(license)[:200] if isinstance(license, str) else None


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Writes the record of a mixture."""
    write_json(folder / RECORD, record)


def read_record(folder: Path) -> dict[str, Any]:
    """The record of a mixture. Raises a `MergeError` if the folder has none, or one without the keys that all have."""
    if not (folder / RECORD).is_file():
        raise MergeError(f"{folder} has no {RECORD}. Give a folder that `lexperts merge` has written.")
    record = read_json(folder / RECORD)
    lists = isinstance(record.get("experts"), list) and all(
        isinstance(e, dict) and "name" in e for e in record["experts"]
    )
    if not lists or record.get("family") not in FAMILIES or record.get("format") not in FORMATS:
        raise MergeError(f"{folder / RECORD} is damaged, or of another version. Copy or compose the mixture again.")
    return record
