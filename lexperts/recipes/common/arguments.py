"""Arguments of the recipes' commands: a YAML file, then options on the command line; all are checked before the work."""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from pathlib import Path

from run_tools.errors import REPEAT, UserError, did_you_mean, short_repr, user_errors
from run_tools.option_values import ANY, Limits, find_problem
from run_tools.yaml_files import check_names, read_yaml

from .help import TRAINING, check_config, config_names, format_help, read_config
from .training_options import JSON_OPTIONS, TRAINING_KINDS, TRAINING_LIMITS


class OptionHelp(str):
    """What `--help` prints for an option, and what is valid; transformers passes nothing else on to the parser."""

    limits: Limits = ANY
    kind: str = ""
    empty: bool = False


def describe(text: str, kind: str, empty: bool, limits: dict) -> dict:
    """The metadata of a field."""
    help = OptionHelp(text)
    if "choices" in limits:
        limits["choices"] = tuple(limits["choices"])
    help.limits, help.kind, help.empty = Limits(**limits), kind, empty
    return {"help": help}


def option(default, text: str, *, kind: str = "", empty: bool = False, **limits):
    """A field of a dataclass of arguments.

    Args:
        default: its default.
        text: what `--help` prints.
        kind: what its text names, one of `option_paths.KINDS`; "" for neither a path nor a model.
        empty: whether a list may be empty, although its default is not.
        limits: those of `run_tools.option_values.Limits`.
    """
    metadata = describe(text, kind, empty or default == [], limits)
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def required(text: str, *, kind: str = "", **limits):
    """A field without a default; for the arguments see `option`."""
    return field(metadata=describe(text, kind, False, limits))


def parse_name_place(value: str, option: str, example: str = "news=data/news", form: str = "NAME=PLACE"):
    """ "NAME=PLACE" -> name, place; raises a `UserError` for anything else."""
    name, _, place = map(str.strip, value.partition("="))
    if not (name and place):
        raise UserError(f"{option} {short_repr(value)} must be {form}. Example: {option} {example}.")
    return name, place


@dataclass
class RunFolderArguments:
    """What may happen to an earlier run in the output folder."""

    overwrite_output_dir: bool = option(False, "remove what an earlier run left in output_dir, and start from scratch")


def parse_command(recipe: str, module: str, argv: list[str] | None = None) -> tuple:
    """The arguments of a recipe's command: an instance of each class of `ARGUMENTS[module]` in its `arguments.py`.

    The first argument may be a YAML file, or the name of one that comes with the recipe; there `null` means "not set": the default
    holds. `--help` and `--show-config` print and end the process.

    Raises:
        UserError: for an unknown option or an invalid value.
    """
    given = sys.argv[1:] if argv is None else list(argv)
    if print_help_or_config(f"lexperts.recipes.{recipe}.{module}", recipe, module, given):
        sys.exit(0)
    parser = make_parser(recipe, module)
    if "--help-all" in given:
        parser.print_help()
        sys.exit(0)
    given, _ = take_debug(given)
    known = [name.lstrip("-") for name in parser._option_string_actions]
    if given and not given[0].startswith("-"):
        given = [*options_of(find_config(given[0], recipe, module), parser), *given[1:]]
    *groups, rest = parser.parse_args_into_dataclasses(given, return_remaining_strings=True, look_for_args_file=False)
    if rest:
        hint = did_you_mean(rest[0].lstrip("-").partition("=")[0], known, "--") if rest[0].startswith("-") else ""
        raise UserError(f"The argument {short_repr(rest[0])} is not known.{hint} --help lists all options.")
    return tuple(groups)


def take_debug(given: list[str]) -> tuple[list[str], bool]:
    """The arguments without the switch `--debug`, and whether it was among them; transformers has an option `--debug NAME`."""
    left = [
        word
        for i, word in enumerate(given)
        if word != "--debug" or (given[i + 1 : i + 2] and not given[i + 1].startswith("-"))
    ]
    return left, len(left) < len(given)


