"""`lexperts merge`: each command calls the function of `merge_tools` of the same name."""

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from run_tools.errors import UserError, short_repr, user_errors
from run_tools.loading import parse_device

from .common import AsJson, Debug, Device, Seed, new_app, print_json, run_app

app = new_app("merge-experts", "Merge independently fine-tuned models into one sparse checkpoint, and edit the result.")

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A mixture written by `lexperts merge`.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The output folder, which must not exist or be empty.")]
Name = Annotated[str, typer.Option("--expert", help="The expert's name, as shown by `inspect`.")]
Moved = Annotated[
    list[str] | None,
    typer.Option("--moved", metavar="NAME=FOLDER", help="Where an expert (or `base`) is now, if it was moved. Repeat."),
]
Domains = Annotated[
    list[str],
    typer.Option("--domain", metavar="NAME=FILE", help="Texts of a domain: .jsonl with text, or .txt. Repeat."),
]


def read_pairs(option: str, pairs: list[str] | None) -> dict[str, str]:
    """`["law=models/law"]` -> `{"law": "models/law"}`."""
    read: dict[str, str] = {}
    for pair in pairs or []:
        name, _, value = (part.strip() for part in pair.partition("="))
        if not (name and value) or name in read:
            problem = "occurs twice" if name in read else "is not NAME=PATH"
            raise UserError(f"{option} {short_repr(pair)} {problem}. Example: {option} law=models/law")
        read[name] = value
    return read


@contextmanager
def command(as_json: bool, debug: bool):
    """Runs a command, whose errors are one line; with JSON on the standard output too. Yields what prints its result."""

    def show(result: dict[str, Any], render: Callable[[dict[str, Any]], Any], *lines: str) -> None:
        for level in ("warnings", "notes"):
            for line in result.get(level, []):
                typer.echo(f"{level[:-1]}: {line}", err=True)
        if as_json:
            return print_json(result)
        from rich.console import Console

        Console(soft_wrap=True).print(render(result))
        for line in lines:
            typer.echo(line)

    def report(message: str, level: str) -> None:
        if as_json and level == "error":
            print_json({"error": message})
        typer.echo(f"{level}: {message}", err=True)

    with user_errors(debug, report=report):
        yield show


@app.command()
def compose(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG.yml", help="The recipe: experts, base_model, gate_mode, ...")
    ],
    out: Out,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, and write nothing.")] = False,
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="REPO", help="Upload the mixture to this repository afterwards.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Create the repository as a private one.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
):
    """Merge the experts of a recipe into one mixture.

    Example: lexperts merge compose recipe.yml mixture
    """
    with command(as_json, debug) as show:
        import merge_tools

        from .merge_tables import summary_table

        result = merge_tools.compose(config, out, dry_run=dry_run)
        if push_to_hub and not dry_run:
            result["pushed_to"] = push(out, push_to_hub, private)
        show(result, summary_table, "nothing was written." if dry_run else f"wrote {out}")


def push(folder: Path, repository: str, private: bool) -> str:
    """Uploads a finished mixture and returns the repository's address. Raises a `UserError` if the upload fails."""
    from huggingface_hub import HfApi

    try:
        url = HfApi().create_repo(repository, private=private, exist_ok=True)
        HfApi().upload_folder(
            repo_id=url.repo_id,
            folder_path=folder,
            delete_patterns=["model*.safetensors*"],  # the shards of an earlier upload, which readers would prefer
            ignore_patterns=["gate_statistics/*"],  # states of the user's texts
        )
    except Exception as error:  # HTTP errors, offline mode, permissions, ...
        reason = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
        raise UserError(
            f"{folder} is complete, but could not be pushed to {repository!r} ({reason}). Log in with `hf auth login`, "
            f"then run: hf upload {repository} {folder} --exclude 'gate_statistics/*'"
        ) from error
    return str(url)


@app.command()
def inspect(folder: Folder, as_json: AsJson = False, debug: Debug = False):
    """Show the experts, sizes and gates of a mixture.

    Example: lexperts merge inspect mixture
    """
    with command(as_json, debug) as show:
        import merge_tools

        from .merge_tables import mixture_tables

        show(merge_tools.inspect(folder), mixture_tables)


@app.command()
def verify(folder: Folder, moved: Moved = None, as_json: AsJson = False, debug: Debug = False):
    """Compare a mixture with its sources and its record: every tensor, config.json, the tokenizer's files.

    Exit status 1 if something differs.

    Example: lexperts merge verify mixture --moved law=models/llama-law
    """
    with command(as_json, debug) as show:
        import merge_tools

        result = merge_tools.verify(folder, sources=read_pairs("--moved", moved))
        counts = ", ".join(f"{count} {group}" for group, count in result["compared"].items())
        show(result, lambda _: f"compared {counts}: {len(result['faults']) or 'no'} differences.", *result["faults"])
        if not result["ok"]:
            raise typer.Exit(1)


@app.command()
def add(
    folder: Folder,
    out: Out,
    source: Annotated[str, typer.Option("--source", metavar="PATH", help="Folder or Hub id of the new expert.")],
    name: Annotated[str | None, typer.Option(help="Name of the new expert. Default: the name of its folder.")] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="A text of its domain, for gates from prompts. Repeat.")
    ] = None,
    samples: Annotated[Path | None, typer.Option(help="A file of its data, for gate_mode ridge.")] = None,
    moved: Moved = None,
    as_json: AsJson = False,
    debug: Debug = False,
):
    """Add an expert to a mixture.

    Example: lexperts merge add mixture larger --source llama-biology
    """
    with command(as_json, debug) as show:
        import merge_tools

        from .merge_tables import summary_table

        options = {"source_model": source, "name": name, "positive_prompts": prompt, "samples": samples}
        expert = {key: value for key, value in options.items() if value is not None}
        result = merge_tools.add(folder, expert, out, sources=read_pairs("--moved", moved))
        show(result, summary_table, f"wrote {out}")


