"""What a training has saved when it is interrupted, and so what the repeated command does. Imports no transformers, which takes seconds."""

import json
from collections.abc import Iterable
from pathlib import Path

from run_tools.errors import REPEAT, RESUME
from run_tools.fingerprints import RECORD


def is_complete(checkpoint: Path) -> bool:
    """Whether the Trainer finished writing a checkpoint: the state is written last."""
    return read_json(checkpoint / "trainer_state.json") is not None


def read_json(path: Path):
    """The content of a file, or `None` if it is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def last_checkpoint(output: str | Path) -> str | None:
    """The newest complete checkpoint of a folder."""
    folders = Path(output).glob("checkpoint-*")
    complete = [folder for folder in folders if folder.name.split("-", 1)[1].isdecimal() and is_complete(folder)]
    return str(max(complete, key=lambda folder: int(folder.name.split("-")[1]))) if complete else None


def has_finished_parts(output: Path) -> bool:
    """Whether a sample in a folder of its own is finished, or some rows of its output."""
    stages = (read_json(path) for path in output.glob(f"*/{RECORD}"))
    rows = (path for folder in ("", "*/") for path in output.glob(f"{folder}*.jsonl.settings.json"))
    return any(isinstance(stage, dict) and stage.get("finished") for stage in stages) or any(rows)


def run_folder_of(groups: list) -> tuple[Path, str] | None:
    """The output folder of a training, and its `save_strategy`, from the groups of a command's arguments; `None` without a training."""
    training = next((group for group in groups if hasattr(group, "save_strategy")), None)
    if training is None:
        return None
    return Path(training.output_dir), str(getattr(training.save_strategy, "value", training.save_strategy))


def describe_resuming(groups: Iterable) -> str:
    """What a repeated command does after an interruption: a training without a checkpoint starts again. `groups` are empty before the
    arguments are read.
    """
    groups = list(groups)
    if not groups:
        return REPEAT
    overwrites = any(getattr(group, "overwrite_output_dir", False) for group in groups)
    resume = "Repeat the command without --overwrite-output-dir to resume." if overwrites else RESUME
    found = run_folder_of(groups)
    if found is None:
        return resume
    folder, strategy = found
    if any(map(last_checkpoint, (folder, *folder.glob("*/")))) or has_finished_parts(folder):
        return resume
    why = "save_strategy is no" if strategy == "no" else f"save_strategy is {strategy}, and none was due"
    return f"No checkpoint was saved ({why}). {REPEAT.removesuffix('.')} to start again."
