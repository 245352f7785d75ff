"""Arguments of the MoeSumm recipe; nothing here imports torch or transformers."""

from dataclasses import dataclass
from typing import Literal

from run_tools.errors import UserError
from run_tools.options import option, required

from ..common.arguments import TRAINING, RunFolderArguments

VARIANTS = {  # options of MoeSummForConditionalGeneration.from_backbone
    "moesumm": {},
    "no_dataset": {"dataset_aware": False},
    "no_margin": {"margin_loss_coef": 0.0},
    "flat_moe": {"main_expert": False, "deputy_intermediate_size": None},
    "backbone": None,
}
# the usual names of the columns in data sets on the Hub
DOCUMENTS = ("document", "article", "dialogue", "text", "source", "body", "email_body", "report", "findings", "ctext")
SUMMARIES = ("summary", "highlights", "abstract", "headline", "target", "subject_line", "tldr", "impression", "title")
PLACES = (
    "NAME=PLACE: a folder with train.jsonl, validation.jsonl and test.jsonl, one JSON Lines file, or a Hub id, such as "
    "news=abisee/cnn_dailymail:3.0.0"
)


@dataclass
class ModelArguments:
    """The model, and how it is trained."""

    model_name_or_path: str = required(
        "folder or Hub id of a BART, PEGASUS or mBART, or of a Llama, Mistral, Qwen2 or Qwen3 (smollm2 comes as a package); for "
        "few_shot, of a model trained in_domain",
        kind="model",
    )
    setting: Literal["in_domain", "few_shot"] = option("in_domain", "training setting")
    variant: str = option("moesumm", "model variant", choices=VARIANTS)
    num_deputies: int = option(3, "number of deputies in every layer", least=1)
    deputy_intermediate_size: int = option(512, "inner size of a deputy", least=1)
    margin_loss_coef: float = option(1.0, "weight of the max-margin loss", least=0)
    margin_main: Literal["model", "last_layer"] = option("model", "what, without deputies, the margin compares with")
    label_smoothing: float = option(0.0, "label smoothing of the generation loss alone", least=0, below=1)
    gate_position: Literal["deputy", "layer_output", "ffn_output"] = option(
        "deputy", "place of the gate; Eq. 6: deputy"
    )
    selector_bias: bool = option(False, "whether selectors have biases")
    deputy_init_std: float = option(0.0, "initial standard deviation of the deputies' second matrix", least=0)
    deputy_lr_factor: float = option(1.0, "factor of the learning rate for deputies and selectors", least=0)
    mixing: Literal["size", "even", "temperature"] = option("size", "shares of the data sets")
    temperature: float = option(2.0, "sampling temperature of --mixing temperature", above=0)
    train: Literal["all", "deputies"] = option("all", "weights to train in_domain: all, or deputies and selectors only")
    lora_r: int | None = option(
        None,
        "LoRA of this rank, added to the weights at the end: with --train deputies on queries and values, beside deputies; with "
        "--variant backbone on all linear layers, alone",
        least=1,
    )
    max_length: int | None = option(
        None, "of a decoder: most tokens of document, prompt and summary together; default: its positions", least=1
    )

    def __post_init__(self):
        if self.train == "deputies" and (self.setting == "few_shot" or self.variant == "backbone"):
            other = (
                "--variant backbone" if self.variant == "backbone" else "--setting few_shot, which has --deputies-only"
            )
            raise UserError(f"--train deputies cannot be combined with {other}. Leave out --train.")
        if self.lora_r is not None and self.train == "all" and self.variant != "backbone":
            raise UserError(
                f"--lora-r {self.lora_r} cannot be combined with --train all. Pass --train deputies, or --variant backbone."
            )
        if self.lora_r is not None and self.setting == "few_shot":
            raise UserError(f"--lora-r {self.lora_r} cannot be combined with --setting few_shot. Leave it out.")


@dataclass
class FewShotArguments:
    """Training on few rows of a new data set."""

    few_shot_rows: list[int] = option([10, 100], "numbers of training rows; each is trained and tested", least=1)
    draws: int = option(10, "random samples of training rows for each number", least=1)
    deputies_only: bool = option(True, "train only deputies and selectors, as in the paper; false: all weights")
    save_models: bool = option(False, "save the model of each sample")


@dataclass
class ColumnArguments:
    """The columns of documents with summaries."""

    document_column: str | None = option(None, f"column of documents; by default the first of {', '.join(DOCUMENTS)}")
    summary_column: str | None = option(None, f"column of summaries; by default the first of {', '.join(SUMMARIES)}")


@dataclass(kw_only=True)
class DataArguments(ColumnArguments):
    """Data sets and their columns."""

    datasets: list[str] = required(PLACES, kind="NAME=PLACE")
    max_source_length: int | None = option(
        None, "most tokens of a document; default: the encoder's positions; of a decoder see --max-length", least=1
    )
    max_target_length: int | None = option(
        None, "most tokens of a summary; default: the decoder's positions, or a quarter of --max-length", least=1
    )
    max_rows: int | None = option(None, "use only the first N rows of each split", least=1)


@dataclass
class GenerationArguments:
    """Generation of summaries."""

    num_beams: int = option(4, "beams of the beam search", least=1)
    summary_length: int | None = option(None, "maximum tokens of a summary; default: the model's, or 256", least=1)
    repetition_penalty: float | None = option(None, "penalty of repeated tokens, above 1", above=0)
    no_repeat_ngram_size: int | None = option(None, "size of n-grams that occur only once", least=0)
    length_penalty: float | None = option(None, "length penalty of the beam search")
    on_long: Literal["truncate", "window"] = option("truncate", "documents longer than the encoder's positions")
    generation_batch_size: int = option(8, "documents per batch", least=1)
    max_test_rows: int | None = option(None, "use only the first N documents of each test split", least=1)

    def generate_kwargs(self) -> dict:
        """Arguments of `generate`, except those that are left to the model."""
        names = ("num_beams", "repetition_penalty", "no_repeat_ngram_size", "length_penalty")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


ARGUMENTS = {
    "train": (ModelArguments, FewShotArguments, DataArguments, GenerationArguments, RunFolderArguments, TRAINING),
}
# the YAML files in this folder, by the command that they are for
CONFIGS = {"train": ("bart_large_authors", "bart_large_paper", "small_cpu", "smollm2_cpu")}
