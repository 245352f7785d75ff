"""What commands of `lexperts merge` have in common: their folders, and options of pairs."""

from pathlib import Path
from typing import Annotated

import typer

from merge_tools import MergeError
from run_tools.errors import short_repr

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A mixture written by merge-experts.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The output folder, which must not exist or be empty.")]
Moved = Annotated[
    list[str] | None,
    typer.Option(
        "--moved", metavar="NAME=FOLDER", help="Where an expert (or `base`) is now, if it was moved; can be repeated."
    ),
]


def read_pairs(option: str, pairs: list[str] | None, example: str) -> dict[str, str]:
    """`["law=models/law"]` -> `{"law": "models/law"}`."""
    read = {}
    for pair in pairs or []:
        name, _, value = (part.strip() for part in pair.partition("="))
        if not (name and value):
            raise MergeError(
                f"{option} {short_repr(pair)} is not {example.split()[0]}. Example: {option} {example.split()[1]}"
            )
        if name in read:
            raise MergeError(f"Two values of {option} have the name {short_repr(name)}. Give each another name.")
        read[name] = value
    return read


def read_moved(pairs: list[str] | None) -> dict[str, str]:
    """Name of a source -> where it is now."""
    return read_pairs("--moved", pairs, "NAME=FOLDER law=models/law")
