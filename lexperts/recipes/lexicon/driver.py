"""Runs the steps of a recipe as processes: complete steps are skipped, interrupted ones resume, failed ones are reported.

The record of a step names the files that its process has written. No other file in its folder is ever removed.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import groupby
from pathlib import Path
from threading import Event

import yaml

from run_tools.claims import TEMPORARY, locked
from run_tools.errors import UserError
from run_tools.files import write_file
from run_tools.fingerprints import RECORD as TRAINING_RECORD
from run_tools.versions import package_versions

from .steps import SETTINGS, Step

RECORD, LOG = "step.json", "log.txt"
OWN_FILES = (RECORD, LOG, SETTINGS, "run.lock")
POLL, SAVE_TIME = 0.2, 2.0  # seconds between checks of a process, and between two saves of its record
LAST_FILES = {"cluster": "clusters.json", "compose": "merge_record.json"}  # of outputs that appear at once, complete


class StepFailedError(RuntimeError):
    """A step that ended with an error; `status` is the exit status for it."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


def read_record(step: Step) -> dict:
    """The record of a step: its command, the seconds of all attempts, its files, and `done` once it has succeeded."""
    try:
        record = json.loads((step.folder / RECORD).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return record if isinstance(record, dict) and record.get("key") == step.key else {}


def is_done(step: Step) -> bool:
    """Whether a step has succeeded, and its output is there."""
    return "done" in read_record(step) and step.out.exists()


def list_files(step: Step) -> dict[str, int]:
    """The sizes of the files in the folder of a step, without those of the driver."""
    sizes = {}
    for path in step.folder.rglob("*"):
        name = path.relative_to(step.folder).as_posix()
        if not (path.is_dir() and not path.is_symlink()) and TEMPORARY.sub(r"\1", name) not in OWN_FILES:
            sizes[name] = path.lstat().st_size
    return sizes


def remove_steps(steps: list[Step]) -> None:
    """Removes the folders of steps, to run them again. Nothing is removed if this raises an error.

    Raises:
        BlockingIOError: if a process is running one of the steps.
        UserError: if a folder has a file that its record does not name, or that was changed.
    """
    steps = [step for step in steps if step.folder.exists()]
    for step in steps:
        with locked(step.folder):
            known = read_record(step).get("files", {})
            for name, size in list_files(step).items():
                if known.get(name) != size:
                    raise UserError(
                        f"--from-step would remove {step.folder / name}, which {RECORD} in that folder does not name in its present state. "
                        "Move the file away, or delete the folder yourself."
                    )
    for step in steps:
        shutil.rmtree(step.folder)


def saved_checkpoints(step: Step) -> dict[str, list[str]]:
    """The files in the output of a training that its record names, by checkpoint."""
    path = step.out / TRAINING_RECORD
    return json.loads(path.read_text(encoding="utf-8")).get("checkpoints", {}) if path.exists() else {}


def drop_checkpoints(step: Step) -> None:
    """Removes the checkpoints of a complete training, except files that its record does not name."""
    for checkpoint, files in saved_checkpoints(step).items():
        for name in files:
            (step.out / name).unlink(missing_ok=True)
        for folder in sorted(step.out.glob(f"{checkpoint}/**/"), reverse=True):
            if not any(folder.iterdir()):
                folder.rmdir()


def command_line(step: Step) -> str:
    """The command as a user would type it in the current folder."""
    current = os.getcwd() + os.sep
    return shlex.join(["lexperts", *(word.removeprefix(current) for word in step.arguments)])


def last_error(log: Path) -> str:
    """The last error of a log, or its last line."""
    lines = [line.strip() for line in re.split(r"[\r\n]", log.read_text(encoding="utf-8", errors="replace"))]
    lines = [line for line in lines if line]
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines or ["no output"])[-1].removeprefix("error: ")


def start_process(arguments: list[str], log: Path, environment: dict[str, str], lock: int) -> subprocess.Popen:
    """Starts `lexperts`, whose output is appended to a log. The process keeps the lock, also if this one is killed."""
    command = [sys.executable, "-m", "lexperts", *arguments]
    with log.open("ab") as file:
        streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, **streams, env=environment, pass_fds=(lock,))


