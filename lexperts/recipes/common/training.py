"""What several trainings share: a Trainer for a part of the weights, weights that become NaN, resuming, a new tokenizer."""

import json
from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Sampler, SequentialSampler
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .interruptions import last_checkpoint
from .run_folder import RunFolder


class RecipeTrainer(Trainer):
    """The stock Trainer, which keeps the order of validation rows, also where it sorts training rows by length.

    Args:
        train_sampler: draws the training rows.
        part, part_rate: parameters, and their learning rate if it differs from that of the others.
    """

    def __init__(
        self, *args, train_sampler: Sampler | None = None, part: Iterable[nn.Parameter] = (), part_rate: float | None = None,
        **kwargs,
    ):  # fmt: skip
        super().__init__(*args, **kwargs)
        self.train_sampler, self.part, self.part_rate = train_sampler, list(part), part_rate

    def _get_train_sampler(self, train_dataset=None):
        return self.train_sampler or super()._get_train_sampler(train_dataset)

    def _get_eval_sampler(self, eval_dataset):
        return SequentialSampler(eval_dataset)

    def create_optimizer(self, *args, **kwargs) -> Optimizer:
        """As in the Trainer, with groups of their own for the parameters of `part`, and otherwise the same settings."""
        optimizer = super().create_optimizer(*args, **kwargs)
        moved = {id(p) for p in self.part} if self.part_rate is not None else set()
        for group in list(optimizer.param_groups):
            new = [p for p in group["params"] if id(p) in moved]
            if new:
                group["params"] = [p for p in group["params"] if id(p) not in moved]
                optimizer.add_param_group({**group, "params": new, "lr": self.part_rate, "initial_lr": self.part_rate})
        return optimizer


class RecordCheckpoints(TrainerCallback):
    """Records the files of each checkpoint in the run folder."""

    def __init__(self, folder: RunFolder):
        self.folder = folder

    def on_save(self, args, state, control, **kwargs):
        """Called by the Trainer after each checkpoint."""
        if state.is_world_process_zero:
            self.folder.record_checkpoint(f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")


def is_finite(model) -> bool:
    """Whether all trainable weights on this process are finite."""
    weights = (parameter.detach() for parameter in model.parameters() if parameter.requires_grad)
    weights = [weight.to_local() if hasattr(weight, "to_local") else weight for weight in weights]
    finite = [weight.isfinite().all() for weight in weights]
    return not finite or bool(torch.stack([each.to(finite[0].device) for each in finite]).all())


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
        resumes = f", without --overwrite-output-dir, resumes from {last}, which is finite"
        action = resumes if last else " starts again, because no checkpoint exists yet"
        raise FloatingPointError(
            f"step {state.global_step}: the weights contain NaN or infinite values, after a gradient that was not finite. The "
            f"same command{action}. If it happens again, use a lower learning_rate (now {args.learning_rate:g})"
            + (", or bf16: false." if args.bf16 else ", or fp16: false." if args.fp16 else ".")
        )


def train_or_resume(trainer: Trainer, folder: RunFolder) -> None:
    """Trains, from the checkpoint where a run folder starts, if there is one. A run that has finished, also early, or reached its last
    step, only loads its weights: the stock Trainer looks at the number of steps after a step, and would train one more (transformers
    5.23), and it does not know that it had stopped early.
    """
    args, checkpoint = trainer.args, folder.start
    trainer.add_callback(RecordCheckpoints(folder))
    planned = args.max_steps, args.num_train_epochs
    if checkpoint is not None:
        state = json.loads((Path(checkpoint) / "trainer_state.json").read_text(encoding="utf-8"))
        if folder.finished or 0 < args.max_steps <= state["global_step"]:
            args.max_steps, args.num_train_epochs = -1, 0  # no epochs are left
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    finally:
        args.max_steps, args.num_train_epochs = planned


def best_evaluation(state, metric: str) -> dict:
    """The evaluation with the largest value of a metric, the first of equals, from a Trainer's log."""
    return max((entry for entry in state.log_history if metric in entry), key=itemgetter(metric))


def trainer_options(model, args, rows: dict, collator, tokenizer, callbacks: Iterable[TrainerCallback] = ()) -> dict:
    """The arguments that all Trainers get; rows of the splits "train" and, if there are any, "validation". No training continues with
    weights that are not finite.
    """
    options = {"model": model, "args": args, "data_collator": collator, "processing_class": tokenizer}
    options["callbacks"] = [StopAtNaN(), *callbacks]
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
