"""What the three trainings share: the model and its training."""

from transformers import set_seed

from modeling_hypernet import DataCollatorForTextPairs, add_states
from run_tools.loading import open_tokenizer

from ..training import RecipeTrainer, fit
from .arguments import ModelArguments


def build_model(model_class, args: ModelArguments, max_length: int, seed: int, **options):
    """A model on a pretrained backbone, and its tokenizer, with which pipelines truncate as training does."""
    set_seed(seed)
    own = ("backbone", "backbone_lr", "cache_states")
    fields = {name: value for name, value in vars(args).items() if name not in own}
    model = model_class.from_backbone(args.backbone, **fields, **options)
    return model, open_tokenizer(args.backbone, model_max_length=max_length)


def fit_model(model, tokenizer, args: ModelArguments, training_args, rows: dict, checkpoint: str | None, **options):
    """Trains a model on the rows of the splits, its backbone at another rate -> the Trainer, of the class `kind`."""
    collator = DataCollatorForTextPairs(tokenizer)
    if args.cache_states and args.freeze_backbone:
        files = {split: f"{training_args.output_dir}/states-{split}.arrow" for split in rows}
        rows = {split: add_states(own, model, collator, files[split]) for split, own in rows.items()}
    trainer = options.pop("kind", RecipeTrainer)(
        model=model, args=training_args, data_collator=collator, processing_class=tokenizer,
        train_dataset=rows["train"], eval_dataset=rows.get("validation"),
        part=model.base_model.backbone.parameters(), part_rate=args.backbone_lr, **options,
    )  # fmt: skip
    fit(trainer, checkpoint)
    return trainer
