"""Runs the steps of a recipe as processes: complete steps are skipped, interrupted ones resume, failed ones are reported."""

import fcntl
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from run_tools.versions import package_versions

from ..common.run_folder import replace_file
from .steps import Step

POLL, SAVE_TIME = 0.2, 5.0  # seconds between checks of a process, and between two saves of its time
ATOMIC = ("cluster", "mixture")  # steps whose output appears at once, in a folder that must not exist


class BusyError(ValueError):
    """A step that a process of another run is running; `pid` is that process."""

    def __init__(self, step: Step, pid: str):
        super().__init__(
            f"The step {step.name} is already running in process {pid}. Wait for it or end it, then start the same command "
            "again."
        )
        self.pid = pid


class StepFailedError(RuntimeError):
    """A step that ended with an error; `status` is the exit status for it."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


@dataclass
class Running:
    """A step's process, which keeps `lock` until it ends, also if this process is killed."""

    step: Step
    process: subprocess.Popen
    lock: int
    started: float
    earlier: float  # seconds of earlier attempts
    saved: float = 0.0

    @property
    def seconds(self) -> float:
        """The time of all attempts together."""
        return self.earlier + time.perf_counter() - self.started


def start_process(command: list[str], log: Path, environment: dict[str, str], lock: int) -> subprocess.Popen:
    """Starts a command whose output is appended to a log, and which inherits a lock."""
    with log.open("ab") as file:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment, pass_fds=(lock,)
        )


def read_stamp(step: Step) -> dict | None:
    """The content of `done.json`, which is written when a step has succeeded; `None` before."""
    path = step.folder / "done.json"
    stamp = json.loads(path.read_text(encoding="utf-8")) if path.exists() and step.out.exists() else {}
    return stamp if stamp.get("key") == step.key else None


