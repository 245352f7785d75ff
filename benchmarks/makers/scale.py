"""Tables of keyphrases at scale: many documents, and a server under load."""

from . import load, provenance


def serving() -> str:
    """Throughput and latency of the server by number of clients."""
    record = load("serving")
    settings = record["settings"]
    lines = [
        "| clients | documents a second | latency, median | 99% of requests | documents per batch | refused (503) | refused after |",
        "| --- |" + " --- |" * 6,
    ]
    for row in record["results"]:
        after = "" if row["refused_p99_ms"] is None else f"{row['refused_p99_ms']:,.0f} ms"
        lines.append(
            f"| {row['clients']} | {row['documents_per_second']:.1f} | {row['p50_ms']:,.0f} ms | {row['p99_ms']:,.0f} ms | "
            f"{row['mean_batch']:.1f} | {row['refused']:,} | {after} |"
        )
    note = (
        f"{settings['seconds']:.0f} seconds each, documents of {settings['words']:.0f} words, queue of {settings['max-queue']}; clients and "
        f"server share the cores. {provenance(record)} `python benchmarks/serving.py`"
    )
    return "\n".join([*lines, "", note])


def many_documents() -> str:
    """Documents a second by engine, and what became of the rows."""
    record = load("many_documents")
    settings = record["settings"]
    lines = ["| | documents a second | times the first | lost | twice | with an error | same keyphrases |"]
    lines.append("| --- |" + " --- |" * 6)
    for name, result in record["results"].items():
        last = result["rounds"][-1]
        same = "" if "same_keyphrases" not in last else f"{100 * last['same_keyphrases']:.1f}%"
        lines.append(
            f"| {name} | {result['documents_per_second']:.1f} | {result['ratio_to_first']:.2f} | {last['lost']} | {last['twice']} | "
            f"{last['errors']} | {same} |"
        )
    note = (
        f"{settings['documents']:,} documents, {settings['bad_rows']} of them without a text, from Parquet to Parquet, one core per process, "
        f"start-up not counted. {provenance(record)} `python benchmarks/many_documents.py --data PATH --documents {settings['documents']}`"
    )
    return "\n".join([*lines, "", note])
