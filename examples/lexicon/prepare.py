"""Makes train.jsonl, validation.jsonl and test.jsonl of definitions from their public files (LM-Lexicon, Appendix A).

    python examples/lexicon/prepare.py --sources 3dex=3D-EX.csv --output_dir data/3dex
    python examples/lexicon/prepare.py --sources oxford=naacl_data/oxford wiki=naacl_data/wiki --keep_splits --output_dir data/both
    python examples/lexicon/prepare.py --sources mine=owner/name --term_column lemma --context_column usage --output_dir data/mine

A source is a file, a folder of them or a Hub data set; corpora.py lists the forms. Rows of Hei++, MultiRD and Webster's
Unabridged, which have no contexts, are dropped, and rows with an empty field; a row of several contexts becomes several.
Runs of white space become one space. A term goes to a split by a hash of its own, whatever other rows there are, so that
no term is in two, though synonyms may share a definition (--unseen_definitions leaves those out of validation and test);
--keep_splits keeps the splits that files or rows name. The folder also gets data.json (what was read, dropped and
kept; lengths and overlaps as in Table 1) and divergent.jsonl (same term and context, several definitions: Table 5).
"""

import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import numpy as np
from cli_args import parse_arguments
from corpora import NAMES, SPLITS, Raw, files_of, key, read_source
from run_folder import replace_file
from tqdm import tqdm
from train_expert import refuse, say

WITHOUT_CONTEXTS = ["Hei++", "MultiRD", "Webster's Unabridged"]
DIVERGENT = "divergent.jsonl"


@dataclass
class PreparationArguments:
    sources: list[str] = field(metadata={"help": "NAME=PLACE: a file, a folder or a Hub id; a name may be given again"})
    output_dir: str = field(metadata={"help": "folder for the three files, data.json and divergent.jsonl"})
    term_column: str | None = field(default=None, metadata={"help": "otherwise found among the usual names"})
    context_column: str | None = field(default=None, metadata={"help": "likewise; a text, or a list of texts"})
    definition_column: str | None = field(default=None, metadata={"help": "likewise"})
    source_column: str | None = field(default=None, metadata={"help": "the data set of a row; otherwise NAME"})
    split_column: str | None = field(default=None, metadata={"help": "for --keep_splits: train, valid(ation), test"})
    exclude: list[str] = field(
        default_factory=lambda: list(WITHOUT_CONTEXTS), metadata={"help": "data sets that are left out"}
    )
    keep_splits: bool = field(
        default=False, metadata={"help": "keep the splits of the files; rows of none go by their term"}
    )
    proportions: list[float] = field(
        default_factory=lambda: [0.8, 0.1, 0.1],
        metadata={"help": "of the terms that are for training, validation, test"},
    )
    keep_duplicates: bool = field(
        default=False, metadata={"help": "keep repeats of a term, context and definition inside a split"}
    )
    unseen_definitions: bool = field(
        default=False,
        metadata={
            "help": "leave out of validation and test what has a training row's definition, as WordNet's synonyms have"
        },
    )
    max_rows: int | None = field(
        default=None, metadata={"help": "rows of each split: whole terms, drawn by their hash"}
    )
    seed: int = field(default=42, metadata={"help": "of the hash"})
    traceback: bool = field(default=False, metadata={"help": "show the traceback of an error"})

    def __post_init__(self):
        shares = self.proportions
        if len(shares) != 3 or min(shares) < 0 or shares[0] <= 0 or abs(sum(shares) - 1) > 1e-6:
            raise ValueError(
                f"--proportions {' '.join(map(str, shares))}: three shares that add up to 1 are wanted, the first of them "
                "above 0, as in 0.8 0.1 0.1."
            )
        if self.max_rows is not None and self.max_rows < 1:
            raise ValueError(f"--max_rows {self.max_rows}: it must be 1 or more.")
        self.places = [named(source) for source in self.sources]


def named(source: str) -> tuple[str, str]:
    name, separator, place = source.partition("=")
    if not (separator and name.strip() and place.strip()):
        raise ValueError(f"--sources {source!r}: write NAME=PLACE, as in --sources oxford=data/oxford.")
    return name.strip(), place.strip()


def fraction(text: str, seed: int) -> float:
    """A number in [0, 1) that is always the same for a text and a seed, and uniform over texts."""
    digest = blake2b(f"{seed} {text}".encode(), digest_size=7).digest()  # 56 bits: more would round up to 1
    return int.from_bytes(digest, "big") / 2 ** (8 * len(digest))


def split_by_term(term: str, proportions: list[float], seed: int) -> str:
    place = fraction(key(term), seed)
    if place < proportions[0]:
        return "train"
    return "validation" if place < proportions[0] + proportions[1] else "test"


