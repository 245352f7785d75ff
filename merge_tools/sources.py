"""What is merged: a dense Llama in a folder, or a LoRA adapter over one, opened by its headers alone."""

import difflib
import json
import math
import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from .averaging import from_float, to_float32
from .errors import MergeError, reason
from .tensor_files import TORCH_NAMES, TensorEntry, read_blocks, read_header

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
MERGE_FIRST = "Merge it with peft's merge_and_unload() and give the result as the expert."
NOT_PLAIN = (  # options of peft that make an adapter more than W + scaling * B A
    "use_dora",
    "fan_in_fan_out",
    "lora_bias",
    "layer_replication",
    "alora_invocation_tokens",
    "use_qalora",
)
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


@dataclass
class Checkpoint:
    """A folder with a configuration and safetensors files: its tensors by name, none of them read yet."""

    folder: Path
    config: dict
    entries: dict[str, TensorEntry]

    @cached_property
    def files(self) -> list[Path]:
        """The files that hold tensors, in order."""
        return sorted({entry.file for entry in self.entries.values()})

    def tensors_of(self, file: Path) -> list[TensorEntry]:
        return sorted((e for e in self.entries.values() if e.file == file), key=lambda e: e.start)


@dataclass
class Adapter:
    """A LoRA adapter: W + scaling * B A for the linears it names, and whole modules that it replaces."""

    folder: Path
    config: dict
    pairs: dict[str, tuple[TensorEntry, TensorEntry, float]]  # weight's name -> A, B, scaling
    replaced: dict[str, TensorEntry]
    files: list[Path]
    stand_in: bool = False  # the base it names is not here: the recipe's base_model is taken for it


