"""Tables of MoeSumm's benchmarks."""

from . import load, provenance

SYSTEMS = {
    "moesumm": "MoeSumm",
    "mix": "backbone, on the mix",
    "mix twice as long": "backbone, on the mix, twice as long",
    "single": "backbone, on one data set (out of domain: news)",
    "flat_moe": "FlatMoE",
    "no_dataset": "MoeSumm without dataset information",
    "no_margin": "MoeSumm without the margin loss",
    "random start": "MoeSumm, deputies that start at random",
    "all weights": "MoeSumm, all weights trained in few-shot",
    "authors' settings": "MoeSumm, trained as in the authors' code",
    "margin of the last layer": "MoeSumm, the margin compares with the last layer's main expert",
}


OLD_NAMES = {"dense": "batched_mm", "grouped": "grouped_mm", "loop": "eager"}  # in older records


def implementations(record: dict) -> list[str]:
    """The implementations of a record, under the names that it uses."""
    names = dict.fromkeys(name for row in record["results"] for name in row.get("ratios", {}))
    return [name for name in names if name in OLD_NAMES or name in OLD_NAMES.values()]


def moesumm_speed() -> str:
    record = load("moesumm_speed")
    columns = {"main only": "main only", "auto": "auto"} | {
        name: OLD_NAMES.get(name, name) for name in implementations(record)
    }
    lines = [
        "Time of a BART with deputies of 512 relative to the stock BART with the same weights:",
        "",
        f"| | shape | deputies | {' | '.join(columns.values())} | margin loss, to a step without |",
        "| --- | --- | --- |" + " --- |" * (len(columns) + 1),
    ]
    names = {
        "forward": "forward",
        "generation": f"generation, beam {record['settings']['beams']}",
        "training": "training",
    }
    memory = [row for row in record["results"] if row["what"] == "memory"]
    timed = [row for row in record["results"] if row["what"] != "memory"]
    rows = sorted(timed, key=lambda row: list(names).index(row["what"]))
    for row in rows:
        cells = [f"{row['ratios'][name]:.2f}" if name in row["ratios"] else "" for name in columns]
        cells.append(f"{row['margin_ratio']:.2f}" if "margin_ratio" in row else "")
        lines.append(f"| {names[row['what']]} | {row['shape']} | {row['deputies']} | {' | '.join(cells)} |")
    lines += [
        "",
        "| peak MiB besides parameters and gradients | shape | stock | main only | 3 deputies | with the margin loss |",
    ]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for row in memory:
        peaks = row["peak_mib"]
        cells = [
            f"{peaks[name]:,.0f}" if name in peaks else ""
            for name in ("stock", "main only", "auto", "auto, margin loss")
        ]
        lines.append(f"| {names[row['way']]} | {row['shape']} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", provenance(record) + " `python benchmarks/moesumm_speed.py`"])


def moesumm_quality() -> str:
    return quality(
        "moesumm_quality",
        "from the backbone on the\nmix",
        "`python benchmarks/moesumm_quality.py --data PATH --work FOLDER`",
    )


def moesumm_authors() -> str:
    command = (
        "`python benchmarks/moesumm_quality.py ... --name moesumm_authors` (the whole command is in its first lines)"
    )
    return quality("moesumm_authors", "from MoeSumm with\nits defaults", command)


def quality(name: str, difference: str, command: str) -> str:
    """The table of a record of moesumm_quality.py; `difference` names the baseline in its caption."""
    record = load(name)
    settings = {result["setting"]: result for result in record["results"]}
    systems = list(dict.fromkeys(row["system"] for result in settings.values() for row in result["scores"]))
    lines = [
        f"Mean of ROUGE-1, -2 and -L (F1, stemmed) over three data sets; in brackets the difference {difference} with its 95 "
        "per cent interval over documents, and in how many runs it has this sign:",
        "",
        f"| | {' | '.join(settings)} |",
        "| --- |" + " --- |" * len(settings),
    ]

    def of_all(rows: list[dict], system: str) -> dict:
        return next((row for row in rows if row["system"] == system and row["data set"] == "mean of all"), {})

    for system in systems:
        cells = []
        for result in settings.values():
            score, test = of_all(result["scores"], system), of_all(result["tests"], system)
            cell = f"{score['mean R']:.2f}" if score else ""
            if test:
                cell += f" ({test['difference']:+.2f}, {test['low']:+.2f} to {test['high']:+.2f}; {test['agree']})"
            cells.append(cell)
        lines.append(f"| {SYSTEMS.get(system, system)} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{provenance(record)} {command}"])
