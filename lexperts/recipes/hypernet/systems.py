"""The models that the commands train, and their Trainers."""

from pathlib import Path

from transformers import pipeline

from modeling_hypernet import (
    CachedEncoderDataset,
    HypernetForQuestionAnswering,
    HypernetForSequenceClassification,
    HypernetForTokenClassification,
)
from run_tools import loading
from run_tools.backbones import resolve_backbone
from run_tools.fingerprints import fingerprint
from run_tools.loading import describe_load_errors

from ..common.run_folder import RunFolder, open_run
from ..common.training import RecipeTrainer, trainer_options
from .arguments import DataArguments, ModelArguments

HEADS = {
    "keyphrases": HypernetForTokenClassification,
    "classes": HypernetForSequenceClassification,
    "answers": HypernetForQuestionAnswering,
}
NOT_CONFIG_FIELDS = ("backbone", "backbone_lr")


def build_model(head: str, args: ModelArguments, backbone: str, **options):
    """A head on the hypernetwork, on a pretrained backbone."""
    fields = {name: value for name, value in vars(args).items() if name not in NOT_CONFIG_FIELDS}
    return HEADS[head].from_backbone(backbone, **fields, **options)


def open_tokenizer(backbone: str, max_length: int):
    """The backbone's tokenizer. Its maximum length is saved with it, so pipelines use that of training."""
    with describe_load_errors("--backbone", backbone):
        tokenizer = loading.open_tokenizer(backbone)
    tokenizer.model_max_length = max_length
    return tokenizer


def open_folder(command: str, model_args: ModelArguments, data_args: DataArguments, folder_args, training_args):
    """The run folder, and the folder or Hub id of the backbone."""
    backbone = resolve_backbone(model_args.backbone)
    options = {"overwrite": folder_args.overwrite_output_dir, "clear": ("states*",), "backbone": fingerprint(backbone)}
    return open_run(f"hypernet/{command}.py", training_args, model_args, data_args, **options), backbone


def make_trainer(
    cls, model, model_args: ModelArguments, data_args: DataArguments, training_args, rows, collator, **more
):
    """A Trainer with a separate learning rate for the backbone, and the rows of each split: with the states of a frozen backbone,
    if `--cache-states` asks for them.
    """
    if data_args.cache_states and model.config.freeze_backbone:
        states = Path(data_args.states_dir or training_args.output_dir) / "states"
        rows = {split: CachedEncoderDataset(model, own, collator, f"{states}-{split}") for split, own in rows.items()}
    options = trainer_options(model, training_args, rows, collator, collator.tokenizer)
    options |= {"part": model.base_model.backbone.parameters(), "part_rate": model_args.backbone_lr}
    return cls(**options, **more), rows


class ViterbiTrainer(RecipeTrainer):
    """Evaluates the most likely paths, as the pipeline does: predictions are logits and paths."""

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """As in transformers, with the paths of `decode`."""
        inputs = self._prepare_inputs(inputs)
        with self.accelerator.autocast():  # accelerate wraps only forward
            paths, outputs = self.accelerator.unwrap_model(model).decode(**inputs, return_outputs=True)
        return outputs.loss, None if prediction_loss_only else (outputs.logits, paths), inputs.get("labels")


def save_pipeline(task: str, folder: RunFolder, trainer):
    """Saves the pipeline of a trained model, and returns it."""
    run = pipeline(task, model=trainer.model, tokenizer=trainer.processing_class)
    run.save_pretrained(folder.path)
    print(f"\nThe model is in {folder.path}: pipeline({task!r}, model={str(folder.path)!r})")
    return run
