"""Tables of merging and of merged mixtures."""

import statistics
from collections import Counter

from . import DOCS, load, provenance

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


def speed_rows(record: dict) -> list[dict]:
    """One row per shape, condition and candidate with medians."""
    groups: dict[tuple, list[dict]] = {}
    for row in record["results"]:
        groups.setdefault((row["shape"], row["condition"], row["candidate"]), []).append(row)
    medians = []
    for rows in groups.values():
        fields = {name: statistics.median(row[name] for row in rows) for name in ("seconds", "cpu_seconds")}
        medians.append({**rows[0], **fields, "anonymous_mib": max(row["anonymous_mib"] for row in rows)})
    return medians


def describe_condition(condition: str) -> tuple[str, str]:
    """Where the sources are, and what else the machine does."""
    sources, others = condition.split("-")
    return f"sources {sources}", "idle machine" if others == "quiet" else "one of two cores busy"


def merge_speed() -> str:
    """Time, processor time and memory of composing, relative to copying the same bytes."""
    record = load("merge_speed")
    rows = sorted(
        speed_rows(record),
        key=lambda row: (
            list(SHAPES).index(row["shape"]),
            CONDITIONS.index(row["condition"]),
            list(LABELS).index(row["candidate"]),
        ),
    )
    lines = [
        "| | | seconds | time / plain copy | processor seconds | peak anonymous memory |",
        "| --- |" + " --- |" * 5,
    ]
    known = set()
    for row in rows:
        group = (row["shape"], row["condition"])
        same = [other for other in rows if (other["shape"], other["condition"]) == group]
        floor = next((other["seconds"] for other in same if other["candidate"] == "floor"), None)
        size = next((other["output_bytes"] for other in same if "output_bytes" in other), 0)
        title = f"{SHAPES[row['shape']]}: {row['experts']} experts, {size / 1e9:.2f} GB written; "
        title += ", ".join(describe_condition(row["condition"]))
        ratio = f"{row['seconds'] / floor:.2f}" if floor and row["candidate"] not in ("floor", "check") else ""
        cpu = "" if row["cpu_seconds"] is None else f"{row['cpu_seconds']:.1f}"
        label = LABELS[row["candidate"]].format(version=peer_version(record, row["candidate"]))
        memory = f"{row['anonymous_mib']:,.0f} MiB"
        lines.append(
            f"| {'' if group in known else title} | {label} | {row['seconds']:.1f} | {ratio} | {cpu} | {memory} |"
        )
        known.add(group)
    copies = [row for row in record["results"] if row["candidate"] == "floor"]
    rounds = Counter((SHAPES[row["shape"]], *describe_condition(row["condition"])) for row in copies)
    several = "; ".join(
        f"medians of {count} rounds for {', '.join(name)}" for name, count in rounds.items() if count > 1
    )
    seconds = [row["seconds"] for row in copies]
    note = f"Complete processes: {several}; single rounds otherwise. Cached sources are in the page cache, cold ones are not. "
    note += f"The plain copy took {min(seconds):.1f} to {max(seconds):.1f} s. "
    command = " `python benchmarks/merge_speed.py --work FOLDER --mergekit FOLDER2 --mergoo FOLDER3`"
    return "\n".join([*lines, "", note + provenance(record) + command])


def merge_gates() -> str:
    """Processor time and memory of composing with random gates and with gates from prompts, beside mergekit-moe."""
    record = load("merge_gates")
    groups: dict[tuple, list[dict]] = {}
    for row in record["results"]:
        groups.setdefault((row["shape"], row["candidate"]), []).append(row)
    labels = {
        "base": "`lexperts merge compose`, random gates", "mergekit": "mergekit-moe {version}, random gates",
        "hidden": LABELS["hidden"], "mergekit-hidden": LABELS["mergekit-hidden"],
    }  # fmt: skip
    lines = ["| 4 experts | | processor seconds | peak memory (without mapped files) |", "| --- | --- | --- | --- |"]
    for (shape, candidate), rows in groups.items():
        times = [row["cpu_seconds"] for row in rows]
        spread = f"{statistics.median(times):.1f} ({min(times):.1f} to {max(times):.1f})"
        label = labels[candidate].format(version=record["settings"]["mergekit"]["mergekit"])
        total, anonymous = (max(row[field] for row in rows) for field in ("total_mib", "anonymous_mib"))
        lines.append(f"| {SHAPES[shape]} | {label} | {spread} | {total:,.0f} MiB ({anonymous:,.0f}) |")
    rounds = 1 + max(row["round"] for row in record["results"])
    note = f"User and system time of complete processes, medians (and extremes) of {rounds} rounds, interleaved. "
    note += "Other processes used the machine meanwhile, which lengthens processor time too: compare within a model. "
    note += "Two prompts for each expert. "
    return "\n".join([*lines, "", note + provenance(record) + " `python benchmarks/merge_speed.py --help`"])


