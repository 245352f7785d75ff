"""Texts and chats as windows of token ids with labels."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from run_tools.errors import UserError, short_repr
from run_tools.jsonl import rows_of_file

IGNORED = -100  # label of a token without a loss
EXAMPLE = (
    '{"text": "..."}, {"messages": [{"role": "user", "content": "..."}]} or {"prompt": "...", "completion": "..."}'
)
# columns of a row: the first of these that it has and are not null
KINDS = (("text",), ("messages",), ("prompt", "completion"))
Row = dict[str, list[int]]


def read_rows(path: str | Path, blank: list[str] | None = None) -> Iterator[tuple[str, dict]]:
    """The place and the columns of each text of a .txt file, or each line of JSON Lines, without blank texts, whose places in JSON
    Lines are appended to `blank`. Raises a `UserError` for a line that is neither; the message names it.
    """
    if Path(path).suffix.lower() == ".txt":
        texts = (row["text"].strip() for _, row in rows_of_file(path))
        yield from ((str(path), {"text": text}) for text in texts if text)
        return
    for where, row in rows_of_file(path):
        kinds = [columns for columns in KINDS if isinstance(row, dict) and row.keys() >= set(columns)]
        if not kinds:
            raise UserError(f"{where}: {short_repr(row)} is neither a text nor a chat. Write {EXAMPLE}.")
        columns = next((columns for columns in kinds if None not in map(row.get, columns)), kinds[0])
        for name in columns:
            if name != "messages" and not isinstance(row[name], str):
                raise UserError(f"{where}: {name}={short_repr(row[name])} is not a text. Put it in quotes.")
        if columns != ("text",) or row["text"].strip():
            yield where, {name: row[name] for name in columns}
        elif blank is not None:
            blank.append(where)


def encode(tokenizer, row: dict, where: str) -> Row:
    """The tokens of a text, all with a loss, or of a chat, with a loss on the completion or what the assistant says."""
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    if "text" in row:
        ids = tokenizer(row["text"], verbose=False)["input_ids"] + end
        return {"input_ids": ids, "labels": list(ids)}
    if "messages" in row:
        return encode_chat(tokenizer, row["messages"], where)
    prompt = tokenizer(row["prompt"], verbose=False)["input_ids"]
    completion = tokenizer(row["completion"], add_special_tokens=False, verbose=False)["input_ids"] + end
    return {"input_ids": prompt + completion, "labels": [IGNORED] * len(prompt) + completion}


def encode_chat(tokenizer, messages: Sequence[dict], where: str) -> Row:
    """A chat by the tokenizer's template; the labels are the turns of the assistant, with the token that ends them. Raises a
    `UserError` for messages that the template refuses, and without a turn of the assistant.
    """

    def render(count: int, prompt: bool) -> str:
        return tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=prompt)

    try:
        text = render(len(messages), False)
        turns = [
            (render(turn, True), render(turn + 1, False)) for turn, m in enumerate(messages) if m["role"] == "assistant"
        ]
    except Exception as error:  # of Jinja and of transformers, which have no type in common
        raise UserError(
            f"{where}: the messages do not fit the model's chat template ({short_repr(str(error))})."
        ) from error
    if bad := [start for start, stop in turns if not (stop.startswith(start) and text.startswith(stop))]:
        raise UserError(
            f"{where}: the model's chat template renders {short_repr(bad[0][-80:])} otherwise when a turn follows. Give chats of one turn."
        )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, spans = encoded["input_ids"], [(len(start), len(stop)) for start, stop in turns]
    labels = [
        id if any(first < stop and last > start for start, stop in spans) else IGNORED
        for id, (first, last) in zip(ids, encoded["offset_mapping"], strict=True)
    ]
    if all(label == IGNORED for label in labels):
        raise UserError(
            f"{where}: the chat has no turn of the assistant to learn from. Add one, or leave the line out."
        )
    return {"input_ids": ids, "labels": labels}


class Windows(NamedTuple):
    """Windows of token ids with labels; how many chats were truncated, and how many left out since no answer begins within a window;
    the places of rows without a text.
    """

    rows: list[Row]
    truncated: int
    left_out: int
    blank: list[str]


def make_windows(tokenizer, paths: Iterable[str], max_length: int, max_rows: int | None = None) -> Windows:
    """Windows of at most `max_length` tokens. Texts are joined, each with its end of text, and cut; a chat is a window of
    its own, and is truncated at its end. Raises a `UserError` for a line that is neither a text nor a chat, and for files
    without enough tokens.
    """
    windows: list[Row] = []
    joined: list[int] = []
    blank: list[str] = []
    truncated = left_out = 0
    for path in paths:
        for where, row in islice(read_rows(path, blank), max_rows):
            encoded = encode(tokenizer, row, where)
            if "text" in row:
                joined += encoded["input_ids"]
            else:
                window = {name: values[:max_length] for name, values in encoded.items()}
                if any(label != IGNORED for label in window["labels"]):
                    windows.append(window)
                    truncated += len(encoded["labels"]) > max_length
                else:
                    left_out += 1
    pieces = [joined[start : start + max_length] for start in range(0, len(joined), max_length)]
    windows += [{"input_ids": piece, "labels": list(piece)} for piece in pieces if len(piece) > 1]
    if not windows:
        raise UserError(f"{', '.join(map(str, paths))}: no row has a text to learn from.")
    return Windows(windows, truncated, left_out, blank)
