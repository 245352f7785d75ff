"""Errors of models that cannot be opened, with the names of what was asked for: transformers' own leave them out offline."""

from contextlib import contextmanager


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
