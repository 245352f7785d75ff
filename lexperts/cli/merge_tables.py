"""The results of `lexperts merge` as text, by the command's result."""

from collections.abc import Iterable, Sequence
from typing import Any

from run_tools.errors import escape

percent = "{:.1%}".format


def table(rows: Iterable[Sequence[Any]]) -> str:
    """Rows with aligned columns; control characters, which would change a terminal, are escaped."""
    cells = [[escape(str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def summary(result: dict[str, Any]) -> str:
    """A finished mixture."""
    content = {
        "format": result["format"],
        "experts": ", ".join(result["experts"]),
        "parameters": f"{result['parameters']:,}, {result['active_parameters']:,} active per token",
        "size": f"{result['bytes'] / 1e9:.3g} GB in {result['tensors']} tensors",
    }
    shown = {"gates": "gate_mode", "average": "average", "pushed to": "pushed_to"}
    return table([*content.items(), *((label, result[key]) for label, key in shown.items() if key in result)])


def mixture(result: dict[str, Any]) -> str:
    """The facts that `inspect` returns."""
    policy, names = result["routing_policy"], [expert["name"] for expert in result["experts"]]
    content = {
        "format": f"{result['format']}, made by {result['made_by']}",
        "policy": f"{policy}, {result['experts_per_token']} experts per token" if policy == "token" else policy,
        "shared": "of the base" if result["average"] == "base" else f"mean of {', '.join(result['shared_from'])}",
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
    tables = [table(content.items()), table([("expert", "source", "licence", "file", "SHA-256"), *files])]
    if result["confusion"]:
        shares = [(name, *map(percent, row)) for name, row in zip(names, result["confusion"], strict=True)]
        tables.append(table([("held-out tokens of", *(f"to {name}" for name in names)), *shares]))
    return "\n\n".join(tables)


def tuning(result: dict[str, Any]) -> str:
    """Perplexity of each domain's held-out texts before and after."""
    rows: list[tuple] = [("held-out texts", "number", "perplexity before", "after", "change")]
    for name, row in result["perplexity"].items():
        before, after = row["before"], row["after"]
        rows.append((name, row["texts"], f"{before:.2f}", f"{after:.2f}", f"{after / before - 1:+.1%}"))
    trained = f"{result['trained']:,} parameters of gates trained for {result['steps']} steps"
    return f"{table(rows)}\n{trained} in {result['seconds']:.0f} s"


def evaluation(result: dict[str, Any]) -> str:
    """Nats per token of base, own expert and mixture on each domain, and what the mixture keeps."""
    rows: list[tuple] = [("domain", "texts", "tokens", "base", "expert", "mixture", "against base", "gain kept", "95%")]
    lines = []
    if result["kept"] is not None:
        kept = percent(result["kept"])
        lines.append(f"The mixture keeps {kept} of its experts' gain, the mean over their domains.")
    for name, row in result["domains"].items():
        own, kept = row["experts"].get(name), row["kept"]
        shares = (percent(kept["value"]), " to ".join(map(percent, kept["interval"]))) if kept else ("", "")
        losses = (f"{row['base']:.3f}", "" if own is None else f"{own:.3f}", f"{row['mixture']:.3f}")
        rows.append((name, row["texts"], row["tokens"], *losses, f"{row['change']['value']:+.1%}", *shares))
        if row["expert"] is None:
            lines.append(f"No expert is called {name!r}: it shows only what the mixture loses elsewhere.")
        elif kept is None:
            lines.append(f"The expert {name!r} is not better than the base on these texts. Are they of its domain?")
    return "\n".join([table(rows), *lines])


def cluster(result: dict[str, Any]) -> str:
    """Size and terms of each cluster."""
    rows = zip(result["names"], result["sizes"], map(" ".join, result["terms"]), strict=True)
    return f"{table([('cluster', 'rows', 'terms'), *rows])}\n{result['rows']:,} rows, {result['dropped']:,} dropped"
