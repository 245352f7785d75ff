"""Makes train.jsonl, validation.jsonl and test.jsonl from public files of definitions (LM-Lexicon, Appendix A).

    lexperts define prepare --sources 3dex=3D-EX.csv --output-dir data/3dex
    lexperts define prepare --sources oxford=naacl_data/oxford wiki=naacl_data/wiki --keep-splits --output-dir data/both
    lexperts define prepare --sources mine=owner/name --term-column lemma --context-column usage --output-dir data/mine

A source is a file, a folder of files or a Hub dataset; supported formats are CSV, TSV, JSON, JSON Lines and those of 3D-EX,
Ishiwatari et al., Gadetsky et al. and SimpDefiner. Rows of Hei++, MultiRD and Webster's Unabridged, which have no contexts, and
rows with an empty field are dropped. A row with several contexts becomes several rows. White space is normalised. The split
of a row depends on a hash of its term only, so that no term is in two splits; synonyms may share a definition, and
--unseen-definitions leaves these out of validation and test. --keep-splits keeps the splits of files or rows. The folder also
gets data.json (rows read, dropped and kept; lengths and overlaps as in Table 1) and divergent.jsonl (term and context with
several definitions: Table 5).
"""

import json
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path

import numpy as np
from tqdm import tqdm

from run_tools.files import write_file
from run_tools.jsonl import json_lines

from ..common.arguments import command
from .arguments import PreparationArguments
from .data import NAMES, SPLITS, RawRow, normalise_key, read_source, split_files

DATA, DIVERGENT = "data.json", "divergent.jsonl"
REASONS = {  # why rows are dropped
    "excluded_dataset": "of an excluded dataset",
    "dataset_missing": "without a dataset name",
    "repeated": "repeated",
    **{f"{name}_missing": f"without a {name}" for name in ("term", "definition", "context")},
    **{f"{split}_with_training_definition": f"{split} rows with a training definition" for split in SPLITS[1:]},
}


def fraction(text: str, seed: int) -> float:
    """A number in [0, 1) that depends on text and seed only, uniform over texts."""
    digest = blake2b(f"{seed} {text}".encode(), digest_size=7).digest()  # 56 bits: more would round up to 1
    return int.from_bytes(digest, "big") / 2 ** (8 * len(digest))


def split_by_term(term: str, proportions: list[float], seed: int) -> str:
    """The split of a term, by its hash."""
    position = fraction(normalise_key(term), seed)
    if position < proportions[0]:
        return "train"
    return "validation" if position < proportions[0] + proportions[1] else "test"


def reason_to_drop(raw: RawRow, excluded: set[str]) -> str | None:
    """Why a row is dropped (Appendix A), as a key of `REASONS`, or None."""
    if raw.sources and all(normalise_key(name) in excluded for name in raw.sources):
        return "excluded_dataset"
    for name in ("term", "definition", "context"):
        value = getattr(raw, name)
        if not isinstance(value, str) or not value.strip():
            return f"{name}_missing"
    return None if raw.sources else "dataset_missing"


def collect(args: PreparationArguments) -> tuple[dict[str, list[dict]], dict]:
    """The rows of each split in the order of the sources, and the counts for data.json. Raises errors as `check_left`."""
    excluded = {normalise_key(name) for name in args.exclude}
    columns = {what: getattr(args, f"{what}_column") for what in NAMES}
    splits: dict[str, list[dict]] = {split: [] for split in SPLITS}
    seen: dict[str, set] = {split: set() for split in SPLITS}
    read, dropped, kept, unsplit = Counter(), Counter(), Counter(), 0
    for name, place in args.places:
        if Path(place).is_dir() and (others := split_files(Path(place))[1]):
            print(f"{name}: not read: {', '.join(path.name for path in others)}", flush=True)
        for raw in tqdm(read_source(name, place, columns), desc=name, unit="row", unit_scale=True):
            read[name] += 1
            if reason := reason_to_drop(raw, excluded):
                dropped[reason] += 1
                continue
            source = next(source for source in raw.sources if normalise_key(source) not in excluded)
            texts = {what: " ".join(getattr(raw, what).split()) for what in ("term", "context", "definition")}
            split = raw.split if args.keep_splits else None
            if split is None:
                unsplit += 1
                split = split_by_term(texts["term"], args.proportions, args.seed)
            values = tuple(texts.values())
            if not args.keep_duplicates and values in seen[split]:
                dropped["repeated"] += 1
                continue
            seen[split].add(values)
            kept[source] += 1
            splits[split].append({**texts, "source": source})
    counts = {"read": dict(read), "dropped": dict(dropped), "kept": dict(kept)}
    check_left(args, splits, counts, unsplit)
    return splits, counts | ({"split_by_term": unsplit} if args.keep_splits else {})


