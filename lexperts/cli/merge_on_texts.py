"""The commands of `lexperts merge` that read texts: tune, evaluate, route, cluster."""

from pathlib import Path
from typing import Annotated

import typer

import merge_tools
from merge_tools import MergeError
from merge_tools.cluster import METHODS
from merge_tools.evaluation import MAX_TEXTS, plot_losses
from run_tools.errors import repr_path
from run_tools.option_paths import check_new_file, check_new_folder

from . import merge_screen
from .common import AsJson, Debug, Device, Seed
from .merge_options import Folder, Moved, Out, read_moved, read_pairs
from .merge_screen import screen


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


def cluster(
    data: Annotated[list[Path], typer.Argument(metavar="DATA", help="JSON Lines files, or folders of them.")],
    out: Out,
    k: Annotated[int, typer.Option("--clusters", "-k", min=1, help="Number of clusters.")] = 4,
    method: Annotated[str, typer.Option(help="Clustering method: " + ", ".join(METHODS) + ".")] = "balanced",
    embedder: Annotated[
        str | None,
        typer.Option(help="Hub id or folder of a sentence-transformers model, or minilm; for balanced and kmeans."),
    ] = None,
    seed: Seed = 42,
    as_json: AsJson = False,
    debug: Debug = False,
):
    """Cluster definitions into domains, one per expert.

    Example: lexperts merge cluster train.jsonl clusters -k 4 --embedder sentence-transformers/all-MiniLM-L6-v2
    """
    with screen(as_json, debug) as view:
        check_new_folder("OUT", out)
        for path in data:
            if not path.exists():
                raise MergeError(f"DATA {repr_path(path)} does not exist. Give a JSON Lines file, or a folder of them.")
        result = merge_tools.cluster(data, out, k=k, method=method, embedder=embedder, seed=seed)
        view.result(result, lambda: merge_screen.render_clusters(result))
        view.print(f"wrote {out}")
