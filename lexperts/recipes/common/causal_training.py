"""What the trainings of causal language models share: checkpoints, perplexity, a run that ends in one line."""

import os
from collections.abc import Callable
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel, Trainer

from modeling_lexicon.data_lexicon import DataCollatorForDefinitions
from run_tools.errors import RESUME

from .arguments import command
from .perplexity import perplexity_metric, token_nll
from .run_folder import RunFolder, write_results
from .training import train_or_resume, trainer_options


def print_rank0(text: str) -> None:
    """Prints once, however many processes run."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


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


def make_trainer(
    model, tokenizer, splits: dict[str, Dataset], training_args, cls: type | None = None, callbacks=(), **options
):
    """A Trainer on token ids with labels, which measures the perplexity of the validation rows."""
    by_token = getattr(model.config, "routing_policy", "token") == "token"  # the others find the prompt by the labels
    collator = DataCollatorForDefinitions(tokenizer, answers_only=by_token)
    options |= trainer_options(model, training_args, splits, collator, tokenizer, callbacks)
    options |= {"compute_metrics": perplexity_metric, "preprocess_logits_for_metrics": token_nll}
    return (cls or CheckpointTrainer)(**options)


def add_lora(model, r: int, **options):
    """The model with LoRA of rank r; `options` are those of peft's `LoraConfig`."""
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=r, lora_alpha=2 * r, **options))


def save_and_score(trainer: Trainer, folder: RunFolder, metric: str, description: str) -> None:
    """Saves model and tokenizer, scores the validation rows if there are any, prints this metric by the format of its
    description, and writes results.json.
    """
    if hasattr(trainer.model.config, "output_router_logits"):
        trainer.model.config.output_router_logits = False  # users of a saved mixture need no auxiliary loss
    trainer.save_model()
    metrics = trainer.evaluate() if trainer.eval_dataset is not None else {}
    if trainer.is_world_process_zero():
        output = Path(trainer.args.output_dir)
        (output / "training_args.bin").unlink(missing_ok=True)  # a pickle, and not part of the model
        write_results(folder, trainer, **metrics)
        if metrics:
            print(f"validation: {description.format(metrics[metric])}")
        print(f"The model is in {output}.", flush=True)


def training_command(
    recipe: str, module: str, prepare: Callable[..., tuple[Trainer, RunFolder]], metric: str, description: str
) -> Callable:
    """The `main(argv)` of a command that trains, saves and scores what `prepare` makes of its arguments; see `save_and_score`.

    A training whose weights become NaN ends with a `FloatingPointError`; the command resumes from the last checkpoint.
    """

    def run(*groups) -> None:
        trainer, folder = prepare(*groups)
        train_or_resume(trainer, folder)
        save_and_score(trainer, folder, metric, description)

    return command(recipe, module, run, RESUME)
