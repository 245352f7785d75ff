"""Keyphrase generation."""

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
        "| attention, g 10, w 50 | words | dense | block-sparse | faster | memory |",
        "| --- |" + " --- |" * 5,
    ]
    for row in of["attention"]:
        cells = [
            f"{row['times'][name]['median_ms']:,.0f} ms, {row['peak_MiB'][name]:,.0f} MiB"
            for name in ("dense", "block")
        ]
        lines.append(
            f"| {row['way']} | {row['length']:,} | {' | '.join(cells)} | {row['faster']:.1f}x | 1/{row['smaller']:.1f} |"
        )
    return "\n".join([*lines, "", provenance(record) + " `python benchmarks/exhird_speed.py`"])


def exhird_quality() -> str:
    record = load("exhird_quality")
    systems: dict[str, list[dict]] = {}
    for row in record["results"]:
        systems.setdefault(row["system"], []).append(row["scores"])
    sets = list(next(iter(systems.values()))[0]["exclusion"])

    def average(runs: list[dict], value) -> float:
        return sum(map(value, runs)) / len(runs)

    lines = [
        "Present keyphrases, F1@M / F1@5 in per cent by the convention `exhird`, means over seeds:",
        "",
        f"| | seeds | {' | '.join(sets)} |",
        "| --- | --- |" + " --- |" * len(sets),
    ]
    for system, runs in systems.items():
        cells = []
        for name in sets:
            scores = (
                average(runs, lambda run, n=name, k=k: 100 * run["exclusion"][n]["present"][k])
                for k in ("F1@M", "F1@5")
            )
            cells.append(" / ".join(f"{score:.1f}" for score in scores))
        lines.append(f"| {system} | {len(runs)} | {' | '.join(cells)} |")
    lines += ["", "Repeats in per cent of all generated phrases, without exclusion and with it:", ""]
    lines += [f"| | {' | '.join(sets)} |", "| --- |" + " --- |" * len(sets)]
    for system, runs in systems.items():
        cells = []
        for name in sets:
            shares = (average(runs, lambda run, n=name, k=k: 100 * run[k][n]["repeats"]) for k in ("none", "exclusion"))
            cells.append(" → ".join(f"{share:.1f}" for share in shares))
        lines.append(f"| {system} | {' | '.join(cells)} |")
    command = "`python benchmarks/exhird_quality.py --data PATH --work FOLDER`"
    return "\n".join([*lines, "", f"{provenance(record)} {command}"])
