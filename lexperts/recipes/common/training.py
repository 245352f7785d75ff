"""What several trainings share: arguments of the Trainer, a learning rate for a part of the weights, a new tokenizer."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.optim import Optimizer


def separate_rate(optimizer: Optimizer, parameters: Iterable[nn.Parameter], lr: float):
    """Moves parameters to groups of their own, which have this learning rate and otherwise the same settings."""
    moved = {id(p) for p in parameters}
    for group in list(optimizer.param_groups):
        new = [p for p in group["params"] if id(p) in moved]
        if new:
            group["params"] = [p for p in group["params"] if id(p) not in moved]
            optimizer.add_param_group({**group, "params": new, "lr": lr, "initial_lr": lr})


def train_or_resume(trainer, checkpoint: str | None) -> None:
    """Trains, from a checkpoint if there is one. A run that has reached its last step only loads its weights: the stock
    Trainer looks at the number of steps after a step, and would train one more (transformers 5.23).
    """
    args = trainer.args
    if checkpoint is None or args.max_steps <= 0 or steps_of(checkpoint) < args.max_steps:
        trainer.train(resume_from_checkpoint=checkpoint)
        return
    planned = args.max_steps, args.num_train_epochs
    args.max_steps, args.num_train_epochs = -1, 0  # no epochs are left
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    finally:
        args.max_steps, args.num_train_epochs = planned


def steps_of(checkpoint: str) -> int:
    """The number of steps that a checkpoint of the Trainer was trained for."""
    return json.loads((Path(checkpoint) / "trainer_state.json").read_text(encoding="utf-8"))["global_step"]


def trainer_options(model, args, rows: dict, collator, tokenizer) -> dict:
    """The arguments that all Trainers get; rows of the splits "train" and, if there are any, "validation"."""
    options = {"model": model, "args": args, "data_collator": collator, "processing_class": tokenizer}
    return options | {"train_dataset": rows["train"], "eval_dataset": rows.get("validation")}


def train_bpe(texts: Iterable[str], vocab_size: int, special: list[str]) -> Tokenizer:
    """A byte-level BPE tokenizer of at most `vocab_size` tokens, of which the first are the special ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    options = {"vocab_size": vocab_size, "special_tokens": special, "initial_alphabet": alphabet}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(**options, show_progress=False))
    return tokenizer