def print_help_or_config(command: str, recipe: str, module: str, given: list[str]) -> bool:
    """Answers `--help` and `--show-config NAME`, without importing the command's module -> whether one was asked for."""
    if {"-h", "--help"} & set(given):
        kinds = import_module(f"lexperts.recipes.{recipe}.arguments").ARGUMENTS[module]
        print(format_help(command, recipe, module, kinds))
        return True
    if "--show-config" in given:
        name = given[(given.index("--show-config") + 1) :][:1] or [""]
        print(read_config(recipe, module, name[0]), end="")
        return True
    return False


@lru_cache
def make_parser(recipe: str, module: str):
    """The parser of a command, which checks the type and the limits of every value."""
    from transformers import HfArgumentParser, TrainingArguments

    kinds = import_module(f"lexperts.recipes.{recipe}.arguments").ARGUMENTS[module]
    parser = HfArgumentParser(
        tuple(TrainingArguments if kind == TRAINING else kind for kind in kinds), allow_abbrev=False
    )
    parser.error = raise_user_error  # argparse itself prints the names of all options before the message
    for action in parser._actions:
        if action.nargs == 0 or action.dest == "help":
            continue
        ours = isinstance(action.help, OptionHelp)
        limits = action.help.limits if ours else TRAINING_LIMITS.get(action.dest, ANY)
        limits = Limits(choices=tuple(map(str, action.choices))) if action.choices else limits
        action.type = Checked(action.type, limits, not ours and action.dest in JSON_OPTIONS)
        if ours and action.help.empty:
            action.nargs = "*"
    return parser


class Checked:
    """The type of an option in argparse: converts a text and checks the value.

    Raises:
        argparse.ArgumentTypeError: if it is invalid.
    """

    NAMES = {int: "a whole number", float: "a number"}

    def __init__(self, convert: Callable, limits: Limits, json_object: bool = False):
        self.convert, self.limits, self.json_object = convert or str, limits, json_object

    def __call__(self, text: str):
        """The value of a text."""
        from argparse import ArgumentTypeError

        if self.limits.choices and (problem := find_problem(text, self.limits)):
            raise ArgumentTypeError(f"{short_repr(text)} {problem}")
        try:
            value = self.convert(text)
        except ArgumentTypeError as error:
            if "ruth" not in str(error):  # of transformers, for a bool: "Truthy value expected"
                raise
            raise ArgumentTypeError(f"{short_repr(text)} is neither true nor false.") from error
        except (ValueError, TypeError, KeyError) as error:
            name = self.NAMES.get(self.convert, "valid")
            fix = f" {self.limits.describe()}" if self.limits != ANY else ""
            raise ArgumentTypeError(
                f"{short_repr(text)} is not {name}." + (f" Use {name}{fix}." if fix else "")
            ) from error
        if not self.limits.choices and (problem := find_problem(value, self.limits)):
            raise ArgumentTypeError(f"{short_repr(text)} {problem}")
        if self.json_object:
            check_json(text)
        return value


def check_json(text: str) -> None:
    """Raises an `ArgumentTypeError` for a text that is neither a JSON object nor a file."""
    from argparse import ArgumentTypeError

    try:
        valid = Path(text).is_file() or isinstance(json.loads(text), dict)
    except (ValueError, OSError, RecursionError):
        valid = False
    if not valid:
        raise ArgumentTypeError(
            f"{short_repr(text)} is neither a JSON object nor a file. Write it as '{{\"name\": 1}}'."
        )


def raise_user_error(message: str) -> None:
    """In place of argparse's `error`, which exits: "argument --x: invalid" becomes "--x invalid"."""
    name, colon, text = message.removeprefix("argument ").partition(": ")
    name = name.partition("/")[0]  # the part after a slash is the spelling with hyphens
    if message.startswith("argument ") and colon:
        message = f"{name} {text}" if text.startswith(("'", '"')) else f"{name}: {text}"
    raise UserError(f"{message}{'' if message.endswith(('.', '?')) else '.'} --help lists all options.")


