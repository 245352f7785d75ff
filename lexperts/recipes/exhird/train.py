"""Trains a keyphrase generator with the stock Trainer and the reference's plateau schedule, and scores it.

    lexperts train exhird bigru_paper --dataset-name midas/kp20k --output-dir runs/bigru
    lexperts train exhird warm_cpu --train-files train.jsonl --validation-files validation.jsonl \\
        --test-files mine=test.jsonl --output-dir runs/warm
    lexperts train exhird bigru_paper --data runs/kp20k --output-dir runs/bigru        # prepared documents
    lexperts train exhird smollm2_cpu --train-files train.jsonl --validation-files validation.jsonl --output-dir runs/smollm2

A pretrained --backbone may be an encoder, such as minilm, or a decoder, such as smollm2, which reads the document as a prompt.

Documents are prepared in OUTPUT_DIR/data, as by `lexperts train exhird-data`; --data takes prepared documents, for several
models on the same documents. Test sets are scored at the end. The output folder holds the best model
by validation loss, its code and its pipeline.
"""

from dataclasses import fields
from pathlib import Path

import torch
from datasets import load_from_disk
from transformers import Trainer, pipeline, set_seed

from keyphrase_tools.evaluation import keep_best
from keyphrase_tools.metrics import check_gold
from modeling_exhird import (
    DataCollatorForKeyphraseGeneration,
    ExhirdConfig,
    ExhirdForCausalLM,
    ExhirdForKeyphraseGeneration,
    ExhirdTokenizer,
)
from run_tools.backbones import resolve_backbone
from run_tools.errors import RESUME, SettingsMismatchError
from run_tools.fingerprints import fingerprint

from ..common.arguments import RunFolderArguments, command
from ..common.run_folder import RunFolder, open_run, training_summary
from ..common.training import RecipeTrainer, train_or_resume, trainer_options
from .arguments import DataArguments, EvaluateArguments, ModelArguments, PrepareArguments, refuse_options
from .decoder import is_decoder, set_up_decoder
from .evaluate import check_generated, evaluate, parse_test_files, read_test_set
from .prepare import PREPARED, prepare
from .schedule import PlateauSchedule, stop_after

BACKBONE_OPTIONS = ("backbone", "backbone_lr", "attention_dropout", "adapter_rank")  # not fields of the configuration


def build_model(args: ModelArguments, tokenizer: ExhirdTokenizer) -> ExhirdForKeyphraseGeneration:
    """A new model, on a pretrained encoder for `encoder_type="pretrained"`."""
    options = {f.name: getattr(args, f.name) for f in fields(args) if f.name not in BACKBONE_OPTIONS}
    options["relative_attention"] = None if args.relative_attention == "off" else args.relative_attention
    if args.encoder_type == "pretrained":
        options["attention_dropout"] = args.attention_dropout
        return ExhirdForKeyphraseGeneration.from_backbone(args.backbone, tokenizer, **options)
    return ExhirdForKeyphraseGeneration(ExhirdConfig.from_tokenizer(tokenizer, **options))


def backbone_parameters(model) -> list[torch.nn.Parameter]:
    """The parameters of a pretrained encoder, if the model has one."""
    return list(getattr(model.encoder.word_encoder, "backbone", torch.nn.Module()).parameters())


def make_optimizer(model, learning_rate: float, backbone_lr: float) -> torch.optim.Optimizer:
    """The reference's Adam, with a separate learning rate for a pretrained encoder."""
    backbone = backbone_parameters(model)
    own = {id(parameter) for parameter in backbone}
    groups: list[dict] = [{"params": [p for p in model.parameters() if p.requires_grad and id(p) not in own]}]
    trained = [p for p in backbone if p.requires_grad]  # in the model's order, on which a resumed run relies
    if trained:
        groups.append({"params": trained, "lr": backbone_lr})
    return torch.optim.Adam(groups, lr=learning_rate, eps=1e-9)


def open_documents(args: DataArguments, backbone: str | None, folder: Path, overwrite: bool) -> RunFolder:
    """The folder of the prepared documents; prepares them if necessary. Raises a `SettingsMismatchError` for those of
    other files or another encoder, and a `ValueError` for an incomplete --data.
    """
    if args.data:
        if not (Path(args.data) / "tokenizer").is_dir():
            raise ValueError(f"--data {args.data!r} contains no 'tokenizer'. Make it with lexperts train exhird-data.")
        data = RunFolder(args.data, {}, record=PREPARED)
        if not data.read().get("finished"):
            raise ValueError(
                f"--data {args.data!r} is not complete: {PREPARED} does not mark it as finished. Prepare the documents "
                "again with lexperts train exhird-data ... --overwrite-output-dir true."
            )
        return data
    names = ("dataset_name", "train_files", "validation_files")
    prepare_args = PrepareArguments(
        output_dir=str(folder), **{name: getattr(args, name) for name in names}, backbone=backbone
    )
    try:
        return prepare(prepare_args)
    except SettingsMismatchError:
        if not overwrite:
            raise
        return prepare(prepare_args, overwrite=True)


