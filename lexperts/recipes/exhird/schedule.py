"""The reference's learning rate schedule and stopping rule, for the stock Trainer."""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import TrainerCallback


class PlateauSchedule(ReduceLROnPlateau):
    """Halves the learning rate, down to `min_lr`, after each evaluation that is worse than the previous one, which need
    not be the best. It is for `Trainer(optimizers=(optimizer, PlateauSchedule(optimizer)))` with
    `metric_for_best_model="loss"`.
    """

    def __init__(self, optimizer: Optimizer, factor: float = 0.5, min_lr: float = 1e-5):
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


class StopAfterRises(TrainerCallback):
    """Ends training after n consecutive evaluations that are each worse than the previous one."""

    def __init__(self, rises: int = 3):
        self.rises = rises

    def on_evaluate(self, args, state, control, **kwargs):
        """Called by the Trainer after each evaluation."""
        losses = [entry["eval_loss"] for entry in state.log_history if "eval_loss" in entry]
        last = losses[-self.rises - 1 :]
        if len(last) > self.rises and all(a < b for a, b in zip(last, last[1:], strict=False)):
            control.should_training_stop = True


def stop_after(rises: int) -> list[TrainerCallback]:
    """The callbacks of `--stop-after-rises`: none for 0."""
    return [StopAfterRises(rises)] if rises else []
