"""Rows of texts, chats, prompts or definitions, as trl's SFTTrainer reads them."""

from collections.abc import Iterable, Iterator
from itertools import islice

from datasets import Dataset

from modeling_lexicon.data_lexicon import tokenize_definitions
from run_tools.errors import UserError, short_repr
from run_tools.rows import rows_of_file

KINDS = (("text",), ("messages",), ("prompt", "completion"), ("term", "context", "definition"))


def read_kind(paths: Iterable[str]) -> Iterator[tuple[tuple[str, ...], str, dict]]:
    """The columns, the place and the row of each line. Raises a `UserError` that names a line of no kind."""
    for path in paths:
        for where, row in rows_of_file(path):
            row = row if isinstance(row, dict) else {"text": row}
            kind = next((kind for kind in KINDS if row.keys() >= set(kind)), None)
            if kind is None:
                raise UserError(
                    f"{where}: the columns {short_repr(sorted(row))} are none of {' or '.join(map(' + '.join, KINDS))}."
                )
            for name in kind:
                if not isinstance(row[name], list if name == "messages" else str) and name != "context":
                    raise UserError(
                        f"{where}: {name}={short_repr(row[name])} is not a {'list' if name == 'messages' else 'text'}."
                    )
            yield kind, where, {name: row[name] for name in kind}


def load_rows(split: str, paths: list[str], tokenizer, max_length: int, max_rows: int | None) -> tuple[Dataset, bool]:
    """The rows of a split, and whether they are texts, which are joined; prints how many there are, and how many are left out.

    Of a chat each turn of the assistant is a row, with a loss on this turn. Rows of definitions that are longer than `max_length`
    are left out: cut, they would teach the wrong thing.

    Raises:
        UserError: for rows of several kinds, and if none is left.
    """
    rows, first = [], None
    for kind, where, row in islice(read_kind(paths), max_rows):
        first = first or kind
        if kind != first:
            raise UserError(
                f"{where} has {', '.join(kind)}, but earlier rows have {', '.join(first)}. Train on one kind."
            )
        rows.append(row)
    kept, left_out = [], 0
    if first == ("messages",):
        kept = [
            {"prompt": row["messages"][:turn], "completion": [message]}
            for row in rows
            for turn, message in enumerate(row["messages"])
            if turn and message["role"] == "assistant"
        ]
    elif first == ("term", "context", "definition"):
        rows = [row | {"context": context} for row in rows for context in as_list(row["context"])]
        whole = [row for row in rows if all(isinstance(value, str) and value.strip() for value in row.values())]
        columns = tokenize_definitions({name: [row[name] for row in whole] for name in first}, tokenizer, max_length)
        kept = [{"input_ids": ids, "labels": labels}
                for ids, labels in zip(columns["input_ids"], columns["labels"], strict=True)]  # fmt: skip
        left_out = len(rows) - len(kept)
    else:
        kept = [row for row in rows if all(value.strip() for value in row.values())]
        left_out = len(rows) - len(kept)
    if not kept:
        raise UserError(
            f"{' '.join(map(str, paths))}: no row is left to learn from. {left_out:,} were empty or too long."
        )
    print(
        f"{split}: {len(kept):,} rows; {left_out:,} left out, which are empty or longer than {max_length} tokens",
        flush=True,
    )
    return Dataset.from_list(kept), first == ("text",)


def as_list(value) -> list:
    """A list; another value as a list of one."""
    return value if isinstance(value, list) else [value]
