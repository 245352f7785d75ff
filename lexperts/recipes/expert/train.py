"""Trains one expert of a mixture from texts or chats of its domain, with the stock Trainer.

    lexperts train expert smollm2 --train-files radiology.jsonl --output-dir experts/radiology
    lexperts train expert smollm2 --train-files radiology.jsonl --lora --output-dir experts/radiology

By default only the MLPs are trained: what all experts share stays the base's, so merging changes nothing that is not routed. The
output is a dense model that `lexperts merge compose` reads; with --lora an adapter of it. To thaw more weights later, as in BAR
(arXiv 2604.18473), train again from the output with another --freeze.
"""

from pathlib import Path

from datasets import Dataset
from torch import nn
from transformers import AutoModelForCausalLM

from merge_tools.families import FAMILIES
from run_tools.errors import UserError, short_repr
from run_tools.loading import describe_load_errors, open_config, open_with_tokenizer

from ..common.arguments import RunFolderArguments
from ..common.causal_training import CheckpointTrainer, add_lora, make_trainer, print_rank0, training_command
from ..common.run_folder import open_run
from .arguments import FREEZE, DataArguments, ModelArguments
from .card import CardCallback, name_base
from .texts import make_windows


class ExpertTrainer(CheckpointTrainer):
    """Pushes the card of `CardCallback`; the stock Trainer would write another."""

    def create_model_card(self, *args, **kwargs):
        """Writes nothing."""


class AdapterTrainer(ExpertTrainer):
    """Saves an adapter with a card that names no local folder, before it is pushed."""

    base = ""

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        name_base(Path(output_dir or self.args.output_dir), self.base)


def freeze(model: nn.Module, kept: str) -> None:
    """Freezes what an option of `--freeze` says."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in FREEZE[kept]))


def load(args: ModelArguments):
    """The model, ready to be trained, and its tokenizer. Raises a `UserError` for a model that is not of a family that
    merging supports.
    """
    name = args.model_name_or_path
    with describe_load_errors("--model-name-or-path", name):
        model_type = open_config(name).model_type
    if model_type not in FAMILIES:
        raise UserError(
            f"--model-name-or-path {short_repr(name)} has the model_type {model_type!r}, which cannot be merged. Use one of "
            f"{', '.join(sorted(FAMILIES))}."
        )
    model, tokenizer = open_with_tokenizer("--model-name-or-path", AutoModelForCausalLM, name, dtype=args.dtype)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    freeze(model, args.freeze)
    if args.lora:
        model = add_lora(model, args.lora_r, target_modules=["gate_proj", "up_proj", "down_proj"])
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print_rank0(f"{count:,} of {model.num_parameters():,} weights are trained")
    return model, tokenizer


def make_dataset(name: str, files: list[str], tokenizer, args: DataArguments) -> Dataset:
    """The windows of a split; prints their numbers."""
    windows, truncated, left_out, blank = make_windows(tokenizer, files, args.max_length, args.max_rows)
    tokens = sum(label >= 0 for window in windows for label in window["labels"])
    print_rank0(f"{name}: {len(windows):,} windows, {tokens:,} tokens with a loss")
    if truncated or left_out:
        print_rank0(
            f"{name}: of chats longer than --max-length {args.max_length}, {truncated:,} are truncated, and {left_out:,} are left out, "
            "whose answers begin after it"
        )
    if blank:
        print_rank0(f"{name}: {len(blank):,} rows are left out, whose text is empty; the first is {blank[0]}")
    return Dataset.from_list(windows)


def prepare(model_args: ModelArguments, data_args: DataArguments, folder_args: RunFolderArguments, training_args):
    """Everything before training -> the trainer and the run folder. Raises all errors that the user can fix."""
    folder = open_run(
        "expert/train.py", training_args, model_args, data_args, overwrite=folder_args.overwrite_output_dir
    )
    model, tokenizer = load(model_args)
    files = {"train": data_args.train_files, "validation": data_args.validation_files}
    splits = {name: make_dataset(name, paths, tokenizer, data_args) for name, paths in files.items() if paths}
    cls = AdapterTrainer if model_args.lora else ExpertTrainer
    card = CardCallback(model_args)
    trainer = make_trainer(model, tokenizer, splits, training_args, cls, callbacks=[card])
    if model_args.lora:
        trainer.base = card.base
    return trainer, folder


main = training_command("expert", "train", prepare, "eval_perplexity", "perplexity of the held-out texts {:.2f}")
