"""Trains a pretrained decoder to write keyphrases: what `lexperts train exhird` does with a backbone such as smollm2."""

from datasets import Dataset
from transformers import set_seed
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

from keyphrase_tools.evaluation import keep_best
from modeling_exhird import DataCollatorForPrompts, ExhirdForCausalLM, tokenize_prompts
from run_tools.backbones import open_backbone_tokenizer, resolve_backbone
from run_tools.errors import UserError
from run_tools.fingerprints import fingerprint
from run_tools.loading import open_config

from ..common.causal_training import CheckpointTrainer
from ..common.run_folder import open_run
from ..common.training import trainer_options
from .arguments import DataArguments, ModelArguments, PrepareArguments, refuse_options
from .prepare import load
from .schedule import stop_after

COLUMNS = ["title", "text", "keyphrases"]


def is_decoder(backbone: str) -> bool:
    """Whether a backbone is a decoder, such as a Llama, by its configuration. BERT's could be one, but is an encoder."""
    config = open_config(resolve_backbone(backbone))
    kinds = MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING
    causal, masked = (type(config) in kind for kind in kinds)
    return causal and not masked and not config.is_encoder_decoder


def make_rows(splits: dict[str, dict], tokenizer, config, data_args: DataArguments) -> dict[str, Dataset]:
    """The columns of both splits -> rows for training. Raises a `UserError` for a split without rows."""
    rows = {}
    for split, columns in splits.items():
        options = {"tokenizer": tokenizer, "config": config, "max_length": data_args.max_length}
        documents = Dataset.from_dict(columns)
        if split == "train" and data_args.max_train_rows is not None:
            documents = documents.select(range(min(len(documents), data_args.max_train_rows)))
        rows[split] = documents.map(
            tokenize_prompts,
            batched=True,
            fn_kwargs=options,
            remove_columns=COLUMNS,
            desc=split,
            load_from_cache_file=False,
        )
        if not len(rows[split]):
            raise UserError(
                f"--{split}-files: None of the {len(documents):,} documents has a keyphrase that fits in --max-length "
                f"{data_args.max_length} tokens with its text. Check the column of keyphrases, and the length."
            )
    return rows


def set_up_decoder(model_args: ModelArguments, data_args: DataArguments, overwrite: bool, training_args):
    """The run folder and the trainer. Raises a `UserError` for options of models with an encoder."""
    if data_args.data:
        raise UserError(
            f"--data {data_args.data} is for models with an encoder: a decoder has its own tokenizer. Pass --train-files and "
            "--validation-files."
        )
    if data_args.plateau_schedule:
        raise UserError("--plateau-schedule true is for models with an encoder. Use --plateau-schedule false.")
    refuse_options(model_args, ("backbone_lr", "freeze_backbone", "exclusive_loss_coef"), "models with an encoder")
    names = ("dataset_name", "train_files", "validation_files")
    splits = load(PrepareArguments(output_dir="", **{name: getattr(data_args, name) for name in names}))
    folder = open_run(
        "exhird/decoder.py", training_args, model_args, data_args, overwrite=overwrite,
        backbone=fingerprint(resolve_backbone(model_args.backbone)),
    )  # fmt: skip
    tokenizer = open_backbone_tokenizer(model_args.backbone, {})
    set_seed(training_args.seed)
    model = ExhirdForCausalLM.from_backbone(
        model_args.backbone, tokenizer, exclusion_window=model_args.exclusion_window, adapter_rank=model_args.adapter_rank,
        attention_dropout=model_args.attention_dropout, max_source_length=data_args.max_source_length,
    )  # fmt: skip
    rows = make_rows(splits, tokenizer, model.config, data_args)
    if training_args.eval_strategy != "no":
        keep_best(training_args, "loss", greater_is_better=False)
    training_args.prediction_loss_only = True
    collator = DataCollatorForPrompts(tokenizer, answers_only=True)
    options = trainer_options(model, training_args, rows, collator, tokenizer, stop_after(data_args.stop_after_rises))
    return folder, CheckpointTrainer(**options)
