"""The front of commands that process many documents: their options, the run, and what they print at the end."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from run_tools.model_options import check_model, parse_device
from run_tools.packaged import is_name

from .common import REPEAT, RESUME, Debug, Device, print_error, user_errors

SOURCE_HELP = (
    "Folder, file or pattern of .txt, .jsonl, .json, .csv, .tsv or .parquet files, also s3://, gs:// or hf://."
)
Source = Annotated[str, typer.Argument(metavar="SOURCE", help=SOURCE_HELP)]
Output = Annotated[Path, typer.Argument(metavar="OUT", help="The .jsonl, .parquet, .csv or .tsv file to write.")]
TextColumn = Annotated[str, typer.Option(help="The column of texts, or of lists of words.")]
TitleColumn = Annotated[str, typer.Option(help="The column of titles, if any.")]
COLUMNS: dict[str, tuple] = {  # name -> type and default
    "text_column": (TextColumn, "text"),
    "title_column": (TitleColumn, "title"),
    "id_column": (Annotated[str, typer.Option(help="The column of ids; without ids documents are numbered.")], "id"),
    "keep": (Annotated[list[str] | None, typer.Option(help="A column to copy to OUT; can be repeated.")], None),
}
DELIMITER_HELP = "Between the fields of CSV files, such as ';' or tab; by default a comma."
ENCODING_HELP = "Of text files, such as cp1252; by default UTF-8, or that of a byte order mark."
ADDRESS_HELP = "With --engine ray: address of a cluster, such as auto or ray://HOST:10001."
WORKERS_HELP = "With --engine ray: by default one per GPU, or per core."
APPEND_HELP = "If OUT exists and the source has grown, add the documents with new ids."
BLOCK_HELP = "Documents per block; an interruption loses unfinished blocks."
OPTIONS: dict[str, tuple] = {
    "delimiter": (Annotated[str | None, typer.Option(help=DELIMITER_HELP)], None),
    "encoding": (Annotated[str | None, typer.Option(help=ENCODING_HELP)], None),
    "device": (Device, None),
    "engine": (
        Annotated[Literal["local", "ray"], typer.Option(help="local: this process; ray: workers of Ray.")],
        "local",
    ),
    "address": (Annotated[str | None, typer.Option(help=ADDRESS_HELP)], None),
    "workers": (Annotated[int | None, typer.Option(min=1, help=WORKERS_HELP)], None),
    "gpus_per_worker": (Annotated[float, typer.Option(min=0, help="With --engine ray: GPUs of each worker.")], 0.0),
    "block_size": (Annotated[int, typer.Option(min=1, help=BLOCK_HELP)], 512),
    "append": (Annotated[bool, typer.Option("--append", help=APPEND_HELP)], False),
    "debug": (Debug, False),
}


@dataclass
class CorpusRun:
    """The options that all of these commands have.

    Attributes:
        columns: those of `COLUMNS`, or nothing for a command with columns of its own.
        options: those of `OPTIONS`.
    """

    source: str
    output: Path
    columns: dict[str, Any]
    options: dict[str, Any]

    @property
    def device(self) -> str | None:
        """The device of the model."""
        return self.options["device"]

    def check_models(self, **models: str | None) -> None:
        """As `check_local`, with the engine and the device that were given."""
        check_local(self.options["engine"], self.device, **models)

    def open_corpus(self, text_column: str | None = None, **settings):
        """The documents. A command without `COLUMNS` names its column; `settings` are those of `Corpus`."""
        from run_tools.corpus.documents import Corpus

        if self.columns:
            settings = self.columns | {"keep": self.columns["keep"] or ()}
        else:
            settings |= {"text_column": text_column, "title_column": None}
        reading = {name: self.options[name] for name in ("delimiter", "encoding")}
        return Corpus(self.source, output=self.output, **settings, **reading)

    def open_engine(self):
        """The engine of that name.

        Raises:
            ValueError: if an option needs another engine.
            ImportError: without Ray.
        """
        from run_tools.corpus.engines import LocalEngine, RayEngine

        options = {name: self.options[name] for name in ("address", "workers", "gpus_per_worker")}
        if self.options["engine"] == "ray":
            return RayEngine(**options)
        for name, value in options.items():
            if value:
                raise ValueError(
                    f"--{name.replace('_', '-')} {value} has no effect on --engine local. Add --engine ray."
                )
        return LocalEngine()


def corpus_command(source_help: str = "", columns: bool = False, block_size: int = 512) -> Callable:
    """Makes a command of a function `build(run: CorpusRun, **own_options)`, which returns the corpus and its `Process`.

    Args:
        source_help: what the help adds about the source.
        columns: whether the command has the options of `COLUMNS`.
    """
    shared = {**(COLUMNS if columns else {}), **OPTIONS, "block_size": (OPTIONS["block_size"][0], block_size)}

    def decorate(build: Callable) -> Callable:
        source = Annotated[str, typer.Argument(metavar="SOURCE", help=f"{SOURCE_HELP} {source_help}".strip())]
        places = [make_parameter("source", source), make_parameter("output", Output)]
        own = [
            make_parameter(one.name, one.annotation, one.default)
            for one in list(inspect.signature(build).parameters.values())[1:]
        ]
        parameters = [*places, *own, *(make_parameter(name, *about) for name, about in shared.items())]

        @functools.wraps(build)
        def command(source: str, output: Path, **given: Any) -> None:
            options = {name: given.pop(name) for name in OPTIONS}
            run = CorpusRun(source, output, {name: given.pop(name) for name in COLUMNS if columns}, options)
            interrupted = functools.partial(describe_progress, output, options["block_size"])
            with user_errors(options["debug"], interrupted=interrupted, full=RESUME):
                from run_tools.corpus.block_runs import check_output, run_blocks

                check_output(output, source)
                engine = run.open_engine()
                corpus, process = build(run, **given)
                if run.columns and not corpus.has_ids:
                    missing = f"{source} has no column {corpus.id_column!r}, so documents are numbered."
                    print_error(f"{missing} --id-column names the column of ids.", "note")
                blocks = {name: options[name] for name in ("block_size", "append")}
                summary = run_blocks(process, corpus, output, engine=engine, **blocks)
            print_summary(summary, output)

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in parameters}
        return command

    return decorate


def make_parameter(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    """A parameter of a command."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def check_local(engine: str, device: str | None, **models: str | None) -> None:
    """Raises an error for a device or models that this machine lacks, unless workers load them; `models` by their options."""
    if engine == "local":
        parse_device(device)
        for option, model in models.items():
            if model is not None and not is_name(model):
                check_model(f"--{option.replace('_', '-')}", model)


