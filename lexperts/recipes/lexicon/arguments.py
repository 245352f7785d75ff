"""Arguments of the commands of LM-Lexicon's recipe."""

from dataclasses import dataclass
from typing import Literal

from run_tools.errors import UserError
from run_tools.option_values import LARGEST_SEED
from run_tools.options import option, parse_name_place, required

from ..common.arguments import TRAINING, RunFolderArguments

TRAINED = {"all": "", "mlp": ".mlp.", "linear": "_proj."}  # parts of the names of these weights
ROUTER_PARTS = ("gates", "experts", "all")
Dtype = Literal["float32", "bfloat16", "float16", "auto"]
WITHOUT_CONTEXTS = ("Hei++", "MultiRD", "Webster's Unabridged")
ROWS = "JSON Lines with term, context, definition"
DTYPE = "data type of the loaded weights: float32, bfloat16, auto"


@dataclass
class ModelArguments:
    """The model that is fine-tuned."""

    model_name_or_path: str | None = option(None, "Hub id or folder of a dense Llama", kind="model")
    from_scratch: str | None = option(
        None, "train a new model and tokenizer instead: fields of LlamaConfig as JSON", kind="json"
    )
    dtype: Dtype = option("float32", DTYPE)
    attention_dropout: float | None = option(
        None, "dropout probability of the attention, the only dropout of a Llama", least=0, below=1
    )
    train: str = option(
        "all", "weights to train: all; mlp; or linear (MLPs, attention), which merging can keep apart", choices=TRAINED
    )
    lora_r: int | None = option(
        None, "train differences of this rank from the weights (LoRA); they are added at the end", least=1
    )
    learn: Literal["definition", "row"] = option(
        "definition", "tokens with a loss: the definition; or, for a new model, the whole row"
    )

    def __post_init__(self):
        if (self.model_name_or_path is None) == (self.from_scratch is None):
            raise UserError(
                f"model_name_or_path={self.model_name_or_path!r} and from_scratch={self.from_scratch!r}: a model is either "
                "loaded or new. Pass one of them."
            )
        if self.lora_r is not None and (self.from_scratch is not None or self.train == "all"):
            other = "--from-scratch" if self.from_scratch is not None else "--train all"
            raise UserError(
                f"--lora-r {self.lora_r} cannot be combined with {other}. Pass a --model-name-or-path, and --train mlp or linear."
            )


@dataclass
class DataArguments:
    """The rows of training and validation."""

    train_files: list[str] = required(f"training files: {ROWS}", kind="file")
    validation_files: list[str] | None = option(None, "validation files, same format", kind="file")
    max_length: int = option(128, "maximum tokens per row; longer rows are dropped, none is truncated", least=1)


@dataclass
class RouterArguments:
    """The mixture, and its parts that are trained."""

    model_name_or_path: str = required("folder or Hub id of the mixture", kind="model")
    train: str = option("gates", "weights to train: gates; experts; gates,experts; or all")
    router_aux_loss_coef: float | None = option(
        None, "weight of the load-balancing loss; off for a Mixtral if unset", least=0
    )
    lora: bool = option(False, "train LoRA on the attention too, and save an adapter with the trained parts in full")
    lora_r: int = option(16, "rank of LoRA", least=1)
    dtype: Dtype = option("float32", DTYPE)

    def __post_init__(self):
        self.parts = tuple(part.strip() for part in self.train.split(","))
        for part in self.parts:
            if part not in ROUTER_PARTS:
                raise UserError(f"train={self.train!r}: unknown part {part!r}. Use gates, or gates,experts, or all.")
        if self.lora and "all" in self.parts:
            raise UserError("train='all' cannot be combined with lora: an adapter has part of the weights. Unset one.")


@dataclass
class PreparationArguments:
    """Arguments of `lexperts define prepare`."""

    sources: list[str] = required(
        "NAME=PLACE: a file, a folder or a Hub id; several sources may have one name", kind="NAME=PLACE"
    )
    output_dir: str = required("folder for the three files, data.json and divergent.jsonl", kind="output folder")
    term_column: str | None = option(None, "column of terms, unless it has a usual name")
    context_column: str | None = option(
        None, "column of contexts (texts, or lists of texts), unless it has a usual name"
    )
    definition_column: str | None = option(None, "column of definitions, unless it has a usual name")
    source_column: str | None = option(None, "column of dataset names; by default NAME is used")
    split_column: str | None = option(None, "column for --keep-splits: train, valid(ation), test")
    exclude: list[str] = option(list(WITHOUT_CONTEXTS), "datasets to leave out", empty=True)
    keep_splits: bool = option(False, "keep the splits of the files; rows without one are split by their term")
    proportions: list[float] = option(
        [0.8, 0.1, 0.1], "fractions of terms for training, validation, test", least=0, most=1
    )
    keep_duplicates: bool = option(False, "keep repetitions of a term, context and definition within a split")
    unseen_definitions: bool = option(False, "leave out validation and test rows with the definition of a training row")
    max_rows: int | None = option(None, "maximum rows per split: whole terms, selected by their hash", least=1)
    seed: int = option(42, "seed of the hash", least=0, most=LARGEST_SEED)

    def __post_init__(self):
        shares = self.proportions
        if len(shares) != 3 or min(shares) < 0 or shares[0] <= 0 or not abs(sum(shares) - 1) <= 1e-6:
            raise UserError(
                f"--proportions {' '.join(map(str, shares))} must be three fractions that add up to 1, the first above 0, as "
                "in 0.8 0.1 0.1."
            )
        self.places = [parse_name_place(source, "--sources", "oxford=data/oxford") for source in self.sources]


ARGUMENTS = {
    "train_expert": (ModelArguments, DataArguments, RunFolderArguments, TRAINING),
    "tune_router": (RouterArguments, DataArguments, RunFolderArguments, TRAINING),
    "prepare": (PreparationArguments,),
}
# the YAML files in this folder, by the command that they are for
CONFIGS = {"train_expert": ("llama3_8b", "small_cpu", "smollm2_cpu")}
