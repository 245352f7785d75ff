"""Fine-tunes SEKE on documents with keyphrases, with the stock Trainer, and scores it on a test set.

    lexperts train seke minilm_cpu --train-files train.jsonl --test-files test.jsonl
    lexperts train seke deberta_paper --dataset-name midas/inspec --output-dir runs/inspec
    lexperts train seke minilm_cpu --train-files train.jsonl --start-from runs/kp20k                # a second stage
    lexperts train seke distill --teacher default --train-files train.jsonl --unlabelled-files texts.jsonl   # a small model

The output folder holds the best model with its code, its pipelines and its model card, and results.json with the scores of
every epoch.
"""

from run_tools.backbones import resolve_backbone
from run_tools.errors import RESUME, UserError
from run_tools.fingerprints import fingerprint

from ..common.arguments import command
from ..common.run_folder import open_run
from .data import load_documents
from .finetune import prepare, run


def train(model_args, data_args, folder_args, training_args) -> None:
    """Runs the command."""
    if training_args.max_steps <= 0 and not training_args.num_train_epochs and not model_args.start_from:
        raise UserError(
            "--num-train-epochs 0 gives a trained model new rankers. Pass that model by --start-from, or an epoch or more."
        )
    rows, output = load_documents(data_args), training_args.output_dir  # before an earlier run is overwritten
    is_new = not (model_args.start_from or model_args.teacher)
    folder = open_run(
        "seke/train.py", training_args, model_args, data_args,
        backbone=fingerprint(resolve_backbone(model_args.backbone)) if is_new else None,
        overwrite=folder_args.overwrite_output_dir, clear=("base.part",),
    )  # fmt: skip
    run(model_args, data_args, training_args, folder, prepare(model_args, data_args, training_args, rows))
    print(f"\nSaved the model to {output}. Load it with pipeline('keyphrase-extraction', model={output!r}).")


main = command("seke", "train", train, RESUME)
