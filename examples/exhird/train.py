"""Trains a keyphrase generator with the stock Trainer and the reference's plateau rule, from documents to scores.

    python examples/exhird/train.py examples/exhird/bigru_paper.yml --dataset_name midas/kp20k --output_dir runs/bigru
    python examples/exhird/train.py examples/exhird/warm_cpu.yml --train_files train.jsonl --validation_files validation.jsonl \
        --test_files mine=test.jsonl --output_dir runs/warm
    python examples/exhird/train.py examples/exhird/bigru_paper.yml --data runs/kp20k --output_dir runs/bigru

Documents are prepared in OUTPUT_DIR/data as prepare.py does; --data takes what it made before, for several models of the
same documents. Test sets are scored as evaluate.py does. A YAML file gives arguments; those on the command line win.
--ablation NAME trains in OUTPUT_DIR/NAME. Start the same command again after an interruption: training resumes from the last
checkpoint. With other settings it stops, and names what differs: use another --output_dir, or --overwrite_output_dir true.
The output folder holds the best model by validation loss, its code and its pipeline.
"""

import sys
from dataclasses import dataclass, field, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import evaluate
import prepare
import torch
from cli_args import parse_arguments, read_yaml, run_or_exit
from datasets import load_from_disk
from run_folder import OtherSettings, RunFolder, RunFolderArguments, fingerprint, open_run, what_ran
from transformers import Trainer, TrainingArguments, pipeline, set_seed

from keyphrase_tools.documents import read_jsonl
from keyphrase_tools.evaluation import keep_best
from modeling_exhird import ExHirdCollator, ExHirdConfig, ExHirdForKeyphraseGeneration, ExHirdTokenizer
from modeling_exhird.schedule_exhird import PlateauSchedule, StopAfterRises


@dataclass
class ModelArguments:
    encoder_type: str = field(default="transformer", metadata={"help": "bigru, bilstm, cnn, transformer or pretrained"})
    backbone: str = field(default="minilm", metadata={"help": "Hub id or folder, of encoder_type pretrained"})
    backbone_lr: float = field(default=1e-4, metadata={"help": "learning rate of a pretrained encoder"})
    freeze_backbone: bool = field(default=False, metadata={"help": "leave a pretrained encoder as it is"})
    attention_dropout: float | None = field(
        default=None, metadata={"help": "of a pretrained encoder, in place of its own; with 0 a CPU trains faster"}
    )
    hidden_size: int = field(default=300, metadata={"help": "of memory and decoder"})
    embedding_size: int | None = field(default=None, metadata={"help": "of words; 100, or a Transformer's hidden size"})
    num_hidden_layers: int = field(default=4, metadata={"help": "of the encoder"})
    num_attention_heads: int = field(default=6, metadata={"help": "of a Transformer"})
    intermediate_size: int = field(default=2048, metadata={"help": "of a Transformer"})
    relative_attention: str = field(default="shared", metadata={"help": "shared, separate, none; off for absolute"})
    use_lead: bool = field(default=True, metadata={"help": "the lead mask"})
    use_window: bool = field(default=True, metadata={"help": "the neighbour mask"})
    use_top_k: bool = field(default=True, metadata={"help": "the top-k mask"})
    lead_size: int = field(default=10, metadata={"help": "g"})
    window_size: int = field(default=50, metadata={"help": "w"})
    attention_top_k: int = field(default=10, metadata={"help": "k"})
    segment_length: int | None = field(default=None, metadata={"help": "attention stays within segments"})
    dropout: float = field(default=0.0, metadata={"help": "in the encoder"})
    exclusion_window: int = field(default=1, metadata={"help": "phrases that none begins like; -1 all, 0 off"})
    exclusive_loss_window: int = field(default=4, metadata={"help": "of the exclusive loss"})
    exclusive_loss_coef: float = field(default=0.0, metadata={"help": "weight of the exclusive loss; 1 for ExHiRD-s"})


