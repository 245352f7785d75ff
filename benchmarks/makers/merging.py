"""Tables of merging and of merged mixtures."""

import statistics

from . import DOCS, load, provenance


def merge_speed() -> str:
    """Time and memory of composing, relative to copying the same bytes."""
    record = load("merge_speed")
    labels = {
        "floor": "floor: `copy_file_range` and fsync of the same bytes",
        "base": "`lexperts merge compose`, `average: base`",
        "mean": "`lexperts merge compose`, `average: mean`",
        "mergekit": f"mergekit-moe {(record['settings']['mergekit'] or {}).get('mergekit', '')} (same as `average: base`)",
        "check": "`lexperts merge check`",
    }
    names = {"1b": "Llama-3.2-1B's shape", "8b-thin": "Llama-3-8B's width, 4 layers"}
    lines = ["| | | seconds | time / floor | peak anonymous memory |", "| --- | --- | --- | --- | --- |"]
    for shape, result in record["results"].items():
        title = f"{names[shape]}: {result['experts']} experts, {result['output_bytes'] / 1e9:.2f} GB written"
        for name, row in result["candidates"].items():
            ratio = f"{row['times_floor']:.2f}" if "times_floor" in row else ""
            memory = f"{row['peak_anonymous_mib']:,.0f} MiB"
            lines.append(f"| {title} | {labels[name]} | {row['median_seconds']:.1f} | {ratio} | {memory} |")
            title = ""
    rounds = record["settings"]["rounds"]
    note = f"Complete processes, medians of {rounds} interleaved rounds, sources in the page cache. "
    command = " `python benchmarks/merge_speed.py --work FOLDER --mergekit ENVIRONMENT`"
    return "\n".join([*lines, "", note + provenance(record) + command])


def comparison() -> str:
    """Composing four experts beside mergekit-moe: seconds and memory."""
    result = load("merge_speed")["results"]["1b"]
    rows = {
        "mean": "`lexperts merge compose`",
        "base": "the same, shared weights from the base",
        "mergekit": "mergekit-moe 0.1.5, the same",
    }
    opened = {
        "mergekit": "transformers 5"
    }  # its experts are fused; ours have the names of transformers 4, which 5 reads too
    lines = [
        f"| {result['experts']} experts of Llama-3.2-1B's shape, {result['output_bytes'] / 1e9:.1f} GB written | seconds | peak memory | opens in |",
        "| --- | --- | --- | --- |",
    ]
    for name, label in rows.items():
        row = result["candidates"][name]
        memory = f"{row['peak_anonymous_mib']:,.0f} MiB"
        opens = opened.get(name, "transformers 4 and 5")
        lines.append(f"| {label} | {row['median_seconds']:.1f} | {memory} | {opens} |")
    return "\n".join([*lines, "", f"[All sizes, and a plain copy as the floor]({DOCS}/results.md#merging)."])


def merge_engines() -> str:
    """What engines compute for the mixtures of every family."""
    record = load("merge_engines")

    def cell(row: dict | None) -> str:
        if row is None:
            return ""
        if "difference" not in row:
            return "refused" if "refused" in row else "does not open"
        return f"{row['difference']:.1g}" + (f", {row['equal_tokens']} of 30 tokens" if "equal_tokens" in row else "")

    rows = record["results"]["families"]
    versions = {
        engine: next((row[engine]["version"] for row in rows.values() if "version" in row.get(engine, {})), "")
        for engine in ("transformers_4", "llama_cpp")
    }
    lines = [
        "| experts | composed as | equal experts and dense model | "
        f"transformers {versions['transformers_4']} | llama.cpp (llama-cpp-python {versions['llama_cpp']}) |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, row in rows.items():
        engines = " | ".join(cell(row.get(engine)) for engine in ("transformers_4", "llama_cpp"))
        lines.append(f"| {name} | `{row['class']}` | {row['equal_experts']:.1g} | {engines} |")
    return "\n".join([*lines, "", provenance(record) + " `python benchmarks/merge_engines.py --help`"])


def moe_speed() -> str:
    """Time of mixtures relative to stock models."""
    record = load("moe_speed")
    columns = {
        "ours": "token, top 2 / Mixtral",
        "one domain": "one domain / dense",
        "mixed domains": "mixed domains / dense",
    }
    lines = [
        "Time of a mixture of 4 experts relative to the stock model with the same weights (below 1 is faster):",
        "",
        f"| | d, layers | sequences x length | {' | '.join(columns.values())} |",
        "| --- | --- | --- |" + " --- |" * len(columns),
    ]
    table: dict[tuple, dict] = {}
    for row in record["results"]:
        size = (row["way"], f"{row['d']}, {row['layers']}", f"{row['sequences']} x {row['length']}")
        table.setdefault(size, {}).update(row["ratios"])
    for size, ratios in sorted(table.items(), key=lambda item: ("prefill", "decode", "training").index(item[0][0])):
        cells = (f"{ratios[name]:.2f}" if name in ratios else "" for name in columns)
        lines.append(f"| {' | '.join(size)} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", provenance(record) + " `python benchmarks/moe_speed.py`"])


def lexicon_merge() -> str:
    """Perplexity of a merged mixture, its experts and controls."""
    record = load("lexicon_merge")
    rows = record["results"]["perplexity"]
    columns = [name for name in next(iter(rows.values())) if not name.startswith("ratio")]
    lines = [f"| perplexity of held-out definitions | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns)]
    for label, row in rows.items():
        name = label.replace(" a token", " per token").replace(" a row", " per row")
        lines.append(f"| {name} | " + " | ".join(f"{row[name]:.1f}" for name in columns) + " |")
    return "\n".join([*lines, "", provenance(record) + " `python benchmarks/lexicon_merge.py --data PATH`"])


def merge_means() -> str:
    """Perplexity per domain of mixtures by the mean of their shared weights, before and after tuning the gates."""
    record = load("merge_means")
    runs = record["results"]
    columns = list(next(iter(runs[0]["perplexity"].values())))
    lines = [f"| perplexity, mean of {len(runs)} seeds | {' | '.join(columns)} | standard deviation of all |"]
    lines.append("| --- |" + " --- |" * (len(columns) + 1))
    for label in runs[0]["perplexity"]:
        values = {name: [run["perplexity"][label][name] for run in runs] for name in columns}
        cells = [f"{statistics.mean(values[name]):.1f}" for name in columns]
        deviation = statistics.stdev(values["all"]) if len(runs) > 1 else 0.0
        lines.append(f"| {label} | {' | '.join(cells)} | {deviation:.2f} |")
    chosen = {name: ", ".join(str(run["densities"][name]) for run in runs) for name in runs[0]["densities"]}
    note = (
        "Densities, chosen on validation rows for each seed: " + "; ".join(f"{n} {v}" for n, v in chosen.items()) + ". "
    )
    return "\n".join([*lines, "", note + provenance(record) + " `python benchmarks/merge_means.py --data PATH`"])
