"""Documents for training, validation and test, from files or from the Hub."""

from pathlib import Path

from keyphrase_tools.jsonl import NAME_COLUMNS
from keyphrase_tools.labels import tokenize_documents

from ..common.splits import hold_out_validation, load_splits
from .arguments import DataArguments


def load_documents(args: DataArguments) -> dict[str, list[dict]]:
    """The rows of each split. Without validation documents a share of the training documents is split off.

    Raises:
        FileNotFoundError: if a file does not exist.
        ValueError: if training data or a column is missing.
    """
    documents = load_splits(args, (args.text_column, args.keyphrases_column), "midas/inspec", hint=NAME_COLUMNS)
    hold_out_validation(documents, args.validation_share)
    return documents


def describe_data(args: DataArguments, texts: dict, gold: dict, labelled: dict, tokenizer) -> dict[str, dict]:
    """For each split its `source`, and the numbers of `documents`, `keyphrases`, and keyphrases `present` in their texts.

    Args:
        texts, gold: for each split, its texts and their keyphrases.
        labelled: rows of `tokenize_documents`, for the splits that have them already.
        tokenizer: for the others.
    """
    summary = {}
    for split in texts:
        files = getattr(args, f"{split}_files") or ["train"]
        rows = labelled.get(split) or tokenize_documents({"text": texts[split], "keyphrases": gold[split]}, tokenizer)
        summary[split] = {
            "source": args.dataset_name or ", ".join(Path(file).name for file in files),
            "documents": len(texts[split]),
            "keyphrases": sum(rows["num_keyphrases"]),
            "present": sum(rows["num_present"]),
        }
    return summary
