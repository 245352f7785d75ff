"""`lexperts merge`: each command calls the function of `merge_tools` of the same name."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from run_tools.errors import UserError, one_line, print_error, short_repr

from . import merge_tables as tables
from .common import AsJson, Count, Device, Seed, new_app, print_result, run_app

app = new_app("merge-experts", "Merge fine-tuned models into one mixture of experts.")

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A mixture written by `lexperts merge`.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The output folder, which must not exist or be empty.")]
Name = Annotated[str, typer.Option("--expert", help="The expert's name, as shown by `inspect`.")]
Moved = Annotated[list[str] | None, typer.Option(metavar="NAME=FOLDER", help="Where an expert or base is now. Repeat.")]
Format = Annotated[str, typer.Option(help="lexicon, gguf, or the family's class, such as mixtral.")]
Domains = Annotated[list[str], typer.Option(metavar="NAME=FILE", help="Texts of a domain, .jsonl or .txt. Repeat.")]


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


def tools():
    """`merge_tools`, which imports torch. Transformers' progress bars are, like our own, only for terminals."""
    import merge_tools

    if not sys.stderr.isatty():
        import_module("transformers.utils.logging").disable_progress_bar()
    return merge_tools


def show(as_json: bool, result: dict[str, Any], text: str) -> None:
    """Prints a result as JSON, or its text; its warnings and notes to the standard error."""
    for level in ("warnings", "notes"):
        for line in result.get(level, []):
            print_error(line, level[:-1])
    print_result(result, as_json, text)


@app.command()
def compose(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yml", help="The recipe: experts, base_model, ...")],
    out: Out,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, and write nothing.")] = False,
    push_to_hub: Annotated[str | None, typer.Option(metavar="REPO", help="Upload it to this repository.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Create the repository as a private one.")] = False,
    as_json: AsJson = False,
):
    """Merge the experts of a recipe into one mixture.

    Example: lexperts merge compose recipe.yml mixture
    """
    result = tools().compose(config, out, dry_run=dry_run)
    if push_to_hub and not dry_run:
        result["pushed_to"] = push(out, push_to_hub, private)
    show(as_json, result, f"{tables.summary(result)}\n{'nothing was written.' if dry_run else f'wrote {out}'}")


def push(folder: Path, repository: str, private: bool) -> str:
    """Uploads a finished mixture and returns the repository's address. Raises a `UserError` if the upload fails."""
    from huggingface_hub import HfApi

    try:
        url = HfApi().create_repo(repository, private=private, exist_ok=True)
        # the shards of an earlier upload, which readers would prefer; states of the user's texts
        patterns: dict = {"delete_patterns": ["model*.safetensors*"], "ignore_patterns": ["gate_statistics/*"]}
        HfApi().upload_folder(repo_id=url.repo_id, folder_path=folder, **patterns)
    except Exception as error:  # HTTP errors, offline mode, permissions, ...
        again = f"Log in with `hf auth login`, then run: hf upload {repository} {folder} --exclude 'gate_statistics/*'"
        raise UserError(f"{folder} is complete, but was not pushed ({one_line(error):.200}). {again}") from error
    return str(url)


@app.command()
def inspect(folder: Folder, as_json: AsJson = False):
    """Show the experts, sizes and gates of a mixture.

    Example: lexperts merge inspect mixture
    """
    result = tools().inspect(folder)
    show(as_json, result, tables.mixture(result))


@app.command()
def verify(folder: Folder, moved: Moved = None, as_json: AsJson = False):
    """Compare a mixture with its sources. It reads the record: every tensor, config.json, the tokenizer's files.

    Exit status 1 if something differs.

    Example: lexperts merge verify mixture --moved law=models/llama-law
    """
    result = tools().verify(folder, sources=read_pairs("--moved", moved))
    counts = ", ".join(f"{count} {group}" for group, count in result["compared"].items())
    line = f"compared {counts}: {len(result['faults']) or 'no'} differences."
    show(as_json, result, "\n".join([line, *result["faults"]]))
    if not result["ok"]:
        raise typer.Exit(1)