def describe_progress(output: Path, block_size: int) -> str:
    """What an interrupted command has saved, and how to go on."""
    from run_tools.resume import ResumableOutput

    saved = sum(end - start for start, end in ResumableOutput(output, "").blocks().items())
    if saved:
        return f"Documents saved: {saved:,}. {RESUME}"
    return f"Nothing is saved yet: documents are saved in blocks of {block_size:,} (--block-size). {REPEAT}"


def print_summary(summary, output: Path) -> None:
    """Prints the numbers of a `RunSummary`. Exits with status 1 if a file could not be read, or no document could be processed."""
    count = f"{summary.documents:,} document{'s' * (summary.documents != 1)}"
    errors = f'; {summary.errors:,} could not be processed (see their "error")' if summary.errors else ""
    if summary.documents and not summary.new:
        print(f"{output} is complete, nothing to do: {count}{errors}")
    else:
        new = f", {summary.new:,} of them new" if summary.new < summary.documents else ""
        print(f"{count} in {output}{new}{errors}")
    for message in summary.files:
        print_error(message)
    if summary.documents and summary.errors == summary.documents:
        print_error(
            f"no document could be processed: all rows of {output} have an error. Correct the source or the options."
        )
    if summary.files or (summary.documents and summary.errors == summary.documents):
        raise typer.Exit(1)
