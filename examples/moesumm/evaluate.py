"""Scores summarisers on test splits: ROUGE-1, -2, -L, -Lsum and BERTScore, each data set and the means, with tests.

    python examples/moesumm/evaluate.py --systems ours=runs/moesumm mix=runs/backbone --baseline mix \
        --datasets mail=data/mail news=data/news --output_dir runs/scores
    python examples/moesumm/evaluate.py --systems ours=runs/moesumm --zero_shot --datasets chat=data/chat
    python examples/moesumm/evaluate.py --systems 'ours=runs/few-shot/draw_*' 'mix=runs/few-shot-mix/draw_*' --baseline mix

A system is a model (a folder or a Hub id: MoeSumm, or any BART or PEGASUS) or a folder of summaries that train.py wrote. A
name given several times, or a pattern, stands for runs of one system, as of several seeds: scores are means over the runs,
with the spread between them. Summaries are kept in the output folder and written once; interrupted, the same command goes
on. A difference from the baseline comes with the 95 per cent interval of a paired bootstrap over documents and the p of a
paired t-test.
"""

import glob
import json
import os
import sys
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import numpy as np
import pandas as pd
from cli_args import parse_arguments, run_or_exit
from run_folder import fingerprint, replace_file
from scores import bertscore, compare, rouge
from sources import DataArguments, named, one_split, read_sources
from summaries import SummaryFile, Writing, open_summariser, read_summaries
from transformers import AutoConfig

import modeling_moesumm  # noqa: F401  registers the models
from keyphrase_tools.opening import opening

NAMES = {"rouge1": "R-1", "rouge2": "R-2", "rougeL": "R-L", "rougeLsum": "R-Lsum", "bertscore": "BERTScore"}
MEAN = ("rouge1", "rouge2", "rougeL")  # what a system is judged by, as one number
ALL = "mean of all"

Scores = dict[str, dict[str, list[dict[str, np.ndarray]]]]  # system -> data set -> runs -> metric -> (n,)


@dataclass
class EvaluationArguments:
    systems: list[str] = field(metadata={"help": "name=PLACE: a model, or a folder or pattern of folders of summaries"})
    baseline: str | None = field(default=None, metadata={"help": "the system that others are compared with"})
    datasets: list[str] = field(default_factory=list, metadata={"help": "name=PLACE, as in train.py; for models"})
    document_column: str | None = field(default=None, metadata={"help": "otherwise found among the usual names"})
    summary_column: str | None = field(default=None, metadata={"help": "likewise"})
    only: str = field(default="*", metadata={"help": "pattern of the data sets' names that are scored, as '*-10'"})
    split: str = field(default="test", metadata={"help": "that is scored"})
    output_dir: str = field(default="runs/scores", metadata={"help": "for summaries, scores.json and scores.md"})
    zero_shot: bool = field(default=False, metadata={"help": "the main expert alone, for data sets never trained on"})
    stemming: bool = field(default=True, metadata={"help": "ROUGE of stemmed words"})
    bertscore_model: str | None = field(default=None, metadata={"help": "folder or Hub id; without it no BERTScore"})
    bertscore_layer: int | None = field(default=None, metadata={"help": "its layer; by default the last"})
    traceback: bool = field(default=False, metadata={"help": "show the traceback of an error"})

    def __post_init__(self):
        self.places = places_of(self.systems)
        if self.baseline is not None and self.baseline not in self.places:
            raise ValueError(f"--baseline {self.baseline!r} is none of the systems {', '.join(self.places)}.")


def places_of(systems: list[str]) -> dict[str, list[str]]:
    """name -> its runs."""
    found: dict[str, list[str]] = {}
    for given in systems:
        name, place = named(given, "--systems")
        runs = sorted(glob.glob(place)) if glob.has_magic(place) else [place]
        if not runs:
            raise ValueError(f"--systems {given!r}: nothing matches {place!r}.")
        found.setdefault(name, []).extend(runs)
    return found


