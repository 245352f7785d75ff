"""Options of `lexperts train exhird`. Imports neither torch nor transformers."""

from dataclasses import dataclass
from typing import Literal

from run_tools.arguments import option

from ..data import ColumnArguments, SplitArguments


@dataclass
class ModelArguments:
    """The model: its encoder, its attention masks, and what prevents repeats."""

    encoder_type: Literal["bigru", "transformer"] = option("transformer", "the encoder, without a backbone")
    backbone: str | None = option(None, "a stock decoder: Hub id, folder or smollm2")
    adapter_rank: int | None = option(None, "of a decoder: train an adapter of this rank; by default all weights")
    hidden_size: int = option(300, "size of encoder and decoder states")
    embedding_size: int | None = option(None, "of words; by default 100, or a Transformer's hidden size")
    num_hidden_layers: int = option(4, "number of encoder layers")
    num_attention_heads: int = option(6, "number of attention heads of a Transformer")
    intermediate_size: int = option(2048, "feed-forward size of a Transformer")
    relative_attention: Literal["shared", "separate", "none", "off"] = option("shared", "positions; off: absolute ones")
    use_lead: bool = option(True, "whether to use the lead mask")
    use_window: bool = option(True, "whether to use the window mask")
    use_top_k: bool = option(True, "whether to use the top-k mask")
    lead_size: int = option(10, "number of lead words, g")
    window_size: int = option(50, "window of the window mask, w")
    attention_top_k: int = option(10, "number of keys of the top-k mask, k")
    exclusion_window: int = option(1, "preceding phrases whose first words are excluded; -1 for all, 0 for none")
    exclusive_loss_window: int = option(4, "window of the exclusive loss")
    exclusive_loss_coef: float = option(0.0, "weight of the exclusive loss; 1 for ExHiRD-s")


@dataclass
class DataArguments(ColumnArguments, SplitArguments):
    """Documents with keyphrases, the vocabulary, and when training ends."""

    vocab_size: int = option(50_000, "size of the vocabulary: the most frequent words of the training documents")
    max_source_length: int | None = option(None, "words of a document (400); tokens that a decoder reads (512)")
    max_length: int = option(640, "of a decoder: tokens of title, text and keyphrases")
    stop_after_rises: int = option(3, "end after N consecutive rises of the validation loss; 0 for never")


ARGUMENTS = {"train": (ModelArguments, DataArguments)}
