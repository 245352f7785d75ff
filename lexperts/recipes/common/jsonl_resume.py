"""JSON Lines files that are written chunk by chunk: a run that was killed at any moment resumes, and ends in the same file."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from .run_folder import SettingsMismatchError, replace_file
from .settings import iter_differences


class ResumableJsonl:
    """A JSON Lines file with one object per row, and the record of the settings that it was made with.

    Until `finish`, the rows of `x.jsonl` are in `x.part`. The settings are in `x.settings.json`; they are compared on every
    start, so that two runs never mix in one file. It also says whether `x.part` is of the run. Files without such a record are neither
    read nor removed.

    Args:
        path: the finished file.
        settings: everything that the content depends on, as JSON: options, `fingerprint`s of models, a `digest` of the rows.

    Example:

    ```python
    >>> file = ResumableJsonl("runs/summaries.jsonl", {"num_beams": 4, "rows_sha256": digest(rows)})
    >>> if not file.is_complete():
    ...     file.write(rows, lambda chunk, first: [{"summary": text} for text in summarize(chunk)], batch_size=64)
    ...     file.finish()
    ```"""

    def __init__(self, path: str | Path, settings: Mapping):
        self.path, self.settings = Path(path), json.loads(json.dumps(settings))
        self.part = self.path.with_suffix(".part")
        self.record = self.path.with_suffix(".settings.json")

    def is_complete(self, overwrite: bool = False) -> bool:
        """Whether the file is finished, with these settings. Raises a `SettingsMismatchError` if it was started with
        other ones, which are listed, or without a record; `overwrite` removes a file with other settings instead.
        """
        if difference := self.find_difference():
            if not overwrite or not self.read_record():
                raise SettingsMismatchError(
                    f"{self.path} {difference}. Remove it and {self.record.name}, or write elsewhere."
                )
            self.remove()
        if self.path.exists():
            self.remove_part()  # if a run was killed while it gave the file its name
        return self.path.exists()

    def find_difference(self) -> str:
        """How the existing file differs from these settings; "" if it does not, or if there is none."""
        record = self.read_record()
        if self.record.exists() and not record:
            return f"cannot be written: {self.record.name} is damaged, or is not the record of a run"
        if not (self.path.exists() or self.part.exists()):
            return ""
        if not record or (not self.path.exists() and not record.get("part")):
            return f"has no record of its settings ({self.record.name})"
        before = record["settings"]
        names = sorted({*before, *self.settings})
        difference = "; ".join(iter_differences(before, self.settings, names))
        return f"was made with other settings: {difference}" if difference else ""

    def remove(self) -> None:
        """Removes the file, its part and its record."""
        self.remove_part()
        for path in (self.path, self.record):
            path.unlink(missing_ok=True)

    def remove_part(self) -> None:
        """Removes the part, if it is of this run, and says so in the record."""
        record = self.read_record()
        if record.pop("part", False):
            self.part.unlink(missing_ok=True)
            self.write_record(record)

    def start(self) -> None:
        """Writes the record, unless there is one: from here on the part is of this run. Raises errors as `is_complete`."""
        if not self.is_complete() and not (self.part.exists() and self.read_record()):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.write_record({"settings": self.settings, "part": True})

    def write(
        self,
        rows: Sequence,
        process: Callable[[Sequence, int], Iterable[dict]],
        *,
        batch_size: int,
        seed: int | None = None,
        desc: str | None = None,
        unit: str = "row",
    ) -> int:
        """Appends an object for each row that has none yet -> the number of new rows. Raises errors as `is_complete`.

        An interrupted batch is computed again from its first row. The torch seed of the batch that starts at row i is `seed + i`, so
        that sampled results do not depend on interruptions either.

        Args:
            process: the rows of a batch, and the index of the first one -> one object for each.
            batch_size: rows that are processed, and flushed to disk, together.
            desc, unit: for the progress bar.
        """
        from tqdm import tqdm

        if self.is_complete():
            return 0
        self.start()
        done = count_lines(self.part)
        with (
            self.part.open("a", encoding="utf-8", newline="\n") as file,
            tqdm(total=len(rows), initial=done, desc=desc or self.path.stem, unit=unit) as bar,
        ):
            for start in range(done - done % batch_size, len(rows), batch_size):
                if seed is not None:
                    import torch

                    torch.manual_seed(seed + start)
                batch, count = rows[start : start + batch_size], min(batch_size, len(rows) - start)
                results, old = list(process(batch, start)), max(done - start, 0)
                if len(results) != count:
                    raise ValueError(f"{len(results)} results for the {count} rows from row {start} of {self.path}.")
                file.write(json_lines(results[old:]))
                file.flush()
                bar.update(count - old)
        return len(rows) - done

    def read_part(self) -> list[dict]:
        """The objects written so far."""
        return read_lines(self.part)

    def finish(self, lines: Iterable[dict] | None = None) -> None:
        """Gives the file its name. With `lines`, these are its content, in the place of what `write` has written."""
        if lines is None:
            os.replace(self.part, self.path)
        else:
            replace_file(self.path, json_lines(lines))
        self.remove_part()

    def read_record(self) -> dict:
        """The content of the record: `settings`, `part` (whether it is of this run), and `report` if there is one; or nothing, if it
        does not exist or is damaged.
        """
        try:
            record = json.loads(self.record.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError, RecursionError):
            return {}
        return record if isinstance(record, dict) and isinstance(record.get("settings"), dict) else {}

    def write_record(self, record: Mapping) -> None:
        """Replaces the record."""
        replace_file(self.record, json.dumps(record, ensure_ascii=False, indent=1))

    def add_report(self, report: Mapping) -> None:
        """Records results beside the settings, such as counts and times; they are not compared."""
        self.write_record({**self.read_record(), "report": report})


def count_lines(path: Path) -> int:
    """The number of complete lines of a file. An incomplete last line, as a killed process leaves it, is cut off."""
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        content = file.read()
        end = content.rfind(b"\n") + 1
        if end < len(content):
            file.truncate(end)
    return content.count(b"\n")


def read_lines(path: Path) -> list[dict]:
    """The objects of a JSON Lines file, whose lines end at "\\n" alone (a text may contain other line separators)."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def json_lines(rows: Iterable[Mapping]) -> str:
    """Objects as JSON Lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def digest(value) -> str:
    """The SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
