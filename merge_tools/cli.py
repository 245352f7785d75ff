"""`merge-experts`: the command line of `merge_tools`. Every command has a twin of the same name in Python."""

import errno
import json
import os
import sys
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.text import Text
except ImportError as error:
    raise SystemExit("merge-experts needs typer and rich. Install them with: pip install lexperts[merge]") from error

from . import checks, clustering, composing, mixture, reports, routing, surgery
from .errors import MergeError
from .gates import make_gates
from .recipe import ALLOWANCES, unmeasured
from .records import own_version
from .writing import SHARD_BYTES, Progress

PIPE_WIDTH = 120  # columns where nobody's terminal says otherwise
WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", "pytorch_model*")

app = typer.Typer(
    name="merge-experts",
    help="Independently fine-tuned Llamas into one sparse checkpoint, and back.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Config = Annotated[Path, typer.Argument(metavar="CONFIG.yml", help="The recipe: experts, base_model, gate_mode, ...")]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A mixture made by merge-experts.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write, which must be free.")]
Name = Annotated[str, typer.Option("--expert", help="The expert's name, as `inspect` shows it.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, for scripts.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of a refusal.")]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        help="Accept a difference: " + "; ".join(f"{name} ({text})" for name, text in ALLOWANCES.items()) + "."
    ),
]
Reaverage = Annotated[bool, typer.Option("--reaverage", help="Read all sources again and average afresh.")]
LowMemory = Annotated[
    bool, typer.Option("--low-memory", help="Measure gates with one layer of the base model in memory at a time.")
]


def show_version(value: bool):
    if value:
        print(f"merge-experts {own_version()}")
        raise typer.Exit()


@app.callback()
def every_command(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
):
    pass  # commands have their own options


@dataclass
class Screen:
    """Results go to the standard output, bars and messages to the standard error."""

    as_json: bool
    out: Console
    err: Console

    def show(self, content: dict[str, Any], drawn: Callable[[], Any]):
        if self.as_json:
            print(json.dumps(content, ensure_ascii=False))
        else:
            content = drawn()
            self.out.print(content, soft_wrap=isinstance(content, Text))

    def say(self, text: str):
        if not self.as_json:
            self.out.print(Text(text), soft_wrap=True)

    def warn(self, done: dict[str, Any]):
        """What was done with warnings: on the standard error, also beside JSON."""
        self.tell("warning", "yellow", "\n".join(done.get("warnings", [])))

    def tell(self, kind: str, colour: str, text: str):
        """One line a message, however wide."""
        for line in text.splitlines():
            self.err.print(Text.assemble((f"{kind}: ", colour), line), soft_wrap=True)


@contextmanager
def screen(as_json: bool, debug: bool, out: Path | None = None, resumable: bool = False):
    """Runs a command: what the caller can mend ends with a line for each fault and exit code 2."""
    wide = None if sys.stdout.isatty() else int(os.environ.get("COLUMNS") or PIPE_WIDTH)
    view = Screen(as_json, Console(width=wide), Console(stderr=True))
    try:
        yield view
    except (MergeError, OSError, ImportError) as error:
        if debug:
            raise
        message = in_words(error)
        if as_json:
            print(json.dumps({"error": message}, ensure_ascii=False))
        view.tell("error", "red", message)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        view.tell("interrupted", "yellow", after_interruption(out, resumable))
        raise typer.Exit(130) from None


def in_words(error: Exception) -> str:
    if not isinstance(error, OSError):
        return str(error)
    words = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}."
    return words + (" Make room, then go on with --resume." if error.errno == errno.ENOSPC else "")


def after_interruption(out: Path | None, resumable: bool) -> str:
    if out is None:
        return "nothing was written."
    place = out.expanduser().resolve()
    if place.is_dir() and any(place.iterdir()):
        return f"{out} is written and whole."
    partial = place.parent / f".{place.name}.partial"
    begun = f" What was begun lies in {partial}: {'go on with --resume, or ' * resumable}remove it."
    return f"nothing stands at {out}.{begun if partial.is_dir() else ''}"


def bars(view: Screen):
    """Bars where somebody looks, silence where a script reads."""
    return reports.ProgressBars(view.err) if view.err.is_terminal else nullcontext(Progress())


