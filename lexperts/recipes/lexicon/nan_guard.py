"""Stops a training whose weights have become NaN, before they are saved in a checkpoint."""

import torch
from transformers import TrainerCallback

from ..common.run_folder import last_checkpoint


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
