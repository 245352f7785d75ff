"""Options of a command: declared by dataclasses, given in a YAML file or on the command line, and checked before the work.

On the command line an option is `--best-of 8` or `--best_of 8`, and a switch is `--keep-splits` or `--keep-splits true`. The keys
of a YAML file are the names of the fields.
"""

import argparse
import dataclasses
import json
import re
import shutil
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from .errors import UserError, did_you_mean, join_names, short_repr
from .option_values import ANY, Limits, find_problem
from .yaml_files import check_names

TYPE_NAMES = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
METAVARS = {str: "TEXT", int: "INT", float: "FLOAT", bool: "true|false", dict: "JSON"}
BOOLS = dict.fromkeys(("true", "yes", "t", "y", "1"), True) | dict.fromkeys(("false", "no", "f", "n", "0"), False)


def option(default: Any, text: str, *, kind: str = "", empty: bool = False, **limits: Any) -> Any:
    """A field of a dataclass of options.

    Args:
        default: its default.
        text: what `--help` prints.
        kind: what its text names, such as "file", or "json"; "" for neither a path nor a model.
        empty: whether a list may be empty, although its default is not.
        limits: those of `option_values.Limits`.
    """
    limits["choices"] = tuple(limits.get("choices", ()))
    about = {"help": text, "kind": kind, "empty": empty or default == [], "limits": Limits(**limits)}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=about)
    return field(default=default, metadata=about)


def required(text: str, **about: Any) -> Any:
    """A field without a default; for the arguments see `option`."""
    return option(MISSING, text, **about)


@dataclass(frozen=True)
class Option:
    """An option of a command.

    Attributes:
        name: that of the field, and of the key in YAML files.
        type: of a value, or of an item of a list; `dict` for a JSON object or the path of one.
        is_list: whether it takes several values.
        is_switch: whether it may be given without a value.
        default: `MISSING` for an option that is required.
        help, kind, empty, limits: see `option`.
    """

    name: str
    type: type
    is_list: bool
    is_switch: bool
    default: Any
    help: str
    kind: str
    empty: bool
    limits: Limits

    @property
    def flag(self) -> str:
        """The option on the command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def metavar(self) -> str:
        """The placeholder of a value in `--help`: the choices if they are short."""
        choices = "|".join(self.limits.choices)
        return choices if 0 < len(choices) <= 60 else METAVARS[self.type]

    def describe(self) -> str:
        """The text of `--help`, with the default."""
        if self.default is MISSING:
            return f"{self.help} (required)"
        if self.default in (None, "", []):
            return self.help
        values = self.default if isinstance(self.default, list) else [self.default]
        text = " ".join(str(value).lower() if isinstance(value, bool) else str(value) for value in values)
        return f"{self.help} (default: {text})"

    def convert(self, value: Any) -> Any:
        """The value of a text. Raises an `ArgumentTypeError` with the value, what is wrong with it, and the fix."""
        if value is True and self.is_switch:
            return value
        shown, text = short_repr(value), str(value)
        try:
            converted = BOOLS[text.lower()] if self.type is bool else text if self.type is dict else self.type(text)
        except (ValueError, KeyError) as error:
            name = TYPE_NAMES[self.type]
            fix = f" {self.limits.describe()}" if self.limits != ANY else ""
            raise argparse.ArgumentTypeError(f"{shown} is not {name}. Use {name}{fix}.") from error
        if problem := find_problem(converted, self.limits):
            raise argparse.ArgumentTypeError(f"{shown} {problem}")
        if self.type is dict and not is_json_object(text):
            raise argparse.ArgumentTypeError(
                f"{shown} is neither a JSON object nor a file. Write it as '{{\"name\": 1}}'."
            )
        return converted

    def read(self, value: Any, where: str = "") -> Any:
        """The value of an entry of a YAML file. Raises a `UserError` that starts with `where`."""
        shown = f"{where}{self.name}={short_repr(value)}"
        if isinstance(value, dict) and self.type is dict:
            value = json.dumps(value, default=str)
        if isinstance(value, list) and not self.is_list:
            raise UserError(f"{shown} is a list. Give a single value.")
        values = value if isinstance(value, list) else [value]
        if not (values or self.empty):
            raise UserError(f"{shown} is empty. Give a value, or leave it out.")
        if wrong := [one for one in values if not isinstance(one, (str, int, float))]:
            raise UserError(f"{shown} holds a {type(wrong[0]).__name__}. Use numbers and texts; put a date in quotes.")
        if any(isinstance(one, bool) for one in values) and not self.is_switch:
            raise UserError(f"{shown} is not valid. Give a number or a text; put {str(value).lower()} in quotes.")
        try:
            converted = [self.convert(one) for one in values]
        except argparse.ArgumentTypeError as error:
            raise UserError(f"{where}{self.name}={error}") from error
        return converted if self.is_list else converted[0]


def is_json_object(text: str) -> bool:
    """Whether a text is a JSON object, or the path of a file."""
    try:
        return Path(text).is_file() or isinstance(json.loads(text), dict)
    except (ValueError, OSError, RecursionError):
        return False


def read_hint(hint: Any) -> tuple[type, bool, tuple]:
    """The type of a value, whether there may be several, and the choices, of a type hint such as `list[int] | None`."""
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    parts = [part for part in (typing.get_args(hint) if is_union else (hint,)) if part is not types.NoneType]
    for part in parts:
        if isinstance(part, type) and issubclass(part, Enum):
            return str, False, tuple(one.value for one in part)
    if typing.get_origin(parts[0]) is typing.Literal:
        return str, False, typing.get_args(parts[0])
    kinds = {typing.get_origin(part) or part for part in parts}
    if kinds == {list}:
        return typing.get_args(parts[0])[0], True, ()
    return next((kind for kind in (bool, dict, str, int, float) if kind in kinds), dict), False, ()


def list_options(cls: Any, about: Mapping[str, Mapping] = types.MappingProxyType({})) -> list[Option]:
    """The options of a dataclass; `about` has limits and kinds, by name, for a class that does not declare them."""
    hints, options = typing.get_type_hints(cls), []
    for one in filter(lambda one: one.init, dataclasses.fields(cls)):
        kind, is_list, choices = read_hint(hints[one.name])
        more: dict = {"help": "", "kind": "", "empty": False, "limits": ANY, "choices": choices}
        more |= {**about.get(one.name, {}), **one.metadata}
        if choices := tuple(map(str, more.pop("choices"))):
            more["limits"] = Limits(choices=choices)
        is_switch = (more.pop("nargs", None), more.pop("const", None)) == ("?", True) or kind is bool
        default = one.default if one.default_factory is MISSING else one.default_factory()
        options.append(Option(one.name, dict if more["kind"] == "json" else kind, is_list, is_switch, default, **more))
    return options


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are `UserError`s."""

    def error(self, message: str) -> NoReturn:
        """Raises a `UserError`: "argument --best-of: '0' must be ..." becomes "--best-of '0' must be ..."."""
        message = re.sub("^argument (--[^:]+):(?= ')", r"\1", message).removeprefix("argument ")
        raise UserError(f"{message}{'' if message.endswith(('.', '?')) else '.'} --help lists all options.")

    def add_options(self, options: Iterable[Option], title: str = "Options") -> None:
        """Adds options, in a group with a title. Those that are not given are not among the values."""
        group, hidden = self.add_argument_group(title), argparse.SUPPRESS
        for one in options:
            nargs = ("*" if one.empty else "+") if one.is_list else "?" if one.is_switch else None
            group.add_argument(
                one.flag, dest=one.name, nargs=nargs, const=one.is_switch or None, type=one.convert, default=hidden,
                metavar=one.metavar, help=one.describe().replace("%", "%%"),
            )  # fmt: skip
            if one.default is True:
                group.add_argument(
                    f"--no-{one.flag[2:]}", dest=one.name, action="store_false", default=hidden, help=hidden
                )


