"""Files of texts: .txt with one text per line, .jsonl with one row per line, or .json, which may also hold an array of rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from run_tools.errors import UserError, expand_user, short_repr
from run_tools.jsonl import rows_of_file


def read_texts(path: str | Path, text_of_row: Callable[[dict[str, Any]], Any]) -> list[str]:
    """The texts of a file in their order; blank lines of a file are left out.

    Lines end at line feeds only, because texts can contain other Unicode line separators.

    Args:
        text_of_row: gives the text of a row of JSON, or raises a `KeyError`.

    Raises:
        UserError: if the file is missing, of another kind or not UTF-8, or has rows without text.
    """
    path = expand_user(path)
    if not path.is_file() or path.suffix.lower() not in (".jsonl", ".json", ".txt"):
        raise UserError(f"{str(path)!r} must be a .jsonl or .txt file.")
    texts: list[str] = []
    if path.suffix.lower() == ".txt":
        try:
            texts = [line.removesuffix("\r") for line in path.read_bytes().decode("utf-8").split("\n")]
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 at byte {error.start}.") from error
    else:
        for where, row in rows_of_file(path, '{"text": "..."}'):
            try:
                text = text_of_row(row)
            except (KeyError, AttributeError, TypeError):
                text = None
            if not isinstance(text, str) or not text.strip():
                raise UserError(f"{where} has no text: {short_repr(row)}")
            texts.append(text)
    return [text for text in texts if text.strip()]


def read_different(path: str | Path, text_of_row: Callable[[dict[str, Any]], Any]) -> list[str]:
    """The different texts of a file, as `read_texts`. Raises a `UserError` if it has none."""
    texts = list(dict.fromkeys(read_texts(path, text_of_row)))
    if not texts:
        raise UserError(f"{path} has no texts.")
    return texts


def read_samples(path: str | Path) -> list[str]:
    """The different texts of an expert's samples: `text`, `prompt`, or the prompt for `term` and `context`."""
    return read_different(path, lambda row: row.get("text") or row.get("prompt") or prompt_of(row))


def read_domain(path: str | Path) -> list[str]:
    """The different texts of a domain: `text`, or a prompt with its `definition`."""
    return read_different(path, lambda row: row["text"] if "text" in row else prompt_of(row) + row["definition"])


def prompt_of(row: dict[str, Any]) -> str:
    """The prompt for a definition of the row's `term` in its `context`."""
    from modeling_lexicon.data_lexicon import format_prompt

    return format_prompt(row["term"], row["context"])