def peer_version(record: dict, name: str) -> str:
    """The version of a peer that was measured; empty for others."""
    return (record["settings"].get(name) or {}).get(name, "")


def comparison() -> str:
    """Composing four experts beside mergekit-moe and mergoo: seconds and memory."""
    record = load("merge_speed")
    chosen = [r for r in record["results"] if (r["shape"], r["condition"]) == ("1b", "cached-quiet")]
    rows = speed_rows({"results": chosen})
    by_name = {row["candidate"]: row for row in rows}
    names = {
        "mean": "`lexperts merge compose`, `average: mean`",
        "base": "`lexperts merge compose`, shared weights of the base",
        "mergekit": f"mergekit-moe {peer_version(record, 'mergekit')}, shared weights of the base",
        "mergoo": f"mergoo {peer_version(record, 'mergoo')}, mean, without a router",
    }
    ours, theirs = engines_of_a_llama()
    rounds = 1 + max(row["round"] for row in chosen)
    first, size = by_name["mean"], by_name["base"]["output_bytes"] / 1e9
    lines = [
        f"| {first['experts']} experts of Llama-3.2-1B's shape, {size:.1f} GB written | seconds | peak memory | opens in |",
        "| --- | --- | --- | --- |",
    ]
    for name, label in names.items():
        if (row := by_name.get(name)) is None:
            continue
        opens = {"mergekit": theirs, "mergoo": "not tried"}.get(name, ours)
        single = [r["seconds"] for r in chosen if r["candidate"] == name]
        seconds = f"{row['seconds']:.1f} ({min(single):.1f} to {max(single):.1f})"
        lines.append(f"| {label} | {seconds} | {row['anonymous_mib']:,.0f} MiB | {opens} |")
    where = f"On an idle machine, with the sources in the page cache, medians (and extremes) of {rounds} rounds. "
    return "\n".join([*lines, "", f"{where}[All sizes, compared with copying the files]({DOCS}/results.md#merging)."])


def engines_of_a_llama() -> tuple[str, str]:
    """Where a mixture of Llamas opens and computes the same: ours, and mergekit's with its fused experts."""
    results = load("merge_engines")["results"]
    dense, fused = results["families"]["llama"], results["mergekit"]["llama, embeddings"]
    version = dense["transformers_4"]["version"].rpartition(".")[0]
    in_4 = [dense["transformers_4"]["difference"] < 1e-4, not fused["transformers_4_fused"]["missing"]]
    in_llama_cpp = [dense["llama_cpp"]["equal_tokens"] == 30, fused["llama_cpp_fused"] == "converted"]
    return tuple(
        f"transformers {f'{version} and ' * four}5{', llama.cpp (as GGUF)' * cpp}"
        for four, cpp in zip(in_4, in_llama_cpp, strict=True)
    )


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
        name = name.replace("hidden gates", "`router_input` gates")  # what they were called when the table was measured
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
    note += provenance(record) + " `python benchmarks/merge_means.py --data PATH`"
    return "\n".join([*lines, "", note, "", gain_of_tuning(runs)])


def gain_of_tuning(runs: list[dict]) -> str:
    """How much tuned gates lower the perplexity over all domains, in a sentence."""
    means = {label: statistics.mean(run["perplexity"][label]["all"] for run in runs) for label in runs[0]["perplexity"]}
    gains = {
        label: 100 * (1 - means[f"{label}, gates tuned"] / mean)
        for label, mean in means.items()
        if f"{label}, gates tuned" in means
    }
    of_base = gains.pop("base")
    return (
        f"Tuning the gates lowers the perplexity by {of_base:.0f}% with the base's shared weights, and otherwise by "
        f"{min(gains.values()):.1f} to {max(gains.values()):.1f}%."
    )


def adapter_options() -> str:
    """Which options of peft are accepted, with the largest difference of weights from peft's own merge."""
    record = load("adapter_options")
    lines = ["| option of LoraConfig | largest difference | |", "| --- | --- | --- |"]
    for row in record["results"]:
        gap = row["difference"]
        cell = gap if isinstance(gap, str) else f"{gap:.1g}" if gap else "0"
        lines.append(f"| `{row['case']}` | {cell} | {'accepted' if row['accepted'] else 'refused'} |")
    return "\n".join(
        [*lines, "", f"{provenance(record)} peft {record['versions']['peft']}. `python benchmarks/adapter_options.py`"]
    )
