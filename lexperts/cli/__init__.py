"""The command `lexperts`, and its shortcuts `keyphrases` and `merge-experts`.

One file per group of commands. Each command imports what it needs when it runs, so that `--help` does not wait for torch.
"""


def build_app():
    """The command `lexperts` with all of its groups."""
    from . import app as demo_app
    from . import define, evaluate, keyphrases, merge, summarize, train
    from .common import new_app

    app = new_app("lexperts", "Start here: lexperts keyphrases show article.txt, or lexperts merge compose --help.")
    app.add_typer(keyphrases.app, name="keyphrases")
    app.add_typer(merge.app, name="merge")
    app.add_typer(define.app, name="define")
    app.command("summarize")(summarize.summarize)
    app.command("app")(demo_app.app)
    app.add_typer(train.app, name="train")
    app.command("evaluate")(evaluate.evaluate)
    return app


def main() -> None:
    """Runs the command line."""
    from .common import run_app

    run_app(build_app())
