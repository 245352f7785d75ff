"""The results of `lexperts merge` as tables of rich."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from merge_tools.routing import Routing, printable
from run_tools.errors import escape, format_size

COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red", "bright_cyan", "bright_yellow")


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], right: bool = False) -> Table:
    """A table without lines; control characters, which would change a terminal, are escaped."""
    made = Table(box=None, pad_edge=False, header_style="bold", show_header=any(head))
    for number, column in enumerate(head):
        made.add_column(Text(column), justify="right" if right and number else "left", overflow="fold")
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(escape(str(cell))) for cell in row))
    return made


def percent(value: float) -> str:
    """A share as a percentage."""
    return f"{value:.1%}"


def summary_table(result: dict[str, Any]) -> Table:
    """The summary of a finished mixture."""
    content = {
        "format": result["format"],
        "experts": ", ".join(result["experts"]),
        "parameters": f"{result['parameters']:,}, {result['active_parameters']:,} active per token",
        "size": f"{format_size(result['bytes'])} in {result['tensors']} tensors",
    } | ({"pushed to": result["pushed_to"]} if "pushed_to" in result else {})
    return table(("", ""), content.items())


def mixture_tables(facts: dict[str, Any]) -> Group:
    """The result of `inspect`."""
    policy = facts["routing_policy"]
    content = {
        "format": f"{facts['format']}, made by {facts['made_by']}",
        "policy": f"{policy}, {facts['experts_per_token']} experts per token" if policy == "token" else policy,
        "shared weights": "of the base" if facts["average"] == "base" else f"mean of {', '.join(facts['shared_from'])}",
        "size": format_size(facts["bytes"]),
        "gates": facts["gate_mode"],
    }
    if facts["rank"]:
        kept = ", ".join(f"{name} {percent(energy)}" for name, energy in (facts["energies"] or {}).items())
        content["experts"] = f"rank {facts['rank']} over the base's MLPs; energy kept: {kept}"
    rows = [
        (expert["name"], expert["source"], expert.get("license", "not stated"), name, digest[:16])
        for expert in facts["experts"]
        for name, digest in expert["files"].items()
    ]
    parts: list[Any] = [
        table(("", ""), content.items()), Text(), table(("expert", "source", "licence", "file", "SHA-256"), rows),
    ]  # fmt: skip
    if facts["confusion"]:
        names = [expert["name"] for expert in facts["experts"]]
        shares = [(name, *map(percent, row)) for name, row in zip(names, facts["confusion"], strict=True)]
        parts += [Text(), table(("held-out tokens of", *(f"to {name}" for name in names)), shares, right=True)]
    return Group(*parts)


def tuning_table(result: dict[str, Any]) -> Group:
    """The result of `tune`: perplexity of each domain's held-out texts before and after."""
    rows = [
        (name, row["texts"], f"{row['before']:.2f}", f"{row['after']:.2f}", f"{row['after'] / row['before'] - 1:+.1%}")
        for name, row in result["perplexity"].items()
    ]
    trained = (
        f"{result['trained']:,} parameters of gates trained for {result['steps']} steps in {result['seconds']:.0f} s"
    )
    return Group(
        table(("held-out texts", "number", "perplexity before", "after", "change"), rows, right=True), Text(trained)
    )


def evaluation_table(result: dict[str, Any]) -> Group:
    """The result of `evaluate`: nats per token of base, own expert and mixture on each domain, and what the mixture keeps."""
    rows = []
    for name, row in result["domains"].items():
        own, kept = row["experts"].get(name), row["kept"]
        shares = (percent(kept["value"]), " to ".join(map(percent, kept["interval"]))) if kept else ("", "")
        losses = (f"{row['base']:.3f}", "" if own is None else f"{own:.3f}", f"{row['mixture']:.3f}")
        rows.append((name, row["texts"], row["tokens"], *losses, f"{row['change']['value']:+.1%}", *shares))
    head = ("domain", "texts", "tokens", "base", "expert", "mixture", "against base", "gain kept", "95%")
    parts: list[Any] = [table(head, rows, right=True)]
    if result["kept"] is not None:
        parts.append(
            Text(f"The mixture keeps {percent(result['kept'])} of its experts' gain, the mean over their domains.")
        )
    for name, row in result["domains"].items():
        if row["expert"] is None:
            parts.append(Text(f"No expert is called {name!r}: it shows only what the mixture loses elsewhere."))
        elif row["kept"] is None:
            parts.append(
                Text(f"The expert {name!r} is not better than the base on these texts. Are they of its domain?")
            )
    return Group(*parts)


def routing_tables(routings: Sequence[Routing]) -> Group:
    """For each text one row per router: tokens in the colour and with the number of their expert, and each expert's share."""
    names, parts = routings[0].names, list[Any]()
    for routing in routings:
        rows = []
        for row, shares in enumerate(routing.load()):
            line = Text()
            for token, expert in zip(routing.tokens, routing.experts[row, :, 0], strict=True):
                line.append(f"{printable(token)}:{expert}", style=f"black on {COLOURS[expert % len(COLOURS)]}").append(
                    " "
                )
            rows.append((routing.routers[row], line, *(f"{share:.2f}" for share in shares)))
        parts += [table(("router", "tokens and their first experts", *names), rows), Text()]
    legend = Text("experts: ")
    for number, name in enumerate(names):
        legend.append(f" {number} {name} ", style=f"black on {COLOURS[number % len(COLOURS)]}").append(" ")
    return Group(*parts, legend)


def cluster_table(result: dict[str, Any]) -> Group:
    """The result of `cluster`: size and terms of each cluster."""
    rows = zip(result["names"], result["sizes"], map(" ".join, result["terms"]), strict=True)
    more = Text(f"{result['rows']:,} rows, {result['dropped']:,} dropped")
    return Group(table(("cluster", "rows", "terms"), rows), more)
