"""Tunes the gates of a mixture on texts of its domains, with everything else frozen, and reports perplexity before and after."""

import math
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from functools import partial
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import torch

from run_tools.errors import UserError

from .compose import summarize
from .edit import edited_record
from .evaluation import MAX_TEXTS, Windows, cut_domains, pad, perplexities, spread
from .gates import FOLDER
from .mixture import Mixture
from .record import RECORD, write_record
from .routing import GATE, gates_of, open_mixture
from .sources import INDEX, Source
from .texts import read_domain
from .writer import Item, new_folder, write_tensors

CARRIED = (".json", ".jinja", ".model", ".txt", ".md", ".py")


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
) -> dict[str, Any]:
    """Trains the gates of a mixture, and measures what that changes for texts that it was not trained on.

    Args:
        mixture: a mixture that routes per token: of Lexperts, or any Mixtral, Qwen2-MoE, Qwen3-MoE or FlexOlmo.
        out: output folder, which must not exist or be empty. All tensors but the gates are copied bit by bit.
        domains: name of a domain -> a file of its texts as in `evaluate`. Domains are equally frequent in the training.
        max_length: tokens of a window; longer texts are cut.
        holdout: share of each domain's different texts that perplexity is measured on, at most 200 texts.
        device: such as "cpu"; by default a GPU if there is one.

    Returns:
        `out`, `steps`, `seconds` of training, `trained` parameters, and `perplexity`: for each domain and `all` tokens together the
        number of held-out `texts`, and perplexity `before` and `after`.

    Raises:
        UserError: if the mixture has no gates to train, a file cannot be read, a loss is not finite, or `out` is not free.
    """
    folder, splits = Path(mixture).expanduser(), {name: split_texts(path, holdout) for name, path in domains.items()}
    options: dict = {"steps": steps, "learning_rate": learning_rate, "batch_size": batch_size, "seed": seed}
    with new_folder(out) as writing:
        model, tokenizer, _ = open_mixture(folder, dtype=torch.float32)
        old = Mixture(folder) if (folder / RECORD).is_file() else None
        source, gates = old.source if old else Source("mixture", str(mixture), folder), freeze_all_but_gates(model)
        length = min(max_length, model.config.max_position_embeddings)
        train, test = (cut_domains(tokenizer, {n: split[i] for n, split in splits.items()}, length) for i in (0, 1))
        model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        before, start = perplexities(model, test), time.perf_counter()
        train_gates(model, [list(chain(*own)) for own in train.values()], **options)
        seconds, after = round(time.perf_counter() - start, 1), perplexities(model, test)
        texts = {name: len(own) for name, own in test.items()} | {"all": sum(map(len, test.values()))}
        table = {n: {"texts": texts[n], "before": before[n], "after": after[n]} for n in texts}
        items = copy_files(source, gates, writing)
        if old:
            tuned = {**options, "max_length": length, "perplexity": table}
            record = edited_record(old, old.recipe, out) | {"tuned": tuned}
            write_record(writing, record, summarize(old.recipe, old.kind, items))
    trained = sum(gate.numel() for gate in gates.values())
    return {"out": str(out), "steps": steps, "seconds": seconds, "trained": trained, "perplexity": table}


def split_texts(path: str | Path, holdout: float) -> tuple[list[str], list[str]]:
    """The texts to train on, and those that are held out: spread evenly over the file. Raises a `UserError` for fewer than 2."""
    texts = read_domain(path)
    if len(texts) < 2:
        raise UserError(f"{path} has one text. Give at least 2: one to train on, one to measure with.")
    held_out = spread(texts, max(1, min(round(len(texts) * holdout), MAX_TEXTS, len(texts) - 1)))
    chosen = set(held_out)
    return [text for text in texts if text not in chosen], held_out


def freeze_all_but_gates(model) -> dict[int, torch.nn.Parameter]:
    """Freezes everything except the gates, which are returned by layer. Raises a `UserError` if they cannot learn from texts."""
    config, gates = model.config, gates_of(model)
    if (policy := getattr(config, "routing_policy", "token")) != "token":
        raise UserError(f"routing_policy is {policy}: its gates read a prompt. Compose it with gate_mode: ridge.")
    if not gates:
        raise UserError(f"model_type {config.model_type!r} has no gates. Give a mixture of experts.")
    if config.num_experts_per_tok == 1 and (config.model_type == "mixtral" or getattr(config, "norm_topk_prob", False)):
        raise UserError("num_experts_per_tok is 1: the only expert always has weight 1. Use 2, or format: lexicon.")
    model.requires_grad_(False)
    torch.nn.ParameterList(gates.values()).requires_grad_()
    return gates


def train_gates(model, domains: list[Windows], steps: int, learning_rate: float, batch_size: int, seed: int) -> None:
    """Trains what is not frozen on a window of each domain in turn. Raises a `UserError` if a loss is not finite."""
    from transformers import Trainer, TrainingArguments

    turns = cycle(cycle(random.Random(seed).sample(windows, len(windows))) for windows in domains)
    rows = [next(next(turns)) for _ in range(steps * batch_size)]
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            scratch, max_steps=steps, learning_rate=learning_rate, per_device_train_batch_size=batch_size, seed=seed,
            lr_scheduler_type="cosine", warmup_steps=steps // 20, weight_decay=0, adam_beta2=0.95,
            use_cpu=model.device.type == "cpu", train_sampling_strategy="sequential", remove_unused_columns=False,
            save_strategy="no", logging_strategy="no", logging_nan_inf_filter=False, report_to="none",
            disable_tqdm=not sys.stderr.isatty(),
        )  # fmt: skip
        with redirect_stdout(sys.stderr):  # where the Trainer prints
            loss = Trainer(model, arguments, train_dataset=rows, data_collator=pad).train().training_loss
    if not math.isfinite(loss):
        raise UserError(f"The mean loss is {loss} with learning_rate={learning_rate}. Use a smaller one.")


def copy_files(source: Source, gates: Mapping[int, torch.Tensor], folder: Path) -> list[Item]:
    """Writes a copy of a mixture with other gates, and returns its tensors."""
    items = []
    for name, spec in source.specs.items():
        match = GATE.fullmatch(name)
        load = gates[int(match[1])].detach().cpu if match else partial(source.__getitem__, name)
        items.append(Item(name, *spec, source.name, load))
    write_tensors(folder, items)
    for path in sorted(source.folder.iterdir()):
        if path.suffix in CARRIED and path.is_file() and path.name != INDEX:
            shutil.copyfile(path, folder / path.name)
    if (source.folder / FOLDER).is_dir():
        shutil.copytree(source.folder / FOLDER, folder / FOLDER)
    return items
