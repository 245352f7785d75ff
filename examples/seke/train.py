"""Fine-tunes SEKE on documents with keyphrases, with the stock Trainer, and scores it on a test set.

    python examples/seke/train.py examples/seke/minilm_cpu.yml --train_files train.jsonl --test_files test.jsonl
    python examples/seke/train.py examples/seke/deberta_paper.yml --dataset_name midas/inspec --output_dir runs/inspec
    python examples/seke/train.py ... --ablation vanilla --seeds 1 2 3                   # mean and standard deviation
    python examples/seke/train.py ... --first_files kp20k.jsonl --first_epochs 1         # two stages

A YAML file gives arguments; those on the command line win. --ablation NAME trains in OUTPUT_DIR/NAME. Start the same
command again after an interruption: training resumes from the last checkpoint, and stages and seeds that are finished are
not trained again. With other settings it stops, and names what differs: use another --output_dir, or
--overwrite_output_dir true. The output folder holds the best model, its code, its pipelines and its card; results.json
the scores of every epoch.
"""

import copy
import json
import shutil
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, stdev

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

from cli_args import parse_arguments, run_or_exit
from recipe import DataArguments, ModelArguments, conclude, find_backbone, prepare, run
from run_folder import RECORD, RunFolder, RunFolderArguments, fingerprint, open_run
from transformers import TrainingArguments


@dataclass
class RunArguments:
    seeds: list[int] | None = field(default=None, metadata={"help": "one run each; the best by validation is kept"})
    first_files: list[str] | None = field(
        default=None, metadata={"help": "JSON Lines to train on first, such as KP20k's or KPTimes'"}
    )
    first_dataset: str | None = field(default=None, metadata={"help": "likewise a data set on the Hub: midas/kp20k"})
    first_epochs: float = field(default=1.0, metadata={"help": "epochs of the first stage"})
    traceback: bool = field(default=False, metadata={"help": "show the traceback of an error"})


def in_folder(args: TrainingArguments, folder: Path, **changes) -> TrainingArguments:
    args = copy.deepcopy(args)
    for name, value in {"output_dir": str(folder), **changes}.items():
        setattr(args, name, value)
    return args


def open_stage(model_args, data_args, training_args, *more, overwrite: bool = False, **settings) -> RunFolder:
    """The run folder of a stage, a seed, or all of them."""
    backbone = None if model_args.start_from else fingerprint(find_backbone(model_args.backbone))
    return open_run(
        "seke/train.py", training_args, model_args, data_args, *more,
        backbone=backbone, overwrite=overwrite, clear=("base.part",), **settings,
    )  # fmt: skip


def results_of(folder: RunFolder) -> dict | None:
    """What a finished run recorded."""
    path = folder.path / "results.json"
    return json.loads(path.read_text(encoding="utf-8")) if folder.finished and path.exists() else None


def first_stage(model_args, data_args, run_args, training_args) -> ModelArguments:
    """Trains on the first documents, unless that is done -> arguments of the second stage."""
    output = Path(training_args.output_dir) / "first"
    changes = {"num_train_epochs": run_args.first_epochs, "push_to_hub": False}
    first_args = in_folder(training_args, output, **changes)
    other = {"dataset_name": run_args.first_dataset, "train_files": run_args.first_files}
    first_data = replace(data_args, **other, validation_files=None, test_files=None, show=0, calibrate=False)
    folder = open_stage(model_args, first_data, first_args)
    if results_of(folder) is None:
        print("The first stage:")
        run(model_args, first_data, first_args, folder)
    return replace(model_args, start_from=str(output))


def several_seeds(model_args, data_args, run_args, training_args):
    """A run for each seed in a folder of its own; the best by validation is copied to the output folder."""
    output, records = Path(training_args.output_dir), {}
    for seed in run_args.seeds:
        own = in_folder(training_args, output / f"seed-{seed}", seed=seed, push_to_hub=False)
        folder = open_stage(model_args, data_args, own)
        records[seed] = results_of(folder)
        if records[seed] is None:
            print(f"\nSeed {seed}:")
            records[seed] = run(model_args, data_args, own, folder)
    best = max(records, key=lambda seed: records[seed]["best_validation_f1@10"])
    left_out = shutil.ignore_patterns("checkpoint-*", "base*", RECORD)
    shutil.copytree(output / f"seed-{best}", output, dirs_exist_ok=True, ignore=left_out)
    record = records[best] | {"seeds": []}
    for seed, of_seed in records.items():
        own = {"seed": seed, "validation_f1@10": of_seed["best_validation_f1@10"]}
        record["seeds"].append(
            own | {k: v for k, v in of_seed.get("test", {}).get(data_args.rules, {}).items() if "f1" in k}
        )
    for name in record["seeds"][0]:
        if name != "seed":
            values = [100 * own[name] for own in record["seeds"]]
            spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
            print(f"{name} over {len(values)} seeds: {mean(values):.1f}{spread}")
    conclude(record, output, training_args)


def ablated(model_args: ModelArguments, training_args: TrainingArguments) -> TrainingArguments:
    """An ablation has a folder of its own in the output folder, and a repository of its own on the Hub."""
    if model_args.ablation is None:
        return training_args
    output, name = Path(training_args.output_dir), model_args.ablation
    changes = {}
    if training_args.push_to_hub and training_args.hub_model_id is None:
        changes["hub_model_id"] = f"{output.resolve().name}-{name}"
    return in_folder(training_args, output / name, **changes)


def start_run(model_args, data_args, run_args, folder_args, training_args):
    """The run folder, and what `prepare` returns, or `None` with several seeds, which are trained by then."""
    stages = {"several_seeds": bool(run_args.seeds)}
    folder = open_stage(
        model_args, data_args, in_folder(training_args, training_args.output_dir, **({"seed": 0} if run_args.seeds else {})),
        replace(run_args, seeds=None), overwrite=folder_args.overwrite_output_dir, **stages,
    )  # fmt: skip
    if run_args.first_files or run_args.first_dataset:
        model_args = first_stage(model_args, data_args, run_args, training_args)
    if run_args.seeds:
        several_seeds(model_args, data_args, run_args, training_args)
        return folder, model_args, None
    return folder, model_args, prepare(model_args, data_args, training_args)


def main():
    kinds = (ModelArguments, DataArguments, RunArguments, RunFolderArguments, TrainingArguments)
    model_args, data_args, run_args, folder_args, training_args = parse_arguments(kinds, __doc__)
    training_args = ablated(model_args, training_args)
    given = (model_args, data_args, run_args, folder_args, training_args)
    folder, model_args, prepared = run_or_exit(start_run, *given, traceback=run_args.traceback)
    if prepared:
        run(model_args, data_args, training_args, folder, prepared)
    output = training_args.output_dir
    print(f"\nThe model is in {output}: pipeline('keyphrase-extraction', model={output!r})")


if __name__ == "__main__":
    main()
