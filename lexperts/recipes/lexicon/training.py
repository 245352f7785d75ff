"""What the training commands of LM-Lexicon share: rows, the Trainer's metrics, a run that ends in one line."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
from datasets import Dataset
from transformers import PreTrainedModel, Trainer, TrainerCallback

from modeling_lexicon.data_lexicon import DataCollatorForDefinitions, tokenize_definitions
from run_tools.definition_rows import FIELDS, load_definition_rows
from run_tools.errors import RESUME
from run_tools.files import write_file

from ..common.arguments import command
from ..common.run_folder import RunFolder, last_checkpoint, training_summary
from ..common.training import train_or_resume, trainer_options
from .arguments import DataArguments, RewardArguments
from .perplexity import definition_nll, perplexity_metric


def print_rank0(text: str) -> None:
    """Prints once, however many processes run."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def load_split(name: str, paths: list[str]) -> list[dict]:
    """The complete rows of a split; prints their number and the number of dropped rows."""
    rows, dropped = load_definition_rows(paths)
    print_rank0(f"{name}: {len(rows):,} rows; {dropped:,} dropped for an empty or missing field")
    return rows


def load_rows(args: DataArguments | RewardArguments) -> dict[str, list[dict]]:
    """The rows of training and, if there are any, of validation."""
    files = {"train": args.train_files, "validation": args.validation_files}
    return {split: load_split(split, paths) for split, paths in files.items() if paths}


def tokenize_rows(rows: list[dict], tokenizer, max_length: int) -> tuple[dict[str, list], int]:
    """Columns of `tokenize_definitions`, and the number of rows too long. Raises a `ValueError` if all are."""
    names = [*FIELDS, "domain"] if all("domain" in row for row in rows) else FIELDS
    columns = tokenize_definitions({name: [row[name] for row in rows] for name in names}, tokenizer, max_length)
    if not columns["row"]:
        raise ValueError(f"All {len(rows):,} rows exceed max_length={max_length} tokens. Use a larger value.")
    return columns, len(rows) - len(columns["row"])


def make_dataset(name: str, rows: list[dict], tokenizer, max_length: int) -> Dataset:
    """The tokenised rows of a split; prints their numbers."""
    columns, too_long = tokenize_rows(rows, tokenizer, max_length)
    tokens = sum(map(len, columns["input_ids"]))
    labels = sum(label >= 0 for row in columns["labels"] for label in row)
    print_rank0(
        f"{name}: {len(columns['row']):,} rows of {tokens:,} tokens, {labels:,} of them in definitions; "
        f"{too_long:,} rows longer than {max_length} tokens dropped"
    )
    return Dataset.from_dict({key: value for key, value in columns.items() if key != "row"})


class CheckpointTrainer(Trainer):
    """Loads checkpoints by `from_pretrained`, which converts names of tensors. The stock Trainer does not: a Mixtral
    resumes with the gates and experts that it started with (transformers 5.23).
    """

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        model = self.model if model is None else model
        if not isinstance(model, PreTrainedModel):  # an adapter, or a wrapped model
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        loaded = type(model).from_pretrained(resume_from_checkpoint, dtype=model.dtype)
        model.load_state_dict(loaded.state_dict())

    def _load_best_model(self):
        if not isinstance(self.model, PreTrainedModel):
            return super()._load_best_model()
        self._load_from_checkpoint(self.state.best_model_checkpoint)


def is_finite(model) -> bool:
    """Whether all trainable weights on this process are finite."""
    weights = (parameter.detach() for parameter in model.parameters() if parameter.requires_grad)
    weights = [weight.to_local() if hasattr(weight, "to_local") else weight for weight in weights]
    return not weights or bool(torch.stack([weight.isfinite().all() for weight in weights]).all())


class StopAtNaN(TrainerCallback):
    """Raises a `FloatingPointError` before a log, evaluation or checkpoint if a weight is not finite.

    Gradient clipping turns one non-finite gradient into NaN in all weights, and the Trainer continues with a loss of 0.
    """

    def on_step_end(self, args, state, control, model, **kwargs):
        """Before a log, an evaluation or a checkpoint."""
        if control.should_log or control.should_evaluate or control.should_save:
            self.check(args, state, model)

    def on_epoch_end(self, args, state, control, model, **kwargs):
        """After every epoch."""
        self.check(args, state, model)

    def check(self, args, state, model) -> None:
        """Raises the error if a weight is not finite."""
        if is_finite(model):
            return
        last = last_checkpoint(args.output_dir)
        action = f"resumes from {last}, which is finite" if last else "starts again, because no checkpoint exists yet"
        raise FloatingPointError(
            f"step {state.global_step}: the weights contain NaN or infinite values, after a gradient that was not finite. The "
            f"same command {action}. If it happens again, use a lower learning_rate (now {args.learning_rate:g})"
            + (", or bf16: false." if args.bf16 else ", or fp16: false." if args.fp16 else ".")
        )


def make_trainer(model, tokenizer, splits: dict[str, Dataset], training_args) -> Trainer:
    """The Trainer, which measures the perplexity of the validation definitions."""
    options = trainer_options(model, training_args, splits, DataCollatorForDefinitions(tokenizer), tokenizer)
    return CheckpointTrainer(**options, compute_metrics=perplexity_metric, preprocess_logits_for_metrics=definition_nll)


def save_and_score(trainer: Trainer, folder: RunFolder, metric: str, description: str) -> None:
    """Saves model and tokenizer, scores the validation rows if there are any, prints this metric by the format of its
    description, and writes results.json.
    """
    ran = training_summary(trainer.args, trainer.state)
    if hasattr(trainer.model.config, "output_router_logits"):
        trainer.model.config.output_router_logits = False  # users of a saved mixture need no auxiliary loss
    trainer.save_model()
    metrics = trainer.evaluate() if trainer.eval_dataset is not None else {}
    if trainer.is_world_process_zero():
        output = Path(trainer.args.output_dir)
        (output / "training_args.bin").unlink(missing_ok=True)  # a pickle, and not part of the model
        results = {**metrics, "ran": ran, "log": trainer.state.log_history}
        write_file(output / "results.json", json.dumps(results, indent=1))
        folder.mark_finished(ran=ran)
        if metrics:
            print(f"validation: {description.format(metrics[metric])}")
        print(f"The model is in {output}.", flush=True)


def training_command(
    module: str, prepare: Callable[..., tuple[Trainer, RunFolder]], metric: str, description: str
) -> Callable:
    """The `main(argv)` of a command that trains, saves and scores what `prepare` makes of its arguments; see `save_and_score`.

    A training whose weights become NaN ends with a `FloatingPointError`; the command resumes from the last checkpoint.
    """

    def run(*groups) -> None:
        trainer, folder = prepare(*groups)
        trainer.add_callback(StopAtNaN())
        train_or_resume(trainer, folder)
        save_and_score(trainer, folder, metric, description)

    return command("lexicon", module, run, RESUME)
