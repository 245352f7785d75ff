"""`lexperts define`: definition modeling, from dictionaries to scores."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from ..recipes import DEFINE
from .common import RESUME, Debug, Device, Seed, new_app, user_errors
from .many import (
    OUTPUT_HELP,
    SOURCE_HELP,
    Address,
    Append,
    BlockSize,
    Delimiter,
    Encoding,
    EngineName,
    GpusPerWorker,
    Workers,
    check_local,
    open_engine,
    print_summary,
)
from .recipes import add_recipes

app = new_app("define", "Define terms in context: write definitions, prepare data, run the whole recipe.")


@app.command()
def terms(
    source: Annotated[str, typer.Argument(help=f"{SOURCE_HELP} Columns: term and context.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help=OUTPUT_HELP)],
    model: Annotated[str, typer.Option("--model", "-m", help="Folder or Hub id of a mixture, or of a dense Llama.")],
    best_of: Annotated[int, typer.Option(min=1, help="Sampled definitions per row; the best is written.")] = 1,
    reward_model: Annotated[str | None, typer.Option(help="Model that ranks the samples; default: likelihood.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of a definition.")] = 64,
    on_long: Annotated[
        Literal["truncate", "error"], typer.Option(help="Contexts that are too long: truncate or error.")
    ] = "truncate",
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per batch.")] = 8,
    seed: Seed = 42,
    delimiter: Delimiter = None,
    encoding: Encoding = None,
    device: Device = None,
    engine: EngineName = "local",
    address: Address = None,
    workers: Workers = None,
    gpus_per_worker: GpusPerWorker = 0.0,
    block_size: BlockSize = 64,
    append: Append = False,
    debug: Debug = False,
):
    """Write the definitions of terms in context. Started again after an interruption, it resumes.

    Example: lexperts define terms terms.jsonl definitions.jsonl --model my-lexicon --best-of 8
    """
    with user_errors(debug, interrupted=RESUME, full=RESUME):
        from run_tools.corpus.block_runs import check_output, run_blocks
        from run_tools.corpus.documents import Corpus

        from ..recipes.lexicon.define_file import DefinitionProcess

        check_output(output)
        check_local(engine, device, model=model, reward_model=reward_model)
        runner = open_engine(engine, address, workers, gpus_per_worker)
        reading = {"delimiter": delimiter, "encoding": encoding, "output": output}
        corpus = Corpus(source, "context", None, keep=None, required=("term",), **reading)
        options = {"best_of": best_of, "max_new_tokens": max_new_tokens, "on_long": on_long}
        process = DefinitionProcess(model, reward_model, batch_size, device, seed, options)
        summary = run_blocks(process, corpus, output, engine=runner, block_size=block_size, append=append)
    print_summary(summary, output)


add_recipes(app, DEFINE)
