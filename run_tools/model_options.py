"""The options --model, --device and --dtype: what they name, and errors that name the option. Imports no torch."""

import os
import re
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import closest, one_line

# a line of a traceback that is not indented, or the first line
LAST_ERROR = re.compile(r"^[\w.]*(?:Error|Exception)\b.*|\A.*", re.M)
DTYPES = ("float32", "bfloat16", "float16")


def parse_dtype(name: str):
    """The `torch.dtype` of a name. Raises a `ValueError` if the name is not one of `DTYPES`."""
    import torch

    if name not in DTYPES:
        raise ValueError(f"--dtype {name!r} is not known. Use float32, bfloat16 or float16.")
    return getattr(torch, name)


def gpu_or_cpu() -> str:
    """The name of the device of computations that pick one themselves: a GPU if there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def parse_device(name: str | None):
    """The `torch.device` of a name; by default an accelerator if available, else the CPU. Raises a `ValueError` if the
    device is not available.
    """
    import torch

    if name is None:
        return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"--device {name!r} is not available: {cause.rstrip('.')}. Use cpu, or leave the option out."
        ) from error
    return torch.device(name)


PACKAGED_MODELS = {  # models by name -> packages
    "default": "lexperts_seke_minilm",
    "tiny": "lexperts_seke_tiny",
    "lexicon-smollm2": "lexperts_lexicon_smollm2",
    "moesumm-smollm2": "lexperts_moesumm_smollm2",
    "exhird-smollm2": "lexperts_exhird_smollm2",
}
DEFAULT_MODELS = {  # the one of them that a pipeline opens without a model argument, by task
    "keyphrase-extraction": "default",
    "definition-modeling": "lexicon-smollm2",
    "moe-summarization": "moesumm-smollm2",
    "keyphrase-generation": "exhird-smollm2",
}


def is_packaged(model: str | Path | None) -> bool:
    """Whether a model is given by its name in PACKAGED_MODELS; a folder of that name is a folder."""
    return str(model) in PACKAGED_MODELS and not Path(str(model)).is_dir()


def is_path(name: str) -> bool:
    """Whether a text names a place on this machine rather than a repository on the Hub, which is `name` or `owner/name`."""
    return (
        os.path.lexists(os.path.expanduser(name))
        or name.startswith(("/", "./", "../", "~", "."))
        or name.endswith("/")
        or name.count("/") > 1
        or "\\" in name
        or Path(name).suffix in (".jsonl", ".json", ".csv", ".safetensors", ".bin", ".yml", ".yaml", ".txt")
    )


def find_model_problem(name: str) -> str | None:
    """Why a text cannot be the folder of a model; `None` if it can, or if it may be a Hub id."""
    if not is_path(name):
        return None
    folder = Path(name)
    if not folder.exists():
        return "it does not exist."
    if not folder.is_dir():
        return "it is not a folder."
    if not any((folder / file).is_file() for file in ("config.json", "adapter_config.json")):
        hidden = (
            f" Rename it, or run in another folder, to open the model called {name}." if name in PACKAGED_MODELS else ""
        )
        inner = [path.parent for path in folder.glob("*/config.json")]
        guess = next((path for path in inner if path.name == "final"), inner[0] if len(inner) == 1 else None)
        return f"it has no config.json.{hidden}{f' Did you mean {guess}?' if guess else ''}"
    return None


def check_model(option: str, name: str) -> None:
    """Checks a model without loading it: a folder by its config.json, a Hub id by that file in the cache or on the Hub.
    Raises an `OSError` if it cannot be opened; the message names the option.
    """
    with describe_load_errors(option, name):
        if not is_path(str(name)):
            from transformers.utils import cached_file

            cached_file(str(name), "config.json")


@contextmanager
def describe_load_errors(option: str, name: str):
    """Context manager that turns any error of loading a model or its tokenizer into one line.

    >>> with describe_load_errors("--model", "no/such-model"):
    ...     AutoTokenizer.from_pretrained("no/such-model")
    OSError: --model 'no/such-model' could not be opened: ...

    Args:
        option: the name of the command line's option.
        name: folder or Hub id.

    Raises:
        OSError: for any exception inside.
    """
    try:
        if problem := find_model_problem(str(name)):  # transformers would ask the Hub, and blame the connection
            raise OSError(problem)
        yield
    except Exception as error:  # whatever transformers raises
        cause = str(error) if isinstance(error, (OSError, ValueError, ImportError)) else one_line(error)
        if "Traceback (most recent call last)" in cause:  # a pipeline quotes tracebacks
            cause = LAST_ERROR.findall(cause)[-1]
        cause = " ".join(cause.split()) or type(error).__name__
        guess = None if is_path(str(name)) else closest(str(name), PACKAGED_MODELS)
        if not is_path(str(name)):
            cause = f"the folder does not exist, and as a Hub id: {cause}"
        raise OSError(
            f"{option} {str(name)!r} could not be opened: {cause:.500}{f' Did you mean {guess!r}?' if guess else ''} Pass the folder of a model and its tokenizer, or a Hub id."
        ) from error


def open_with_tokenizer(option: str, cls: Any, name: str, **options: Any) -> tuple[Any, Any]:
    """The model and the tokenizer that an option names, by `model_loading.open_model`, with errors as in `describe_load_errors`."""
    from .model_loading import open_model, open_tokenizer

    with describe_load_errors(option, name):
        return open_model(cls, name, **options), open_tokenizer(name)
