"""The options of `lexperts train seke`. Imports neither torch nor transformers, so that `--help` is fast."""

from dataclasses import dataclass
from typing import Literal

from run_tools.errors import UserError
from run_tools.options import option
from run_tools.packaged import PACKAGED_MODELS

from ..common.arguments import TRAINING, ColumnArguments, RunFolderArguments, SplitArguments


@dataclass
class ModelArguments:
    """The model: its backbone, its head, and which weights are trained."""

    backbone: str = option("minilm", "Hub id or folder of an encoder; minilm is in lexperts[offline]", kind="model")
    start_from: str | None = option(
        None, "Hub id or folder of a SEKE model to fine-tune, instead of a backbone, or default or tiny", kind="model"
    )
    teacher: str | None = option(
        None, "Hub id or folder of a SEKE model that a small new model imitates, or default", kind="model"
    )
    teacher_graph: str | None = option(
        None, "folder of its export, which then answers: in int8 three times as fast on a CPU", kind="folder"
    )
    teacher_weight: float | None = option(
        None, "weight of the teacher's probabilities, where labels have the rest (default: 0.8)", above=0, most=1
    )
    student_hidden_size: int | None = option(None, "width of the new model, with --teacher (default: 128)", least=32)
    student_layers: int | None = option(None, "its number of layers (default: 2)", least=1)
    attention_dropout: float | None = option(None, "that of the backbone; 0 is faster on a CPU", least=0, below=1)
    use_moe: bool = option(True, "use the mixture of experts")
    use_rnn: bool = option(True, "use the recurrent encoder (BiLSTM)")
    rnn_num_layers: int = option(2, "its number of layers", least=1)
    num_experts: int = option(4, "number of experts", least=1)
    num_experts_per_tok: int = option(2, "number of experts per token", least=1)
    expert_init: Literal["identity", "uniform"] | None = option(None, "of experts (default: identity if wide enough)")
    expert_intermediate_size: int | None = option(
        None, "first hidden size of an expert (default: 4 x the backbone's)", least=1
    )
    router_aux_loss_coef: float = option(0.0, "weight of the load-balancing loss", least=0)
    lora: bool = option(True, "train LoRA adapters on queries and values; otherwise all weights")
    frozen_layers: int | None = option(None, "without LoRA: freeze the embeddings and the first N layers", least=0)
    head_learning_rate: float | None = option(None, "learning rate of the head, if it differs", least=0)

    def __post_init__(self):
        if self.num_experts_per_tok > self.num_experts:
            raise UserError(
                f"--num-experts-per-tok {self.num_experts_per_tok} exceeds --num-experts {self.num_experts}. Use a smaller one."
            )
        if {self.start_from, self.teacher} & PACKAGED_MODELS.keys():
            from run_tools.packaged import locate_model

            self.start_from, self.teacher = (name and locate_model(name) for name in (self.start_from, self.teacher))
        self.check_teacher()
        if self.frozen_layers is not None and self.lora:
            raise UserError(f"--frozen-layers {self.frozen_layers} needs --lora false. LoRA freezes the backbone.")

    def check_teacher(self) -> None:
        """Fills in the defaults of the options of `--teacher`. Raises a `UserError` for them without it, or with what excludes it."""
        student = {"teacher_graph": None, "teacher_weight": 0.8, "student_hidden_size": 128, "student_layers": 2}
        for name, default in student.items():
            if (value := getattr(self, name)) is not None and self.teacher is None:
                option = f"--{name.replace('_', '-')} {value}"
                raise UserError(
                    f"{option} needs --teacher, the model that a small one imitates. Pass both, or neither."
                )
            if self.teacher is not None and value is None:
                setattr(self, name, default)
        if self.teacher is not None and (self.start_from is not None or self.lora):
            other = "--lora true" if self.start_from is None else f"--start-from {self.start_from}"
            raise UserError(f"--teacher and {other} exclude each other: the small model is new. Leave one out.")


@dataclass
class DataArguments(ColumnArguments, SplitArguments):
    """The documents, how they are labelled, and how the model is selected and evaluated."""

    train_files: list[str] | None = option(
        None, "training files, JSON Lines; STYLE=FILE names a file's style of annotation", kind="named file"
    )
    validation_files: list[str] | None = option(
        None,
        "validation files, same format; with --fit-ranker, STYLE=FILE also fits a ranker for this style",
        kind="named file",
    )
    test_files: list[str] | None = option(
        None,
        "test files, same format, scored after training; files that are given as NAME=FILE are scored one by one, with "
        "NAME:STYLE=FILE the style is asked for",
        kind="named file",
    )
    unlabelled_files: list[str] | None = option(
        None, "with --teacher: more texts to imitate it on, JSON Lines with the column of texts", kind="file"
    )
    validation_share: float = option(0.2, "share for validation, without validation files", above=0, below=1)
    validation_limit: int | None = option(None, "use at most the first N documents of each validation file", least=1)
    mixing_temperature: float | None = option(
        None, "T: a file of n documents is drawn in proportion to n^(1/T)", above=0
    )
    rows_per_epoch: int | None = option(None, "training rows drawn per epoch, with --mixing-temperature", least=1)
    style_dropout: float = option(
        0.3, "share of training rows whose style is hidden, to work without one", least=0, most=1
    )
    tagger: str | None = option(
        None,
        "spaCy pipeline that tells nouns, for a ranker that knows noun phrases, as en_core_web_sm; with --fit-ranker",
    )
    as_noun_phrases: list[str] | None = option(
        None,
        "styles that are never hidden: without a style, their documents count with the keyphrases that are noun phrases of two or "
        "more words only; with --tagger",
    )
    language: str | None = option(
        None, "stemmer of keyphrases, such as german, or none; by default the model's, or english", kind="language"
    )
    max_length: int = option(256, "sub-tokens per window", least=1)
    rules: Literal["lexperts", "seke"] = option("lexperts", "of labels and gold keyphrases; seke: the reference's")
    early_stopping_patience: int = option(5, "epochs without a gain in F1@10 before training stops; 0: never", least=0)
    early_stopping_gain: float = option(0.005, "smallest gain in F1@10 that counts", least=0)
    test_every_epoch: bool = option(False, "also score the test documents after every epoch")
    calibrate: bool = option(True, "fit the temperature of the scores on the validation documents")
    fit_ranker: bool = option(False, "fit a ranker of phrases on the validation documents, not a threshold")
    ranker_joined: list[int] = option([], "also fit it on N joined validation documents, as long ones", least=1)
    show: int = option(3, "number of test documents whose keyphrases are printed after training", least=0)

    def __post_init__(self):
        if (self.mixing_temperature is None) != (self.rows_per_epoch is None):
            raise ValueError(
                f"--mixing-temperature {self.mixing_temperature} and --rows-per-epoch {self.rows_per_epoch} need each other. "
                "Pass both, or neither."
            )
        if self.tagger and not self.fit_ranker:
            raise UserError(f"--tagger {self.tagger} needs --fit-ranker true, since only a ranker reads word classes.")
        if self.as_noun_phrases and not self.tagger:
            raise UserError(f"--as-noun-phrases {' '.join(self.as_noun_phrases)} needs --tagger, as en_core_web_sm.")


ARGUMENTS = {"train": (ModelArguments, DataArguments, RunFolderArguments, TRAINING)}
# the YAML files in this folder, by the command that they are for
CONFIGS = {"train": ("deberta_paper", "default", "default_base", "distill", "minilm_cpu")}
