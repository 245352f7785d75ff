"""What the commands of `lexperts merge` print: results, messages, progress, and what an interruption leaves behind."""

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from merge_tools import Progress, Report, Routing
from merge_tools.card import short_hash
from merge_tools.findings import LEVELS, grouped
from merge_tools.routing import printable
from merge_tools.staging import partial_folder
from run_tools.errors import escape, expand_user, format_size, user_errors

from .common import print_json

DEFAULT_WIDTH = 120  # columns if the output is not a terminal
SIGNS = {"ok": ("green", "ok"), "note": ("cyan", "note"), "warning": ("yellow", "warning"), "error": ("red", "error")}
MAX_NAMES = 2
COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red", "bright_cyan", "bright_yellow")
SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
PHASES = {
    "gates": "running texts",
    "read": "reading sources",
    "write": "writing mixture",
    "sync": "syncing to disk",
    "verify": "comparing",
}
WITHOUT_BYTES = ("gates",)


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
        """Logs the warnings and notes of a result, with JSON too."""
        self.log("warning", "yellow", "\n".join(result.get("warnings", [])))
        self.log("note", "cyan", "\n".join(result.get("notes", [])))

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
    width = columns if "COLUMNS" in os.environ else None  # rich would print nothing in 0 columns
    view = Screen(as_json, Console(width=width if sys.stdout.isatty() else columns), Console(stderr=True, width=width))
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
    return ProgressBars(view.err) if view.err.is_terminal else nullcontext(Progress())


class Done(DownloadColumn):
    """The bytes of a phase, or the percentage of one that has no bytes."""

    def render(self, task) -> Text:
        """The text of a bar."""
        return Text(f"{task.percentage:.0f}%") if task.fields["phase"] in WITHOUT_BYTES else super().render(task)


class Speed(TransferSpeedColumn):
    """The bytes per second of a phase that has bytes."""

    def render(self, task) -> Text:
        """The text of a bar."""
        return Text() if task.fields["phase"] in WITHOUT_BYTES else super().render(task)


class ProgressBars(Progress):
    """One progress bar per phase, with bytes and speed, or a percentage, and the remaining time."""

    def __init__(self, console: Console):
        columns = (TextColumn("{task.description:<20}"), BarColumn(), Done(), Speed(), TimeRemainingColumn())
        self.bars = Bars(*columns, console=console, transient=True)
        self.tasks: dict[str, Any] = {}

    def start(self, phase: str, total: int):
        """Adds a bar, or extends the bar of the phase."""
        if phase in self.tasks:  # another file in the same phase
            task = self.bars.tasks[self.tasks[phase]]
            self.bars.update(self.tasks[phase], total=task.total + total)
        elif phase in PHASES:
            self.tasks[phase] = self.bars.add_task(PHASES[phase], total=total, phase=phase)

    def advance(self, phase: str, count: int):
        """Advances the bar of the phase."""
        if phase in self.tasks:
            self.bars.advance(self.tasks[phase], count)

    def __enter__(self):
        self.bars.start()
        return self

    def __exit__(self, *_):
        self.bars.stop()


def safe(text: Any) -> Text:
    """A text without control characters, which would change a terminal."""
    return Text(escape(str(text)))


