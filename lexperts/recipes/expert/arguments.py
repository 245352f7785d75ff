"""The options of `lexperts train expert`. Imports neither torch nor transformers, so that `--help` is fast."""

from dataclasses import dataclass

from run_tools.errors import UserError
from run_tools.options import option, required

from ..common.arguments import TRAINING, RunFolderArguments

# what stays frozen -> parts of the names of the weights that are trained
FREEZE = {"shared": (".mlp.",), "embeddings": (".mlp.", ".self_attn.", "norm"), "nothing": ("",)}


@dataclass
class ModelArguments:
    """The model that an expert starts from, and which of its weights are trained."""

    model_name_or_path: str = option(
        "smollm2",
        "Hub id or folder of a dense Llama, Mistral, Qwen2 or Qwen3; smollm2 is the offline model",
        kind="model",
    )
    freeze: str = option(
        "shared",
        "what stays unchanged: shared (all but the MLPs, so that merging changes nothing that is not routed); embeddings; or nothing",
        choices=FREEZE,
    )
    lora: bool = option(False, "train and save a LoRA adapter of the MLPs instead of their weights")
    lora_r: int = option(16, "rank of LoRA", least=1)
    dtype: str = option("float32", "data type of the loaded weights", choices=("float32", "bfloat16", "auto"))

    def __post_init__(self):
        if self.lora and self.freeze != "shared":
            raise UserError(
                f"--freeze {self.freeze} cannot be combined with --lora, which trains MLPs only. Leave it out."
            )


@dataclass
class DataArguments:
    """The texts or chats of the expert's domain."""

    train_files: list[str] = required(
        "texts (.txt, one per line), or JSON Lines with text, with messages, or with prompt and completion", kind="file"
    )
    validation_files: list[str] | None = option(None, "held-out texts in the same formats", kind="file")
    max_length: int = option(512, "tokens of a window; texts are joined and cut into windows, chats truncated", least=2)
    max_rows: int | None = option(None, "use only the first N texts of each file", least=1)


ARGUMENTS = {"train": (ModelArguments, DataArguments, RunFolderArguments, TRAINING)}
CONFIGS = {"train": ("smollm2",)}
