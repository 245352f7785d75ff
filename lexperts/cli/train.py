"""`lexperts train`: the trainings of `lexperts.recipes`."""

import ast
from importlib import import_module
from pathlib import Path
from types import ModuleType

import typer

from run_tools.arguments import parse, print_help

from .. import recipes
from ..recipes import TRAIN, Command
from .common import new_app

app = new_app("train", "Train a model of one of five systems, or an expert.")
FOLDER = Path(recipes.__file__).parent
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def runner_of(command: Command):
    """The function behind a sub-command: the script is imported when it runs, and not for `--help`."""

    def run(context: typer.Context):
        arguments = import_module(f"lexperts.recipes.{command.recipe}.arguments")
        classes, folder = arguments.ARGUMENTS[command.module], FOLDER / command.recipe
        text = ast.get_docstring(ast.parse((folder / f"{command.module}.py").read_text(encoding="utf-8"))) or ""
        if not print_help(context.args, context.command_path, text, classes, folder):
            train(command, arguments, folder, context.args)

    return run


def train(command: Command, arguments: ModuleType, folder: Path, argv: list[str]) -> None:
    """Runs a training. One that is complete stays as it is."""
    try:
        classes = arguments.ARGUMENTS[command.module]
        for own in parse(classes, argv, folder, some=True)[0]:
            if hasattr(own, "check_columns"):  # before torch is imported, which takes seconds
                own.check_columns()
        from ..recipes.training import CompleteRunError, last_checkpoint, start_run

        package, name = getattr(arguments, "TRAINING", ("transformers", "TrainingArguments"))
        groups, given = parse([*classes, getattr(import_module(package), name)], argv, folder)
        script = import_module(f"lexperts.recipes.{command.recipe}.{command.module}")
    except ModuleNotFoundError as error:
        raise ImportError(f"Training needs {error.name}. Install the extra lexperts[train].") from error
    try:
        script.train(*groups, start_run(groups[-1], given))
    except CompleteRunError as complete:
        print(complete)
    except KeyboardInterrupt as error:
        has_checkpoint = last_checkpoint(groups[-1].output_dir) is not None
        raise KeyboardInterrupt("Repeat the command to resume." if has_checkpoint else "") from error


for name, command in TRAIN.items():
    app.command(name, help=command.summary, context_settings=PASS_ON, add_help_option=False)(runner_of(command))
