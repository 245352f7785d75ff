"""Symbolic links in a source: only those that stay in its folder, or in its repository of the Hub cache, are followed.

A merge copies small files of its sources into the output, which may be published: a link out of a downloaded folder could name
any file of the user.
"""

import os
from pathlib import Path

from .errors import MergeError

READ_SUFFIXES = (".safetensors", ".json", ".model", ".txt", ".jinja", ".md", ".py")  # of the files that a merge reads
TEMPLATES = "additional_chat_templates"


def refuse_links_out(folder: Path):
    """Raises a `MergeError` for a file of a source that is a symbolic link to a place outside of its folder."""
    real = Path(os.path.realpath(folder))
    allowed = [real, *blobs_of(real)]
    for path in [*folder.iterdir(), *folder.glob(f"{TEMPLATES}/*")]:
        if not path.exists() or (path.suffix not in READ_SUFFIXES and path.name != TEMPLATES):
            continue
        target = Path(os.path.realpath(path))
        if not any(target.is_relative_to(place) for place in allowed):
            raise MergeError(
                f"{path} is a link to {target}, which is outside of its folder. Copy the file into the folder."
            )


def blobs_of(folder: Path) -> list[Path]:
    """The folder of files of the Hub cache that a snapshot, or a folder in one, links to."""
    snapshots = [p for p in folder.parents if p.name == "snapshots" and p.parent.name.startswith("models--")]
    return [place.parent / "blobs" for place in snapshots[:1]]
