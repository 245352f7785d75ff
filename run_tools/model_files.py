"""The files of a checkpoint, looked at before a model is built: nothing is unpickled, and no size is believed.

`check_files` reads config.json and the headers of the weights, and refuses what would fill the memory or take hours.
`find_damage` names the file, the key and the value that explain why transformers could not open a checkpoint.
"""

import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import escape, short_repr

HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
CONFIG = "config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
KEY_MAPPING = "key_mapping"  # of an index: the argument of that name of from_pretrained with which the checkpoint opens
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
TOKENIZER_FILES = (
    "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
)  # fmt: skip
LAYERS = re.compile(r"(^|_)(num_(hidden_)?layers|(encoder|decoder)_layers|n_layers?|num_\w*_layers)$")
SIZES = re.compile(r"(^|_)(size|dim|d_model|d_ff|d_kv|heads|experts|labels|ffn_dim|n_embd|n_head|embeddings)$")
# sizes of no tensor, or of none that is saved
FREE = re.compile(r"window|chunk|batch|beam|kernel|position|pad|max_|per_tok")
IMPLEMENTATION = re.compile(r"_?(attn|experts)_implementation(_internal)?")  # under which transformers looks up kernels
MOST_LABELS = 100_000
UNKNOWN = 1 << 40  # elements of a checkpoint whose weights are elsewhere


class CheckpointError(OSError, ValueError):
    """A checkpoint that cannot be opened. The message is one line with the file, the key and the value."""

    def __init__(self, message: str):
        super().__init__(escape(" ".join(message.split())))


def find_file(name: str | os.PathLike, file: str, **options: Any) -> Path | None:
    """The path of a checkpoint's file in a folder, or in the cache, to which it is downloaded; `None` if there is none.

    Args:
        name: folder or Hub id.
        options: those of `from_pretrained`, of which `HUB_OPTIONS` are used.
    """
    if os.path.isdir(name):
        path = Path(name, options.get("subfolder") or "", file)
        return path if path.exists() else None
    from transformers.utils import cached_file

    hub = {key: value for key, value in options.items() if key in HUB_OPTIONS and value is not None}
    errors = ("missing_entries", "gated_repo", "connection_errors")
    found = cached_file(str(name), file, **hub, **{f"_raise_exceptions_for_{error}": False for error in errors})
    return None if found is None else Path(found)


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises a `CheckpointError` if it cannot be read, or holds anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not text in UTF-8: {error.reason} at byte {error.start}.") from error
    except RecursionError as error:
        raise CheckpointError(f"{path} is nested too deeply to be read.") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}. Download or copy it again.") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds {short_repr(content)}, not a JSON object.")
    return content


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in a safetensors file, from its header. Raises a `CheckpointError` for a file that is
    damaged or incomplete.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  not a mapping
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}): it is truncated or damaged. Download, save or copy it again; for a Hub "
            "repository pass force_download=True."
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error


def read_key_mapping(folder: str | os.PathLike) -> dict[str, str]:
    """The renaming of tensors with which the checkpoint in a folder opens, see `joined`; none for other checkpoints."""
    index = Path(folder, INDEX)
    metadata = read_object(index).get("metadata") if index.is_file() else None
    mapping = metadata.get(KEY_MAPPING) if isinstance(metadata, dict) else None
    return mapping if isinstance(mapping, dict) else {}


def list_shards(path: Path) -> list[str]:
    """The files that an index names, each checked to lie beside it. Raises a `CheckpointError` for an index of another form."""
    weight_map = read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map={short_repr(weight_map)} is not an object of tensors and files.")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{path}: weight_map[{short_repr(tensor)}]={short_repr(file)} is not the name of a .safetensors file."
            )
    return sorted(set(weight_map.values()))


def read_tensors(name: str | os.PathLike, **options: Any) -> dict[str, tuple[int, ...]] | None:
    """The shapes of a checkpoint's tensors; `None` if it has no safetensors files under the usual names. Raises a
    `CheckpointError` for damaged files, shards that are missing, and tensors that the index names and no shard has.
    """
    variant = options.get("variant")
    single, index = (
        file if variant is None else file.replace("model.safe", f"model.{variant}.safe") for file in (SINGLE, INDEX)
    )
    if (path := find_file(name, single, **options)) is not None:
        return read_shapes(path)
    if (path := find_file(name, index, **options)) is None:
        return None
    shapes: dict[str, tuple[int, ...]] = {}
    for file in list_shards(path):
        shard = find_file(name, file, **options)
        if shard is None:
            raise CheckpointError(f"{path} names {short_repr(file)}, which is not there. Download or copy it again.")
        shapes |= read_shapes(shard)
    if lost := sorted(set(read_object(path)["weight_map"]) - set(shapes)):
        raise CheckpointError(f"{path}: weight_map names {short_repr(lost[0])}, which no file has.")
    return shapes