@app.command()
def compose(
    config: Config,
    out: Out,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be written, and write nothing.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted run stopped.")] = False,
    low_memory: LowMemory = False,
    allow: Allow = None,
    shard_size: Annotated[float, typer.Option(help="Largest file, in GB.")] = SHARD_BYTES / 1e9,
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="REPO", help="Then upload the result to this repository.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make that repository a private one.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
):
    """Write one mixture from the experts of a recipe."""
    with screen(as_json, debug, out, resumable=True) as view:
        if not 0.001 <= shard_size <= 1e6:
            raise MergeError(f"--shard-size {shard_size:g} is no size of a file. Give it in GB, 0.001 or more.")
        if dry_run:
            return show_plan(view, config, out, allow)
        with bars(view) as progress:
            done = composing.compose(
                config,
                out,
                resume=resume,
                low_memory=low_memory,
                allow=allow or None,
                shard_bytes=int(shard_size * 1e9),
                progress=progress,
            )
        if push_to_hub:
            done["pushed_to"] = push(out, push_to_hub, private)
        view.warn(done)
        view.show(done, lambda: reports.summary(done))
        view.say(f"wrote {out}")
        if push_to_hub:
            view.say(f"pushed to {done['pushed_to']}")


def show_plan(view: Screen, config: Path, out: Path, allow: list[str] | None):
    report = checks.check(config, out, allow=allow or None)
    plan = composing.planned(report, make_gates(unmeasured(report.recipe), report.base)) if report.ok else None
    view.show(report.to_dict() | ({"plan": plan.summary()} if plan else {}), lambda: reports.findings(report))
    if not view.as_json:
        if plan:
            view.out.print(reports.summary(plan.summary()))
        view.out.print(reports.verdict(report))
    if not report.ok:
        raise typer.Exit(2)


def push(folder: Path, repository: str, private: bool) -> str:
    """Uploads a finished mixture -> the repository's address."""
    from huggingface_hub import HfApi

    try:
        place = HfApi().create_repo(repository, private=private, exist_ok=True)
        HfApi().upload_folder(
            repo_id=place.repo_id,
            folder_path=folder,
            commit_message="A mixture of experts",
            delete_patterns=list(WEIGHTS),  # shards of an earlier push beside the new ones would be read first
        )
    except Exception as error:  # what a client may raise is beyond listing: HTTP, offline, rights
        why = " ".join(str(error).split())
        raise MergeError(
            f"{folder} is written and whole, but could not be pushed to {repository!r} ({type(error).__name__}: "
            f"{why:.200}). Log in with `hf auth login`, then: hf upload {repository} {folder}"
        ) from error
    return str(place)


@app.command()
def check(
    config: Config,
    out: Annotated[
        Path | None, typer.Argument(metavar="[OUT]", help="Look at this place too, and the free disk.")
    ] = None,
    deep: Annotated[bool, typer.Option("--deep", help="Look for NaN and infinities in every element.")] = False,
    allow: Allow = None,
    as_json: AsJson = False,
    debug: Debug = False,
):
    """Look at everything a merge needs, and write nothing."""
    with screen(as_json, debug) as view:
        report = checks.check(config, out, deep=deep, allow=allow or None)
        view.show(report.to_dict(), lambda: reports.findings(report))
        if not as_json:
            view.out.print(reports.verdict(report))
        if not report.ok:
            raise typer.Exit(2)


@app.command()
def inspect(folder: Folder, as_json: AsJson = False, debug: Debug = False):
    """Show what a mixture is made of."""
    with screen(as_json, debug) as view:
        facts = mixture.inspect(folder)
        view.show(facts, lambda: reports.mixture(facts))


@app.command()
def verify(folder: Folder, as_json: AsJson = False, debug: Debug = False):
    """Hold a mixture against its sources, byte by byte."""
    with screen(as_json, debug) as view:
        with bars(view) as progress:
            found = mixture.verify(folder, progress=progress)
        if as_json:
            print(json.dumps(found, ensure_ascii=False))
        for line in [*found["faults"], *found["notes"]]:
            view.say(line)
        counts, faults = found["compared"], len(found["faults"])
        verdict = f"{faults} fault{'s' * (faults > 1)}." if faults else "all as they should be."
        view.say(
            f"{counts['experts']} expert tensors, {counts['shared']} shared, {counts['gates']} gates compared: {verdict}"
        )
        if not found["ok"]:
            raise typer.Exit(1)