@dataclass
class DataArguments:
    data: str | None = field(default=None, metadata={"help": "folder that prepare.py made; or else"})
    dataset_name: str | None = field(default=None, metadata={"help": "data set on the Hub, such as midas/kp20k, or"})
    train_files: list[str] | None = field(default=None, metadata={"help": "JSON Lines with title, text, keyphrases"})
    validation_files: list[str] | None = field(default=None, metadata={"help": "likewise"})
    test_files: list[str] | None = field(default=None, metadata={"help": "NAME=JSON Lines, scored after training"})
    show: int = field(default=3, metadata={"help": "test documents that are printed with their keyphrases"})
    max_train_rows: int | None = field(default=None, metadata={"help": "documents to learn from, the first ones"})
    rises: int = field(default=3, metadata={"help": "evaluations in a row that grow worse before training ends"})
    plateau: bool = field(default=True, metadata={"help": "the reference's rule; otherwise lr_scheduler_type"})
    ablation: str | None = field(default=None, metadata={"help": "name in ablations.yml: goes over all else"})
    traceback: bool = field(default=False, metadata={"help": "show the traceback of an error"})


OF_BACKBONE = ("backbone", "backbone_lr", "attention_dropout")


def build(args: ModelArguments, tokenizer: ExHirdTokenizer) -> ExHirdForKeyphraseGeneration:
    options = {f.name: getattr(args, f.name) for f in fields(args) if f.name not in OF_BACKBONE}
    options["relative_attention"] = None if args.relative_attention == "off" else args.relative_attention
    if args.encoder_type == "pretrained":
        options["attention_dropout"] = args.attention_dropout
        return ExHirdForKeyphraseGeneration.from_backbone(prepare.find_backbone(args.backbone), tokenizer, **options)
    return ExHirdForKeyphraseGeneration(ExHirdConfig.for_tokenizer(tokenizer, **options))


def ablate(name: str, *arguments):
    """Sets what ablations.yml says under a name.

    Raises:
        ValueError: for an unknown name; the known ones are listed.
    """
    known = read_yaml(Path(__file__).parent / "ablations.yml")
    if name not in known:
        raise ValueError(f"--ablation {name!r} is not in ablations.yml: {', '.join(known)}.")
    for field_name, value in known[name].items():
        for holder in arguments:
            if hasattr(holder, field_name):
                setattr(holder, field_name, value)


def make_optimizer(model, rate: float, backbone_rate: float) -> torch.optim.Optimizer:
    """The reference's Adam; a pretrained encoder has a rate of its own."""
    of_backbone = set(getattr(model.encoder.reader, "backbone", torch.nn.Module()).parameters())
    groups = [{"params": [p for p in model.parameters() if p.requires_grad and p not in of_backbone]}]
    tuned = [p for p in of_backbone if p.requires_grad]
    if tuned:
        groups.append({"params": tuned, "lr": backbone_rate})
    return torch.optim.Adam(groups, lr=rate, eps=1e-9)


def rows_of(args: DataArguments, backbone: str | None, folder: Path, overwrite: bool) -> RunFolder:
    """The folder of the prepared documents, which are prepared once.

    Raises:
        OtherSettings: where those in the folder are of other files, or for another encoder.
        ValueError: if there are none, or --data holds what prepare.py did not finish.
    """
    if args.data:
        if not (Path(args.data) / "tokenizer").is_dir():
            raise ValueError(f"--data {args.data!r} holds no 'tokenizer'. Make it with examples/exhird/prepare.py.")
        data = RunFolder(args.data, {}, record=prepare.PREPARED)
        if not data.read().get("finished"):
            raise ValueError(
                f"--data {args.data!r} has no record of finished documents ({prepare.PREPARED}). Prepare them again with "
                "examples/exhird/prepare.py --overwrite_output_dir true."
            )
        return data
    names = ("dataset_name", "train_files", "validation_files")
    wanted = prepare.Arguments(str(folder), **{name: getattr(args, name) for name in names}, pieces=backbone)
    try:
        return prepare.prepare(wanted)
    except OtherSettings:
        if not overwrite:
            raise
        return prepare.prepare(wanted, overwrite=True)


def content_of(documents: RunFolder) -> dict:
    """What the settings of a run say of its documents: their own settings, wherever they lie."""
    of_data = {name: value for name, value in documents.read()["settings"].items() if name != "script"}
    given = dict.fromkeys(("dataset_name", "train_files", "validation_files"))  # where --data is given, they are unused
    return given | {"data": of_data}


