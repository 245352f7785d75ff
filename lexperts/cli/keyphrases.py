"""`lexperts keyphrases`, also installed as `keyphrases`: the command line of keyphrase_tools.

Each command imports what it needs when it runs, so that `--help` is fast.
"""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from run_tools.errors import UserError, repr_path
from run_tools.loading import describe_load_errors
from run_tools.option_paths import check_new_file, check_new_folder

from .common import (
    RESUME,
    AsJson,
    Debug,
    Device,
    Dtype,
    Model,
    TrustRemoteCode,
    new_app,
    print_result,
    run_app,
    user_errors,
)
from .file_options import (
    Delimiter,
    Encoding,
    IdColumn,
    Keep,
    Output,
    Source,
    TextColumn,
    TitleColumn,
    Workers,
    check_local,
    open_documents,
    print_summary,
)
from .generate import generate
from .serve import serve

app = new_app("keyphrases", "Keyphrases of documents: extract, generate and score them.")
app.command()(serve)
app.command()(generate)

Style = Annotated[str | None, typer.Option(help="Style of annotation, if the model has several, such as tags.")]
FileOption = partial(typer.Option, exists=True, dir_okay=False, metavar="FILE")
FileArgument = partial(typer.Argument, exists=True, dir_okay=False)
BatchSize = Annotated[int, typer.Option(min=1, help="Windows per batch.")]


@app.command()
def extract(
    source: Source,
    output: Output,
    model: Model = None,
    top_k: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of keyphrases per document; by default 10, all with --candidates."),
    ] = None,
    threshold: Annotated[float | None, typer.Option(min=0, max=1, help="Of a word; by default the model's.")] = None,
    min_score: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Leave out keyphrases with a lower score; by default the model decides how many there are.",
        ),
    ] = None,
    style: Style = None,
    candidates: Annotated[Path | None, FileOption(help="Phrases to score: one per line, synonyms after tabs.")] = None,
    match_case: Annotated[
        Literal["auto", "yes", "no"],
        typer.Option(help="Whether candidates differ by case; auto: those of up to four capitals, such as IT."),
    ] = "auto",
    diversity: Annotated[float, typer.Option(min=0, max=1, help="0: choose by score only; 1: by difference.")] = 0.0,
    nested: Annotated[bool, typer.Option(help="Keyphrases may be inside others.")] = True,
    language: Annotated[
        str | None, typer.Option(help="The stemmer, such as german, or none; by default the model's, or english.")
    ] = None,
    batch_size: BatchSize = 16,
    dtype: Dtype = "float32",
    trust_remote_code: TrustRemoteCode = False,
    mentions: Annotated[bool, typer.Option("--mentions", help="Write all mentions of a keyphrase.")] = False,
    text_column: TextColumn = "text",
    title_column: TitleColumn = "title",
    id_column: IdColumn = "id",
    keep: Keep = None,
    delimiter: Delimiter = None,
    encoding: Encoding = None,
    device: Device = None,
    workers: Workers = 0,
    debug: Debug = False,
):
    """Extract the keyphrases of documents. Repeat the command after an interruption to resume.

    \b
    Examples:
      lexperts keyphrases extract documents.jsonl keyphrases.jsonl
      lexperts keyphrases extract "s3://bucket/documents/*.parquet" keyphrases.parquet --workers 4
    """
    with user_errors(debug, interrupted=RESUME, full=RESUME):
        columns = {"text_column": text_column, "title_column": title_column, "id_column": id_column, "keep": keep}
        reading: dict = {**columns, "delimiter": delimiter, "encoding": encoding}
        rows = open_documents(source, output, **reading)

        from keyphrase_tools.candidates import read_candidates
        from keyphrase_tools.extractor import KeyphraseExtractor
        from keyphrase_tools.words import check_language
        from run_tools.fingerprints import fingerprint
        from run_tools.packaged import locate_model
        from run_tools.run_over import run_over

        if not workers:
            check_local(device, model=model)
        given = {"min_score": min_score, "threshold": threshold, "style": style}
        options: dict = {name: value for name, value in given.items() if value is not None}
        options["top_k"] = 10 if top_k is None and candidates is None else top_k
        options |= {} if language is None else {"language": check_language(None if language == "none" else language)}
        options |= {"diversity": diversity} if diversity else {}
        options |= {} if nested else {"nested": False}
        options |= {} if match_case == "auto" else {"match_case": match_case == "yes"}
        loading: dict = {"dtype": dtype, "trust_remote_code": trust_remote_code, "batch_size": batch_size}
        settings = {**reading, **options, **loading, "mentions": mentions, "model": fingerprint(locate_model(model))}
        if candidates is not None:
            settings["candidates"] = fingerprint(candidates)
            options["candidates"] = read_candidates(candidates)
        options |= {"text_column": text_column, "title_column": title_column, "mentions": mentions, "device": device}
        extractor = KeyphraseExtractor(model, **loading, **options)
        summary = run_over(
            extractor.open,
            rows,
            output,
            settings,
            check=extractor.check,
            batch_size=16 * batch_size,  # documents that are sorted by length together
            keep=keep or (),
            id_column=id_column,
            results=("keyphrases", "scores") if output.suffix in (".csv", ".tsv") else ("keyphrases",),
            types=extractor.types,
            workers=workers,
        )
        print_summary(summary, output)


