"""Systems side by side: scores with 95 per cent intervals, differences from a baseline with paired tests, as a table."""

from collections.abc import Mapping, Sequence

import numpy as np

from .bootstrap import bootstrap_means, confidence_interval
from .scores import Score


def compare(systems: Mapping[str, Sequence[Mapping[str, Score]]], baseline: str | None = None) -> dict:
    """The scores of each system's runs (seeds), over which rows are averaged -> `systems`: by name and metric, `value`, `low`, `high`,
    and of several runs `runs` and `sd`; `differences` from the baseline in the same form, with `p`, see `paired_p`; `metrics`: what
    computed them. Intervals are bootstrapped over rows, those of differences with the same rows for both; a single row has none.
    """
    results: dict = {"systems": {}, "differences": {}, "metrics": {}}
    means, samples = {}, {}
    for name, runs in systems.items():
        own = results["systems"][name] = {}
        for metric, first in runs[0].items():
            rows = np.mean([run[metric].rows for run in runs], axis=0)
            mean = means[name, metric] = first._replace(rows=rows)
            samples[name, metric] = mean.of_means(bootstrap_means(rows))
            own[metric] = describe(mean.value, samples[name, metric], len(rows))
            if len(runs) > 1:
                values = [run[metric].value for run in runs]
                own[metric] |= {"runs": values, "sd": float(np.std(values, ddof=1))}
            results["metrics"][metric] = first.facts
    for name in [name for name in systems if baseline and name != baseline]:
        own = results["differences"][name] = {}
        for metric in results["metrics"]:
            ours, theirs = means[name, metric], means[baseline, metric]
            drawn = samples[name, metric] - samples[baseline, metric]
            own[metric] = describe(ours.value - theirs.value, drawn, len(ours.rows))
            if len(ours.rows) > 1:
                own[metric]["p"] = paired_p(ours, theirs, drawn)
    return results


def describe(value: float, samples: np.ndarray, rows: int) -> dict[str, float]:
    """A value with the interval of its bootstrap samples (B,)."""
    low, high = confidence_interval(samples)
    return {"value": value, "low": low, "high": high} if rows > 1 else {"value": value}


def paired_p(ours: Score, theirs: Score, samples: np.ndarray) -> float:
    """The two-sided p of a difference: of the paired t-test over rows, or of a score that is not a mean of rows, such as F1 of mean
    precision and recall, of the paired bootstrap with these samples (B,).
    """
    if ours.rows.ndim > 1:
        fewer = min((samples <= 0).sum(), (samples >= 0).sum())
        return float(min(1, 2 * (fewer + 1) / (len(samples) + 1)))
    from scipy import stats

    differences = ours.rows - theirs.rows
    if np.ptp(differences) == 0:  # no variance
        return float(differences[0] == 0)
    return float(stats.ttest_rel(ours.rows, theirs.rows).pvalue)


def format_results(results: dict, baseline: str | None = None) -> str:
    """The results as tables, and what computed them."""
    tables = [("", results["systems"], ".2f")]
    tables += [(f"minus {baseline}", results["differences"], "+.2f")] if results["differences"] else []
    parts, facts = [], {}
    for title, systems, form in tables:
        lines = [[title, *systems]]
        lines += [[metric, *(cell(own[metric], form) for own in systems.values())] for metric in results["metrics"]]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = ([text.ljust(width) for text, width in zip(line, widths, strict=True)] for line in lines)
        parts.append("\n".join("  ".join(line).rstrip() for line in padded))
    for metric, text in results["metrics"].items():
        facts.setdefault(text, []).append(metric)
    return "\n\n".join([*parts, "\n".join(f"{', '.join(metrics)}: {text}" for text, metrics in facts.items())])


def cell(score: dict, form: str) -> str:
    """35.20 [34.10, 36.30] ± 0.12 (3 runs)."""
    text = f"{score['value']:{form}}"
    text += f" [{score['low']:{form}}, {score['high']:{form}}]" if "low" in score else ""
    text += f" ± {score['sd']:.2f} ({len(score['runs'])} runs)" if "sd" in score else ""
    return text + (f" p={score['p']:.2g}" if "p" in score else "")
