"""Tables of keyphrase extraction."""

from statistics import mean, stdev

from . import load, provenance

NAMES = {
    "moe_rnn": "SEKE (MoE+RNN)",
    "vanilla": "vanilla head",
    "moe": "MoE",
    "rnn": "RNN",
    "moe_rnn, uniform": "MoE+RNN, experts initialised like PyTorch's linear layers",
    "moe, uniform": "MoE, experts initialised like PyTorch's linear layers",
}
# the authors' own script with the same backbone, recipe and number of documents, as measured for this project
AUTHORS = {
    "moe_rnn": [(28.4, 33.9), (33.3, 39.4), (36.6, 43.2), (37.5, 43.8)],
    "vanilla": [(0.0, 0.0), (2.2, 2.5), (29.2, 34.9), (32.2, 38.4)],
}


def seke_inspec() -> str:
    """F1 on Inspec after each epoch, by threshold and by most likely labels, and the authors' script."""
    record = load("seke_inspec")
    heads = record["results"]
    epochs = sorted({row["epoch"] for head in heads.values() for row in head["epochs"]})
    lines = [
        "F1@5 / F1@10 (convention `seke`) on Inspec's 500 test documents after each epoch on 1,200 others, MiniLM-L6 with LoRA:",
        "",
        "| | " + " | ".join(f"epoch {epoch}" for epoch in epochs) + " |",
        "| --- |" + " --- |" * len(epochs),
    ]

    def add(name: str, scores: dict[int, tuple[float, float]]):
        cells = ("{:.1f} / {:.1f}".format(*scores[epoch]) if epoch in scores else "" for epoch in epochs)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")

    for head, result in heads.items():
        tuned = {row["epoch"]: (row["threshold_f1@5"], row["threshold_f1@10"]) for row in result["checkpoints"]}
        add(f"{NAMES[head]}, threshold from validation documents", tuned)
        most_likely = {row["epoch"]: (row["test_f1@5"], row["test_f1@10"]) for row in result["epochs"]}
        add(f"{NAMES[head]}, most likely labels", most_likely)
        add(f"the authors' script, {NAMES[head]}", dict(enumerate(AUTHORS.get(head, []), start=1)))
    return "\n".join([*lines, "", provenance(record) + " `python benchmarks/seke_inspec.py --data PATH`"])


def seke_head() -> str:
    """Times of the head's implementations."""
    record = load("seke_head")
    lines = [
        "Implementations of the head, forward and backward, d = 384, in milliseconds:",
        "",
        "| documents x longest (tokens) | experts: loop, dense, sorted | BiLSTM: packed, padded passes | head: plain, ours |",
        "| --- | --- | --- | --- |",
    ]
    sizes = {}
    for row in record["results"]:
        if row["way"] == "forward and backward":
            size = f"{row['documents']} x {row['longest']} ({row['tokens']:,})"
            times = ", ".join(f"{entry['median_ms']:.0f}" for entry in row["times"].values())
            sizes.setdefault(size, []).append(f"{times} ({row['ratio']:.2f}x)")
    lines += [f"| {size} | " + " | ".join(cells) + " |" for size, cells in sizes.items()]
    return "\n".join([*lines, "", provenance(record) + " `python benchmarks/seke_head.py`"])


def seke_speed_cuda() -> str:
    """Cost of the head's parts and of dropout on a GPU."""
    record = load("seke_speed_cuda")
    size = record["settings"]["batch"]
    parts = [row for row in record["results"] if row["what"] == "parts"]
    heads = [name for name in parts[0]["more_percent"] if name != "vanilla"]
    lines = [
        f"| MiniLM-L6, {2 * size} documents | vanilla head | {' | '.join(heads)} |",
        "| --- |" + " --- |" * (len(heads) + 1),
    ]
    for row in parts:
        cells = " | ".join(f"{row['more_percent'][name]:+.0f}%" for name in heads)
        lines.append(f"| {row['way']} | {row['times']['vanilla']['median_ms']:.0f} ms | {cells} |")
    for row in record["results"]:
        if row["what"] == "dropout":
            with_dropout, without = (f"{entry['median_ms']:.0f} ms" for entry in row["times"].values())
            lines += [
                "",
                f"One training step, {size} documents, {row['kind']}: {with_dropout}, without attention dropout {without}.",
            ]
    return "\n".join([*lines, "", provenance(record) + " `python benchmarks/seke_speed.py --data PATH --device cuda`"])


