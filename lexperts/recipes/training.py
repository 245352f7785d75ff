"""What the trainings share: a run that can be continued, the stock Trainer with a few additions, what is saved."""

import json
import shutil
import signal
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path

import yaml
from torch import nn
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments, pipeline

from run_tools.errors import UserError
from run_tools.files import differences, sha256_of, write_file

ARGUMENTS, RESULTS = "arguments.yml", "results.json"
SECONDS = 30  # between checkpoints
# options on which the result does not depend
FREE = {
    "output_dir", "logging_steps", "logging_strategy", "report_to", "run_name", "disable_tqdm", "log_level",
    "push_to_hub", "hub_model_id", "hub_token", "hub_private_repo", "per_device_eval_batch_size",
    "dataloader_num_workers", "save_total_limit",
}  # fmt: skip


class CompleteRunError(Exception):
    """The output folder holds the same run, which has ended."""


def start_run(training_args: TrainingArguments, given: Mapping) -> str | None:
    """Writes the options of a run and the hashes of its files to `arguments.yml` in its folder, or compares them
    -> the last complete checkpoint. Raises a `UserError` for other options or files, and a `CompleteRunError`.
    """
    folder = Path(training_args.output_dir)
    hashes = {str(path): sha256_of(path) for path in data_files(given)}
    shown = {name: value for name, value in given.items() if name != "hub_token"}
    record = json.loads(json.dumps({**shown, "_files": hashes}, default=str))
    with training_args.main_process_first():  # of several, one writes
        names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        if names - {ARGUMENTS}:
            if ARGUMENTS not in names:
                raise UserError(f"--output-dir {folder} is not empty, and holds no run. Choose another folder.")
            old = yaml.safe_load((folder / ARGUMENTS).read_text(encoding="utf-8"))
            changes = differences(*({k: v for k, v in one.items() if k not in FREE} for one in (old, record)))
            if changes:
                raise UserError(f"--output-dir {folder} holds a run of other options: {changes}. Choose another.")
            if RESULTS in names:
                raise CompleteRunError(f"{folder} is complete, nothing to do.")
        elif training_args.process_index == 0:
            folder.mkdir(parents=True, exist_ok=True)
            write_file(folder / ARGUMENTS, yaml.safe_dump(record, sort_keys=False, allow_unicode=True))
    return last_checkpoint(folder)


def data_files(given: Mapping) -> list[Path]:
    """The files that options such as `train_files` name, also as NAME=FILE, and those of `datasets`, in folders too."""
    named = [value for name, value in given.items() if name.endswith(("_files", "datasets"))]
    places = [Path(place.rpartition("=")[2]) for places in named for place in places]
    inside = [path for place in places if place.is_dir() for path in sorted(place.glob("*.jsonl"))]
    return [place for place in places if place.is_file()] + inside


def last_checkpoint(folder: str | Path) -> str | None:
    """The newest complete checkpoint of a folder: the Trainer writes trainer_state.json last."""
    states = [path.parent for path in Path(folder).glob("checkpoint-*/trainer_state.json")]
    return str(max(states, key=lambda path: int(path.name.split("-")[1]))) if states else None


class RecipeTrainer(Trainer):
    """The stock Trainer, which stops at weights that are not finite. Parameters in `part` have the learning rate
    `part_rate`, and a PyTorch `sampler` draws the training rows.
    """

    def __init__(self, *args, part: Iterable[nn.Parameter] = (), part_rate=None, sampler=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.part, self.part_rate, self.sampler = {id(parameter) for parameter in part}, part_rate, sampler
        self.add_callback(SaveByTime())
        self.add_callback(StopAtNaN())

    def _get_train_sampler(self, train_dataset=None):
        return super()._get_train_sampler(train_dataset) if self.sampler is None else self.sampler

    def _get_eval_sampler(self, eval_dataset):
        return SequentialSampler(eval_dataset)  # metrics read the rows in their order, also with group_by_length

    def create_optimizer(self, *args, **kwargs):
        """As in the Trainer, with groups of their own for the parameters of `part`."""
        optimizer = super().create_optimizer(*args, **kwargs)
        for group in list(optimizer.param_groups) if self.part_rate is not None else ():
            new = [parameter for parameter in group["params"] if id(parameter) in self.part]
            if new:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) not in self.part]
                optimizer.add_param_group({**group, "params": new, "lr": self.part_rate, "initial_lr": self.part_rate})
        return optimizer


