"""Outputs that resume after an interruption: blocks of rows, one file per finished block, joined at the end.

OUT.parts/run.record                            the claim: the settings on which the content depends, and the files of the folder
OUT.parts/000000000512-000000001024.jsonl       rows 512 to 1,023
.OUT.run.json                                   the record of the finished output: its settings, size and hash

A block is named in the claim, then written under another name, flushed to disk and renamed: it is complete or does not exist.
Blocks may be finished in any order. Files without such a record are neither read nor removed.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from .claims import Claim, locked, remove_empty
from .errors import UserError
from .files import describe_space, hash_file, sync, write_file
from .jsonl import json_lines
from .settings import differences, find_changes

BLOCK = re.compile(r"(\d+)-(\d+)\.jsonl")
REPLACED = "replaced"  # the setting of a claim that holds the record of the output which a longer one replaces


class SettingsMismatchError(UserError):
    """A file or folder holds the results of other settings, or is not known to be of a run; the message says how it differs."""


class OutputRecord(NamedTuple):
    """The record of a finished output.

    Attributes:
        settings: those of the run, as JSON.
        size, sha256: of the output's content.
        facts: of the run, such as the number of errors; they are not compared.
    """

    settings: dict
    size: int
    sha256: str
    facts: dict


def parse_record(content: object) -> OutputRecord | None:
    """A record from JSON, or `None` if it is not one."""
    if not isinstance(content, dict) or set(content) != set(OutputRecord._fields):
        return None
    kinds = zip(OutputRecord._fields, (dict, int, str, dict), strict=True)
    return OutputRecord(**content) if all(isinstance(content[name], kind) for name, kind in kinds) else None


class ResumableOutput:
    """A file that is written in blocks.

    Args:
        path: the finished file.
        command: what writes it, for the claim on OUT.parts.
    """

    def __init__(self, path: str | Path, command: str):
        self.path, self.command = Path(path), command
        self.parts = Path(f"{path}.parts")
        self.record = self.path.with_name(f".{self.path.name}.run.json")
        self.claim: Any = None  # a `Claim`, within `lock`
        self.is_finished = False

    def find_record(self) -> OutputRecord | None:
        """The record of the output, `None` if it does not exist.

        Raises:
            SettingsMismatchError: if the output has no record, or has changed since, or another file has the record's name.
            UserError: if OUT.parts is not the folder of a run.
        """
        claim, record = self.claim or Claim.read(self.parts), self._read_record()
        if not self.path.exists():
            if self.path.is_symlink():
                raise SettingsMismatchError(
                    f"{self.path} is a link to {os.readlink(self.path)!r}, which does not exist. Remove the link."
                )
            self._check_record()
            return None
        # a run may have been killed between the new record and the new output
        replaced = parse_record(claim.settings.get(REPLACED)) if claim else None
        for found in (record, replaced):
            if found is not None and found.size == self.path.stat().st_size:
                return found
        reason = "has changed since the run that wrote it" if record else f"{self.record.name} is missing or damaged"
        raise SettingsMismatchError(
            f"{self.path} already exists, and {reason if record else f'is not of a run ({reason})'}. Choose another name, or "
            "delete it."
        )

    def _read_record(self) -> OutputRecord | None:
        try:
            return parse_record(json.loads(self.record.read_text(encoding="utf-8")))
        except (OSError, ValueError, RecursionError):
            return None

    def _check_record(self) -> None:
        """Raises a `SettingsMismatchError` if another file has the name of the record."""
        if os.path.lexists(self.record) and (self.record.is_symlink() or self._read_record() is None):
            raise SettingsMismatchError(
                f"{self.record} is in the way: it is not the record of a run. Move it away, and repeat the command."
            )

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Locks OUT.parts. At the end it is removed if the output is finished, or if nothing was written. Raises a
        `BlockingIOError` if another process writes the output.
        """
        lock = ExitStack()
        lock.enter_context(locked(self.parts))
        try:
            self.claim = Claim.read(self.parts)
            yield
        finally:
            lock.close()  # first: NFS and Windows do not delete an open file
            if self.claim is None:
                remove_empty(self.parts)
            elif self.is_finished:
                self.claim.remove()

    def open_claim(
        self, settings: Mapping, replaced: OutputRecord | None = None, may_change: Collection[str] = ()
    ) -> Claim:
        """Claims OUT.parts, or resumes the run with the same settings that has claimed it; within `lock`.

        Args:
            replaced: the record of the output which the new one will replace.
            may_change: settings for which an unfinished run that replaces the same output is started again.

        Raises:
            SettingsMismatchError: if an unfinished run had other settings; the message names them.
        """
        if self.claim is not None:
            before = {name: value for name, value in self.claim.settings.items() if name != REPLACED}
            changes = find_changes(before, settings)
            is_same_output = parse_record(self.claim.settings.get(REPLACED)) == replaced
            if not is_same_output:
                changes[REPLACED] = "the output that it extends"
            is_free = not self.blocks() or (replaced and is_same_output and set(changes) <= set(may_change))
            if changes and not is_free:
                raise SettingsMismatchError(
                    f"{self.parts} holds an unfinished run with other settings: {'; '.join(changes.values())}. Repeat that run's "
                    "settings, or delete the folder to start over."
                )
            if changes:
                self.claim.clear()
                self.claim = None
        if self.claim is None:
            extended = {} if replaced is None else {REPLACED: replaced._asdict()}
            self.claim = Claim.create(self.parts, self.command, {**settings, **extended})
        return self.claim

    def blocks(self) -> dict[int, int]:
        """start -> end of each block that has a file, in ascending order."""
        claim = self.claim or Claim.read(self.parts)
        names = (BLOCK.fullmatch(name) for name in (claim.complete() if claim else ()))
        return dict(sorted((int(match[1]), int(match[2])) for match in names if match))

    def write_block(self, start: int, end: int, lines: str) -> None:
        """Writes the lines of rows `start` to `end`; within `lock`, after `open_claim`."""
        # a lone surrogate is written as its JSON escape
        self.claim.write(block_name(start, end), lines.encode("utf-8", "backslashreplace"))

    def count_rows(self) -> int:
        """The number of rows in finished blocks before the first gap."""
        end = 0
        for start, next_end in self.blocks().items():
            if start != end:
                break
            end = next_end
        return end

    def read_blocks(self, rows: int | None = None) -> Iterator[bytes]:
        """The content of all blocks in the rows' order.

        Args:
            rows: their number, by default that before the first gap.

        Raises:
            RuntimeError: if the blocks do not contain each row exactly once.
            UserError: if a file is not as it was written.
        """
        claim: Any = self.claim or Claim.read(self.parts)
        end = self.count_rows()
        blocks = self.blocks()
        if rows is not None and (end != rows or max(blocks.values(), default=0) > end):
            raise RuntimeError(f"{self.parts} has no results for row {end:,} of {rows:,}. Repeat the same command.")
        for name in (block_name(*block) for block in blocks.items() if block[1] <= end):
            content = (self.parts / name).read_bytes()
            claim.check_hash(name, hashlib.sha256(content).hexdigest())
            yield content

    def join(self, write: Callable[[Path], Mapping]) -> OutputRecord:
        """Writes the output, then its record; within `lock`, which removes OUT.parts.

        Args:
            write: writes the content to a path, and returns facts for the record.

        Raises:
            OSError: if the disk is full.
        """
        new = self.claim.name_file(f"joined{self.path.suffix}")
        new.unlink(missing_ok=True)
        try:
            facts = write(new)
            sync(new)
        except OSError as error:
            new.unlink(missing_ok=True)
            raise describe_space(error, self.path) from error
        settings = {name: value for name, value in self.claim.settings.items() if name != REPLACED}
        record = OutputRecord(settings, new.stat().st_size, hash_file(new), dict(facts))
        self._check_record()
        text = json.dumps(record._asdict(), ensure_ascii=False, indent=1)
        write_file(self.record, text.encode("utf-8", "backslashreplace"))
        new.replace(self.path)
        sync(self.path.parent)  # before the blocks are deleted
        self.is_finished = True
        return record


