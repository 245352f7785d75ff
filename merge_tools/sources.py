"""The sources of a merge: dense checkpoints of a supported family, and LoRA adapters over one, whose tensors are read one at a time."""

import json
import os
import shutil
import tempfile
import warnings
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from run_tools.errors import UserError, closest, one_line, short_repr
from run_tools.packaged import PACKAGED_MODELS, find_packaged

Spec = tuple[str, tuple[int, ...]]  # dtype (safetensors' name) and shape of a tensor
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
INDEX = "model.safetensors.index.json"
DOWNLOADED = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "README.md"]
CARRIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
# adapters with one of these begin from a base whose weights they have changed
CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
MERGE_FIRST = "Merge it with peft first: model.merge_and_unload().save_pretrained(FOLDER)."


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: its folder and its base's, its file and those of its base, whether it changes an MLP, and the temporary folder with the merged model."""

    folder: Path
    base: Path
    files: list[Path]
    changes_mlp: bool
    merged: tempfile.TemporaryDirectory


class Source:
    """A dense model: names, dtypes and shapes of its tensors, which are read when they are asked for.

    Attributes:
        name, origin: of the expert, or "base"; its path or Hub id, as in a recipe.
        folder: with config.json, weights and tokenizer.
        config: as transformers opens it.
        files: with its weights; of an adapter its own and those of its base.
        specs: name -> dtype and shape of every tensor, in the order of the files.
        adapter: the adapter that was merged into it, if there is one.
    """

    def __init__(self, name: str, origin: str, folder: Path, adapter: "Adapter | None" = None):
        self.name, self.origin, self.folder, self.adapter = name, origin, folder, adapter
        self.config = open_config(folder)
        weights = weight_files(folder)
        self.files = adapter.files if adapter else weights
        self._places: dict[str, Path] = {}
        self.specs: dict[str, Spec] = {}
        for path in weights:
            with open_file(path) as file:
                for tensor in file.offset_keys():
                    part = file.get_slice(tensor)
                    self.specs[tensor], self._places[tensor] = (part.get_dtype(), tuple(part.get_shape())), path
        found = [f"{tensor} is {dtype}" for tensor, (dtype, _) in self.specs.items() if dtype not in DTYPES]
        if getattr(self.config, "quantization_config", None):
            found.insert(0, "quantization_config")
        if found:
            raise UserError(f"{name}: {folder} is quantised ({found[0]}). Use it in bfloat16, float16 or float32.")
        self._drop_unused()

    def __getitem__(self, name: str) -> torch.Tensor:
        """A tensor. Its file is opened for it alone, so that what was read before does not stay in memory."""
        if name not in self._places:
            raise UserError(f"{self.name}: {self.folder} has no tensor {name}.")
        with open_file(self._places[name]) as file:
            return file.get_tensor(name)

    def renamed(self, name: str) -> "Source":
        """The same model under another name."""
        other = copy(self)
        other.name = name
        return other

    def factor(self, factors: Any, name: str, half: str) -> torch.Tensor:
        """The factor A or B of a matrix, as an expert of low rank. `factors`: a `low_rank.Factors`."""
        return factors.take(self, name, half)

    def _drop_unused(self) -> None:
        """Forgets tensors that the model does not use. Raises a `UserError` for an output layer that should be tied and differs."""
        embeddings, head = VOCABULARY
        tied = self.config.tie_word_embeddings and {head, embeddings} <= self.specs.keys()
        if tied and not torch.equal(self[head], self[embeddings]):
            raise UserError(f"{self.name}: tie_word_embeddings is true, but {head} differs from the embeddings.")
        unused = [name for name in self.specs if name.endswith("rotary_emb.inv_freq")]
        for name in [*unused, head] if tied else unused:
            del self.specs[name]


def open_file(path: Path):
    """An open safetensors file. Raises a `UserError` that names it if it is damaged."""
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises a `UserError` that names the file if it is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold an object, not a {type(content).__name__}.")
    return content


def open_config(folder: Path):
    """The configuration in a folder, without a kernel that it names. Raises a `UserError` of one line if transformers cannot open it."""
    from transformers import AutoConfig

    read_json(folder / "config.json")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, attn_implementation="eager")
    except Exception as error:  # transformers raises anything for a damaged value
        raise UserError(f"{folder / 'config.json'}: {one_line(error):.400}") from error


