"""The output folder of a run. It records the settings of its run and refuses a start with other settings.

A recipe may use what it finds in its output folder (checkpoints, a base model) only if that was made with
the same settings: options that affect the result, the content of data files and models, the version of Lexperts.
"""

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from transformers import Trainer, TrainingArguments

from run_tools.errors import SettingsMismatchError
from run_tools.files import write_file
from run_tools.fingerprints import RECORD, differences, parse_named_path
from run_tools.versions import package_versions

from .interruptions import is_complete, last_checkpoint
from .settings import PATH_SETTINGS, collect_settings

# what a run writes, and another run could use by mistake
RUN_OUTPUTS = (
    "checkpoint-*", "base", "*.safetensors", "*.safetensors.index.json", "*.bin", "config.json",
    "generation_config.json", "adapter_config.json", "results.json", "scores.json", "log.json",
)  # fmt: skip
# those of them that a run of ours writes, and not only a user with a similar name
OWN_OUTPUTS = re.compile(
    r"checkpoint-\d+|base|base\.part|(adapter_)?model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
    r"|training_args\.bin|(generation_|adapter_)?config\.json|(results|scores|log)\.json|tokenizer|(states-)?(train|validation|test)"
)
OTHER_FOLDER = "Use another --output-dir, or --overwrite-output-dir true to remove that run and start from scratch."


