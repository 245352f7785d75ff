"""`lexperts define`: definition modeling."""

from functools import partial
from typing import Annotated, Literal

import typer

from run_tools.errors import UserError

from ..recipes import DEFINE
from .common import RESUME, AsJson, Debug, Device, Seed, new_app, print_result, user_errors
from .file_options import (
    Delimiter,
    Encoding,
    Keep,
    Output,
    Source,
    Workers,
    check_local,
    open_source,
    print_summary,
)
from .recipes import add_recipes

app = new_app("define", "Define terms in context: write definitions, prepare data.")

Model = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help="Folder or Hub id of a mixture, or of a dense Llama; by default lexperts-lexicon-smollm2."
    ),
]


@app.command()
def term(
    term: Annotated[str, typer.Argument(help="The word or phrase to define.")],
    context: Annotated[str, typer.Option("--context", "-c", help="A text in which it is used.")],
    model: Model = None,
    best_of: Annotated[
        int | None,
        typer.Option(
            min=1, help="Sampled definitions, of which the most likely are printed; default: 1, or 8 for several."
        ),
    ] = None,
    num_definitions: Annotated[int, typer.Option(min=1, help="Different definitions to print.")] = 1,
    seed: Seed = 42,
    device: Device = None,
    as_json: AsJson = False,
    debug: Debug = False,
):
    """Print the definition of a term as used in a context.

    Example: lexperts define term bank --context "They sat on the bank of the river."
    """
    with user_errors(debug):
        from transformers import set_seed

        from run_tools.model_loading import open_pipeline
        from run_tools.packaged import locate_model

        from ..recipes.lexicon.define_file import TASK

        if best_of is not None and best_of < num_definitions:
            raise UserError(
                f"--num-definitions {num_definitions} needs --best-of {num_definitions} or more, got {best_of}."
            )
        check_local(device, model=model)
        set_seed(seed)
        define = open_pipeline(TASK, locate_model(model, TASK), device=device)
        found = define({"term": term, "context": context}, best_of=best_of, num_definitions=num_definitions)
        results = found if isinstance(found, list) else [found]
        print_result(results, as_json, lambda: "\n".join(result["definition"] for result in results))


@app.command()
def terms(
    source: Source,
    output: Output,
    model: Model = None,
    best_of: Annotated[int, typer.Option(min=1, help="Sampled definitions per row; the best is written.")] = 1,
    reward_model: Annotated[str | None, typer.Option(help="Model that ranks the samples; default: likelihood.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of a definition.")] = 64,
    on_long: Annotated[
        Literal["truncate", "error"], typer.Option(help="Contexts that are too long: truncate or error.")
    ] = "truncate",
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per batch.")] = 8,
    seed: Seed = 42,
    keep: Keep = None,
    delimiter: Delimiter = None,
    encoding: Encoding = None,
    device: Device = None,
    workers: Workers = 0,
    debug: Debug = False,
):
    """Write the definitions of terms in context: columns term and context. Started again after an interruption, it resumes.

    All columns are copied to OUT, with --keep only these: those of rows that have a definition already are term and context.

    Example: lexperts define terms terms.jsonl definitions.jsonl --model my-lexicon --best-of 8
    """
    with user_errors(debug, interrupted=RESUME, full=RESUME):
        reading = {"delimiter": delimiter, "encoding": encoding}
        rows = open_source(source, output, ("term", "context", *(keep or ())), **reading)

        from run_tools.fingerprints import fingerprint
        from run_tools.packaged import locate_model
        from run_tools.run_over import run_over

        from ..recipes.lexicon.define_file import TASK, check_row, open_definer

        if not workers:
            check_local(device, model=model, reward_model=reward_model)
        name = locate_model(model, TASK)
        options = {"best_of": best_of, "max_new_tokens": max_new_tokens, "on_long": on_long}
        settings = {**options, **reading, "model": fingerprint(name), "seed": seed, "batch_size": batch_size}
        summary = run_over(
            partial(open_definer, name, reward_model, batch_size, device, seed, options),
            rows,
            output,
            settings | {"reward_model": reward_model and fingerprint(reward_model)},
            check=check_row,
            batch_size=8 * batch_size,
            keep=keep,
            results=("definition", "score"),
            workers=workers,
        )
        print_summary(summary, output)


add_recipes(app, DEFINE)
