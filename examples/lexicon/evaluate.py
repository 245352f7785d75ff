"""Scores generated definitions: BLEU, ROUGE-L, METEOR, BERTScore, MoverScore, MAUVE, with intervals and paired tests.

    python examples/lexicon/evaluate.py --files dense=dense.jsonl mixture=mixture.jsonl --baseline dense --output_dir results
    python examples/lexicon/evaluate.py --files a=a-21.jsonl a=a-42.jsonl --references data/train.jsonl \
        --bertscore_model roberta-large --moverscore_model bert-base-uncased --mauve_model gpt2-large --output_dir results

Files are those of generate.py: rows with term, context, definition (the gold one) and generated; several of one name are the
seeds of one system. A row's score is the best over its references, which are all definitions of the same term and context, and, as a
second number, all of the same term in any sense (Huang et al. 2021): those of the files, and of the rows of --references.
MAUVE has no rows: it compares all that was generated with all gold definitions. Texts lose their full stops, except in numbers. The
95 per cent intervals are of a bootstrap over rows, those of differences with the same rows for both systems; p is
two-sided, of a paired t-test over rows. With seeds, a row's score is the mean over them. A metric whose package or model is
missing is named, and the others are computed. The folder gets scores.json and, for each system, NAME.rows.jsonl.
"""

import json
import sys
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import numpy as np
import scores
from cli_args import parse_arguments
from prepare import json_lines
from run_folder import replace_file
from tqdm import tqdm
from train_expert import refuse, say

from keyphrase_tools.documents import read_jsonl
from modeling_lexicon.data_lexicon import is_whole, read_definitions

METRICS = {
    "bleu": "BLEU",
    "rouge": "ROUGE-L",
    "meteor": "METEOR",
    "bertscore": "BERTScore",
    "moverscore": "MoverScore",
    "mauve": "MAUVE",
}
PROTOCOLS = {"context": "the same term and context", "term": "the same term in any sense"}
EXAMPLE = '{"term": "...", "context": "...", "definition": "...", "generated": "..."}'

Scores = dict[str, dict[str, dict[str, np.ndarray]]]  # system -> protocol -> metric -> (seeds, rows)


@dataclass
class EvaluationArguments:
    files: list[str] = field(metadata={"help": "NAME=FILE; several files of one name are its seeds"})
    output_dir: str = field(metadata={"help": "folder for scores.json and the rows' scores"})
    baseline: str | None = field(default=None, metadata={"help": "the system that others are compared with"})
    references: list[str] | None = field(
        default=None, metadata={"help": "JSON Lines whose definitions are references too"}
    )
    metrics: list[str] = field(default_factory=lambda: list(METRICS), metadata={"help": "which are computed; all six"})
    bleu: str = field(
        default="sacrebleu", metadata={"help": "sacrebleu, nltk, or moses, which the paper's figures are of"}
    )
    bertscore_model: str | None = field(default=None, metadata={"help": "folder or Hub id, such as roberta-large"})
    bertscore_layer: int | None = field(
        default=None, metadata={"help": "its layer; by default bert-score's for this model, or the last"}
    )
    moverscore_model: str | None = field(default=None, metadata={"help": "likewise, such as bert-base-uncased"})
    mauve_model: str | None = field(default=None, metadata={"help": "likewise, such as gpt2-large"})
    batch_size: int = field(default=64, metadata={"help": "texts that these models read at once"})
    seed: int = field(default=0, metadata={"help": "of the bootstrap"})
    traceback: bool = field(default=False, metadata={"help": "show the traceback of an error"})

    def __post_init__(self):
        self.places = places_of(self.files)
        if self.baseline is not None and self.baseline not in self.places:
            raise ValueError(f"--baseline {self.baseline!r} is none of the systems {', '.join(self.places)}.")
        self.metrics = list(dict.fromkeys(self.metrics))
        for name in self.metrics:
            if name not in METRICS:
                raise ValueError(f"--metrics {name!r} is not known. Use some of {' '.join(METRICS)}.")
        if self.bleu not in scores.BLEU_KINDS:
            raise ValueError(f"--bleu {self.bleu!r} is not known. Use one of {', '.join(scores.BLEU_KINDS)}.")