class Parser(OneLineParser):
    """The parser of a command's options. It leaves defaults to the dataclasses."""

    def __init__(self, options: Iterable[Option], **texts: str | None):
        width = min(120, shutil.get_terminal_size((120, 24)).columns)
        style = partial(argparse.RawDescriptionHelpFormatter, max_help_position=36, width=width)
        super().__init__(add_help=False, allow_abbrev=False, formatter_class=style, **texts)  # type: ignore[arg-type]
        self.options = {one.name: one for one in options}
        self.add_options(self.options.values())

    def read_settings(self, settings: Mapping, where: str = "") -> dict[str, Any]:
        """The values of the entries of a YAML file; those that are `null` are left out. Raises a `UserError` for an unknown
        name or an invalid value; the message starts with `where`.
        """
        check_names(dict(settings), where.removesuffix(": ") or "the settings", self.options)
        return {name: self.options[name].read(value, where) for name, value in settings.items() if value is not None}

    def read_command_line(self, argv: list[str]) -> dict[str, Any]:
        """The values of a command line. Raises a `UserError` for an unknown option or an invalid value."""
        found, rest = self.parse_known_args(list(map(hyphenate, argv)))
        if rest:
            flags = [one.flag[2:] for one in self.options.values()]
            hint = did_you_mean(rest[0][2:].partition("=")[0], flags, "--") if rest[0].startswith("--") else ""
            raise UserError(f"The argument {short_repr(rest[0])} is not known.{hint} --help lists all options.")
        return vars(found)

    def make_groups(self, classes: Iterable[Any], values: Mapping) -> tuple:
        """An instance of each dataclass. Raises a `UserError` for a required option without a value."""
        if missing := [one.flag for name, one in self.options.items() if one.default is MISSING and name not in values]:
            raise UserError(f"{join_names(missing)} must be given. --help lists all options.")
        fields = ((cls, [one.name for one in dataclasses.fields(cls) if one.init]) for cls in classes)
        return tuple(cls(**{name: values[name] for name in names if name in values}) for cls, names in fields)


def hyphenate(word: str) -> str:
    """ "--best_of=a_b" -> "--best-of=a_b"; other words stay."""
    name, separator, value = word.partition("=")
    return f"{name.replace('_', '-')}{separator}{value}" if word.startswith("--") else word


def parse_name_place(
    value: str, option: str, example: str = "news=data/news", form: str = "NAME=PLACE"
) -> tuple[str, str]:
    """ "NAME=PLACE" -> name, place; raises a `UserError` for anything else."""
    name, _, place = map(str.strip, value.partition("="))
    if not (name and place):
        raise UserError(f"{option} {short_repr(value)} must be {form}. Example: {option} {example}.")
    return name, place


def check_file_names(names: Iterable[str], option: str) -> None:
    """Raises a `UserError` for a name that cannot become the name of a file."""
    for name in names:
        if re.search(r"^\.|[/\\\x00-\x1f\x7f-\x9f]", name):
            raise UserError(
                f"{option}: the name {short_repr(name)} cannot become the name of a file. Use one without / and \\, without control "
                "characters, and without a full stop at the start."
            )
