"""`keyphrases`: the command line of keyphrase_tools. Every command has a twin in Python.

Each command imports what it needs when it runs, so that `--help` does not wait for a model's imports.
"""

import json
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

try:
    import typer
except ImportError as error:
    raise SystemExit("keyphrases needs typer. Install it with: pip install lexperts[cli]") from error

from . import own_version

app = typer.Typer(
    name="keyphrases",
    help="Keyphrases of documents: extract them, score them, see what a model's experts read.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Source = Annotated[str, typer.Argument(help="A folder of .txt files, a .jsonl file, or a data set on the Hub.")]
Model = Annotated[str, typer.Option("--model", "-m", help="Folder or Hub id of a token classifier, such as SEKE.")]
Split = Annotated[str, typer.Option(help="Of a data set on the Hub.")]
TextColumn = Annotated[str, typer.Option(help="The column of texts, or of lists of words.")]
TitleColumn = Annotated[str, typer.Option(help="The column of titles, where there is one.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Windows that the model reads at once.")]
Device = Annotated[str | None, typer.Option(help="Such as cuda:0; by default an accelerator where there is one.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


def show_version(value: bool):
    if value:
        print(f"keyphrases {own_version()}")
        raise typer.Exit()


@app.callback()
def every_command(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
):
    pass  # commands have their own options


@contextmanager
def told(debug: bool):
    """What the caller can mend is said in a line."""
    try:
        yield
    except (OSError, ValueError, TypeError, ImportError) as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from error


def show(content: dict, as_json: bool, drawn: Callable[[], str]):
    print(json.dumps(content, ensure_ascii=False) if as_json else drawn())


@app.command()
def extract(
    source: Source,
    output: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="The file to write.")],
    model: Model,
    top_k: Annotated[int, typer.Option(min=1, help="Keyphrases of a document, at most.")] = 10,
    threshold: Annotated[float | None, typer.Option(help="Of a word's probability; by default the model's.")] = None,
    min_score: Annotated[float, typer.Option(help="Leave out keyphrases with a lower score.")] = 0.0,
    batch_size: BatchSize = 16,
    split: Split = "test",
    text_column: TextColumn = "text",
    title_column: TitleColumn = "title",
    device: Device = None,
    dtype: Dtype = "float32",
    mentions: Annotated[bool, typer.Option("--mentions", help="Write all places of a keyphrase.")] = False,
    debug: Debug = False,
):
    """Extract the keyphrases of documents; started again after an interruption, it resumes where it stopped."""
    with told(debug):
        from transformers import pipeline

        from keyphrase_tools.corpus import Corpus, check_output, extract_corpus
        from keyphrase_tools.opening import check_device, check_dtype, opening

        check_output(output)
        placing = {"dtype": check_dtype(dtype), "device": check_device(device)}
        corpus = Corpus(source, split=split, text_column=text_column, title_column=title_column)
        with opening("--model", model):
            reader = pipeline("keyphrase-extraction", model=model, **placing)
        options = {"top_k": top_k, "min_score": min_score} | ({} if threshold is None else {"threshold": threshold})
        finished = extract_corpus(reader, corpus, output, batch_size=batch_size, mentions=mentions, **options)
        unread = f'; {finished.errors:,} could not be read (see their "error")' if finished.errors else ""
        print(f"{finished.documents:,} documents in {output}{unread}")


@app.command()
def score(
    predictions: Annotated[Path, typer.Argument(help="JSON Lines with keyphrases, as `extract` writes them.")],
    gold: Annotated[Path, typer.Argument(help="JSON Lines with title, text and keyphrases, in the same order.")],
    convention: Annotated[str, typer.Option(help="How F1 is counted: seke or exhird.")] = "seke",
    rules: Annotated[str, typer.Option(help="How gold keyphrases are found in texts: lexperts or seke.")] = "lexperts",
    k: Annotated[list[int] | None, typer.Option("-k", help="Keyphrases that count, several times.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
):
    """Score keyphrases against the gold ones that stand in their texts."""
    with told(debug):
        from keyphrase_tools.evaluation import score_files

        cuts = tuple(k or (5, 10))
        scores = score_files(predictions, gold, rules=rules, convention=convention, k=cuts)
        rows = [f"{'':4}{'precision':>10}{'recall':>10}{'F1':>10}"]
        for cut in cuts:
            values = (100 * scores[f"{name}@{cut}"] for name in ("precision", "recall", "f1"))
            rows.append(f"@{cut:<3}" + "".join(f"{value:10.1f}" for value in values))
        show(scores, as_json, lambda: "\n".join(rows))


@app.command()
def explain(
    source: Source,
    output: Annotated[Path, typer.Argument(metavar="OUT", help="A folder for tables, heat map and page.")],
    model: Model,
    spacy: Annotated[str, typer.Option(help="A spaCy pipeline, or blank:LANGUAGE for words alone.")] = "blank:en",
    documents: Annotated[int | None, typer.Option(min=1, help="Read the first so many.")] = None,
    page: Annotated[int, typer.Option(min=0, help="Number of the document that is shown in colours.")] = 0,
    batch_size: BatchSize = 16,
    split: Split = "test",
    text_column: TextColumn = "text",
    title_column: TitleColumn = "title",
    device: Device = None,
    dtype: Dtype = "float32",
    debug: Debug = False,
):
    """Show what experts specialise in: Cramér's V, a heat map, and a document in colours."""
    with told(debug):
        from tqdm import tqdm
        from transformers import AutoModelForTokenClassification, AutoTokenizer

        from keyphrase_tools.corpus import Corpus, read_texts
        from keyphrase_tools.opening import check_device, check_dtype, opening
        from keyphrase_tools.specialisation import load_spacy, token_experts
        from keyphrase_tools.specialisation_views import write_views

        nlp, dtype, device = load_spacy(spacy), check_dtype(dtype), check_device(device)
        corpus = Corpus(source, split=split, text_column=text_column, title_column=title_column)
        texts, errors = read_texts(corpus, documents)
        if page not in texts:
            why = errors.get(page) or f"--page is the number of a document, from 0 to {len(texts) + len(errors) - 1}"
            raise ValueError(f"--page {page} cannot be shown: {why}.")
        for number, error in errors.items():
            print(f"document {number} is left out: {error}", file=sys.stderr)
        with opening("--model", model):
            classifier = AutoModelForTokenClassification.from_pretrained(model, dtype=dtype).to(device)
            tokenizer = AutoTokenizer.from_pretrained(model)
        shown = tqdm(texts.values(), unit="document")
        tokens = token_experts(classifier, tokenizer, shown, nlp, batch_size=batch_size)
        print(write_views(tokens, list(texts.values()), output, list(texts).index(page)))


@app.command()
def card(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder that training has written, with results.json.")
    ],
    write: Annotated[bool, typer.Option("--write", help="Write it to DIR/README.md instead of printing it.")] = False,
    debug: Debug = False,
):
    """The model card of a trained model, from what its run recorded."""
    with told(debug):
        from keyphrase_tools.cards import card_of, read_record

        text = str(card_of(read_record(folder), folder.resolve().name))
        if write:
            (folder / "README.md").write_text(text, encoding="utf-8")
        print(f"wrote {folder / 'README.md'}" if write else text)


def main():
    app()


if __name__ == "__main__":
    main()