def reason_to_drop(raw: Raw, excluded: set[str]) -> str | None:
    """Why a row is left out (Appendix A), or None."""
    if raw.sources and all(key(name) in excluded for name in raw.sources):
        return "of an excluded data set"
    for name in ("term", "definition", "context"):
        value = getattr(raw, name)
        if not isinstance(value, str) or not value.strip():
            return f"{name} empty or no string"
    return None if raw.sources else "no data set named"


def one_space(text: str) -> str:
    return " ".join(text.split())


def collect(args: PreparationArguments) -> tuple[dict[str, list[dict]], dict]:
    """-> split -> rows in the order of the sources, and what was counted on the way.

    Raises:
        ValueError: where no row is left, or splits are to be kept and no row names one.
    """
    excluded, columns = {key(name) for name in args.exclude}, {what: getattr(args, f"{what}_column") for what in NAMES}
    splits: dict[str, list[dict]] = {split: [] for split in SPLITS}
    seen: dict[str, set] = {split: set() for split in SPLITS}
    found, dropped, kept, unsplit = Counter(), Counter(), Counter(), 0
    for name, place in args.places:
        if Path(place).is_dir() and (others := files_of(Path(place))[1]):
            say(f"{name}: not read: {', '.join(path.name for path in others)}")
        for raw in tqdm(read_source(name, place, columns), desc=name, unit="row", unit_scale=True):
            found[name] += 1
            if reason := reason_to_drop(raw, excluded):
                dropped[reason] += 1
                continue
            source = next(source for source in raw.sources if key(source) not in excluded)
            texts = {what: one_space(getattr(raw, what)) for what in ("term", "context", "definition")}
            split = raw.split if args.keep_splits else None
            if split is None:
                unsplit += 1
                split = split_by_term(texts["term"], args.proportions, args.seed)
            mark = tuple(texts.values())
            if not args.keep_duplicates and mark in seen[split]:
                dropped["repeated"] += 1
                continue
            seen[split].add(mark)
            kept[source] += 1
            splits[split].append({**texts, "source": source})
    counts = {"read": dict(found), "dropped": dict(dropped), "kept": dict(kept)}
    check_left(args, splits, counts, unsplit)
    return splits, counts | ({"of no split, put by their term": unsplit} if args.keep_splits else {})


def check_left(args: PreparationArguments, splits: dict[str, list[dict]], counts: dict, unsplit: int) -> None:
    total, left = sum(counts["read"].values()), sum(map(len, splits.values()))
    if not splits["train"]:
        reasons = "; ".join(f"{count:,} {reason}" for reason, count in counts["dropped"].items()) or "none dropped"
        raise ValueError(
            f"No row for training is left of {total:,} ({reasons}; {left:,} in other splits). Check the columns with "
            "--term_column, --context_column, --definition_column, and the sources."
        )
    if args.keep_splits and unsplit == left + counts["dropped"].get("repeated", 0):
        raise ValueError(
            f"--keep_splits: not one of {left:,} rows names a split, nor does a file. Leave it out, or name the column with "
            "--split_column."
        )


def draw_terms(rows: list[dict], max_rows: int | None, seed: int) -> list[dict]:
    """At most `max_rows` rows, in their order: whole terms, by their hash, as long as they fit."""
    if max_rows is None or len(rows) <= max_rows:
        return rows
    sizes = Counter(key(row["term"]) for row in rows)
    chosen, room = set(), max_rows
    for term in sorted(sizes, key=lambda term: (fraction(f"draw {term}", seed), term)):
        if sizes[term] <= room:
            chosen.add(term)
            room -= sizes[term]
    return [row for row in rows if key(row["term"]) in chosen]


def leave_out_seen(splits: dict[str, list[dict]], counts: dict) -> None:
    """Drops, and counts, the held-out rows that have the definition of a training row."""
    seen = {key(row["definition"]) for row in splits["train"]}
    for split in SPLITS[1:]:
        rows = [row for row in splits[split] if key(row["definition"]) not in seen]
        reason = f"{split} with the definition of a training row"
        counts["dropped"] |= {reason: dropped} if (dropped := len(splits[split]) - len(rows)) else {}
        splits[split] = rows
    counts["kept"] = dict(Counter(row["source"] for rows in splits.values() for row in rows))


def divergent_groups(rows: list[dict]) -> list[list[dict]]:
    """Groups of rows of one term and context that have several definitions (Table 5)."""
    groups: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        groups.setdefault((key(row["term"]), key(row["context"])), []).append(row)
    return [group for group in groups.values() if len({key(row["definition"]) for row in group}) > 1]