def is_summaries(place: str) -> bool:
    return os.path.isdir(place) and not os.path.exists(os.path.join(place, "config.json"))


def files_of(place: str, folder: Path, test: dict, args: EvaluationArguments, writing: Writing) -> dict[str, Path]:
    """Data set -> the file of its summaries, which a model writes now.

    Raises:
        ValueError: for a folder with neither, and a data set that the model does not know.
    """
    if is_summaries(place):
        files = {path.stem: path for path in sorted(Path(place).glob(f"{args.only}.jsonl"))}
        if not files:
            raise ValueError(
                f"{place} is neither a model (no config.json) nor a folder of summaries (no {args.only}.jsonl)."
            )
        return files
    if not test:
        raise ValueError(f"{place} is a model: pass --datasets for it to summarise.")
    with opening("The model", place):
        known = getattr(AutoConfig.from_pretrained(place), "datasets", None)
    unknown = [] if args.zero_shot or known is None else [name for name in test if name not in known]
    if unknown:
        raise ValueError(
            f"{place} does not know {', '.join(map(repr, unknown))}, only {', '.join(map(repr, known))}. Pass --zero_shot "
            "to have its main expert alone, or adapt it by train.py --setting few_shot."
        )
    files, model = {}, None
    for name, rows in test.items():
        dataset = None if args.zero_shot or known is None else name
        file = SummaryFile(folder / f"{name}.jsonl", rows, writing, fingerprint(place), dataset)
        if not file.is_complete():
            if model is None:
                print(place, flush=True)
                model, tokenizer = open_summariser(place)
            file.write(model, tokenizer)
        files[name] = file.path
    return files


def score_file(path: Path, args: EvaluationArguments) -> dict[str, np.ndarray]:
    """metric -> (n,)."""
    predictions, references = read_summaries(path)
    found = rouge(predictions, references, args.stemming)
    if args.bertscore_model:
        found["bertscore"] = bertscore(predictions, references, args.bertscore_model, args.bertscore_layer)
    return found


def score_all(args: EvaluationArguments, writing: Writing) -> Scores:
    test = {}
    if args.datasets:
        data = DataArguments(args.datasets, args.document_column, args.summary_column)
        test = one_split(read_sources(data), args.split, data)
        test = {name: rows for name, rows in test.items() if fnmatch(name, args.only)}
    scores: Scores = {}
    for system, places in args.places.items():
        for run, place in enumerate(places):
            folder = Path(args.output_dir) / (system if len(places) == 1 else f"{system}-{run}")
            for name, path in files_of(place, folder, test, args, writing).items():
                scores.setdefault(system, {}).setdefault(name, []).append(score_file(path, args))
    return scores


def per_document(runs: list[dict[str, np.ndarray]], metric: str) -> np.ndarray:
    """(n,): the mean over runs."""
    return np.mean([run[metric] for run in runs], axis=0)


def mean_rouge(runs: list[dict[str, np.ndarray]]) -> np.ndarray:
    """(n,): the mean of ROUGE-1, -2 and -L, and over runs."""
    return np.mean([per_document(runs, metric) for metric in MEAN], axis=0)


def table_of(scores: Scores) -> pd.DataFrame:
    """A row for each data set and system, and the means over data sets."""
    rows = []
    for system, sets in scores.items():
        means = []
        for name, runs in sets.items():
            values = {NAMES[m]: float(per_document(runs, m).mean()) for m in runs[0]}
            values["mean R"] = float(mean_rouge(runs).mean())
            values["± runs"] = (
                float(np.std([mean_rouge([run]).mean() for run in runs], ddof=1)) if len(runs) > 1 else None
            )
            means.append(values)
            rows.append({"data set": name, "system": system, **values, "texts": len(runs[0]["rouge1"])})
        if len(means) > 1:
            overall = {name: np.mean([values[name] for values in means]) for name in means[0] if name != "± runs"}
            rows.append({"data set": ALL, "system": system, **overall})
    names = list(dict.fromkeys(row["data set"] for row in rows))
    return pd.DataFrame(rows).sort_values(
        "data set", key=lambda c: c.map(names.index), kind="stable", ignore_index=True
    )