def acquire_lock(step: Step) -> int:
    """The open lock of a step's folder, which the step's process inherits. Raises a `BusyError` if another run has it."""
    step.folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(step.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.read(lock, 20).decode()
        os.close(lock)
        raise BusyError(step, pid or "unknown") from None
    return lock


class Runner:
    """Runs steps in order, and `jobs` experts at once, with one thread each; `ran` has the keys of the steps that were
    run. `start_process` makes a process from command, log, environment and lock.
    """

    def __init__(self, jobs: int = 1, start_process: Callable = start_process):
        self.jobs, self.start_process, self.ran, self.reported = jobs, start_process, set(), set()

    def is_done(self, step: Step) -> bool:
        """Whether the step has succeeded."""
        return read_stamp(step) is not None

    def command_line(self, step: Step) -> str:
        """The command as a user would type it in the current folder."""
        current = os.getcwd() + os.sep
        return shlex.join(["lexperts", *(word.removeprefix(current) for word in step.arguments)])

    def run(self, steps: list[Step]) -> None:
        """Runs the steps, and waits for those of another run. Raises a `StepFailedError` after ending the parallel ones."""
        waiting, running = list(steps), []
        try:
            while waiting or running:
                for step in list(waiting):
                    if self.is_done(step):
                        print(f"{step.name:15} complete: {step.folder}", flush=True)
                        drop_checkpoints(step)
                        waiting.remove(step)
                    elif self.can_start(step, [one.step for one in running]) and (process := self.start(step)):
                        waiting.remove(step)
                        running.append(process)
                running = [one for one in running if not self.has_ended(one)]
                if running:
                    show_status(running)
                    time.sleep(POLL)
        finally:
            for one in running:
                terminate(one)

    def can_start(self, step: Step, running: list[Step]) -> bool:
        """Whether the inputs are complete, and the running steps allow another one."""
        can_share = step.parallel and all(one.parallel for one in running) and len(running) < self.jobs
        return all(map(self.is_done, step.inputs)) and (can_share or not running)

    def start(self, step: Step) -> Running | None:
        """Starts the step's process; `None` if another run is running it, or has just completed it."""
        try:
            lock = acquire_lock(step)
        except BusyError as busy:
            if step.key not in self.reported:
                print(f"{step.name:15} waiting for process {busy.pid} of another run", flush=True)
            self.reported.add(step.key)
            time.sleep(POLL)
            return None
        if self.is_done(step):
            os.close(lock)
            return None
        for name, content in step.files.items():
            replace_file(step.folder / name, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
        if step.kind in ATOMIC and step.out.exists():
            shutil.rmtree(step.out)  # the earlier run was killed before it wrote done.json
        environment = dict(os.environ)
        if self.jobs > 1 and step.parallel:
            environment["OMP_NUM_THREADS"] = "1"
        spent, log = step.folder / "spent.json", step.folder / "log.txt"
        earlier = json.loads(spent.read_text(encoding="utf-8")) if spent.exists() else 0.0
        print(f"{step.name:15} {self.command_line(step)}", flush=True)
        with log.open("a", encoding="utf-8") as file:
            file.write(f"$ {self.command_line(step)}\n")
        started = time.perf_counter()
        process = self.start_process(step.command, log, environment, lock)
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(process.pid).encode(), 0)
        return Running(step, process, lock, started, earlier)

    def has_ended(self, one: Running) -> bool:
        """Whether the process has ended. If it succeeded, writes `done.json`."""
        code = one.process.poll()
        if code is None:
            if one.seconds - one.saved > SAVE_TIME:
                save_time(one)
            return False
        step = one.step
        save_time(one)
        os.close(one.lock)
        if code:
            raise StepFailedError(
                f"the step {step.name} failed (exit status {code}): {last_error(step.folder / 'log.txt')} "
                f"(log: {step.folder / 'log.txt'})",
                2 if code == 2 else 1,
            )
        if step.experts is not None:  # there is one cluster per source in the rows
            sizes = json.loads((step.out / "clusters.json").read_text(encoding="utf-8"))["sizes"]
            if len(sizes) != step.experts:
                found = f"the rows have {len(sizes)} clusters, but experts={step.experts}"
                raise StepFailedError(f"{found}. Use experts: {len(sizes)}.", 2)
        stamp = {"key": step.key, "name": step.name, "command": self.command_line(step)}
        stamp["seconds"] = round(one.seconds, 2)
        stamp["versions"] = package_versions(("torch", "transformers"))
        replace_file(step.folder / "done.json", json.dumps(stamp, indent=1))
        drop_checkpoints(step)
        self.ran.add(step.key)
        print(f"{step.name:15} done in {one.seconds:,.1f} s", flush=True)
        return True


def save_time(one: Running) -> None:
    """Saves the time spent, which is known within seconds if the step is killed."""
    one.saved = one.seconds
    replace_file(one.step.folder / "spent.json", json.dumps(round(one.seconds, 2)))


def drop_checkpoints(step: Step) -> None:
    """Removes the checkpoints of a complete step."""
    for folder in step.out.glob("checkpoint-*"):
        shutil.rmtree(folder)


def terminate(one: Running) -> None:
    """Ends a process that is still running."""
    if one.process.poll() is None:
        one.process.terminate()
        try:
            one.process.wait(10)
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait()
        save_time(one)
        os.close(one.lock)


def last_error(log: Path) -> str:
    """The last error of a log, or its last line."""
    lines = [line.strip() for line in re.split(r"[\r\n]", log.read_text(encoding="utf-8", errors="replace"))]
    lines = [line for line in lines if line]
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines or ["no output"])[-1].removeprefix("error: ")


def show_status(running: list[Running]) -> None:
    """On a terminal, shows the last line of the newest running step."""
    if sys.stdout.isatty():
        newest = running[-1]
        text = f"{newest.step.name:15} {newest.seconds:6.0f} s  {last_error(newest.step.folder / 'log.txt')}"
        print(f"\r{text[: shutil.get_terminal_size().columns - 1]:<79}", end="\r", flush=True)
