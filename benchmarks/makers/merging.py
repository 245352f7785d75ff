"""Tables of merging and of merged mixtures."""

import statistics
from collections import Counter

from . import DOCS, grouped, load, page, provenance, ratio, table

LABELS = {
    "floor": "a plain copy of the same bytes (`copy_file_range`, fsync)",
    "base": "`lexperts merge compose`, `average: base`",
    "no-verify": "the same with `--no-verify`",
    "mean": "`lexperts merge compose`, `average: mean`",
    "ties": "`lexperts merge compose`, `average: ties`",
    "mergekit": "mergekit-moe {version} (same as `average: base`)",
    "mergoo": "mergoo {version} (a mean, and no router)",
    "check": "`lexperts merge check`",
    "hidden": "`lexperts merge compose`, gates from prompts",
    "mergekit-hidden": "mergekit-moe {version}, gates from prompts",
}
CONDITIONS = ("cached-quiet", "cached-busy", "cold-quiet", "cold-busy")
SHAPES = {
    "smollm2": "SmolLM2-135M",
    "1b": "Llama-3.2-1B's shape",
    "8b-thin": "Llama-3-8B's width, 4 layers",
    "8b-wide": "Llama-3-8B's width, 2 layers",
}


def speed_rows(rows: list[dict]) -> list[dict]:
    """One row per shape, condition and candidate with medians."""
    medians = []
    for found in grouped(rows, "shape", "condition", "candidate").values():
        fields = {name: statistics.median(row[name] for row in found) for name in ("seconds", "cpu_seconds")}
        medians.append({**found[0], **fields, "anonymous_mib": max(row["anonymous_mib"] for row in found)})
    return medians


def describe_condition(condition: str) -> tuple[str, str]:
    """Where the sources are, and what else the machine does."""
    sources, others = condition.split("-")
    return f"sources {sources}", "idle machine" if others == "quiet" else "one of two cores busy"


def merge_speed() -> str:
    """Time, processor time and memory of composing, relative to copying the same bytes."""
    record, lines = load("merge_speed"), []

    def place(row: dict) -> tuple[int, int, int]:
        names = (list(SHAPES), CONDITIONS, list(LABELS))
        return tuple(one.index(row[key]) for one, key in zip(names, ("shape", "condition", "candidate"), strict=True))

    rows = sorted(speed_rows(record["results"]), key=place)
    for (shape, condition), same in grouped(rows, "shape", "condition").items():
        floor = next((row["seconds"] for row in same if row["candidate"] == "floor"), None)
        size = next((row["output_bytes"] for row in same if "output_bytes" in row), 0)
        title = f"{SHAPES[shape]}: {same[0]['experts']} experts, {size / 1e9:.2f} GB written; "
        title += ", ".join(describe_condition(condition))
        for row in same:
            times = f"{row['seconds'] / floor:.2f}" if floor and row["candidate"] not in ("floor", "check") else ""
            label = LABELS[row["candidate"]].format(version=peer_version(record, row["candidate"]))
            cells = (f"{row['seconds']:.1f}", times, f"{row['cpu_seconds']:.1f}", f"{row['anonymous_mib']:,.0f} MiB")
            lines.append((title if row is same[0] else "", label, *cells))
    copies = [row for row in record["results"] if row["candidate"] == "floor"]
    rounds = Counter((SHAPES[row["shape"]], *describe_condition(row["condition"])) for row in copies)
    several = "; ".join(
        f"medians of {count} rounds for {', '.join(name)}" for name, count in rounds.items() if count > 1
    )
    seconds = [row["seconds"] for row in copies]
    note = f"Complete processes: {several}; single rounds otherwise. Cached sources are in the page cache, cold ones are not. "
    note += f"The plain copy took {min(seconds):.1f} to {max(seconds):.1f} s. "
    header = ("", "", "seconds", "time / plain copy", "processor seconds", "peak anonymous memory")
    return page(table(header, lines), record, "merge_speed.py --work FOLDER --mergekit FOLDER2 --mergoo FOLDER3", note)


def merge_gates() -> str:
    """Processor time and memory of composing with random gates and with gates from prompts, beside mergekit-moe."""
    record, lines = load("merge_gates"), []
    labels = {
        "base": "`lexperts merge compose`, random gates", "mergekit": "mergekit-moe {version}, random gates",
        "hidden": LABELS["hidden"], "mergekit-hidden": LABELS["mergekit-hidden"],
    }  # fmt: skip
    for (shape, candidate), rows in grouped(record["results"], "shape", "candidate").items():
        times = [row["cpu_seconds"] for row in rows]
        extremes = f"{statistics.median(times):.1f} ({min(times):.1f} to {max(times):.1f})"
        label = labels[candidate].format(version=record["settings"]["mergekit"]["mergekit"])
        total, anonymous = (max(row[field] for row in rows) for field in ("total_mib", "anonymous_mib"))
        lines.append((SHAPES[shape], label, extremes, f"{total:,.0f} MiB ({anonymous:,.0f})"))
    rounds = 1 + max(row["round"] for row in record["results"])
    note = f"User and system time of complete processes, medians (and extremes) of {rounds} rounds, interleaved. "
    note += "Two prompts for each expert. "
    header = ("4 experts", "", "processor seconds", "peak memory (without mapped files)")
    return page(
        table(header, lines),
        record,
        "merge_speed.py --work FOLDER --mergekit FOLDER2 --name merge_gates --shape smollm2 1b --smollm2 FOLDER4 "
        "--candidates base mergekit hidden mergekit-hidden --conditions cached-quiet --rounds 3",
        note,
    )