@app.command()
def add(
    folder: Folder,
    out: Out,
    source: Annotated[str, typer.Option("--source", metavar="PATH", help="Folder or Hub id of the new expert.")],
    name: Annotated[str | None, typer.Option(help="Name of the new expert. Default: the name of its folder.")] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A text of its domain, for prompted gates. Repeat.")] = None,
    samples: Annotated[Path | None, typer.Option(help="A file of its data, for gate_mode ridge.")] = None,
    moved: Moved = None,
    as_json: AsJson = False,
):
    """Add an expert to a mixture.

    Example: lexperts merge add mixture larger --source llama-biology --prompt "Cells divide by mitosis."
    """
    options = {"source_model": source, "name": name, "positive_prompts": prompt, "samples": samples}
    expert = {key: value for key, value in options.items() if value is not None}
    result = tools().add(folder, expert, out, sources=read_pairs("--moved", moved))
    show(as_json, result, f"{tables.summary(result)}\nwrote {out}")


@app.command()
def remove(folder: Folder, out: Out, expert: Name, as_json: AsJson = False):
    """Remove an expert from a mixture.

    Example: lexperts merge remove mixture smaller --expert medicine
    """
    result = tools().remove(folder, expert, out)
    show(as_json, result, f"{tables.summary(result)}\nwrote {out}")


@app.command()
def extract(folder: Folder, out: Out, expert: Name, as_json: AsJson = False):
    """Extract an expert as a dense model. It has the shared weights of the mixture.

    Example: lexperts merge extract mixture dense --expert medicine
    """
    show(as_json, tools().extract(folder, expert, out), f"wrote {out}")


@app.command()
def export(folder: Folder, out: Out, format: Format, as_json: AsJson = False):
    """Write a mixture in another format.

    Example: lexperts merge export mixture mixture.gguf --format gguf
    """
    show(as_json, tools().export(folder, out, format), f"wrote {out}")


@app.command()
def tune(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A mixture that routes tokens, also of other tools.")],
    out: Out,
    domain: Domains,
    steps: Annotated[int, Count(help="Training steps.")] = 200,
    learning_rate: Annotated[float, typer.Option(min=0, max=1, help="Largest learning rate.")] = 1e-3,
    batch_size: Annotated[int, Count(help="Windows of text per step.")] = 8,
    seed: Seed = 42,
    device: Device = None,
    as_json: AsJson = False,
):
    """Train the gates of a mixture. Experts are frozen; perplexity per domain is shown before and after.

    Example: lexperts merge tune mixture tuned --domain law=law.jsonl --domain medicine=medicine.jsonl
    """
    options: dict = {"steps": steps, "learning_rate": learning_rate, "batch_size": batch_size}
    result = tools().tune(folder, out, read_pairs("--domain", domain), **options, seed=seed, device=device)
    show(as_json, result, f"{tables.tuning(result)}\nwrote {out}")


@app.command()
def evaluate(
    folder: Folder,
    domain: Domains,
    max_texts: Annotated[int, Count(help="Texts of a domain, spread evenly over its file.")] = 200,
    moved: Moved = None,
    device: Device = None,
    as_json: AsJson = False,
):
    """Show what a mixture keeps of each expert. It also shows what it loses elsewhere.

    Example: lexperts merge evaluate mixture --domain law=law_test.jsonl --domain medicine=medicine_test.jsonl
    """
    domains, sources = read_pairs("--domain", domain), read_pairs("--moved", moved)
    result = tools().evaluate(folder, domains, sources=sources, max_texts=max_texts, device=device)
    show(as_json, result, tables.evaluation(result))


@app.command()
def cluster(
    data: Annotated[list[Path], typer.Argument(metavar="DATA", help="JSON Lines files, or folders of them.")],
    out: Out,
    k: Annotated[int, typer.Option("--clusters", "-k", min=1, help="Number of clusters.")] = 4,
    method: Annotated[str, typer.Option(help="balanced, kmeans, tfidf or random.")] = "balanced",
    embedder: Annotated[str | None, typer.Option(help="A sentence-transformers model, its Hub id or folder.")] = None,
    seed: Seed = 42,
    as_json: AsJson = False,
):
    """Cluster definitions into domains, one per expert.

    Example: lexperts merge cluster train.jsonl clusters -k 4 --embedder sentence-transformers/all-MiniLM-L6-v2
    """
    result = tools().cluster(data, out, k=k, method=method, embedder=embedder, seed=seed)
    show(as_json, result, f"{tables.cluster(result)}\nwrote {out}")


def main():
    """Runs the command."""
    run_app(app)
