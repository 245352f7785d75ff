"""Scores generated definitions: BLEU, ROUGE-L, METEOR, BERTScore, MAUVE, with intervals and paired tests.

    lexperts evaluate definitions --files dense=dense.jsonl mixture=mixture.jsonl --baseline dense --output-dir results
    lexperts evaluate definitions --files a=a-21.jsonl a=a-42.jsonl --references data/train.jsonl \\
        --bertscore-model roberta-large --mauve-model gpt2-large --output-dir results

Files are those of `lexperts define generate`: rows with term, context, definition (gold) and generated. Several files of one
name are the seeds of one system; a row's score is then their mean. A row's score is the best over its references. There are
two protocols: all definitions of the same term and context, and all definitions of the same term in any sense (Huang et al.
2021), in the files and in --references. MAUVE compares all generated definitions with all gold ones. Full stops are removed
from all texts, except decimal points. The 95 per cent intervals are bootstrapped over rows, those of differences with the same
rows for both systems; p is that of a two-sided paired t-test over rows. A metric whose package is missing, or
that has no model, is reported, and the others are computed. The folder gets scores.json and NAME.rows.jsonl of each system.
"""

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from tqdm import tqdm

from run_tools.definition_rows import is_complete_row, load_definition_rows
from run_tools.errors import DEBUG, one_line
from run_tools.files import write_file
from run_tools.jsonl import json_lines, read_jsonl

from ..common.arguments import command
from ..common.bootstrap import bootstrap_means, confidence_interval
from ..common.scores_file import check_scores, write_scores
from ..common.tables import align_columns
from . import scores
from .arguments import EvaluationArguments

TITLES = {
    "bleu": "BLEU", "rouge": "ROUGE-L", "meteor": "METEOR", "bertscore": "BERTScore", "mauve": "MAUVE",
}  # fmt: skip
PROTOCOLS = {"context": "the same term and context", "term": "the same term in any sense"}
EXAMPLE = '{"term": "...", "context": "...", "definition": "...", "generated": "..."}'

Scores = dict[tuple[str, str, str], np.ndarray]  # (system, protocol, metric) -> (seeds, rows)


def read_generated(files_by_system: dict[str, list[str]]) -> tuple[list[dict], dict[str, list[list[str]]]]:
    """Files -> their common rows, and the definitions of each system and seed. Raises a `ValueError` with the row's
    number for a missing field and for files with other rows.
    """
    rows, generated, first = None, {}, None
    for name, files in files_by_system.items():
        for file in files:
            lines = read_jsonl(file)
            for number, row in enumerate(lines, start=1):
                if not is_complete_row(row) or not isinstance(row.get("generated"), str):
                    raise ValueError(
                        f"{file}, row {number}: term, context and definition must be non-empty strings, and generated a string, "
                        f"such as {EXAMPLE}. `lexperts define generate` writes such files."
                    )
            gold = [{name: row[name] for name in ("term", "context", "definition")} for row in lines]
            if rows is None:
                rows, first = gold, file
            elif gold != rows:
                raise ValueError(describe_difference(gold, rows, file, first))
            generated.setdefault(name, []).append([row["generated"] for row in lines])
    return rows, generated


def describe_difference(ours: list[dict], theirs: list[dict], file: str, first: str) -> str:
    """The first difference between the rows of two files."""
    fix = "Score files with the same rows in the same order."
    for number, (one, other) in enumerate(zip(ours, theirs, strict=False), start=1):
        if one != other:
            return f"{file}, row {number}: the term, context or definition differs: the term is {one['term']!r}, and {other['term']!r} in {first}. {fix}"
    return f"{file} has {len(ours):,} rows, and {first} has {len(theirs):,}. {fix}"


def best_of_references(metric, predictions: list[str], references: dict[str, list[list[str]]]) -> dict[str, np.ndarray]:
    """The best score of each row (rows,), by protocol. Each pair of texts is scored once; `metric` maps pairs to (pairs,)."""
    indices_of: dict[scores.Pair, int] = {}
    pairs_by_protocol = {
        protocol: [
            [indices_of.setdefault((text, reference), len(indices_of)) for reference in own]
            for text, own in zip(predictions, lists, strict=True)
        ]
        for protocol, lists in references.items()
    }
    values = metric(list(indices_of))
    best = {}
    for protocol, indices in pairs_by_protocol.items():
        starts = np.cumsum([0, *map(len, indices[:-1])])
        best[protocol] = np.maximum.reduceat(values[np.concatenate(indices)], starts)
    return best


