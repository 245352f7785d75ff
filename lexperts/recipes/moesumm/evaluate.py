r"""Scores summarisers on test splits: ROUGE-1, -2, -L, -Lsum and BERTScore for each data set, with means and tests.

    lexperts evaluate moesumm --systems ours=runs/moesumm mix=runs/backbone --baseline mix \
        --datasets mail=data/mail news=data/news --output-dir runs/scores
    lexperts evaluate moesumm --systems ours=runs/moesumm --zero-shot true --datasets chat=data/chat
    lexperts evaluate moesumm --systems 'ours=runs/few-shot/draw_*' 'mix=runs/few-shot-mix/draw_*' --baseline mix

A system is a model (a folder or a Hub id: MoeSumm, or any BART or PEGASUS), or a folder of summaries that
`lexperts train moesumm --setting few_shot` wrote. A name that is given several times, or a pattern, denotes several runs of
one system, such as seeds: scores are means over the runs, with their standard deviation. Summaries are kept in the output
folder; an interrupted command resumes when it is started again. Each difference from the baseline has a 95 per cent interval
(paired bootstrap over documents) and the p value of a paired t-test.
"""

import glob
import os
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pandas as pd

import modeling_moesumm  # noqa: F401  registers the models
from run_tools.errors import RESUME
from run_tools.files import write_file
from run_tools.fingerprints import fingerprint
from run_tools.loading import describe_load_errors, open_config
from run_tools.options import check_file_names, parse_name_place

from ..common.arguments import command
from ..common.scores_file import check_scores, write_scores
from .arguments import DataArguments, EvaluationArguments, GenerationArguments
from .data import load_sources, require_split
from .resumable_summaries import SummaryFile, load_summarizer, read_summaries
from .scores import bertscore, compare, rouge

NAMES = {"rouge1": "R-1", "rouge2": "R-2", "rougeL": "R-L", "rougeLsum": "R-Lsum", "bertscore": "BERTScore"}
MEAN = "mean R"  # of ROUGE-1, -2 and -L
ALL = "mean of all"

# system -> data set -> metric -> scores (R, n) of R runs and n documents
Scores = dict[str, dict[str, dict[str, np.ndarray]]]


def find_runs(systems: list[str], baseline: str | None) -> dict[str, list[str]]:
    """The runs of each system, by name; raises a `ValueError` for a pattern without matches, or an unknown baseline."""
    runs: dict[str, list[str]] = {}
    for system in systems:
        name, place = parse_name_place(system, "--systems")
        places = sorted(glob.glob(place)) if glob.has_magic(place) else [place]
        if not places:
            raise ValueError(f"--systems {system!r}: nothing matches {place!r}.")
        runs.setdefault(name, []).extend(places)
    check_file_names(runs, "--systems")
    if baseline is not None and baseline not in runs:
        raise ValueError(f"--baseline {baseline!r} is not one of the systems {', '.join(runs)}.")
    return runs


def written_summaries(place: str, only: str) -> dict[str, Path] | None:
    """The files of a folder of summaries, by data set; `None` for a model. Raises a `ValueError` for a folder without either."""
    if not os.path.isdir(place) or os.path.exists(os.path.join(place, "config.json")):
        return None
    files = {path.stem: path for path in sorted(Path(place).glob(f"{only}.jsonl"))}
    if not files:
        raise ValueError(f"{place} contains neither a model (config.json) nor summaries ({only}.jsonl).")
    return files


def summary_files(
    place: str, folder: Path, test: dict, args: EvaluationArguments, generation_args: GenerationArguments
) -> dict[str, Path]:
    """The file of summaries of each data set; a model writes missing ones. Raises a `ValueError` for unknown data sets."""
    if (found := written_summaries(place, args.only)) is not None:
        return found
    if not test:
        raise ValueError(f"{place} is a model. Pass --datasets with the documents to summarise.")
    with describe_load_errors("The model", place):
        datasets = getattr(open_config(place), "datasets", None)
    unknown = [] if args.zero_shot or datasets is None else [name for name in test if name not in datasets]
    if unknown:
        raise ValueError(
            f"{place} was not trained on {', '.join(map(repr, unknown))}, only on {', '.join(map(repr, datasets))}. Pass "
            "--zero-shot true to use only its main expert, or adapt it with lexperts train moesumm --setting few_shot."
        )
    files, model = {}, None
    for name, rows in test.items():
        dataset = None if args.zero_shot or datasets is None else name
        file = SummaryFile(folder / f"{name}.jsonl", rows, generation_args, fingerprint(place), dataset)
        if not file.is_finished:
            if model is None:
                print(place, flush=True)
                model, tokenizer = load_summarizer(place)
            with file:
                file.write_summaries(model, tokenizer)
        files[name] = file.path
    return files


