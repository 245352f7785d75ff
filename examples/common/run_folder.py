"""The folder of a run records the settings that it was started with, and refuses a start with other settings.

Whatever a recipe finds in its output folder (checkpoints, a base model, a finished stage) may only be used if it was made
with the same settings: options that affect the result, the content of data files and models, the version of Lexperts.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from huggingface_hub import constants
from transformers import TrainingArguments

RECORD = "run_settings.json"
# what a run leaves behind, and another one could use by mistake
MADE = (
    "checkpoint-*", "base", "first", "seed-*", "*.safetensors", "*.safetensors.index.json", "*.bin", "config.json",
    "generation_config.json", "adapter_config.json", "results.json", "scores.json", "log.json", "losses.json",
)  # fmt: skip
# settings that name a model or a data set: a folder is compared by its content
PLACES = ("backbone", "start_from", "model_name_or_path", "reward_base", "dataset_name", "first_dataset", "pieces")
# settings that do not affect the result
IGNORED = frozenset(
    [
        "output_dir",
        "overwrite_output_dir",
        "resume_from_checkpoint",
        "traceback",
        "show",
        "ablation",
        "states_dir",
        "generation_batch_size",
        "logging_strategy",
        "logging_steps",
        "logging_first_step",
        "log_on_each_node",
        "logging_nan_inf_filter",
        "log_level",
        "log_level_replica",
        "include_num_input_tokens_seen",
        "disable_tqdm",
        "report_to",
        "run_name",
        "project",
        "trackio_space_id",
        "trackio_bucket_id",
        "trackio_static_space_id",
        "push_to_hub",
        "hub_token",
        "hub_private_repo",
        "hub_model_id",
        "hub_strategy",
        "hub_always_push",
        "hub_revision",
        "per_device_eval_batch_size",
        "eval_accumulation_steps",
        "eval_do_concat_batches",
        "eval_use_gather_object",
        "batch_eval_metrics",
        "save_total_limit",
        "save_only_model",
        "save_on_each_node",
        "enable_jit_checkpoint",
        "use_cpu",
        "gradient_checkpointing",
        "gradient_checkpointing_kwargs",
        "activation_checkpointing",
        "activation_checkpointing_kwargs",
        "torch_empty_cache_steps",
        "dataloader_num_workers",
        "dataloader_pin_memory",
        "dataloader_persistent_workers",
        "dataloader_prefetch_factor",
        "dataloader_multiprocessing_context",
        "skip_memory_metrics",
        "debug",
        "do_train",
        "do_eval",
        "do_predict",
        "local_rank",
        "ddp_timeout",
        "ddp_backend",
        "ddp_bucket_cap_mb",
        "ddp_find_unused_parameters",
        "ddp_static_graph",
        "restore_callback_states_from_checkpoint",
    ]
)
# files of a model's folder that are not the model
NOT_THE_MODEL = (
    RECORD, "results.json", "scores.json", "log.json", "losses.json", "trainer_state.json", "training_args.bin",
    "optimizer.bin", "scheduler.bin",
)  # fmt: skip
OF_MODELS = (".safetensors", ".bin", ".json", ".model", ".txt", ".jinja", ".tiktoken")
OF_DATA = (".jsonl", ".json", ".csv", ".parquet", ".arrow", ".txt")


class OtherSettings(ValueError):
    """A folder holds what was made with other settings; the message names them."""


@dataclass
class RunFolderArguments:
    overwrite_output_dir: bool = field(
        default=False, metadata={"help": "remove what an earlier run left in output_dir, and start from scratch"}
    )


# --- what is compared ---


@lru_cache(maxsize=4096)
def hash_of(path: str, size: int, changed: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of(path: Path) -> str:
    """Of a file's content; a file is read again only if its size or time changed."""
    status = path.stat()
    return hash_of(str(path.resolve()), status.st_size, status.st_mtime_ns)


