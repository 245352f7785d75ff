"""Systems side by side: scores with 95% intervals, differences from a baseline with paired tests, as a table."""

from collections.abc import Mapping, Sequence

import numpy as np

from .bootstrap import bootstrap_means, confidence_interval
from .scores import Score


def compare(systems: Mapping[str, Sequence[Mapping[str, Score]]], baseline: str | None = None) -> dict:
    """The scores of each system's runs (seeds), over which rows are averaged -> `systems`: by name and metric, `value`, `low`, `high`,
    and of several runs `runs` and `sd`; `differences` from the baseline in the same form, with the two-sided `p` of the paired
    bootstrap over rows, in which a tie counts half; `metrics`: what computed them. A single row has neither interval nor test.
    """
    results: dict = {"systems": {}, "differences": {}, "metrics": {}}
    samples = {}
    for name, runs in systems.items():
        own = results["systems"][name] = {}
        for metric, first in runs[0].items():
            mean = first._replace(rows=np.mean([run[metric].rows for run in runs], axis=0))
            samples[name, metric] = mean.of_means(bootstrap_means(mean.rows))
            own[metric] = describe(mean.value, samples[name, metric], len(mean.rows) > 1)
            if len(runs) > 1:
                values = [run[metric].value for run in runs]
                own[metric] |= {"runs": values, "sd": float(np.std(values, ddof=1))}
            results["metrics"][metric] = first.facts
    for name in [name for name in systems if baseline and name != baseline]:
        own = results["differences"][name] = {}
        for metric, theirs in results["systems"][baseline].items():
            drawn = samples[name, metric] - samples[baseline, metric]
            own[metric] = describe(results["systems"][name][metric]["value"] - theirs["value"], drawn, "low" in theirs)
            if "low" in theirs:
                below = (drawn < 0).sum() + (drawn == 0).sum() / 2
                own[metric]["p"] = float(min(1, 2 * (min(below, len(drawn) - below) + 1) / (len(drawn) + 1)))
    return results


def describe(value: float, samples: np.ndarray, has_interval: bool) -> dict[str, float]:
    """A value with the interval of its bootstrap samples (B,)."""
    low, high = confidence_interval(samples)
    return {"value": value, "low": low, "high": high} if has_interval else {"value": value}


def format_results(results: dict, baseline: str | None = None) -> str:
    """A line per metric, with a cell per system such as `35.20 [34.10, 36.30] ± 0.12 (3 runs)`, and what computed them."""

    def cell(score: dict) -> str:
        form = "+.2f" if "p" in score else ".2f"
        text = f"{score['value']:{form}}"
        text += f" [{score['low']:{form}}, {score['high']:{form}}]" if "low" in score else ""
        text += f" ± {score['sd']:.2f} ({len(score['runs'])} runs)" if "sd" in score else ""
        return text + (f" p={score['p']:.2g}" if "p" in score else "")

    columns = results["systems"] | {f"{name} - {baseline}": own for name, own in results["differences"].items()}
    lines = [["", *columns]]
    lines += [[metric, *(cell(own[metric]) for own in columns.values())] for metric in results["metrics"]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    return "\n".join([*table, "", *(f"{metric}: {facts}" for metric, facts in results["metrics"].items())])
