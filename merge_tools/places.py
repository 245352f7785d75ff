"""Where sources are: folders, relative to a recipe, a mixture or the working directory, or models of the Hub.

Of symbolic links in a source only those are followed that stay in its folder, or in its repository of the Hub cache. A merge copies
small files of its sources into the output, which may be published: a link out of a downloaded folder could name any file of the user.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from run_tools.errors import closest, expand_user, join_names
from run_tools.pretrained import PACKAGED, unpacked

from .errors import MergeError

HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
REVISION = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)@([\w./-]+)")  # of mergekit
DOWNLOADED = ["*.safetensors", "*.tensors", "*.json", "*.model", "*.txt", "*.jinja", "*.md"]
# of the files that a merge reads
READ_SUFFIXES = (".safetensors", ".tensors", ".json", ".model", ".txt", ".jinja", ".md", ".py")
TEMPLATES = "additional_chat_templates"
SET_BASE = "Set base_model in the recipe to the model that it was trained on"
QUANTISED = re.compile(r"(-unsloth)?-bnb-[48]bit$")  # how the names of quantised copies of a model end


def is_local_path(origin: str) -> bool:
    """Whether a string cannot be a Hub id."""
    return origin.startswith((".", "/", "~")) or not HUB_ID.fullmatch(origin) or os.path.isabs(origin)


def is_relative(path: str) -> bool:
    """Whether a path depends on the folder from which it is read."""
    return not path.startswith("~") and not os.path.isabs(path)


def resolve(path: str, root: Path | None) -> str:
    """A path of a recipe in the folder `root`: relative to that folder if it exists there, otherwise unchanged."""
    if root is None or not is_relative(path) or not os.path.exists(root / path):
        return path
    return str(root / path)


def locate(origin: str, revision: str | None = None) -> Path:
    """The folder of a source: the folder itself, that of a packaged model, or the downloaded snapshot of a Hub repository.

    Raises:
        MergeError: if neither the folder nor the model on the Hub exists.
    """
    path = expand_user(origin)
    if os.path.isdir(path):
        return path
    if origin in PACKAGED:
        return unpacked(origin)
    if os.path.isfile(path):
        raise MergeError(f"{origin!r} is a file. Give the folder with config.json and the weights.")
    if form := describe_mergekit_form(origin):
        raise MergeError(form)
    if is_local_path(origin) or "/" not in origin:
        raise MergeError(
            f"Folder {origin!r:.300} does not exist.{suggest_sibling(path) or ' Give a folder, or a Hub id.'}"
        )
    return download(origin, revision)


def download(model: str, revision: str | None = None) -> Path:
    """The snapshot of a Hub repository or a packaged model, whatever folders of the working directory are called."""
    if model in PACKAGED:
        return unpacked(model)
    from huggingface_hub import constants, snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=DOWNLOADED))
    except Exception as error:  # HTTP errors, offline mode, a full disk, ...
        cause = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else type(error).__name__
        fix = suggest_sibling(Path(model)) or " Check the spelling, or download it first and give its folder."
        raise MergeError(
            f"Folder {model!r} does not exist, and no model with this name could be downloaded from the Hub ({cause}).{fix}"
        ) from error


def suggest_sibling(path: Path) -> str:
    """`' Did you mean ...?'` for a folder with a similar name in the same parent folder."""
    if not os.path.isdir(path.parent):
        return ""
    close = closest(path.name, [p.name for p in path.parent.iterdir() if p.is_dir()])
    return f" Did you mean {str(path.with_name(close))!r}?" if close else ""


def describe_mergekit_form(origin: str) -> str | None:
    """What to write instead of mergekit's MODEL+ADAPTER and MODEL@REVISION."""
    model, plus, adapter = origin.partition("+")
    if plus and model and adapter:
        return (
            f"{origin!r:.300} is mergekit's way to write a model with an adapter. Use source_model: {adapter:.200} alone, "
            f"and base_model: {model:.200} if the adapter does not name its base."
        )
    if match := REVISION.fullmatch(origin):
        return (
            f"{origin!r:.300} names a revision, which is not supported. Download it, and give its folder: "
            f"hf download {match[1]} --revision {match[2]} --local-dir FOLDER"
        )
    return None


