"""`lexperts define`: definition modeling, from dictionaries to scores."""

from pathlib import Path
from typing import Annotated

import typer

from ..recipes import DEFINE
from .common import Debug, Device, new_app, user_errors
from .recipes import add_recipes

app = new_app("define", "Define terms in context: write definitions, prepare data, run the whole recipe.")


@app.command()
def terms(
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="JSON Lines with term and context.")],
    output: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="The file to write.")],
    model: Annotated[str, typer.Option("--model", "-m", help="Folder or Hub id of a mixture, or of a dense Llama.")],
    best_of: Annotated[int, typer.Option(min=1, help="Sampled definitions per row; the best is written.")] = 1,
    reward_model: Annotated[str | None, typer.Option(help="Model that ranks the samples; default: likelihood.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of a definition.")] = 64,
    on_long: Annotated[str, typer.Option(help="Contexts that are too long: truncate or error.")] = "truncate",
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per batch.")] = 8,
    seed: Annotated[int, typer.Option(help="Random seed of sampling.")] = 42,
    device: Device = None,
    debug: Debug = False,
):
    """Write the definitions of terms in context. Started again after an interruption, it resumes.

    Example: lexperts define terms terms.jsonl definitions.jsonl --model my-lexicon --best-of 8
    """
    with user_errors(debug):
        from transformers import pipeline

        from keyphrase_tools.jsonl import read_jsonl

        from ..recipes.common.fingerprints import fingerprint
        from ..recipes.common.jsonl_resume import ResumableJsonl, digest

        rows = list(read_jsonl(source, required=("term", "context"), example='{"term": "...", "context": "..."}'))
        options = {"best_of": best_of, "max_new_tokens": max_new_tokens, "on_long": on_long}
        settings = {**options, "model": fingerprint(model), "rows_sha256": digest(rows), "seed": seed}
        settings |= {"batch_size": batch_size, "reward_model": reward_model and fingerprint(reward_model)}
        file = ResumableJsonl(output, settings)
        if not file.is_complete():
            define = pipeline("definition-modeling", model=model, device=device, batch_size=batch_size)
            if reward_model:
                from modeling_lexicon.generation_lexicon import load_reward_model

                options["reward_model"] = load_reward_model(reward_model, define.model.device)

            def write_batch(batch, first):
                return [row | outputs for row, outputs in zip(batch, define(batch, **options), strict=True)]

            file.write(rows, write_batch, batch_size=batch_size, seed=seed, desc="definitions")
            file.finish()
        print(f"{len(rows):,} definitions in {output}")


add_recipes(app, DEFINE)
