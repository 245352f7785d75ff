"""Tunes the gates of a mixture on texts of its domains, with frozen experts, and reports perplexity before and after."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from run_tools.errors import expand_user
from run_tools.model_options import gpu_or_cpu

from .averaging import from_float
from .card import model_card
from .checkpoints import Source, open_checkpoint
from .errors import MergeError
from .gate_statistics import carried_statistics
from .mixture import Mixture
from .output_config import to_json_bytes
from .output_folder import write_output
from .output_tensors import OutputTensor, copy_tensor
from .places import TEMPLATES, places_beside
from .plan import measure
from .provenance import RECORD, read_record
from .routing import open_mixture
from .shard_writer import Progress
from .texts import prompt_of, read_texts
from .tokenizers import carried_files

FEW_HELD_OUT = 5  # texts, with fewer of which a perplexity shows little
HOLDOUT_LIMIT = 200  # held-out texts of a domain: enough to see an effect, and read in seconds
CARRIED_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".md", ".py")


def tune(
    mixture: str | Path,
    out: str | Path,
    domains: Mapping[str, str | Path],
    *,
    steps: int = 200,
    learning_rate: float = 1e-3,
    batch_size: int = 8,
    max_length: int = 256,
    holdout: float = 0.1,
    seed: int = 42,
    device: str | None = None,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Trains the gates of a mixture, and measures what that changes for texts that it was not trained on.

    Args:
        mixture: a mixture that routes per token: of merge-experts, or any Mixtral, Qwen2-MoE, Qwen3-MoE or FlexOlmo.
        out: output folder, which must not exist or be empty. All tensors but the gates are copied byte by byte.
        domains: name of a domain -> a `.jsonl` file (rows with `text`, or with `term`, `context` and `definition`) or a
            `.txt` file with one text per line.
        steps, learning_rate, batch_size, seed: of the training. Domains are equally frequent in it.
        max_length: tokens of a window; longer texts are cut.
        holdout: share of each domain's different texts that perplexity is measured on, at most 200 texts.
        device: such as "cuda"; by default a GPU if there is one.
        on_step: receives the number of each step and its loss.
        progress: as in `compose`.

    Returns:
        `out`, `steps`, `seconds` of training, `trained` parameters, and `perplexity`: for each domain and `all` (all tokens
        together) the number of held-out `texts`, and perplexity `before` and `after`; `warnings`.

    Raises:
        MergeError: if the mixture has no gates to train, a file cannot be read, or `out` is not free.
    """

    from .gate_training import cut_windows, freeze_all_but_gates, train_gates

    validate(steps, learning_rate, batch_size, max_length, holdout)
    folder, splits = expand_user(mixture), {name: split_texts(Path(path), holdout) for name, path in domains.items()}
    if not splits:
        raise MergeError("No domain was given. Give one or more: --domain NAME=FILE.")
    check_free(Path(out))
    made = read_record(folder)["gates"] if (folder / RECORD).is_file() else {}
    beside = carried_statistics(folder, made)
    model, tokenizer = open_mixture(folder)
    gates = freeze_all_but_gates(model)
    max_length = min(max_length, model.config.max_position_embeddings)
    train, test = ([cut_windows(tokenizer, split[i], max_length) for split in splits.values()] for i in (0, 1))
    for name, windows in zip([*splits, *splits], [*train, *test], strict=True):
        if not windows:
            raise MergeError(f"The texts of the domain {name!r} are too short to learn from. Give longer ones.")
    model.to(device or gpu_or_cpu())
    before = perplexities(model, splits, test)
    start = time.perf_counter()
    options: dict[str, Any] = {"steps": steps, "learning_rate": learning_rate, "batch_size": batch_size, "seed": seed}
    train_gates(model, gates, train, **options, on_step=on_step)
    seconds, after = time.perf_counter() - start, perplexities(model, splits, test)
    table = {
        name: {"texts": entry["texts"], "before": entry["perplexity"], "after": after[name]["perplexity"]}
        for name, entry in before.items()
    }
    result = {"steps": steps, "seconds": round(seconds, 1), "trained": sum(g.numel() for g in gates.values())}
    values = {name: gate.detach().float().cpu().numpy() for name, gate in gates.items()}
    source = Source("mixture", str(folder), open_checkpoint(folder))
    tuned = options | {"max_length": max_length, "perplexity": table}
    tensors = tuned_tensors(source, values)
    files = carried_metadata(folder, tuned, tensors, Path(out))
    written = write_output(Path(out), tensors, [source], progress, lambda scans: files, beside)
    return written | result | {"perplexity": table, "warnings": warn_of_few_texts(table)}


