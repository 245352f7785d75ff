"""Options of the hypernetwork's trainings. Imports neither torch nor transformers."""

from dataclasses import dataclass
from typing import Literal

from run_tools.arguments import option

from ..data import ColumnArguments, SplitArguments


@dataclass
class ModelArguments:
    """The model and its backbone."""

    backbone: str = option("minilm", "Hub id or folder of any encoder; minilm is in lexperts[offline]")
    freeze_backbone: bool = option(True, "whether to freeze the backbone")
    backbone_lr: float = option(2e-5, "learning rate of a backbone that is not frozen")
    cache_states: bool = option(False, "whether to compute a frozen backbone's states once")
    meta_embedding_size: int = option(16, "size of the title's vector z")
    hidden_size: int = option(512, "hidden size of the layer that encodes the text")
    bidirectional: bool = option(False, "whether to encode the text in reverse too")
    classifier_dropout: float = option(0.1, "dropout on the text's states")
    pooling: Literal["last", "mean"] = option("last", "state of the text from which it is classified")


@dataclass
class KeyphraseDataArguments(ColumnArguments, SplitArguments):
    """Documents with titles and keyphrases."""

    language: str = option("english", "stemmer of keyphrases, such as german, or none")
    max_length: int = option(256, "maximum sub-tokens of title and text")
    early_stopping_patience: int = option(5, "epochs without a gain before training stops; 0 for never")


@dataclass
class ClassificationDataArguments(SplitArguments):
    """Texts with titles and classes."""

    text_column: str = option("text", "column of texts")
    title_column: str = option("title", "column of titles, which may be empty")
    label_column: str = option("label", "column of names or numbers of classes")
    max_length: int = option(512, "maximum tokens of title and text")


@dataclass
class QuestionDataArguments(SplitArguments):
    """Questions with contexts and answers, in SQuAD's columns."""

    COLUMNS = ("question", "context", "answers")
    max_seq_len: int = option(384, "tokens of a window, including the question")
    doc_stride: int = option(128, "tokens by which neighbouring windows overlap")


ARGUMENTS = {
    "keyphrases": (ModelArguments, KeyphraseDataArguments),
    "classes": (ModelArguments, ClassificationDataArguments),
    "answers": (ModelArguments, QuestionDataArguments),
}