def new_table(*columns: str, **options) -> Table:
    """A table without lines between its cells; `options` are those of its columns."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(Text(column), **options)
    return table


def render_findings(report: Report) -> Table:
    """The preflight as a table: errors last, equal messages once."""
    table = new_table("", "check", "subject", "result", overflow="fold")
    for level in LEVELS:
        colour, sign = SIGNS[level]
        for check, subjects, message in grouped(report.findings, level):
            table.add_row(Text(sign, style=colour), check, Text(format_subjects(subjects, level)), Text(message))
    return table


def format_subjects(subjects: list[str], level: str) -> str:
    """All names for warnings and errors; otherwise the number of subjects if there are many."""
    if len(subjects) <= MAX_NAMES or level in ("warning", "error"):
        return ", ".join(subjects)
    return f"{len(subjects)} {'sources' if 'base' in subjects else 'experts'}"


def render_verdict(report: Report) -> Text:
    """Whether the recipe can be merged."""
    errors, warnings = len(report.errors), len(report.warnings)
    if errors:
        fix = f"Fix {'them' if errors > 1 else 'it'} before merging."
        return Text(f"{errors} error{'s' * (errors > 1)}. {fix}", style="red")
    noted = f", with {warnings} warning{'s' * (warnings > 1)}" if warnings else ""
    return Text(f"Ready to merge{noted}.", style="green")


def render_summary(plan: dict[str, Any]) -> Table:
    """The summary of a plan or of a finished mixture."""
    content = {
        "format": plan["format"],
        "experts": ", ".join(plan["experts"]),
        "parameters": f"{plan['parameters']:,}, {plan['active_parameters']:,} active per token",
        "on disk": f"{format_size(plan['bytes'])} in {plan['tensors']} tensors",
        "in memory": f"{format_size(plan['memory_bytes'])} for the weights",
    }
    return key_value_table(content)


def key_value_table(content: dict[str, str]) -> Table:
    """A table of keys and values; brackets are not interpreted as markup."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, text in content.items():
        table.add_row(Text(name), safe(text))
    return table


def render_mixture(facts: dict[str, Any]) -> Group:
    """The result of `inspect`."""
    policy, layers = facts["routing_policy"], facts["router_layers_index"]
    layers = "all layers" if layers is None else f"layers {', '.join(map(str, layers))}"
    content = {
        "format": f"{facts['format']}, made by {facts['made_by']}",
        "routed": f"{', '.join(facts['router_layers'])} in {layers}",
        "policy": f"{policy}, {facts['experts_per_token']} experts per token" if policy == "token" else policy,
        "shared weights": facts["shared"],
        "rope": f"{facts['rope']['rope_type']}, base {facts['rope']['rope_theta']:g}",
        "parameters": f"{facts['parameters']:,}, {facts['active_parameters']:,} active per token",
        "on disk": format_size(facts["bytes"]),
    }
    if facts["rank"]:
        kept = zip(facts["experts"], facts["energies"] or (), strict=False)
        shares = ", ".join(f"{expert['name']} {energy:.1%}" for expert, energy in kept if energy is not None)
        content["experts"] = f"rank {facts['rank']} over the base's MLPs" + (
            f"; energy kept: {shares}" if shares else ""
        )
    experts = new_table("expert", "source", "licence", "file", "hash", overflow="fold")
    for expert in facts["experts"]:
        for i, file in enumerate(expert["files"]):
            first = (expert["name"], expert["source"], expert.get("license", "not stated")) if i == 0 else ("", "", "")
            experts.add_row(*map(safe, (*first, file["name"], short_hash(file).replace("`", ""))))
    parts = [key_value_table(content), Text(), experts]
    if facts["gates"]:
        gates = new_table(f"gate ({facts['gate_mode']})", "condition number", "row norms")
        for gate in facts["gates"]:
            name = f"layer {gate['layer']}" + (f" {gate['part']}" if gate["part"] != "mlp" else "")
            condition = "infinite" if gate["condition_number"] is None else f"{gate['condition_number']:.3g}"
            gates.add_row(name, condition, " ".join(f"{norm:.3g}" for norm in gate["row_norms"]))
        parts += [Text(), gates]
    if facts["confusion"]:
        names = [expert["name"] for expert in facts["experts"]]
        table = new_table("held-out tokens of", *(f"to {name}" for name in names))
        for name, shares in zip(names, facts["confusion"], strict=True):
            table.add_row(safe(name), *(f"{share:.1%}" for share in shares))
        parts += [Text(), table]
    return Group(*parts)


