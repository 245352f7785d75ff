"""`lexperts train`: the trainings of `lexperts.recipes`."""

import ast
from importlib import import_module
from pathlib import Path

import typer

from run_tools.arguments import parse, print_help

from ..recipes import TRAIN, Command
from .common import new_app

app = new_app("train", "Train a model: `lexperts train seke minilm_cpu --train-files train.jsonl`.")
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def runner_of(command: Command):
    """The function behind a sub-command: the script is imported when it runs, and not for `--help`."""

    def run(context: typer.Context):
        arguments = import_module(f"lexperts.recipes.{command.recipe}.arguments")
        classes, folder = arguments.ARGUMENTS[command.module], Path(arguments.__file__).parent
        text = ast.get_docstring(ast.parse((folder / f"{command.module}.py").read_text(encoding="utf-8")))
        if not print_help(context.args, context.command_path, text, classes, folder):
            train(command, classes, folder, context.args)

    return run


def train(command: Command, classes: tuple[type, ...], folder: Path, argv: list[str]) -> None:
    """Runs a training. One that is complete stays as it is."""
    try:
        from transformers import TrainingArguments

        from ..recipes.training import CompleteRunError, start_run

        groups, given = parse([*classes, TrainingArguments], argv, folder)
        script = import_module(f"lexperts.recipes.{command.recipe}.{command.module}")
    except ModuleNotFoundError as error:
        raise ImportError(f"Training needs {error.name}. Install it with: pip install 'lexperts[train]'") from error
    try:
        script.train(*groups, start_run(groups[-1], given))
    except CompleteRunError as complete:
        print(complete)


for name, command in TRAIN.items():
    app.command(name, help=command.summary, context_settings=PASS_ON, add_help_option=False)(runner_of(command))