def set_up(model_args: ModelArguments, data_args: DataArguments, folder_args: RunFolderArguments, training_args):
    """Everything before training, and so every error that the user can fix -> the run folder and the trainer."""
    data, overwrite = Path(training_args.output_dir) / "data", folder_args.overwrite_output_dir
    if data_args.ablation:
        ablate(data_args.ablation, model_args, training_args)
        training_args.output_dir = str(Path(training_args.output_dir) / data_args.ablation)
    files = evaluate.test_sets(data_args.test_files or [])
    missing = [path for path in files.values() if not Path(path).exists()]
    if missing:
        raise ValueError(f"--test_files names {missing[0]!r}, and there is no such file.")
    backbone = model_args.backbone if model_args.encoder_type == "pretrained" else None
    with training_args.main_process_first(desc="documents"):  # one prepares, the others find what it made
        documents = rows_of(data_args, backbone, data, overwrite and training_args.process_index == 0)
    folder = open_run(
        "exhird/train.py", training_args, model_args, data_args, overwrite=overwrite,
        backbone=fingerprint(prepare.find_backbone(backbone)) if backbone else None, **content_of(documents),
    )  # fmt: skip
    tokenizer = ExHirdTokenizer.from_pretrained(documents.path / "tokenizer")
    rows = {split: load_from_disk(str(documents.path / split)) for split in ("train", "validation")}
    rows["train"] = rows["train"].select(range(min(len(rows["train"]), data_args.max_train_rows or len(rows["train"]))))
    set_seed(training_args.seed)
    model = build(model_args, tokenizer)
    keep_best(training_args, "loss", greater_is_better=False)
    training_args.prediction_loss_only = True
    optimizer, schedule = None, None
    if data_args.plateau:
        optimizer = make_optimizer(model, training_args.learning_rate, model_args.backbone_lr)
        schedule = PlateauSchedule(optimizer)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        data_collator=ExHirdCollator(tokenizer),
        processing_class=tokenizer,
        optimizers=(optimizer, schedule),
        callbacks=[StopAfterRises(data_args.rises)] if data_args.rises else [],
    )
    return folder, trainer


def show(generate, path: str, count: int):
    """Prints the first documents' titles, with the keyphrases that are generated and those that were given."""
    for row in read_jsonl([path], ("text", "keyphrases"))[:count]:
        phrases = generate({"title": row.get("title"), "text": row["text"]})
        print(f"\n{row.get('title') or row['text'][:80]}")
        for name, present in (("present", True), ("absent", False)):
            said = (f"{p['keyphrase']} {p['score']:.2f}" for p in phrases if p["present"] is present)
            print(f"  {name:7}  {'; '.join(said)}")
        given = row["keyphrases"]
        print(f"  given    {given if isinstance(given, str) else '; '.join(given)}")


def main():
    kinds = (ModelArguments, DataArguments, RunFolderArguments, TrainingArguments)
    model_args, data_args, folder_args, training_args = parse_arguments(kinds, __doc__)
    given = (model_args, data_args, folder_args, training_args)
    folder, trainer = run_or_exit(set_up, *given, traceback=data_args.traceback)
    output = training_args.output_dir
    trainer.train(resume_from_checkpoint=folder.start)
    generate = pipeline("keyphrase-generation", model=trainer.model, tokenizer=trainer.processing_class)
    generate.save_pretrained(output)
    print(f"validation loss a document {trainer.state.best_metric:.2f}, step {trainer.state.best_global_step}")
    if data_args.test_files and trainer.is_world_process_zero():
        evaluate.evaluate(evaluate.Arguments(output, data_args.test_files))
        show(generate, next(iter(evaluate.test_sets(data_args.test_files).values())), data_args.show)
    if trainer.is_world_process_zero():
        folder.mark_finished(ran=what_ran(training_args, trainer.state))
    print(f"The model is in {output}: pipeline('keyphrase-generation', model={output!r})")


if __name__ == "__main__":
    main()