def score_file(path: Path, args: EvaluationArguments) -> dict[str, np.ndarray]:
    """The scores `(n,)` of n summaries, by metric."""
    predictions, references = read_summaries(path)
    scores = rouge(predictions, references, args.stemming)
    if args.bertscore_model:
        scores["bertscore"] = bertscore(predictions, references, args.bertscore_model, args.bertscore_layer)
    named = {NAMES[metric]: values for metric, values in scores.items()}
    return named | {MEAN: np.mean([scores[metric] for metric in ("rouge1", "rouge2", "rougeL")], axis=0)}


def score_all(args: EvaluationArguments, generation_args: GenerationArguments) -> Scores:
    """The scores of all runs."""
    places_by_system, test = find_runs(args.systems, args.baseline), {}
    if args.datasets:
        columns = {"document_column": args.document_column, "summary_column": args.summary_column}
        data_args = DataArguments(datasets=args.datasets, **columns)
        test = require_split(load_sources(data_args), args.split, data_args)
        test = {name: rows for name, rows in test.items() if fnmatch(name, args.only)}
    all_places = [(system, place) for system, places in places_by_system.items() for place in places]
    keys = [
        f"{system} on {name}" for system, place in all_places for name in written_summaries(place, args.only) or test
    ]
    check_scores(args.output_dir, keys, scored_in)
    files: dict[str, dict[str, list[Path]]] = {system: {} for system in places_by_system}
    for system, places in places_by_system.items():
        for run, place in enumerate(places):
            folder = Path(args.output_dir) / (system if len(places) == 1 else f"{system}-{run}")
            for name, path in summary_files(place, folder, test, args, generation_args).items():
                files[system].setdefault(name, []).append(path)
    check_texts(files, args.baseline)
    scores: Scores = {}
    for system, sets in files.items():
        runs = {name: [score_file(path, args) for path in paths] for name, paths in sets.items()}
        scores[system] = {
            name: {metric: np.stack([run[metric] for run in of_set]) for metric in of_set[0]}
            for name, of_set in runs.items()
        }
    return scores


def check_texts(files: dict[str, dict[str, list[Path]]], baseline: str | None) -> None:
    """Raises a `ValueError` unless the runs of a system, and those of the baseline, have summaries of the same texts: of the same
    references in the same order.
    """
    for sets in files.values():
        for name, paths in sets.items():
            first, *others = [*paths, *([] if baseline is None else files[baseline].get(name, [])[:1])]
            references = read_summaries(first)[1]
            for other in others:
                theirs = read_summaries(other)[1]
                if references != theirs:
                    pairs = enumerate(zip(references, theirs, strict=False), start=1)
                    row = next((i for i, (a, b) in pairs if a != b), min(len(references), len(theirs)) + 1)
                    raise ValueError(
                        f"{first} and {other} are not of the same texts: their references differ in row {row} (they have "
                        f"{len(references):,} and {len(theirs):,} rows). Score summaries of the same rows."
                    )


def scored_in(content: dict) -> list[str]:
    """Each system with each of its data sets, of the content of scores.json."""
    return [f"{row['system']} on {row['data set']}" for row in content["scores"] if row["data set"] != ALL]


