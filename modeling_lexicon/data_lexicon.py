"""Rows of term, context and definition as token ids whose loss is on the definition alone (LM-Lexicon, Eq. 1-2).

Letters: B rows, T tokens, V vocabulary.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

FIELDS = ("term", "context", "definition")
IGNORED = -100


def prompt(term: str, context: str) -> str:
    """The prompt without its first and last token: `encode_rows` puts BOS before it and EOS after it."""
    return f'"{context}" What is the definition of "{term}"?'


def is_whole(row: dict) -> bool:
    return all(isinstance(row.get(name), str) and row[name].strip() for name in FIELDS)


def read_definitions(paths: str | Path | Sequence[str | Path]) -> tuple[list[dict], int]:
    """Rows of JSON Lines files -> the whole ones, and how many were dropped for a field that is empty or no string.

    A row whose context is a list stands for one row a context.

    Raises:
        FileNotFoundError: for a file that is not there.
        ValueError: for a line that is no JSON object (file and line are named), or when no row is left.
    """
    rows, dropped = [], 0
    for path in [paths] if isinstance(paths, (str, Path)) else paths:
        for number, line in enumerate(Path(path).read_bytes().split(b"\n"), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(
                    f"{path}, line {number}: this is no JSON in UTF-8 ({error}). Each line holds one object, such as "
                    '{"term": "...", "context": "...", "definition": "..."}.'
                ) from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: a JSON object is wanted, not a {type(row).__name__}.")
            contexts = row.get("context")
            for context in contexts if isinstance(contexts, list) else [contexts]:
                one = {**row, "context": context}
                if is_whole(one):
                    rows.append(one)
                else:
                    dropped += 1
    if not rows:
        raise ValueError(
            f"There is no row to read in {paths}: {dropped:,} were dropped, since {', '.join(map(repr, FIELDS))} must all "
            "be non-empty strings. Rename the columns of your file to these."
        )
    return rows, dropped


def encode_rows(batch: dict[str, list], tokenizer, max_length: int) -> dict[str, list]:
    """Columns `term`, `context`, `definition` -> `input_ids` and `labels` of the rows that fit, and `row`, their places.

    A row's ids are BOS prompt EOS definition EOS; the labels are those of the definition and its EOS, else -100. The two
    parts are tokenised apart, so that no token spans the boundary, and a special token's name in a text is mere text.
    A row longer than `max_length` tokens is left out, not cut: a prompt without its question, or a definition without its
    end, would teach the wrong thing. A column `domain` (an expert's index per row) becomes `domain_ids`.

    Raises:
        ValueError: for a tokenizer without BOS or EOS.
    """
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if bos is None or eos is None:
        raise ValueError(
            f"The tokenizer has bos_token={tokenizer.bos_token!r} and eos_token={tokenizer.eos_token!r}, but the prompt "
            "begins with the one and ends in the other. Set both, e.g. tokenizer.bos_token = tokenizer.eos_token."
        )
    if not batch["term"]:
        return {"input_ids": [], "labels": [], "row": []}
    plain = {"add_special_tokens": False, "split_special_tokens": True}
    questions = [prompt(term, context) for term, context in zip(batch["term"], batch["context"], strict=True)]
    prompts = tokenizer(questions, **plain)["input_ids"]
    definitions = tokenizer(list(batch["definition"]), **plain)["input_ids"]
    columns = {"input_ids": [], "labels": [], "row": []}
    for i, (question, answer) in enumerate(zip(prompts, definitions, strict=True)):
        start, end = [bos, *question, eos], [*answer, eos]
        if len(start) + len(end) <= max_length:
            columns["input_ids"].append(start + end)
            columns["labels"].append([IGNORED] * len(start) + end)
            columns["row"].append(i)
    if "domain" in batch:
        columns["domain_ids"] = [batch["domain"][i] for i in columns["row"]]
    return columns


def encode_split(rows: list[dict], tokenizer, max_length: int) -> tuple[dict[str, list], int]:
    """`encode_rows` of whole rows -> its columns, and how many rows were too long.

    Raises:
        ValueError: when every row is too long.
    """
    names = [*FIELDS, "domain"] if all("domain" in row for row in rows) else FIELDS
    columns = encode_rows({name: [row[name] for row in rows] for name in names}, tokenizer, max_length)
    if not columns["row"]:
        raise ValueError(
            f"All {len(rows):,} rows are longer than max_length={max_length} tokens, and none is cut. Use a larger one."
        )
    return columns, len(rows) - len(columns["row"])


class DefinitionCollator:
    """Pads the rows of a batch on the right: ids with the padding token, labels with -100, the attention mask with 0."""

    def __init__(self, tokenizer):
        self.padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        T = max(len(row["input_ids"]) for row in rows)
        pad = lambda name, filler: torch.tensor([[*row[name], *[filler] * (T - len(row[name]))] for row in rows])  # noqa: E731
        batch = {"input_ids": pad("input_ids", self.padding), "labels": pad("labels", IGNORED)}  # (B, T)
        lengths = torch.tensor([len(row["input_ids"]) for row in rows])
        batch["attention_mask"] = (torch.arange(T) < lengths[:, None]).long()
        if "domain_ids" in rows[0]:
            batch["domain_ids"] = torch.tensor([row["domain_ids"] for row in rows])  # (B,)
        return batch


def definition_nll(logits, labels: torch.Tensor) -> torch.Tensor:
    """logits (B, T, V), labels (B, T) -> (B, 2): a row's negative log-likelihood in nats, and its labelled tokens.

    Of a tuple of outputs, as the Trainer hands over where a model returns more, the logits are the (B, T, V) tensor.
    """
    if isinstance(logits, (tuple, list)):
        logits = next(output for output in logits if isinstance(output, torch.Tensor) and output.dim() == 3)
    logits, labels = logits[:, :-1], labels[:, 1:]  # the logits at t are for token t + 1
    row, position = (labels != IGNORED).nonzero(as_tuple=True)
    nll = F.cross_entropy(logits[row, position].float(), labels[row, position], reduction="none")
    sums = torch.zeros(labels.shape[0], 2, device=nll.device)
    return sums.index_add_(0, row, torch.stack([nll, torch.ones_like(nll)], dim=-1))


def perplexity(sums) -> float:
    """Rows of (nats, tokens) -> exp of the nats a token, over all tokens at once."""
    nats, tokens = torch.as_tensor(sums, dtype=torch.float64).sum(0).tolist()
    return float(torch.tensor(nats / tokens, dtype=torch.float64).exp())


def perplexity_metric(prediction) -> dict[str, float]:
    """`compute_metrics` for a Trainer whose `preprocess_logits_for_metrics` is `definition_nll`."""
    return {"perplexity": perplexity(prediction.predictions)}


@torch.no_grad()
def definition_losses(model, columns: dict[str, list], collator: DefinitionCollator, batch_size: int = 64, **inputs):
    """Columns of `encode_rows` -> (N, 2): nats and tokens of every row's definition, in the order of the columns.

    Rows are read in order of their length; `inputs` go to each forward. Domain ids are passed where there are any.
    """
    names = [name for name in ("input_ids", "labels", "domain_ids") if name in columns]
    order = sorted(range(len(columns["input_ids"])), key=lambda i: len(columns["input_ids"][i]))
    training, found = model.training, torch.zeros(len(order), 2)
    model.eval()
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        batch = collator([{name: columns[name][i] for name in names} for i in chosen])
        batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
        labels = batch["labels"]  # given to the model too: sequence routing reads the prompt's extent from them
        found[chosen] = definition_nll(model(**batch, **inputs).logits, labels).cpu()
    model.train(training)
    return found