def load_metric(name: str, args: EvaluationArguments, gold: list[str]):
    """The metric, which maps pairs to a score each (MAUVE all predictions to one), and its package, version and settings.
    Raises an `ImportError`, `OSError` or `ValueError` if its package or its model is missing.
    """
    of_words = {"bleu": partial(scores.bleu, args.bleu), "rouge": scores.rouge_l, "meteor": scores.meteor}
    if name in of_words:
        score, facts = of_words[name]()
        return partial(scores.score_pairs, score), facts
    model = getattr(args, f"{name}_model")
    if model is None:
        raise ValueError(f"it needs a model. Pass --{name}-model, a folder or Hub id.")
    if name == "mauve":
        from .mauve import Mauve

        mauve = Mauve(model, args.batch_size)
        return partial(mauve, references=gold), mauve.facts
    from ..common.bertscore import BertScore

    scorer = BertScore(model, args.bertscore_layer, args.batch_size)
    return scorer, scorer.facts


def score_all(args: EvaluationArguments, rows: list[dict], generated: dict[str, list[list[str]]], references: dict):
    """Scores of rows, MAUVE of systems and seeds, the facts of each metric, and the reasons why others were not computed."""
    gold = [scores.without_full_stops(row["definition"]) for row in rows]
    clean = scores.without_full_stops
    texts = {name: [list(map(clean, run)) for run in runs] for name, runs in generated.items()}
    row_scores: Scores = {}
    mauve, facts, missing = {}, {}, {}
    count = sum(map(len, texts.values()))
    with tqdm(total=len(args.metrics) * count, unit="file", leave=False) as bar:
        for metric in args.metrics:
            bar.set_description(TITLES[metric])
            by_system: dict[str, list] = {name: [] for name in texts}
            try:
                score, metric_facts = load_metric(metric, args, gold)
                for name, runs in texts.items():
                    for run in runs:
                        value = score(run) if metric == "mauve" else best_of_references(score, run, references)
                        by_system[name].append(value)
                        bar.update()
            except Exception as error:  # an error in one metric's package must not lose the others
                if DEBUG.get():
                    raise
                missing[metric] = one_line(error)
                if isinstance(error, ModuleNotFoundError):
                    install = "Install it with: pip install 'lexperts[definitions]'."
                    missing[metric] = f"{error.name} is not installed. {install}"
                bar.update(count - sum(map(len, by_system.values())))
                continue
            facts[metric] = metric_facts
            if metric == "mauve":
                mauve = by_system
                continue
            for name, protocol in product(by_system, PROTOCOLS):
                row_scores[name, protocol, metric] = np.stack([run[protocol] for run in by_system[name]])
    return row_scores, mauve, facts, missing


def over_seeds(values: list[float]) -> dict:
    """Mean and standard deviation over seeds."""
    spread = {"sd": round(float(np.std(values, ddof=1)), 4)} if len(values) > 1 else {}
    return {"mean": round(float(np.mean(values)), 4), "seeds": [round(float(value), 4) for value in values], **spread}


def interval(means: np.ndarray) -> dict[str, float]:
    """The 95 per cent interval of bootstrap means (B,)."""
    return dict(zip(("low", "high"), (round(end, 4) for end in confidence_interval(means)), strict=True))


def summarise(
    names, row_scores: Scores, mauve: dict[str, list[float]], baseline: str | None, seed: int
) -> tuple[dict, dict]:
    """Mean, interval and seeds by system, protocol and metric; and the differences from the baseline, in the same form."""
    systems: dict = {name: {protocol: {} for protocol in PROTOCOLS} for name in names}
    tests: dict = {name: {protocol: {} for protocol in PROTOCOLS} for name in names if baseline and name != baseline}
    columns = {key: values.mean(0) for key, values in row_scores.items()}  # (rows,) over seeds
    bootstrap = bootstrap_means(np.stack([*columns.values()], 1), seed=seed).T if columns else []
    means = dict(zip(columns, bootstrap, strict=True))
    for (name, protocol, metric), values in row_scores.items():
        own, other = (name, protocol, metric), (baseline, protocol, metric)
        systems[name][protocol][metric] = over_seeds(list(values.mean(1))) | interval(means[own])
        if name in tests:
            difference = round(float((columns[own] - columns[other]).mean()), 4)
            p = scores.paired_p(columns[own], columns[other])
            tests[name][protocol][metric] = {"difference": difference, **interval(means[own] - means[other]), "p": p}
    for name, values in mauve.items():
        systems[name]["mauve"] = over_seeds(values)
    return systems, tests