@dataclass
class Source:
    """An expert or the base: a checkpoint, perhaps with an adapter over it."""

    name: str
    given: str  # as the recipe says it
    checkpoint: Checkpoint
    adapter: Adapter | None = None

    @property
    def config(self) -> dict:
        return self.checkpoint.config

    @property
    def files(self) -> list[Path]:
        """Every file with tensors that this source is made of."""
        return self.checkpoint.files + (self.adapter.files if self.adapter else [])

    @property
    def folder(self) -> Path:
        """Where the tokenizer and the licence are looked for first."""
        return self.adapter.folder if self.adapter else self.checkpoint.folder

    def __contains__(self, name: str) -> bool:
        return name in self.checkpoint.entries

    def entry(self, name: str) -> TensorEntry:
        """Where a tensor lies; for one that an adapter changes, where the tensor below it lies."""
        if self.adapter and name in self.adapter.replaced:
            return self.adapter.replaced[name]
        return self.checkpoint.entries[name]

    def is_verbatim(self, name: str) -> bool:
        """Whether the tensor's bytes in the file are its value: no adapter changes it."""
        return self.adapter is None or name not in self.adapter.pairs

    def blocks(self, name: str, elements: int):
        """Raw elements of a tensor, block by block, with the adapter's part added."""
        entry = self.entry(name)
        if self.is_verbatim(name):
            yield from read_blocks(entry, elements)
            return
        a, b, scaling = self.adapter.pairs[name]
        rows, columns = entry.shape
        a = to_float32(*whole(a)).reshape(a.shape)
        b = to_float32(*whole(b)).reshape(b.shape)
        step = max(elements // columns, 1)
        rest = np.empty(0, f"<u{entry.nbytes // (rows * columns)}")
        for top in range(0, rows, step):
            base = next(read_blocks(entry, step * columns, top * columns, min(top + step, rows) * columns))
            value = to_float32(base, entry.dtype).reshape(-1, columns) + (b[top : top + step] @ a) * scaling
            rest = np.concatenate([rest, from_float(value.ravel(), entry.dtype)])
            while len(rest) >= elements:  # blocks of one size, so that several sources stay in step
                yield rest[:elements]
                rest = rest[elements:]
        if len(rest):
            yield rest


def whole(entry: TensorEntry) -> tuple[np.ndarray, str]:
    """All raw elements of a small tensor, and its dtype."""
    count = entry.nbytes
    return next(read_blocks(entry, max(count, 1)), np.empty(0, "<u2")), entry.dtype


def open_source(name: str, given: str, base: str | None = None) -> Source:
    """Opens a folder or Hub id; one with adapter_config.json is an adapter over the base it names.

    Args:
        base: what to use as the adapter's base if the one it names is no longer there.

    Raises:
        MergeError: when something is missing, cut short, or not readable; the message names the file.
    """
    folder = find_folder(given)
    if not (folder / "adapter_config.json").is_file():
        return Source(name, given, open_checkpoint(folder))
    adapter = open_adapter(folder)
    place, adapter.stand_in = find_base(folder, adapter.config.get("base_model_name_or_path"), base)
    checkpoint = open_checkpoint(place)
    for weight, (a, b, _) in adapter.pairs.items():
        entry = checkpoint.entries.get(weight)
        if entry is None or entry.shape != (b.shape[0], a.shape[1]):
            found = f"has shape {list(entry.shape)}" if entry else "is not there"
            raise MergeError(
                f"The adapter {folder} changes {weight!r} of shape [{b.shape[0]}, {a.shape[1]}], which in its base "
                f"{checkpoint.folder} {found}: that is not the model it was trained on. Give that one as base_model."
            )
    for weight, entry in adapter.replaced.items():
        if weight not in checkpoint.entries or checkpoint.entries[weight].shape != entry.shape:
            raise MergeError(
                f"The adapter {folder} replaces {weight!r}, which its base {checkpoint.folder} has not, or in another "
                f"shape. {MERGE_FIRST}"
            )
    return Source(name, given, checkpoint, adapter)


def find_base(folder: Path, below: Any, base: str | None) -> tuple[Path, bool]:
    """The folder of an adapter's base, which is the one it names, or else `base`; and whether it is that."""
    if isinstance(below, str) and below:
        for place in (Path(below).expanduser(), folder / below):
            if os.path.isdir(place):
                return place, False
        if not looks_local(below) and (base is None or not os.path.isdir(Path(base).expanduser())):
            return find_folder(below), False
    if base is None:
        raise MergeError(f"{folder} is an adapter over {below!r}, which is not there. Name its base as base_model.")
    return find_folder(base), True


def looks_local(given: str) -> bool:
    return given.startswith((".", "/", "~")) or not HUB_ID.fullmatch(given)


def find_folder(given: str) -> Path:
    """The folder itself, or the Hub repository fetched."""
    path = Path(given).expanduser()
    if os.path.isdir(path):
        return path
    if os.path.isfile(path):
        raise MergeError(f"{given!r} is a file. A source is the folder that holds config.json and the weights.")
    if looks_local(given) or "/" not in given:
        raise MergeError(f"There is no folder {given!r:.300}.{neighbour(path)}")
    from huggingface_hub import constants, snapshot_download

    try:
        return Path(
            snapshot_download(given, allow_patterns=["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "*.md"])
        )
    except Exception as error:  # what a client may raise is beyond listing: HTTP, offline, disk
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else type(error).__name__
        raise MergeError(
            f"There is no folder {given!r}, and no model of that name could be fetched from the Hub "
            f"({why}).{neighbour(path) or ' Mind the spelling, or fetch it first and give its folder.'}"
        ) from error


def neighbour(path: Path) -> str:
    """' Did you mean ...?' for a folder beside it with nearly that name."""
    if not os.path.isdir(path.parent):
        return ""
    close = difflib.get_close_matches(path.name, [p.name for p in path.parent.iterdir() if p.is_dir()], n=1)
    return f" Did you mean {str(path.with_name(close[0]))!r}?" if close else ""


def read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise MergeError(f"{path.parent} holds no {path.name}: it is no checkpoint, or an incomplete one.") from error
    except (ValueError, OSError, RecursionError) as error:
        raise MergeError(f"{path} cannot be read ({reason(error)}). Copy or download it again.") from error
    if not isinstance(content, dict):
        raise MergeError(f"{path} holds a {type(content).__name__}, not the keys of a configuration.")
    return content


def open_checkpoint(folder: Path) -> Checkpoint:
    """Configuration, index and headers of a checkpoint, each held against the others."""
    if not (folder / "config.json").is_file():
        inner = [str(path.parent) for path in sorted(folder.glob("*/config.json"))]
        if inner:
            raise MergeError(f"{folder} holds no config.json, but checkpoints below it. Give one: {listed(inner)}.")
    config = read_json(folder / "config.json")
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.is_file() and index.is_file():
        raise MergeError(
            f"{folder} holds model.safetensors beside an index of shards, and readers disagree which counts. Remove one."
        )
    if single.is_file():
        return Checkpoint(folder, config, {entry.name: entry for entry in read_header(single)})
    if index.is_file():
        return Checkpoint(folder, config, read_shards(folder, index))
    for path in (single, index):
        if path.is_symlink():
            raise MergeError(f"{path} is a link to a file that is not there. Copy or download it again.")
    other = sorted(p.name for p in folder.glob("*.bin")) or sorted(p.name for p in folder.glob("*.safetensors"))
    found = f"It holds {listed(other)}." if other else "It holds no weights."
    raise MergeError(
        f"{folder} holds neither model.safetensors nor model.safetensors.index.json. {found} "
        + (
            "Pickled weights are never opened here: load them where you trust them, then save them"
            if other
            else "Save it"
        )
        + " again with save_pretrained()."
    )


def read_shards(folder: Path, index: Path) -> dict[str, TensorEntry]:
    """The tensors of all shards, where index and shards agree on who holds what."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise MergeError(f"{index} holds no weight_map from tensors to files. Save the checkpoint again.")
    files = sorted(set(places.values()))
    lacking = [name for name in files if not (folder / name).is_file()]
    if lacking:
        raise MergeError(
            f"{folder} lacks {listed(lacking)} of the {len(files)} shards that its index names. Copy or download "
            f"{'it' if len(lacking) == 1 else 'them'} again."
        )
    entries: dict[str, TensorEntry] = {}
    for name in files:
        for entry in read_header(folder / name):
            if places.get(entry.name) != name:
                said = f"puts into {places[entry.name]}" if entry.name in places else "does not know"
                raise MergeError(
                    f"{folder / name} holds {entry.name!r}, which the index {said}. The two are of different checkpoints: "
                    "copy or download the folder again."
                )
            entries[entry.name] = entry
    missing = sorted(set(places) - set(entries))
    if missing:
        raise MergeError(
            f"{folder}: the index puts {missing[0]!r} into {places[missing[0]]}, which does not hold it. The two are of "
            "different checkpoints: copy or download the folder again."
        )
    return entries


def listed(names: list[str], most: int = 3) -> str:
    """The first names, and how many more."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def open_adapter(folder: Path) -> Adapter:
    """A peft LoRA adapter as saved; every other kind is refused with the way to merge it first."""
    config = read_json(folder / "adapter_config.json")
    if config.get("peft_type") != "LORA":
        raise MergeError(
            f"{folder} is an adapter of the kind {config.get('peft_type')!r}, and only LORA is merged here. {MERGE_FIRST}"
        )
    for key in NOT_PLAIN:
        if config.get(key):
            raise MergeError(f"{folder} is an adapter with {key}, which is not merged here. {MERGE_FIRST}")
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise MergeError(f"{folder} holds no adapter_model.safetensors. Save the adapter again with save_pretrained().")
    halves: dict[str, dict[str, TensorEntry]] = {}
    replaced = {}
    for entry in read_header(file):
        name = entry.name.removeprefix("base_model.model.")
        match = re.fullmatch(r"(.*)\.lora_([AB])\.weight", name)
        if entry.dtype not in TORCH_NAMES:
            raise MergeError(f"{file}: {entry.name!r} has dtype {entry.dtype}: quantised adapters are not merged here.")
        if match:
            halves.setdefault(match[1], {})[match[2]] = entry
        elif "lora_" in name or "base_layer" in name:
            raise MergeError(f"{file} holds {entry.name!r}, which is no plain LoRA. {MERGE_FIRST}")
        else:
            replaced[name.replace(".modules_to_save.default.", ".").replace(".modules_to_save.", ".")] = entry
    if not halves and not replaced:
        raise MergeError(f"{file} holds no tensors: the adapter changes nothing. Save it again.")
    pairs = {}
    for module, half in halves.items():
        if set(half) != {"A", "B"}:
            raise MergeError(f"{file} holds only a part of the adapter of {module!r}. Save it again.")
        a, b = half["A"], half["B"]
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
            raise MergeError(
                f"{file}: the halves of the adapter of {module!r} have the shapes {list(a.shape)} and {list(b.shape)}, "
                "which do not fit together. Save it again."
            )
        try:
            rank, scaling = lora_scaling(config, module)
        except (KeyError, TypeError, AttributeError, ValueError, ZeroDivisionError, re.error) as error:
            raise MergeError(
                f"{folder / 'adapter_config.json'} does not say by what to scale {module!r} ({reason(error)}): it needs "
                "numbers r and lora_alpha. Save the adapter again."
            ) from error
        if rank != a.shape[0]:
            raise MergeError(
                f"{folder}: adapter_config.json gives {module!r} the rank {rank}, and its tensors have {a.shape[0]}. "
                "Save the adapter again."
            )
        pairs[f"{module}.weight"] = (a, b, scaling)
    return Adapter(folder, config, pairs, replaced, [file])


def lora_scaling(config: dict, module: str) -> tuple[int, float]:
    """Rank, and alpha / rank, or alpha / sqrt(rank) with rslora; both may be set by module."""

    def own(patterns: dict | None, default):
        for pattern, value in (patterns or {}).items():
            if re.fullmatch(rf"(.*\.)?({pattern})", module):
                return value
        return default

    rank, alpha = own(config.get("rank_pattern"), config["r"]), own(config.get("alpha_pattern"), config["lora_alpha"])
    scaling = float(alpha / (rank**0.5 if config.get("use_rslora") else rank))
    if not math.isfinite(scaling):
        raise ValueError(scaling)
    return rank, scaling
