"""Writes the tables of the README and docs from benchmarks/results, between <!-- table:NAME --> and <!-- end -->.

python benchmarks/tables.py            # or: make tables
python benchmarks/tables.py --check    # fails if a page is out of date

Each table is one pivot of the rows of a result. Other tables on the pages are text, with the commit at which they were measured.
"""

import argparse
import json
import re
import sys
from functools import cache

import pandas as pd
from by_document import difference, f1
from common import RESULTS, ROOT

NAMES = {
    "inspec": "inspec (abstracts)", "kp20k_sample": "kp20k sample (abstracts)", "semeval2010": "semeval2010 (abstracts)",
    "krapivin": "krapivin (abstracts)", "nus": "nus (abstracts)", "kpcrowd500": "kpcrowd500 (news)",
    "duc2001": "duc2001 (news)", "stackexchange": "stackexchange (questions)",
    "semeval2010_full": "semeval2010 (whole papers)", "citeulike180_full": "citeulike180 (whole papers)",
}  # fmt: skip
SHOWN = ("inspec", "nus", "duc2001", "stackexchange", "citeulike180_full")  # in the README: one of each kind
OURS, TEN, STYLED, TINY, EARLIER = "default", "default, ten", "default, styled", "tiny", "research"
BAD = ("fragment", "verb", "near-duplicate")
TOOLS = ("YAKE", "TF-IDF", "PositionRank", "MultipartiteRank", "KeyBERT")
KEPT = {  # label of a model -> how the README calls it, and what opens it
    "ridge of 24 tokens per dimension, one expert per text": (
        "`routing_policy: sequence_hard`, gates in closed form (`gate_tokens`: 24 per dimension)", "`LexiconForCausalLM`",
    ),
    "ridge, top 2": ("by token, gates in closed form", "stock Mixtral"),
    "hidden, top 1": ("by token, gates of mergekit-moe (`hidden`)", "stock Mixtral"),
    "Branch-Train-MiX": ("Branch-Train-MiX, trained for as long again", "stock Mixtral"),
    "dense, mean of the MLPs": ("one dense model, the mean", "stock Llama"),
}  # fmt: skip


def read(name: str) -> dict:
    """The content of results/NAME.json."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def load(name: str) -> pd.DataFrame:
    """The rows of results/NAME.json, each with its commit."""
    record = read(name)
    return pd.DataFrame([{"commit": record["commit"], **row} for row in record["results"]])


def provenance(name: str, rows: pd.DataFrame, command: str) -> str:
    """A sentence with date, commits, versions and machine of some rows of a result, and its command."""
    record = read(name)
    commits, machine = ", ".join(sorted(rows["commit"].unique())), record["machine"]
    hardware = machine["accelerator"] or f"{machine['processor']} ({machine['threads']} thread(s))"
    versions = ", ".join(f"{package} {record['versions'][package]}" for package in ("torch", "transformers"))
    return f"Measured {record['date']} at {commits} with {versions}, {hardware}. `python benchmarks/{command}`"


def markdown(table: pd.DataFrame, **options) -> str:
    """A table as Markdown; numbers are strings already."""
    return table.to_markdown(tablefmt="github", disable_numparse=True, **options)


@cache
def leads(k: int, always: bool = False) -> pd.DataFrame:
    """For each set F1@k of the default model, and the free tool that it leads by least on the documents that both have read; with
    `always` over k phrases, also where fewer are returned: then ours are ten.
    """
    rows = {(row.set, row.system): row for row in load("keyphrase_peers").itertuples()}
    found = {}
    for name, label in NAMES.items():
        ours = rows[name, TEN if always else OURS]

        def lead_over(tool: str, name: str = name, ours: dict = ours.by_document) -> float:
            theirs = rows[name, tool].by_document
            return f1(ours, k, len(theirs["num_targets"].split()), always) - f1(theirs, k, always=always)

        tool = min((tool for tool in TOOLS if (name, tool) in rows), key=lead_over)
        theirs = rows[name, tool].by_document
        interval = difference(ours.by_document, theirs, k, always)
        theirs, lead, low, high = (round(100 * x, 1) for x in (f1(theirs, k, always=always), *interval))
        read = rows[name, tool].documents
        found[label] = {
            "default": f"{100 * f1(ours.by_document, k, always=always):.1f}",
            "nearest free tool": f"{tool} {theirs:.1f}",
            "ours on its documents": f"{theirs + lead:.1f}" + (f" (first {read})" if read < ours.documents else ""),
            "lead": f"**{lead:+.1f}**",
            "95% interval": f"[{low:.1f}, {high:.1f}]",
        }
    return pd.DataFrame.from_dict(found, orient="index").rename_axis(f"F1@{k} (%)" + ", ten phrases" * always)


def peers() -> str:
    """The README's table: a set of each kind, with the tool that comes closest to the default model."""
    table = leads(5).loc[[NAMES[name] for name in SHOWN]]
    return markdown(table[["ours on its documents", "nearest free tool", "lead", "95% interval"]])