def content_of(folder: Path) -> list[Path]:
    """The files of a model's or a data set's folder, without what training and scoring leave beside them."""
    is_model = (folder / "config.json").exists() or (folder / "adapter_config.json").exists()
    kinds = OF_MODELS if is_model else OF_DATA
    found = []
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        skipped = path.name.startswith((".", "states")) or (is_model and path.name in NOT_THE_MODEL)
        beside = any(part.startswith((".", "checkpoint-", "seed-")) or part in ("base", "first") for part in parts[:-1])
        if path.is_file() and path.suffix in kinds and not skipped and not beside:
            found.append(path)
    return found


def fingerprint(place: str | Path) -> dict:
    """What tells a file, a folder or a Hub repository from another, or from the same place with other content.

    Returns: `name`, and `sha256` of the content of a file or folder, or `commit` of a Hub repository that was downloaded.
    """
    path = Path(place)
    if path.is_file():
        return {"name": path.name, "bytes": path.stat().st_size, "sha256": sha256_of(path)}
    if path.is_dir():
        files = [(path_.relative_to(path).as_posix(), sha256_of(path_)) for path_ in content_of(path)]
        return {"name": path.resolve().name, "sha256": hashlib.sha256(json.dumps(files).encode()).hexdigest()}
    commit = commit_of(str(place))
    return {"name": str(place)} | ({"commit": commit} if commit else {})


def commit_of(name: str) -> str | None:
    """The commit of a Hub repository that lies in the cache."""
    for kind in ("models", "datasets"):
        head = Path(constants.HF_HUB_CACHE) / f"{kind}--{name.replace('/', '--')}" / "refs" / "main"
        if head.is_file():
            return head.read_text(encoding="utf-8").strip()
    return None


def package_version() -> str:
    try:
        return version("lexperts")
    except PackageNotFoundError:
        return "source"


def place_of(given: str) -> tuple[str, str]:
    """ "FILE" or "NAME=FILE" -> the name, or "", and the file."""
    name, separator, place = given.partition("=")
    return (name, place) if separator and not Path(given).exists() else ("", given)


def named_fingerprint(given: str) -> dict:
    name, place = place_of(given)
    return ({"as": name} if name else {}) | fingerprint(place)


def settings_of(script: str, *arguments, **more) -> dict:
    """All that the result of a script depends on, as JSON.

    Args:
        script: such as `seke/train.py`.
        arguments: dataclasses. Of those in IGNORED nothing is kept; files and PLACES are kept as fingerprints.
        more: settings that are computed, or replace those of the arguments.
    """
    found: dict = {"script": script, "lexperts": package_version()}
    for holder in arguments:
        training = isinstance(holder, TrainingArguments)
        if training:
            found["processes"] = holder.world_size * max(1, holder.n_gpu)
        for name, value in (holder.to_dict() if training else asdict(holder)).items():
            if name in IGNORED or name in more:
                continue
            if value and (name.endswith("_files") or name == "datasets"):
                value = [named_fingerprint(given) for given in value]
            elif isinstance(value, str) and name in PLACES:
                value = fingerprint(value)
            found[name] = value
    return json.loads(json.dumps(found | more, default=str))


def same(before, now) -> bool:
    """Equal values; fingerprints are equal where their content is, whatever the name."""
    if isinstance(before, list) and isinstance(now, list):
        return len(before) == len(now) and all(map(same, before, now))
    if isinstance(before, dict) and isinstance(now, dict) and "name" in before and "name" in now:
        if before.get("as") != now.get("as"):
            return False
        if "sha256" in before or "sha256" in now:
            return before.get("sha256") == now.get("sha256")
        commits = before.get("commit"), now.get("commit")
        return before["name"] == now["name"] and (None in commits or commits[0] == commits[1])
    return before == now


def as_text(value) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(as_text, value))}]"
    if isinstance(value, dict) and "name" in value:
        identity = value.get("sha256") or value.get("commit")
        name = f"{value['as']}={value['name']}" if "as" in value else value["name"]
        return name + (f" ({identity[:8]})" if identity else "")
    return str(value)