def peer_version(record: dict, name: str) -> str:
    """The version of a peer that was measured; empty for others."""
    return (record["settings"].get(name) or {}).get(name, "")


def comparison() -> str:
    """What composing four experts costs, beside mergekit-moe, in a sentence."""
    record = load("merge_speed")
    chosen = [r for r in record["results"] if (r["shape"], r["condition"]) == ("1b", "cached-quiet")]
    ours, theirs = ({row["candidate"]: row for row in speed_rows(chosen)}[name] for name in ("base", "mergekit"))
    costs = [f"{row['seconds']:.0f} s and {row['anonymous_mib']:,.0f} MiB of memory" for row in (ours, theirs)]
    return (
        f"Composing {ours['experts']} experts of Llama-3.2-1B's shape ({ours['output_bytes'] / 1e9:.1f} GB) takes {costs[0]}, by mergekit-moe "
        f"{peer_version(record, 'mergekit')} {costs[1]} ([how measured]({DOCS}/merging_results.md#time-and-memory-of-composing))."
    )


def merge_engines() -> str:
    """What engines compute for the mixtures of every family."""
    record, engines = load("merge_engines"), ("transformers_4", "llama_cpp")

    def cell(row: dict | None) -> str:
        if row is None:
            return ""
        if "difference" not in row:
            return "refused" if "refused" in row else "does not open"
        return f"{row['difference']:.1g}" + (f", {row['equal_tokens']} of 30 tokens" if "equal_tokens" in row else "")

    rows = record["results"]["families"]
    transformers, llama_cpp = (
        next((row[engine]["version"] for row in rows.values() if "version" in row.get(engine, {})), "")
        for engine in engines
    )
    header = ("experts", "composed as", "equal experts and dense model", f"transformers {transformers}")
    lines = (
        (name, f"`{row['class']}`", f"{row['equal_experts']:.1g}", *(cell(row.get(engine)) for engine in engines))
        for name, row in rows.items()
    )
    return page(
        table((*header, f"llama.cpp (llama-cpp-python {llama_cpp})"), lines),
        record,
        "merge_engines.py --transformers4 PYTHON --llama-cpp PYTHON --mergekit PYTHON --converter FILE",
    )


def moe_speed() -> str:
    """Time of mixtures relative to stock models."""
    record, lines = load("moe_speed"), []
    # candidate -> the stock model, and the title
    columns = {
        "ours": ("stock", "token, top 2 / Mixtral"),
        "one domain": ("dense", "one domain / dense"),
        "mixed domains": ("dense", "mixed domains / dense"),
    }
    sizes = grouped(record["results"], "way", "d", "layers", "sequences", "length")
    for (way, d, layers, sequences, length), rows in sorted(
        sizes.items(), key=lambda item: ("prefill", "decode", "training").index(item[0][0])
    ):
        found = {
            name: f"{ratio(row, name, stock):.2f}"
            for row in rows
            for name, (stock, _) in columns.items()
            if name in row["times"]
        }
        lines.append((way, f"{d}, {layers}", f"{sequences} x {length}", *(found.get(name, "") for name in columns)))
    header = ("", "d, layers", "sequences x length", *(title for _, title in columns.values()))
    title = "Time of a mixture of 4 experts relative to the stock model with the same weights (below 1 is faster):"
    return page([title, "", *table(header, lines)], record, "moe_speed.py")


def merge_means() -> str:
    """Perplexity per domain of mixtures by the mean of their shared weights, before and after tuning the gates."""
    record, lines = load("merge_means"), []
    runs = record["results"]
    columns = list(next(iter(runs[0]["perplexity"].values())))
    for label in runs[0]["perplexity"]:
        values = {name: [run["perplexity"][label][name] for run in runs] for name in columns}
        deviation = statistics.stdev(values["all"]) if len(runs) > 1 else 0.0
        lines.append((label, *(f"{statistics.mean(values[name]):.1f}" for name in columns), f"{deviation:.2f}"))
    header = (f"perplexity, mean of {len(runs)} seeds", *columns, "standard deviation of all")
    chosen = {name: ", ".join(str(run["densities"][name]) for run in runs) for name in runs[0]["densities"]}
    note = f"Densities, chosen on validation rows for each seed: {'; '.join(f'{n} {v}' for n, v in chosen.items())}. "
    lines = [page(table(header, lines), record, "merge_means.py --data PATH", note), "", gain_of_tuning(runs)]
    return "\n".join(lines)


def gain_of_tuning(runs: list[dict]) -> str:
    """How much tuned gates lower the perplexity over all domains, in a sentence."""
    means = {label: statistics.mean(run["perplexity"][label]["all"] for run in runs) for label in runs[0]["perplexity"]}
    tuned = {label: means.get(f"{label}, gates tuned") for label in means}
    gains = {label: 100 * (1 - after / means[label]) for label, after in tuned.items() if after}
    of_base = gains.pop("base")
    return (
        f"Tuning the gates lowers the perplexity by {of_base:.0f}% with the base's shared weights, and otherwise by "
        f"{min(gains.values()):.1f} to {max(gains.values()):.1f}%."
    )


def adapter_options() -> str:
    """Which options of peft are accepted, with the largest difference of weights from peft's own merge."""
    record, lines = load("adapter_options"), []
    for row in record["results"]:
        gap = row["difference"]
        cell = gap if isinstance(gap, str) else f"{gap:.1g}" if gap else "0"
        lines.append((f"`{row['case']}`", cell, "accepted" if row["accepted"] else "refused"))
    note = f"{provenance(record)} peft {record['versions']['peft']}. `python benchmarks/adapter_options.py`"
    return "\n".join([*table(("option of LoraConfig", "largest difference", ""), lines), "", note])
