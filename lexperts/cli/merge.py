"""`merge-experts`: the command line of `merge_tools`. Each command calls the function of the same name."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.text import Text
except ImportError as error:
    raise SystemExit("merge-experts needs typer and rich. Install them with: pip install 'lexperts[merge]'") from error

import merge_tools
from merge_tools import MergeError
from merge_tools.preflight import run_preflight
from merge_tools.recipe_values import ALLOWANCES
from merge_tools.shard_writer import SHARD_BYTES
from merge_tools.staging import partial_folder
from run_tools.claims import Claim
from run_tools.errors import expand_user

from . import merge_screen
from .common import AsJson, Debug, new_app, print_json, run_app
from .merge_on_texts import cluster, evaluate, route, tune
from .merge_options import Folder, Moved, Out, read_moved
from .merge_screen import Screen, progress_bars, screen

WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", "pytorch_model*")

app = new_app("merge-experts", "Merge independently fine-tuned models into one sparse checkpoint, and edit the result.")

Config = Annotated[Path, typer.Argument(metavar="CONFIG.yml", help="The recipe: experts, base_model, gate_mode, ...")]
Name = Annotated[str, typer.Option("--expert", help="The expert's name, as shown by `inspect`.")]
ALLOWED = "; ".join(f"{name} ({text})" for name, text in ALLOWANCES.items())
Allow = Annotated[list[str] | None, typer.Option(help=f"Accept a difference: {ALLOWED}.")]
Recompose = Annotated[
    bool, typer.Option("--recompose", help="Compose again from all sources, with new averages of the shared weights.")
]


def let_threads_sleep():
    """Lets PyTorch's idle threads sleep instead of spin: with the few texts of gates they mostly wait for each other.

    Without effect if PyTorch is imported already, or if the user has set the variable.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@app.command()
def compose(
    config: Config,
    out: Out,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be written, without writing it.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False,
    allow: Allow = None,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Trust the disks: sources are not hashed or scanned for NaN. Faster.")
    ] = False,
    sha256: Annotated[
        bool, typer.Option("--sha256", help="Record the SHA-256 of every source file, besides the faster XXH3.")
    ] = False,
    shard_size: Annotated[
        float, typer.Option(min=0.001, max=1e6, help="Maximum size of a weights file in GB.")
    ] = SHARD_BYTES / 1e9,
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
    with screen(as_json, debug, out, resumable=True) as view:
        let_threads_sleep()
        if dry_run:
            return show_plan(view, config, out, allow)
        partial = partial_folder(expand_user(out).resolve())
        if not resume and Claim.read(partial) is not None:
            view.report(
                f"the unfinished mixture in {partial} is written from scratch; --resume keeps what is complete.", "note"
            )
        with progress_bars(view) as progress:
            options = {"resume": resume, "allow": allow or None, "progress": progress}
            options |= {"verify": not no_verify, "sha256": sha256}
            result = merge_tools.compose(config, out, shard_bytes=int(shard_size * 1e9), **options)
        if push_to_hub:
            result["pushed_to"] = push(out, push_to_hub, private)
        view.warnings(result)
        view.result(result, lambda: merge_screen.render_summary(result))
        view.print(f"wrote {out}")
        if push_to_hub:
            view.print(f"pushed to {result['pushed_to']}")


def show_plan(view: Screen, config: Path, out: Path, allow: list[str] | None):
    """Prints the findings of the preflight and, without errors, the plan."""
    report, planned = run_preflight(config, out, allow=allow or None)
    plan = planned and planned.summary()
    view.result(report.to_dict() | ({"plan": plan} if plan else {}), lambda: merge_screen.render_findings(report))
    if not view.as_json:
        if plan:
            view.out.print(merge_screen.render_summary(plan))
        view.out.print(merge_screen.render_verdict(report))
    if not report.ok:
        raise typer.Exit(2)


def push(folder: Path, repository: str, private: bool) -> str:
    """Uploads a finished mixture and returns the repository's address. Raises a `MergeError` if the upload fails."""
    from huggingface_hub import HfApi

    try:
        url = HfApi().create_repo(repository, private=private, exist_ok=True)
        HfApi().upload_folder(
            repo_id=url.repo_id,
            folder_path=folder,
            commit_message="Upload mixture of experts",
            delete_patterns=list(WEIGHTS),  # otherwise readers would prefer the shards of an earlier upload
        )
    except Exception as error:  # HTTP errors, offline mode, permissions, ...
        message = " ".join(str(error).split())
        raise MergeError(
            f"{folder} is complete, but could not be pushed to {repository!r} ({type(error).__name__}: {message:.200}). "
            f"Log in with `hf auth login`, then run: hf upload {repository} {folder}"
        ) from error
    return str(url)


@app.command()
def check(
    config: Config,
    out: Annotated[
        Path | None, typer.Argument(metavar="[OUT]", help="An output folder, to check its path and the disk space.")
    ] = None,
    deep: Annotated[bool, typer.Option("--deep", help="Scan every element for NaN and infinity.")] = False,
    allow: Allow = None,
    as_json: AsJson = False,
    debug: Debug = False,
):
    """Check a recipe and its experts without writing anything.

    Example: lexperts merge check recipe.yml mixture --deep
    """
    with screen(as_json, debug) as view:
        report = merge_tools.check(config, out, deep=deep, allow=allow or None)
        view.result(report.to_dict(), lambda: merge_screen.render_findings(report))
        if not as_json:
            view.out.print(merge_screen.render_verdict(report))
        if not report.ok:
            raise typer.Exit(2)


@app.command()
def inspect(folder: Folder, as_json: AsJson = False, debug: Debug = False):
    """Show the experts, parameters and gates of a mixture.

    Example: lexperts merge inspect mixture
    """
    with screen(as_json, debug) as view:
        facts = merge_tools.inspect(folder)
        view.result(facts, lambda: merge_screen.render_mixture(facts))


