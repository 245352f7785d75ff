"""Options of `lexperts train seke`. Imports neither torch nor transformers."""

from dataclasses import dataclass

from run_tools.arguments import option
from run_tools.errors import UserError

from ..data import ColumnArguments, SplitArguments


@dataclass
class ModelArguments:
    """The model: its backbone, its head, and which weights are trained."""

    backbone: str = option("minilm", "Hub id or folder of an encoder; minilm is in lexperts[offline]")
    start_from: str | None = option(None, "SEKE model to fine-tune, not a backbone: Hub id, folder, default or tiny")
    teacher: str | None = option(None, "SEKE model that a small new one imitates: Hub id, folder or default")
    student_hidden_size: int = option(128, "width of the model that imitates a teacher")
    student_layers: int = option(2, "its number of layers")
    attention_dropout: float | None = option(None, "that of the backbone; 0 is faster on a CPU")
    use_moe: bool = option(True, "whether to use the mixture of experts")
    use_rnn: bool = option(True, "whether to use the recurrent encoder (BiLSTM)")
    rnn_num_layers: int = option(2, "its number of layers")
    num_experts: int = option(4, "number of experts")
    num_experts_per_tok: int = option(2, "number of experts per token")
    expert_intermediate_size: int | None = option(None, "of an expert (default: 4 x the backbone's hidden size)")
    router_aux_loss_coef: float = option(0.0, "weight of the load-balancing loss")
    lora: bool = option(True, "whether to train LoRA adapters on queries and values, otherwise all weights")
    frozen_layers: int | None = option(None, "with --lora false: freeze the embeddings and the first N layers")
    head_learning_rate: float | None = option(None, "learning rate of the head, if it differs")

    def __post_init__(self):
        if self.frozen_layers is not None and self.lora:
            raise UserError(f"--frozen-layers {self.frozen_layers} needs --lora false.")
        if self.teacher and (self.lora or self.start_from):
            raise UserError(f"--teacher {self.teacher} needs --lora false and no --start-from: the small model is new.")


@dataclass
class DataArguments(ColumnArguments, SplitArguments):
    """The documents, and how the model is selected and evaluated."""

    train_files: list[str] | None = option(None, "JSON Lines; STYLE=FILE names a file's style of annotation")
    validation_files: list[str] | None = option(None, "the same; --fit-ranker also fits a ranker for each style")
    test_files: list[str] | None = option(None, "scored after training, by names: NAME=FILE, NAME:STYLE=FILE")
    unlabelled_files: list[str] | None = option(None, "with --teacher: more texts to imitate it on, JSON Lines")
    validation_limit: int | None = option(None, "use at most the first N documents of each validation file")
    rows_per_epoch: int | None = option(None, "training rows drawn per epoch, by default as many as there are")
    mixing_temperature: float = option(1.0, "T: a file of n documents is drawn in proportion to n^(1/T)")
    style_dropout: float = option(0.3, "share of training rows whose style is hidden, to work without one")
    fit_ranker: bool = option(False, "whether to fit a ranker of phrases on the validation documents, not a threshold")
    tagger: str | None = option(None, "spaCy pipeline, as en_core_web_sm, for a ranker that knows noun phrases")
    language: str | None = option(None, "stemmer, such as german, or none (default: that of the model, or english)")
    max_length: int = option(256, "sub-tokens per window")
    early_stopping_patience: int = option(5, "epochs without a gain in F1@10 before training stops; 0 for never")
    early_stopping_gain: float = option(0.005, "smallest gain in F1@10 that counts")

    def __post_init__(self):
        if self.tagger and not self.fit_ranker:
            raise UserError(f"--tagger {self.tagger} needs --fit-ranker true.")


ARGUMENTS = {"train": (ModelArguments, DataArguments)}
