"""The options of `lexperts train language`. Imports neither torch nor transformers."""

from dataclasses import dataclass
from typing import Literal

from run_tools.arguments import option, required
from run_tools.errors import UserError

# names of `--train` -> parts of the names of these weights
PARTS = {"mlp": ".mlp.", "attention": ".self_attn.", "norm": "norm", "linear": "_proj.", "all": ""}
ROWS = "a .txt file with a text per line, or rows with text; messages; prompt, completion; or term, context, definition"


@dataclass
class ModelArguments:
    """The model, and which of its weights are trained."""

    model_name_or_path: str = option("smollm2", "Hub id or folder of a model of a family that can be merged")
    train: str = option("mlp", f"weights to train, with commas between: {', '.join(PARTS)}; merging keeps mlp apart")
    lora_r: int | None = option(None, "train differences of this rank from the weights (LoRA)")
    keep_adapter: bool = option(False, "save these differences as an adapter; otherwise they are added to the weights")
    dtype: Literal["float32", "bfloat16", "auto"] = option("float32", "data type of the loaded weights")
    attention_dropout: float | None = option(None, "dropout probability of the attention")

    def __post_init__(self):
        if unknown := set(self.train.split(",")) - PARTS.keys():
            raise UserError(f"--train {self.train}: {min(unknown)!r} is not one of {', '.join(PARTS)}.")
        if self.keep_adapter and self.lora_r is None:
            raise UserError("--keep-adapter needs --lora-r, without which there is no adapter.")


@dataclass(kw_only=True)
class DataArguments:
    """The rows. Texts are joined and cut into windows of --max-length; else answers and definitions have a loss."""

    train_files: list[str] = required(f"training files: {ROWS}; all of one kind")
    validation_files: list[str] | None = option(None, "held-out rows, whose perplexity is measured at the end")


ARGUMENTS = {"train": (ModelArguments, DataArguments)}
TRAINING = ("trl", "SFTConfig")  # the class of all other options
