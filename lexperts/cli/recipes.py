"""Commands that are modules of `lexperts.recipes`: `lexperts train seke`, `lexperts define prepare`, ..."""

import sys
from importlib import import_module
from types import ModuleType

import typer

from run_tools.errors import user_errors

from ..recipes import Command

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def add_recipes(app: typer.Typer, commands: dict[str, Command]) -> None:
    """A sub-command for each recipe's command, which gets all arguments as they are."""
    for name, command in commands.items():
        app.command(name, help=command.summary, context_settings=PASS_ON, add_help_option=False)(runner_of(command))


def runner_of(command: Command):
    """The function behind a sub-command: imports the recipe's module when it is called, and not for `--help`."""

    def run(context: typer.Context):
        from ..recipes.common.arguments import print_help_or_config

        with user_errors("--debug" in context.args):
            if not print_help_or_config(context.command_path, command.recipe, command.module, context.args):
                import_recipe(command).main(context.args)

    return run


class MissingExtraError(ImportError):
    """A package of an extra is not installed."""


def import_recipe(command: Command) -> ModuleType:
    """The recipe's module. Raises a `MissingExtraError` if it imports a package of an extra that is not installed."""
    try:
        return import_module(command.name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in sys.modules:  # a module that is missing in an installed package
            raise
        raise MissingExtraError(
            f"{command.name} needs {error.name}. Install it with: pip install 'lexperts[{command.extras}]'"
        ) from error
