"""`lexperts keyphrases`, also installed as `keyphrases`: the command line of keyphrase_tools."""

import os
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lexperts_lite.servers import OPTIONS, bind, run_server
from run_tools.errors import UserError

from . import file_options
from .common import AsJson, Count, Device, Dtype, Model, ModelOption, TrustRemoteCode, new_app, print_result, run_app

app = new_app("keyphrases", "Keyphrases of documents: extract, generate and score them.")

Style = Annotated[str | None, typer.Option(help="Style of annotation, if the model has several, such as phrases.")]
Share = partial(typer.Option, min=0, max=1)
FileArgument = partial(typer.Argument, exists=True, dir_okay=False)
FileOption = partial(typer.Option, exists=True, dir_okay=False, metavar="FILE")
DEFAULTS: dict[str, Any] = {name: default for name, (default, _) in OPTIONS.items()}


@app.command()
def extract(
    context: typer.Context,
    source: file_options.Source,
    output: file_options.Output,
    model: Model = None,
    top_k: Annotated[int | None, Count(help="Keyphrases per document; default: 10, or all candidates.")] = None,
    min_phrases: Annotated[int | None, typer.Option(min=0, help="Fewest per document that has so many.")] = None,
    min_score: Annotated[float | None, Share(help="Lowest score; by default the model decides how many.")] = None,
    style: Style = None,
    candidates: Annotated[Path | None, FileOption(help="Phrases to score, one per line.")] = None,
    diversity: Annotated[float, Share(help="0: choose by score only; 1: by difference.")] = 0.0,
    nested: Annotated[bool, typer.Option(help="Keyphrases may be inside others.")] = True,
    language: Annotated[str | None, typer.Option(help="Stemmer, such as german, or none.")] = None,
    mentions: Annotated[bool, typer.Option("--mentions", help="Write all mentions of a keyphrase.")] = False,
    batch_size: file_options.BatchSize = 16,
    dtype: Dtype = "float32",
    trust_remote_code: TrustRemoteCode = False,
    text_column: file_options.TextColumn = "text",
    title_column: file_options.TitleColumn = "title",
    id_column: file_options.IdColumn = "id",
    keep: file_options.Keep = None,
    delimiter: file_options.Delimiter = None,
    encoding: file_options.Encoding = None,
    device: Device = None,
    workers: file_options.Workers = 0,
):
    """Extract the keyphrases of documents. Repeat the command after an interruption to resume.

    \b
    Examples:
      lexperts keyphrases extract documents.jsonl keyphrases.jsonl
      lexperts keyphrases extract "s3://bucket/documents/*.parquet" keyphrases.parquet --workers 4
    """
    rows = file_options.open_documents(context.params)

    from keyphrase_tools.extractor import KeyphraseExtractor
    from keyphrase_tools.loading import locate_extractor

    names = ("min_phrases", "min_score", "style", "diversity", "nested", "mentions", "batch_size", "device", "dtype")
    options: dict = {name: context.params[name] for name in (*names, "trust_remote_code")}
    options["top_k"] = 10 if top_k is None and candidates is None else top_k
    options |= {} if language is None else {"language": None if language == "none" else language}
    if candidates is not None:
        options["candidates"] = [line.strip() for line in read_text(candidates).splitlines() if line.strip()]
    extractor = KeyphraseExtractor(model, text_column, title_column, **options)
    more: dict = {"check": extractor.check, "keep": keep or (), "id_column": id_column, "types": extractor.types}
    more["results"] = ("keyphrases", "scores") if output.suffix in (".csv", ".tsv") else ("keyphrases",)
    files = {"model": locate_extractor(model, device, dtype), "candidates": candidates}
    file_options.write_results(extractor.open, rows, context.params, files, 16 * batch_size, **more)


def read_text(path: Path) -> str:
    """The content of a text file. Raises a `UserError` if it is neither UTF-8 nor UTF-16 with its mark."""
    with path.open("rb") as file:
        encoding = "UTF-16" if file.read(2) in (BOM_UTF16_LE, BOM_UTF16_BE) else "UTF-8-sig"
    try:
        return path.read_text(encoding=encoding)
    except UnicodeDecodeError as error:
        name, line = encoding.removesuffix("-sig"), error.object.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {line} is not {name}: {error.reason}. Convert the file.") from error


