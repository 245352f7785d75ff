"""Shared by all benchmarks: results with their provenance, runs of commands, and checks before anything is reused.

A benchmark reuses finished rows (`Record`) and finished runs (`run_once`, `check_same_settings`) only if they were made with the
same settings, data and versions of torch and transformers. Otherwise it stops with an error that names the difference.
"""

import argparse
import glob
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from threading import Lock

import torch

from lexperts.recipes import DEFINE, EVALUATE, TRAIN
from lexperts.recipes.common.configurations import find_config
from lexperts.recipes.common.run_folder import RunFolder
from lexperts.recipes.common.settings import IGNORED
from run_tools.fingerprints import fingerprint
from run_tools.resume import SettingsMismatchError
from run_tools.settings import differences
from run_tools.versions import UNKNOWN, __version__, package_version, package_versions

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("torch", "transformers", "peft", "accelerate", "datasets")
PEERS = {"YAKE": "yake", "KeyBERT": "keybert"}  # systems for comparison, and their packages
RELEVANT_PACKAGES = ("torch", "transformers")  # rows and runs made with other versions of these are not reused
COMMANDS = {"train": TRAIN, "evaluate": EVALUATE, "define": DEFINE}
OVERWRITTEN: set[Path] = set()  # by this process, and not to be removed again


def machine() -> dict:
    """Processor, threads and accelerator; no host names."""
    names = [line for line in read("/proc/cpuinfo").splitlines() if line.startswith("model name")]
    return {
        "processor": names[0].split(":")[1].strip() if names else platform.processor(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
    }


def peer_versions() -> dict[str, str]:
    """The versions of the peers that are installed; their scores differ between versions."""
    found = {system: package_version(package) for system, package in PEERS.items()}
    return {system: version for system, version in found.items() if version != UNKNOWN}


def read(path: str) -> str:
    """Text of a file, or an empty string if it does not exist."""
    return Path(path).read_text(encoding="utf-8") if Path(path).exists() else ""


def commit() -> str:
    """The measured commit, marked if the working tree has changes; LEXPERTS_COMMIT sets it for a copy without history."""
    if "LEXPERTS_COMMIT" in os.environ:
        return os.environ["LEXPERTS_COMMIT"]
    changed = git("status", "--porcelain", "--", "..", ":!results")
    return git("rev-parse", "--short", "HEAD") + (" with changes" if changed else "")


def git(*arguments: str) -> str:
    """Output of a git command in the folder of the benchmarks."""
    folder = Path(__file__).resolve().parent
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True).stdout.strip()


def write(name: str, results, **settings) -> Path:
    """Writes results/NAME.json with date, commit, versions and machine."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    record = {
        "date": date.today().isoformat(),
        "commit": commit(),
        "versions": package_versions(PACKAGES),
        "machine": machine(),
    }
    path.write_text(json.dumps({**record, "settings": settings, "results": results}, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path.relative_to(RESULTS.parent.parent)}")
    return path


def make_parser(doc: str, name: str | None = None, data: str = "", work: bool = False) -> argparse.ArgumentParser:
    """A parser with `--name` and `--overwrite`, to which the errors of `Record` and `check_same_settings` refer.

    Args:
        doc: of the script; its first line is the description.
        name: of the file in benchmarks/results.
        data: what the folder of `--data` holds; empty for none.
        work: whether there are runs, in the folder of `--work`, `--jobs` of them at a time.
    """
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument("--name", default=name, help="name of the file in benchmarks/results, without .json")
    parser.add_argument("--overwrite", action="store_true", help="remove earlier rows and runs, and measure again")
    if data:
        parser.add_argument("--data", type=Path, required=True, help=f"folder with {data}")
    if work:
        parser.add_argument("--work", type=lambda path: Path(path).resolve(), required=True, help="folder for runs")
        parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, with one thread each")
    return parser


def first_rows(source: Path, target: Path, count: int | None) -> Path:
    """Writes the first rows of a file, without a count all of them -> the new file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(source.read_text(encoding="utf-8").splitlines(keepends=True)[:count]), encoding="utf-8")
    return target


