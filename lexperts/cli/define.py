"""`lexperts define`: definition modeling."""

from functools import partial
from typing import Annotated

import typer

from run_tools.errors import UserError

from . import file_options
from .common import AsJson, Count, Device, ModelOption, Seed, new_app, print_result

app = new_app("define", "Define terms in context.")

Model = Annotated[str | None, ModelOption(help="Mixture or dense Llama; by default lexperts-lexicon-smollm2.")]


@app.command()
def term(
    term: Annotated[str, typer.Argument(help="The word or phrase to define.")],
    context: Annotated[str, typer.Option("--context", "-c", help="A text in which it is used.")],
    model: Model = None,
    best_of: Annotated[int | None, Count(help="Samples to choose from; default: 1, or 8 for several.")] = None,
    num_definitions: Annotated[int, Count(help="Different definitions to print.")] = 1,
    seed: Seed = 42,
    device: Device = None,
    as_json: AsJson = False,
):
    """Print the definition of a term as used in a context.

    Example: lexperts define term bank --context "They sat on the bank of the river."
    """
    if best_of is not None and best_of < num_definitions:
        raise UserError(f"--num-definitions {num_definitions} exceeds --best-of {best_of}.")

    from transformers import set_seed

    from run_tools.packaged import locate_model

    from ..processes import DEFINITIONS, open_task

    set_seed(seed)
    define = open_task(DEFINITIONS, locate_model(model, DEFINITIONS), device)
    found = define({"term": term, "context": context}, best_of=best_of, num_definitions=num_definitions)
    results = found if isinstance(found, list) else [found]
    print_result(results, as_json, "\n".join(result["definition"] for result in results))


@app.command()
def terms(
    context: typer.Context,
    source: file_options.Source,
    output: file_options.Output,
    model: Model = None,
    best_of: Annotated[int, Count(help="Sampled definitions per row; the best is written.")] = 1,
    reward_model: Annotated[str | None, typer.Option(help="Model that ranks the samples; default: likelihood.")] = None,
    max_new_tokens: Annotated[int, Count(help="Maximum tokens of a definition.")] = 64,
    batch_size: file_options.BatchSize = 8,
    seed: Seed = 42,
    keep: file_options.Keep = None,
    delimiter: file_options.Delimiter = None,
    encoding: file_options.Encoding = None,
    device: Device = None,
    workers: file_options.Workers = 0,
):
    """Define the terms of files, in context. Columns: term and context. Started again after an interruption, it resumes.

    All columns are copied to OUT, with --keep only these: those of rows that have a definition already are term and context.

    Example: lexperts define terms terms.jsonl definitions.jsonl --model my-lexicon --best-of 8
    """
    rows = file_options.open_source(context.params, ("term", "context", *(keep or ())))

    from run_tools.packaged import locate_model

    from ..processes import DEFINITIONS, check_term, open_definer

    name = locate_model(model, DEFINITIONS)
    options = {"best_of": best_of, "max_new_tokens": max_new_tokens, "batch_size": batch_size}
    process, files = partial(open_definer, name, reward_model, device, seed, options), {"reward_model": reward_model}
    more: dict = {"check": check_term, "keep": keep, "results": ("definition", "score")}
    file_options.write_results(process, rows, context.params, {"model": name, **files}, 8 * batch_size, **more)
