"""Commands that are modules of `lexperts.recipes`: `lexperts train seke`, `lexperts define run`, ..."""

from importlib import import_module

import typer

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

        if not print_help_or_config(context.command_path, command.recipe, command.module, context.args):
            import_module(command.name).main(context.args)

    return run
