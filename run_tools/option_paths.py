"""Files and folders that options name: they are checked before the first of them is read or written."""

import os
from pathlib import Path

from .errors import UserError, repr_path


def check_file(option: str, text: str | Path) -> None:
    """Raises a `UserError` for a text that is not a file that can be read."""
    path = Path(text)
    if path.is_dir():
        raise UserError(f"{option} {repr_path(text)} is a folder. Pass a file.")
    if not path.is_file():
        problem = "is not a regular file" if path.exists() else "does not exist"
        raise UserError(f"{option} {repr_path(text)} {problem}. Pass a file.")
    if not os.access(path, os.R_OK):
        raise UserError(f"{option} {repr_path(text)} cannot be read. Change its permissions.")


def check_folder(option: str, text: str | Path) -> None:
    """Raises a `UserError` for a text that is not a folder."""
    if not Path(text).is_dir():
        problem = "is a file" if Path(text).exists() else "does not exist"
        raise UserError(f"{option} {repr_path(text)} {problem}. Pass a folder.")


def check_new_folder(option: str, text: str | Path) -> None:
    """Raises a `UserError` for a folder that can be neither used nor made."""
    path = Path(text)
    if os.path.lexists(path) and not path.is_dir():
        raise UserError(f"{option} {repr_path(text)} is not a folder. Choose another name.")
    parent = next(folder for folder in (path, *path.absolute().parents) if os.path.lexists(folder))
    if not parent.is_dir():
        raise UserError(f"{option} {repr_path(text)} lies in {str(parent)!r}, which is not a folder. Choose another.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"{option} {repr_path(text)} cannot be written. Change the permissions of {str(parent)!r}.")


def check_new_file(option: str, text: str | Path) -> None:
    """Raises a `UserError` for a file that cannot be written."""
    if Path(text).is_dir():
        raise UserError(f"{option} {repr_path(text)} is a folder. Pass the name of a file.")
    check_new_folder(option, str(Path(text).absolute().parent))
