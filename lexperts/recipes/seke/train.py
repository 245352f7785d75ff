"""Fine-tunes SEKE on documents with keyphrases, with the stock Trainer, and scores it on a test set.

    lexperts train seke minilm_cpu --train-files train.jsonl --test-files test.jsonl
    lexperts train seke deberta_paper --dataset-name midas/inspec --output-dir runs/inspec
    lexperts train seke minilm_cpu --train-files train.jsonl --ablation vanilla --seeds 1 2 3    # mean and std. deviation
    lexperts train seke minilm_cpu --train-files train.jsonl --first-files kp20k.jsonl           # two stages
    lexperts train seke distill --teacher default --train-files train.jsonl --unlabelled-files texts.jsonl   # a small model

The output folder holds the best model with its code, its pipelines and its model card, and results.json with the scores of
every epoch. --ablation NAME trains in OUTPUT_DIR/NAME. Finished stages and seeds are not trained again.
"""

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

from transformers import TrainingArguments

from run_tools.backbones import resolve_backbone
from run_tools.errors import RESUME, UserError
from run_tools.fingerprints import RECORD, fingerprint

from ..common.arguments import command
from ..common.run_folder import RunFolder, open_run
from .arguments import ModelArguments
from .data import load_documents
from .finetune import conclude, prepare, run


def with_output_dir(args: TrainingArguments, folder: str | Path, **changes) -> TrainingArguments:
    """A copy of the arguments with another output folder and other changes."""
    args = copy.deepcopy(args)
    for name, value in {"output_dir": str(folder), **changes}.items():
        setattr(args, name, value)
    return args


def open_stage(model_args, data_args, training_args, *more, overwrite: bool = False, **settings) -> RunFolder:
    """Opens the run folder of a stage, of a seed, or of the whole run."""
    backbone = (
        None if model_args.start_from or model_args.teacher else fingerprint(resolve_backbone(model_args.backbone))
    )
    return open_run(
        "seke/train.py", training_args, model_args, data_args, *more,
        backbone=backbone, overwrite=overwrite, clear=("base.part",), **settings,
    )  # fmt: skip


def run_part(title: str, model_args, data_args, training_args) -> dict:
    """The record of a stage or a seed, which is trained unless it is finished."""
    folder = open_stage(model_args, data_args, training_args)
    path = folder.path / "results.json"
    if folder.finished and path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    print(f"\n{title}:")
    return run(model_args, data_args, training_args, folder, prepare(model_args, data_args, training_args))


def first_stage(model_args, data_args, run_args, training_args) -> ModelArguments:
    """Trains the first stage; returns the model arguments of the second stage."""
    output = Path(training_args.output_dir) / "first"
    args = with_output_dir(training_args, output, num_train_epochs=run_args.first_epochs, push_to_hub=False)
    source = {"dataset_name": run_args.first_dataset, "train_files": run_args.first_files}
    data = replace(data_args, **source, validation_files=None, test_files=None, show=0, calibrate=False)
    run_part("First stage", model_args, data, args)
    return replace(model_args, start_from=str(output))


def run_seeds(model_args, data_args, run_args, training_args) -> None:
    """Trains one model per seed, each in its own folder, and copies the best one by validation to the output folder."""
    output, records = Path(training_args.output_dir), {}
    for seed in run_args.seeds:
        args = with_output_dir(training_args, output / f"seed-{seed}", seed=seed, push_to_hub=False)
        records[seed] = run_part(f"Seed {seed}", model_args, data_args, args)
    best = max(records, key=lambda seed: records[seed]["best_validation_f1@10"])
    ignored = shutil.ignore_patterns("checkpoint-*", "base*", RECORD)
    shutil.copytree(output / f"seed-{best}", output, dirs_exist_ok=True, ignore=ignored)
    scores = []
    for seed, record in records.items():
        test_scores = record.get("test", {}).get(data_args.rules, {})
        scores.append({"seed": seed, "validation_f1@10": record["best_validation_f1@10"]})
        scores[-1] |= {name: value for name, value in test_scores.items() if "f1" in name}
    for name in list(scores[0])[1:]:
        values = [100 * row[name] for row in scores]
        spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
        print(f"{name} over {len(values)} seeds: {mean(values):.1f}{spread}")
    conclude(records[best] | {"seeds": scores}, output, training_args)


def with_ablation_folder(model_args: ModelArguments, training_args: TrainingArguments) -> TrainingArguments:
    """With `--ablation NAME`, the output folder is `OUTPUT_DIR/NAME`, and the Hub repository also ends in the name."""
    if model_args.ablation is None:
        return training_args
    output, name = Path(training_args.output_dir), model_args.ablation
    changes = {}
    if training_args.push_to_hub and training_args.hub_model_id is None:
        changes["hub_model_id"] = f"{output.resolve().name}-{name}"
    return with_output_dir(training_args, output / name, **changes)


def train(model_args, data_args, run_args, folder_args, training_args) -> None:
    """Runs the command."""
    if training_args.max_steps <= 0 and not training_args.num_train_epochs and not model_args.start_from:
        raise UserError(
            "--num-train-epochs 0 gives a trained model new rankers. Pass that model by --start-from, or an epoch or more."
        )
    if model_args.teacher and (first := run_args.first_files or run_args.first_dataset):
        raise UserError(
            f"--teacher {model_args.teacher} is imitated in one stage. Leave out --first-files and --first-dataset ({first})."
        )
    rows = load_documents(data_args)  # before an earlier run is overwritten
    training_args = with_ablation_folder(model_args, training_args)
    output = training_args.output_dir
    whole_run_args = with_output_dir(training_args, output, **({"seed": 0} if run_args.seeds else {}))
    folder = open_stage(
        model_args, data_args, whole_run_args, replace(run_args, seeds=None), overwrite=folder_args.overwrite_output_dir,
        several_seeds=bool(run_args.seeds),
    )  # fmt: skip
    if run_args.first_files or run_args.first_dataset:
        model_args = first_stage(model_args, data_args, run_args, training_args)
    if run_args.seeds:
        run_seeds(model_args, data_args, run_args, training_args)
    else:
        run(model_args, data_args, training_args, folder, prepare(model_args, data_args, training_args, rows))
    print(f"\nSaved the model to {output}. Load it with pipeline('keyphrase-extraction', model={output!r}).")


main = command("seke", "train", train, RESUME)