@app.command()
def add(
    folder: Folder,
    out: Out,
    expert: Annotated[str, typer.Option("--expert", metavar="PATH", help="Folder or Hub id of the new expert.")],
    name: Annotated[str, typer.Option(help="Its name; default the folder's.")] = "",
    prompt: Annotated[list[str] | None, typer.Option(help="A text that belongs to it, for gates from texts.")] = None,
    samples: Annotated[Path | None, typer.Option(help="Its samples, for gates of centroids.")] = None,
    reaverage: Reaverage = False,
    low_memory: LowMemory = False,
    allow: Allow = None,
    as_json: AsJson = False,
    debug: Debug = False,
):
    """Add an expert to a mixture."""
    with screen(as_json, debug, out) as view:
        given = {"source_model": expert, "name": name or None, "positive_prompts": prompt, "samples": samples}
        with bars(view) as progress:
            done = surgery.add(
                folder, given, out, reaverage=reaverage, low_memory=low_memory, allow=allow or (), progress=progress
            )
        view.warn(done)
        view.show(done, lambda: Text(f"wrote {out}"))


@app.command()
def remove(
    folder: Folder,
    out: Out,
    expert: Name,
    reaverage: Reaverage = False,
    low_memory: LowMemory = False,
    as_json: AsJson = False,
    debug: Debug = False,
):
    """Remove an expert from a mixture."""
    with screen(as_json, debug, out) as view:
        with bars(view) as progress:
            done = surgery.remove(folder, expert, out, reaverage=reaverage, low_memory=low_memory, progress=progress)
        view.warn(done)
        view.show(done, lambda: Text(f"wrote {out}"))


@app.command()
def extract(folder: Folder, out: Out, expert: Name, as_json: AsJson = False, debug: Debug = False):
    """Take one expert out as a dense Llama."""
    with screen(as_json, debug, out) as view:
        with bars(view) as progress:
            done = surgery.extract(folder, expert, out, progress=progress)
        view.warn(done)
        view.show(done, lambda: Text(f"wrote {out}"))
        view.say(shared_in_words(done["shared"]))


def shared_in_words(shared: dict[str, Any]) -> str:
    if not shared["compared"]:
        return f"Its source is not there to compare with: {shared['why']}"
    if shared["equal"]:
        return "Exactly the expert: its shared weights are those of the mixture."
    return (
        f"Its routed weights are the expert's to the byte; of the {shared['tensors']} shared tensors {shared['differing']} "
        f"differ from its own, by at most {shared['largest']:.3g}."
    )


@app.command()
def export(
    folder: Folder,
    out: Out,
    format: Annotated[str, typer.Option("--format", help="mixtral or lexicon")],
    as_json: AsJson = False,
    debug: Debug = False,
):
    """Write the same weights for another class."""
    with screen(as_json, debug, out) as view:
        with bars(view) as progress:
            done = surgery.export(folder, out, format, progress=progress)
        view.warn(done)
        view.show(done, lambda: Text(f"wrote {out}"))


@app.command()
def route(
    folder: Folder,
    text: Annotated[list[str], typer.Option("--text", help="A text to read; may be given several times.")],
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw the heat map to this file.")
    ] = None,
    domain: Annotated[str | None, typer.Option(help="The expert, for a domain mixture without a gate.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
):
    """Show which expert takes which token, layer by layer."""
    with screen(as_json, debug) as view:
        found = routing.route(folder, text, domain=domain)
        if plot:
            routing.plot(found, plot)
        view.show({"experts": found[0].names, "texts": [r.to_dict() for r in found]}, lambda: reports.routings(found))
        if plot:
            view.say(f"wrote {plot}")


@app.command()
def cluster(
    data: Annotated[
        list[Path], typer.Argument(metavar="DATA... OUT", help="JSON Lines or folders of them; then a free folder.")
    ],
    k: Annotated[int, typer.Option("--clusters", "-k", help="How many.")] = 4,
    method: Annotated[str, typer.Option(help=", ".join(clustering.METHODS))] = "balanced",
    embedder: Annotated[
        str | None, typer.Option(help="A sentence-transformers name or folder; balanced and kmeans need one.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The embedder's name, as it is saved with the centroids.")] = None,
    embedded: Annotated[str, typer.Option(help=" or ".join(clustering.EMBEDDED))] = "prompt",
    cache: Annotated[Path | None, typer.Option(help="A folder that keeps embeddings.")] = None,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 42,
    plot: Annotated[bool, typer.Option(help="Draw clusters.png.")] = True,
    as_json: AsJson = False,
    debug: Debug = False,
):
    """Split definitions into domains, one an expert."""
    *sources, out = data
    with screen(as_json, debug) as view:
        if not sources:
            raise MergeError(f"There is one path, {out}: pass the data, then the folder to write.")
        options = {"k": k, "method": method, "embedder": embedder, "name": name, "embedded": embedded}
        found = clustering.cluster(sources, out, **options, cache=cache, seed=seed, plot=plot)
        view.show(found, lambda: reports.clusters(found))
        view.say(f"wrote {out}")


def main():
    app()


if __name__ == "__main__":
    sys.exit(main())
