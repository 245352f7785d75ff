"""`lexperts define`: definition modeling, from dictionaries to scores."""

from typing import Annotated, Literal

import typer

from ..recipes import DEFINE
from .common import Seed, new_app
from .corpus_options import CorpusRun, corpus_command
from .recipes import add_recipes

app = new_app("define", "Define terms in context: write definitions, prepare data, run the whole recipe.")


@app.command()
@corpus_command("Columns: term and context.", block_size=64)
def terms(
    run: CorpusRun,
    model: Annotated[str, typer.Option("--model", "-m", help="Folder or Hub id of a mixture, or of a dense Llama.")],
    best_of: Annotated[int, typer.Option(min=1, help="Sampled definitions per row; the best is written.")] = 1,
    reward_model: Annotated[str | None, typer.Option(help="Model that ranks the samples; default: likelihood.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of a definition.")] = 64,
    on_long: Annotated[
        Literal["truncate", "error"], typer.Option(help="Contexts that are too long: truncate or error.")
    ] = "truncate",
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per batch.")] = 8,
    seed: Seed = 42,
):
    """Write the definitions of terms in context. Started again after an interruption, it resumes.

    Example: lexperts define terms terms.jsonl definitions.jsonl --model my-lexicon --best-of 8
    """
    from ..recipes.lexicon.define_file import DefinitionProcess

    run.check_models(model=model, reward_model=reward_model)
    corpus = run.open_corpus("context", keep=None, required=("term",))
    options = {"best_of": best_of, "max_new_tokens": max_new_tokens, "on_long": on_long}
    return corpus, DefinitionProcess(model, reward_model, batch_size, run.device, seed, options)


add_recipes(app, DEFINE)
