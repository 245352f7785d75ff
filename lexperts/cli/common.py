"""Shared parts of the commands: options, their checks, and printed results."""

import json
import re
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

import run_tools
from run_tools.errors import DEBUG, REPEAT, RESUME, escape, print_error, short_repr, user_errors
from run_tools.option_values import LARGEST_SEED, find_problem
from run_tools.processes import limit_spinning

from .. import __version__

__all__ = ["REPEAT", "RESUME", "print_error", "user_errors"]
INVALID = "Invalid value for "  # of typer
OURS = re.compile(re.escape(str(Path(run_tools.__file__).parents[1])) + r"\W(lexperts|\w+_tools|modeling_\w+)\W")
# --best_of is --best-of, in every sub-command
HELP = {"help_option_names": ["-h", "--help"], "token_normalize_func": lambda name: name.replace("_", "-")}
Device = Annotated[str | None, typer.Option(help="Device, such as cuda:0; by default an accelerator if available.")]
Seed = Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Random seed.")]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"],
    typer.Option(help="Data type of the weights: float32, bfloat16 or float16."),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help="Folder or Hub id of a token classifier, or tiny; by default lexperts-seke-minilm."
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code in the model's folder or repository. Read it first.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


class CheckedCommand(TyperCommand):
    """A command that refuses values which typer lets pass: NaN, numbers that are too large, empty texts, control characters."""

    def parse_args(self, ctx, args):
        """Checks the texts as they were typed: an empty path would become the current folder."""
        texts, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        check_values(self, ctx, {name: value for name, value in texts.items() if isinstance(value, (str, list, tuple))})
        return super().parse_args(ctx, args)

    def invoke(self, ctx):
        """Checks the numbers, then runs the command."""
        check_values(self, ctx, ctx.params)
        return super().invoke(ctx)


def check_values(command, ctx, values: dict) -> None:
    """Raises a `BadParameter` for a value that is not valid whatever the option."""
    for param in command.params:
        given = values.get(param.name)
        for value in given if isinstance(given, (list, tuple)) else [given]:
            if isinstance(value, (str, int, float)) and value != param.default and (problem := find_problem(value)):
                if param.required and value == "":
                    problem = "is empty. Give a value."
                raise typer.BadParameter(f"{short_repr(value)} {problem}", ctx=ctx, param=param)


class OneLineGroup(TyperGroup):
    """A group of commands whose errors of usage are one line, as all other errors are."""

    def main(self, args=None, *more, standalone_mode: bool = True, **options):
        """Runs a command."""
        given = sys.argv[1:] if args is None else list(args)
        with user_errors("--debug" in given):
            try:
                status = super().main(given, *more, standalone_mode=False, **options)
                sys.stdout.flush()
            except Exception as raised:
                error: Any = raised
                if not hasattr(error, "format_message"):  # of usage: its class depends on the version of typer
                    raise
                if type(error).__name__ == "NoArgsIsHelpError":
                    error.show()
                else:
                    print_error(describe_usage(error))
                status = error.exit_code
        if standalone_mode:
            sys.exit(status or 0)
        return status

    def invoke(self, ctx):
        """Runs a command. After Ctrl-C outside of its own `user_errors`, as while it is imported, typer would print nothing."""
        with user_errors(DEBUG.get()):
            return super().invoke(ctx)


def show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    """Prints a warning of our code as one line, and any other as Python does."""
    is_ours = category is UserWarning and OURS.match(filename)
    text = f"warning: {message}\n" if is_ours else warnings.formatwarning(message, category, filename, lineno, line)
    print(text, end="", file=file or sys.stderr)


def run_app(app: typer.Typer) -> None:
    """Runs the command of this process. If Ctrl-C is pressed again while Python ends, it ends at once, without a traceback."""
    warnings.showwarning = show_warning
    limit_spinning()
    try:
        app()
    finally:
        # otherwise it is ignored, as in a background job
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def describe_usage(error) -> str:
    """What is wrong with a command line, on one line: the option, its value, how to fix it."""
    text = " ".join(error.format_message().split()).rstrip(".")
    if text.startswith(INVALID):
        option, _, reason = text.removeprefix(INVALID).partition(": ")
        cause: list[dict] = getattr(error.__cause__, "errors", list)()  # of pydantic, which does not name the value
        reason, shown = reason.removeprefix("Value error, "), short_repr(cause[0]["input"]) if cause else ""
        value = f" {shown}:" if shown and not reason.startswith(shown) else ""
        text = f"{option.split(' / ')[0].strip(chr(39))}{value} {reason[:1].lower()}{reason[1:]}"
    help = f" {error.ctx.command_path} --help shows what is valid." if getattr(error, "ctx", None) else ""
    return escape(f"{text}.{help}")


class App(typer.Typer):
    """A command, or a group of commands."""

    def command(self, *args, **options):
        """As that of typer, with checked values."""
        return super().command(*args, **{"cls": CheckedCommand, **options})


def new_app(name: str, help: str) -> typer.Typer:
    """A command, or a group of commands, with `--version`."""
    app = App(
        name=name, cls=OneLineGroup, help=help, no_args_is_help=True, pretty_exceptions_enable=False,
        context_settings=HELP, rich_markup_mode=None,
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


def print_result(content: dict | list, as_json: bool, render: Callable[[], str]) -> None:
    """Prints a result as JSON, or as rendered text."""
    print_json(content) if as_json else print(render())
