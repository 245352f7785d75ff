"""Table and figure of the mixtures of a real Llama: what they keep of their experts, and how many bytes that takes."""

from collections.abc import Iterable
from pathlib import Path
from statistics import mean

from . import grouped, load, page, provenance, table

FIGURE = Path(__file__).resolve().parents[2] / "docs" / "images" / "retention.svg"
HIDDEN, INTERMEDIATE = 576, 1536  # of SmolLM2-135M
FULL, GATES, BY_TEXT = "ridge, top 2", "ridge", "ridge of 24 tokens per dimension, one expert per text"
WHOLE, TOKENS = f"{FULL}, whole experts", (" 1", " 2", " 2, tuned")
AVERAGES, RANKS = ("dense, mean of the MLPs", "dense, TIES", "dense, DARE"), (128, 64, 16)


def seeds_of(rows: list[dict]) -> dict[str, list[dict]]:
    """Label -> its rows, one per seed."""
    return grouped(rows, "model")


def of_seed_42(record: dict) -> list[dict]:
    """The rows of the seed with which every model was measured."""
    return [row for row in record["results"] if row["seed"] == 42]


def share_of_bytes(rank: int) -> float:
    """Size of an expert of a rank, relative to whole MLPs."""
    return rank * (HIDDEN + INTERMEDIATE) / (HIDDEN * INTERMEDIATE)


def rank_of(label: str) -> int | None:
    """The rank in a label."""
    return int(label.rpartition(" ")[2]) if ", rank " in label else None


KEPT = {
    BY_TEXT: "`routing_policy: sequence_hard`, gates in closed form (`gate_tokens`: 24 per dimension)",
    FULL: "by token, gates in closed form",
    "hidden, top 1": "by token, gates of mergekit-moe (`hidden`)",
    "Branch-Train-MiX": "Branch-Train-MiX, trained for as long again",
    "dense, mean of the MLPs": "one dense model, the mean",
}


def kept() -> str:
    """What mixtures of six experts and merged dense models keep of what each expert knows, in short."""
    rows = grouped(load("modular_experts_seeds")["results"], "model")
    return "\n".join(table(("six experts of SmolLM2-135M-Instruct, merged", "of each one's gain, kept", "opens as"), [
        (title, describe_kept(rows[label]), opens_as(label)) for label, title in KEPT.items()
    ]))  # fmt: skip


def opens_as(label: str) -> str:
    """The class of a merged model."""
    if label == BY_TEXT:
        return "`LexiconForCausalLM`"
    return "stock Mixtral" if label.startswith((GATES, "hidden", "Branch")) else "stock Llama"


def modular_experts() -> str:
    """What each model keeps of the experts' gain, per domain and on the mean, and what it loses on texts of no expert."""
    record, more = load("modular_experts"), load("modular_experts_seeds")
    one, several = seeds_of(of_seed_42(record)), seeds_of(more["results"])
    domains = [name for name, row in record["results"][0]["domains"].items() if row["kept"]]
    lines = []
    for label in one | several:
        if label == "base":
            continue
        rows = several.get(label) or one[label]
        of = (mean(row["domains"][name]["kept"]["value"] for row in rows) for name in domains)
        each = " / ".join(f"{100 * value:.1f}" for value in of)
        kept = ["" if label not in one else f"{one[label][0]['kept']:.1%}", describe_kept(several.get(label, []))]
        unseen = mean(row["unseen"] for row in rows)
        lines.append((label, *kept, each, f"{unseen:+.1%}", describe_size(label, rows[0]), seconds_of(one.get(label))))
    header = ("model", "gain kept, seed 42", "three seeds: mean (range)", " / ".join(domains), "loss on chats", "MB")
    header += ("processor seconds of the merge",)
    settings = record["settings"]
    note = (
        f"{settings['texts']} held-out texts of each domain, their first {settings['window']} tokens. Single domains and chats are the mean of "
        f"the three seeds where these were measured. {of_seventh(record)}{of_beginnings(record, several)}The three seeds: {provenance(more)} The other columns: "
    )
    return page(table(header, lines), record, "modular_experts.py --data PATH --work FOLDER", note)


def describe_kept(rows: list[dict]) -> str:
    """The mean over seeds and the range; how many seeds there are, if they are not three."""
    if not rows:
        return ""
    kept = [row["kept"] for row in rows]
    seeds = "" if len(rows) == 3 else f", {len(rows)} seeds"
    return f"**{mean(kept):.1%}** ({100 * min(kept):.1f} to {100 * max(kept):.1f}{seeds})"


def describe_size(label: str, row: dict) -> str:
    """Megabytes of a mixture, and the size of an expert of low rank."""
    size, rank = f"{row['bytes'] / 1e6:.0f}" if "bytes" in row else "", rank_of(label)
    return size + (f" (an expert: {share_of_bytes(rank):.0%})" if rank else "")


def seconds_of(rows: list[dict] | None) -> str:
    """Processor seconds of a merge."""
    return f"{rows[0]['processor_seconds']:.0f}" if rows and "processor_seconds" in rows[0] else ""


def of_seventh(record: dict) -> str:
    """What adding the seventh expert cost."""
    return "".join(
        f"Adding the seventh expert, of the chats, takes {row['seconds_of_add']:.0f} s, moves no loss on the six domains by more than "
        f"{row['largest_change']:.1%}, and keeps {row['kept_of_seventh']:.0%} of its gain. "
        for row in record["results"]
        if "largest_change" in row
    )