def places_of(files: list[str]) -> dict[str, list[str]]:
    """name -> its files."""
    found: dict[str, list[str]] = {}
    for given in files:
        name, separator, place = given.partition("=")
        if not (separator and name.strip() and place.strip()) or "/" in name:
            raise ValueError(f"--files {given!r}: write NAME=FILE, as in --files dense=dense.jsonl.")
        found.setdefault(name.strip(), []).append(place.strip())
    return found


def read_generated(places: dict[str, list[str]]) -> tuple[list[dict], dict[str, list[list[str]]]]:
    """Files -> their common rows, and system -> seed -> what it generated for them.

    Raises:
        ValueError: for a line that lacks a field, and for files of other rows or another order; the line is named.
    """
    rows, generated, first = None, {}, None
    for name, files in places.items():
        for file in files:
            own = read_jsonl(file, example=EXAMPLE)
            for number, row in enumerate(own, start=1):
                if not is_whole(row) or not isinstance(row.get("generated"), str):
                    raise ValueError(
                        f"{file}, row {number}: term, context and definition must be texts with something in them, and "
                        f"generated a text. A row is such as {EXAMPLE}; generate.py writes them."
                    )
            gold = [{what: row[what] for what in ("term", "context", "definition")} for row in own]
            if rows is None:
                rows, first = gold, file
            elif gold != rows:
                raise ValueError(how_they_differ(gold, rows, file, first))
            generated.setdefault(name, []).append([row["generated"] for row in own])
    return rows, generated


def how_they_differ(ours: list[dict], theirs: list[dict], file: str, first: str) -> str:
    mend = "Score files of the same rows in the same order."
    for number, (one, other) in enumerate(zip(ours, theirs, strict=False), start=1):
        if one != other:
            return f"{file}, row {number}: the term is {one['term']!r}, and in {first} {other['term']!r}, or its context or definition is another. {mend}"
    return f"{file} has {len(ours):,} rows, and {first} {len(theirs):,}. {mend}"


def best_of_references(metric, predictions: list[str], references: dict[str, list[list[str]]]) -> dict[str, np.ndarray]:
    """-> protocol -> (rows,), each row's best; no pair of texts is scored twice. `metric` takes pairs and gives (pairs,)."""
    places: dict[scores.Pair, int] = {}
    asked = {
        protocol: [
            [places.setdefault((text, reference), len(places)) for reference in own]
            for text, own in zip(predictions, lists, strict=True)
        ]
        for protocol, lists in references.items()
    }
    values = metric(list(places))
    found = {}
    for protocol, indices in asked.items():
        starts = np.cumsum([0, *map(len, indices[:-1])])
        found[protocol] = np.maximum.reduceat(values[np.concatenate(indices)], starts)
    return found


def open_metric(name: str, args: EvaluationArguments, gold: list[str]):
    """-> the metric: of pairs, one score each, or MAUVE of predictions, one for all; and what computes it.

    Raises:
        ImportError, OSError, ValueError: where its package or its model is missing.
    """
    if name in ("bleu", "rouge", "meteor"):
        score, facts = {"bleu": partial(scores.bleu, args.bleu), "rouge": scores.rouge_l, "meteor": scores.meteor}[
            name
        ]()
        return partial(scores.score_pairs, score), facts
    model = getattr(args, f"{name}_model")
    if model is None:
        raise ValueError(f"it needs a model. Pass --{name}_model with a folder or a Hub id.")
    import model_scores

    if name == "mauve":
        mauve = model_scores.Mauve(model, args.batch_size)
        return partial(mauve, references=gold), mauve.facts
    if name == "bertscore":
        scorer = model_scores.BertScore(model, args.bertscore_layer, args.batch_size)
    else:
        scorer = model_scores.MoverScore(model, gold, args.batch_size)
    return scorer, scorer.facts


