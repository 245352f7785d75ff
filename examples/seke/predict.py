"""Extracts the keyphrases of a folder of .txt files, a JSON Lines file or a data set of the Hub.

    python examples/seke/predict.py --model runs/seke-minilm --source texts.jsonl --output keyphrases.jsonl
    accelerate launch --num_processes 4 examples/seke/predict.py --model ... --source midas/inspec --output ...   # GPUs
    torchrun --nproc_per_node 2 examples/seke/predict.py --model ... --source ... --output ...   # also on a CPU

Start the same command again after an interruption: it goes on where it stopped, with as many processes as there are then.
`keyphrases extract` on the command line is the same with one process.
"""

import sys
from dataclasses import dataclass, field

import torch
from accelerate import PartialState
from transformers import HfArgumentParser, pipeline

from keyphrase_tools.corpus import Corpus, extract_corpus
from keyphrase_tools.opening import opening


@dataclass
class Arguments:
    model: str = field(metadata={"help": "folder or Hub id of a token classifier for keyphrases, such as SEKE"})
    source: str = field(metadata={"help": "a folder of .txt files, a .jsonl file, or a data set on the Hub"})
    output: str = field(metadata={"help": "JSON Lines to write"})
    split: str = field(default="test", metadata={"help": "of a data set on the Hub"})
    text_column: str = field(default="text", metadata={"help": "texts, or lists of words"})
    title_column: str = field(default="title", metadata={"help": "titles, where there are any"})
    top_k: int = field(default=10, metadata={"help": "keyphrases of a document, at most"})
    threshold: float | None = field(default=None, metadata={"help": "of a word's probability; by default the model's"})
    batch_size: int = field(default=16, metadata={"help": "windows that the model reads at once"})
    dtype: str = field(default="float32", metadata={"help": "float32 or bfloat16"})
    mentions: bool = field(default=False, metadata={"help": "write all places of a keyphrase"})
    traceback: bool = field(default=False, metadata={"help": "show the traceback of an error"})


def main():
    (args,) = HfArgumentParser(Arguments, description=__doc__.split("\n")[0]).parse_args_into_dataclasses()
    state = PartialState(cpu=not torch.accelerator.is_available())
    options = {"top_k": args.top_k} | ({} if args.threshold is None else {"threshold": args.threshold})
    try:
        columns = {"text_column": args.text_column, "title_column": args.title_column}
        corpus = Corpus(args.source, split=args.split, **columns)
        if args.dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"--dtype {args.dtype!r} is not known. Use float32, bfloat16 or float16.")
        with opening("--model", args.model):
            dtype = getattr(torch, args.dtype)
            extract = pipeline("keyphrase-extraction", model=args.model, dtype=dtype, device=state.device)
        finished = extract_corpus(
            extract,
            corpus,
            args.output,
            batch_size=args.batch_size,
            rank=state.process_index,
            processes=state.num_processes,
            wait=state.wait_for_everyone,
            mentions=args.mentions,
            **options,
        )
    except (OSError, ValueError, ImportError) as error:
        if args.traceback:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if state.is_main_process:
        unread = f"; {finished.errors:,} could not be read, and say why" if finished.errors else ""
        by = f" by {state.num_processes} processes" if state.num_processes > 1 else ""
        print(f"{finished.documents:,} documents in {args.output}{by}{unread}")
    state.destroy_process_group()


if __name__ == "__main__":
    main()
