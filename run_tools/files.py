"""Files that are whole or not there, what changes with their content, how settings differ, and YAML."""

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from .errors import UserError, one_line, short_repr


def write_file(path: str | Path, content: bytes | str) -> None:
    """Writes a file under another name, and renames it once it is on the disk."""
    new = Path(path).with_name(f".{Path(path).name}.{os.getpid()}.tmp")
    try:
        with new.open("wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, wait: bool = False) -> Iterator[IO[bytes]]:
    """Opens a file to append to it, locked; if it is, waits or raises a `BlockingIOError`. A full disk is named."""
    file = path.open("ab")
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise BlockingIOError(f"Another process writes {path}. Wait for it, or stop it.") from None
    except (OSError, ImportError):  # a file system without locks; Windows
        pass
    try:
        yield file
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            error.filename = error.filename or str(path)
        raise
    finally:
        with suppress(OSError):  # of a full disk again
            file.close()


def sha256_of(path: str | Path) -> str:
    """The SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(value) -> str:
    """The SHA-256 of a value as JSON."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()


def fingerprint(source: str | Path) -> str:
    """The name and a hash of a file or folder (without cards and checkpoints), or a Hub repository and its commit."""
    path = Path(source)
    if path.is_file():
        return f"{path.name}, sha256 {sha256_of(path)[:16]}"
    if path.is_dir():
        places = [file.relative_to(path).as_posix() for file in sorted(path.rglob("*")) if file.is_file()]
        read = [place for place in places if not re.search(r"(^|/)([._]|checkpoint-)|\.md$", place)]
        return f"{path.resolve().name}, sha256 {digest([(place, sha256_of(path / place)) for place in read])[:16]}"
    from huggingface_hub import hf_hub_download

    try:
        return f"{source}, commit {Path(hf_hub_download(str(source), 'config.json')).parent.name}"
    except (OSError, ValueError):  # an id that does not exist is named when it is opened
        return str(source)


def differences(before: Mapping, now: Mapping, prefix: str = "") -> str:
    """The settings that differ, such as "top_k=2 before, 3 now"; "" if none does."""
    found = []
    for name in {**before, **now}:
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            found.append(differences(old, new, f"{prefix}{name}."))
        elif old != new:
            found.append(f"{prefix}{name}={short_repr(old)} before, {short_repr(new)} now")
    return "; ".join(filter(None, found))


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises a `UserError` if it is not valid, has a key twice, or holds anything else."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node, deep=False):
            seen = set()
            for key, _ in node.value:
                if str(key.value) in seen:  # PyYAML would take the last
                    raise yaml.MarkedYAMLError(problem=f"duplicate key {key.value!r}", problem_mark=key.start_mark)
                seen.add(str(key.value))
            return super().construct_mapping(node, deep)

        def construct_object(self, node, deep=False):
            try:
                value = super().construct_object(node, deep)
                str(value if isinstance(value, int) else "")  # Python does not print numbers of thousands of digits
                return value
            except (ValueError, LookupError, AttributeError) as error:
                raise yaml.MarkedYAMLError(problem=one_line(error), problem_mark=node.start_mark) from error

    try:
        with open(path, encoding="utf-8-sig") as file:
            content = yaml.load(file, Loader)
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError) as error:
        raise UserError(f"{path} is not valid YAML: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no mapping of options. Write one per line, such as seed: 1.")
    return content