def set_up(model_args: ModelArguments, data_args: DataArguments, folder_args: RunFolderArguments, training_args):
    """The data arguments, the run folder and the trainer: everything before training, and all errors that the user can fix."""
    data, overwrite = Path(training_args.output_dir) / "data", folder_args.overwrite_output_dir
    test_files = parse_test_files(data_args.test_files or [])
    check_generated(test_files, training_args.output_dir)
    for path in test_files.values():
        check_gold([row["keyphrases"] for row in read_test_set(path)], f"--test-files {path}")
    backbone = model_args.backbone if model_args.encoder_type == "pretrained" else None
    if backbone and is_decoder(backbone):
        return data_args, *set_up_decoder(model_args, data_args, overwrite, training_args)
    decoders = "decoders, such as --backbone smollm2"
    refuse_options(model_args, ("adapter_rank",), decoders)
    refuse_options(data_args, ("max_source_length", "max_length"), decoders)
    if not backbone:
        refuse_options(model_args, ("backbone_lr", "freeze_backbone", "attention_dropout"), "--encoder-type pretrained")
    with training_args.main_process_first(desc="documents"):  # the main process prepares, the others read
        documents = open_documents(data_args, backbone, data, overwrite and training_args.process_index == 0)
    # the settings that the documents were prepared with, whatever their folder
    data_settings = {name: value for name, value in documents.read()["settings"].items() if name != "script"}
    unused = dict.fromkeys(("dataset_name", "train_files", "validation_files"))  # with --data
    folder = open_run(
        "exhird/train.py", training_args, model_args, data_args, overwrite=overwrite,
        backbone=fingerprint(resolve_backbone(backbone)) if backbone else None, **unused, data=data_settings,
    )  # fmt: skip
    tokenizer = ExhirdTokenizer.from_pretrained(documents.path / "tokenizer")
    rows = {split: load_from_disk(str(documents.path / split)) for split in ("train", "validation")}
    rows["train"] = rows["train"].select(range(min(len(rows["train"]), data_args.max_train_rows or len(rows["train"]))))
    set_seed(training_args.seed)
    model = build_model(model_args, tokenizer)
    keep_best(training_args, "loss", greater_is_better=False)
    training_args.prediction_loss_only = True
    collator, callbacks = DataCollatorForKeyphraseGeneration(tokenizer), stop_after(data_args.stop_after_rises)
    options = trainer_options(model, training_args, rows, collator, tokenizer, callbacks)
    if not data_args.plateau_schedule:
        options |= {"part": backbone_parameters(model), "part_rate": model_args.backbone_lr}
        return data_args, folder, RecipeTrainer(**options)
    optimizer = make_optimizer(model, training_args.learning_rate, model_args.backbone_lr)
    return data_args, folder, Trainer(**options, optimizers=(optimizer, PlateauSchedule(optimizer)))


def print_examples(generate, path: str, count: int):
    """Prints the titles of the first documents with their generated and their gold keyphrases."""
    for row in read_test_set(path)[:count]:
        phrases = generate({"title": row["title"], "text": row["text"]})
        print(f"\n{row['title'] or row['text'][:80]}")
        for name, present in (("present", True), ("absent", False)):
            generated = (f"{p['keyphrase']} {p['score']:.2f}" for p in phrases if p["present"] is present)
            print(f"  {name:7}  {'; '.join(generated)}")
        print(f"  gold     {'; '.join(row['keyphrases'])}")


def train(*groups) -> None:
    """The command `lexperts train exhird`."""
    data_args, folder, trainer = set_up(*groups)
    output = trainer.args.output_dir
    train_or_resume(trainer, folder)
    generate = pipeline("keyphrase-generation", model=trainer.model, tokenizer=trainer.processing_class)
    generate.save_pretrained(output)
    per = "token" if isinstance(trainer.model, ExhirdForCausalLM) else "document"
    if trainer.state.best_metric is not None:
        print(f"validation loss per {per} {trainer.state.best_metric:.2f}, step {trainer.state.best_global_step}")
    if data_args.test_files and trainer.is_world_process_zero():
        evaluate(EvaluateArguments(output, data_args.test_files))
        print_examples(generate, next(iter(parse_test_files(data_args.test_files).values())), data_args.show)
    if trainer.is_world_process_zero():
        folder.mark_finished(ran=training_summary(trainer.args, trainer.state))
    print(f"The model is in {output}: pipeline('keyphrase-generation', model={output!r})")


main = command("exhird", "train", train, RESUME)
