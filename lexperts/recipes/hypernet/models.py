"""What the three trainings share: the model, its tokenizer, and the Trainer."""

from pathlib import Path

from transformers import pipeline, set_seed

from modeling_hypernet import CachedEncoderDataset
from run_tools import loading

from ..training import RecipeTrainer
from .arguments import DataArguments, ModelArguments


def build_model(model_class, args: ModelArguments, seed: int, **options):
    """A model on a pretrained backbone."""
    set_seed(seed)
    fields = {name: value for name, value in vars(args).items() if name not in ("backbone", "backbone_lr")}
    return model_class.from_backbone(args.backbone, **fields, **options)


def open_tokenizer(backbone: str, max_length: int):
    """The backbone's tokenizer. Its maximum length is saved with it, so pipelines use that of training."""
    tokenizer = loading.open_tokenizer(backbone)
    tokenizer.model_max_length = max_length
    return tokenizer


def make_trainer(
    trainer_class: type[RecipeTrainer], model, model_args: ModelArguments, data_args: DataArguments, training_args, rows, collator,
    **options,
):  # fmt: skip
    """A Trainer with a learning rate of its own for the backbone, and the rows of each split: with the states of a frozen
    backbone, if `--cache-states` asks for them.
    """
    if data_args.cache_states and model.config.freeze_backbone:
        states = Path(training_args.output_dir) / "states"
        rows = {split: CachedEncoderDataset(model, own, collator, f"{states}-{split}") for split, own in rows.items()}
    trainer = trainer_class(
        model=model, args=training_args, data_collator=collator, processing_class=collator.tokenizer,
        train_dataset=rows["train"], eval_dataset=rows.get("validation"),
        part=model.base_model.backbone.parameters(), part_rate=model_args.backbone_lr, **options,
    )  # fmt: skip
    return trainer, rows


def save_pipeline(task: str, trainer: RecipeTrainer):
    """Saves the pipeline of a trained model, and returns it."""
    run, folder = pipeline(task, model=trainer.model, tokenizer=trainer.processing_class), trainer.args.output_dir
    run.save_pretrained(folder)
    print(f"\nThe model is in {folder}: pipeline({task!r}, model={folder!r})")
    return run
