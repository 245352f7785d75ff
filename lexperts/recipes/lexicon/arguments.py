"""Arguments of the commands of LM-Lexicon's recipe."""

from dataclasses import dataclass
from typing import Literal

from run_tools.errors import UserError
from run_tools.option_values import LARGEST_SEED
from run_tools.options import check_file_names, option, parse_name_place, required

from ..common.arguments import TRAINING, RunFolderArguments

TRAINED = {"all": "", "mlp": ".mlp.", "linear": "_proj."}  # parts of the names of these weights
ROUTER_PARTS = ("gates", "experts", "all")
Dtype = Literal["float32", "bfloat16", "float16", "auto"]
METRICS = ("bleu", "rouge", "meteor", "bertscore", "mauve")
BLEU_KINDS = ("sacrebleu", "nltk", "moses")
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
class GenerateArguments:
    """Arguments of `lexperts define generate`."""

    model_name_or_path: str = required("Hub id or folder of the model", kind="model")
    test_files: list[str] = required(f"files of rows to define: {ROWS}", kind="file")
    output: str = required("output file, .jsonl", kind="output file")
    max_rows: int | None = option(None, "use only the first N rows", least=1)
    batch_size: int = option(16, "rows per batch; each batch has its own random seed", least=1)
    max_new_tokens: int = option(64, "maximum tokens of a definition", least=1)
    sample: bool = option(False, "sample a definition instead of greedy decoding")
    temperature: float = option(0.6, "sampling temperature", above=0)
    top_k: int = option(50, "number of most likely tokens to sample from", least=0)
    top_p: float = option(0.9, "probability mass of the tokens to sample from", above=0, most=1)
    repetition_penalty: float = option(1.05, "repetition penalty while sampling", above=0)
    best_of: int = option(1, "number of sampled definitions per row, of which the best is taken", least=1)
    reward_model: str | None = option(
        None,
        "Hub id or folder of a sequence classifier that ranks the samples; by default their likelihood",
        kind="model",
    )
    on_long: Literal["truncate", "error"] = option(
        "truncate", "contexts that are too long: truncate them around the term, or error"
    )
    routing_policy: Literal["token", "sequence_soft", "sequence_hard", "domain"] | None = option(
        None, "routing policy, in place of the mixture's own"
    )
    experts_per_token: int | None = option(
        None, "experts per token of the token policy, in place of the mixture's own", least=1
    )
    embedder: str | None = option(
        None, "sentence embedder of the centroids, or minilm; by default the mixture's own", kind="embedder"
    )
    seed: int = option(42, "random seed of sampling", least=0, most=LARGEST_SEED)
    dtype: Dtype = option("float32", DTYPE)
    device: str | None = option(None, "device, such as cpu; by default an accelerator if available")

    def __post_init__(self):
        if not self.output.endswith(".jsonl"):
            raise UserError(f"output={self.output!r} does not end in .jsonl. Rename it: it is written as JSON Lines.")
        self.sample = self.sample or self.best_of > 1

    def generate_kwargs(self) -> dict:
        """Decoding options for `DefinitionGenerator`; greedy decoding needs no others."""
        if not self.sample:
            return {"max_new_tokens": self.max_new_tokens}
        names = ("max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty")
        return {"do_sample": True} | {name: getattr(self, name) for name in names}


@dataclass
class EvaluationArguments:
    """Arguments of `lexperts evaluate definitions`."""

    files: list[str] = required("NAME=FILE of each system; several files of one name are its seeds", kind="NAME=FILE")
    output_dir: str = required("folder for scores.json and the scores of rows", kind="output folder")
    baseline: str | None = option(None, "system that others are compared with")
    references: list[str] | None = option(None, "more JSON Lines files whose definitions are references", kind="file")
    metrics: list[str] = option(list(METRICS), "metrics to compute", choices=METRICS)
    bleu: str = option("sacrebleu", "BLEU of sacrebleu, of nltk, or of moses (the paper's)", choices=BLEU_KINDS)
    bertscore_model: str | None = option(None, "folder or Hub id for BERTScore, such as roberta-large", kind="model")
    bertscore_layer: int | None = option(
        None, "layer of that model; default: bert-score's choice, or the last", least=0
    )
    mauve_model: str | None = option(None, "model of MAUVE: folder or Hub id, such as gpt2-large", kind="model")
    batch_size: int = option(64, "texts per batch of these models", least=1)
    seed: int = option(0, "bootstrap seed", least=0, most=LARGEST_SEED)

    def __post_init__(self):
        self.files_by_system: dict[str, list[str]] = {}
        for value in self.files:
            name, path = parse_name_place(value, "--files", "dense=dense.jsonl", "NAME=FILE")
            self.files_by_system.setdefault(name, []).append(path)
        check_file_names(self.files_by_system, "--files")
        if self.baseline is not None and self.baseline not in self.files_by_system:
            raise UserError(
                f"--baseline {self.baseline!r} is not one of the systems {', '.join(self.files_by_system)}."
            )
        self.metrics = list(dict.fromkeys(self.metrics))


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
    "evaluate": (EvaluationArguments,),
    "generate": (GenerateArguments,),
    "prepare": (PreparationArguments,),
}
# the YAML files in this folder, by the command that they are for
CONFIGS = {"train_expert": ("llama3_8b", "small_cpu", "smollm2_cpu")}