def check_left(args: PreparationArguments, splits: dict[str, list[dict]], counts: dict, unsplit: int) -> None:
    """Raises a ValueError if no training row is left, or if no row has a split that could be kept."""
    total, left = sum(counts["read"].values()), sum(map(len, splits.values()))
    if not splits["train"]:
        reasons = ", ".join(f"{count:,} {REASONS[name]}" for name, count in counts["dropped"].items())
        reasons = reasons or "none dropped"
        raise ValueError(
            f"No training rows are left of {total:,} ({reasons}; {left:,} in other splits). Check the sources, and the columns "
            "with --term-column, --context-column, --definition-column."
        )
    if args.keep_splits and unsplit == left + counts["dropped"].get("repeated", 0):
        raise ValueError(
            f"--keep-splits: none of the {left:,} rows and files has a split. Leave it out, or pass the column as "
            "--split-column."
        )


def limit_rows(rows: list[dict], max_rows: int | None, seed: int) -> list[dict]:
    """At most `max_rows` rows, in their order: whole terms in the order of their hashes, as far as they fit."""
    if max_rows is None or len(rows) <= max_rows:
        return rows
    sizes = Counter(normalise_key(row["term"]) for row in rows)
    selected, remaining = set(), max_rows
    for term in sorted(sizes, key=lambda term: (fraction(f"draw {term}", seed), term)):
        if sizes[term] <= remaining:
            selected.add(term)
            remaining -= sizes[term]
    return [row for row in rows if normalise_key(row["term"]) in selected]


def leave_out_seen(splits: dict[str, list[dict]], counts: dict) -> None:
    """Drops, and counts, validation and test rows with the definition of a training row."""
    seen = {normalise_key(row["definition"]) for row in splits["train"]}
    for split in SPLITS[1:]:
        rows = [row for row in splits[split] if normalise_key(row["definition"]) not in seen]
        if dropped := len(splits[split]) - len(rows):
            counts["dropped"][f"{split}_with_training_definition"] = dropped
        splits[split] = rows
    counts["kept"] = dict(Counter(row["source"] for rows in splits.values() for row in rows))


def divergent_groups(rows: list[dict]) -> list[list[dict]]:
    """Groups of rows with the same term and context and different definitions (Table 5)."""
    groups: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        groups.setdefault((normalise_key(row["term"]), normalise_key(row["context"])), []).append(row)
    return [group for group in groups.values() if len({normalise_key(row["definition"]) for row in group}) > 1]


def mean_and_std(values: list[int]) -> dict[str, float]:
    """Mean and standard deviation."""
    return {"mean": round(float(np.mean(values)), 2), "std": round(float(np.std(values)), 2)}


def describe(rows: list[dict]) -> dict:
    """The numbers of Tables 1 and 5 for one split; tokens are separated by white space."""
    from modeling_lexicon.terms_lexicon import is_in_context  # imports torch, which takes seconds

    glosses: dict[str, set[str]] = {}
    for row in rows:
        glosses.setdefault(normalise_key(row["term"]), set()).add(normalise_key(row["definition"]))
    return {
        "rows": len(rows),
        "terms": len(glosses),
        "definitions_per_term": mean_and_std([len(own) for own in glosses.values()]),
        "tokens_per_term": mean_and_std([len(term.split()) for term in glosses]),
        "tokens_per_context": mean_and_std([len(row["context"].split()) for row in rows]),
        "tokens_per_definition": mean_and_std([len(row["definition"].split()) for row in rows]),
        "divergent_rows": sum(map(len, divergent_groups(rows))),
        "term_absent_from_context": sum(
            not is_in_context(normalise_key(row["term"]), normalise_key(row["context"])) for row in rows
        ),
    }