def tests_of(scores: Scores, baseline: str) -> pd.DataFrame:
    """Each system against the baseline on the same documents, by the mean of ROUGE-1, -2 and -L.

    `agree` counts the runs, in their order, whose difference has the sign of the mean one, where both have as many.

    Raises:
        ValueError: where a data set's documents are not the baseline's.
    """
    rows = []
    for system, sets in scores.items():
        for name in [] if system == baseline else [*sets, *[ALL] * (len(sets) > 1)]:
            names = list(sets) if name == ALL else [name]
            missing = [one for one in names if one not in scores[baseline]]
            if missing:
                raise ValueError(f"{baseline} has no summaries of {missing[0]}, and {system} has. Score the same sets.")
            pairs = [(sets[one], scores[baseline][one]) for one in names]
            ours, theirs = ([mean_rouge(pair[i]) for pair in pairs] for i in (0, 1))
            for one, x, y in zip(names, ours, theirs, strict=True):
                if len(x) != len(y):
                    raise ValueError(f"{one}: {len(x)} summaries by {system}, {len(y)} by {baseline}.")
            found = compare(ours, theirs)
            rows.append({"data set": name, "system": system, **found, "agree": agreeing(pairs, found["difference"])})
    return pd.DataFrame(rows)


def agreeing(pairs: list[tuple[list, list]], difference: float) -> str:
    runs = {len(run) for pair in pairs for run in pair}
    if len(runs) > 1:
        return ""
    count = runs.pop()
    each = [np.mean([mean_rouge([x[i]]).mean() - mean_rouge([y[i]]).mean() for x, y in pairs]) for i in range(count)]
    return f"{sum(bool(one * difference > 0) for one in each)} of {count}"


def without_gaps(table: pd.DataFrame) -> pd.DataFrame:
    """With nothing where there is no number, and counts as whole numbers."""
    table = table.assign(texts=[str(int(count)) if pd.notna(count) else "" for count in table["texts"]])
    return table.astype(object).where(table.notna(), "").dropna(axis=1, how="all")


def verdict(low: float, high: float) -> str:
    return "more" if low > 0 else "less" if high < 0 else "a tie"


def report(scores: Scores, args: EvaluationArguments) -> str:
    words = "stemmed" if args.stemming else "unstemmed"
    text = [f"F1 in per cent; ROUGE of {words} words; mean R is the mean of ROUGE-1, -2 and -L.", ""]
    if args.bertscore_model:
        text[0] += f" BERTScore by {args.bertscore_model}, not rescaled."
    text.append(without_gaps(table_of(scores)).to_markdown(index=False, floatfmt=".2f"))
    if args.baseline and len(scores) > 1:
        tests = tests_of(scores, args.baseline)
        tests["verdict"] = [verdict(low, high) for low, high in zip(tests.low, tests.high, strict=True)]
        text += ["", f"Mean R against {args.baseline}, on the same documents, with the 95 per cent interval:", ""]
        text.append(tests.to_markdown(index=False, floatfmt=("", "", ".2f", ".2f", ".2f", ".3g", "", "")))
    return "\n".join(text)


def run(args: EvaluationArguments, writing: Writing):
    scores = score_all(args, writing)
    text = report(scores, args)
    output = Path(args.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    results = {"scores": table_of(scores).to_dict("records")}
    if args.baseline and len(scores) > 1:
        results["tests"] = tests_of(scores, args.baseline).to_dict("records")
    replace_file(output / "scores.json", json.dumps(results, indent=1))
    replace_file(output / "scores.md", text + "\n")
    print(f"\n{text}\n\nIn {output}: scores.json, scores.md" + (", and the summaries" if args.datasets else ""))


def main():
    args, writing = parse_arguments((EvaluationArguments, Writing), __doc__)
    run_or_exit(run, args, writing, traceback=args.traceback)


if __name__ == "__main__":
    main()