def find_config(given: str, recipe: str, module: str) -> Path:
    """The YAML file of a path, or of the name of a configuration that comes with the command."""
    path = Path(given)
    if path.is_file() or path.suffix in (".yml", ".yaml"):
        return path
    check_config(given, config_names(recipe, module))
    return Path(__file__).parents[1] / recipe / f"{given}.yml"


def options_of(path: str | Path, parser) -> list[str]:
    """A YAML file as options of the command line. Raises a `UserError` as `settings_options`."""
    return settings_options(read_yaml(path), parser, f"{path}: ")


def settings_options(settings: dict, parser, where: str = "") -> list[str]:
    """Settings as options of the command line. Raises a `UserError` for unknown names, and for lists, mappings and dates where the
    option has a single number or text.
    """
    actions = {name.lstrip("-"): action for name, action in parser._option_string_actions.items()}
    check_names(settings, where.removesuffix(": ") or "the settings", actions)
    options: list[str] = []
    for name, value in settings.items():
        if value is None:
            continue
        action, shown = actions[name], f"{where}{name}={short_repr(value)}"
        takes_json = action.dest in JSON_OPTIONS or getattr(action.help, "kind", "") == "json"
        if isinstance(value, dict) and takes_json:
            value = json.dumps(value, default=str)
        values = value if isinstance(value, list) else [] if value is True else [value]  # --fsdp takes no "True"
        if isinstance(value, list) and action.nargs not in ("+", "*"):
            raise UserError(f"{shown} is a list. Give a single value.")
        if wrong := [one for one in values if not isinstance(one, (str, int, float))]:
            raise UserError(f"{shown} holds a {type(wrong[0]).__name__}. Use numbers and texts; put a date in quotes.")
        if value is True and action.nargs != "?" and getattr(action.type, "convert", None) is not string_to_bool():
            raise UserError(f"{shown} is not valid. Give a number or a text; put {str(value).lower()} in quotes.")
        if len(values) == 1:
            options.append(f"--{name}={values[0]}")
        else:
            options += [f"--{name}", *map(str, values or ["true"] * (value is True and action.nargs != "?"))]
    return options


def string_to_bool() -> Callable:
    """The converter of bools in transformers."""
    from transformers.hf_argparser import string_to_bool

    return string_to_bool


def check_settings(recipe: str, module: str, settings: dict) -> None:
    """Raises a `UserError` for settings that the command does not have, or that are invalid. Files may be missing."""
    parser, kinds = make_parser(recipe, module), import_module(f"lexperts.recipes.{recipe}.arguments").ARGUMENTS[module]
    values = parser.parse_args(settings_options(settings, parser))
    for kind in kinds:
        if kind != TRAINING:
            kind(**{one.name: getattr(values, one.name) for one in dataclasses.fields(kind)})


def command(recipe: str, module: str, call: Callable, resume: str = REPEAT) -> Callable:
    """The `main(argv)` of a recipe's command, which calls a function with the groups of arguments (see `parse_command`).

    Any error ends it in one line, see `run_tools.errors.user_errors`; after Ctrl-C `resume` says how to resume.
    """

    def main(argv: list[str] | None = None):
        given = sys.argv[1:] if argv is None else list(argv)
        with user_errors(take_debug(given)[1], interrupted=resume, full=resume):
            groups = parse_command(recipe, module, given)
            check_places(groups)
            return call(*groups)

    return main


def check_places(groups: Iterable) -> None:
    """Raises an error for a file, folder or model among the options that does not exist, or cannot be written."""
    from .option_paths import check_place

    for group in groups:
        for one in dataclasses.fields(group):
            value, kind = getattr(group, one.name), getattr(one.metadata.get("help"), "kind", "")
            kind = kind or TRAINING_KINDS.get(one.name, "")
            for text in value if isinstance(value, list) else [value]:
                if kind and text is not None:
                    check_place(f"--{one.name}", text, kind)