def score_all(args: EvaluationArguments, rows: list[dict], generated: dict[str, list[list[str]]], references: dict):
    """-> scores of rows, MAUVE of systems and seeds, what computed each metric, and why others were not computed."""
    gold = [scores.without_full_stops(row["definition"]) for row in rows]
    texts = {
        name: [[scores.without_full_stops(text) for text in run] for run in runs] for name, runs in generated.items()
    }
    found: Scores = {name: {protocol: {} for protocol in PROTOCOLS} for name in generated}
    mauve, facts, missing = {}, {}, {}
    count = sum(map(len, texts.values()))
    with tqdm(total=len(args.metrics) * count, unit="file", leave=False) as bar:
        for metric in args.metrics:
            bar.set_description(METRICS[metric])
            each: dict[str, list] = {name: [] for name in texts}
            try:
                score, own_facts = open_metric(metric, args, gold)
                for name, runs in texts.items():
                    for run in runs:
                        each[name].append(
                            score(run) if metric == "mauve" else best_of_references(score, run, references)
                        )
                        bar.update()
            except Exception as error:  # whatever breaks a metric's package must not lose the others
                if args.traceback:
                    raise
                missing[metric] = reason_of(error)
                bar.update(count - sum(map(len, each.values())))
                continue
            facts[metric] = own_facts
            if metric == "mauve":
                mauve = each
                continue
            for name, protocol in product(each, PROTOCOLS):
                found[name][protocol][metric] = np.stack([one[protocol] for one in each[name]])
    return found, mauve, facts, missing