@app.command()
def generate(
    context: typer.Context,
    source: file_options.Source,
    output: file_options.Output,
    model: Annotated[str | None, ModelOption(help="Keyphrase generator; by default lexperts-exhird-smollm2.")] = None,
    examples: Annotated[Path | None, FileOption(help="Labelled JSON Lines: keyphrases of near ones compete.")] = None,
    num_keyphrases: Annotated[int | None, Count(help="Phrases per document; default: all.")] = None,
    min_phrases: Annotated[int | None, Count(help="Phrases to generate at least, for more suggestions.")] = None,
    embedder: Annotated[str, typer.Option(help="What finds near examples: a sentence-transformers model.")] = "minilm",
    batch_size: file_options.BatchSize = 8,
    text_column: file_options.TextColumn = "text",
    title_column: file_options.TitleColumn = "title",
    id_column: file_options.IdColumn = "id",
    keep: file_options.Keep = None,
    delimiter: file_options.Delimiter = None,
    encoding: file_options.Encoding = None,
    device: Device = None,
    workers: file_options.Workers = 0,
):
    """Generate keyphrases, absent ones too. Repeat the command after an interruption to resume.

    \b
    Examples:
      lexperts keyphrases generate questions.jsonl tags.jsonl
      lexperts keyphrases generate questions.jsonl tags.jsonl --examples tagged.jsonl
      lexperts keyphrases generate documents.jsonl keyphrases.jsonl --model runs/keyphrases
    """
    rows = file_options.open_documents(context.params)

    from keyphrase_tools.phrase_lists import read_labelled
    from keyphrase_tools.rows import to_document
    from run_tools.packaged import locate_model

    from ..processes import GENERATION, open_generator, phrase_types

    name, labelled = locate_model(model, GENERATION), None
    if examples is not None:
        num_keyphrases = num_keyphrases or 10  # otherwise all candidates are written
        read = read_labelled(examples, text_column=text_column)
        names = {"text": text_column, "title": title_column, "keyphrases": "keyphrases"}
        labelled = [{key: row.get(column) for key, column in names.items()} for row in read]
    options: dict = {"num_keyphrases": num_keyphrases, "min_phrases": min_phrases, "batch_size": batch_size}
    process = partial(open_generator, name, device, options, labelled, embedder)
    files = {"model": name, "examples": examples, "embedder": embedder}
    check = partial(to_document, text_column=text_column, title_column=title_column)
    more: dict = {"check": check, "keep": keep or (), "id_column": id_column, "types": phrase_types}
    more["results"] = ("keyphrases",)
    file_options.write_results(process, rows, context.params, files, 16 * batch_size, **more)


