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
from merge_tools.clustering.pipeline import EMBEDDED, METHODS
from merge_tools.evaluation import MAX_TEXTS, plot_losses
from merge_tools.preflight import run_preflight
from merge_tools.recipe_values import ALLOWANCES
from merge_tools.shard_writer import SHARD_BYTES
from run_tools.errors import repr_path, short_repr
from run_tools.option_paths import check_new_file, check_new_folder

from . import merge_screen
from .common import AsJson, Debug, Device, Seed, new_app, print_json, run_app
from .merge_screen import Screen, progress_bars, screen

WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", "pytorch_model*")

app = new_app("merge-experts", "Merge independently fine-tuned models into one sparse checkpoint, and edit the result.")

Config = Annotated[Path, typer.Argument(metavar="CONFIG.yml", help="The recipe: experts, base_model, gate_mode, ...")]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A mixture written by merge-experts.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The output folder, which must not exist or be empty.")]
Name = Annotated[str, typer.Option("--expert", help="The expert's name, as shown by `inspect`.")]
ALLOWED = "; ".join(f"{name} ({text})" for name, text in ALLOWANCES.items())
Allow = Annotated[list[str] | None, typer.Option(help=f"Accept a difference: {ALLOWED}.")]
Recompose = Annotated[
    bool, typer.Option("--recompose", help="Compose again from all sources, with new averages of the shared weights.")
]
Moved = Annotated[
    list[str] | None,
    typer.Option(
        "--moved", metavar="NAME=FOLDER", help="Where an expert (or `base`) is now, if it was moved; can be repeated."
    ),
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


def read_pairs(option: str, pairs: list[str] | None, example: str) -> dict[str, str]:
    """`["law=models/law"]` -> `{"law": "models/law"}`."""
    read = {}
    for pair in pairs or []:
        name, _, value = (part.strip() for part in pair.partition("="))
        if not (name and value):
            raise MergeError(
                f"{option} {short_repr(pair)} is not {example.split()[0]}. Example: {option} {example.split()[1]}"
            )
        if name in read:
            raise MergeError(f"Two values of {option} have the name {short_repr(name)}. Give each another name.")
        read[name] = value
    return read


def read_moved(pairs: list[str] | None) -> dict[str, str]:
    """Name of a source -> where it is now."""
    return read_pairs("--moved", pairs, "NAME=FOLDER law=models/law")


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


@app.command()
def tune(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A mixture that routes tokens, also of other tools.")],
    out: Out,
    domain: Annotated[
        list[str],
        typer.Option(metavar="NAME=FILE", help="Texts of a domain: .jsonl with text, or .txt. Repeat for each domain."),
    ],
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 200,
    learning_rate: Annotated[float, typer.Option(min=0, max=1, help="Largest learning rate of AdamW.")] = 1e-3,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows of text per step.")] = 8,
    max_length: Annotated[int, typer.Option(min=2, help="Tokens of a window; longer texts are cut.")] = 256,
    holdout: Annotated[
        float, typer.Option(min=0, max=1, help="Share of each domain's texts that perplexity is measured on.")
    ] = 0.1,
    seed: Seed = 42,
    device: Device = None,
    as_json: AsJson = False,
    debug: Debug = False,
):
    """Train the gates of a mixture with frozen experts, and show perplexity per domain before and after.

    Example: lexperts merge tune mixture tuned --domain law=law.jsonl --domain medicine=medicine.jsonl
    """
    with screen(as_json, debug, out) as view:
        from run_tools.model_options import parse_device

        check_new_folder("OUT", out)
        domains = read_pairs("--domain", domain, "NAME=FILE law=law.jsonl")
        options: dict = {"steps": steps, "learning_rate": learning_rate, "batch_size": batch_size, "seed": seed}
        options |= {"max_length": max_length, "holdout": holdout, "device": device}
        if device:
            parse_device(device)

        def on_step(step: int, loss: float):
            if step % max(steps // 10, 1) == 0:
                view.log("step", "cyan", f"{step} of {steps}, loss {loss:.3f}")

        result = merge_tools.tune(folder, out, domains, **options, on_step=on_step)
        view.warnings(result)
        view.result(result, lambda: merge_screen.render_tuning(result))
        view.print(f"wrote {out}")


@app.command()
def evaluate(
    folder: Folder,
    domain: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=FILE",
            help="Held-out texts of a domain: .jsonl with text, or .txt. NAME is that of its expert, or of no expert. Repeat.",
        ),
    ],
    max_length: Annotated[int, typer.Option(min=2, help="Tokens of a window; longer texts are split.")] = 512,
    max_texts: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="At most N texts per domain, spread evenly over its file. The base, each expert and the mixture read them all: "
            "the time grows with N and with the number of experts.",
        ),
    ] = MAX_TEXTS,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw the losses there.")] = None,
    card: Annotated[bool, typer.Option("--card", help="Write the losses into the mixture's README.md.")] = False,
    moved: Moved = None,
    device: Device = None,
    as_json: AsJson = False,
    debug: Debug = False,
):
    """Show what a mixture keeps of what each of its experts has learned, and what it loses elsewhere.

    Example: lexperts merge evaluate mixture --domain law=law_test.jsonl --domain medicine=medicine_test.jsonl
    """
    with screen(as_json, debug) as view:
        from run_tools.model_options import parse_device

        domains = read_pairs("--domain", domain, "NAME=FILE law=law.jsonl")
        if plot:
            check_new_file("--plot", plot)
        if device:
            parse_device(device)
        options: dict = {"max_length": max_length, "max_texts": max_texts, "sources": read_moved(moved)}
        options |= {"device": device, "card": card}
        result = merge_tools.evaluate(
            folder, domains, **options, on_model=lambda name: view.log("losses", "cyan", f"of {name}")
        )
        if plot:
            plot_losses(result, plot)
        view.result(result, lambda: merge_screen.render_evaluation(result))
        if plot:
            view.print(f"wrote {plot}")


