"""What the commands of `lexperts merge` print: results, messages, progress, and what an interruption leaves behind."""

import shutil
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from merge_tools import Progress, console
from merge_tools.staging import partial_folder
from run_tools.errors import expand_user, user_errors

from .common import print_json

DEFAULT_WIDTH = 120  # columns if the output is not a terminal


@dataclass
class Screen:
    """Prints results to the standard output, and progress bars and messages to the standard error."""

    as_json: bool
    out: Console
    err: Console

    def result(self, content: dict[str, Any], render: Callable[[], Any]):
        """Prints a result as JSON, or rendered."""
        if self.as_json:
            return print_json(content)
        rendered = render()
        self.out.print(rendered, soft_wrap=isinstance(rendered, Text))

    def print(self, text: str):
        """Prints a line, unless results are printed as JSON."""
        if not self.as_json:
            self.out.print(Text(text), soft_wrap=True)

    def warnings(self, result: dict[str, Any]):
        """Logs the warnings of a result, with JSON too."""
        self.log("warning", "yellow", "\n".join(result.get("warnings", [])))

    def log(self, level: str, colour: str, text: str):
        """Prints each line of a message to the standard error."""
        for line in text.splitlines():
            self.err.print(Text.assemble((f"{level}: ", colour), line), soft_wrap=True)

    def report(self, message: str, level: str):
        """Prints an error, with JSON also as `{"error": ...}`, or what an interruption left."""
        if self.as_json and level == "error":
            print_json({"error": message})
        self.log(level, "red" if level == "error" else "yellow", message)


@contextmanager
def screen(as_json: bool, debug: bool, out: Path | None = None, resumable: bool = False):
    """Runs a command. Errors end it in one line, see `run_tools.errors.user_errors`."""
    columns = shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns  # also if COLUMNS is not a number
    view = Screen(as_json, Console(width=None if sys.stdout.isatty() else columns), Console(stderr=True))
    restore = handle_sigterm()
    hints: dict = {"interrupted": lambda: interruption_hint(out, resumable), "full": "Then use --resume." * resumable}
    try:
        with user_errors(debug, report=view.report, **hints):
            yield view
    finally:
        restore()


class TerminatedError(KeyboardInterrupt):
    """The process has received SIGTERM, as schedulers and `kill` send it."""

    status = 143


def handle_sigterm() -> Callable[[], Any]:
    """Lets SIGTERM end a command like Ctrl-C, so that it says what was written. Returns what restores the handler."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None

    def terminate(*_):
        raise TerminatedError

    previous = signal.signal(signal.SIGTERM, terminate)
    return lambda: signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)


def interruption_hint(out: Path | None, resumable: bool) -> str:
    """What an interrupted command has written."""
    if out is None:
        return "nothing was written."
    path = expand_user(out).resolve()
    if path.is_dir() and any(path.iterdir()):
        return f"{out} is complete."
    partial = partial_folder(path)
    action = "Continue with --resume, or delete it" if resumable else "Delete it"
    return f"{out} was not written." + (f" The partial output is in {partial}. {action}." if partial.is_dir() else "")


def progress_bars(view: Screen):
    """Progress bars on a terminal; no progress otherwise."""
    return console.ProgressBars(view.err) if view.err.is_terminal else nullcontext(Progress())
