"""Merging experts, and the mixtures that come of it."""

from . import load, provenance


def merge_speed() -> str:
    record = load("merge_speed")
    labels = {
        "floor": "floor: `copy_file_range` and fsync of the bytes to be written",
        "base": "merge-experts, `average: base`",
        "mean": "merge-experts, `average: mean`",
        "mergekit": f"mergekit-moe {(record['settings']['mergekit'] or {}).get('mergekit', '')} (what `average: base` does)",
        "check": "merge-experts check",
    }
    names = {"1b": "Llama-3.2-1B's shape", "8b-thin": "Llama-3-8B's width, 4 layers"}
    lines = ["| | | seconds | times the floor | peak anonymous memory |", "| --- | --- | --- | --- | --- |"]
    for shape, found in record["results"].items():
        what = f"{names[shape]}: {found['experts']} experts, {found['output_bytes'] / 1e9:.2f} GB written"
        for name, row in found["candidates"].items():
            ratio = f"{row['times_floor']:.2f}" if "times_floor" in row else ""
            memory = f"{row['peak_anonymous_mib']:,.0f} MiB"
            lines.append(f"| {what} | {labels[name]} | {row['median_seconds']:.1f} | {ratio} | {memory} |")
            what = ""
    rounds = record["settings"]["rounds"]
    told = f"Whole processes, medians of {rounds} interleaved rounds, sources in the page cache. "
    command = " `python benchmarks/merge_speed.py --work FOLDER --mergekit ENVIRONMENT`"
    return "\n".join([*lines, "", told + provenance(record) + command])


def moe_speed() -> str:
    record = load("moe_speed")
    columns = {
        "ours": "token, top 2, to Mixtral",
        "one domain": "one domain, to dense",
        "mixed domains": "mixed domains, to dense",
    }
    lines = [
        "Time of a mixture of 4 experts over that of the stock model with the same weights (below 1 is faster):",
        "",
        f"| | d, layers | sequences x length | {' | '.join(columns.values())} |",
        "| --- | --- | --- |" + " --- |" * len(columns),
    ]
    table: dict[tuple, dict] = {}
    for row in record["results"]:
        place = (row["way"], f"{row['d']}, {row['layers']}", f"{row['sequences']} x {row['length']}")
        table.setdefault(place, {}).update(row["ratios"])
    for place, ratios in sorted(table.items(), key=lambda item: ("prefill", "decode", "training").index(item[0][0])):
        cells = (f"{ratios[name]:.2f}" if name in ratios else "" for name in columns)
        lines.append(f"| {' | '.join(place)} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", provenance(record) + " `python benchmarks/moe_speed.py`"])


def lexicon_merge() -> str:
    record = load("lexicon_merge")
    rows = record["results"]["perplexity"]
    columns = [name for name in next(iter(rows.values())) if not name.startswith("ratio")]
    lines = [f"| perplexity of held-out definitions | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns)]
    for label, row in rows.items():
        lines.append(f"| {label} | " + " | ".join(f"{row[name]:.1f}" for name in columns) + " |")
    return "\n".join([*lines, "", provenance(record) + " `python benchmarks/lexicon_merge.py --data PATH`"])
