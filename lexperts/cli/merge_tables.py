"""The results of `lexperts merge` as tables of rich, by the command's result."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from merge_tools.routing import printable
from run_tools.errors import escape

percent = "{:.1%}".format
COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red", "bright_cyan", "bright_yellow")


def columns(head: Sequence[str], rows: Iterable[Sequence[Any]], right: bool = False) -> Table:
    """A table without lines; control characters, which would change a terminal, are escaped."""
    made = Table(box=None, pad_edge=False, header_style="bold", show_header=any(head))
    for number, name in enumerate(head):
        made.add_column(Text(name), justify="right" if right and number else "left", overflow="fold")
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(escape(str(cell))) for cell in row))
    return made


def summary(result: dict[str, Any]) -> Table:
    """A finished mixture."""
    content = {
        "format": result["format"],
        "experts": ", ".join(result["experts"]),
        "parameters": f"{result['parameters']:,}, {result['active_parameters']:,} active per token",
        "size": f"{result['bytes'] / 1e9:.3g} GB in {result['tensors']} tensors",
    } | ({"pushed to": result["pushed_to"]} if "pushed_to" in result else {})
    return columns(("", ""), content.items())


def mixture(result: dict[str, Any]) -> Group:
    """The facts that `inspect` returns."""
    policy = result["routing_policy"]
    shared = "of the base" if result["average"] == "base" else f"mean of {', '.join(result['shared_from'])}"
    content = {
        "format": f"{result['format']}, made by {result['made_by']}",
        "policy": f"{policy}, {result['experts_per_token']} experts per token" if policy == "token" else policy,
        "shared weights": shared,
        "size": f"{result['bytes'] / 1e9:.3g} GB",
        "gates": result["gate_mode"],
    }
    if result["rank"]:
        kept = ", ".join(f"{name} {percent(energy)}" for name, energy in (result["energies"] or {}).items())
        content["experts"] = f"rank {result['rank']} over the base's MLPs; energy kept: {kept}"
    files = [
        (expert["name"], expert["source"], expert.get("license", "not stated"), name, digest[:16])
        for expert in result["experts"]
        for name, digest in expert["files"].items()
    ]
    parts = [columns(("", ""), content.items()), columns(("expert", "source", "licence", "file", "SHA-256"), files)]
    if result["confusion"]:
        names = [expert["name"] for expert in result["experts"]]
        shares = [(name, *map(percent, row)) for name, row in zip(names, result["confusion"], strict=True)]
        parts += [columns(("held-out tokens of", *(f"to {name}" for name in names)), shares, right=True)]
    return Group(*(part for table in parts for part in (table, Text())))


def tuning(result: dict[str, Any]) -> Group:
    """Perplexity of each domain's held-out texts before and after."""
    rows = [
        (name, row["texts"], f"{row['before']:.2f}", f"{row['after']:.2f}", f"{row['after'] / row['before'] - 1:+.1%}")
        for name, row in result["perplexity"].items()
    ]
    trained = f"{result['trained']:,} parameters of gates trained for {result['steps']} steps"
    head = ("held-out texts", "number", "perplexity before", "after", "change")
    return Group(columns(head, rows, right=True), Text(f"{trained} in {result['seconds']:.0f} s"))


def evaluation(result: dict[str, Any]) -> Group:
    """Nats per token of base, own expert and mixture on each domain, and what the mixture keeps."""
    rows, lines = [], []
    for name, row in result["domains"].items():
        own, kept = row["experts"].get(name), row["kept"]
        shares = (percent(kept["value"]), " to ".join(map(percent, kept["interval"]))) if kept else ("", "")
        losses = (f"{row['base']:.3f}", "" if own is None else f"{own:.3f}", f"{row['mixture']:.3f}")
        rows.append((name, row["texts"], row["tokens"], *losses, f"{row['change']['value']:+.1%}", *shares))
        if row["expert"] is None:
            lines.append(f"No expert is called {name!r}: it shows only what the mixture loses elsewhere.")
        elif row["kept"] is None:
            lines.append(f"The expert {name!r} is not better than the base on these texts. Are they of its domain?")
    if result["kept"] is not None:
        lines.insert(
            0, f"The mixture keeps {percent(result['kept'])} of its experts' gain, the mean over their domains."
        )
    head = ("domain", "texts", "tokens", "base", "expert", "mixture", "against base", "gain kept", "95%")
    return Group(columns(head, rows, right=True), *map(Text, lines))


def routing(result: dict[str, Any]) -> Group:
    """For each text a row per router: tokens in the colour and with the number of their expert, and each expert's share."""

    def coloured(texts: Iterable[tuple[str, int]]) -> Text:
        line = Text()
        for text, expert in texts:
            line.append(text, style=f"black on {COLOURS[expert % len(COLOURS)]}").append(" ")
        return line

    parts = []
    for own in result["texts"]:
        rows = []
        for router, experts, shares in zip(own["routers"], own["experts"], own["load"], strict=True):
            pairs = zip(own["tokens"], experts, strict=True)
            line = coloured((f"{printable(token)}:{first}", first) for token, (first, *_) in pairs)
            rows.append((router, line, *(f"{share:.2f}" for share in shares)))
        parts += [columns(("router", "tokens and their first experts", *result["experts"]), rows)]
    legend = coloured((f" {number} {name} ", number) for number, name in enumerate(result["experts"]))
    return Group(*parts, Text("experts: ") + legend)


def cluster(result: dict[str, Any]) -> Group:
    """Size and terms of each cluster."""
    rows = zip(result["names"], result["sizes"], map(" ".join, result["terms"]), strict=True)
    more = f"{result['rows']:,} rows, {result['dropped']:,} dropped"
    return Group(columns(("cluster", "rows", "terms"), rows), Text(more))
