"""Tables of the small model on lexperts-lite, beside the default model and free tools."""

from by_document import difference

from . import load, page, provenance, rows_of, table
from .peers import SETS, f1

SYSTEMS = (
    "tiny, int8",
    "tiny, float32",
    "default, int8",
    "default, float32",
    "YAKE",
    "TF-IDF",
    "PositionRank",
    "KeyBERT",
)


def quality() -> str:
    """F1 of each system on the same documents, and what the small model keeps and leads by."""
    record = load("lite")
    found = {(row["system"], row["set"]): row for row in rows_of(record, "quality")}
    rows = []
    for name, text in SETS.items():
        if (SYSTEMS[0], name) in found:
            tiny, default, yake = (found[system, name] for system in ("tiny, int8", "default, float32", "YAKE"))
            share, times = (tiny["seke"]["f1@5"] / other["seke"]["f1@5"] for other in (default, yake))
            lead = difference(tiny["by_document"], yake["by_document"], 5)
            cells = (f1(found[system, name]["seke"]) for system in SYSTEMS)
            kept = (
                f"{100 * share:.0f}%",
                f"{times:.1f}: {100 * lead.value:+.1f} [{100 * lead.low:.1f}, {100 * lead.high:.1f}]",
            )
            rows.append((text, f"{tiny['documents']:,}", *cells, *kept))
    title = (
        f"F1@5 / F1@10 in per cent (rules `seke`), without a style, on the first {record['settings']['documents']} documents of each set, KeyBERT on "
        "the first 50. The last columns are the F1@5 of tiny in int8: its share of the default model's, and how many times YAKE's it is, with "
        "the lead in points and its 95% interval."
    )
    header = ("set", "documents", *SYSTEMS, "of the default model's", "times YAKE's")
    return page([title, "", *table(header, rows)], record, "lite.py --data PATH --work FOLDER --python PYTHON")


def headline() -> str:
    """Speed and F1 of the small model beside YAKE's, in a sentence."""
    record = load("lite")
    rates = {(row["system"], row["kind"]): row["per_second"] for row in rows_of(record, "speed")}
    found = {(row["system"], row["set"]): row["seke"]["f1@5"] for row in rows_of(record, "quality")}
    sets = [name for system, name in found if system == SYSTEMS[0]]
    times = [found[SYSTEMS[0], name] / found["YAKE", name] for name in sets]
    faster = {kind: rates[SYSTEMS[0], kind] / rates["YAKE", kind] for kind in ("abstracts", "news")}
    news = (
        "faster on news, too" if faster["news"] > 1 else "slower on news"
    )  # by how much differs from run to run, see LOG
    return (
        f"The small model in `lexperts-lite`, without PyTorch, has {min(times):.1f} to {max(times):.1f} times YAKE's F1@5 on {len(times)} sets, and reads "
        f"{rates[SYSTEMS[0], 'abstracts']:.0f} abstracts a second on one core: {faster['abstracts']:.1f} times as fast as YAKE, and {news}."
    )


def demo() -> str:
    """How much the page loads, how its answers compare with Python's, and how fast they are."""
    record = load("demo")
    (found,) = record["results"]
    differ = len(found["calls_that_differ"]) or "none"
    first = " and ".join(f"{found[f'first_answer_{view}_s']:.1f}" for view in ("wide", "narrow"))
    return (
        f"The first click loads {found['bytes'] / 1e6:.0f} MB. In Chromium {found['chromium'].partition('.')[0]}, of {found['calls']} calls "
        f"with {found['texts']} texts, {differ} differs from Python in one of the {found['keyphrases']} keyphrases or its place, and scores "
        f"differ by at most {found['largest_difference_of_scores']:.4f}. The first answer came {first} s after the click, later ones in "
        f"{found['median_ms']:.0f} ms (median). {provenance(record)} `make demo-check`"
    )


def speed() -> str:
    """Documents a second, seconds to the first keyphrases, memory and size."""
    record = load("lite")
    rates = {(row["system"], row["kind"]): row["per_second"] for row in rows_of(record, "speed")}
    starts = {row["system"]: row for row in rows_of(record, "start")}
    sizes = {row["system"]: row["mb"] for row in rows_of(record, "size")}
    rows = []
    for system in SYSTEMS:
        started = starts.get(system)
        cells = (f"{started['seconds']:.2f}", f"{started['peak_mib']:.0f}") if started else ("", "")
        size = f"{sizes[system]:.1f}" if system in sizes else ""
        rows.append((system, *(f"{rates[system, kind]:,.1f}" for kind in ("abstracts", "news")), *cells, size))
    title = (
        "From texts to keyphrases on one thread of one core, medians of "
        f"{record['settings']['rounds']} rounds in turns: 100 abstracts of inspec and 30 news articles of duc2001, KeyBERT ten of each. The int8 models "
        "run on lexperts-lite, whose environment, pip included, has "
        f"{sizes['environment of lexperts-lite']:.0f} MB."
    )
    header = ("", "abstracts a second", "articles a second", "first keyphrases, s", "peak memory, MiB", "model, MB")
    return page([title, "", *table(header, rows)], record, "lite.py --data PATH --work FOLDER --python PYTHON")
