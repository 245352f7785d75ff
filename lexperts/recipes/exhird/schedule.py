"""The reference's learning rate schedule and stopping rule, for the stock Trainer."""

import math

from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import TrainerCallback

from ..training import RecipeTrainer


class PlateauSchedule(ReduceLROnPlateau):
    """Halves the learning rate, down to 1e-5, after each evaluation that is worse than the previous one, which need not be the
    best.
    """

    def __init__(self, optimizer, factor: float = 0.5, min_lr: float = 1e-5):
        super().__init__(optimizer, factor=factor, min_lr=min_lr)
        self.previous_loss = math.inf

    def step(self, metrics, epoch=None):
        """Compares the loss of an evaluation (`metrics`) with that of the previous one."""
        loss = float(metrics)
        self.last_epoch += 1
        if loss > self.previous_loss:
            self._reduce_lr(self.last_epoch)
        self.previous_loss = loss
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


class KeyphraseTrainer(RecipeTrainer):
    """A Trainer whose `reduce_lr_on_plateau` is the reference's."""

    def create_scheduler(self, *args, **kwargs):
        """As in the Trainer."""
        if self.lr_scheduler is None and self.args.lr_scheduler_type == "reduce_lr_on_plateau":
            self.lr_scheduler = PlateauSchedule(self.optimizer)
        return super().create_scheduler(*args, **kwargs)


class StopAfterRises(TrainerCallback):
    """Ends training after n consecutive evaluations that are each worse than the previous one."""

    def __init__(self, rises: int):
        self.rises = rises

    def on_evaluate(self, args, state, control, **kwargs):
        """Called by the Trainer after each evaluation."""
        losses = [entry["eval_loss"] for entry in state.log_history if "eval_loss" in entry][-self.rises - 1 :]
        if len(losses) > self.rises and losses == sorted(set(losses)):
            control.should_training_stop = True