@app.command()
def show(
    files: Annotated[list[Path], FileArgument(metavar="FILE...", help="Text files.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="PAGE.html", help="The page to write.")] = Path(
        "keyphrases.html"
    ),
    model: Model = None,
    top_k: Annotated[int, typer.Option(min=1, help="Maximum number of keyphrases per document.")] = 10,
    style: Style = None,
    device: Device = None,
    debug: Debug = False,
):
    """Print the keyphrases of text files, and write a web page with the keyphrases marked in the texts.

    \b
    Example:
      lexperts keyphrases show article.txt --output article.html
    """
    with user_errors(debug):
        from keyphrase_tools.html_page import is_page, render_page
        from keyphrase_tools.loading import open_extractor
        from run_tools.processes import prepare_process

        check_new_file("--output", output)
        if output.exists() and not is_page(output):
            raise UserError(
                f"--output {repr_path(output)} exists, and is not a page of this command. Choose another name."
            )
        check_local(device, model=model)
        texts = [file.read_text(encoding="utf-8") for file in files]
        prepare_process()
        extractor = open_extractor(model, device=device)
        results = extractor(texts, top_k=top_k, **({} if style is None else {"style": style}))
        for file, phrases in zip(files, results, strict=True):
            print(f"{file}\n    " + "; ".join(f"{phrase['keyphrase']} ({phrase['score']:.2f})" for phrase in phrases))
        output.write_text(render_page(texts, results, [str(file) for file in files]), encoding="utf-8")
        print(f"wrote {output}")


@app.command()
def score(
    predictions: Annotated[Path, FileArgument(help="JSON Lines with keyphrases, as `extract` writes them.")],
    gold: Annotated[Path, FileArgument(help="JSON Lines with title, text and keyphrases, in the same order.")],
    convention: Annotated[Literal["seke", "exhird"], typer.Option(help="How F1 is counted: seke or exhird.")] = "seke",
    rules: Annotated[
        Literal["lexperts", "seke"], typer.Option(help="How gold keyphrases are matched: lexperts or seke.")
    ] = "lexperts",
    k: Annotated[
        list[str] | None,
        typer.Option(
            "-k",
            help="Cutoff of F1@k: a number, k (that of the document's gold keyphrases) or M (all). Can be repeated.",
        ),
    ] = None,
    language: Annotated[
        str, typer.Option(help="The stemmer by which keyphrases are compared, such as german, or none.")
    ] = "english",
    as_json: AsJson = False,
    debug: Debug = False,
):
    """Score keyphrases against gold keyphrases. Only those that occur in the texts count.

    \b
    Example:
      lexperts keyphrases score keyphrases.jsonl test.jsonl -k 5 -k 10
    """
    with user_errors(debug):
        from keyphrase_tools.evaluation import score_files

        cuts = tuple(int(cut) if cut.isdecimal() else cut for cut in k or ("5", "10"))
        options: dict = {"convention": convention, "k": cuts, "language": None if language == "none" else language}
        scores = score_files(predictions, gold, rules=rules, **options)
        rows = [f"{'':4}{'precision':>10}{'recall':>10}{'F1':>10}"]
        for cut in cuts:
            values = (100 * scores[f"{name}@{cut}"] for name in ("precision", "recall", "f1"))
            rows.append(f"@{cut:<3}" + "".join(f"{value:10.1f}" for value in values))
        print_result(scores, as_json, lambda: "\n".join(rows))


@app.command()
def export(
    model: Annotated[str, typer.Argument(help="Folder or Hub id of a token classifier, or default, or tiny.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    format: Annotated[Literal["onnx", "openvino"], typer.Option(help="onnx or openvino.")] = "onnx",
    precision: Annotated[Literal["fp32", "int8"], typer.Option(help="fp32 or int8.")] = "fp32",
    evaluation: Annotated[
        Path | None,
        FileOption(
            metavar="FILE.jsonl", help="Labelled documents on which the graph must keep its F1@10; needed for int8."
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        FileOption(
            metavar="FILE.jsonl", help="Texts by which OpenVINO chooses int8 ranges; by default those of --evaluation."
        ),
    ] = None,
    max_loss: Annotated[float, typer.Option(min=0, max=100, help="Points of F1@10 that the graph may lose.")] = 0.5,
    no_gate: Annotated[
        bool, typer.Option("--no-gate", help="Write the graph whatever it loses, and int8 also without --evaluation.")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, help="Use only the first N documents of each file.")] = 500,
    as_json: AsJson = False,
    debug: Debug = False,
):
    """Export a model to ONNX or OpenVINO, for faster extraction on CPUs. Use the folder like any other model.

    \b
    Example:
      lexperts keyphrases export default exported --precision int8 --evaluation labelled.jsonl
      lexperts keyphrases extract documents.jsonl keyphrases.jsonl --model exported
    """
    with user_errors(debug):
        from keyphrase_tools.export import export_model
        from keyphrase_tools.phrase_lists import read_labelled
        from keyphrase_tools.rows import full_text
        from run_tools.jsonl import read_jsonl
        from run_tools.loading import open_config
        from run_tools.packaged import locate_model

        check_new_folder("OUT", output)
        labelled = None if evaluation is None else read_labelled(evaluation, hint="")[:limit]
        rows = labelled and [{"text": full_text(row), "keyphrases": row["keyphrases"]} for row in labelled]
        texts = None if calibration is None else [full_text(row) for row in read_jsonl(calibration, ("text",))[:limit]]
        name = locate_model(model)
        with describe_load_errors("MODEL", name):
            open_config(name)
        options: dict = {"format": format, "precision": precision, "calibration": texts, "evaluation": rows}
        report = export_model(name, output, **options, max_loss=None if no_gate else max_loss)
        lines = [f"{format} graph in {precision}, {report['size'] / 1e6:.1f} MB, in {output}"]
        lines += [f"logits differ by at most {report['difference']:.2g}"]
        if rows:
            f1 = [100 * report["f1@10"][name] for name in ("model", "exported")]
            lines += [
                f"F1@10 on {report['documents']:,} documents: {f1[0]:.1f} -> {f1[1]:.1f}; {100 * report['agreement']:.0f}% of the "
                "keyphrases are the same"
            ]
        print_result(report, as_json, lambda: "\n".join(lines))


@app.command()
def card(
    folder: Annotated[
        Path,
        typer.Argument(exists=True, file_okay=False, metavar="DIR", help="A training run's folder, with results.json."),
    ],
    write: Annotated[bool, typer.Option("--write", help="Write DIR/README.md instead of printing the card.")] = False,
    debug: Debug = False,
):
    """Create the model card of a training run.

    \b
    Example:
      lexperts keyphrases card runs/seke-minilm --write
    """
    with user_errors(debug):
        from keyphrase_tools.cards import build_card, read_record
        from run_tools.cards import is_blank, read_card

        card, path = build_card(read_record(folder), folder.resolve().name), folder / "README.md"
        if write and path.exists():
            old = read_card(path)
            if old is None or (str(old) != str(card) and not is_blank(old)):
                raise UserError(f"{repr_path(path)} exists, and is not this card. Move it away, or leave out --write.")
        if write:
            path.write_text(str(card), encoding="utf-8")
        print(f"wrote {path}" if write else card)


def main():
    """Entry point of the command `keyphrases`."""
    run_app(app)