class SaveByTime(TrainerCallback):
    """Saves a checkpoint every half minute, in at most a twentieth of the time, and deletes it at the next one. Ctrl-C saves
    one before it ends the run; a second one ends it at once.

    Not after the last step of an epoch, whose checkpoint comes after its evaluation; nor in several processes, which
    have several clocks, or for the Hub, by time.
    """

    interrupted, is_due, start, due = False, False, 0.0, 0.0
    last: Path | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        """Ctrl-C now waits for the end of a step."""
        signal.signal(signal.SIGINT, self.interrupt)
        self.due = time.monotonic() + SECONDS

    def interrupt(self, *_):
        """The first Ctrl-C."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.interrupted = True

    def on_step_end(self, args, state, control, **kwargs):
        """Asks for a checkpoint within an epoch."""
        self.start = time.monotonic()
        is_free = args.world_size == 1 and not (args.push_to_hub or control.should_save or control.should_evaluate)
        self.is_due = is_free and self.start >= self.due
        if state.epoch % 1 and not control.should_training_stop:
            control.should_save |= self.interrupted or self.is_due

    def on_epoch_end(self, args, state, control, **kwargs):
        """Asks for the checkpoint after an epoch."""
        self.is_due = False
        control.should_save |= self.interrupted

    def on_save(self, args, state, control, **kwargs):
        """The checkpoint is complete."""
        if self.interrupted:
            raise KeyboardInterrupt
        if self.last is not None:
            shutil.rmtree(self.last, ignore_errors=True)
        now, folder = time.monotonic(), Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self.last = folder if self.is_due else None
        self.due = now + max(SECONDS, 19 * (now - self.start) * self.is_due)

    def on_train_end(self, args, state, control, **kwargs):
        """As before the training."""
        signal.signal(signal.SIGINT, signal.default_int_handler)


class StopAtNaN(TrainerCallback):
    """Raises a `FloatingPointError` before an evaluation or a checkpoint if a weight is not finite.

    Gradient clipping turns one gradient that is not finite into NaN in all weights, and the Trainer continues.
    """

    def on_step_end(self, args, state, control, model, **kwargs):
        """Before a log, an evaluation or a checkpoint."""
        if not (control.should_log or control.should_evaluate or control.should_save):
            return
        weights = [parameter.detach() for parameter in model.parameters() if parameter.requires_grad]
        weights = [weight.to_local() if hasattr(weight, "to_local") else weight for weight in weights]
        if not all(bool(weight.isfinite().all()) for weight in weights):
            raise FloatingPointError(
                f"step {state.global_step}: weights are NaN or infinite. Repeat the command to go on from the last "
                f"checkpoint, or choose a learning rate below {args.learning_rate:g} and another --output-dir."
            )


def fit(trainer: Trainer, checkpoint: str | None) -> None:
    """Trains, from a checkpoint if there is one. From one after which training has ended, it only loads the weights:
    the stock Trainer would train one more step before it looks.
    """
    args = trainer.args
    planned = args.max_steps, args.num_train_epochs
    if checkpoint is not None:
        state = json.loads((Path(checkpoint) / "trainer_state.json").read_text(encoding="utf-8"))
        if state["stateful_callbacks"]["TrainerControl"]["args"]["should_training_stop"]:
            args.max_steps, args.num_train_epochs = -1, 0
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    finally:
        args.max_steps, args.num_train_epochs = planned


def best_evaluation(trainer: Trainer, metric: str) -> dict:
    """The evaluation with the largest value of a metric, the first of equals, from the Trainer's log."""
    return max((entry for entry in trainer.state.log_history if metric in entry), key=itemgetter(metric))


def save_pipeline(task: str, model, tokenizer, folder: str):
    """Saves the pipeline of a trained model, prints where it is, and returns it."""
    run = pipeline(task, model=model, tokenizer=tokenizer)
    run.save_pretrained(folder)
    print(f"\nThe model is in {folder}: pipeline({task!r}, model={folder!r})")
    return run


def write_results(trainer: Trainer, **results) -> None:
    """Writes results.json, by which the run is complete: scores, the Trainer's log, and versions."""
    if trainer.is_world_process_zero():
        record = {
            **results,
            "log": trainer.state.log_history,
            "versions": {name: version(name) for name in ("torch", "transformers")},
        }
        text = json.dumps(record, indent=1, ensure_ascii=False, default=str)
        write_file(Path(trainer.args.output_dir) / RESULTS, text + "\n")
