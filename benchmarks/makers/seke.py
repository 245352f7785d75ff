"""Tables of keyphrase extraction."""

from statistics import mean

from by_document import difference

from . import grouped, load, milliseconds, page, ratio, rows_of, spread, table
from .peers import SETS, f1

NAMES = {
    "moe_rnn": "SEKE (MoE+RNN)",
    "vanilla": "vanilla head",
    "moe": "MoE",
    "rnn": "RNN",
    "moe_rnn, uniform": "MoE+RNN, experts initialised like PyTorch's linear layers",
    "moe, uniform": "MoE, experts initialised like PyTorch's linear layers",
    "KeyBERT": "KeyBERT, n-grams of one to three words",
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
    rows = []
    for head, result in heads.items():
        tuned = {row["epoch"]: (row["threshold_f1@5"], row["threshold_f1@10"]) for row in result["checkpoints"]}
        most_likely = {row["epoch"]: (row["test_f1@5"], row["test_f1@10"]) for row in result["epochs"]}
        for name, scores in (
            (f"{NAMES[head]}, threshold from validation documents", tuned),
            (f"{NAMES[head]}, most likely labels", most_likely),
            (f"the authors' script, {NAMES[head]}", dict(enumerate(AUTHORS.get(head, []), start=1))),
        ):
            rows.append((name, *("{:.1f} / {:.1f}".format(*scores[e]) if e in scores else "" for e in epochs)))
    title = "F1@5 / F1@10 (convention `seke`) on Inspec's 500 test documents after each epoch on 1,200 others, MiniLM-L6 with LoRA:"
    lines = [title, "", *table(("", *(f"epoch {epoch}" for epoch in epochs)), rows)]
    return page(lines, record, "seke_inspec.py --data PATH")


def backbones() -> str:
    """F1 of the same recipe over a small and a large backbone, and what the large one costs."""
    record = load("seke_backbones")
    small, large = "MiniLM-L6", "all-mpnet-base-v2"
    found = grouped((row for row in record["results"] if "set" in row), "backbone", "set")
    rows = []
    for name, text in SETS.items():
        ours, theirs = found[large, name], found[small, name]
        by_seed = [
            difference(one["by_document"], other["by_document"], 5) for one, other in zip(ours, theirs, strict=True)
        ]
        gains = ("{:+.1f} [{:.1f}, {:.1f}]".format(*(100 * value for value in gain[:3])) for gain in by_seed)
        scores = (", ".join(f1(row["seke"]) for row in of) for of in (theirs, ours))
        rows.append((text, f"{ours[0]['documents']:,}", *scores, ", ".join(gains)))
    speed = next(row for row in record["results"] if row.get("what") == "speed")
    ms, parameters = speed["ms_per_abstract"], speed["parameters"]
    title = (
        f"F1@5 / F1@10 in per cent (rules `seke`), without a style, of two seeds each, and the gain in F1@5 of each seed. {large} has "
        f"{parameters[large] / 1e6:.0f} million parameters and needs {ms[large]:.0f} ms per abstract on one thread, {small} "
        f"{parameters[small] / 1e6:.0f} million and {ms[small]:.0f} ms: {ms[large] / ms[small]:.1f} times the time. Both backbones were "
        "rounded to float16 before training."
    )
    header = ("set", "first documents", small, large, "gain")
    return page([title, "", *table(header, rows)], record, "seke_backbones.py --data PATH --work FOLDER --mpnet FOLDER")


def seke_head() -> str:
    """Times of the head's implementations."""
    record = load("seke_head")
    sizes: dict[str, list[str]] = {}
    for row in record["results"]:
        if row["way"] == "forward and backward":
            size = f"{row['documents']} x {row['longest']} ({row['tokens']:,})"
            times = milliseconds(row)
            cell = f"{', '.join(f'{time:.0f}' for time in times)} ({times[0] / times[-1]:.2f}x)"
            sizes.setdefault(size, []).append(cell)
    header = (
        "documents x longest (tokens)",
        "experts: loop, dense, sorted",
        "BiLSTM: packed, padded passes",
        "head: plain, ours",
    )
    lines = ["Implementations of the head, forward and backward, d = 384, in milliseconds:", ""]
    return page([*lines, *table(header, ((size, *cells) for size, cells in sizes.items()))], record, "seke_head.py")


def added_time(row: dict, heads: list[str]) -> list[str]:
    """What parts of the head add to the time of the vanilla head."""
    return [f"{100 * (ratio(row, name, 'vanilla') - 1):+.0f}%" for name in heads]


def seke_speed_cuda() -> str:
    """Cost of the head's parts and of dropout on a GPU."""
    record = load("seke_speed_cuda")
    size, parts = record["settings"]["batch"], rows_of(record, "parts")
    heads = [name for name in parts[0]["times"] if name != "vanilla"]
    rows = ((row["way"], f"{milliseconds(row, 'vanilla')[0]:.0f} ms", *added_time(row, heads)) for row in parts)
    lines = table((f"MiniLM-L6, {2 * size} documents", "vanilla head", *heads), rows)
    for row in rows_of(record, "dropout"):
        times = " ms, without attention dropout ".join(f"{time:.0f}" for time in milliseconds(row))
        lines += ["", f"One training step, {size} documents, {row['kind']}: {times} ms."]
    return page(lines, record, "seke_speed.py --data PATH --device cuda")


def seke_speed() -> str:
    """Speed and memory of the head, documents per second, and the cost of parts and dropout."""
    record = load("seke_speed")
    heads = []
    for row in rows_of(record, "head"):
        cells = (f"{milliseconds(row, n)[0]:.0f} ms, {row['peak_MiB'][n]:,.0f} MiB" for n in ("plain", "ours"))
        heads.append((f"{row['width']}, {row['documents']}", row["way"], *cells, f"{ratio(row, 'plain', 'ours'):.2f}x"))
    documents = []
    for row in rows_of(record, "documents"):
        plain, ours, whole = (f"{row['rate'][name]:.1f} per second" for name in ("plain", "ours", "whole"))
        documents.append((row["kind"], plain, ours, f"{row['rate']['ours'] / row['rate']['plain']:.2f}x", whole))
    parts, dropout = rows_of(record, "parts"), rows_of(record, "dropout")
    names = list(parts[0]["times"])[1:]
    steps = [
        (f"MiniLM-L6, {row['kind']}", *(f"{time:.0f} ms" for time in milliseconds(row)), f"{ratio(row, 'dropout 0.1', 'no dropout'):.2f}x")
        for row in dropout
    ]  # fmt: skip
    count = record["settings"]["documents"]
    lines = [
        *table(("the head, 8 documents", "", "straightforward, padded to 256", "ours", "faster"), heads),
        "",
        *table((f"{count} documents, texts to keyphrases, MiniLM-L6", "straightforward", "ours", "faster", "ours, without truncation"), documents),
        "",
        *table(("time added to the vanilla head", *names), ((row["way"], *added_time(row, names)) for row in parts)),
        "",
        *table(("one training step, 8 documents", "attention dropout 0.1", "0", "faster"), steps),
    ]  # fmt: skip
    return page(lines, record, "seke_speed.py --data PATH")


def seke_quality() -> str:
    """Scores, ranking and calibration on Inspec."""
    record = load("seke_quality")
    systems = grouped(record["results"], "system")
    order = [*(name for name in NAMES if name in systems), *(name for name in systems if name not in NAMES)]
    trained = [name for name in order if "calibration" in systems[name][0]]
    names = list(systems[order[0]][0]["test"]["by score"])
    scores, ranking, calibration = [], [], []
    for system in order:
        rows = systems[system]
        cells = (spread([row["test"]["by score"][name] for row in rows]) for name in names)
        scores.append((NAMES.get(system, system), len(rows), *cells))
    for system in trained:
        rows = systems[system]
        places = [(split, way) for split in ("validation", "test") for way in ("by score", "by place")]
        cells = (spread([row[split][way]["F1@5, lexperts"] for row in rows]) for split, way in places)
        ranking.append((NAMES[system], *cells))
        found = [row["calibration"] for row in rows]
        errors = (spread([100 * row[when] for row in found]) for when in ("before", "after"))
        calibration.append((NAMES[system], *errors, f"{mean(row['temperature'] for row in found):.2f}"))
    title = "Inspec's test documents, in percent, means and standard deviations over seeds (`lexperts` and `seke` are rules for matching gold keyphrases):"
    header = ("F1@5, `lexperts`", "validation, by score", "in text order", "test, by score", "in text order")
    lines = [title, "", *table(("", "seeds", *names), scores), "", *table(header, ranking), ""]
    lines += table(("calibration error, test", "before", "after", "temperature"), calibration)
    return page(lines, record, "seke_quality.py --data PATH --work FOLDER")