class Record:
    """results/NAME.json as rows that are added one at a time, so that an interrupted benchmark resumes where it stopped.

    Args:
        name: the file's name without .json.
        overwrite: remove the file and start without rows.
        settings: the settings that all rows share. Files and folders given as `Path` are compared by their content.

    Raises:
        SettingsMismatchError: if the file's rows were measured with other settings or other versions of RELEVANT_PACKAGES.
    """

    def __init__(self, name: str, *, overwrite: bool = False, **settings):
        self.name, self.settings, self.lock = name, as_json(settings), Lock()
        if overwrite:
            self.path.unlink(missing_ok=True)
        self.check()

    @property
    def path(self) -> Path:
        """The file of the rows."""
        return RESULTS / f"{self.name}.json"

    def read(self) -> dict:
        """The file's content, or an empty dict if it does not exist."""
        return json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}

    def check(self) -> None:
        """Compares the file's settings and versions with those of this process."""
        before = self.read()
        if not before.get("results"):
            return
        recorded = {package: before["versions"].get(package) for package in RELEVANT_PACKAGES}
        changed = "; ".join(
            filter(
                None,
                (
                    differences(before["settings"], self.settings, shared=True),
                    differences(recorded, relevant_versions(), shared=True),
                ),
            )
        )
        if changed:
            raise SettingsMismatchError(
                f"{self.path} has rows that were measured with other settings: {changed}. Use --overwrite to measure all "
                "rows again, or another --name."
            )
        if missing := [name for name in self.settings if name not in before["settings"]]:
            print(f"note: {self.path.name} does not record {', '.join(missing)}, so they were not compared", flush=True)

    def rows(self) -> list[dict]:
        """All rows of the file."""
        return self.read().get("results", [])

    def find(self, **key) -> dict | None:
        """The first row with the values of a key, such as `system="a", seed=0`."""
        return next((row for row in self.rows() if has_values(row, key)), None)

    def add(self, row: dict) -> dict:
        """Adds a row, with the commit and the processor on which it was measured."""
        row = row | {"commit": commit(), "processor": machine()["processor"]}
        with self.lock:  # read again: another process may have added rows
            write(self.name, [*self.rows(), row], **self.settings)
        return row

    def complete(self, measure: Callable[..., dict], keys: list[dict], jobs: int = 1) -> None:
        """Adds the rows that are missing: `measure(**key)` returns the row of a key, and some run at the same time."""
        pending = [key for key in keys if not self.find(**key)]
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(lambda key: self.add({**key, **measure(**key)}), pending))

    def replace(self, measure: Callable[..., dict], keys: list[dict], setting: str) -> None:
        """Like `complete`, in rows whose keys contain a setting: a row with another value of the setting is removed first."""
        for key in keys:
            if not self.find(**key):
                self.remove(**{name: value for name, value in key.items() if name != setting})
                self.complete(measure, [key])

    def remove(self, **key) -> None:
        """Removes the rows with the values of a key, which are about to be measured again."""
        with self.lock:
            rows = self.rows()
            kept = [row for row in rows if not has_values(row, key)]
            if len(kept) < len(rows):
                write(self.name, kept, **self.settings)


def has_values(row: dict, key: dict) -> bool:
    """Whether a row has all values of a key."""
    return all(row.get(name) == value for name, value in key.items())


class BenchmarkRun(RunFolder):
    """A file or folder of a benchmark, with the record of its settings beside it: NAME.settings.json."""

    def __init__(self, result: Path, settings: dict):
        self.own_outputs = re.compile(re.escape(result.name))
        self.other_folder = f"Use another --work folder, or --overwrite to remove {result.name} and start again."
        super().__init__(
            result.parent, settings, outputs=(glob.escape(result.name),), record=f"{result.name}.settings.json"
        )


