"""Failures of single documents in a batch."""

import warnings
from collections.abc import Callable, Sequence


def process_each(process: Callable[[Sequence], Sequence], items: Sequence) -> list[tuple]:
    """Processes items together, or if that fails, one at a time.

    Returns:
        For each item its result and `None`, or `None` and the reason of its failure.

    Warns:
        UserWarning: if items fail together and none of them alone, for that costs time, such as when a batch exceeds the memory.

    Raises:
        Exception: if all of several items fail other than by their values: it is the model or the device that fails.
    """
    try:
        return [(result, None) for result in process(items)]
    except Exception as error:
        together, results, errors = error, [], []
    for item in items:
        try:
            results += [(result, None) for result in process([item])]
        except Exception as error:
            results.append((None, describe_error(error)))
            errors.append(error)
    if 1 < len(errors) == len(items) and not isinstance(errors[0], (ValueError, TypeError)):
        raise errors[0]
    if not errors and len(items) > 1:
        warnings.warn(
            f"{len(items)} items failed together ({describe_error(together)}), and none alone. Use a smaller batch.",
            stacklevel=2,
        )
    return results


def describe_error(error: Exception) -> str:
    """The message of an exception on one line, after its type unless it is an error of a value."""
    message = " ".join(str(error).split()) or type(error).__name__
    return message if isinstance(error, (ValueError, TypeError)) else f"{type(error).__name__}: {message}"
