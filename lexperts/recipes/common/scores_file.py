"""scores.json, which a command that evaluates writes: it does not replace the scores of others."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from run_tools.errors import UserError
from run_tools.files import write_file

SCORES = "scores.json"


def check_scores(folder: str | Path, keys: Iterable[str], keys_in: Callable[[dict], Iterable[str]]) -> None:
    """Called before a run scores something. Raises a `UserError` if the folder's scores.json holds scores that the run would lose.

    Args:
        folder: the output folder; it need not exist.
        keys: what the run scores, such as "ours on mail".
        keys_in: the keys of the scores in the content of a scores.json of this command.
    """
    path = Path(folder) / SCORES
    if not path.exists():
        return
    try:
        found = dict.fromkeys(keys_in(json.loads(path.read_text(encoding="utf-8"))))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path} was not written by this command. Pass another --output-dir.") from None
    if lost := found.keys() - set(keys):
        raise UserError(
            f"{path} holds scores of {', '.join(map(repr, sorted(lost)))}, which this run would replace. Pass another --output-dir, or "
            "score them together."
        )


def write_scores(folder: str | Path, content: dict, indent: int = 1) -> None:
    """Writes scores.json, whole or not at all; the folder is made if it does not exist."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_file(Path(folder) / SCORES, json.dumps(content, ensure_ascii=False, indent=indent, allow_nan=False))