class Driver:
    """Runs steps in order, and `jobs` experts at once, with one thread each.

    Args:
        jobs: number of experts that are trained at once.
        start: makes a process from arguments, log, environment and lock.

    Attributes:
        ran: the keys of the steps that were run.
    """

    def __init__(self, jobs: int = 1, start: Callable = start_process):
        self.jobs, self.start = jobs, start
        self.ran: set[str] = set()
        self.stop = Event()

    def run(self, steps: list[Step]) -> None:
        """Runs the steps that are not done. Raises a `StepFailedError` after ending those beside the one that failed."""
        for _, group in groupby(steps, key=lambda step: step.kind):  # of a kind that has several steps: experts
            with ThreadPoolExecutor(self.jobs) as pool:
                try:
                    for ended in as_completed([pool.submit(self.run_step, step) for step in group]):
                        ended.result()
                except BaseException:  # also Ctrl-C
                    self.stop.set()
                    raise

    def run_step(self, step: Step) -> None:
        """Runs a step unless it is done. If another run is running it, waits for that."""
        reported = False
        while not (is_done(step) or self.stop.is_set()):
            try:
                with locked(step.folder) as lock:
                    if not is_done(step):  # by now
                        self.execute(step, lock.fileno())
                        return
            except BlockingIOError:
                if not reported:
                    print(f"{step.name:15} waiting for another run", flush=True)
                reported = True
                self.stop.wait(POLL)
        if is_done(step):
            print(f"{step.name:15} complete: {step.folder}", flush=True)
            drop_checkpoints(step)

    def execute(self, step: Step, lock: int) -> None:
        """Runs the process of a step, and keeps its record."""
        record = {"key": step.key, "name": step.name, "command": command_line(step), "seconds": 0.0, "files": {}}
        record |= {name: value for name, value in read_record(step).items() if name != "done"}
        # killed between the end of the process and its record
        has_output = (step.out / LAST_FILES.get(step.module, RECORD)).exists()
        foreign = set() if has_output else list_files(step).keys() - record["files"].keys()
        started, log = time.perf_counter() - record["seconds"], step.folder / LOG

        def save(**more) -> None:
            record["files"] = {name: size for name, size in list_files(step).items() if name not in foreign}
            record["seconds"] = round(time.perf_counter() - started, 2)
            write_file(step.folder / RECORD, json.dumps(record | more, indent=1))

        write_file(step.folder / SETTINGS, yaml.safe_dump(step.settings, sort_keys=False, allow_unicode=True))
        print(f"{step.name:15} {record['command']}", flush=True)
        with log.open("a", encoding="utf-8") as file:
            file.write(f"$ {record['command']}\n")
        code = 0 if has_output else self.wait(step, log, lock, save)
        save()
        if code is None:
            return
        if code:
            text = f"the step {step.name} failed (exit status {code}): {last_error(log)} (log: {log})"
            raise StepFailedError(text, 2 if code == 2 else 1)
        save(done=package_versions(("torch", "transformers")))
        drop_checkpoints(step)
        self.ran.add(step.key)
        print(f"{step.name:15} done in {record['seconds']:,.1f} s", flush=True)

    def wait(self, step: Step, log: Path, lock: int, save: Callable[[], None]) -> int | None:
        """Starts the process of a step and waits for it -> its exit status, or None if it was ended with the run."""
        environment = dict(os.environ)
        if self.jobs > 1 and step.kind == "expert":
            environment["OMP_NUM_THREADS"] = "1"
        process = self.start(step.arguments, log, environment, lock)
        started = saved = time.perf_counter()
        try:
            while (code := process.poll()) is None and not self.stop.wait(POLL):
                now = time.perf_counter()
                if now - saved > SAVE_TIME:
                    save()
                    saved = now
                if sys.stdout.isatty():
                    text = f"{step.name:15} {now - started:6.0f} s  {last_error(log)}"
                    print(f"\r{text[: shutil.get_terminal_size().columns - 1]:<79}", end="\r", flush=True)
            return code
        finally:
            process.terminate()  # unless it has ended
            process.wait()
