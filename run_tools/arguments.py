"""The options of a training: dataclasses whose values come from a YAML file and then the command line, by transformers' parser."""

import json
import sys
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from .errors import UserError, did_you_mean
from .yaml_files import check_names, read_yaml


def option(default: Any, text: str) -> Any:
    """A field of a dataclass of options, with the text of `--help`."""
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata={"help": text})
    return field(default=default, metadata={"help": text})


def required(text: str) -> Any:
    """A field without a default."""
    return field(metadata={"help": text})


def make_parser(classes: Iterable[type], **texts: Any) -> ArgumentParser:
    """A parser of the options of dataclasses, whose errors are `UserError`s; an option is `--best-of 8` or `--best_of 8`. Options
    that are not given are not among the values.
    """
    spec = find_spec("transformers")
    assert spec is not None and spec.submodule_search_locations is not None
    path = (
        Path(spec.submodule_search_locations[0]) / "hf_argparser.py"
    )  # its package takes two seconds, `--help` does not wait
    file = spec_from_file_location("hf_argparser", path)
    assert file is not None and file.loader is not None
    module = module_from_spec(file)
    file.loader.exec_module(module)

    base: type = module.HfArgumentParser

    class Parser(base):
        """Raises errors instead of ending the process."""

        def error(self, message):
            raise UserError(f"{message}. --help lists all options.")

    parser = Parser(classes, allow_abbrev=False, add_help=False, **texts)
    for action in parser._actions:
        action.help = describe(action)
        action.default = SUPPRESS
    return parser


def describe(action: Any) -> str:
    """The text of `--help` for an option, with its default; nothing for `--no-x` beside `--x`."""
    if action.nargs == 0 and action.dest not in (name[2:] for name in action.option_strings):
        return SUPPRESS
    default = action.default
    if default in (None, "", []) or action.required:
        return f"{action.help or ''}{' (required)' if action.required else ''}".replace("%", "%%")
    shown = " ".join(map(str, default)) if isinstance(default, list) else getattr(default, "value", default)
    return f"{action.help or ''} (default: {shown})".replace("%", "%%")


def words_of(settings: Mapping[str, Any]) -> list[str]:
    """The entries of a YAML file as a command line writes them; those that are `null` are left out."""
    words = []
    for name, value in settings.items():
        if isinstance(value, list):
            words += [f"--{name}", *map(str, value)]
        elif value is not None:
            words.append(f"--{name}={json.dumps(value) if isinstance(value, dict) else value}")
    return words


def parse(classes: Sequence[type], argv: Sequence[str], configs: Path) -> tuple[tuple, dict[str, Any]]:
    """An instance of each class, and the values that were given.

    Args:
        argv: the path of a YAML file, or the name of one in `configs`, if it does not begin with "-"; then options, which win.

    Raises:
        UserError: for an unknown option, and a value of another type.
    """
    parser, words = make_parser(classes), list(argv)
    given: dict[str, Any] = {}
    if words and not words[0].startswith("-"):
        path = find_config(words.pop(0), configs)
        settings = {name: value for name, value in read_yaml(path).items() if not name.startswith("_")}
        check_names(settings, str(path), {action.dest for action in parser._actions})
        words = [*words_of(settings), *words]
    found, rest = parser.parse_known_args(words)
    if rest:
        flags = [name[2:] for name in parser._option_string_actions]
        hint = did_you_mean(rest[0][2:].partition("=")[0], flags, "--") if rest[0].startswith("--") else ""
        raise UserError(f"The argument {rest[0]!r:.80} is not known.{hint[:100]} --help lists all options.")
    given = vars(found)
    return parser.parse_dict(given), given  # type: ignore[attr-defined]


def find_config(given: str, configs: Path) -> Path:
    """The YAML file of a path, or of the name of a configuration in a folder. Raises a `UserError` for an unknown name."""
    path = Path(given)
    if path.is_file() or path.suffix in (".yml", ".yaml"):
        return path
    if not (own := configs / f"{given}.yml").is_file():
        known = sorted(path.stem for path in configs.glob("*.yml"))
        raise UserError(
            f"{given!r} is not a configuration.{did_you_mean(given, known)} The name of a file ends in .yml."
        )
    return own


def format_help(command: str, text: str, classes: Iterable[type], configs: Path) -> str:
    """What `COMMAND --help` prints: a text, the options, and the configurations in a folder."""
    names = ", ".join(sorted(path.stem for path in configs.glob("*.yml")))
    epilog = (
        "All options of transformers.TrainingArguments are accepted too, such as --output-dir, --learning-rate and\n"
        "--num-train-epochs; --help-all lists them.\n"
        f"CONFIG is a YAML file of options, or one of: {names}. --show-config NAME prints one. Options on the command line win.\n\n"
        "Repeat the same command after an interruption: it continues from the last checkpoint."
    )

    def style(prog: str) -> RawDescriptionHelpFormatter:
        return RawDescriptionHelpFormatter(prog, max_help_position=36, width=120)

    texts: dict = {"usage": f"{command} [CONFIG] [OPTIONS]", "description": text, "epilog": epilog}
    return make_parser(classes, formatter_class=style, **texts).format_help()


def print_help(argv: Sequence[str], command: str, text: str, classes: Sequence[type], configs: Path) -> bool:
    """Answers `--help`, `--help-all` and `--show-config NAME` -> whether one of them was given."""
    if "--show-config" in argv:
        name = [*argv[argv.index("--show-config") + 1 :], ""][0]
        print(find_config(name, configs).read_text(encoding="utf-8"), end="")
    elif asked := {"-h", "--help", "--help-all"} & set(argv):
        if "--help-all" in asked:
            from transformers import TrainingArguments

            classes = [*classes, TrainingArguments]
        sys.stdout.write(format_help(command, text, classes, configs))
    return "--show-config" in argv or bool({"-h", "--help", "--help-all"} & set(argv))
