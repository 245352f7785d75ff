"""Arguments of the MoeSumm recipe; nothing here imports torch or transformers."""

from dataclasses import dataclass

from ..common.arguments import DebugArguments, RunFolderArguments, check_choice, option, required
from ..common.help import TRAINING

SETTINGS = ("in_domain", "few_shot")
VARIANTS = {  # options of MoeSummForConditionalGeneration.from_backbone
    "moesumm": {},
    "no_dataset": {"dataset_aware": False},
    "no_margin": {"margin_loss_coef": 0.0},
    "flat_moe": {"main_expert": False, "deputy_intermediate_size": None},
    "backbone": None,
}
PARTS = ("shares", "forced", "lengths", "attributes")
PLACES = (
    "NAME=PLACE: a folder with train.jsonl, validation.jsonl and test.jsonl, one JSON Lines file, or a Hub id, such as "
    "news=abisee/cnn_dailymail:3.0.0"
)


@dataclass
class ModelArguments:
    """The model, and how it is trained."""

    model_name_or_path: str = required(
        "folder or Hub id of a BART, PEGASUS or mBART; for few_shot, of a model trained in_domain"
    )
    setting: str = option("in_domain", f"training setting: {', '.join(SETTINGS)}")
    variant: str = option("moesumm", f"model variant: {', '.join(VARIANTS)}")
    num_deputies: int = option(3, "number of deputies in every layer")
    deputy_intermediate_size: int = option(512, "inner size of a deputy")
    margin_loss_coef: float = option(1.0, "weight of the max-margin loss")
    margin_main: str = option("model", "what the margin compares with: model or last_layer, without deputies")
    label_smoothing: float = option(0.0, "label smoothing of the generation loss; the margin loss is not smoothed")
    gate_position: str = option("deputy", "position of the gate: deputy (Eq. 6), layer_output, ffn_output")
    selector_bias: bool = option(False, "whether selectors have biases")
    deputy_init_std: float = option(0.0, "standard deviation of the deputies' second matrix at initialisation")
    deputy_lr_factor: float = option(1.0, "factor of the learning rate for deputies and selectors")
    mixing: str = option("size", "shares of the data sets: by size, even, temperature")
    temperature: float = option(2.0, "sampling temperature of --mixing temperature")

    def __post_init__(self):
        check_choice("--setting", self.setting, SETTINGS)
        check_choice("--variant", self.variant, VARIANTS)


@dataclass
class FewShotArguments:
    """Training on few rows of a new data set."""

    few_shot_rows: list[int] = option([10, 100], "numbers of training rows; each is trained and tested")
    draws: int = option(10, "random samples of training rows for each number")
    deputies_only: bool = option(
        True, "train only deputies and selectors of a MoeSumm model, as in the paper; false: all weights"
    )
    save_models: bool = option(False, "save the model of each sample")


@dataclass
class DataArguments:
    """Data sets and their columns."""

    datasets: list[str] = required(PLACES)
    document_column: str | None = option(None, "document column; default: a usual name")
    summary_column: str | None = option(None, "summary column; default: a usual name")
    max_source_length: int | None = option(None, "maximum tokens of a document; default: the encoder's positions")
    max_target_length: int | None = option(None, "maximum tokens of a target summary; default: the decoder's positions")
    max_rows: int | None = option(None, "use only the first N rows of each split")


@dataclass
class GenerationArguments:
    """Generation of summaries."""

    num_beams: int = option(4, "beams of the beam search")
    summary_length: int | None = option(None, "maximum tokens of a summary; default: the model's max_length, or 256")
    repetition_penalty: float | None = option(None, "penalty of repeated tokens, above 1")
    no_repeat_ngram_size: int | None = option(None, "size of n-grams that occur only once")
    length_penalty: float | None = option(None, "length penalty of the beam search")
    on_long: str = option("truncate", "documents longer than the encoder's positions: truncate, window")
    generation_batch_size: int = option(8, "documents per batch")
    max_test_rows: int | None = option(None, "use only the first N documents of each test split")

    def generate_kwargs(self) -> dict:
        """Arguments of `generate`, except those that are left to the model."""
        names = ("num_beams", "repetition_penalty", "no_repeat_ngram_size", "length_penalty")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass
class PretrainingArguments:
    """A small BART and its noise."""

    vocab_size: int = option(8192, "vocabulary size of the byte-level BPE")
    d_model: int = option(256, "hidden size")
    layers: int = option(3, "layers of the encoder, and of the decoder")
    heads: int = option(4, "attention heads")
    ffn_dim: int = option(1024, "inner size of the feed-forward layers")
    positions: int = option(512, "maximum tokens of encoder and decoder")
    segment_words: int = option(128, "maximum words of a training text")
    mask_ratio: float = option(0.3, "share of the words that is masked")
    span_length: float = option(3.0, "mean words of a masked span")
    permute: bool = option(False, "also permute sentences; needs longer training")


@dataclass
class EvaluationArguments(DebugArguments):
    """Systems and metrics."""

    systems: list[str] = required("NAME=PLACE: a model, or a folder of summaries, or a pattern of such folders")
    baseline: str | None = option(None, "system that the others are compared with")
    datasets: list[str] = option([], f"test sets for models, {PLACES}")
    document_column: str | None = option(None, "document column; default: a usual name")
    summary_column: str | None = option(None, "summary column; default: a usual name")
    only: str = option("*", "pattern of the data sets' names to score, such as '*-10'")
    split: str = option("test", "split to score")
    output_dir: str = option("runs/scores", "folder of summaries, scores.json, scores.md")
    zero_shot: bool = option(False, "use only the main expert, for data sets without training")
    stemming: bool = option(True, "stem words for ROUGE")
    bertscore_model: str | None = option(None, "folder or Hub id of a model for BERTScore; default: no BERTScore")
    bertscore_layer: int | None = option(None, "layer for BERTScore; default: the last")


@dataclass
class AnalysisArguments(DebugArguments):
    """The model and the texts to analyse."""

    model: str = required("folder or Hub id of a MoeSumm model")
    datasets: list[str] = required(f"test sets, under the names of the model's datasets, {PLACES}")
    document_column: str | None = option(None, "document column; default: a usual name")
    summary_column: str | None = option(None, "summary column; default: a usual name")
    split: str = option("test", "split to analyse")
    max_rows: int | None = option(200, "use only the first N texts of each data set")
    parts: list[str] = option(list(PARTS), f"parts of the analysis: {', '.join(PARTS)}")
    output_dir: str = option("runs/analysis", "folder of tables, plots and summaries")
    num_beams: int = option(4, "beams of the beam search")
    summary_length: int | None = option(None, "maximum tokens of a summary; default: the model's max_length, or 256")
    batch_size: int = option(8, "documents per batch")

    def __post_init__(self):
        for part in self.parts:
            check_choice("--parts", part, PARTS)


ARGUMENTS = {
    "train": (ModelArguments, FewShotArguments, DataArguments, GenerationArguments, RunFolderArguments, TRAINING),
    "pretrain": (PretrainingArguments, DataArguments, RunFolderArguments, TRAINING),
    "evaluate": (EvaluationArguments, GenerationArguments),
    "analyse": (AnalysisArguments,),
}
# the YAML files in this folder, by the command that they are for
CONFIGS = {"train": ("bart_large_authors", "bart_large_paper", "small_cpu")}