def spread(values: list[int]) -> dict[str, float]:
    return {"mean": round(float(np.mean(values)), 2), "std": round(float(np.std(values)), 2)}


def describe(rows: list[dict]) -> dict:
    """The numbers of Table 1 and Table 5 for one split; tokens are runs without white space."""
    glosses: dict[str, set[str]] = {}
    for row in rows:
        glosses.setdefault(key(row["term"]), set()).add(key(row["definition"]))
    return {
        "rows": len(rows),
        "terms": len(glosses),
        "definitions a term": spread([len(found) for found in glosses.values()]),
        "tokens of a term": spread([len(term.split()) for term in glosses]),
        "tokens of a context": spread([len(row["context"].split()) for row in rows]),
        "tokens of a definition": spread([len(row["definition"].split()) for row in rows]),
        "divergent rows": sum(map(len, divergent_groups(rows))),
        "term absent from its context": sum(key(row["term"]) not in key(row["context"]) for row in rows),
    }


def overlap(train: list[dict], other: list[dict]) -> dict[str, float]:
    """|train and other| / |other| in per cent, of terms, of terms with their definitions (Table 1), and of definitions."""
    found = {}
    kinds = {
        "terms": ("term",),
        "terms with definitions": ("term", "definition"),
        "definitions": ("definition",),
    }
    for name, fields in kinds.items():
        ours, theirs = ({tuple(key(row[what]) for what in fields) for row in rows} for rows in (train, other))
        found[name] = round(100 * len(ours & theirs) / len(theirs), 2)
    return found


def json_lines(rows) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def report(data: dict, output: Path) -> str:
    """What data.json says, for people."""
    read, dropped = sum(data["read"].values()), data["dropped"]
    lines = [f"{read:,} rows read, {sum(dropped.values()):,} dropped"]
    lines += [f"  {count:,} {reason}" for reason, count in dropped.items()]
    if unsplit := data.get("of no split, put by their term"):
        lines.append(f"  {unsplit:,} rows named no split and were put by their term")
    for split, numbers in data["splits"].items():
        rows, divergent, absent = (numbers[name] for name in ("rows", "divergent rows", "term absent from its context"))
        line = f"{split}: {rows:,} rows, {numbers['terms']:,} terms; {divergent:,} rows divergent ({divergent / rows:.2%}); "
        lines.append(line + f"{absent:,} contexts without their term ({absent / rows:.2%})")
    for split, shares in data["overlap with train"].items():
        lines.append(f"{split}: " + ", ".join(f"{share:.2f}% of its {what} in train" for what, share in shares.items()))
    return "\n".join(
        [*lines, f"In {output}: {', '.join(f'{split}.jsonl' for split in data['splits'])}, data.json, {DIVERGENT}"]
    )


def prepare(args: PreparationArguments) -> dict:
    """Reads, splits, writes and tells; -> what stands in data.json."""
    splits, counts = collect(args)
    if args.unseen_definitions:
        leave_out_seen(splits, counts)
    splits = {split: draw_terms(rows, args.max_rows, args.seed) for split, rows in splits.items()}
    for split in [split for split, rows in splits.items() if not rows]:
        say(f"{split}: no rows, and no file")
        del splits[split]
    if "train" not in splits:
        raise ValueError(f"--max_rows {args.max_rows}: no term of the training rows has so few. Use more.")
    output = Path(args.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        if split in splits:
            replace_file(output / f"{split}.jsonl", json_lines(splits[split]))
        else:
            (output / f"{split}.jsonl").unlink(missing_ok=True)  # an earlier run's would pass for this one's
    groups = ((split, group) for split, rows in splits.items() for group in divergent_groups(rows))
    replace_file(output / DIVERGENT, json_lines(listed(split, group) for split, group in groups))
    data = counts | {
        "splits": {split: describe(rows) for split, rows in splits.items()},
        "overlap with train": {
            split: overlap(splits["train"], splits[split]) for split in SPLITS[1:] if split in splits
        },
        "options": asdict(args),
    }
    replace_file(output / "data.json", json.dumps(data, ensure_ascii=False, indent=1))
    say(report(data, output))
    return data


def listed(split: str, group: list[dict]) -> dict:
    definitions = list(dict.fromkeys(row["definition"] for row in group))
    sources = sorted({row["source"] for row in group})
    return {
        "split": split,
        "term": group[0]["term"],
        "context": group[0]["context"],
        "definitions": definitions,
        "sources": sources,
    }


def main():
    try:
        (args,) = parse_arguments((PreparationArguments,), __doc__)
        prepare(args)
    except (OSError, ValueError, ImportError) as error:
        refuse(error)


if __name__ == "__main__":
    main()
