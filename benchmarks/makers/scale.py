"""Tables of keyphrases at scale: many documents, and a server under load."""

from . import grouped, load, page, provenance, table


def serving() -> str:
    """Throughput and latency of the server by number of clients."""
    record, lines = load("serving"), []
    for row in record["results"]:
        refused = [row.get(f"refused_p{q}_ms") for q in (50, 99)]
        waits = (f"{row[f'p{q}_ms']:,.0f} ms" for q in (50, 99))
        after = " / ".join(f"{value:,.0f} ms" for value in refused if value is not None)
        cells = (f"{row['mean_batch']:.1f}", f"{row['refused']:,}", after, f"{row['server_megabytes']:,} MB")
        lines.append((row["clients"], f"{row['documents_per_second']:.1f}", *waits, *cells))
    header = (
        "clients",
        "documents a second",
        "latency, median",
        "99% of requests",
        "documents per batch",
        "refused (503)",
    )
    settings = record["settings"]
    note = (
        f"{settings['seconds']:.0f} seconds each, {settings['documents']} documents of {settings['words']:.0f} words, queue of {settings['max-queue']}; clients and "
        "server share the cores. "
    )
    lines = table((*header, "refused after, median / 99%", "server's memory"), lines)
    return page(lines, record, "serving.py --data FILE", note)


def many_documents() -> str:
    """Documents a second by engine, and what became of the rows."""
    record, lines = load("many_documents"), []
    for name, result in record["results"].items():
        last = result["rounds"][-1]
        speeds = (f"{result['documents_per_second']:.1f}", f"{result['ratio_to_first']:.2f}")
        memory = (f"{last[f'worker_megabytes_{when}']:,.0f}" for when in ("early", "late"))
        same = f"{100 * last['same_keyphrases']:.1f}%" if "same_keyphrases" in last else ""
        lines.append((name, *speeds, *memory, last["lost"], last["twice"], last["errors"], same))
    header = ("", "documents a second", "times the first", "MB of a worker, early", "at the end")
    settings, (lowest, highest) = record["settings"], memory_of_workers(record)
    note = (
        f"{settings['documents']:,} documents, {settings['bad_rows']} of them without a text, from Parquet to Parquet, one core per process, "
        f"start-up not counted. Over the time a worker's memory goes up and down with the lengths of its batches, from {lowest:,} to {highest:,} MB. "
    )
    lines = table((*header, "lost", "twice", "with an error", "same keyphrases"), lines)
    command = f"many_documents.py --data PATH --documents {settings['documents']}"
    return "\n".join([page(lines, record, command, note), "", memory_over_time()])


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
    record, lines = load("killed_runs"), []
    for name, rows in grouped(record["results"], "kind").items():
        finished = [row["blocks_finished"] for row in rows]
        lost, twice = (sum(row[key] for row in rows) for key in ("lost", "twice"))
        same = (sum(row[key] and not row["blocks_different"] for row in rows) for key in ("same_rows", "same_bytes"))
        moments = (len(rows), f"{min(finished)} to {max(finished)}")
        lines.append((name, *moments, lost, twice, *(f"{count} of {len(rows)}" for count in same)))
    settings = record["settings"]
    note = (
        f"{settings['documents']:,} documents in blocks of {settings['block_size']}, or fewer long ones, a tiny model. The moments go from the start to "
        "the joining of the blocks. Runs that lost a worker or a node went on by themselves; the others were repeated. Finished blocks are compared "
        "when the run is killed, the output at the end. "
    )
    header = (
        "engine, killed",
        "moments",
        "blocks finished by then",
        "rows lost",
        "rows twice",
        "same rows",
        "same bytes",
    )
    return page(table(header, lines), record, f"killed_runs.py --data PATH --documents {settings['documents']}", note)


def corpus_growth() -> str:
    """Memory and documents a second by the number of documents and workers."""
    record, lines = load("corpus_growth"), []
    for row in sorted(record["results"], key=lambda row: (row["workers"], row["documents"])):
        fields = ("documents_per_second", "worker_megabytes_early", "worker_megabytes_late", "command_megabytes")
        reported = f"{row['errors']:,} of {-(-row['documents'] // record['settings']['bad_rows']):,} reported"
        cells = (*(f"{row[field]:.0f}" for field in fields), row["lost"], row["twice"], reported)
        lines.append((f"{row['documents']:,}", row["workers"] or "none (local)", *cells))
    note = (
        "From Parquet to Parquet, start-up included, one core per process; a tiny model with random weights, so that these are the limits of "
        "everything but the model. "
    )
    header = ("documents", "workers", "documents a second", "MB of a worker, early", "at the end", "MB of the command")
    return page(table((*header, "lost", "twice", "bad rows"), lines), record, "corpus_growth.py --data PATH", note)
