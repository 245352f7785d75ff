"""Tables of keyphrases at scale: many documents, and a server under load."""

from . import load, provenance


def serving() -> str:
    """Throughput and latency of the server by number of clients."""
    record = load("serving")
    settings = record["settings"]
    lines = [
        "| clients | documents a second | latency, median | 99% of requests | documents per batch | refused (503) | refused after, median / 99% | server's memory |",
        "| --- |" + " --- |" * 7,
    ]
    for row in record["results"]:
        values = [row.get(f"refused_p{q}_ms") for q in (50, 99)]
        after = " / ".join(f"{value:,.0f} ms" for value in values if value is not None)
        lines.append(
            f"| {row['clients']} | {row['documents_per_second']:.1f} | {row['p50_ms']:,.0f} ms | {row['p99_ms']:,.0f} ms | "
            f"{row['mean_batch']:.1f} | {row['refused']:,} | {after} | {row['server_megabytes']:,} MB |"
        )
    note = (
        f"{settings['seconds']:.0f} seconds each, {settings['documents']} documents of {settings['words']:.0f} words, queue of {settings['max-queue']}; clients and "
        f"server share the cores. {provenance(record)} `python benchmarks/serving.py --data FILE`"
    )
    return "\n".join([*lines, "", note])


def many_documents() -> str:
    """Documents a second by engine, and what became of the rows."""
    record = load("many_documents")
    settings = record["settings"]
    lines = [
        "| | documents a second | times the first | MB of a worker, early | at the end | lost | twice | with an error | same keyphrases |"
    ]
    lines.append("| --- |" + " --- |" * 8)
    for name, result in record["results"].items():
        last = result["rounds"][-1]
        same = "" if "same_keyphrases" not in last else f"{100 * last['same_keyphrases']:.1f}%"
        lines.append(
            f"| {name} | {result['documents_per_second']:.1f} | {result['ratio_to_first']:.2f} | {last['worker_megabytes_early']:,.0f} | "
            f"{last['worker_megabytes_late']:,.0f} | {last['lost']} | {last['twice']} | "
            f"{last['errors']} | {same} |"
        )
    lowest, highest = memory_of_workers(record)
    note = (
        f"{settings['documents']:,} documents, {settings['bad_rows']} of them without a text, from Parquet to Parquet, one core per process, "
        f"start-up not counted. Over the time a worker's memory goes up and down with the lengths of its batches, from {lowest:,} to {highest:,} MB. "
        f"{provenance(record)} `python benchmarks/many_documents.py --data PATH --documents {settings['documents']}`"
    )
    return "\n".join([*lines, "", note, "", memory_over_time()])


def memory_over_time() -> str:
    """The memory of a process that reads documents for longer, in two sentences."""
    record = load("many_documents_long")
    row = record["results"]["local"]["rounds"][-1]
    start, sizes = row["start_seconds"], row["memory"][0]["seconds_megabytes"]
    end = sizes[-1][0]
    fifths: list[list[float]] = [[] for _ in range(5)]
    for seconds, size in sizes:
        if seconds > start:
            fifths[min(4, int(5 * (seconds - start) / (end - start)))].append(size)
    least, most = (", ".join(f"{of(fifth):,.0f}" for fifth in fifths) for of in (min, max))
    count = record["settings"]["documents"]
    return (
        f"{count:,} documents by the local engine: at least {least} MB in the fifths of the time, at most {most} MB. {provenance(record)} "
        f"`python benchmarks/many_documents.py --data PATH --documents {count} --ways local --name many_documents_long`"
    )


def memory_of_workers(record: dict) -> tuple[int, int]:
    """The least and the most megabytes of a process that has read its first documents."""
    sizes = []
    for result in record["results"].values():
        row = result["rounds"][-1]
        command, *workers = row["memory"]
        for process in workers or [command]:
            sizes += [size for seconds, size in process["seconds_megabytes"] if seconds > row["start_seconds"]]
    return min(sizes), max(sizes)


def killed_runs() -> str:
    """What became of runs that were killed."""
    record = load("killed_runs")
    settings = record["settings"]
    lines = ["| engine, killed | moments | blocks finished by then | rows lost | rows twice | same rows | same bytes |"]
    lines.append("| --- |" + " --- |" * 6)
    for name in dict.fromkeys(row["kind"] for row in record["results"]):
        rows = [row for row in record["results"] if row["kind"] == name]
        finished = [row["blocks_finished"] for row in rows]
        lost, twice = (sum(row[key] for row in rows) for key in ("lost", "twice"))
        rows_same, same = (
            sum(row[key] and not row["blocks_different"] for row in rows) for key in ("same_rows", "same_bytes")
        )
        lines.append(
            f"| {name} | {len(rows)} | {min(finished)} to {max(finished)} | {lost} | {twice} | {rows_same} of {len(rows)} | "
            f"{same} of {len(rows)} |"
        )
    note = (
        f"{settings['documents']:,} documents in blocks of {settings['block_size']}, or fewer long ones, a tiny model. The moments go from the start to "
        "the joining of the blocks. Runs that lost a worker or a node went on by themselves; the others were repeated. Finished blocks are compared "
        f"when the run is killed, the output at the end. {provenance(record)} `python benchmarks/killed_runs.py --data PATH --documents {settings['documents']}`"
    )
    return "\n".join([*lines, "", note])


def corpus_growth() -> str:
    """Memory and documents a second by the number of documents and workers."""
    record = load("corpus_growth")
    lines = [
        "| documents | workers | documents a second | MB of a worker, early | at the end | MB of the command | lost | twice | bad rows |"
    ]
    lines.append("| --- |" + " --- |" * 8)
    for row in sorted(record["results"], key=lambda row: (row["workers"], row["documents"])):
        workers = row["workers"] or "none (local)"
        reported = f"{row['errors']:,} of {-(-row['documents'] // record['settings']['bad_rows']):,} reported"
        lines.append(
            f"| {row['documents']:,} | {workers} | {row['documents_per_second']:.0f} | {row['worker_megabytes_early']:.0f} | "
            f"{row['worker_megabytes_late']:.0f} | {row['command_megabytes']:.0f} | {row['lost']} | {row['twice']} | {reported} |"
        )
    note = (
        "From Parquet to Parquet, start-up included, one core per process; a tiny model with random weights, so that these are the limits of "
        f"everything but the model. {provenance(record)} `python benchmarks/corpus_growth.py --data PATH`"
    )
    return "\n".join([*lines, "", note])