def of_beginnings(record: dict, several: dict[str, list[dict]]) -> str:
    """What gates from the texts' beginnings keep, with which one seed was measured again."""
    again = [row for row in record["results"] if row["seed"] != 42 and row["model"] != "base"]
    if not again:
        return ""

    def describe(row: dict) -> str:
        label, kept = row["model"], f"{row['kept']:.1%}"
        before = next((old for old in several.get(label, []) if old["seed"] == row["seed"]), None)
        if before is None:
            return f"{label} {kept}"
        news = (100 * of["domains"]["news"]["kept"]["value"] for of in (before, row))
        return f"{label} {kept} (before {before['kept']:.1%}; news {' -> '.join(f'{value:.1f}' for value in news)})"

    return (
        "These rows have gates from pieces anywhere in the samples. Gates from the samples' beginnings, as now, were measured with "
        f"seed {again[0]['seed']}: {'; '.join(map(describe, again))}. "
    )


def findings() -> str:
    """What the table says in sentences, with its numbers."""
    record, several = load("modular_experts"), seeds_of(load("modular_experts_seeds")["results"])
    one = seeds_of(of_seed_42(record))
    again = [row for row in record["results"] if row["seed"] != 42 and row["model"].startswith(GATES)]

    def kept(*labels: str) -> str:
        return to_range(100 * mean(row["kept"] for row in several.get(label) or one[label]) for label in labels)

    routed = [label for label in several if label.startswith(GATES) and label.partition(", top")[2] in TOKENS]
    by_token = [mean(row["kept"] for row in several[label]) for label in routed]
    by_token += [row["kept"] for row in again if row["model"] in routed]
    unseen = (
        100 * mean(row["unseen"] for row in rows) for label, rows in several.items() if label in (*routed, BY_TEXT)
    )
    lost = (100 * (one[FULL][0]["kept"] - one[f"{FULL}, rank {rank}"][0]["kept"]) for rank in RANKS)
    bytes_of = (f"{share_of_bytes(rank):.0%}" for rank in RANKS)
    return f"""- Gates in closed form keep almost everything where a text is of one domain: `routing_policy: sequence_hard` lets one expert read a text (in
  the table the whole text chooses; in generation the prompt does). By token they keep {to_range(100 * x for x in by_token)}%, against {kept(*AVERAGES)}% of averages.
- The loss on texts of no expert (chats) rose by {to_range(unseen)}%; after training on few or narrow texts it can rise more. `include_base` helps them only if its samples are like them; here they are paragraphs of an encyclopedia.
- One dense model trained on all domains together, for as many steps as the experts, keeps {kept("dense, all domains together")}%. It needs all data at hand at once. Trained on
  one domain after another it forgets, and keeps {kept("dense, one domain after another")}%. A seventh expert is added to the mixture in a minute, and the six hardly notice.
- Train MLPs only (`--freeze shared`): experts whose other weights were trained too and are averaged keep {kept(WHOLE)}%, {kept(WHOLE + ", attention routed")}% with routed attention, {kept("Branch-Train-MiX")}% as a
  Branch-Train-MiX with sixty steps of everything. `--anchor` does not pay at this length of training: {kept(*(label for label in one | several if "anchored" in label))}%, with or without the base.
- Experts of rank {", ".join(map(str, RANKS))} lose {", ".join(f"{x:.0f}" for x in lost)} points, at {", ".join(bytes_of)} of the bytes of whole MLPs."""


def to_range(values: Iterable[float]) -> str:
    """The smallest and the largest value, rounded; one number if these are the same."""
    ends = sorted({round(value) for value in values})
    return f"{ends[0]}" + (f" to {ends[-1]}" if len(ends) > 1 else "")


def losses() -> str:
    """Nats per token of base and experts on each domain."""
    record = load("modular_experts")
    base = next(row for row in record["results"] if row["model"] == "base")["domains"]
    rows = (
        (name, f"{row['base']:.3f}", f"{row['experts'][name]:.3f}" if row["kept"] else "") for name, row in base.items()
    )
    return "\n".join(table(("nats per token", "base", "its own expert"), rows))


def plot_retention() -> None:
    """Plots what mixtures keep against their size, into docs/images."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    labels = seeds_of(of_seed_42(load("modular_experts")))
    rcParams["svg.hashsalt"] = "lexperts"  # the same file from the same numbers
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axis = figure.subplots()
    points = [
        (rows[0]["bytes"] / 1e6, 100 * mean(row["kept"] for row in rows), rank_of(label))
        for label, rows in labels.items()
        if label == FULL or rank_of(label)
    ]
    points.sort()
    axis.plot([x for x, *_ in points], [y for _, y, _ in points], "o-", color="C0", label="ridge gates, top 2")
    for x, y, rank in points:
        name = f"rank {rank}" if rank else "whole experts"
        axis.annotate(name, (x, y), (4, -14), textcoords="offset points", ha="left" if rank else "right", fontsize=9)
    base = 269  # MB of one dense model in bfloat16
    for label, colour in (
        ("dense, mean of the MLPs", "0.55"),
        ("dense, one domain after another", "C3"),
        ("dense, all domains together", "C2"),
    ):
        if label in labels:
            y = 100 * mean(row["kept"] for row in labels[label])
            axis.plot([base], [y], "s", color=colour, label=label)
    axis.set_xlabel("size of the model (MB)")
    axis.set_ylabel("gain of the experts that is kept (%)")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="lower right")
    figure.savefig(FIGURE, metadata={"Date": None})


if __name__ == "__main__":
    plot_retention()