@app.command()
def remove(folder: Folder, out: Out, expert: Name, as_json: AsJson = False, debug: Debug = False):
    """Remove an expert from a mixture.

    Example: lexperts merge remove mixture smaller --expert medicine
    """
    with command(as_json, debug) as show:
        import merge_tools

        from .merge_tables import summary_table

        show(merge_tools.remove(folder, expert, out), summary_table, f"wrote {out}")


@app.command()
def extract(folder: Folder, out: Out, expert: Name, as_json: AsJson = False, debug: Debug = False):
    """Extract an expert as a dense model, with the shared weights of the mixture.

    Example: lexperts merge extract mixture dense --expert medicine
    """
    with command(as_json, debug) as show:
        import merge_tools

        show(merge_tools.extract(folder, expert, out), lambda _: f"wrote {out}")


@app.command()
def export(
    folder: Folder,
    out: Out,
    format: Annotated[str, typer.Option("--format", help="lexicon, gguf, or the family's class, such as mixtral.")],
    as_json: AsJson = False,
    debug: Debug = False,
):
    """Write a mixture in another format.

    Example: lexperts merge export mixture mixture.gguf --format gguf
    """
    with command(as_json, debug) as show:
        import merge_tools

        show(merge_tools.export(folder, out, format), lambda _: f"wrote {out}")


@app.command()
def tune(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A mixture that routes tokens, also of other tools.")],
    out: Out,
    domain: Domains,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 200,
    learning_rate: Annotated[float, typer.Option(min=0, max=1, help="Largest learning rate.")] = 1e-3,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows of text per step.")] = 8,
    max_length: Annotated[int, typer.Option(min=2, help="Tokens of a window; longer texts are split.")] = 256,
    holdout: Annotated[float, typer.Option(min=0, max=1, help="Share of each domain's texts to measure on.")] = 0.1,
    seed: Seed = 42,
    device: Device = None,
    as_json: AsJson = False,
    debug: Debug = False,
):
    """Train the gates of a mixture with frozen experts, and show perplexity per domain before and after.

    Example: lexperts merge tune mixture tuned --domain law=law.jsonl --domain medicine=medicine.jsonl
    """
    with command(as_json, debug) as show:
        import merge_tools

        from .merge_tables import tuning_table

        parse_device(device)
        options: dict = {"steps": steps, "learning_rate": learning_rate, "batch_size": batch_size, "seed": seed}
        options |= {"max_length": max_length, "holdout": holdout, "device": device}
        result = merge_tools.tune(folder, out, read_pairs("--domain", domain), **options)
        show(result, tuning_table, f"wrote {out}")


@app.command()
def evaluate(
    folder: Folder,
    domain: Domains,
    max_length: Annotated[int, typer.Option(min=2, help="Tokens of a window; longer texts are split.")] = 512,
    max_texts: Annotated[int, typer.Option(min=1, help="Texts of a domain, spread evenly over its file.")] = 200,
    moved: Moved = None,
    device: Device = None,
    as_json: AsJson = False,
    debug: Debug = False,
):
    """Show what a mixture keeps of what each of its experts has learned, and what it loses elsewhere.

    Example: lexperts merge evaluate mixture --domain law=law_test.jsonl --domain medicine=medicine_test.jsonl
    """
    with command(as_json, debug) as show:
        import merge_tools

        from .merge_tables import evaluation_table

        parse_device(device)
        options: dict = {"max_length": max_length, "max_texts": max_texts, "device": device}
        domains, sources = read_pairs("--domain", domain), read_pairs("--moved", moved)
        show(merge_tools.evaluate(folder, domains, sources=sources, **options), evaluation_table)


@app.command()
def route(
    folder: Folder,
    text: Annotated[list[str], typer.Option("--text", help="A text to route. Repeat.")],
    domain: Annotated[str | None, typer.Option(help="The expert to use, for a domain mixture without a gate.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
):
    """Show which experts are selected for each token, layer by layer.

    Example: lexperts merge route mixture --text "a dose of aspirin"
    """
    with command(as_json, debug) as show:
        import merge_tools

        from .merge_tables import routing_tables

        routings = merge_tools.route(folder, text, domain=domain)
        content = {"experts": routings[0].names, "texts": [routing.to_dict() for routing in routings]}
        show(content, lambda _: routing_tables(routings))


@app.command()
def cluster(
    data: Annotated[list[Path], typer.Argument(metavar="DATA", help="JSON Lines files, or folders of them.")],
    out: Out,
    k: Annotated[int, typer.Option("--clusters", "-k", min=1, help="Number of clusters.")] = 4,
    method: Annotated[str, typer.Option(help="balanced, kmeans, tfidf or random.")] = "balanced",
    embedder: Annotated[
        str | None, typer.Option(help="Name or folder of a sentence-transformers model, for balanced and kmeans.")
    ] = None,
    seed: Seed = 42,
    as_json: AsJson = False,
    debug: Debug = False,
):
    """Cluster definitions into domains, one per expert.

    Example: lexperts merge cluster train.jsonl clusters -k 4 --embedder sentence-transformers/all-MiniLM-L6-v2
    """
    with command(as_json, debug) as show:
        import merge_tools

        from .merge_tables import cluster_table

        show(
            merge_tools.cluster(data, out, k=k, method=method, embedder=embedder, seed=seed),
            cluster_table,
            f"wrote {out}",
        )


def main():
    """Runs the command."""
    run_app(app)