def render_tuning(result: dict[str, Any]) -> Group:
    """The result of `tune`: perplexity of each domain's held-out texts before and after."""
    table = new_table("held-out texts", no_wrap=True)
    for column in ("number", "perplexity before", "after", "change"):
        table.add_column(Text(column), justify="right")
    for name, row in result["perplexity"].items():
        change = f"{row['after'] / row['before'] - 1:+.1%}"
        table.add_row(Text(name), f"{row['texts']:,}", f"{row['before']:.2f}", f"{row['after']:.2f}", change)
    trained = f"{result['trained']:,} parameters of the gates trained for {result['steps']} steps in {result['seconds']:.0f} s"
    return Group(table, Text(trained))


def render_evaluation(result: dict[str, Any]) -> Group:
    """The result of `evaluate`: nats per token of base, own expert and mixture on each domain, and what the mixture keeps."""
    table = new_table("domain", no_wrap=True)
    for column in ("texts", "tokens", "base", "expert", "mixture", "against base", "gain kept", "95%"):
        table.add_column(Text(column), justify="right")
    for name, row in result["domains"].items():
        own, kept = row["experts"].get(name), row["kept"]
        shares = (
            (f"{kept['value']:.1%}", " to ".join(f"{bound:.1%}" for bound in kept["interval"])) if kept else ("", "")
        )
        losses = (f"{row['base']:.3f}", "" if own is None else f"{own:.3f}", f"{row['mixture']:.3f}")
        table.add_row(
            safe(name), f"{row['texts']:,}", f"{row['tokens']:,}", *losses, f"{row['change']['value']:+.1%}", *shares
        )
    parts: list[Any] = [table]
    if result["kept"] is not None:
        parts.append(Text(f"The mixture keeps {result['kept']:.1%} of its experts' gain, the mean over their domains."))
    return Group(*parts, *map(Text, unmeasured(result)))


def unmeasured(result: dict[str, Any]) -> list[str]:
    """Why some domains have no gain that could be kept."""
    domains, notes = result["domains"], []
    if strangers := [name for name, row in domains.items() if row["expert"] is None]:
        notes.append(
            f"No expert is called {', '.join(map(repr, strangers))}: such a domain shows only what the mixture loses elsewhere. "
            f"The experts are {', '.join(result['experts'])}."
        )
    notes += [
        f"The expert {name!r} is not better than the base on these texts, so it has gained nothing that could be kept. Are they of its domain?"
        for name, row in domains.items()
        if row["expert"] is not None and row["kept"] is None
    ]
    return notes


def render_routings(routings: Sequence[Routing]) -> Group:
    """For each text one row per router: tokens with the index and colour of their expert, and each expert's share."""
    parts: list[Any] = []
    names = routings[0].names
    legend = Text("experts: ")
    for e, name in enumerate(names):
        legend.append(f" {e} {name} ", style=f"black on {COLOURS[e % len(COLOURS)]}").append(" ")
    for routing in routings:
        table = new_table("router", no_wrap=True)
        table.add_column("tokens and their first experts", overflow="fold")
        for name in names:
            table.add_column(Text(name), justify="right")
        for row, shares in enumerate(routing.load()):
            line = Text()
            for token, expert in zip(routing.tokens, routing.experts[row, :, 0], strict=True):
                index = str(expert).translate(SUBSCRIPTS)
                line.append(printable(token) + index, style=f"black on {COLOURS[expert % len(COLOURS)]}").append(" ")
            table.add_row(routing.routers[row], line, *(f"{share:.2f}" for share in shares))
        parts += [table, Text()]
    return Group(*parts, legend)


def render_clusters(result: dict) -> Group:
    """The result of `cluster`: size and terms of each cluster, and the silhouette."""
    table = new_table("cluster", no_wrap=True)
    table.add_column("rows", justify="right")
    table.add_column("terms", overflow="fold")
    for name, rows, terms in zip(result["names"], result["sizes"], result["terms"], strict=True):
        table.add_row(name, f"{rows:,}", " ".join(terms))
    line = f"{result['rows']:,} rows, {result['dropped']:,} dropped"
    line += f"; silhouette {result['silhouette']:.3f}" if "silhouette" in result else ""
    return Group(table, Text(f"{line}."))
