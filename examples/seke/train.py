"""Fine-tunes SEKE on documents with keyphrases, with the stock Trainer, and scores it on a test set.

    python examples/seke/train.py examples/seke/minilm_cpu.yml --train_files train.jsonl --test_files test.jsonl
    python examples/seke/train.py examples/seke/deberta_paper.yml --dataset_name midas/inspec --output_dir runs/inspec
    python examples/seke/train.py ... --ablation vanilla --seeds 1 2 3                   # mean and standard deviation
    python examples/seke/train.py ... --first_files kp20k.jsonl --first_epochs 1         # two stages

A YAML file gives arguments; those on the command line win. Start the same command again after an interruption: training
goes on from the last checkpoint, and stages and seeds that are finished are not trained again. The output folder holds the
best model, its code, its pipelines and its card; results.json the scores of every epoch.
"""

import copy
import json
import shutil
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, stdev

import yaml
from recipe import DataArguments, ModelArguments, prepare, run
from transformers import HfArgumentParser, TrainingArguments

from keyphrase_tools.cards import write_card


@dataclass
class RunArguments:
    seeds: list[int] | None = field(default=None, metadata={"help": "one run each; the best by validation is kept"})
    first_files: list[str] | None = field(
        default=None, metadata={"help": "JSON Lines to train on first, such as KP20k's or KPTimes'"}
    )
    first_dataset: str | None = field(default=None, metadata={"help": "likewise a data set on the Hub: midas/kp20k"})
    first_epochs: float = field(default=1.0, metadata={"help": "epochs of the first stage"})
    traceback: bool = field(default=False, metadata={"help": "show the traceback of an error"})


def parse_arguments():
    kinds = (ModelArguments, DataArguments, RunArguments, TrainingArguments)
    parser = HfArgumentParser(kinds, description=__doc__.split("\n")[0])
    given = sys.argv[1:]
    if given and given[0].endswith((".yml", ".yaml")):
        settings = yaml.safe_load(Path(given[0]).read_text(encoding="utf-8"))
        from_file = []
        for name, value in settings.items():
            from_file += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
        given = from_file + given[1:]
    return parser.parse_args_into_dataclasses(given)


def in_folder(args: TrainingArguments, folder: Path, **changes) -> TrainingArguments:
    args = copy.deepcopy(args)
    for name, value in {"output_dir": str(folder), **changes}.items():
        setattr(args, name, value)
    return args


def finished(folder: Path) -> dict | None:
    """What a finished run recorded."""
    path = folder / "results.json"
    return json.loads(path.read_text()) if path.exists() else None


def first_stage(model_args, data_args, run_args, training_args) -> ModelArguments:
    """Trains on the first documents, unless that is done -> arguments to go on from there."""
    folder = Path(training_args.output_dir) / "first"
    changes = {"num_train_epochs": run_args.first_epochs, "push_to_hub": False}
    first_args = in_folder(training_args, folder, **changes)
    other = {"dataset_name": run_args.first_dataset, "train_files": run_args.first_files}
    first_data = replace(data_args, **other, validation_files=None, test_files=None, show=0, calibrate=False)
    if finished(folder) is None:
        print("The first stage:")
        run(model_args, first_data, first_args)
    return replace(model_args, start_from=str(folder))


def several_seeds(model_args, data_args, run_args, training_args):
    """A run for each seed in a folder of its own; the best by validation stands in the output folder too."""
    output, records = Path(training_args.output_dir), {}
    for seed in run_args.seeds:
        folder = output / f"seed-{seed}"
        records[seed] = finished(folder)
        if records[seed] is None:
            print(f"\nSeed {seed}:")
            records[seed] = run(model_args, data_args, in_folder(training_args, folder, seed=seed, push_to_hub=False))
    best = max(records, key=lambda seed: records[seed]["best_validation_f1@10"])
    shutil.copytree(
        output / f"seed-{best}", output, dirs_exist_ok=True, ignore=shutil.ignore_patterns("checkpoint-*", "base")
    )
    record = records[best] | {"seeds": []}
    for seed, of_seed in records.items():
        own = {"seed": seed, "validation_f1@10": of_seed["best_validation_f1@10"]}
        record["seeds"].append(
            own | {k: v for k, v in of_seed.get("test", {}).get(data_args.rules, {}).items() if "f1" in k}
        )
    (output / "results.json").write_text(json.dumps(record, indent=1))
    write_card(output, output.resolve().name, training_args.output_dir)
    for name in record["seeds"][0]:
        if name != "seed":
            values = [100 * own[name] for own in record["seeds"]]
            spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
            print(f"{name} over {len(values)} seeds: {mean(values):.1f}{spread}")


def main():
    try:
        model_args, data_args, run_args, training_args = parse_arguments()
    except ValueError as error:
        sys.exit(f"error: {error}")
    try:
        Path(training_args.output_dir).mkdir(parents=True, exist_ok=True)
        if run_args.first_files or run_args.first_dataset:
            model_args = first_stage(model_args, data_args, run_args, training_args)
        prepared = None if run_args.seeds else prepare(model_args, data_args, training_args)
        if run_args.seeds:
            several_seeds(model_args, data_args, run_args, training_args)
    except (OSError, ValueError, ImportError) as error:
        if run_args.traceback:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if prepared:
        run(model_args, data_args, training_args, prepared)
    output = training_args.output_dir
    print(f"\nThe model is in {output}: pipeline('keyphrase-extraction', model={output!r})")


if __name__ == "__main__":
    main()