def read_tokenizer(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The tokenizer in a folder, and its backend as JSON. Raises a `UserError` if it cannot be opened."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        return tokenizer, json.loads(tokenizer.backend_tokenizer.to_str())
    except Exception as error:  # tokenizers raises a bare Exception for JSON that is not a tokenizer
        raise UserError(f"{folder} has no tokenizer that can be opened: {one_line(error):.300}") from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint. Raises a `UserError` if there are none, or one is missing."""
    index, single = folder / INDEX, folder / "model.safetensors"
    if single.is_file() and index.is_file():
        raise UserError(f"{folder} has both {single.name} and {INDEX}. Remove the outdated one.")
    if single.is_file():
        return [single]
    if not index.is_file():
        others = sorted(path.name for pattern in ("*.bin", "*.gguf", "*.safetensors") for path in folder.glob(pattern))
        found = f" It has {short_repr(others)}: load and save it with save_pretrained()." if others else ""
        raise UserError(f"{folder} has neither {single.name} nor {INDEX}.{found}")
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or any(Path(str(name)).name != name for name in placed.values()):
        raise UserError(f"{index} has no weight_map from tensors to files of this folder.")
    files = [folder / name for name in sorted(set(placed.values()))]
    if missing := [path.name for path in files if not path.is_file()]:
        raise UserError(f"{folder} is missing {short_repr(missing)} of the {len(files)} files in {INDEX}.")
    return files


def open_source(name: str, origin: str, base_model: str | None = None, folder: Path | None = None) -> Source:
    """Opens a dense model, or an adapter over one, which peft merges into a temporary folder.

    Args:
        name: of the expert, for messages.
        origin: path or Hub id, MODEL@REVISION, or MODEL+ADAPTER.
        base_model: the base of an adapter that does not name one that exists.
        folder: where the origin is, if that is known.

    Raises:
        UserError: if a file is missing or damaged. The message names it.
    """
    if folder is None:
        model, plus, adapter = origin.partition("+")
        if plus and not os.path.isdir(Path(origin).expanduser()):
            return open_adapter(name, origin, locate(adapter), locate(model))
        folder = locate(origin)
    if (folder / "adapter_config.json").is_file():
        return open_adapter(name, origin, folder, find_base(folder, base_model))
    return Source(name, origin, folder)


def locate(origin: str) -> Path:
    """The folder of a path, a packaged model, or a snapshot of a Hub repository, which is downloaded. Raises a `UserError` if there is none."""
    path = Path(os.path.expanduser(origin))  # `Path.expanduser` fails for an unknown user
    if path.is_dir():
        return path
    if origin in PACKAGED_MODELS:
        return Path(find_packaged(origin))
    model, _, revision = origin.partition("@")
    if path.is_file() or model.count("/") != 1 or origin.startswith((".", "/", "~")):
        near = closest(path.name, [folder.name for folder in path.parent.glob("*/")])
        hint = f" Did you mean {str(path.with_name(near))!r}?" if near else " Give a folder or a Hub id."
        raise UserError(f"The folder {origin!r:.300} does not exist.{hint}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision or None, allow_patterns=DOWNLOADED))
    except Exception as error:  # HTTP errors, offline mode, a full disk, ...
        raise UserError(f"{origin!r} cannot be downloaded from the Hub: {one_line(error):.300}") from error


def find_base(adapter: Path, base_model: str | None) -> Path:
    """The folder of an adapter's base: the one that it names, else the recipe's `base_model` if that has the same name.

    Raises a `UserError` if there is none.
    """
    config = read_json(adapter / "adapter_config.json")
    named = config.get("base_model_name_or_path") or base_model
    if not named:
        raise UserError(f"{adapter} is an adapter that names no base. Set base_model in the recipe.")
    for folder in (adapter.parent / named, Path(named).expanduser()):
        if folder.is_dir():
            return folder
    if base_model and Path(base_model).name == Path(named).name:
        return locate(base_model)
    try:
        return locate(f"{named}@{config['revision']}" if config.get("revision") else named)
    except UserError as error:
        raise UserError(f"{adapter} is an adapter over {named!r}, which does not exist. {MERGE_FIRST}") from error


def open_adapter(name: str, origin: str, folder: Path, base: Path) -> Source:
    """Merges a LoRA adapter into its base with peft, in a temporary folder that is removed with the source.

    Raises:
        UserError: for an adapter that began from another base than it names, or that peft cannot merge.
        ImportError: without peft.
    """
    config = read_json(folder / "adapter_config.json")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(CHANGED_BASE):
        raise UserError(f"{name}: {folder} was initialised by {start}, which changes its base. {MERGE_FIRST}")
    if (base / "adapter_config.json").is_file():
        raise UserError(f"{name}: {folder} is an adapter over {base}, which is an adapter too. {MERGE_FIRST}")
    from peft import PeftModel, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    scratch = tempfile.TemporaryDirectory(prefix="lexperts-")
    try:
        with open_file(folder / "adapter_model.safetensors") as file:
            stored = set(file.keys())
            rows = [file.get_slice(name).get_shape()[0] for name in stored if name.endswith(VOCABULARY)]
        options = {"trust_remote_code": False, "use_safetensors": True, "attn_implementation": "eager"}
        model = AutoModelForCausalLM.from_pretrained(base, dtype="auto", **options)
        if rows:  # whole embeddings, which peft saves if they were resized for new tokens
            model.resize_token_embeddings(rows[0])
        with warnings.catch_warnings():  # of transformers, about what peft reads
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
            with_adapter = PeftModel.from_pretrained(model, folder)
        different = stored ^ set(get_peft_model_state_dict(with_adapter, save_embedding_layers=False))
        if unused := [name for name in sorted(different) if not name.endswith((*VOCABULARY, ".base_layer.weight"))]:
            raise UserError(f"{unused[0]!r} is only in its file, or only in the model that its settings give")
        with_adapter.merge_and_unload(safe_merge=True).save_pretrained(scratch.name)
    except Exception as error:  # whatever peft and transformers raise
        scratch.cleanup()
        raise UserError(f"{name}: {folder} cannot be merged into {base}: {one_line(error):.300}") from error
    for path in (place / name for place in (base, folder) for name in CARRIED):  # the adapter's own come last
        if path.is_file():
            shutil.copyfile(path, Path(scratch.name, path.name))
    files, changes_mlp = [folder / "adapter_model.safetensors", *weight_files(base)], any(".mlp." in n for n in stored)
    return Source(name, origin, Path(scratch.name), Adapter(folder, base, files, changes_mlp, scratch))