def block_name(start: int, end: int) -> str:
    """The file of a block."""
    return f"{start:012d}-{end:012d}.jsonl"


class ResumableJsonl(ResumableOutput):
    """A JSON Lines file with one object for each of the rows of a list.

    Args:
        path: the finished file.
        settings: everything that the content depends on, as JSON: options, fingerprints of models, a `digest` of the rows.

    Example:

    ```python
    >>> file = ResumableJsonl("runs/summaries.jsonl", {"num_beams": 4, "rows_sha256": digest(rows)})
    >>> if not file.is_complete():
    ...     file.write(rows, lambda chunk, first: [{"summary": text} for text in summarize(chunk)], batch_size=64)
    ...     file.finish_output()
    ```"""

    def __init__(self, path: str | Path, settings: Mapping):
        super().__init__(path, "rows")
        self.settings = json.loads(json.dumps(settings))

    def is_known(self) -> bool:
        """Whether a run has begun to write the file."""
        return self._read_record() is not None or Claim.read(self.parts) is not None

    def is_complete(self, overwrite: bool = False) -> bool:
        """Whether the file is finished, with these settings.

        Args:
            overwrite: remove a file of other settings.

        Raises:
            SettingsMismatchError: if it was begun with other settings, or is not of a run; the message names what differs.
        """
        record, claim = self.find_record(), Claim.read(self.parts)
        earlier = record or (claim if claim and claim.complete() else None)
        changes = differences(earlier.settings, self.settings) if earlier else ""
        if changes and not overwrite:
            raise SettingsMismatchError(
                f"{self.path} was made with other settings: {changes}. Remove it and {self.record.name} or {self.parts.name}, or "
                "write elsewhere."
            )
        if claim and (record or changes):  # of a run that was killed at its end, or is overwritten
            claim.remove()
        if changes:
            self.path.unlink(missing_ok=True)
            self.record.unlink(missing_ok=True)
        return record is not None and not changes

    def start(self) -> None:
        """Claims the file, unless it is complete, so that it belongs to this run. Raises errors as `is_complete`."""
        if not self.is_complete():
            with self.claimed():
                pass

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """`lock`, with the claim of this run."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.lock():
            self.open_claim(self.settings)
            yield

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
        """Writes an object for each row that has none yet -> the number of new rows. Raises errors as `is_complete`.

        An interrupted batch is computed again from its first row. The torch seed of the batch that starts at row i is `seed + i`, so
        that sampled results do not depend on interruptions either.

        Args:
            process: the rows of a batch, and the index of the first one -> one object for each.
            batch_size: rows that are processed, and written to disk, together.
            desc, unit: for the progress bar.
        """
        from tqdm import tqdm

        if self.is_complete():
            return 0
        with self.claimed():
            done = self.count_rows()
            with tqdm(total=len(rows), initial=done, desc=desc or self.path.stem, unit=unit) as bar:
                for start in range(done, len(rows), batch_size):
                    if seed is not None:
                        import torch

                        torch.manual_seed(seed + start)
                    end = min(start + batch_size, len(rows))
                    results = list(process(rows[start:end], start))
                    if len(results) != end - start:
                        raise ValueError(
                            f"{len(results)} results for the {end - start} rows from row {start} of {self.path}."
                        )
                    self.write_block(start, end, json_lines(results))
                    bar.update(end - start)
        return len(rows) - done

    def read_rows(self) -> list[dict]:
        """The objects written so far."""
        return [json.loads(line) for content in self.read_blocks() for line in content.splitlines()]

    def finish_output(self, lines: Iterable[dict] | None = None, facts: Mapping | None = None) -> None:
        """Gives the file its name.

        Args:
            lines: its content, in place of what `write` has written.
            facts: results for the record, such as counts and times.
        """

        def write(new: Path) -> Mapping:
            with new.open("wb") as file:
                file.writelines(
                    self.read_blocks() if lines is None else [json_lines(lines).encode("utf-8", "backslashreplace")]
                )
            return facts or {}

        with self.claimed():
            self.join(write)
