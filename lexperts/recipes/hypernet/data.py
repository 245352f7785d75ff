"""Training, validation and test data of the three tasks, from JSON Lines files or from the Hub."""

from datasets import ClassLabel, load_dataset

from ..common.splits import hold_out_validation, load_keyphrase_rows, load_splits, to_columns
from .arguments import ClassificationDataArguments, KeyphraseDataArguments, QuestionDataArguments

CLASSIFICATION_EXAMPLE = '{"title": "...", "text": "...", "label": "..."}'
CLASSIFICATION_HINT = "Name yours with --text-column, --title-column and --label-column."
LABELS = (str, int, float, bool)
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
    """Rows of each split, with classes as numbers, and the names of the classes. Raises a `ValueError` for labels of several types, and
    for an unknown class.
    """
    required = (args.text_column, args.label_column)
    rows = load_splits(args, required, "fancyzhx/ag_news", CLASSIFICATION_EXAMPLE, CLASSIFICATION_HINT)
    names = None
    if args.dataset_name:
        feature = load_dataset(args.dataset_name, split="train").features.get(args.label_column)
        names = feature.names if isinstance(feature, ClassLabel) else None
    label = args.label_column
    classes = find_classes([row[label] for row in rows["train"]]) if names is None else range(len(names))
    numbers = {name: number for number, name in enumerate(classes)}
    for split, texts in rows.items():
        rows[split] = [{**row, label: class_index(row[label], numbers)} for row in texts]
    names = [str(name) for name in classes] if names is None else names
    hold_out_validation(rows, args.validation_share)
    return limit_rows(rows, train=args.max_train_rows, test=args.max_test_rows), names


def find_classes(labels: list) -> list:
    """The classes of the training rows, sorted. Raises a `ValueError` for labels of several types, or of another type than LABELS."""
    first_of = {type(label): label for label in reversed(labels)}
    if wrong := [label for kind, label in first_of.items() if kind not in LABELS]:
        raise ValueError(f"The label {wrong[0]!r:.60} of a training row is neither a text nor a number.")
    if len(first_of) > 1:
        raise ValueError(
            f"The labels of the training rows have several types: {', '.join(map(repr, first_of.values()))}."
        )
    return sorted(set(labels))


def class_index(label, numbers: dict) -> int:
    """The number of a class. Raises a `ValueError` for a class without training rows."""
    if type(label) not in LABELS or label not in numbers:
        raise ValueError(
            f"The label {label!r} is in no training row. The classes of the training rows are "
            f"{', '.join(map(repr, numbers))}."
        )
    return numbers[label]


def load_questions(args: QuestionDataArguments) -> dict[str, list[dict]]:
    """Rows of each split. The validation split of a data set on the Hub is used for testing, as for SQuAD."""
    rows = load_splits(args, QUESTION_COLUMNS, "rajpurkar/squad", QUESTION_EXAMPLE)
    if args.dataset_name:
        rows = {"train": rows["train"], "test": rows["validation"]}
    return limit_rows(rows, train=args.max_train_rows, test=args.max_test_rows)