def format_mean(value: dict) -> str:
    """Mean [interval]."""
    return f"{value['mean']:.2f}" + (f" [{value['low']:.2f}, {value['high']:.2f}]" if "low" in value else "")


def format_difference(value: dict) -> str:
    """Difference [interval] p."""
    p = "" if value["p"] is None else f" p={value['p']:.2g}"
    return f"{value['difference']:+.2f} [{value['low']:+.2f}, {value['high']:+.2f}]{p}"


def format_seeds(value: dict) -> str:
    """Mean ± standard deviation (number of seeds)."""
    spread = f" ± {value['sd']:.2f}" if "sd" in value else ""
    return f"{value['mean']:.2f}{spread} ({len(value['seeds'])})"


def format_report(results: dict, baseline: str | None) -> str:
    """The content of scores.json as tables."""
    metrics, parts = results["metrics"], []
    heads = {metric: TITLES[metric] for metric in TITLES if metric in metrics}
    several = any(len(files) > 1 for files in results["files"].values())
    for protocol, meaning in PROTOCOLS.items():
        count = results["references_per_row"][protocol]
        parts.append(
            f"References: {meaning} ({count:.2f} per row); {results['rows']:,} rows; per cent, 95% intervals over rows"
        )
        means = {name: own | own[protocol] for name, own in results["systems"].items()}  # with MAUVE
        tests = {name: own[protocol] for name, own in results["tests"].items()}
        for title, format_cell, values in (
            ("system", format_mean, means),
            ("mean ± sd (seeds)", format_seeds, means if several else {}),
            (f"against {baseline}", format_difference, tests),
        ):
            columns = [metric for metric in heads if any(metric in own for own in values.values())]
            body = [[name, *(format_cell(own[metric]) for metric in columns)] for name, own in values.items()]
            if columns:
                parts.append(align_columns([[title, *(heads[metric] for metric in columns)], *body]))
    facts = [f"{heads[m]}: {one['package']} {one['version']}, {one['settings']}" for m, one in metrics.items()]
    facts += [f"{TITLES[metric]} was not computed: {reason}" for metric, reason in results["missing"].items()]
    return "\n\n".join([*parts, "\n".join(facts)])


def rows_of(rows: list[dict], name: str, runs: list[list[str]], row_scores: Scores) -> Iterator[dict]:
    """The lines of NAME.rows.jsonl: the generated definition (of each seed, if several) and its mean scores."""
    for i, row in enumerate(rows):
        generated = [run[i] for run in runs]
        values: dict = {protocol: {} for protocol in PROTOCOLS}
        for (system, protocol, metric), seeds in row_scores.items():
            if system == name:
                values[protocol][metric] = round(float(seeds[:, i].mean()), 4)
        yield row | {"generated": generated if len(generated) > 1 else generated[0], "scores": values}


def file_keys(files_by_system: dict[str, list[str]]) -> list[str]:
    """Each system with each of its files."""
    return [f"{name}={path}" for name, paths in files_by_system.items() for path in paths]


def evaluate(args: EvaluationArguments) -> dict:
    """Reads and scores files, writes and prints the results -> the content of scores.json."""
    check_scores(args.output_dir, file_keys(args.files_by_system), lambda content: file_keys(content["files"]))
    rows, generated = read_generated(args.files_by_system)
    more, dropped = load_definition_rows(args.references) if args.references else ([], 0)
    if dropped:
        print(f"--references: {dropped:,} rows dropped for an empty or missing field")
    references = scores.references_of(rows, more)
    empty = {name: sum(not text.strip() for run in runs for text in run) for name, runs in generated.items()}
    for name, count in empty.items():
        if count:
            print(f"{name}: {count:,} generated definitions are empty and score 0")
    row_scores, mauve, facts, missing = score_all(args, rows, generated, references)
    systems, tests = summarise(generated, row_scores, mauve, args.baseline, args.seed)
    results = {
        "rows": len(rows),
        "references_per_row": {protocol: float(np.mean([*map(len, lists)])) for protocol, lists in references.items()},
        "files": args.files_by_system,
        "empty": empty,
        "systems": systems,
        "tests": tests,
        "metrics": facts,
        "missing": missing,
        "options": asdict(args),
    }
    output = Path(args.output_dir)
    write_scores(output, results)
    for name, runs in generated.items():
        write_file(output / f"{name}.rows.jsonl", json_lines(rows_of(rows, name, runs, row_scores)))
    print(
        f"{format_report(results, args.baseline)}\n\nIn {output}: scores.json, {', '.join(f'{name}.rows.jsonl' for name in generated)}"
    )
    return results


main = command("lexicon", "evaluate", evaluate)