def overlap(train: list[dict], other: list[dict]) -> dict[str, float]:
    """|train and other| / |other| in per cent: terms, terms with their definitions (Table 1), and definitions."""
    shares = {}
    kinds = {"terms": ("term",), "terms_with_definitions": ("term", "definition"), "definitions": ("definition",)}
    for name, fields in kinds.items():
        ours, theirs = ({tuple(normalise_key(row[what]) for what in fields) for row in rows} for rows in (train, other))
        shares[name] = round(100 * len(ours & theirs) / len(theirs), 2)
    return shares


def format_report(data: dict, output: Path) -> str:
    """The content of data.json as text."""
    read, dropped = sum(data["read"].values()), data["dropped"]
    lines = [f"{read:,} rows read, {sum(dropped.values()):,} dropped"]
    lines += [f"  {count:,} {REASONS[reason]}" for reason, count in dropped.items()]
    if unsplit := data.get("split_by_term"):
        lines.append(f"  {unsplit:,} rows had no split and were split by their term")
    for split, numbers in data["splits"].items():
        rows, divergent, absent = (numbers[name] for name in ("rows", "divergent_rows", "term_absent_from_context"))
        line = f"{split}: {rows:,} rows, {numbers['terms']:,} terms; {divergent:,} rows divergent ({divergent / rows:.2%}); "
        lines.append(line + f"{absent:,} contexts without their term ({absent / rows:.2%})")
    for split, shares in data["overlap_with_train"].items():
        parts = (f"{share:.2f}% of its {kind.replace('_', ' ')} in train" for kind, share in shares.items())
        lines.append(f"{split}: {', '.join(parts)}")
    lines.append(f"In {output}: {', '.join(f'{split}.jsonl' for split in data['splits'])}, data.json, {DIVERGENT}")
    return "\n".join(lines)


def find_earlier_splits(output: Path) -> list[str]:
    """The splits of an earlier preparation in a folder, by its data.json. Raises a `ValueError` if the folder has a file of
    a name that is written, and no data.json of ours names it. Nothing is written then.
    """
    splits: list[str] | None = None
    with suppress(OSError, ValueError, TypeError, KeyError):
        splits = [
            split for split in SPLITS if split in json.loads((output / DATA).read_text(encoding="utf-8"))["splits"]
        ]
    known = [] if splits is None else [DATA, DIVERGENT, *(f"{split}.jsonl" for split in splits)]
    for name in (DATA, DIVERGENT, *(f"{split}.jsonl" for split in SPLITS)):
        if name not in known and (output / name).exists():
            raise ValueError(
                f"{output} holds {name}, which no earlier preparation is known to have written ({DATA} does not name it). Move it "
                "away, or use another --output-dir."
            )
    return splits or []


def prepare(args: PreparationArguments) -> dict:
    """Reads the sources, writes the splits and prints their numbers -> the content of data.json."""
    splits, counts = collect(args)
    if args.unseen_definitions:
        leave_out_seen(splits, counts)
    splits = {split: limit_rows(rows, args.max_rows, args.seed) for split, rows in splits.items()}
    for split in [split for split, rows in splits.items() if not rows]:
        print(f"{split}: no rows, and no file")
        del splits[split]
    if "train" not in splits:
        raise ValueError(f"--max-rows {args.max_rows}: all training terms have more rows. Use a larger value.")
    output = Path(args.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    earlier = find_earlier_splits(output)
    names = dict.fromkeys([*splits, *earlier])
    write_file(output / DATA, json.dumps({"unfinished": True, "splits": names}))  # before any of them is written
    for split in names:
        if split in splits:
            write_file(output / f"{split}.jsonl", json_lines(splits[split]))
        else:
            (output / f"{split}.jsonl").unlink(missing_ok=True)
    divergent = (
        {"split": split, "term": group[0]["term"], "context": group[0]["context"],
         "definitions": list(dict.fromkeys(row["definition"] for row in group)),
         "sources": sorted({row["source"] for row in group})}
        for split, rows in splits.items() for group in divergent_groups(rows)
    )  # fmt: skip
    write_file(output / DIVERGENT, json_lines(divergent))
    overlaps = {split: overlap(splits["train"], splits[split]) for split in SPLITS[1:] if split in splits}
    data = counts | {"splits": {split: describe(rows) for split, rows in splits.items()}}
    data |= {"overlap_with_train": overlaps, "options": asdict(args)}
    write_file(output / DATA, json.dumps(data, ensure_ascii=False, indent=1))
    print(format_report(data, output), flush=True)
    return data


main = command("lexicon", "prepare", prepare)
