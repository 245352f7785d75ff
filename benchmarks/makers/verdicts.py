"""Tables of the forty texts."""

from . import load, page, table

GOAL = ("fragment", "verb", "near-duplicate")
COLUMNS = {
    "good": "good or acceptable", "fragment": "fragments", "verb": "verbs", "near-duplicate": "near-duplicates",
    "too general": "too general", "label": "labels", "other": "other", "unknown": "not judged",
}  # fmt: skip


def share(counts: dict, *verdicts: str) -> str:
    """The share of some verdicts, in per cent."""
    return f"{100 * sum(counts[verdict] for verdict in verdicts) / counts['phrases']:.1f}%" if counts["phrases"] else ""


def forty_texts() -> str:
    """The verdicts on the top five keyphrases of each system, and by kind of text."""
    record = load("forty_texts")
    rows, kinds = [], {}
    for row in record["results"]:
        counts, name = row["all"], row["system"]
        if name not in ("without a style", "YAKE"):
            name = f"`{name}`" if "=" in name else f'`style="{name}"`'
        good = counts["good"] + counts["acceptable"]
        rows.append(
            (name, counts["phrases"], good, *(counts[verdict] for verdict in list(COLUMNS)[1:]), share(counts, *GOAL))
        )
        kinds[name] = row["kinds"]
    header = ("", "phrases", *COLUMNS.values(), "fragments, verbs, near-duplicates")
    names = list(next(iter(kinds.values())))
    by_kind = [(name, *(share(of_kind[kind], *GOAL) for kind in names)) for name, of_kind in kinds.items()]
    lines = [
        "Verdicts on the top five keyphrases of forty texts, the default model with and without a style and with `nested=False`, and YAKE with its defaults:",
        "",
        *table(header, rows),
        "",
        "The share of fragments, verbs and near-duplicates by kind of text:",
        "",
        *table(("", *names), by_kind),
    ]  # fmt: skip
    return page(lines, record, "forty_texts.py --yake")
