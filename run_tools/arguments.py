"""The options of a training: dataclasses with values from a YAML file and the command line, by transformers' parser."""

import json
from argparse import SUPPRESS
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import Any

from .errors import UserError, did_you_mean, short_repr
from .files import read_yaml

MORE = """
All options of transformers.TrainingArguments are accepted too, such as --output-dir and --learning-rate.
CONFIG is a YAML file of options, or one of: {}. --show-config NAME prints one. Options on the command line win.
Repeat the same command after an interruption: it continues from the last checkpoint."""


def option(default: Any, text: str) -> Any:
    """A field of a dataclass of options, with the text of `--help`."""
    metadata = {"help": text.replace("%", "%%")}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


required = partial(option, MISSING)


def make_parser(classes: Iterable[type], **texts: Any) -> Any:
    """An `HfArgumentParser` of the options of dataclasses, whose errors are `UserError`s."""

    def fail(message: str):
        raise UserError(f"{message}. --help lists all options.")

    package: Any = find_spec("transformers")  # to import it takes two seconds, for which `--help` does not wait
    script = run_path(str(Path(package.origin).with_name("hf_argparser.py")))
    parser = script["HfArgumentParser"](classes, allow_abbrev=False, add_help=False, **texts)
    parser.error = fail
    return parser


def parse(
    classes: Sequence[type], argv: Sequence[str], configs: Path, some: bool = False
) -> tuple[tuple, dict[str, Any]]:
    """The path of a YAML file, or the name of one in `configs`, then options, which win -> an instance of each class,
    and the values that were given. Raises a `UserError` for a value of another type, and, unless the classes are only
    `some` of those of the command, for an unknown option.
    """
    parser, words = make_parser(classes), list(argv)
    for action in parser._actions:
        action.default = SUPPRESS  # so that only what is given is among the values
    if words and not words[0].startswith("-"):
        path, known = find_config(words.pop(0), configs), {action.dest for action in parser._actions}
        settings = {name: value for name, value in read_yaml(path).items() if not str(name).startswith("_")}
        unknown = [name for name in settings if name not in known]
        if unknown and not some:
            near = did_you_mean(str(unknown[0]), known)
            raise UserError(f"{path}: the key {short_repr(unknown[0])} is not known.{near}")
        for name, value in settings.items():  # before the options of the command line
            if isinstance(value, list):
                words[:0] = [f"--{name}", *map(str, value)]
            elif value is not None:
                words[:0] = [f"--{name}={json.dumps(value) if isinstance(value, dict) else value}"]
    found, rest = parser.parse_known_args(words)
    if rest and not some:
        flags = [name[2:] for name in parser._option_string_actions]
        hint = did_you_mean(rest[0][2:].partition("=")[0], flags, "--") if rest[0].startswith("--") else ""
        raise UserError(f"The argument {rest[0]!r:.80} is not known.{hint[:100]} --help lists all options.")
    return parser.parse_dict(vars(found)), vars(found)


def find_config(given: str, configs: Path) -> Path:
    """The YAML file of a path, or of the name of one in a folder. Raises a `UserError` for an unknown name."""
    path = Path(given) if given.endswith((".yml", ".yaml")) else configs / f"{given}.yml"
    if path.parent == configs and not path.is_file():
        near = did_you_mean(given, (path.stem for path in configs.glob("*.yml")))
        raise UserError(f"{given!r} is not a configuration.{near} The name of a file ends in .yml.")
    return path


def print_help(argv: Sequence[str], command: str, text: str, classes: Sequence[type], configs: Path) -> bool:
    """Answers `--help` and `--show-config NAME` -> whether one of them was given."""
    if "--show-config" in argv:
        name = [*argv[argv.index("--show-config") + 1 :], ""][0]
        print(find_config(name, configs).read_text(encoding="utf-8"), end="")
    elif is_asked := bool({"-h", "--help"} & set(argv)):
        parser = make_parser(classes, usage=f"{command} [CONFIG] [OPTIONS]")
        for action in parser._actions:
            action.default = SUPPRESS if action.default is None else action.default  # which is not printed
        names = ", ".join(sorted(path.stem for path in configs.glob("*.yml")))
        print(text, parser.format_help(), MORE.format(names), sep="\n")
    return "--show-config" in argv or is_asked
