"""Runs the steps of a recipe as commands: what stands is not run again, what was begun goes on, what fails says where."""

import fcntl
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import yaml
from run_folder import replace_file
from run_steps import Step

from merge_tools.errors import nearest

POLL, NOTED = 0.2, 5.0  # seconds between two looks at a process, and between two notes of its time
AT_ONCE = ("cluster", "mixture")  # steps whose output appears whole, in a place that must be free


class Busy(ValueError):
    """A step that a process of another run is at; `pid` as that run noted it."""

    def __init__(self, step: Step, pid: str):
        super().__init__(
            f"The step {step.name} is being run already, by process {pid}. Wait for it, or end it, then start the same "
            "command again."
        )
        self.pid = pid


class StepFailed(Exception):
    """A step that ended with an error; `code` is the exit code for it."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


@dataclass
class Running:
    """A step's process; `lock` is held until it ends, whoever started it."""

    step: Step
    process: subprocess.Popen
    lock: int
    began: float
    before: float  # seconds of earlier attempts
    noted: float = 0.0

    @property
    def seconds(self) -> float:
        return self.before + time.perf_counter() - self.began


def start_process(command: list[str], log: Path, environment: dict[str, str], lock: int) -> subprocess.Popen:
    with log.open("ab") as file:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment, pass_fds=(lock,)
        )


def stamp_of(step: Step) -> dict | None:
    """What is written when a step has ended well; `None` before."""
    path = step.folder / "done.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() and step.out.exists() else {}
    return found if found.get("key") == step.key else None


