"""Keyphrase generation."""

from functools import partial
from statistics import mean

from . import grouped, load, milliseconds, page, ratio, rows_of, table


def exhird_speed() -> str:
    """Decoding and training beside plain implementations, and sparse attention beside dense."""
    record = load("exhird_speed")
    documents, rows = record["settings"]["documents"], []
    for row in rows_of(record, "decoding"):
        ours, plain = (1e3 * documents / time for time in milliseconds(row, "ours", "plain"))
        cells = (f"{ours:.1f} documents/s", f"{plain:.2f} documents/s", f"{ours / plain:.1f}x")
        rows.append(("greedy decoding", row["encoder"], *cells))
    for row in rows_of(record, "training"):
        seconds = (f"{time / 1e3:.2f} s" for time in milliseconds(row, "ours", "plain"))
        rows.append(("training step", row["encoder"], *seconds, f"{ratio(row, 'plain', 'ours'):.1f}x"))
    attention = []
    for row in rows_of(record, "attention"):
        peaks = row["peak_MiB"]
        cells = [f"{milliseconds(row, name)[0]:,.0f} ms, {peaks[name]:,.0f} MiB" for name in ("dense", "block")]
        smaller = [f"{peaks[name] / max(peaks['block'], 1e-3):.1f}x" for name in ("dense", "at once")]
        attention.append((row["way"], f"{row['length']:,}", *cells, f"{ratio(row, 'dense', 'block'):.1f}x", *smaller))
    header = ("attention, g 10, w 50", "words", "dense", "block-sparse", "faster", "memory, dense / block-sparse")
    lines = [*table(("", "encoder", "ours", "plain", "ratio"), rows), ""]
    return page([*lines, *table((*header, "of dense without chunks"), attention)], record, "exhird_speed.py")


def exhird_quality() -> str:
    """Scores of present and absent keyphrases, and repeats, on all test sets."""
    record = load("exhird_quality")
    systems = {name: [row["scores"] for row in rows] for name, rows in grouped(record["results"], "system").items()}
    sets = list(next(iter(systems.values()))[0]["exclusion"])

    def scores(runs: list[dict], name: str, part: str) -> str:
        of = [run["exclusion"][name][part] for run in runs]
        return " / ".join(f"{100 * mean(score[k] for score in of):.1f}" for k in ("F1@M", "F1@5"))

    def repeats(runs: list[dict], name: str) -> str:
        return " → ".join(f"{100 * mean(run[k][name]['repeats'] for run in runs):.1f}" for k in ("none", "exclusion"))

    def of_systems(cell) -> list[str]:
        rows = ((system, len(runs), *(cell(runs, name) for name in sets)) for system, runs in systems.items())
        return [*table(("", "seeds", *sets), rows), ""]

    lines = []
    for part in ("present", "absent"):
        lines += [f"{part.capitalize()} keyphrases, F1@M / F1@5 in per cent by the convention `exhird`:", ""]
        lines += of_systems(partial(scores, part=part))
    lines += ["Repeats in per cent of all generated phrases, without exclusion and with it:", "", *of_systems(repeats)]
    return page(lines[:-1], record, "exhird_quality.py --data PATH --work FOLDER")


OVER_SMOLLM2 = {
    "default": "the default model, as installed",
    "decoder": "SmolLM2, trained here by the same recipe",
    "warm start, MiniLM-L6": "warm start from MiniLM-L6, the same rows",
    "BiGRU": "BiGRU, the same rows",
    "extractor": "the default model of extraction, in the style of the set",
    "neighbours": "the 5 most frequent keyphrases of the 20 nearest training documents (MiniLM-L6)",
    "examples": "the default model, with the training documents as `--examples`: its 10 best",
}


def exhird_smollm2() -> str:
    """The generator over SmolLM2 and what it is compared with, on whole test splits; and windows of exclusion."""
    record = load("exhird_smollm2")
    title = (
        f"{documents_of(record)}, in per cent by the convention `exhird`, with 95% intervals over documents; phrases of a document, and "
        "the share of phrases that repeat an earlier one:"
    )
    command = "exhird_smollm2.py --data PATH --work FOLDER"
    command += f" --rows {record['settings']['rows']}" if record["settings"]["rows"] else ""
    sets = sorted({row["set"] for row in record["results"]})
    command += f" --sets {' '.join(sets)}" if len(sets) > 1 else ""
    return page([title, "", *of_systems(record)], record, command)


def exhird_smollm2_windows() -> str:
    """Windows of exclusion of the default model, and their differences from none."""
    record = load("exhird_smollm2_windows")
    modes, rows = record["results"][0]["scores"], []

    def cell(scores: dict, name: str) -> str:
        value = f"{100 * scores[name][0]:.1f}"
        if "difference" not in scores:
            return value
        change, low, high = (100 * x for x in scores["difference"][name])
        return f"{value} ({change:+.1f} [{low:+.1f}, {high:+.1f}])"

    names = [f"{part} F1@{cut}" for part in ("present", "absent") for cut in ("5", "M")]
    for mode, scores in modes.items():
        rows.append((mode, *(cell(scores, name) for name in names), f"{100 * scores['repeats']:.1f}"))
    title = f"{documents_of(record)} of stackexchange, in per cent; in brackets the difference from no exclusion, with its 95% interval (paired):"
    command = f"exhird_smollm2.py --data PATH --work FOLDER --systems default --rows {record['settings']['rows']} --name exhird_smollm2_windows "
    command += "--modes " + " ".join(f'"{mode}"' for mode in modes)
    return page([title, "", *table(("window of exclusion", *names, "repeats"), rows)], record, command)


def documents_of(record: dict) -> str:
    """How many documents were read."""
    documents = {scores["documents"] for row in record["results"] for scores in row["scores"].values()}
    return f"The first {' or '.join(f'{n:,}' for n in sorted(documents))} test documents"


def of_systems(record: dict) -> list[str]:
    """The lines of a table: a row for each system, set and mode."""
    order, rows = list(OVER_SMOLLM2), []
    for row in sorted(record["results"], key=lambda row: (row["set"], order.index(row["system"]))):
        for mode, scores in row["scores"].items():
            cells = []
            for part in ("present", "absent"):
                for cut in ("5", "M"):
                    value, low, high = (100 * x for x in scores[f"{part} F1@{cut}"])
                    cells.append(f"{value:.1f} [{low:.1f}, {high:.1f}]")
            mode = "" if mode == "extracted" else mode
            rows.append(
                (
                    row["set"],
                    OVER_SMOLLM2[row["system"]],
                    mode,
                    *cells,
                    f"{scores['phrases']:.1f}",
                    f"{100 * scores['repeats']:.1f}",
                )
            )
    head = ("", "", "", "present F1@5", "present F1@M", "absent F1@5", "absent F1@M", "phrases", "repeats")
    return table(head, rows)
