"""Arguments of the recipes' commands: a YAML file, then options on the command line; errors that end in one line."""

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from run_tools.yaml_files import read_yaml

from .help import TRAINING, check_config, config_names, did_you_mean, format_help, read_config


def option(default, text: str):
    """A field of a dataclass of arguments: its default, and what `--help` prints."""
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata={"help": text})
    return field(default=default, metadata={"help": text})


def required(text: str):
    """A field without a default."""
    return field(metadata={"help": text})


def check_choice(name: str, value: str, choices) -> None:
    """Raises a ValueError for a value that is not one of the choices."""
    if value not in choices:
        given = f"{name} {value!r}" if name.startswith("--") else f"{name}={value!r}"
        raise ValueError(f"{given} is not supported. Use one of {', '.join(choices)}.")


def check_at_least(least: int, **values: int | None) -> None:
    """Raises a ValueError for a value below the minimum; None is allowed."""
    for name, value in values.items():
        if value is not None and value < least:
            raise ValueError(f"{name}={value} must be at least {least}.")


def parse_name_place(value: str, option: str, example: str = "news=data/news", form: str = "NAME=PLACE"):
    """ "NAME=PLACE" -> name, place; raises a `ValueError` for anything else."""
    name, _, place = map(str.strip, value.partition("="))
    if not (name and place):
        raise ValueError(f"{option} {value!r} must be {form}, such as {option} {example}.")
    return name, place


@dataclass(kw_only=True)
class DebugArguments:
    """What happens to errors; listed last by `--help`."""

    traceback: bool = option(False, "show the traceback of an error")


@dataclass
class RunFolderArguments(DebugArguments):
    """What may happen to an earlier run in the output folder."""

    overwrite_output_dir: bool = option(False, "remove what an earlier run left in output_dir, and start from scratch")


def parse_command(recipe: str, module: str, argv: list[str] | None = None) -> tuple:
    """The arguments of a recipe's command: an instance of each class of `ARGUMENTS[module]` in its `arguments.py`.

    The first argument may be a YAML file, or the name of one that comes with the recipe; there `null` means "not set": the default
    holds. `--help` and `--show-config` print and end the process; errors end it in one line with the exit status 2.
    """
    given = sys.argv[1:] if argv is None else list(argv)
    kinds = import_module(f"lexperts.recipes.{recipe}.arguments").ARGUMENTS[module]
    debug = "--traceback" in given
    if print_help_or_config(f"lexperts.recipes.{recipe}.{module}", recipe, module, given):
        sys.exit(0)
    from transformers import HfArgumentParser, TrainingArguments

    classes = tuple(TrainingArguments if kind == TRAINING else kind for kind in kinds)
    parser = HfArgumentParser(classes, allow_abbrev=False)
    if "--help-all" in given:
        parser.print_help()
        sys.exit(0)
    return run_or_exit(parse, parser, given, recipe, module, traceback=debug)


def print_help_or_config(command: str, recipe: str, module: str, given: list[str]) -> bool:
    """Answers `--help` and `--show-config NAME`, without importing the command's module -> whether one was asked for."""
    if {"-h", "--help"} & set(given):
        kinds = import_module(f"lexperts.recipes.{recipe}.arguments").ARGUMENTS[module]
        print(format_help(command, recipe, module, kinds))
        return True
    if "--show-config" in given:
        name = given[(given.index("--show-config") + 1) :][:1] or [""]
        print(run_or_exit(read_config, recipe, module, name[0], traceback="--traceback" in given), end="")
        return True
    return False


def parse(parser, given: list[str], recipe: str, module: str) -> tuple:
    """The parsed groups. Raises a `ValueError` for an unknown name, with the nearest known one, or a wrong type."""
    parser.error = raise_value_error  # argparse itself prints the names of all options before the message
    known = [option.lstrip("-") for option in parser._option_string_actions]
    if given and not given[0].startswith("-"):
        given = [*options_of(find_config(given[0], recipe, module), known), *given[1:]]
    *found, rest = parser.parse_args_into_dataclasses(given, return_remaining_strings=True)
    if rest:
        hint = did_you_mean(rest[0].lstrip("-").partition("=")[0], known, "--") if rest[0].startswith("-") else ""
        raise ValueError(f"The argument {rest[0]!r} is not known.{hint} --help lists all options.")
    return tuple(found)


def raise_value_error(message: str) -> None:
    """In place of argparse's `error`, which exits."""
    raise ValueError(f"{message}. --help lists all options.")


def find_config(given: str, recipe: str, module: str) -> Path:
    """The YAML file of a path, or of the name of a configuration that comes with the command."""
    path = Path(given)
    if path.exists() or path.suffix in (".yml", ".yaml"):
        return path
    check_config(given, config_names(recipe, module))
    return Path(__file__).parents[1] / recipe / f"{given}.yml"


def options_of(path: str, known: Iterable[str]) -> list[str]:
    """A YAML file as options of the command line."""
    options: list[str] = []
    for name, value in read_yaml(path).items():
        if name not in known:
            raise ValueError(f"{path}: the key {name!r} is not known.{did_you_mean(str(name), known)}")
        if value is None:
            continue
        value = json.dumps(value) if isinstance(value, dict) else value
        values = value if isinstance(value, list) else [] if value is True else [value]  # --fsdp takes no "True"
        options += [f"--{name}", *map(str, values)]
    return options


def command(recipe: str, module: str, call: Callable) -> Callable:
    """The `main(argv)` of a recipe's command, which calls a function with the groups of arguments (see `parse_command`)."""

    def main(argv: list[str] | None = None):
        groups = parse_command(recipe, module, argv)
        traceback = any(getattr(group, "traceback", False) for group in groups)
        return run_or_exit(call, *groups, traceback=traceback)

    return main


def run_or_exit(call, *args, traceback: bool = False, **named):
    """What the call returns; an error that the user can fix ends the script in one line, with the exit status 2."""
    try:
        return call(*args, **named)
    except (OSError, ValueError, ImportError) as error:
        if traceback:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