def lock_of(step: Step) -> int:
    """The open lock of a step's folder. The step's process holds it too, also when this one is killed.

    Raises:
        Busy: where a process of another run has it.
    """
    step.folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(step.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.read(lock, 20).decode()
        os.close(lock)
        raise Busy(step, pid or "unknown") from None
    return lock


def check_options(steps: list[Step]) -> None:
    """Raises a ValueError for a setting that its script does not know, before hours are spent on the steps before it."""
    for step in steps:
        if step.script is None:
            continue
        kinds = [kind for kind in vars(importlib.import_module(step.script)).values() if isinstance(kind, type)]
        known = {one.name for kind in kinds if is_dataclass(kind) for one in fields(kind)}
        for name in step.written["settings.yml"]:
            if name not in known:
                raise ValueError(f"{step.kind}.{name} is not known to {step.script}.py.{nearest(str(name), known)}")


class Runner:
    """Runs steps in their order, experts beside one another.

    Args:
        jobs: experts at once; of several, each has one thread.
        start: command, log, environment and lock -> a process.
    """

    def __init__(self, jobs: int = 1, start: Callable = start_process):
        self.jobs, self.start, self.ran, self.told = jobs, start, set(), set()

    def is_done(self, step: Step) -> bool:
        return stamp_of(step) is not None

    def words(self, step: Step) -> str:
        """The command as one would type it here."""
        here = os.getcwd() + os.sep
        words = [word.removeprefix(here) for word in step.command[1:]]
        return shlex.join(["python", *words])

    def run(self, steps: list[Step]) -> None:
        """A step that another run is at is waited for.

        Raises:
            StepFailed: when a command fails; others that run beside it are ended, and go on the next time.
        """
        waiting, running = list(steps), []
        try:
            while waiting or running:
                for step in list(waiting):
                    if self.is_done(step):
                        print(f"{step.name:10} stands: {step.folder}", flush=True)
                        clear(step)
                        waiting.remove(step)
                    elif self.may_begin(step, [one.step for one in running]) and (begun := self.begin(step)):
                        waiting.remove(step)
                        running.append(begun)
                running = [one for one in running if not self.ended(one)]
                if running:
                    tell(running)
                    time.sleep(POLL)
        finally:
            for one in running:
                end(one)

    def may_begin(self, step: Step, running: list[Step]) -> bool:
        beside = step.parallel and all(one.parallel for one in running) and len(running) < self.jobs
        return all(map(self.is_done, step.inputs)) and (beside or not running)

    def begin(self, step: Step) -> Running | None:
        """The step's process; `None` where another run is at it, or has just ended it."""
        try:
            lock = lock_of(step)
        except Busy as busy:
            if step.key not in self.told:
                print(f"{step.name:10} waits: process {busy.pid} of another run is at it", flush=True)
            self.told.add(step.key)
            time.sleep(POLL)
            return None
        if self.is_done(step):
            os.close(lock)
            return None
        for name, content in step.written.items():
            replace_file(step.folder / name, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
        if step.kind in AT_ONCE and step.out.exists():
            shutil.rmtree(step.out)  # it was written, but its stamp was not
        environment = dict(os.environ)
        if self.jobs > 1 and step.parallel:
            environment["OMP_NUM_THREADS"] = "1"
        spent, log = step.folder / "spent.json", step.folder / "log.txt"
        before = json.loads(spent.read_text(encoding="utf-8")) if spent.exists() else 0.0
        print(f"{step.name:10} {self.words(step)}", flush=True)
        with log.open("a", encoding="utf-8") as file:
            file.write(f"$ {self.words(step)}\n")
        began = time.perf_counter()
        process = self.start(step.command, log, environment, lock)
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(process.pid).encode(), 0)
        return Running(step, process, lock, began, before)

    def ended(self, one: Running) -> bool:
        """Whether the process has ended; if well, the step has its stamp then."""
        code = one.process.poll()
        if code is None:
            if one.seconds - one.noted > NOTED:
                note_time(one)
            return False
        step = one.step
        note_time(one)
        os.close(one.lock)
        if code:
            raise StepFailed(
                f"the step {step.name} failed (exit code {code}): {last_words(step.folder / 'log.txt')} "
                f"(log: {step.folder / 'log.txt'})",
                2 if code == 2 else 1,
            )
        check_clusters(step)
        stamp = {"key": step.key, "name": step.name, "command": self.words(step), "seconds": round(one.seconds, 2)}
        stamp |= {"versions": {name: version(name) for name in ("torch", "transformers")}}
        replace_file(step.folder / "done.json", json.dumps(stamp, indent=1))
        clear(step)
        self.ran.add(step.key)
        print(f"{step.name:10} done in {one.seconds:,.1f} s", flush=True)
        return True


def note_time(one: Running) -> None:
    """So that a killed step's time is known, but for the last seconds."""
    one.noted = one.seconds
    replace_file(one.step.folder / "spent.json", json.dumps(round(one.seconds, 2)))


def clear(step: Step) -> None:
    """Removes what only served to go on after an interruption."""
    for folder in step.out.glob("checkpoint-*"):
        shutil.rmtree(folder)


def end(one: Running) -> None:
    if one.process.poll() is None:
        one.process.terminate()
        try:
            one.process.wait(10)
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait()
        note_time(one)
        os.close(one.lock)


def check_clusters(step: Step) -> None:
    """Raises a StepFailed where there are not as many clusters as experts: sources are as many as the rows name."""
    if step.experts is None:
        return
    found = json.loads((step.out / "clusters.json").read_text(encoding="utf-8"))["sizes"]
    if len(found) != step.experts:
        raise StepFailed(
            f"the rows have {len(found)} clusters, and there are {step.experts} experts. Use experts: {len(found)}.", 2
        )


def last_words(log: Path) -> str:
    """The error that a log ends with, or its last line."""
    lines = [line.strip() for line in re.split(r"[\r\n]", log.read_text(encoding="utf-8", errors="replace"))]
    lines = [line for line in lines if line]
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines or ["nothing was said"])[-1].removeprefix("error: ")


def tell(running: list[Running]) -> None:
    """On a terminal, how far the newest of the running steps is."""
    if sys.stdout.isatty():
        newest = running[-1]
        text = f"{newest.step.name:10} {newest.seconds:6.0f} s  {last_words(newest.step.folder / 'log.txt')}"
        print(f"\r{text[: shutil.get_terminal_size().columns - 1]:<79}", end="\r", flush=True)