def check_same_settings(result: str | Path, settings: dict, overwrite: bool = False) -> None:
    """Checks that a file or folder of an earlier run may be reused. Call it before the run creates the file or folder.

    The settings are written to NAME.settings.json beside it, and compared if it exists.

    Args:
        result: the file or folder that the run writes.
        settings: what the result depends on. Files and folders given as `Path` are compared by their content. Settings
            that do not affect a result (`output_dir`, `disable_tqdm`, ...) are ignored.
        overwrite: remove the file or folder first, and nothing else. Each is removed once per process.

    Raises:
        SettingsMismatchError: if it was made with other settings, data or versions, or has no record of its settings.
    """
    settings = {name: value for name, value in settings.items() if name not in IGNORED}
    versions = {"lexperts": __version__, **relevant_versions()}
    path = Path(result).absolute()
    nested = {"settings": settings, "versions": versions}  # so that a setting that only one run has is a difference
    BenchmarkRun(path, as_json(nested)).open(overwrite and path not in OVERWRITTEN)
    if overwrite:
        OVERWRITTEN.add(path)


def run_once(
    *command,
    output: Path,
    done: str | list[str],
    options: dict,
    overwrite: bool = False,
    threads: int | None = 1,
    **compared,
) -> None:
    """Runs `lexperts COMMAND --output_dir OUTPUT` unless it has finished; an interrupted run resumes.

    Args:
        command: such as `"train", "seke", "minilm_cpu"`; a configuration is compared by its content.
        output: the folder of the run; the log is OUTPUT.log.
        done: files in it that exist when the run has finished.
        options: options of the command.
        overwrite, threads: as in `check_same_settings` and `run_lexperts`.
        compared: settings to compare instead of the options of the same names, such as `Path`s of `NAME=FILE`.

    Raises:
        SettingsMismatchError: as in `check_same_settings`.
    """
    group, name, *configs = command
    recipe = COMMANDS[group][name]
    files = [find_config(config, recipe.recipe, recipe.module) for config in configs]
    check_same_settings(output, {"command": [group, name], "config": files, **options, **compared}, overwrite)
    if not all((output / file).exists() for file in ([done] if isinstance(done, str) else done)):
        log = output.with_name(f"{output.name}.log")
        seconds = run_lexperts(*command, log=log, threads=threads, **options, output_dir=output)
        print(f"{output.name}: {' '.join(command[:2])} in {seconds:.0f} s", flush=True)


def evaluated(name: str, output: Path, log: Path, threads: int | None = 1, **options) -> dict:
    """Runs `lexperts evaluate NAME`; scores of an earlier run in the folder, which may be of other systems, are replaced.

    Returns:
        The content of scores.json.
    """
    scores = output / "scores.json"
    scores.unlink(missing_ok=True)
    run_lexperts("evaluate", name, log=log, threads=threads, output_dir=output, **options)
    return json.loads(scores.read_text(encoding="utf-8"))


def run_lexperts(*command, log: Path, threads: int | None = 1, **options) -> float:
    """Runs a command of `lexperts` in a process, offline, and appends its output to a log. Returns the seconds.

    Args:
        threads: number of threads; None for torch's default.
        options: options of the command; a list has several values.

    Raises:
        RuntimeError: if the command fails; the log is named.
    """
    words = [sys.executable, "-m", "lexperts", *command]
    for name, value in options.items():
        words += [f"--{name}", *(value if isinstance(value, (list, tuple)) else [value])]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"} | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with log.open("a", encoding="utf-8") as file:
        process = subprocess.run(list(map(str, words)), stdout=file, stderr=subprocess.STDOUT, env=environment)
    if process.returncode:
        raise RuntimeError(f"lexperts {' '.join(command[:2])} failed: see {log}")
    return time.perf_counter() - start


def relevant_versions() -> dict[str, str]:
    """Versions of RELEVANT_PACKAGES in this environment."""
    return package_versions(RELEVANT_PACKAGES)


def as_json(value):
    """A value as JSON would return it; existing files and folders as fingerprints of their content."""
    if isinstance(value, dict):
        return {str(name): as_json(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, Path) and value.exists():
        return fingerprint(value)
    return json.loads(json.dumps(value, default=str))