class RunFolder:
    """A folder with a record of the settings of its run, which are those of `collect_settings`.

    Args:
        outputs: patterns of what the run writes; as long as nothing matches them, other settings are accepted.
        record: the file name of the record.
        inputs: files and folders that the run reads and that overwriting must not remove.
        clear: patterns of what the run makes for its own use; overwriting removes that too.
    """

    own_outputs, other_folder = OWN_OUTPUTS, OTHER_FOLDER  # which names may be removed, and what an error advises

    def __init__(
        self, path, settings: dict, outputs: Sequence[str] = RUN_OUTPUTS, record: str = RECORD, inputs: Sequence = (),
        clear: Sequence[str] = (),
    ):  # fmt: skip
        self.path, self.settings, self.outputs, self.inputs = Path(path), settings, tuple(outputs), inputs
        self.record, self.clear = self.path / record, tuple(clear)
        self.start: str | None = None

    def find(self, patterns: Sequence[str]) -> list[Path]:
        """What matches the patterns in the folder."""
        return sorted({path for pattern in patterns for path in self.path.glob(pattern)})

    def leftovers(self) -> list[Path]:
        """The outputs of an earlier run."""
        return self.find(self.outputs)

    def removable(self) -> list[Path]:
        """The outputs of an earlier run, and what it has made for its own use."""
        return [*self.leftovers(), *self.find(self.clear)]

    def read(self) -> dict:
        """The record, or an empty dictionary."""
        try:
            record = json.loads(self.record.read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        return record if "settings" in record else {}

    def open(self, overwrite: bool = False) -> "RunFolder":
        """Compares the settings with the record, or writes the record. Raises a `SettingsMismatchError` for a run with
        other settings or without a record; `overwrite` removes its outputs instead.
        """
        if overwrite:
            self.remove()
        leftovers, record = self.leftovers(), self.read()
        if leftovers and not record:
            raise SettingsMismatchError(
                f"{self.path} contains {leftovers[0].name}, without a record of its settings ({self.record.name}). "
                "Use another --output-dir."
            )
        if leftovers and (text := differences(record["settings"], self.settings, shared=True)):
            raise SettingsMismatchError(f"{self.path} contains a run with other settings: {text}. {self.other_folder}")
        versions = package_versions(("torch", "transformers"))
        if leftovers:
            changed = [f"{name} {record['versions'][name]}, now {now}" for name, now in versions.items()
                       if record["versions"].get(name) != now]  # fmt: skip
            if changed:
                print(f"note: the run in {self.path} was started with {'; '.join(changed)}", flush=True)
            return self
        self.path.mkdir(parents=True, exist_ok=True)
        self.write({"settings": self.settings, "versions": versions})
        return self

    def write(self, record: dict) -> None:
        """Replaces the record."""
        write_file(self.record, json.dumps(record, indent=1, ensure_ascii=False))

    def remove(self) -> None:
        """Removes the outputs of a run and nothing else. Raises a `SettingsMismatchError` if one of them is an input of this
        run, or is not of a run: the record is missing, or does not name it. Nothing is removed then.
        """
        outputs = self.removable()
        for path in outputs:
            for source in map(Path, self.inputs):
                if source.exists() and (
                    source.resolve().is_relative_to(path.resolve()) or path.resolve().is_relative_to(source.resolve())
                ):
                    raise SettingsMismatchError(
                        f"--overwrite-output-dir true would remove {path}, an input of this run. Use another --output-dir."
                    )
        if (foreign := self.find_foreign(outputs)) is not None:
            path, reason = foreign
            raise SettingsMismatchError(
                f"--overwrite-output-dir true would remove {path}, which no run is known to have written: {reason}. Move it away, "
                "or use another --output-dir."
            )
        for path in outputs:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        self.record.unlink(missing_ok=True)
        if outputs:
            print(f"removed from {self.path}: {', '.join(path.name for path in outputs)}", flush=True)

    def find_foreign(self, outputs: Sequence[Path]) -> tuple[Path, str] | None:
        """The first of these paths that is not known to be of a run, and why."""
        record = self.read()
        if outputs and not record:
            return outputs[0], f"{self.record.name}, the record of a run, is missing or damaged"
        finished, saved = record.get("files"), record.get("checkpoints", {})
        names = {Path(file).name for files in saved.values() for file in files}
        for path in outputs:
            if not self.own_outputs.fullmatch(path.name):
                return path, "its name is not one of a run's outputs"
            known = saved.get(path.name) if finished is None else finished
            for file in self.files_of([path]):
                if known is not None:
                    foreign = file not in known
                else:  # a checkpoint that is not recorded was being written when its run was killed
                    foreign = bool(names) and path.name.startswith("checkpoint-") and Path(file).name not in names
                if foreign:
                    return self.path / file, f"{self.record.name} does not name it"
        return None

    def files_of(self, outputs: Sequence[Path]) -> list[str]:
        """The files in these outputs, relative to the folder."""
        files = (file for path in outputs for file in ([path] if not path.is_dir() else sorted(path.rglob("*"))))
        return [file.relative_to(self.path).as_posix() for file in files if file.is_symlink() or not file.is_dir()]

    @property
    def finished(self) -> bool:
        """Whether a run with these settings has finished in this folder."""
        record = self.read()
        return bool(
            record.get("finished")
            and self.leftovers()
            and not differences(record["settings"], self.settings, shared=True)
        )

    def record_checkpoint(self, name: str) -> None:
        """Records the files of a checkpoint once it is written, so that a later one of the user's is not taken for one of them."""
        record = self.read()
        saved = record.get("checkpoints", {}) | {name: self.files_of([self.path / name])}
        self.write(record | {"checkpoints": saved})

    def mark_finished(self, **facts) -> None:
        """Records that the run has finished and what it has written, with facts such as steps and epochs."""
        record = self.read()
        saved = record.get("checkpoints", {})
        files = self.files_of([path for path in self.removable() if path.name not in saved])
        files += [file for of_checkpoint in saved.values() for file in of_checkpoint]
        self.write({**record, "finished": True, "files": files, **facts})

    def checkpoint(self, requested: str | None = None) -> str | None:
        """The checkpoint to resume from: the newest here, or the requested one. Raises a `ValueError` if that is not a
        checkpoint, or is of other settings (`SettingsMismatchError`), or for `false` although there are checkpoints.
        """
        newest = last_checkpoint(self.path)
        if requested is None or requested.lower() == "true":
            return newest and relocate_best(Path(newest))
        if requested.lower() == "false":
            if newest:
                raise ValueError(
                    f"--resume-from-checkpoint false, but {self.path} contains checkpoints. {self.other_folder}"
                )
            return None
        checkpoint = Path(requested).resolve()
        if not is_complete(checkpoint):
            raise ValueError(f"--resume-from-checkpoint {requested}: this is not a complete checkpoint of the Trainer.")
        other = RunFolder(checkpoint.parent, self.settings, record=self.record.name).read()
        if not other:
            raise SettingsMismatchError(
                f"--resume-from-checkpoint {requested}: its run has no record of its settings ({RECORD})."
            )
        if text := differences(other["settings"], self.settings, shared=True):
            raise SettingsMismatchError(
                f"--resume-from-checkpoint {requested} belongs to a run with other settings: {text}."
            )
        return relocate_best(checkpoint)


def relocate_best(checkpoint: Path) -> str:
    """Makes a checkpoint's state refer to the best checkpoint in its present folder, so that a run that was moved does
    not end with the model of another run at its old path. Raises a `ValueError` if the best checkpoint is missing.
    """
    path = checkpoint / "trainer_state.json"
    state = json.loads(path.read_text(encoding="utf-8"))
    best = state.get("best_model_checkpoint")
    if not best:
        return str(checkpoint)
    moved = checkpoint.absolute().parent / Path(best).name
    if not moved.exists():
        raise ValueError(f"{checkpoint} names {best} as the best model, but {moved} does not exist. Restore it.")
    if Path(best).absolute() != moved:
        write_file(path, json.dumps(state | {"best_model_checkpoint": str(moved)}, indent=2))
    return str(checkpoint)


def open_run(
    command: str, training_args: TrainingArguments, *arguments, overwrite=False, clear=(), **more
) -> RunFolder:
    """The opened run folder of a training, in all of its processes; its `start` is the checkpoint to resume from. For the
    arguments see `collect_settings` and `RunFolder`.
    """
    settings = collect_settings(command, *arguments, training_args, **more)
    inputs = []
    for name, value in (item for group in arguments for item in asdict(group).items()):
        if value and (name in PATH_SETTINGS or "files" in name):
            inputs += [parse_named_path(path)[1] for path in (value if isinstance(value, list) else [value]) if path]
    folder = RunFolder(training_args.output_dir, settings, inputs=inputs, clear=clear)
    with training_args.main_process_first(desc="run folder"):
        folder.open(overwrite and training_args.process_index == 0)
        folder.start = folder.checkpoint(training_args.resume_from_checkpoint)
    return folder


def training_summary(training_args: TrainingArguments, state) -> dict:
    """How long a training ran, which `num_train_epochs` does not say after `max_steps` or early stopping."""
    name = "max_steps" if training_args.max_steps > 0 else "num_train_epochs"
    trained = {"trained_steps": state.global_step, "trained_epochs": round(state.epoch or 0.0, 4)}
    return {name: getattr(training_args, name), **trained}


def write_results(folder: RunFolder, trainer: Trainer, **results) -> None:
    """Writes results.json with these results, how long the training ran, and its log; marks the run as finished."""
    if trainer.is_world_process_zero():
        ran = training_summary(trainer.args, trainer.state)
        content = {**results, "ran": ran, "log": trainer.state.log_history}
        write_file(folder.path / "results.json", json.dumps(content, indent=1))
        folder.mark_finished(ran=ran)