def warn_of_few_texts(table: Mapping[str, dict[str, Any]]) -> list[str]:
    """A warning for each domain whose perplexity is measured on very few texts."""
    few = {name: row["texts"] for name, row in table.items() if row["texts"] < FEW_HELD_OUT and name != "all"}
    return [
        f"The perplexity of {name} is measured on {count} text{'s' * (count > 1)}, which shows little. Give more texts, or a "
        "larger holdout."
        for name, count in few.items()
    ]


def validate(steps: int, learning_rate: float, batch_size: int, max_length: int, holdout: float):
    """Raises a `MergeError` for the first option that is out of range."""
    for name, value, least in (("steps", steps, 1), ("batch_size", batch_size, 1), ("max_length", max_length, 2)):
        if value < least:
            raise MergeError(f"{name} must be at least {least}, got {value}.")
    if not 0 < learning_rate <= 1:
        raise MergeError(f"learning_rate must be above 0 and at most 1, got {learning_rate}.")
    if not 0 < holdout < 1:
        raise MergeError(f"holdout must be between 0 and 1, got {holdout}.")


def check_free(out: Path):
    """Raises a `MergeError` if the output folder has content, before minutes of training."""
    path = expand_user(out)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise MergeError(f"{out} exists and is not empty. Choose another folder, or delete it first.")


def text_of_row(row: dict[str, Any]) -> Any:
    """The text of a row: `text`, or a prompt and its definition."""
    return row["text"] if "text" in row else prompt_of(row) + row["definition"]


def split_texts(path: Path, holdout: float) -> tuple[list[str], list[str]]:
    """The texts to train on, and those that are held out: spread evenly over the file."""
    path = expand_user(path)
    if not path.is_file():
        raise MergeError(f"The file {str(path)!r} does not exist. Give a .jsonl or .txt file.")
    found = read_texts(path, text_of_row, "text, or term, context and definition")
    texts = list(dict.fromkeys(text.strip() for text in found))
    if len(texts) < 2:
        raise MergeError(
            f"{path} has {len(texts)} different texts. Give at least 2: one to train on, one to measure with."
        )
    count = max(1, min(round(len(texts) * holdout), HOLDOUT_LIMIT, len(texts) - 1))
    held_out = {(2 * i + 1) * len(texts) // (2 * count) for i in range(count)}
    return [t for i, t in enumerate(texts) if i not in held_out], [texts[i] for i in sorted(held_out)]


def perplexities(model, splits: Mapping[str, tuple], test: list) -> dict[str, dict[str, Any]]:
    """Perplexity of each domain's held-out texts, and of all of them together."""
    from .gate_training import nats_and_tokens

    sums = {name: nats_and_tokens(model, windows) for name, windows in zip(splits, test, strict=True)}
    for name, (nats, _) in sums.items():
        if not math.isfinite(nats):
            raise MergeError(f"The loss on the domain {name!r} is {nats}. The mixture has weights that are not finite.")
    sums["all"] = tuple(sum(column) for column in zip(*sums.values(), strict=True))
    counts = {name: len(held_out) for name, (_, held_out) in splits.items()}
    counts["all"] = sum(counts.values())
    return {
        name: {"texts": counts[name], "perplexity": math.exp(min(nats / n, 700))} for name, (nats, n) in sums.items()
    }


def tuned_tensors(source: Source, gates: dict[str, np.ndarray]) -> list[OutputTensor]:
    """All tensors of the mixture, copied, but the gates with new values.

    `gates` are named as in the model; files of a Mixtral name the block that holds them differently.
    """
    tensors, left = [], dict(gates)
    entries = sorted(source.checkpoint.entries.values(), key=lambda entry: (entry.file.name, entry.start))
    for entry in entries:
        tensor = copy_tensor(entry.name, entry.name, entry.dtype, source)
        values = left.pop(entry.name.replace(".block_sparse_moe.gate.", ".mlp.gate."), None)
        if values is not None:
            raw = from_float(values, entry.dtype)
            tensor = replace(tensor, slices=(), values=raw)
        tensors.append(tensor)
    if left:
        raise MergeError(f"{source.origin} has no tensor for the gate {min(left)!r}. Export it again.")
    return tensors


def carried_metadata(folder: Path, tuned: dict[str, Any], tensors: list[OutputTensor], out: Path) -> dict[str, bytes]:
    """The files of the mixture besides its weights; record and model card of merge-experts say how it was tuned."""
    files = {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.suffix in CARRIED_SUFFIXES and path.is_file() and not path.name.endswith(".safetensors.index.json")
    }
    files |= carried_files(folder, [TEMPLATES])
    if (folder / RECORD).is_file():
        old = Mixture.open(folder)
        record = old.record | {"tuned": {"experts": old.names, **tuned}}
        record["beside"] = places_beside(record, out, old.places())
        files[RECORD] = to_json_bytes(record)
        files["README.md"] = model_card(record, measure(old.recipe, tensors))
    return files
