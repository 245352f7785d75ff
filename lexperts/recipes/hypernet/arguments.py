"""Arguments of the hypernetwork's commands. Imports neither torch nor transformers, so `--help` is fast."""

from dataclasses import dataclass
from typing import Literal

from run_tools.options import option

from ..common.arguments import TRAINING, ColumnArguments, RunFolderArguments, SplitArguments


@dataclass
class ModelArguments:
    """The model and its backbone."""

    backbone: str = option("minilm", "Hub id or folder of any encoder; minilm is in lexperts[offline]", kind="model")
    freeze_backbone: bool = option(True, "whether to freeze the backbone")
    backbone_lr: float = option(2e-5, "learning rate of a backbone that is not frozen", least=0)
    attention_dropout: float | None = option(None, "that of the backbone; 0 is faster on a CPU", least=0, below=1)
    meta_embedding_size: int = option(16, "size of the title's vector z", least=1)
    hidden_size: int = option(512, "hidden size of the layer that encodes the text", least=1)
    bidirectional: bool = option(False, "whether to encode the text in reverse too")
    normalize_meta_embedding: bool = option(True, "whether to normalise z to mean 0 and length 1")
    meta_dropout: float = option(0.0, "dropout on z", least=0, below=1)
    shared_base_weights: bool = option(False, "whether to add generated weights to weights that all texts share")
    classifier_dropout: float = option(0.1, "dropout on the text's states", least=0, below=1)
    pooling: Literal["last", "mean"] = option("last", "state of the text from which it is classified")


@dataclass
class DataArguments(SplitArguments):
    """Options that the data of all three tasks share."""

    test_files: list[str] | None = option(None, "test files, same format", kind="file")
    cache_states: bool = option(False, "whether to compute a frozen backbone's states once")
    states_dir: str | None = option(None, "folder of these states (default: output_dir)", kind="output folder")


@dataclass
class KeyphraseDataArguments(ColumnArguments, DataArguments):
    """Documents with titles and keyphrases."""

    cache_states: bool = option(True, "whether to compute a frozen backbone's states once")
    validation_share: float = option(0.2, "share for validation, without validation files", above=0, below=1)
    language: str = option("english", "stemmer of keyphrases, such as german, or none", kind="language")
    max_length: int = option(256, "maximum sub-tokens of title and text", least=1)
    early_stopping_patience: int = option(5, "epochs without a gain before training stops; 0 for never", least=0)
    show: int = option(3, "number of test documents to print with their keyphrases", least=0)


@dataclass
class ClassificationDataArguments(DataArguments):
    """Texts with titles and classes."""

    validation_share: float = option(0.1, "share for validation, without validation files", above=0, below=1)
    text_column: str = option("text", "column of texts")
    title_column: str = option("title", "column of titles, which may be empty")
    label_column: str = option("label", "column of names or numbers of classes")
    max_length: int = option(512, "maximum tokens of title and text", least=1)
    max_train_rows: int | None = option(None, "use only the first N training texts", least=1)
    max_test_rows: int | None = option(None, "use only the first N test texts", least=1)


@dataclass
class QuestionDataArguments(DataArguments):
    """Questions with contexts and answers, in SQuAD's columns."""

    max_seq_len: int = option(384, "tokens of a window, including the question", least=1)
    doc_stride: int = option(128, "tokens by which neighbouring windows overlap", least=0)
    max_train_rows: int | None = option(None, "use only the first N training questions", least=1)
    max_test_rows: int | None = option(None, "use only the first N test questions", least=1)
    show: int = option(3, "number of questions to print with their answers", least=0)


ARGUMENTS = {
    "train_keyphrases": (ModelArguments, KeyphraseDataArguments, RunFolderArguments, TRAINING),
    "train_classification": (ModelArguments, ClassificationDataArguments, RunFolderArguments, TRAINING),
    "train_qa": (ModelArguments, QuestionDataArguments, RunFolderArguments, TRAINING),
}
# the YAML files in this folder, by the command that they are for
CONFIGS = {
    "train_keyphrases": ("inspec_cpu", "keyphrases_paper"),
    "train_classification": ("news_cpu", "news_paper"),
    "train_qa": ("squad_cpu", "squad_paper"),
}
