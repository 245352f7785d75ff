"""Training, validation and test data of the three tasks, from JSON Lines files or from the Hub."""

from datasets import ClassLabel, load_dataset

from ..common.splits import hold_out_validation, load_keyphrase_rows, load_splits, to_columns
from .arguments import ClassificationDataArguments, KeyphraseDataArguments, QuestionDataArguments

CLASSIFICATION_EXAMPLE = '{"title": "...", "text": "...", "label": "..."}'
CLASSIFICATION_HINT = "Name yours with --text-column, --title-column and --label-column."
QUESTION_EXAMPLE = '{"question": "...", "context": "...", "answers": {"text": ["..."], "answer_start": [0]}}'
QUESTION_COLUMNS = ("question", "context", "answers")


def limit_rows(rows: dict[str, list[dict]], **limits: int | None) -> dict[str, list[dict]]:
    """The first rows of each split that has a limit."""
    return {split: of_split[: limits.get(split) or len(of_split)] for split, of_split in rows.items()}


def load_documents(args: KeyphraseDataArguments) -> dict[str, dict[str, list]]:
    """Titles, texts and keyphrases of each split."""
    rows = load_keyphrase_rows(args)
    hold_out_validation(rows, args.validation_share)
    documents = {split: to_columns(of_split, args) for split, of_split in rows.items()}
    for columns in documents.values():
        columns["text"] = [text if isinstance(text, str) else " ".join(text) for text in columns["text"]]
    return documents


def load_texts(args: ClassificationDataArguments) -> tuple[dict[str, list[dict]], list[str]]:
    """Rows of each split, with classes as numbers, and the names of the classes."""
    required = (args.text_column, args.label_column)
    rows = load_splits(args, required, "fancyzhx/ag_news", CLASSIFICATION_EXAMPLE, CLASSIFICATION_HINT)
    names = None
    if args.dataset_name:
        feature = load_dataset(args.dataset_name, split="train").features.get(args.label_column)
        names = feature.names if isinstance(feature, ClassLabel) else None
    if names is None:
        classes = sorted({row[args.label_column] for row in rows["train"]})
        if classes != list(range(len(classes))):
            for split, texts in rows.items():
                label = args.label_column
                rows[split] = [{**row, label: class_index(row[label], classes)} for row in texts]
        names = [str(name) for name in classes]
    hold_out_validation(rows, args.validation_share)
    return limit_rows(rows, train=args.max_train_rows, test=args.max_test_rows), names


def class_index(label, classes: list) -> int:
    """The number of a class. Raises a `ValueError` for a class without training rows."""
    if label not in classes:
        raise ValueError(
            f"The label {label!r} is in no training row. The classes of the training rows are "
            f"{', '.join(map(repr, classes))}."
        )
    return classes.index(label)


def load_questions(args: QuestionDataArguments) -> dict[str, list[dict]]:
    """Rows of each split. The validation split of a data set on the Hub is used for testing, as for SQuAD."""
    rows = load_splits(args, QUESTION_COLUMNS, "rajpurkar/squad", QUESTION_EXAMPLE)
    if args.dataset_name:
        rows = {"train": rows["train"], "test": rows["validation"]}
    return limit_rows(rows, train=args.max_train_rows, test=args.max_test_rows)
