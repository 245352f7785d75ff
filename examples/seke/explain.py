"""Shows what a model's experts specialise in: Cramer's V as a table and a heat map, and one document in colours.

    python examples/seke/explain.py --model runs/seke-minilm --files test.jsonl --output_dir runs/explained

With --spacy en_core_web_sm, or another pipeline that is installed, parts of speech and entities are known too.
"""

import sys
from dataclasses import dataclass, field

import torch
from tqdm import tqdm
from transformers import AutoModelForTokenClassification, AutoTokenizer, HfArgumentParser

import keyphrase_tools  # noqa: F401  (registers the models)
from keyphrase_tools.documents import full_text, read_jsonl
from keyphrase_tools.opening import opening
from keyphrase_tools.specialisation import load_spacy, token_experts
from keyphrase_tools.specialisation_views import write_views


@dataclass
class Arguments:
    model: str = field(metadata={"help": "folder or Hub id of a model with experts"})
    files: list[str] = field(metadata={"help": "JSON Lines with title and text"})
    output_dir: str = field(metadata={"help": "folder for tables, heat map and page"})
    spacy: str = field(default="blank:en", metadata={"help": "a spaCy pipeline, or blank:LANGUAGE for words alone"})
    documents: int | None = field(default=None, metadata={"help": "documents that are read, the first ones"})
    page: int = field(default=0, metadata={"help": "number of the document that is shown in colours"})
    batch_size: int = field(default=16, metadata={"help": "windows that the model reads at once"})
    traceback: bool = field(default=False, metadata={"help": "show the traceback of an error"})


def explain(args: Arguments):
    """Writes and prints everything."""
    with opening("--model", args.model):
        model = AutoModelForTokenClassification.from_pretrained(args.model)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    texts = [full_text(row) for row in read_jsonl(args.files, ("text",))][: args.documents]
    tokens = token_experts(
        model, tokenizer, tqdm(texts, unit="document"), load_spacy(args.spacy), batch_size=args.batch_size
    )
    print(write_views(tokens, texts, args.output_dir, args.page))


def main():
    (args,) = HfArgumentParser(Arguments, description=__doc__.split("\n")[0]).parse_args_into_dataclasses()
    try:
        explain(args)
    except (OSError, ValueError) as error:
        if args.traceback:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