def seke_speed() -> str:
    """Speed and memory of the head, documents per second, and the cost of parts and dropout."""
    record = load("seke_speed")
    names = ("head", "documents", "parts", "dropout")
    parts = {what: [row for row in record["results"] if row["what"] == what] for what in names}
    lines = [
        "| the head, 8 documents | | straightforward, padded to 256 | ours | faster |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in parts["head"]:
        cells = (
            f"{row['times'][name]['median_ms']:.0f} ms, {row['peak_MiB'][name]:,.0f} MiB" for name in ("plain", "ours")
        )
        lines.append(
            f"| {row['width']}, {row['documents']} | {row['way']} | {' | '.join(cells)} | {row['ratio']:.2f}x |"
        )
    lines += [
        "",
        f"| {record['settings']['documents']} documents, texts to keyphrases, MiniLM-L6 | straightforward | ours | faster | ours, without truncation |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in parts["documents"]:
        plain, ours, whole = (f"{row['rate'][name]:.1f} per second" for name in ("plain", "ours", "whole"))
        lines.append(f"| {row['kind']} | {plain} | {ours} | {row['ratio']:.2f}x | {whole} |")
    heads = list(parts["parts"][0]["more_percent"])
    lines += [
        "",
        f"| time added to the vanilla head | {' | '.join(heads[1:])} |",
        "| --- |" + " --- |" * len(heads[1:]),
    ]
    for row in parts["parts"]:
        lines.append(
            f"| {row['way']} | " + " | ".join(f"{row['more_percent'][name]:+.0f}%" for name in heads[1:]) + " |"
        )
    lines += [
        "",
        "| one training step, 8 documents | attention dropout 0.1 | 0 | faster |",
        "| --- | --- | --- | --- |",
    ]
    for row in parts["dropout"]:
        cells = (f"{entry['median_ms']:.0f} ms" for entry in row["times"].values())
        lines.append(f"| MiniLM-L6, {row['kind']} | {' | '.join(cells)} | {row['ratio']:.2f}x |")
    return "\n".join([*lines, "", provenance(record) + " `python benchmarks/seke_speed.py --data PATH`"])


def spread(values: list[float]) -> str:
    """Mean and standard deviation."""
    return f"{mean(values):.1f} ± {stdev(values):.1f}" if len(values) > 1 else f"{values[0]:.1f}"


def seke_quality() -> str:
    """Scores, ranking and calibration on Inspec."""
    record = load("seke_quality")
    systems: dict[str, list[dict]] = {}
    for row in record["results"]:
        systems.setdefault(row["system"], []).append(row)
    order = [*(name for name in NAMES if name in systems), *(name for name in systems if name not in NAMES)]
    names = list(systems[order[0]][0]["test"]["by score"])
    lines = [
        "Inspec's test documents, in percent, means and standard deviations over seeds (`lexperts` and `seke` are rules for matching gold keyphrases):",
        "",
        f"| | seeds | {' | '.join(names)} |",
        "| --- | --- |" + " --- |" * len(names),
    ]
    for system in order:
        rows = systems[system]
        cells = (spread([row["test"]["by score"][name] for row in rows]) for name in names)
        lines.append(f"| {NAMES.get(system, system)} | {len(rows)} | {' | '.join(cells)} |")
    trained = [name for name in order if name in NAMES]
    lines += [
        "",
        "| F1@5, `lexperts` | validation, by score | in text order | test, by score | in text order |",
        "| --- | --- | --- | --- | --- |",
    ]
    for system in trained:
        cells = (
            spread([row[split][way]["F1@5, lexperts"] for row in systems[system]])
            for split in ("validation", "test")
            for way in ("by score", "by place")
        )
        lines.append(f"| {NAMES[system]} | {' | '.join(cells)} |")
    lines += ["", "| calibration error, test | before | after | temperature |", "| --- | --- | --- | --- |"]
    for system in trained:
        rows = [row["calibration"] for row in systems[system]]
        cells = [spread([100 * row[when] for row in rows]) for when in ("before", "after")]
        lines.append(f"| {NAMES[system]} | {' | '.join(cells)} | {mean(row['temperature'] for row in rows):.2f} |")
    command = "`python benchmarks/seke_quality.py --data PATH --work FOLDER`"
    return "\n".join([*lines, "", f"{provenance(record)} {command}"])
