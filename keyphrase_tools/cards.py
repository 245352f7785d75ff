"""The model card of a training run of `lexperts train seke`: the card of any saved model, with the scores and the settings of the run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult

from run_tools.cards import make_table, write_model_card

SETTINGS = (
    "learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps", "weight_decay",
    "warmup_steps", "bf16", "seed",
)  # fmt: skip
MEASURES = [f"{name}@{k}" for k in (5, 10) for name in ("precision", "recall", "f1")]


def percent(value: float | None) -> str:
    """0.123 -> "12.3"; "none" for a value that was not measured."""
    return "none" if value is None else f"{100 * value:.1f}"


def describe_scores(results: Mapping) -> str:
    """How the model was selected, what its scores mean, and the scores of the test documents."""
    tests = results.get("test", {})
    rows = [
        (name, f"{row['documents']:,}", f"`{rules}`", *(percent(row[rules][measure]) for measure in MEASURES))
        for name, row in tests.items()
        for rules in ("lexperts", "seke")
    ]
    count = f"{results['documents']['validation']:,} validation documents"
    selected = f"The epoch was selected by F1@10 on {count}: {percent(results['best_validation_f1@10'])}."
    if "ranker_validation_f1@10" in results:
        fitted = f"A ranker was fitted on them: {percent(results['ranker_validation_f1@10'])}."
    elif "temperature" in results:
        fitted = f"The threshold {results['threshold']:g} and the temperature {results['temperature']:.2f} were fitted on them."
    else:
        fitted = f"The threshold is {results['threshold']:g}. Scores are not calibrated: {results['not_calibrated']}"
    errors = [f"{percent(row['calibration_error'])} ({name})" for name, row in tests.items()]
    calibration = f"Expected calibration error on test documents, in per cent: {', '.join(errors)}." if errors else ""
    table = make_table(("test documents", "number", "gold by the rules", *MEASURES), rows)
    return "\n\n".join(filter(None, (f"{selected} {fitted} {calibration}", table)))


def write_card(model, folder: str | Path, results: Mapping, training_args: Any, repo_id: str | None = None) -> None:
    """Writes `folder/README.md`, unless the folder has a card.

    Args:
        results: of the run, as results.json has them.
        repo_id: where the model is pushed to.
    """
    settings = [(f"`{name}`", getattr(training_args, name)) for name in SETTINGS]
    documents = ", ".join(f"{number:,} for {split}" for split, number in results["documents"].items() if number)
    training = f"## Training\n\nDocuments: {documents}.\n\n{make_table(('setting', 'value'), settings)}\n"
    evaluated = [
        EvalResult("token-classification", name, name, f"f1@{k}", scores[rules][f"f1@{k}"], metric_name=f"F1@{k}, {rules}")
        for name, scores in results.get("test", {}).items()
        for rules in ("lexperts", "seke")
        for k in (5, 10)
    ]  # fmt: skip
    metadata = {"model_name": Path(folder).resolve().name, "eval_results": evaluated} if evaluated else {}
    if (path := write_model_card(model, folder, repo_id=repo_id, **metadata)) is not None:
        with path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(f"\n## Scores\n\n{describe_scores(results)}\n\n{training}")
