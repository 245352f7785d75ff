"""Hypernetworks."""

from statistics import mean, stdev

from . import load, provenance

TASKS = {
    "inspec": "Inspec",
    "ag_news": "AG News",
    "bbc_news": "BBC News",
    "squad_v1": "SQuAD 1.1",
    "squad_v2": "SQuAD 2.0",
}
READERS = {
    "hypernet": "hypernetwork",
    "hypernet, mean": "hypernetwork, mean of states",
    "hypernet, shared weights": "both ways, shared weights",
    "bilstm": "BiLSTM",
    "bilstm, mean": "BiLSTM, mean of states",
    "bilstm, without titles": "BiLSTM, no titles",
    "title-guided": "title-guided",
    "plain": "the states as they are",
}


def hypernet_quality() -> str:
    record = load("hypernet_quality")
    runs: dict[tuple, list[dict]] = {}
    for row in record["results"]:
        runs.setdefault((row["task"], row["way"], row["reader"]), []).append(row)
    found = {}
    for key, rows in runs.items():  # of the rates that the first seed tried, the one that did best on validation rows
        rate = max((row for row in rows if row["seed"] == 0), key=lambda row: row["validation"])["rate"]
        found[key] = [row["test"] for row in rows if row["rate"] == rate]
    places = sorted({key[:2] for key in found}, key=lambda place: (list(TASKS).index(place[0]), place[1] != "frozen"))
    readers = [reader for reader in READERS if any(key[2] == reader for key in found)]
    lines = [
        "Test scores in per cent, means over seeds, their standard deviation and number in brackets:",
        "",
        f"| | score | {' | '.join(READERS[reader] for reader in readers)} |",
        "| --- | --- |" + " --- |" * len(readers),
    ]

    def cell(tests: list[dict] | None, score: str) -> str:
        if not tests:
            return ""
        values = [test[score] for test in tests]
        spread = f" (± {stdev(values):.1f}, {len(values)})" if len(values) > 1 else " (1)"
        return f"{mean(values):.1f}{spread}"

    for task, way in places:
        rows = [found.get((task, way, reader)) for reader in readers]
        for score in next(tests for tests in rows if tests)[0]:
            lines.append(f"| {TASKS[task]}, {way} | {score} | {' | '.join(cell(tests, score) for tests in rows)} |")
    command = "`python benchmarks/hypernet_quality.py --data PATH --work FOLDER`"
    return "\n".join([*lines, "", f"{provenance(record)} {command}"])


def hypernet_speed() -> str:
    record = load("hypernet_speed")
    of = {what: [row for row in record["results"] if row["what"] == what] for what in ("layer", "memory", "epoch")}
    lines = [
        "Sixteen texts, N_h 512, N_z 32; the loop's time over the layer's, and the layer's over that of one stock LSTM:",
        "",
        "| | N_x | tokens | over the loop | of the stock LSTM | with the writing of the weights |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in of["layer"]:
        shortest = int(row["shortest"] * row["longest"])
        tokens = str(row["longest"]) if row["shortest"] == 1 else f"{shortest} to {row['longest']}"
        lines.append(
            f"| {row['way']} | {row['input_size']} | {tokens} | {row['faster_than_loop']:.1f} | "
            f"{row['slower_than_stock']:.2f} | {row['written_slower_than_stock']:.2f} |"
        )
    lines += [
        "",
        "| peak MiB, 400 tokens | N_x | by text | by step | with the writing | stock LSTM | weights + gates |",
    ]
    lines.append("| --- |" + " --- |" * 6)
    candidates = ("by_text", "by_step", "written", "stock")
    peaks = {(row["way"], row["input_size"], row["candidate"]): row for row in of["memory"]}
    for way, size in dict.fromkeys(key[:2] for key in peaks):
        cells = [f"{peaks[way, size, name]['peak_MiB']:,.0f}" for name in candidates]
        of_both = peaks[way, size, "by_text"]
        parts = f"{of_both['weights_MiB']:,.0f} + {of_both['gates_MiB']:,.0f}"
        lines.append(f"| {way} | {size} | {' | '.join(cells)} | {parts} |")
    lines += [
        "",
        "| an epoch, frozen backbone | with the backbone | from kept states | |",
        "| --- | --- | --- | --- |",
    ]
    for row in of["epoch"]:
        seconds = [row["times"][name]["median_ms"] / 1e3 for name in ("backbone", "kept")]
        size = f"{'2 x ' if row['bidirectional'] else ''}{row['hidden_size']}"
        lines.append(
            f"| {row['backbone']}, {row['windows']} pairs, N_h {size}, N_z {row['meta_size']} | {seconds[0]:.1f} s | "
            f"{seconds[1]:.1f} s | {row['ratio']:.2f}x |"
        )
    return "\n".join([*lines, "", provenance(record) + " `python benchmarks/hypernet_speed.py --data PATH`"])


def hypernet_crf() -> str:
    record = load("hypernet_crf")
    systems = ("ours", "pytorch-crf", "torch-struct")
    lines = [f"| 16 rows of 3 tags | positions | {' | '.join(systems)} |", "| --- | --- |" + " --- |" * len(systems)]
    for row in sorted(record["results"], key=lambda row: ("likelihood", "marginals", "best path").index(row["what"])):
        shortest = int(row["shortest"] * row["longest"])
        positions = str(row["longest"]) if row["shortest"] == 1 else f"{shortest} to {row['longest']}"
        cells = [
            f"{row['times'][name]['median_ms']:.1f} ms ({row['ratios'][name]:.1f}x)"
            if name in row["times"]
            else "has none"
            for name in systems
        ]
        what = "likelihood and its gradient" if row["what"] == "likelihood" else row["what"]
        lines.append(f"| {what} | {positions} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", provenance(record) + " `python benchmarks/hypernet_crf.py`"])
