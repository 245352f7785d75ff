"""The staging folder of an output: its files are written there, and one rename makes them visible."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from run_tools.claims import LOCK, RECORD, TEMPORARY, Claim, find_foreign, locked, remove_lock
from run_tools.errors import expand_user
from run_tools.files import sync

from .errors import MergeError


class ResumableError(MergeError):
    """An error that leaves the staging folder unchanged."""


def partial_folder(out: Path) -> Path:
    """The staging folder of an output."""
    return out.parent / f".{out.name}.partial"


def open_claim(folder: Path, command: str) -> Claim | None:
    """The claim that an interrupted run of a command has on a staging folder, if there is one.

    Raises:
        MergeError: if the folder is of anything else.
    """
    claim = Claim.read(folder)
    if claim is not None and claim.command != command:
        raise ResumableError(f"{folder} is of a run of {claim.command!r}. Delete it, or choose another output.")
    return claim


@contextmanager
def staging_folder(out: Path, command: str, settings: dict[str, Any], resume: bool = False) -> Iterator[Claim]:
    """Claims the staging folder of `out`, and renames it to `out` when the block ends without an error.

    With `resume`, the files of an interrupted run with the same settings are kept. The folder stays after an interruption, and is
    removed after a `MergeError`.

    Raises:
        MergeError: if the folder is of anything else, or, with `resume`, of a run with other settings.
        BlockingIOError: if another process writes there.
    """
    out = expand_user(out).resolve()
    folder = partial_folder(out)
    created = [parent for parent in out.parents if not parent.exists()]
    open_claim(folder, command)
    with locked(folder):
        if not (folder / LOCK).exists():
            raise ResumableError(
                f"Another run has just written {out}. Choose another output folder, or delete it first."
            )
        claim = open_claim(folder, command)  # written since
        if claim and resume and claim.settings != settings:
            raise ResumableError(
                f"Cannot resume the run in {folder}: it has another recipe or other sources. Start again without --resume."
            )
        if claim and resume:
            for path in filter(lambda path: TEMPORARY.fullmatch(path.name), list(folder.rglob("*"))):
                path.unlink()  # that a killed process was writing
        else:
            if claim:
                claim.clear()
            claim = Claim.create(folder, command, settings)
        try:
            yield claim
            commit(claim, out)
        except ResumableError:
            raise
        except MergeError:
            claim.remove()
            with suppress(OSError):  # not empty
                for parent in created:
                    parent.rmdir()
            raise


def commit(claim: Claim, out: Path) -> None:
    """Renames a staging folder that is complete, and removes its record last, so that until then it can be claimed again."""
    if (foreign := find_foreign(claim.folder, {RECORD, *claim.files})) is not None:
        raise ResumableError(
            f"{foreign!r} was put into {claim.folder} meanwhile. Move it away, and repeat the command."
        )
    sync(claim.folder)
    try:
        os.rename(claim.folder, out)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        (claim.folder / RECORD).unlink()  # without it no later run empties the folder
        raise ResumableError(
            f"{out} was created by another program during the merge. The complete mixture is in {claim.folder}: move it."
        ) from error
    (out / RECORD).unlink()
    remove_lock(out)
    sync(out)
    sync(out.parent)
