"""What the command line says about a model, its device and its type, checked with errors that name what was asked for."""

from contextlib import contextmanager

DTYPES = ("float32", "bfloat16", "float16")


def check_dtype(name: str):
    """-> the torch type.

    Raises:
        ValueError: for another one than `DTYPES`.
    """
    import torch

    if name not in DTYPES:
        raise ValueError(f"--dtype {name!r} is not known. Use float32, bfloat16 or float16.")
    return getattr(torch, name)


def check_device(name: str | None):
    """-> the torch device; by default an accelerator where there is one.

    Raises:
        ValueError: for a device that is not there.
    """
    import torch

    if name is None:
        return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"--device {name!r} is not available here: {cause} Use cpu, or leave it out.") from error
    return torch.device(name)


@contextmanager
def opening(option: str, name: str):
    """Around what opens a model or its tokenizer.

    >>> with opening("--model", "no/such-model"):
    ...     AutoTokenizer.from_pretrained("no/such-model")
    OSError: --model 'no/such-model' could not be opened: ...

    Args:
        option: what the caller named it by.
        name: folder or Hub id.

    Raises:
        OSError: for whatever went wrong within, in one line.
    """
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        cause = " ".join(str(error).split()) or type(error).__name__
        raise OSError(
            f"{option} {str(name)!r} could not be opened: {cause:.300} It is a model's folder, with its tokenizer, or a Hub id."
        ) from error