def all_sets() -> str:
    """The default model on all sets at 5 and 10, in both conventions."""
    rows = load("keyphrase_peers")
    source = provenance("keyphrase_peers", rows[rows["system"].isin((OURS, TEN))], "keyphrase_peers.py --data PATH")
    return "\n\n".join([*(markdown(leads(k, always)) for always in (False, True) for k in (5, 10)), source])


def our_models() -> str:
    """F1@5 / F1@10 of the models: in int8, with a style, and the earlier one."""
    rows = load("keyphrase_peers")
    return scores_by_set(rows[rows["system"].isin((OURS, STYLED, TINY, EARLIER))])


def free_tools() -> str:
    """F1@5 / F1@10 of all free tools on all sets."""
    rows = load("keyphrase_peers")
    return scores_by_set(rows[rows["system"].isin(TOOLS)])


def scores_by_set(rows: pd.DataFrame) -> str:
    """F1@5 / F1@10 of some systems on all sets."""
    rows = rows.copy()
    rows["f1"] = [f"{100 * scores['f1@5']:.1f} / {100 * scores['f1@10']:.1f}" for scores in rows["seke"]]
    table = rows.pivot(index="set", columns="system", values="f1").reindex(list(NAMES))
    documents = rows.groupby("set")["documents"].max()
    table.insert(0, "documents", [f"{documents[name]:,}" for name in table.index])
    text = markdown(table.rename(index=NAMES).rename_axis("F1@5 / F1@10 (%)").fillna("not run"))
    return f"{text}\n\n{provenance('keyphrase_peers', rows, 'keyphrase_peers.py --data PATH')}"


def kept() -> str:
    """What mixtures of six experts keep, the mean over seeds and the range."""
    shares = 100 * load("modular_experts_seeds").groupby("model")["kept"].agg(["mean", "min", "max"])
    rows = [
        (name, f"**{shares['mean'][label]:.1f}%** ({shares['min'][label]:.1f} to {shares['max'][label]:.1f})", opens)
        for label, (name, opens) in KEPT.items()
    ]
    header = ["six experts of SmolLM2-135M-Instruct, merged", "of each one's gain, kept", "opens as"]
    return markdown(pd.DataFrame(rows, columns=header), index=False)


def forty_texts() -> str:
    """The verdicts on the top five keyphrases of each system, and the share of bad ones by kind of text."""
    rows = load("forty_texts").set_index("system").rename_axis("")
    counts = pd.DataFrame(list(rows["all"]), index=rows.index)
    kinds = rows["kinds"].apply(pd.Series)
    bad = kinds.assign(all=rows["all"]).map(lambda of: f"{sum(of[verdict] for verdict in BAD) / of['phrases']:.1%}")
    text = f"{markdown(counts.astype(str))}\n\nThe share of {', '.join(BAD)} by kind of text:\n\n{markdown(bad)}"
    return f"{text}\n\n{provenance('forty_texts', rows, 'forty_texts.py --yake')}"


def composing() -> str:
    """Seconds (median and range), processor seconds and memory of composing four experts."""
    measured, rows = load("speed").query("what == 'compose'"), []
    for _, row in measured.sort_values("shape").iterrows():
        for system, times in row["times"].items():
            low, *_, high = sorted(times["rounds_ms"])
            seconds = f"{times['median_ms'] / 1e3:.1f} ({low / 1e3:.1f} to {high / 1e3:.1f})"
            rows.append(
                (row["shape"], system, seconds, row["processor_seconds"][system], f"{row['memory_mib'][system]:,} MiB")
            )
    header = ["shape", "", "seconds", "processor seconds", "peak anonymous memory"]
    table = markdown(pd.DataFrame(rows, columns=header).astype(str), index=False)
    return f"{table}\n\n{provenance('speed', measured, 'speed.py --only compose --work FOLDER --mergekit ENV --checkout FOLDER')}"


TABLES = {
    "table:composing": composing,
    "result:peers": peers,
    "table:all_sets": all_sets,
    "table:free_tools": free_tools,
    "table:our_models": our_models,
    "result:kept": kept,
    "table:forty_texts": forty_texts,
}


def main(argv: list[str] | None = None) -> None:
    """Writes or checks the tables of all pages."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if a page is out of date")
    options = parser.parse_args(argv)
    stale = []
    for path in [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        ROOT / "models" / "seke-minilm" / "README.md",
    ]:
        text = old = path.read_text(encoding="utf-8")
        for name, make in TABLES.items():
            block = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- end -->)", re.S)
            text = block.sub(lambda match, make=make: match[1] + make() + match[2], text)
        if options.check:
            stale += [path.name] * (text != old)
        elif text != old:
            path.write_text(text, encoding="utf-8")
    if stale:
        sys.exit(f"{', '.join(stale)}: tables differ from benchmarks/results. Run: make tables")


if __name__ == "__main__":
    main()
