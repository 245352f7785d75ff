"""What the scripts have in common: arguments from a YAML file and the command line, errors in words, going on."""

import json
import sys
from pathlib import Path

import yaml
from transformers import HfArgumentParser, TrainingArguments
from transformers.trainer_utils import IntervalStrategy


def parse_arguments(kinds: tuple, description: str) -> tuple:
    """Dataclasses -> their values from a YAML file, if the first argument is one, and from the options after it."""
    parser = HfArgumentParser(kinds, description=description.split("\n")[0])
    given = sys.argv[1:]
    if given and given[0].endswith((".yml", ".yaml")):
        from_file = []
        for name, value in yaml.safe_load(Path(given[0]).read_text(encoding="utf-8")).items():
            value = json.dumps(value) if isinstance(value, dict) else value
            values = value if isinstance(value, list) else [] if value is True else [value]
            from_file += [f"--{name}", *map(str, values)]
        given = from_file + given[1:]
    return told(parser.parse_args_into_dataclasses, given)


def told(call, *args, traceback: bool = False):
    """What the call returns; an error that the caller can mend ends the script in words, with the exit status 2."""
    try:
        return call(*args)
    except (OSError, ValueError, ImportError) as error:
        if traceback:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def last_checkpoint(output: str | Path) -> str | None:
    """The newest checkpoint that is whole; one that was being written when the run was killed lacks its state file."""
    whole = [folder for folder in Path(output).glob("checkpoint-*") if (folder / "trainer_state.json").exists()]
    return str(max(whole, key=lambda folder: int(folder.name.split("-")[1]))) if whole else None


def keep_best(args: TrainingArguments, metric: str, greater_is_better: bool = True) -> None:
    """The model that does best on validation rows is what a run ends with; each epoch is scored where nothing else is said.

    Raises:
        ValueError: where checkpoints and scores do not come together, so that the best might not be there any more.
    """
    if args.eval_strategy == "no":
        args.eval_strategy = args.save_strategy = IntervalStrategy.EPOCH
    if args.eval_strategy != args.save_strategy or (
        args.eval_strategy == "steps" and args.save_steps % args.eval_steps
    ):
        said = (
            f"eval_strategy={args.eval_strategy.value!r} (eval_steps={args.eval_steps}) and "
            f"save_strategy={args.save_strategy.value!r} (save_steps={args.save_steps})"
        )
        raise ValueError(
            f"{said}: the best model is kept only if scores and checkpoints come together. Make them equal."
        )
    args.do_eval = args.load_best_model_at_end = True
    args.metric_for_best_model, args.greater_is_better = f"eval_{metric}", greater_is_better
