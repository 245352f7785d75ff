"""What all commands share: one handler of errors, options, printed results."""

import json
import os
import re
import signal
import sys
import warnings
from functools import partial
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from run_tools.errors import UserError, one_line, print_error

from .. import __version__

# --best_of is --best-of, in every sub-command
HELP = {"help_option_names": ["-h", "--help"], "token_normalize_func": lambda name: name.replace("_", "-")}
EMPTY = re.compile(r"(--[^=]+=)?")
FIXABLE = (OSError, ValueError, TypeError, ImportError, RuntimeError, MemoryError, FloatingPointError)

Count = partial(typer.Option, min=1)
ModelOption = partial(typer.Option, "--model", "-m", metavar="FOLDER_OR_HUB_ID")
Device = Annotated[str | None, typer.Option(help="Device, such as cuda:0; by default an accelerator if available.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Random seed.")]
Dtype = Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(help="Data type of the weights.")]
Model = Annotated[str | None, ModelOption(help="Token classifier, or tiny; by default lexperts-seke-minilm.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own code. Read it first.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


class OneLineGroup(TyperGroup):
    """A group of commands that ends with one line for any error, unless `--debug` is given, and with status 2 if a user can fix it."""

    def main(self, args=None, *more, standalone_mode: bool = True, **options):
        """Runs a command."""
        words = sys.argv[1:] if args is None else list(args)
        try:
            check_words(words)
            status = super().main(words, *more, standalone_mode=False, **options)
        except Exception as error:
            is_usage = hasattr(error, "format_message")  # its class depends on the version of typer
            if "--debug" in words and not is_usage:
                raise
            if is_usage:
                status = print_usage(error)
            else:
                print_error(str(error) if isinstance(error, UserError) else one_line(error))
                status = 2 if isinstance(error, FIXABLE) or type(error) is LookupError else 1  # of an encoding
        if standalone_mode or status:
            sys.exit(status or 0)

    def list_commands(self, ctx) -> list[str]:
        """The names of the commands, groups first, in the order in which they were added."""
        names = super().list_commands(ctx)
        return sorted(names, key=lambda name: not hasattr(self.commands[name], "commands"))

    def invoke(self, ctx):
        """Runs a command. After Ctrl-C, typer would print nothing; of a closed pipe, it takes care."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except KeyboardInterrupt as error:
            print_error(str(error) or "Repeat the command.", "interrupted")
            raise typer.Exit(130) from error


def check_words(words: list[str]) -> None:
    """Raises a `UserError` for a value that is empty, as of a variable that is not set: as a path it is the current folder."""
    for before, word in zip(["", *words], words, strict=False):
        if EMPTY.fullmatch(word):
            raise UserError(f"The value after {word or before!r} is empty. Give one, or leave the option out.")


def print_usage(error: Any) -> int:
    """Prints what is wrong with a command line, or its help if it has no arguments -> the exit status."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
    else:
        hint = f" See {error.ctx.command_path} --help." if getattr(error, "ctx", None) else ""
        print_error(one_line(ValueError(error.format_message())) + hint)
    return error.exit_code


def run_app(app: typer.Typer) -> None:
    """Runs the command of this process."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {' '.join(str(message).split())}\n"
    if "OMP_WAIT_POLICY" not in os.environ:  # idle threads of torch sleep sooner than after 300,000 rounds of waiting
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        app()
    finally:  # if Ctrl-C is pressed again while Python ends, it ends at once
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def new_app(name: str, help: str) -> typer.Typer:
    """A command, or a group of commands, with `--version` and `--debug`."""
    app = typer.Typer(
        name=name, cls=OneLineGroup, help=help, no_args_is_help=True, pretty_exceptions_enable=False,
        context_settings=HELP, rich_markup_mode=None,
    )  # fmt: skip

    def show_version(value: bool):
        if value:
            print(f"{name} {__version__}")
            raise typer.Exit()

    @app.callback()
    def every_command(
        version: Annotated[bool, typer.Option(callback=show_version, is_eager=True, help="Show the version.")] = False,
        debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    ):
        pass  # `OneLineGroup` reads --debug, also before the command is known

    return app


def print_result(content: dict | list, as_json: bool, text: str) -> None:
    """Prints a result as one line of JSON, or as text."""
    print(json.dumps(content, ensure_ascii=False) if as_json else text)