def reason_of(error: Exception) -> str:
    """An error in one line, with the mend where a package is missing."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed. It comes with the extra: pip install 'lexperts[definitions]'."
    text = " ".join(str(error).split())
    return text if isinstance(error, (ImportError, OSError, ValueError)) else f"{type(error).__name__}: {text}"


def over_seeds(values: list[float]) -> dict:
    spread = {"sd": round(float(np.std(values, ddof=1)), 4)} if len(values) > 1 else {}
    return {"mean": round(float(np.mean(values)), 4), "seeds": [round(float(value), 4) for value in values], **spread}


def summarise(found: Scores, mauve: dict[str, list[float]], baseline: str | None, seed: int) -> tuple[dict, dict]:
    """-> system -> protocol -> metric -> mean, interval, seeds; and likewise the differences from the baseline."""
    names = [(name, protocol, metric) for name in found for protocol in PROTOCOLS for metric in found[name][protocol]]
    systems: dict = {name: {protocol: {} for protocol in PROTOCOLS} for name in found}
    tests: dict = {name: {protocol: {} for protocol in PROTOCOLS} for name in found if baseline and name != baseline}
    if names:
        columns = {place: found[place[0]][place[1]][place[2]].mean(0) for place in names}  # over seeds
        means = dict(zip(names, scores.resampled_means(np.stack([*columns.values()], 1), seed=seed).T, strict=True))
        for name, protocol, metric in names:
            low, high = scores.interval(means[name, protocol, metric])
            seeds = over_seeds(list(found[name][protocol][metric].mean(1)))
            systems[name][protocol][metric] = seeds | {"low": round(low, 4), "high": round(high, 4)}
            if name in tests:
                ours, theirs = (name, protocol, metric), (baseline, protocol, metric)
                low, high = scores.interval(means[ours] - means[theirs])
                tests[name][protocol][metric] = {
                    "difference": round(float((columns[ours] - columns[theirs]).mean()), 4),
                    "low": round(low, 4),
                    "high": round(high, 4),
                    "p": scores.paired_p(columns[ours], columns[theirs]),
                }
    for name, values in mauve.items():
        systems[name]["mauve"] = over_seeds(values)
    return systems, tests


def grid(head: list[str], lines: list[list[str]]) -> str:
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    rows = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [head, *lines]
    )
    return "\n".join(rows)


def number(value: dict) -> str:
    return f"{value['mean']:.2f}" + (f" [{value['low']:.2f}, {value['high']:.2f}]" if "low" in value else "")


def difference(value: dict) -> str:
    p = "" if value["p"] is None else f" p={value['p']:.2g}"
    return f"{value['difference']:+.2f} [{value['low']:+.2f}, {value['high']:+.2f}]{p}"


def with_sd(value: dict) -> str:
    return (
        f"{value['mean']:.2f} ± {value['sd']:.2f} ({len(value['seeds'])})"
        if "sd" in value
        else f"{value['mean']:.2f} (1)"
    )


def tables(results: dict, baseline: str | None) -> str:
    """What scores.json says, for people."""
    metrics, parts = results["metrics"], []
    heads = {metric: METRICS[metric] for metric in METRICS if metric in metrics}
    of_rows = [metric for metric in heads if metric != "mauve"]
    several = any(len(files) > 1 for files in results["files"].values())
    for protocol, meaning in PROTOCOLS.items():
        many = results["references a row"][protocol]
        parts.append(
            f"References: {meaning} ({many:.2f} a row); {results['rows']:,} rows; per cent, 95% intervals over rows"
        )
        lines = {
            name: {**own[protocol], **({"mauve": own["mauve"]} if "mauve" in own else {})}
            for name, own in results["systems"].items()
        }
        kinds = [("system", list(heads), number, lines)]
        kinds += [("mean ± sd (seeds)", list(heads), with_sd, lines)] if several else []
        tests = {name: own[protocol] for name, own in results["tests"].items()}
        kinds += [(f"against {baseline}", of_rows, difference, tests)] if tests else []
        for title, shown, as_text, values in kinds:
            if shown:
                body = [[name, *(as_text(own[metric]) for metric in shown)] for name, own in values.items()]
                parts.append(grid([title, *(heads[metric] for metric in shown)], body))
    facts = [
        f"{heads[metric]}: {one['package']} {one['version']}, {one['settings']}" for metric, one in metrics.items()
    ]
    facts += [f"{METRICS[metric]} was not computed: {reason}" for metric, reason in results["missing"].items()]
    return "\n\n".join([*parts, "\n".join(facts)])


def rows_of(rows: list[dict], runs: list[list[str]], protocols: dict[str, dict[str, np.ndarray]]):
    """A line of NAME.rows.jsonl for each row: what was generated (by each seed, if several) and its mean scores."""
    for i, row in enumerate(rows):
        said = [run[i] for run in runs]
        values = {
            protocol: {metric: round(float(seeds[:, i].mean()), 4) for metric, seeds in metrics.items()}
            for protocol, metrics in protocols.items()
        }
        yield row | {"generated": said if len(said) > 1 else said[0], "scores": values}


def evaluate(args: EvaluationArguments) -> dict:
    """Reads, scores, writes and tells; -> what stands in scores.json."""
    rows, generated = read_generated(args.places)
    more, dropped = read_definitions(args.references) if args.references else ([], 0)
    if dropped:
        say(f"--references: {dropped:,} rows dropped for a field that is empty or no string")
    references = scores.references_of(rows, more)
    empty = {name: sum(not text.strip() for run in runs for text in run) for name, runs in generated.items()}
    for name, count in empty.items():
        if count:
            say(f"{name}: {count:,} generated definitions are empty, and score 0")
    found, mauve, facts, missing = score_all(args, rows, generated, references)
    systems, tests = summarise(found, mauve, args.baseline, args.seed)
    results = {
        "rows": len(rows),
        "references a row": {protocol: float(np.mean([*map(len, lists)])) for protocol, lists in references.items()},
        "files": args.places,
        "empty": empty,
        "systems": systems,
        "tests": tests,
        "metrics": facts,
        "missing": missing,
        "options": asdict(args),
    }
    output = Path(args.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    replace_file(output / "scores.json", json.dumps(results, ensure_ascii=False, indent=1))
    for name, runs in generated.items():
        replace_file(output / f"{name}.rows.jsonl", json_lines(rows_of(rows, runs, found[name])))
    say(
        f"{tables(results, args.baseline)}\n\nIn {output}: scores.json, {', '.join(f'{name}.rows.jsonl' for name in generated)}"
    )
    return results


def main():
    try:
        (args,) = parse_arguments((EvaluationArguments,), __doc__)
        evaluate(args)
    except (OSError, ValueError, ImportError) as error:
        refuse(error)


if __name__ == "__main__":
    main()
