"""Files of JSON Lines that grow row by row: killed at any moment, the same call ends in the same file."""

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import torch
from run_folder import OtherSettings, different, replace_file
from tqdm import tqdm


def whole_lines(path: Path) -> int:
    """How many lines a file has; one that was being written when the process was killed is taken off its end."""
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        content = file.read()
        end = content.rfind(b"\n") + 1
        if end < len(content):
            file.truncate(end)
    return content.count(b"\n")


def write_lines(
    path: Path, rows: Sequence, answer: Callable[[Sequence, int], list[dict]], *, batch_size: int, seed: int, desc: str
) -> int:
    """A line for each row, in their order -> how many were written now. What stands in the file is not made again.

    The rows of a batch have a seed of their own, and a batch that was interrupted is drawn again from its first row, so that
    an interrupted run ends in the same file.

    Args:
        answer: the rows of a batch and the first one's number -> an object for each.
    """
    done = whole_lines(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        path.open("a", encoding="utf-8") as file,
        tqdm(total=len(rows), initial=done, unit="row", desc=desc) as bar,
    ):
        for start in range(done - done % batch_size, len(rows), batch_size):
            torch.manual_seed(seed + start)
            own = rows[start : start + batch_size]
            for i, line in enumerate(answer(own, start), start=start):
                if i >= done:
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
                    bar.update()
            file.flush()
    return len(rows) - done


class Note:
    """What a file was made with, beside it: `x.jsonl` has `x.settings.json`. It keeps two runs from mixing in one file."""

    def __init__(self, path: Path):
        self.made, self.path = path, path.with_suffix(".settings.json")

    def compare(self, settings: dict) -> None:
        """Raises an OtherSettings error where the file was begun with other settings, which it names, or without a record."""
        fix = "Remove it and what lies beside it, or write elsewhere."
        if not self.path.exists():
            raise OtherSettings(f"{self.made} has no record of its settings ({self.path.name}). {fix}")
        settings = json.loads(json.dumps(settings))
        before = json.loads(self.path.read_text(encoding="utf-8"))["settings"]
        if other := "; ".join(different(before, settings, sorted({*before, *settings}))):
            raise OtherSettings(f"{self.made} was begun with other settings: {other}. {fix}")

    def begin(self, settings: dict) -> None:
        self.made.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, json.dumps({"settings": settings}, ensure_ascii=False, indent=1))

    def add(self, report: dict) -> None:
        """Puts what was found beside the settings."""
        found = json.loads(self.path.read_text(encoding="utf-8"))
        replace_file(self.path, json.dumps({**found, "report": report}, ensure_ascii=False, indent=1))


def digest(value) -> str:
    """The SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