def score_table(scores: Scores) -> pd.DataFrame:
    """A row for each data set and system, and the means over data sets."""
    rows = []
    for system, sets in scores.items():
        means = []
        for name, metrics in sets.items():
            R, n = metrics[MEAN].shape
            values = {metric: float(x.mean()) for metric, x in metrics.items()}
            means.append(values)
            spread = float(metrics[MEAN].mean(1).std(ddof=1)) if R > 1 else None
            rows.append({"data set": name, "system": system, **values, "± runs": spread, "texts": n})
        if len(means) > 1:
            rows.append({"data set": ALL, "system": system, **pd.DataFrame(means).mean()})
    names = list(dict.fromkeys(row["data set"] for row in rows))
    return pd.DataFrame(sorted(rows, key=lambda row: names.index(row["data set"])))


def to_records(table: pd.DataFrame) -> list[dict]:
    """The rows of a table without the values that are missing, which JSON has not."""
    return [{name: value for name, value in row.items() if pd.notna(value)} for row in table.to_dict("records")]


def difference_table(scores: Scores, baseline: str) -> pd.DataFrame:
    """Each system against the baseline on the same documents, by the mean of ROUGE-1, -2 and -L; `agree` counts the runs
    whose difference has the sign of the mean. Raises a `ValueError` for other data sets.
    """
    rows, theirs = [], scores[baseline]
    for system, ours in scores.items():
        for name in [] if system == baseline else [*ours, *[ALL] * (len(ours) > 1)]:
            names = list(ours) if name == ALL else [name]
            if missing := [one for one in names if one not in theirs]:
                raise ValueError(f"{baseline} has no summaries of {missing[0]}, but {system} has. Score the same sets.")
            pairs = [(ours[one][MEAN], theirs[one][MEAN]) for one in names]  # (R, n)
            result = compare([x.mean(0) for x, _ in pairs], [y.mean(0) for _, y in pairs])
            agree = count_agreeing(pairs, result["difference"])
            rows.append({"data set": name, "system": system, **result, "agree": agree})
    return pd.DataFrame(rows)


def count_agreeing(pairs: list[tuple[np.ndarray, np.ndarray]], difference: float) -> str:
    """The runs whose difference has this sign, such as "2 of 3"; "" if the systems have different numbers of runs."""
    if len({len(x) for pair in pairs for x in pair}) > 1:
        return ""
    each = np.mean([x.mean(1) - y.mean(1) for x, y in pairs], axis=0)  # (R,)
    return f"{int((each * difference > 0).sum())} of {len(each)}"


def format_report(table: pd.DataFrame, tests: pd.DataFrame | None, args: EvaluationArguments) -> str:
    """The tables in Markdown."""
    words = "stemmed" if args.stemming else "unstemmed"
    title = f"F1 in per cent; ROUGE of {words} words; mean R is the mean of ROUGE-1, -2 and -L."
    if args.bertscore_model:
        title += f" BERTScore by {args.bertscore_model}, not rescaled."
    texts = [str(int(count)) if pd.notna(count) else "" for count in table["texts"]]
    table = table.assign(texts=texts).dropna(axis=1, how="all")
    table = table.astype(object).where(table.notna(), "")
    text = [title, "", table.to_markdown(index=False, floatfmt=".2f")]
    if tests is not None:
        tests = tests.assign(verdict=np.select([tests.low > 0, tests.high < 0], ["more", "less"], "a tie"))
        tests["p"] = tests["p"].astype(object).where(tests["p"].notna(), None)
        formats = ("", "", ".2f", ".2f", ".2f", ".3g", "", "")
        title = f"Difference of mean R from {args.baseline} on the same documents, with its 95 per cent interval:"
        text += ["", title, "", tests.to_markdown(index=False, floatfmt=formats, missingval="")]
    return "\n".join(text)


def run(args: EvaluationArguments, generation_args: GenerationArguments):
    """Scores all systems, and writes scores.json and scores.md."""
    scores = score_all(args, generation_args)
    table, tests, output = score_table(scores), None, Path(args.output_dir)
    results = {"scores": to_records(table)}
    if args.baseline and len(scores) > 1:
        tests = difference_table(scores, args.baseline)
        results["tests"] = to_records(tests)
    text = format_report(table, tests, args)
    write_scores(output, results)
    write_file(output / "scores.md", text + "\n")
    summaries = " and the summaries" if args.datasets else ""
    print(f"\n{text}\n\nscores.json, scores.md{summaries} are in {output}")


main = command("moesumm", "evaluate", run, RESUME)