@app.command()
def verify(
    folder: Folder,
    moved: Moved = None,
    sha256: Annotated[bool, typer.Option("--sha256", help="Also show the SHA-256 of every source file.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
):
    """Compare a mixture with its sources and its record: every tensor byte by byte, config.json, the tokenizer's files.

    Exit status 1 if something differs.

    Example: lexperts merge verify mixture --moved law=models/llama-law
    """
    with screen(as_json, debug) as view:
        with progress_bars(view) as progress:
            result = merge_tools.verify(folder, sources=read_moved(moved), sha256=sha256, progress=progress)
        if as_json:
            print_json(result)
        for name, files in result.get("files", {}).items():
            for file, digest in files.items():
                view.print(f"{name}: {file}: sha256 {digest}")
        for line in [*result["faults"], *result["notes"]]:
            view.print(line)
        counts, faults = result["compared"], len(result["faults"])
        verdict = f"{faults} difference{'s' * (faults > 1)}." if faults else "no differences."
        experts = (
            f"{counts['factors']} factors of experts" if "factors" in counts else f"{counts['experts']} expert tensors"
        )
        view.print(f"compared {experts}, {counts['shared']} shared tensors and {counts['gates']} gates: {verdict}")
        if not result["ok"]:
            raise typer.Exit(1)


def edit(view: Screen, out: Path, function: Callable[..., dict[str, Any]], *args, **options) -> dict[str, Any]:
    """Runs a function of `merge_tools` that writes a mixture or an expert, with progress bars, and prints its result."""
    with progress_bars(view) as progress:
        result = function(*args, **options, progress=progress)
    view.warnings(result)
    view.result(result, lambda: Text(f"wrote {out}"))
    return result


@app.command()
def add(
    folder: Folder,
    out: Out,
    source: Annotated[str, typer.Option("--source", metavar="PATH", help="Folder or Hub id of the new expert.")],
    name: Annotated[str | None, typer.Option(help="Name of the new expert. Default: the name of its folder.")] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="A text of its domain, for gates from texts; can be repeated.")
    ] = None,
    samples: Annotated[Path | None, typer.Option(help="A file of its data, for gate_mode centroid or ridge.")] = None,
    recompose: Recompose = False,
    allow: Allow = None,
    moved: Moved = None,
    as_json: AsJson = False,
    debug: Debug = False,
):
    """Add an expert to a mixture.

    Example: lexperts merge add mixture larger --source llama-biology
    """
    with screen(as_json, debug, out) as view:
        let_threads_sleep()
        options = {"source_model": source, "name": name, "positive_prompts": prompt, "samples": samples}
        flags = {"recompose": recompose, "allow": allow or (), "sources": read_moved(moved)}
        edit(view, out, merge_tools.add, folder, options, out, **flags)


@app.command()
def remove(
    folder: Folder,
    out: Out,
    expert: Name,
    recompose: Recompose = False,
    moved: Moved = None,
    as_json: AsJson = False,
    debug: Debug = False,
):
    """Remove an expert from a mixture.

    Example: lexperts merge remove mixture smaller --expert medicine
    """
    with screen(as_json, debug, out) as view:
        let_threads_sleep()
        flags = {"recompose": recompose, "sources": read_moved(moved)}
        edit(view, out, merge_tools.remove, folder, expert, out, **flags)


@app.command()
def extract(folder: Folder, out: Out, expert: Name, moved: Moved = None, as_json: AsJson = False, debug: Debug = False):
    """Extract an expert as a dense model.

    Example: lexperts merge extract mixture dense --expert medicine
    """
    with screen(as_json, debug, out) as view:
        result = edit(view, out, merge_tools.extract, folder, expert, out, sources=read_moved(moved))
        view.print(format_shared_diff(result["shared"]))


def format_shared_diff(shared: dict[str, Any]) -> str:
    """How the extracted shared weights compare with the expert's own."""
    if not shared["compared"]:
        return f"The shared weights were not compared with its source: {shared['why']}"
    if shared["equal"]:
        return "All weights equal those of its source."
    return (
        f"The routed weights equal those of its source; {shared['differing']} of {shared['tensors']} shared tensors "
        f"differ, by at most {shared['largest']:.3g}."
    )


@app.command()
def export(
    folder: Folder,
    out: Out,
    format: Annotated[
        str | None,
        typer.Option("--format", help="lexicon, gguf, or the family's class of transformers, such as mixtral."),
    ] = None,
    converter: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="For gguf: llama.cpp's convert_hf_to_gguf.py, to be run instead of the package gguf. Default: the "
            "environment variable LLAMA_CPP_CONVERTER.",
        ),
    ] = None,
    quantize: Annotated[
        str | None, typer.Option(metavar="q8_0", help="For gguf: weights of 8 bits. Default: their dtype.")
    ] = None,
    from_mergekit: Annotated[
        bool, typer.Option("--from-mergekit", help="DIR is a mixture of mergekit 0.1.5: split its fused experts.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
):
    """Write a mixture in another format, or one of mergekit with the tensor names that engines read.

    Example: lexperts merge export mixture mixture.gguf --format gguf
    """
    with screen(as_json, debug, out) as view:
        if (format is None) != from_mergekit:
            raise MergeError("Give either --format or --from-mergekit.")
        if from_mergekit:
            edit(view, out, merge_tools.split_fused_experts, folder, out)
        else:
            edit(view, out, merge_tools.export, folder, out, format, converter=converter, quantize=quantize)


app.command()(tune)
app.command()(evaluate)
app.command()(route)
app.command()(cluster)


def main():
    """Runs the command."""
    run_app(app)
