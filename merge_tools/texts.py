"""Files of texts: .txt with one text per line, .jsonl with one row per line, or .json, which may also hold an array of rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from run_tools.errors import short_repr
from run_tools.jsonl import rows_of_file

from .errors import MergeError

CHATS = "Chats train experts; for gates and losses write each as a text, by tokenizer.apply_chat_template(messages, tokenize=False)."


def read_texts(path: Path, text_of_row: Callable[[dict[str, Any]], Any], needed: str) -> list[str]:
    """The texts of a file in their order; blank lines of a file are left out.

    Lines end at line feeds only, because texts can contain other Unicode line separators.

    Args:
        text_of_row: gives the text of a row of JSON, or raises a `KeyError`.
        needed: the fields of a row, for messages.

    Raises:
        MergeError: if the file is of another kind or not UTF-8, or has rows without text or with an empty one.
    """
    texts: list[str] = []
    kind = path.suffix.lower()
    if kind in (".jsonl", ".json"):
        for where, row in rows_of_file(path, '{"text": "..."}'):
            try:
                text = text_of_row(row)
            except (KeyError, AttributeError, TypeError) as error:
                hint = f" {CHATS}" if isinstance(row, dict) and row.keys() & {"messages", "completion"} else ""
                raise MergeError(f"{where} needs {needed}.{hint}") from error
            if not isinstance(text, str):
                raise MergeError(f"{where}: {short_repr(text)} is not a text. Put it in quotes.")
            if not text.strip():
                raise MergeError(f"{where} needs {needed}: its text is empty. Remove the row.")
            texts.append(text)
    elif kind == ".txt":
        try:
            texts = [line.removesuffix("\r") for line in path.read_bytes().decode("utf-8").split("\n")]
        except UnicodeDecodeError as error:
            reason = f"{error.reason} at byte {error.start}"
            raise MergeError(f"{path} is not UTF-8 ({reason}). Convert it to UTF-8.") from error
    else:
        raise MergeError(f"{path} is neither JSON Lines nor text, by its name. Give a .jsonl or .txt file.")
    return [text for text in texts if text.strip()]


def prompt_of(row: dict[str, Any]) -> str:
    """The prompt for a definition of the row's `term` in its `context`."""
    from modeling_lexicon.data_lexicon import format_prompt  # imports torch, which takes seconds

    return format_prompt(row["term"], row["context"])
