"""Shared parts of the commands: options, printed results, and one-line errors."""

import errno
import json
import sys
from collections.abc import Callable
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from .. import __version__

HELP = {"help_option_names": ["-h", "--help"]}
USER_ERRORS = (OSError, ValueError, TypeError, ImportError)
RUN_ERRORS = (*USER_ERRORS, RuntimeError)  # of runs over many documents, also in workers
Device = Annotated[str | None, typer.Option(help="Device, such as cuda:0; by default an accelerator if available.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code in the model's folder or repository. Read it first.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def new_app(name: str, help: str) -> typer.Typer:
    """A command, or a group of commands, with `--version`."""
    app = typer.Typer(
        name=name, help=help, no_args_is_help=True, pretty_exceptions_enable=False, context_settings=HELP,
        rich_markup_mode=None,
    )  # fmt: skip

    def show_version(value: bool):
        if value:
            print(f"{name} {__version__}")
            raise typer.Exit()

    @app.callback()
    def every_command(
        version: Annotated[
            bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
        ] = False,
    ):
        pass  # commands have their own options

    return app


def print_json(content: Any) -> None:
    """Prints a value as one line of JSON."""
    print(json.dumps(content, ensure_ascii=False))


def print_result(content: dict, as_json: bool, render: Callable[[], str]) -> None:
    """Prints a result as JSON, or as rendered text."""
    print_json(content) if as_json else print(render())


def print_error(message: str) -> None:
    """Prints an error to the standard error."""
    print(f"error: {message}", file=sys.stderr)


def format_error(error: Exception) -> str:
    """The message of an exception; errors of the operating system without their number."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    message = f"{error.strerror}{f': {error.filename}' if error.filename else ''}."
    return message + (" Free some disk space." if error.errno == errno.ENOSPC else "")


@contextmanager
def user_errors(
    debug: bool,
    report: Callable[[str], None] = print_error,
    *,
    errors: tuple[type[Exception], ...] = USER_ERRORS,
    format: Callable[[Exception], str] = str,
):
    """Reports the user's `errors` by `report(format(error))` and exits with status 2; with `debug` they are raised."""
    try:
        yield
    except errors as error:
        if debug:
            raise
        report(format(error))
        raise typer.Exit(2) from error
