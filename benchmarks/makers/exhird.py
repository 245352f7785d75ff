"""Keyphrase generation."""

from functools import partial
from statistics import mean

from . import load, provenance


def exhird_speed() -> str:
    record = load("exhird_speed")
    of = {
        what: [row for row in record["results"] if row["what"] == what]
        for what in ("decoding", "training", "attention")
    }
    lines = ["| | encoder | ours | plain | ratio |", "| --- | --- | --- | --- | --- |"]
    for row in of["decoding"]:
        rates = row["documents_per_second"]
        cells = f"{rates['ours']:.1f} documents/s | {rates['plain']:.2f} documents/s | {row['ratio']:.1f}x"
        lines.append(f"| greedy decoding | {row['encoder']} | {cells} |")
    for row in of["training"]:
        seconds = [row["times"][name]["median_ms"] / 1e3 for name in ("ours", "plain")]
        lines.append(
            f"| training step | {row['encoder']} | {seconds[0]:.2f} s | {seconds[1]:.2f} s | {row['ratio']:.1f}x |"
        )
    lines += [
        "",
        "| attention, g 10, w 50 | words | dense | block-sparse | faster | memory, dense / block-sparse | of dense without chunks |",
        "| --- |" + " --- |" * 6,
    ]
    for row in of["attention"]:
        cells = [
            f"{row['times'][name]['median_ms']:,.0f} ms, {row['peak_MiB'][name]:,.0f} MiB"
            for name in ("dense", "block")
        ]
        smaller = [f"{row['smaller'][name]:.1f}x" for name in ("dense", "at once")]
        lines.append(
            f"| {row['way']} | {row['length']:,} | {' | '.join(cells)} | {row['faster']:.1f}x | {' | '.join(smaller)} |"
        )
    return "\n".join([*lines, "", provenance(record) + " `python benchmarks/exhird_speed.py`"])


def exhird_quality() -> str:
    record = load("exhird_quality")
    systems: dict[str, list[dict]] = {}
    for row in record["results"]:
        systems.setdefault(row["system"], []).append(row["scores"])
    sets = list(next(iter(systems.values()))[0]["exclusion"])

    def scores(runs: list[dict], name: str, part: str) -> str:
        of = [run["exclusion"][name][part] for run in runs]
        return " / ".join(f"{100 * mean(score[k] for score in of):.1f}" for k in ("F1@M", "F1@5"))

    def repeats(runs: list[dict], name: str) -> str:
        return " → ".join(f"{100 * mean(run[k][name]['repeats'] for run in runs):.1f}" for k in ("none", "exclusion"))

    def table(cell) -> list[str]:
        head = [f"| | seeds | {' | '.join(sets)} |", "| --- | --- |" + " --- |" * len(sets)]
        rows = ([system, str(len(runs)), *(cell(runs, name) for name in sets)] for system, runs in systems.items())
        return [*head, *(f"| {' | '.join(row)} |" for row in rows), ""]

    lines = []
    for part in ("present", "absent"):
        lines += [f"{part.capitalize()} keyphrases, F1@M / F1@5 in per cent by the convention `exhird`:", ""]
        lines += table(partial(scores, part=part))
    lines += ["Repeats in per cent of all generated phrases, without exclusion and with it:", "", *table(repeats)]
    command = "`python benchmarks/exhird_quality.py --data PATH --work FOLDER`"
    return "\n".join([*lines, f"{provenance(record)} {command}"])