def check_files(name: str | os.PathLike, *, weights: bool = True, **options: Any) -> dict[str, tuple[int, ...]] | None:
    """Checks a checkpoint's configuration against the shapes of its tensors, which are returned (see `read_tensors`).

    Args:
        weights: also look at the weights, which downloads those of a Hub repository.

    Raises:
        CheckpointError: for files that cannot be read, for a kernel on the Hub that the configuration names, for weights in pickle
            files only, and for a size that the weights do not have.
    """
    path = find_file(name, CONFIG, **options)
    if path is None:  # an adapter, or no checkpoint, which transformers says
        return None
    config = read_object(path)
    refuse_kernels(config, path)
    shapes = read_tensors(name, **options) if weights else None
    if (
        weights
        and shapes is None
        and os.path.isdir(name)
        and options.get("use_safetensors") is not False
        and not config.get("exported")
    ):
        folder = Path(name, options.get("subfolder") or "")
        if pickles := [file for file in PICKLES if (folder / file).exists()]:
            raise CheckpointError(
                f"{folder} has its weights in {pickles[0]} only, a pickle file, which can run code and is not read. If you trust "
                "it, convert it in Python: AutoModel.from_pretrained(folder, use_safetensors=False).save_pretrained(folder), "
                "with the class of the model."
            )
    elements = UNKNOWN if shapes is None else sum(map(math.prod, shapes.values()))
    tensors = UNKNOWN if shapes is None else len(shapes)
    for key, value, most in list_sizes(config, elements, tensors):
        if value > most:
            has = "" if shapes is None else f", but the weights have {tensors:,} tensors with {elements:,} values"
            raise CheckpointError(
                f"{path}: {key}={short_repr(value)} is too large{has}. Correct it, or copy the file again."
            )
    return shapes


def refuse_kernels(config: dict[str, Any], path: Path | None = None, within: str = "") -> None:
    """Raises a `CheckpointError` if a configuration (in a file), or one nested in it, names an implementation in a Hub repository."""
    for key, value in config.items():
        if IMPLEMENTATION.fullmatch(str(key)):
            for implementation in value.values() if isinstance(value, dict) else [value]:
                if "/" in str(implementation):
                    raise CheckpointError(
                        f"{path or 'configuration'}: {within}{key}={short_repr(implementation)} names a kernel in a Hub repository, whose code would "
                        "be run. Remove it; if you trust the repository, pass attn_implementation=... in Python."
                    )
        elif isinstance(value, dict):
            refuse_kernels(value, path, f"{within}{key}.")


def list_sizes(config: dict[str, Any], elements: int, tensors: int, path: str = "") -> Iterator[tuple[str, int, int]]:
    """Yields (key, value, the largest value that is possible) of the sizes in a configuration and in those inside it."""
    for key, value in config.items():
        if isinstance(value, dict) and "model_type" in value:
            yield from list_sizes(value, elements, tensors, f"{path}{key}.")
        elif isinstance(value, int) and not isinstance(value, bool):
            if LAYERS.search(key):
                yield f"{path}{key}", value, tensors
            elif key == "num_labels":
                yield f"{path}{key}", value, min(elements, MOST_LABELS)
            elif SIZES.search(key) and not FREE.search(key):
                yield f"{path}{key}", value, elements


def find_damage(name: str | os.PathLike, **options: Any) -> str | None:
    """What is wrong with a checkpoint that could not be opened: file, key and value; `None` if its files look sound."""
    try:
        check_files(name, weights=os.path.isdir(name), **options)
        if (path := find_file(name, CONFIG, **options)) is not None:
            config = read_object(path)
            if (kind := find_unknown_type(config)) is not None:
                return f"{path}: {kind} is not a kind of model that transformers or Lexperts has. Correct it, or copy the file again."
            for key, value, _ in list_sizes(config, UNKNOWN, UNKNOWN):
                if value < 1 and not key.endswith("_labels"):
                    return f"{path}: {key}={value} must be at least 1."
    except CheckpointError as error:
        return str(error)
    return find_tokenizer_damage(name, **options)


def find_unknown_type(config: dict[str, Any], path: str = "") -> str | None:
    """The first `model_type` of a configuration, or of one inside it, that does not exist; `None` also for code of its own."""
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    is_known = kind in (None, "") or (isinstance(kind, str) and kind in CONFIG_MAPPING)
    if not is_known and "auto_map" not in config:
        return f"{path}model_type={short_repr(kind)}"
    nested = ((key, value) for key, value in config.items() if isinstance(value, dict) and "model_type" in value)
    return next((found for key, value in nested if (found := find_unknown_type(value, f"{path}{key}."))), None)


def find_tokenizer_damage(name: str | os.PathLike, **options: Any) -> str | None:
    """What is wrong with the files of a tokenizer that could not be opened; `None` if they look sound."""
    try:
        for file in TOKENIZER_FILES:
            if (path := find_file(name, file, **options)) is not None:
                read_object(path)
        if (path := find_file(name, "tokenizer.json", **options)) is not None:
            from tokenizers import Tokenizer

            try:
                Tokenizer.from_file(str(path))
            except Exception as error:  # the class that tokenizers raises
                return f"{path} is not a tokenizer: {str(error):.200}"
    except CheckpointError as error:
        return str(error)
    return None
