"""What the command line shows: findings, mixtures and routings as tables, work as bars."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from .errors import size
from .report import LEVELS, Report, folded
from .routing import Routing, printable
from .writing import Progress

SIGNS = {"ok": ("green", "ok"), "note": ("cyan", "note"), "warning": ("yellow", "warning"), "error": ("red", "error")}
NAMES_SHOWN = 2
COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red", "bright_cyan", "bright_yellow")
SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
PHASES = {
    "read": "reading the sources",
    "write": "writing the mixture",
    "sync": "waiting for the disk",
    "verify": "comparing",
}


class ProgressBars(Progress):
    """A bar a phase, with bytes, speed and time left, on the standard error."""

    def __init__(self, console: Console):
        columns = (TextColumn("{task.description:<20}"), BarColumn(), DownloadColumn())
        self.bars = Bars(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=console, transient=True)
        self.tasks: dict[str, Any] = {}

    def start(self, phase: str, total: int):
        if phase not in PHASES:
            return
        if phase in self.tasks:  # a further file of the same phase
            task = self.bars.tasks[self.tasks[phase]]
            self.bars.update(self.tasks[phase], total=task.total + total)
        else:
            self.tasks[phase] = self.bars.add_task(PHASES[phase], total=total)

    def advance(self, phase: str, count: int):
        if phase in self.tasks:
            self.bars.advance(self.tasks[phase], count)

    def __enter__(self):
        self.bars.start()
        return self

    def __exit__(self, *_):
        self.bars.stop()


def findings(report: Report) -> Table:
    """The preflight as a table, errors last, where the eye is when it ends; what is said of several is said once."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "check", "of", "found"):
        table.add_column(name, overflow="fold")
    for level in LEVELS:
        colour, sign = SIGNS[level]
        for check, subjects, message in folded(report.findings, level):
            table.add_row(Text(sign, style=colour), check, Text(named(subjects, level)), Text(message))
    return table


def named(subjects: list[str], level: str) -> str:
    """All names where something is wrong, the count of many where nothing is."""
    if len(subjects) <= NAMES_SHOWN or level in ("warning", "error"):
        return ", ".join(subjects)
    return f"{len(subjects)} {'sources' if 'base' in subjects else 'experts'}"


def verdict(report: Report) -> Text:
    errors, warnings = len(report.errors), len(report.warnings)
    if errors:
        return Text(f"{errors} error{'s' * (errors > 1)}: nothing can be merged yet.", style="red")
    return Text(
        f"Ready to merge{f', with {warnings} warning' + 's' * (warnings > 1) if warnings else ''}.", style="green"
    )


def summary(numbers: dict[str, Any]) -> Table:
    """What would be, or was, written."""
    return pairs(
        {
            "format": numbers["format"],
            "experts": ", ".join(numbers["experts"]),
            "parameters": f"{numbers['parameters']:,}, {numbers['active_parameters']:,} at work on a token",
            "on disk": f"{size(numbers['bytes'])} in {numbers['tensors']} tensors",
            "to run it": f"{size(numbers['memory_bytes'])} of memory for the weights",
        }
    )


def pairs(content: dict[str, str]) -> Table:
    """Names and what belongs to them; brackets in either are no markup."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, text in content.items():
        table.add_row(Text(name), Text(text))
    return table


def mixture(facts: dict[str, Any]) -> Group:
    """What `inspect` found."""
    policy = facts["routing_policy"]
    top = pairs(
        {
            "format": f"{facts['format']}, made by {facts['made_by']}",
            "routed": f"{', '.join(facts['router_layers'])} in {layers(facts['router_layers_index'])}",
            "policy": f"{policy}, {facts['experts_per_token']} experts a token" if policy == "token" else policy,
            "shared weights": facts["shared"],
            "rope": f"{facts['rope']['rope_type']}, base {facts['rope']['rope_theta']:g}",
            "parameters": f"{facts['parameters']:,}, {facts['active_parameters']:,} at work on a token",
            "on disk": size(facts["bytes"]),
        }
    )
    experts = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("expert", "source", "licence", "file", "sha256"):
        experts.add_column(name, overflow="fold")
    for expert in facts["experts"]:
        for i, file in enumerate(expert["files"]):
            first = (expert["name"], expert["source"], expert.get("license", "not stated")) if i == 0 else ("", "", "")
            experts.add_row(*map(Text, (*first, file["name"], file["sha256"][:16])))
    parts = [top, Text(), experts]
    if facts["gates"]:
        gates = Table(box=None, pad_edge=False, header_style="bold")
        for name in (f"gate ({facts['gate_mode']})", "condition number", "row norms"):
            gates.add_column(name)
        for gate in facts["gates"]:
            name = f"layer {gate['layer']}" + (f" {gate['part']}" if gate["part"] != "mlp" else "")
            condition = "infinite" if gate["condition_number"] is None else f"{gate['condition_number']:.3g}"
            gates.add_row(name, condition, " ".join(f"{norm:.3g}" for norm in gate["row_norms"]))
        parts += [Text(), gates]
    return Group(*parts)


def layers(index: list[int] | None) -> str:
    return "all layers" if index is None else f"layers {', '.join(map(str, index))}"


def routings(many: Sequence[Routing]) -> Group:
    """For each text: a row a router, each token with its expert's number and colour, and the share of every expert."""
    parts: list[Any] = []
    names = many[0].names
    legend = Text("experts: ")
    for e, name in enumerate(names):
        legend.append(f" {e} {name} ", style=f"black on {COLOURS[e % len(COLOURS)]}").append(" ")
    for routing in many:
        table = Table(box=None, pad_edge=False, header_style="bold", title=None)
        table.add_column("router", no_wrap=True)
        table.add_column("tokens, by their first expert", overflow="fold")
        for name in names:
            table.add_column(Text(name), justify="right")
        for row, shares in enumerate(routing.load()):
            line = Text()
            for token, chosen in zip(routing.tokens, routing.experts[row, :, 0], strict=True):
                number = str(chosen).translate(SUBSCRIPTS)
                line.append(printable(token) + number, style=f"black on {COLOURS[chosen % len(COLOURS)]}").append(" ")
            table.add_row(routing.routers[row], line, *(f"{share:.2f}" for share in shares))
        parts += [table, Text()]
    return Group(*parts, legend)


def clusters(found: dict) -> Group:
    """Sizes and words of each cluster, and how far apart they lie."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("cluster", no_wrap=True)
    table.add_column("rows", justify="right")
    table.add_column("words", overflow="fold")
    for name, rows, terms in zip(found["names"], found["sizes"], found["terms"], strict=True):
        table.add_row(name, f"{rows:,}", " ".join(terms))
    said = [f"{found['rows']:,} rows; {found['dropped']:,} dropped; in {found['absent']:,} the context lacks the term."]
    if "silhouette" in found:
        said.append(
            f"Silhouette {found['silhouette']:.3f}, Calinski-Harabasz {found['calinski_harabasz']:,.1f}; "
            f"{found['nearest']:.1%} of the rows are nearest to their own centroid."
        )
    return Group(table, *map(Text, said))
