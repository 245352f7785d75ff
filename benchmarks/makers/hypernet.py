"""Tables of the hypernetwork."""

from statistics import mean, stdev

from . import grouped, load, milliseconds, page, ratio, rows_of, table

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
    tests = {}
    for key, rows in grouped(record["results"], "task", "way", "reader").items():
        # the rate that is best on validation rows with the first seed
        rate = max((row for row in rows if row["seed"] == 0), key=lambda row: row["validation"])["rate"]
        tests[key] = [row["test"] for row in rows if row["rate"] == rate]
    readers = [reader for reader in READERS if any(key[2] == reader for key in tests)]

    def cell(found: list[dict] | None, score: str) -> str:
        if not found:
            return ""
        values = [test[score] for test in found]
        return f"{mean(values):.1f}" + (f" (± {stdev(values):.1f}, {len(values)})" if len(values) > 1 else " (1)")

    lines = []
    for task, title in TASKS.items():
        for way in ("frozen", "fine-tuned"):
            found = [tests.get((task, way, reader)) for reader in readers]
            for score in next((of_reader for of_reader in found if of_reader), [[]])[0]:
                lines.append((f"{title}, {way}", score, *(cell(of_reader, score) for of_reader in found)))
    title = "Test scores in percent: means over seeds, with standard deviation and number of seeds in brackets:"
    header = ("", "score", *(READERS[reader] for reader in readers))
    return page([title, "", *table(header, lines)], record, "hypernet_quality.py --data PATH --work FOLDER")


def lengths_of(row: dict) -> str:
    """The lengths of a row's texts."""
    return (
        str(row["longest"]) if row["shortest"] == 1 else f"{int(row['shortest'] * row['longest'])} to {row['longest']}"
    )


def hypernet_speed() -> str:
    """Times and memory of the LSTM with generated weights, and of an epoch with cached states."""
    record = load("hypernet_speed")
    pairs = (("loop", "by_text"), ("by_text", "stock"), ("written", "stock"))
    layer = []
    for row in rows_of(record, "layer"):
        faster, slower, written = (ratio(row, *pair) for pair in pairs)
        cells = (f"{faster:.1f}", f"{slower:.2f}", f"{written:.2f}")
        layer.append((row["way"], row["input_size"], lengths_of(row), *cells))
    memory = []
    for (way, size), rows in grouped(rows_of(record, "memory"), "way", "input_size").items():
        peaks = {row["candidate"]: f"{row['peak_MiB']:,.0f}" for row in rows}
        minimum = f"{rows[0]['weights_MiB']:,.0f} + {rows[0]['gates_MiB']:,.0f}"
        cells = (peaks[name] for name in ("by_text", "by_step", "written", "stock"))
        memory.append((way, size, *cells, minimum))
    epoch = []
    for row in rows_of(record, "epoch"):
        seconds = (f"{time / 1e3:.1f} s" for time in milliseconds(row, "backbone", "kept"))
        size = f"{'2 x ' if row['bidirectional'] else ''}{row['hidden_size']}"
        name = f"{row['backbone']}, {row['windows']} pairs, N_h {size}, N_z {row['meta_embedding_size']}"
        epoch.append((name, *seconds, f"{ratio(row, 'backbone', 'kept'):.2f}x"))
    header = (
        "peak MiB, 400 tokens",
        "N_x",
        "one text at a time",
        "all texts at each step",
        "including weight generation",
        "stock LSTM",
    )
    lines = [
        "Sixteen texts, N_h 512, N_z 32. Speed-up over the loop, and time relative to one stock LSTM:",
        "",
        *table(
            ("", "N_x", "tokens", "faster than the loop", "time / stock LSTM", "including weight generation"), layer
        ),
        "",
        *table((*header, "weights + gates"), memory),
        "",
        *table(("one epoch, frozen backbone", "running the backbone", "from cached states", ""), epoch),
    ]
    return page(lines, record, "hypernet_speed.py --data PATH")


def hypernet_crf() -> str:
    """Times of the CRF and of two libraries."""
    record, systems, lines = load("hypernet_crf"), ("ours", "pytorch-crf", "torch-struct"), []
    for what in ("likelihood", "marginals", "best path"):
        for row in rows_of(record, what):
            cells = (
                f"{milliseconds(row, name)[0]:.1f} ms ({ratio(row, name, 'ours'):.1f}x)" if name in row["times"] else "not supported"
                for name in systems
            )  # fmt: skip
            lines.append(("likelihood and its gradient" if what == "likelihood" else what, lengths_of(row), *cells))
    return page(table(("16 rows of 3 tags", "positions", *systems), lines), record, "hypernet_crf.py")
