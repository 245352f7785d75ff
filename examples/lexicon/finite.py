"""Stops a training whose weights have become NaN, before a checkpoint holds them."""

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint


def is_finite(model) -> bool:
    """Whether all trained weights that lie on this process are numbers."""
    weights = (parameter.detach() for parameter in model.parameters() if parameter.requires_grad)
    weights = [weight.to_local() if hasattr(weight, "to_local") else weight for weight in weights]
    return not weights or bool(torch.stack([weight.isfinite().all() for weight in weights]).all())


class StopAtNaN(TrainerCallback):
    """Before each log, evaluation and checkpoint looks whether the weights are still numbers.

    A gradient that is not finite makes all weights NaN by its clipping, and the Trainer goes on, with a loss of 0.

    Raises:
        FloatingPointError: names the step, and the checkpoint to go on from.
    """

    def on_step_end(self, args, state, control, model, **kwargs):
        if control.should_log or control.should_evaluate or control.should_save:
            self.check(args, state, model)

    def on_epoch_end(self, args, state, control, model, **kwargs):
        self.check(args, state, model)

    def check(self, args, state, model) -> None:
        if is_finite(model):
            return
        last = get_last_checkpoint(args.output_dir)
        where = f"goes on from {last}, which is sound" if last else "starts again, for there is no checkpoint yet"
        raise FloatingPointError(
            f"step {state.global_step}: the weights hold NaN or infinite values; a gradient before it was not finite. The "
            f"same command {where}. If it happens again: a lower learning_rate (now {args.learning_rate:g})"
            + (", or bf16: false." if args.bf16 else ", or fp16: false." if args.fp16 else ".")
        )
