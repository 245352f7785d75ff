"""Options of MoeSumm's training. Imports neither torch nor transformers."""

from dataclasses import dataclass
from typing import Any, Literal

from run_tools.arguments import option, required
from run_tools.errors import UserError

VARIANTS: dict[str, dict[str, Any]] = {  # fields of MoeSummConfig, which win over options
    "moesumm": {"dataset_aware": True, "main_expert": True},
    "no_dataset": {"dataset_aware": False, "main_expert": True},
    "no_margin": {"dataset_aware": True, "main_expert": True, "margin_loss_coef": 0.0},
    "flat_moe": {"main_expert": False, "margin_loss_coef": 0.0, "deputy_intermediate_size": None},
    "backbone": {"num_deputies": 0},  # a stock model
}
# the usual names of the columns in data sets on the Hub
DOCUMENTS = ("document", "article", "dialogue", "text", "source", "body", "email_body", "report", "findings", "ctext")
SUMMARIES = ("summary", "highlights", "abstract", "headline", "target", "subject_line", "tldr", "impression", "title")


@dataclass
class ModelArguments:
    """The model, and which weights are trained. What is not given is as in MoeSummConfig, or as in a trained model."""

    model_name_or_path: str = required("a BART, PEGASUS, Llama, Mistral, Qwen2 or Qwen3, smollm2, or a trained MoeSumm")
    variant: Literal["moesumm", "no_dataset", "no_margin", "flat_moe", "backbone"] | None = option(None, "of the paper")
    num_deputies: int | None = option(None, "deputies of every layer, by default 3")
    deputy_intermediate_size: int | None = option(None, "inner size of a deputy, by default 512")
    margin_loss_coef: float | None = option(None, "weight of the max-margin loss, by default 1")
    margin_main: Literal["model", "last_layer"] | None = option(None, "what the margin leaves out, by default model")
    label_smoothing: float | None = option(None, "label smoothing of the generation loss alone")
    gate_position: Literal["deputy", "layer_output"] | None = option(None, "by default deputy (Eq. 6)")
    selector_bias: bool | None = option(None, "whether selectors have biases, by default none")
    deputy_init_std: float | None = option(None, "initial standard deviation of the deputies' second matrix")
    train: Literal["all", "deputies"] | None = option(None, "by default all weights, of a trained MoeSumm deputies")
    lora_r: int | None = option(None, "rank of LoRA on queries and values beside deputies, or on all of a backbone")

    def __post_init__(self):
        if self.variant == "backbone" and self.train == "deputies":
            raise UserError("--variant backbone has no deputies. Use --train all.")
        if self.lora_r is not None and self.train == "all" and self.variant != "backbone":
            raise UserError(f"--lora-r {self.lora_r} is trained beside deputies only. Leave out --train all.")


@dataclass
class DataArguments:
    """Data sets, their columns, and how they are mixed."""

    datasets: list[str] = required("NAME=PLACE: a folder with train.jsonl and validation.jsonl, a file, or a Hub id")
    document_column: str | None = option(None, f"column of documents; by default the first of {', '.join(DOCUMENTS)}")
    summary_column: str | None = option(None, f"column of summaries; by default the first of {', '.join(SUMMARIES)}")
    few_shot_rows: int | None = option(None, "train on N random rows of each data set, drawn by --seed")
    mixing: Literal["size", "even", "temperature"] = option("size", "shares of the data sets")
    temperature: float = option(2.0, "sampling temperature of --mixing temperature")
    max_length: int | None = option(None, "most tokens of a document; of a decoder with prompt and summary")
    max_target_length: int | None = option(None, "most tokens of a summary; of a decoder by default a quarter of all")


@dataclass
class GenerationArguments:
    """Settings of generation that are saved with the model; by default its own."""

    summary_length: int | None = option(None, "maximum tokens of a summary")
    num_beams: int | None = option(None, "beams of the beam search")
    repetition_penalty: float | None = option(None, "penalty of repeated tokens, above 1")
    no_repeat_ngram_size: int | None = option(None, "size of n-grams that occur only once")
    length_penalty: float | None = option(None, "length penalty of the beam search")


ARGUMENTS = {"train": (ModelArguments, DataArguments, GenerationArguments)}
