"""Rows of texts, chats, prompts or definitions, as trl's SFTTrainer reads them."""

from collections.abc import Iterable, Iterator

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
                kinds = " or ".join(map(" + ".join, KINDS))
                raise UserError(f"{where}: the columns {short_repr(sorted(row))} are none of {kinds}.")
            for name in kind:
                wanted = "list" if name == "messages" else "str"
                if name != "context" and type(row[name]).__name__ != wanted:
                    raise UserError(f"{where}: {name}={short_repr(row[name])} is not a {wanted}.")
            yield kind, where, {name: row[name] for name in kind}


def load_rows(split: str, paths: list[str], tokenizer, max_length: int) -> tuple[Dataset, bool]:
    """The rows of a split, and whether they are texts, which are joined; prints how many there are, and are left out.

    Of a chat each turn of the assistant is a row, with a loss on it. Definitions beyond `max_length` are left out: cut,
    they would teach the wrong thing. Raises a `UserError` for rows of several kinds, and if none is left.
    """
    rows: list[dict] = []
    first: tuple[str, ...] = ()
    for kind, where, row in read_kind(paths):
        first = first or kind
        if kind != first:
            raise UserError(f"{where} has {', '.join(kind)}, but earlier rows have {', '.join(first)}.")
        rows.append(row)
    if first == ("messages",):
        kept = [
            {"prompt": row["messages"][:turn], "completion": [message]}
            for row in rows
            for turn, message in enumerate(row["messages"])
            if turn and message["role"] == "assistant"
        ]
        rows = [*kept, *(row for row in rows if all(each["role"] != "assistant" for each in row["messages"][1:]))]
    elif first == ("term", "context", "definition"):
        lists = ((row, row["context"]) for row in rows)
        rows = [row | {"context": each} for row, of in lists for each in (of if isinstance(of, list) else [of])]
        whole = [row for row in rows if all(isinstance(value, str) and value.strip() for value in row.values())]
        columns = tokenize_definitions({name: [row[name] for row in whole] for name in first}, tokenizer, max_length)
        pairs = zip(columns["input_ids"], columns["labels"], strict=True)
        kept = [{"input_ids": ids, "labels": labels} for ids, labels in pairs]
    else:
        kept = [row for row in rows if all(value.strip() for value in row.values())]
    out = f"{len(rows) - len(kept):,} left out, which are empty, without an answer or longer than {max_length} tokens"
    if not kept:
        raise UserError(f"{' '.join(map(str, paths))}: no row is left to learn from; {out}.")
    print(f"{split}: {len(kept):,} rows; {out}", flush=True)
    return Dataset.from_list(kept), first == ("text",)