@app.command()
def show(
    files: Annotated[list[Path], FileArgument(metavar="FILE...", help="Text files.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="PAGE", help="The page.")] = Path("keyphrases.html"),
    model: Model = None,
    top_k: Annotated[int, Count(help="Maximum number of keyphrases per document.")] = 10,
    style: Style = None,
    device: Device = None,
):
    """Print the keyphrases of texts. Writes a web page with the keyphrases marked in the texts.

    \b
    Example:
      lexperts keyphrases show article.txt --output article.html
    """
    from keyphrase_tools.html_page import is_page, render_page
    from keyphrase_tools.loading import open_extractor
    from run_tools.processes import prepare_process

    if os.path.lexists(output) and not (output.is_file() and is_page(output)):
        raise UserError(f"--output {str(output)!r} exists, and is not a page of this command. Choose another name.")
    texts = [read_text(file) for file in files]
    names = [os.fsencode(file).decode(errors="replace") for file in files]
    prepare_process()
    results = open_extractor(model, device=device)(texts, top_k=top_k, style=style)
    for file, phrases in zip(names, results, strict=True):
        print(f"{file}\n    " + "; ".join(f"{phrase['keyphrase']} ({phrase['score']:.2f})" for phrase in phrases))
    output.write_text(render_page(texts, results, names), encoding="utf-8")
    print(f"wrote {output}")


@app.command()
def score(
    predictions: Annotated[Path, FileArgument(help="JSON Lines with keyphrases, as `extract` writes them.")],
    gold: Annotated[Path, FileArgument(help="JSON Lines with title, text and keyphrases, in the same order.")],
    convention: Annotated[Literal["seke", "exhird"], typer.Option(help="How F1 is counted: seke or exhird.")] = "seke",
    rules: Annotated[Literal["lexperts", "seke"], typer.Option(help="How gold keyphrases match.")] = "lexperts",
    k: Annotated[list[str] | None, typer.Option("-k", help="Cutoffs of F1@k: numbers, k (of gold) or M (all).")] = None,
    language: Annotated[str, typer.Option(help="Stemmer of both, such as german, or none.")] = "english",
    as_json: AsJson = False,
):
    """Score keyphrases against gold keyphrases. Only those that occur in the texts count.

    \b
    Example:
      lexperts keyphrases score keyphrases.jsonl test.jsonl -k 5 -k 10
    """
    from keyphrase_tools.evaluation import gold_phrases, score_phrases
    from keyphrase_tools.phrase_lists import read_labelled, read_predicted
    from keyphrase_tools.rows import full_text

    from ..evaluate.tasks import align

    cuts = tuple(int(cut) if cut.isdecimal() else cut for cut in k or ("5", "10"))
    options: dict = {"language": None if language == "none" else language}
    predicted, gold_rows = read_predicted(predictions), read_labelled(gold)
    order = align(str(predictions), predicted, str(gold), gold_rows, ("title", "text"))
    found = [predicted[i]["keyphrases"] for i in order]
    texts, wanted = ([read(row) for row in gold_rows] for read in (full_text, itemgetter("keyphrases")))
    present = gold_phrases(texts, wanted, rules, **options)
    scores = score_phrases(found, present, convention=convention, k=cuts, **options)
    table = [f"{'':4}{'precision':>10}{'recall':>10}{'F1':>10}"]
    for cut in cuts:
        values = (100 * scores[f"{name}@{cut}"] for name in ("precision", "recall", "f1"))
        table.append(f"@{cut:<3}" + "".join(f"{value:10.1f}" for value in values))
    print_result(scores, as_json, "\n".join(table))


@app.command()
def export(
    model: Annotated[str, typer.Argument(help="Folder or Hub id of a token classifier, or default, or tiny.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    precision: Annotated[Literal["fp32", "int8"], typer.Option(help="fp32 or int8.")] = "fp32",
    as_json: AsJson = False,
):
    """Export a model to ONNX, for faster extraction on CPUs. Use the folder like any other model.

    \b
    Example:
      lexperts keyphrases export default exported --precision int8
      lexperts keyphrases extract documents.jsonl keyphrases.jsonl --model exported
    """
    from keyphrase_tools.export import export_model
    from run_tools.packaged import locate_model

    report = export_model(locate_model(model), output, precision=precision)
    size, difference = f"{report['size'] / 1e6:.1f} MB", f"{report['difference']:.2g}"
    print_result(report, as_json, f"graph in {precision}, {size}, in {output}; logits differ by {difference}")


def about(name: str, least: int | None = 1, most: int | None = None) -> Any:
    """Help and limits of an option that the server of lexperts-lite has, too."""
    return typer.Option(min=least, max=most, help=OPTIONS[name][1])


@app.command()
def serve(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(help="Token classifier; by default lexperts-seke-minilm.")] = None,
    host: Annotated[str, about("host", None)] = DEFAULTS["host"],
    port: Annotated[int, about("port", 0, 65535)] = DEFAULTS["port"],
    batch_size: Annotated[int, about("batch_size")] = DEFAULTS["batch_size"],
    max_wait_ms: Annotated[float, about("max_wait_ms", 0)] = DEFAULTS["max_wait_ms"],
    max_queue: Annotated[int, about("max_queue")] = DEFAULTS["max_queue"],
    max_characters: Annotated[int, about("max_characters")] = DEFAULTS["max_characters"],
    max_candidates: Annotated[int, about("max_candidates")] = DEFAULTS["max_candidates"],
    max_body_bytes: Annotated[int, about("max_body_bytes")] = DEFAULTS["max_body_bytes"],
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    dtype: Dtype = "float32",
):
    """Serve keyphrases over HTTP. POST /keyphrases, with /docs, /healthz and /metrics. Stops gracefully on SIGTERM.

    \b
    Example:
      lexperts keyphrases serve --port 8000
      curl localhost:8000/keyphrases -H 'Content-Type: application/json' -d '{"inputs": "Graph cuts solve problems."}'
    """
    from keyphrase_tools.loading import open_extractor
    from lexperts_lite.serving import create_app
    from run_tools.processes import prepare_process

    listener = bind(host, port)
    prepare_process()
    extract = open_extractor(model, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    limits = {name: context.params[name] for name in OPTIONS if name not in ("host", "port")}
    run_server(create_app(extract, **limits), listener)


def main():
    """Entry point of the command `keyphrases`."""
    run_app(app)