def check_is_checkpoint(folder: Path):
    """Raises a `MergeError` for a folder without config.json that holds models: a folder of runs, or of the Hub's cache."""
    if (folder / "config.json").is_file():
        return
    snapshots = [str(path.parent) for path in sorted(folder.glob("snapshots/*/config.json"))]
    if folder.name.startswith("models--") and snapshots:
        model = folder.name.removeprefix("models--").replace("--", "/")
        raise MergeError(
            f"{folder} is the folder of {model} in the Hub's cache. Give {model}, or the folder of a snapshot: "
            f"{join_names(snapshots)}."
        )
    cached = [
        path for path in sorted(folder.glob("models--*")) or sorted(folder.glob("hub/models--*")) if path.is_dir()
    ]
    if cached:
        models = [path.name.removeprefix("models--").replace("--", "/") for path in cached]
        raise MergeError(f"{folder} is the Hub's cache. Give the id of a model in it: {join_names(models)}.")
    inner = [str(path.parent) for path in sorted(folder.glob("*/config.json"))]
    if inner:
        raise MergeError(f"{folder} has no config.json, but its subfolders have. Give one: {join_names(inner)}.")


def refuse_links_out(folder: Path):
    """Raises a `MergeError` for a file of a source that is a symbolic link to a place outside of its folder."""
    real = Path(os.path.realpath(folder))
    allowed = [real, *blobs_of(real)]
    for path in [*folder.iterdir(), *folder.glob(f"{TEMPLATES}/*")]:
        if not path.exists() or (path.suffix not in READ_SUFFIXES and path.name != TEMPLATES):
            continue
        target = Path(os.path.realpath(path))
        if not any(target.is_relative_to(place) for place in allowed):
            raise MergeError(
                f"{path} is a link to {target}, which is outside of its folder. Copy the file into the folder."
            )


def blobs_of(folder: Path) -> list[Path]:
    """The folder of files of the Hub cache that a snapshot, or a folder in one, links to."""
    snapshots = [p for p in folder.parents if p.name == "snapshots" and p.parent.name.startswith("models--")]
    return [place.parent / "blobs" for place in snapshots[:1]]


def find_base(folder: Path, config: dict[str, Any], fallback: str | None, fix: str = SET_BASE) -> tuple[Path, bool]:
    """The folder of an adapter's base, and whether it is the recipe's `base_model`, because the named base does not exist.

    A relative path is looked for in the folder of the adapter and in those that contain it, then in the working directory. `fix`
    is what a message advises if the base does not exist.
    """
    named = config.get("base_model_name_or_path")
    if isinstance(named, str) and named:
        parts = Path(named).parts
        if fallback and (fallback == named or (parts and Path(fallback).parts[-len(parts) :] == parts)):
            return locate(fallback), False
        above = folder.resolve()
        for root in (above, *above.parents) if is_relative(named) else ():
            if os.path.isdir(root / named):
                return (root / named if folder.is_absolute() else Path(os.path.relpath(root / named))), False
        if os.path.isdir(expand_user(named)):
            return expand_user(named), False
        if fallback is None and QUANTISED.search(named):
            raise MergeError(
                f"The adapter {folder} was trained on {named!r:.200}, a quantised copy, which cannot be merged. {fix}. Use it in "
                f"16 or 32 bits, such as {QUANTISED.sub('', named):.200}."
            )
        if not is_local_path(named) and (fallback is None or not os.path.isdir(expand_user(fallback))):
            return locate(named, config.get("revision")), False
    if fallback is None:
        raise MergeError(f"{folder} is an adapter over {named!r}, which does not exist. {fix}, or put the base there.")
    return locate(fallback), True


# The places of a merge record


def recorded_paths(record: Mapping[str, Any]) -> list[str]:
    """The paths and Hub ids in a merge record: sources, bases of adapters, samples, centroids."""
    sources = [record["base"], *record["experts"]]
    paths = [source["source"] for source in sources] + [source.get("adapter_over") for source in sources]
    recipe = record["recipe"]
    paths += [recipe.get("centroids"), *(e.get("samples") for e in recipe["experts"] if isinstance(e, dict))]
    return list(dict.fromkeys(path for path in paths if isinstance(path, str) and path))


def places_beside(
    record: Mapping[str, Any], out: Path, known: Mapping[str, Path | None] | None = None
) -> dict[str, str]:
    """Relative path in a record -> the path from the output folder; a Hub id has no place.

    `known` are the places of the mixture that was edited; other paths are relative to the working directory.
    """
    known, folder, places = known or {}, expand_user(out).resolve(), {}
    for path in filter(is_relative, recorded_paths(record)):
        place = known[path] if path in known else Path(os.path.abspath(path)) if os.path.exists(path) else None
        if place is not None:
            places[path] = os.path.relpath(place, folder)
    return places


def is_on_hub(record: Mapping[str, Any], origin: str) -> bool:
    """Whether a source of a record is a model of the Hub, or made from one and packaged."""
    if origin in PACKAGED and origin not in record.get("beside", {}):
        return True
    return not is_local_path(origin) and origin.count("/") == 1 and origin not in record.get("beside", {})