@app.command()
def route(
    folder: Folder,
    text: Annotated[list[str], typer.Option("--text", help="A text to route; can be repeated.")],
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Write a heat map there.")] = None,
    domain: Annotated[str | None, typer.Option(help="The expert to use, for a domain mixture without a gate.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
):
    """Show which experts are selected for each token, layer by layer.

    Example: lexperts merge route mixture --text "a dose of aspirin" --plot heat.png
    """
    with screen(as_json, debug) as view:
        if plot:
            check_new_file("--plot", plot)
        routings = merge_tools.route(folder, text, domain=domain)
        if plot:
            merge_tools.plot(routings, plot)
        content = {"experts": routings[0].names, "texts": [routing.to_dict() for routing in routings]}
        view.result(content, lambda: merge_screen.render_routings(routings))
        if plot:
            view.print(f"wrote {plot}")


@app.command()
def cluster(
    data: Annotated[list[Path], typer.Argument(metavar="DATA", help="JSON Lines files, or folders of them.")],
    out: Out,
    k: Annotated[int, typer.Option("--clusters", "-k", min=1, help="Number of clusters.")] = 4,
    method: Annotated[str, typer.Option(help="Clustering method: " + ", ".join(METHODS) + ".")] = "balanced",
    embedder: Annotated[
        str | None, typer.Option(help="Name or folder of a sentence-transformers model, needed by balanced and kmeans.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the embedder to save with the centroids.")] = None,
    embedded: Annotated[str, typer.Option(help="Text to embed: " + " or ".join(EMBEDDED) + ".")] = "prompt",
    cache: Annotated[Path | None, typer.Option(help="Folder that stores embeddings.")] = None,
    seed: Seed = 42,
    plot: Annotated[bool, typer.Option(help="Draw clusters.png.")] = True,
    as_json: AsJson = False,
    debug: Debug = False,
):
    """Cluster definitions into domains, one per expert.

    Example: lexperts merge cluster train.jsonl clusters -k 4 --embedder sentence-transformers/all-MiniLM-L6-v2
    """
    with screen(as_json, debug) as view:
        check_new_folder("OUT", out)
        if cache:
            check_new_folder("--cache", cache)
        for path in data:
            if not path.exists():
                raise MergeError(f"DATA {repr_path(path)} does not exist. Give a JSON Lines file, or a folder of them.")
        options: dict = {"k": k, "method": method, "embedder": embedder, "name": name, "embedded": embedded}
        result = merge_tools.cluster(data, out, **options, cache=cache, seed=seed, plot=plot)
        view.result(result, lambda: merge_screen.render_clusters(result))
        view.print(f"wrote {out}")


def main():
    """Runs the command."""
    run_app(app)
