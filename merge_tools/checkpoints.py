"""The sources of a merge: dense checkpoints of a supported family, and LoRA adapters on top of one. Opening reads only the headers."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from run_tools.errors import join_names, short_reason

from .adapters import Adapter, fit_to_base, open_adapter
from .averaging import from_float, to_float32
from .errors import MergeError
from .layout import Shape
from .places import SET_BASE, check_is_checkpoint, find_base, locate, refuse_links_out
from .tensor_files import PIECE, TensorEntry, equal_blocks, read_all, read_blocks, read_header

LARGEST_JSON = 50_000_000  # bytes, of a configuration or an index


@dataclass
class Checkpoint:
    """A folder with config.json and safetensors files. `entries` locates its tensors by name; none is read yet."""

    folder: Path
    config: dict
    entries: dict[str, TensorEntry]

    @cached_property
    def files(self) -> list[Path]:
        """The safetensors files, sorted."""
        return sorted({entry.file for entry in self.entries.values()})


@dataclass
class Source:
    """An expert or the base: a checkpoint, with or without an adapter."""

    name: str
    origin: str  # path or Hub id, as in the recipe
    checkpoint: Checkpoint
    adapter: Adapter | None = None

    def __post_init__(self):
        self.config = self.checkpoint.config
        self.files = self.checkpoint.files + (
            [self.adapter.stored[0].file] if self.adapter else []
        )  # with tensors of this source
        self.folder = self.adapter.folder if self.adapter else self.checkpoint.folder  # has tokenizer and licence

    @cached_property
    def shape(self) -> Shape:
        """The sizes in its configuration; raises a `MergeError` if one is missing."""
        return Shape.from_config(self.config)

    def tensors_of(self, file: Path) -> list[TensorEntry]:
        """The tensors of one file in the order of their bytes."""
        entries = [*self.checkpoint.entries.values(), *(self.adapter.stored if self.adapter else [])]
        return sorted((entry for entry in entries if entry.file == file), key=lambda entry: entry.start)

    def __contains__(self, name: str) -> bool:
        return name in self.checkpoint.entries

    def entry(self, name: str) -> TensorEntry:
        """The location of a tensor; if it is changed by LoRA, the location of the base's tensor."""
        if self.adapter and name in self.adapter.full_modules:
            return self.adapter.full_modules[name]
        return self.checkpoint.entries[name]

    def is_verbatim(self, name: str) -> bool:
        """Whether the stored bytes of the tensor are its value, i.e. LoRA does not change it."""
        return self.adapter is None or name not in self.adapter.lora_pairs

    def scaling(self, name: str) -> float | None:
        """The factor of what LoRA adds to the tensor; None if LoRA does not change it."""
        return None if self.adapter is None or self.is_verbatim(name) else self.adapter.lora_pairs[name][2]

    def blocks(self, name: str, elements: int = PIECE, start: int = 0, stop: int | None = None) -> Iterator[np.ndarray]:
        """Yields the raw elements `start` to `stop` of a tensor in blocks, with the adapter applied."""
        if self.is_verbatim(name):
            return read_blocks(self.entry(name), elements, start, stop)
        return equal_blocks(slice_blocks(self._lora_rows(name, elements), start, stop), elements)

    def _lora_rows(self, name: str, elements: int) -> Iterator[np.ndarray]:
        assert self.adapter is not None
        entry, (a, b, scaling) = self.entry(name), self.adapter.lora_pairs[name]
        rows, columns = entry.shape
        step = max(elements // columns, 1)
        narrow, wide = (to_float32(read_all(half), half.dtype).reshape(half.shape) for half in (a, b))
        for top, base in zip(range(0, rows, step), read_blocks(entry, step * columns), strict=True):
            value = to_float32(base, entry.dtype).reshape(-1, columns) + (wide[top : top + step] @ narrow) * scaling
            yield from_float(value.ravel(), entry.dtype)


def slice_blocks(blocks: Iterator[np.ndarray], start: int, stop: int | None) -> Iterator[np.ndarray]:
    """The elements `start` to `stop` of a sequence of blocks."""
    position = 0
    for block in blocks:
        part = block[max(start - position, 0) : None if stop is None else max(stop - position, 0)]
        if len(part):
            yield part
        position += len(block)
        if stop is not None and position >= stop:
            return


def open_source(
    name: str,
    origin: str,
    base: str | None = None,
    *,
    folder: Path | None = None,
    over: Path | None = None,
    fix: str = SET_BASE,
) -> Source:
    """Opens a folder or Hub id. A folder with adapter_config.json is an adapter over the base that it names.

    Args:
        name: name of the expert, for messages.
        origin: the path or Hub id, as in a recipe.
        base: model to use as the adapter's base if the one that it names does not exist.
        folder: where the origin is, if that is known.
        over: where the adapter's base is, if that is known.
        fix: what to do about an adapter without its base, for messages.

    Raises:
        MergeError: if a file is missing, truncated or unreadable. The message names the file.
    """
    folder = locate(origin) if folder is None else folder
    if not (folder / "adapter_config.json").is_file():
        return Source(name, origin, open_checkpoint(folder))
    refuse_links_out(folder)
    adapter = open_adapter(folder, read_json(folder / "adapter_config.json"))
    base_folder, adapter.base_is_fallback = (over, False) if over else find_base(folder, adapter.config, base, fix)
    checkpoint = open_checkpoint(base_folder)
    fit_to_base(adapter, base_folder, checkpoint.config, checkpoint.entries, fix)
    return Source(name, origin, checkpoint, adapter)


def read_json(path: Path) -> dict:
    """Reads a JSON object; raises a `MergeError` if the file is missing, unreadable, or holds something else."""
    try:
        if path.exists() and not path.is_file():  # reading from a pipe would wait
            raise ValueError("it is not a file")
        if path.stat().st_size > LARGEST_JSON:
            raise ValueError(f"it is larger than {LARGEST_JSON:,} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise MergeError(f"{path.parent} has no {path.name}. Give the folder of a complete checkpoint.") from error
    except (ValueError, OSError, RecursionError) as error:
        raise MergeError(f"{path} cannot be read ({short_reason(error)}). Copy or download it again.") from error
    if not isinstance(content, dict):
        raise MergeError(f"{path} must be a JSON object, but is a {type(content).__name__}. Copy or download it again.")
    return content


def open_checkpoint(folder: Path) -> Checkpoint:
    """Opens the configuration, the index and the headers of a checkpoint, and checks that they agree."""
    refuse_links_out(folder)
    check_is_checkpoint(folder)
    config = read_json(folder / "config.json")
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.is_file() and index.is_file():
        raise MergeError(f"{folder} has both model.safetensors and {index.name}. Remove the outdated one.")
    if single.is_file():
        return Checkpoint(folder, config, {entry.name: entry for entry in read_header(single)})
    if index.is_file():
        return Checkpoint(folder, config, read_shards(folder, index))
    for path in (single, index):
        if path.is_symlink():
            raise MergeError(f"{path} is a broken symbolic link. Copy or download the file again.")
    raise MergeError(f"{folder} has neither model.safetensors nor {index.name}. {describe_weights(folder)}")


def describe_weights(folder: Path) -> str:
    """Which weights a folder has instead of those that can be opened, and what to do."""

    def names(pattern: str) -> list[str]:
        return sorted(path.name for path in folder.glob(pattern) if path.is_file())

    if shards := names("*-of-*.safetensors"):
        return f"It has the shards {join_names(shards)} without their index. Copy or download model.safetensors.index.json too."
    if others := names("*.safetensors"):
        return f"It has {join_names(others)}. Save the model again with save_pretrained(), which gives the usual names."
    if others := names("*.gguf"):
        return (
            f"It has {join_names(others)}. Open it with from_pretrained(FOLDER, gguf_file=...), and save it with "
            "save_pretrained()."
        )
    if others := names("*.bin"):
        return (
            f"It has {join_names(others)}. Pickled weights are not opened, because they can run code. Load the model where "
            "you trust it, and save it again with save_pretrained()."
        )
    return "It has no weights. Save the model again with save_pretrained()."


def read_shards(folder: Path, index: Path) -> dict[str, TensorEntry]:
    """The tensors of all shards. Index and shards must agree on which file holds which tensor."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise MergeError(f"{index} has no weight_map from tensors to files. Save the checkpoint again.")
    files = sorted(set(weight_map.values()))
    outside = [
        name for name in files if name in ("", ".", "..") or "\0" in name or Path(name).name != name or "\\" in name
    ]
    if outside:
        raise MergeError(
            f"{index} locates tensors in {outside[0]!r:.200}, which is not a file of this folder. Save the checkpoint again."
        )
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise MergeError(
            f"{folder} is missing {join_names(missing)} of the {len(files)} shards in its index. Copy or download "
            f"{'it' if len(missing) == 1 else 'them'} again."
        )
    remedy = "Index and shards are from different checkpoints. Copy or download the folder again."
    entries: dict[str, TensorEntry] = {}
    for name in files:
        for entry in read_header(folder / name):
            indexed = weight_map.get(entry.name)
            if indexed != name:
                expected = f"in {indexed} according to the index" if indexed else "not in the index"
                raise MergeError(f"{folder / name} holds {entry.name!r}, which is {expected}. {remedy}")
            entries[entry.name] = entry
    missing = sorted(set(weight_map) - set(entries))
    if missing:
        raise MergeError(
            f"{folder}: the index locates {missing[0]!r} in {weight_map[missing[0]]}, which does not hold it. {remedy}"
        )
    return entries


def sampled_digest(entries: Iterable[TensorEntry]) -> str:
    """SHA-256 of some bytes from the middle of every tensor."""
    digest = hashlib.sha256()
    for entry in sorted(entries, key=lambda entry: entry.name):
        count = min(entry.elements, 1024)
        start = (entry.elements - count) // 2
        digest.update(b"".join(read_blocks(entry, count, start, start + count)))
    return digest.hexdigest()