def different(before: Mapping, now: Mapping, names: Iterable[str], prefix: str = "") -> Iterator[str]:
    for name in names:
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict) and not {"name"} & {*old, *new}:
            yield from different(old, new, sorted({*old, *new}), f"{prefix}{name}.")
        elif not same(old, new):
            yield f"{prefix}{name}={as_text(old)} before, {as_text(new)} now"


def differences(before: Mapping, now: Mapping) -> str:
    """The settings that differ, such as "learning_rate=0.01 before, 0.5 now"; "" where none does.

    Settings that only one side has come with another version of transformers, and are left out.
    """
    return "; ".join(different(before, now, [name for name in now if name in before]))


# --- the folder ---


def replace_file(path: Path, text: str) -> None:
    """Writes a file as a whole, or not at all."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def is_complete(checkpoint: Path) -> bool:
    """Whether the Trainer wrote all of it: the state comes last, and a run may be killed while it is written."""
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return False
    return True


def last_checkpoint(output: str | Path) -> str | None:
    """The newest checkpoint that is complete."""
    whole = [folder for folder in Path(output).glob("checkpoint-*") if is_complete(folder)]
    return str(max(whole, key=lambda folder: int(folder.name.split("-")[1]))) if whole else None


class RunFolder:
    """A folder with the record of the settings of its run.

    Args:
        path: the folder.
        settings: of `settings_of`.
        made: patterns of what the run writes; before any of it exists, other settings are accepted.
        record: the record's file name.
        inputs: files and folders that the run reads, which overwriting must not remove.
    """

    def __init__(self, path, settings: dict, made: Sequence[str] = MADE, record: str = RECORD, inputs: Sequence = ()):
        self.path, self.settings, self.made, self.inputs = Path(path), settings, tuple(made), inputs
        self.record = self.path / record

    def left(self) -> list[Path]:
        """What an earlier run left."""
        return sorted({path for pattern in self.made for path in self.path.glob(pattern)})

    def read(self) -> dict:
        try:
            record = json.loads(self.record.read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        return record if "settings" in record else {}

    def open(self, overwrite: bool = False, clear: Sequence[str] = ()) -> "RunFolder":
        """Compares the settings with the record, or writes it.

        Args:
            overwrite: remove what is left of an earlier run, and what matches the patterns `clear`.

        Raises:
            OtherSettings: where the folder holds a run with other settings, or one without a record.
        """
        if overwrite:
            self.remove(clear)
        left, record = self.left(), self.read()
        if left and not record:
            raise OtherSettings(
                f"{self.path} holds {left[0].name}, without a record of the settings that it was made with "
                f"({self.record.name}). {self.fix()}"
            )
        if left and (found := differences(record["settings"], self.settings)):
            raise OtherSettings(f"{self.path} holds a run with other settings: {found}. {self.fix()}")
        versions = {name: version(name) for name in ("torch", "transformers")}
        if left:
            other = [f"{name} {record['versions'][name]}, now {now}" for name, now in versions.items()
                     if record["versions"].get(name) != now]  # fmt: skip
            if other:
                print(f"note: the run in {self.path} was started with {'; '.join(other)}", flush=True)
            return self
        self.path.mkdir(parents=True, exist_ok=True)
        self.write({"settings": self.settings, "versions": versions})
        return self

    def fix(self) -> str:
        return "Use another --output_dir, or --overwrite_output_dir true to remove that run and start from scratch."

    def write(self, record: dict) -> None:
        replace_file(self.record, json.dumps(record, indent=1, ensure_ascii=False))

    def remove(self, clear: Sequence[str]) -> None:
        """Removes what a run left, and nothing else."""
        doomed = [*self.left(), *(path for pattern in clear for path in self.path.glob(pattern))]
        for path in doomed:
            for place in map(Path, self.inputs):
                if place.exists() and (
                    place.resolve().is_relative_to(path.resolve()) or path.resolve().is_relative_to(place.resolve())
                ):
                    raise OtherSettings(
                        f"--overwrite_output_dir true would remove {path}, which this run reads. Use another --output_dir."
                    )
        for path in doomed:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        self.record.unlink(missing_ok=True)
        if doomed:
            print(f"removed from {self.path}: {', '.join(path.name for path in doomed)}", flush=True)

    @property
    def finished(self) -> bool:
        """Whether a run with these settings came to its end here."""
        record = self.read()
        return bool(record.get("finished") and self.left() and not differences(record["settings"], self.settings))

    def mark_finished(self, **facts) -> None:
        """Records the end of the run, and what it did, such as steps and epochs."""
        self.write({**self.read(), "finished": True, **facts})

    def checkpoint(self, requested: str | None = None) -> str | None:
        """The checkpoint to resume from: the newest of this folder, or the requested one.

        Raises:
            OtherSettings: for a checkpoint of a run with other settings, or without a record.
            ValueError: for a folder that is not a checkpoint, and for `false` beside checkpoints.
        """
        newest = last_checkpoint(self.path)
        if requested is None or requested.lower() == "true":
            return newest and with_best_of_run(Path(newest))
        if requested.lower() == "false":
            if newest:
                raise ValueError(f"--resume_from_checkpoint false, and {self.path} holds checkpoints. {self.fix()}")
            return None
        checkpoint = Path(requested).resolve()
        if not is_complete(checkpoint):
            raise ValueError(f"--resume_from_checkpoint {requested}: this is not a complete checkpoint of the Trainer.")
        other = RunFolder(checkpoint.parent, self.settings, record=self.record.name).read()
        if not other:
            raise OtherSettings(
                f"--resume_from_checkpoint {requested}: its run has no record of its settings ({RECORD})."
            )
        if found := differences(other["settings"], self.settings):
            raise OtherSettings(f"--resume_from_checkpoint {requested} is of a run with other settings: {found}.")
        return with_best_of_run(checkpoint)


def with_best_of_run(checkpoint: Path) -> str:
    """A checkpoint whose state names the best checkpoint by the folder that both are in now, so that a run that was moved
    does not end with the model of another run in its old place.

    Raises:
        ValueError: where the best one is not there.
    """
    path = checkpoint / "trainer_state.json"
    state = json.loads(path.read_text(encoding="utf-8"))
    best = state.get("best_model_checkpoint")
    if not best:
        return str(checkpoint)
    moved = checkpoint.absolute().parent / Path(best).name
    if not moved.exists():
        raise ValueError(f"{checkpoint} names {best} as the best model, and {moved} does not exist. Restore it.")
    if Path(best).absolute() != moved:
        replace_file(path, json.dumps(state | {"best_model_checkpoint": str(moved)}, indent=2))
    return str(checkpoint)


def open_run(script: str, training_args: TrainingArguments, *arguments, overwrite=False, clear=(), **more) -> RunFolder:
    """The opened run folder of a training, in all its processes; `start` is the checkpoint to resume from.

    Args:
        arguments, more: as in `settings_of`.
        overwrite, clear: as in `RunFolder.open`.
    """
    settings = settings_of(script, *arguments, training_args, **more)
    given = [
        value for holder in arguments for name, value in asdict(holder).items() if name in PLACES or "files" in name
    ]
    inputs = [place_of(one)[1] for value in given for one in (value if isinstance(value, list) else [value]) if one]
    folder = RunFolder(training_args.output_dir, settings, inputs=inputs)
    with training_args.main_process_first(desc="run folder"):
        folder.open(overwrite and training_args.process_index == 0, clear)
        folder.start = folder.checkpoint(training_args.resume_from_checkpoint)
    return folder


def what_ran(training_args: TrainingArguments, state) -> dict:
    """How long a training really was, which `num_train_epochs` does not say after `max_steps` or early stopping."""
    planned = (
        {"max_steps": training_args.max_steps}
        if training_args.max_steps > 0
        else {"num_train_epochs": training_args.num_train_epochs}
    )
    return {**planned, "trained_steps": state.global_step, "trained_epochs": round(state.epoch or 0.0, 4)}
