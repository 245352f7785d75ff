"""Prepares documents for keyphrase generation: the vocabulary, and rows of words and labels.

    lexperts train exhird-data --train-files kp20k/train.jsonl --validation-files kp20k/validation.jsonl --output-dir runs/kp20k
    lexperts train exhird-data --dataset-name midas/kp20k --output-dir runs/kp20k
    lexperts train exhird transformer_paper --data runs/kp20k --output-dir runs/transformer

The output folder contains `tokenizer`, `train` and `validation`, for `lexperts train exhird --data`. As in ExHiRD, documents of
more than 400 words or 80 target words are dropped, and so are keyphrases of more than six words; the log counts them. Test sets
need no preparation: training reads their JSON Lines.
"""

from pathlib import Path

from datasets import Dataset

from modeling_exhird import ExhirdTokenizer, tokenize_documents
from run_tools.backbones import resolve_backbone
from run_tools.errors import UserError
from run_tools.fingerprints import fingerprint
from run_tools.loading import describe_load_errors, open_tokenizer

from ..common.arguments import command
from ..common.run_folder import RunFolder
from ..common.settings import collect_settings
from ..common.splits import load_keyphrase_rows, to_columns
from .arguments import PrepareArguments

COLUMNS = ("title", "text", "keyphrases")
PREPARED = "prepared.json"  # the record of the settings and files that documents were prepared with


def load(args: PrepareArguments) -> dict[str, dict[str, list]]:
    """The columns of training and validation. Raises a `ValueError` if one of them is missing."""
    rows = load_keyphrase_rows(args) if args.dataset_name or args.train_files else {}
    if not {"train", "validation"} <= rows.keys():
        raise ValueError("No documents. Pass --train-files and --validation-files, or --dataset-name midas/kp20k.")
    return {split: to_columns(rows[split], args) for split in ("train", "validation")}


def vocabulary_texts(columns: dict[str, list]):
    """All texts from which the vocabulary is counted."""
    for name in ("title", "text"):
        yield from (text if isinstance(text, str) else " ".join(text) for text in columns[name] if text)
    for phrases in columns["keyphrases"]:
        yield phrases if isinstance(phrases, str) else " ; ".join(phrases)


def prepare(args: PrepareArguments, overwrite: bool = False) -> RunFolder:
    """Prepares the documents, unless that is done. Raises a `SettingsMismatchError` for those of other files or settings."""
    backbone = fingerprint(resolve_backbone(args.backbone)) if args.backbone else None
    settings = collect_settings("exhird/prepare.py", args, backbone=backbone)
    folder = RunFolder(args.output_dir, settings, ("tokenizer", "train", "validation"), PREPARED).open(overwrite)
    if folder.finished:
        print(f"the documents in {args.output_dir} are already prepared")
        return folder
    write_data(args)
    folder.mark_finished()
    return folder


def write_data(args: PrepareArguments):
    """Writes the tokenizer and the rows of both splits."""
    output, splits = Path(args.output_dir), load(args)
    tokenizer = ExhirdTokenizer.from_texts(vocabulary_texts(splits["train"]), vocab_size=args.vocab_size)
    if args.backbone:
        with describe_load_errors("The encoder", args.backbone):
            subword_tokenizer = open_tokenizer(resolve_backbone(args.backbone))
            tokenizer = tokenizer.with_subword_tokenizer(subword_tokenizer)
    tokenizer.save_pretrained(output / "tokenizer")
    print(f"vocabulary: {len(tokenizer):,} words")
    given = {name: getattr(args, name) for name in ("max_source_length", "max_target_length")}
    for split, columns in splits.items():
        options = {"batched": True, "remove_columns": list(COLUMNS), "desc": split, "load_from_cache_file": False}
        rows = Dataset.from_dict(columns).map(tokenize_documents, fn_kwargs=given | {"tokenizer": tokenizer}, **options)
        if not len(rows):
            where = f"--{split}-files" if args.train_files else f"the {split} documents"
            raise UserError(
                f"{where}: None of the {len(columns['text']):,} documents has a keyphrase and at most {args.max_source_length} words "
                f"({args.max_target_length} in its keyphrases). Check the column of keyphrases, and the lengths."
            )
        rows.save_to_disk(output / split)
        starts = [row[0] for labels in rows["labels"] for row in labels]
        present, absent = (starts.count(i) for i in (tokenizer.present_token_id, tokenizer.absent_token_id))
        documents = f"{len(rows):,} of {len(columns['text']):,} documents"
        print(f"{split}: {documents}, {present:,} present and {absent:,} absent keyphrases")


main = command("exhird", "prepare", lambda args, folder_args: prepare(args, folder_args.overwrite_output_dir))
