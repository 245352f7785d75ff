"""Tables of the hypernetwork."""

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
    "hypernet, shared weights": "hypernetwork, bidirectional, shared weights",
    "bilstm": "BiLSTM",
    "bilstm, mean": "BiLSTM, mean of states",
    "bilstm, without titles": "BiLSTM, no titles",
    "title-guided": "title-guided",
    "plain": "encoder states unchanged",
}


def hypernet_quality() -> str:
    """Test scores of all tasks and readers."""
    record = load("hypernet_quality")
    runs: dict[tuple, list[dict]] = {}
    for row in record["results"]:
        runs.setdefault((row["task"], row["way"], row["reader"]), []).append(row)
    tests_by_system = {}
    for key, rows in runs.items():  # the rate that is best on validation rows with the first seed
        rate = max((row for row in rows if row["seed"] == 0), key=lambda row: row["validation"])["rate"]
        tests_by_system[key] = [row["test"] for row in rows if row["rate"] == rate]
    settings = {key[:2] for key in tests_by_system}
    settings = sorted(settings, key=lambda setting: (list(TASKS).index(setting[0]), setting[1] != "frozen"))
    readers = [reader for reader in READERS if any(key[2] == reader for key in tests_by_system)]
    lines = [
        "Test scores in percent: means over seeds, with standard deviation and number of seeds in brackets:",
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

    for task, way in settings:
        rows = [tests_by_system.get((task, way, reader)) for reader in readers]
        for score in next(tests for tests in rows if tests)[0]:
            lines.append(f"| {TASKS[task]}, {way} | {score} | {' | '.join(cell(tests, score) for tests in rows)} |")
    command = "`python benchmarks/hypernet_quality.py --data PATH --work FOLDER`"
    return "\n".join([*lines, "", f"{provenance(record)} {command}"])


def hypernet_speed() -> str:
    """Times and memory of the LSTM with generated weights, and of an epoch with cached states."""
    record = load("hypernet_speed")
    parts = {what: [row for row in record["results"] if row["what"] == what] for what in ("layer", "memory", "epoch")}
    lines = [
        "Sixteen texts, N_h 512, N_z 32. Speed-up over the loop, and time relative to one stock LSTM:",
        "",
        "| | N_x | tokens | faster than the loop | time / stock LSTM | including weight generation |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in parts["layer"]:
        shortest = int(row["shortest"] * row["longest"])
        tokens = str(row["longest"]) if row["shortest"] == 1 else f"{shortest} to {row['longest']}"
        lines.append(
            f"| {row['way']} | {row['input_size']} | {tokens} | {row['faster_than_loop']:.1f} | "
            f"{row['slower_than_stock']:.2f} | {row['written_slower_than_stock']:.2f} |"
        )
    lines += [
        "",
        "| peak MiB, 400 tokens | N_x | one text at a time | all texts at each step | including weight generation | stock LSTM | weights + gates |",
    ]
    lines.append("| --- |" + " --- |" * 6)
    candidates = ("by_text", "by_step", "written", "stock")
    peaks = {(row["way"], row["input_size"], row["candidate"]): row for row in parts["memory"]}
    for way, size in dict.fromkeys(key[:2] for key in peaks):
        cells = [f"{peaks[way, size, name]['peak_MiB']:,.0f}" for name in candidates]
        reference = peaks[way, size, "by_text"]
        minimum = f"{reference['weights_MiB']:,.0f} + {reference['gates_MiB']:,.0f}"
        lines.append(f"| {way} | {size} | {' | '.join(cells)} | {minimum} |")
    lines += [
        "",
        "| one epoch, frozen backbone | running the backbone | from cached states | |",
        "| --- | --- | --- | --- |",
    ]
    for row in parts["epoch"]:
        seconds = [row["times"][name]["median_ms"] / 1e3 for name in ("backbone", "kept")]
        size = f"{'2 x ' if row['bidirectional'] else ''}{row['hidden_size']}"
        lines.append(
            f"| {row['backbone']}, {row['windows']} pairs, N_h {size}, N_z {row['meta_size']} | {seconds[0]:.1f} s | "
            f"{seconds[1]:.1f} s | {row['ratio']:.2f}x |"
        )
    return "\n".join([*lines, "", provenance(record) + " `python benchmarks/hypernet_speed.py --data PATH`"])


def hypernet_crf() -> str:
    """Times of the CRF and of two libraries."""
    record = load("hypernet_crf")
    systems = ("ours", "pytorch-crf", "torch-struct")
    lines = [f"| 16 rows of 3 tags | positions | {' | '.join(systems)} |", "| --- | --- |" + " --- |" * len(systems)]
    for row in sorted(record["results"], key=lambda row: ("likelihood", "marginals", "best path").index(row["what"])):
        shortest = int(row["shortest"] * row["longest"])
        positions = str(row["longest"]) if row["shortest"] == 1 else f"{shortest} to {row['longest']}"
        cells = [
            f"{row['times'][name]['median_ms']:.1f} ms ({row['ratios'][name]:.1f}x)"
            if name in row["times"]
            else "not supported"
            for name in systems
        ]
        what = "likelihood and its gradient" if row["what"] == "likelihood" else row["what"]
        lines.append(f"| {what} | {positions} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", provenance(record) + " `python benchmarks/hypernet_crf.py`"])
