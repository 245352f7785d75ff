"""Arguments of the recipes' scripts: a YAML file, then options on the command line; errors that end in one line."""

import difflib
import json
import sys
from collections.abc import Iterable
from pathlib import Path

import yaml
from transformers import HfArgumentParser


class UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a mapping that has a key twice, of which PyYAML would silently take the last."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise ValueError(f"line {key_node.start_mark.line + 1}: the key {key!r} occurs twice. Remove one.")
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_yaml(path: str | Path) -> dict:
    """A YAML file of settings.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: for invalid YAML, a key that occurs twice, and anything but a mapping; the file is named.
    """
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from error
    except ValueError as error:
        raise ValueError(f"{path}, {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a mapping. Write one setting per line, such as learning_rate: 2.0e-4.")
    return content


def parse_arguments(kinds: tuple, description: str) -> tuple:
    """Dataclasses -> their values from a YAML file, if the first argument is one, and from the options after it.

    In YAML `null` means "not set": the default holds. Errors end the script with the exit status 2.
    """
    parser = HfArgumentParser(kinds, description=description.split("\n")[0], allow_abbrev=False)
    given = sys.argv[1:]
    return run_or_exit(parse, parser, given, traceback="--traceback" in given)


def parse(parser: HfArgumentParser, given: list[str]) -> tuple:
    """Raises a ValueError for a name that is not known, with the nearest known one."""
    known = [option.lstrip("-") for option in parser._option_string_actions]
    if given and given[0].endswith((".yml", ".yaml")):
        given = [*options_of(given[0], known), *given[1:]]
    *found, rest = parser.parse_args_into_dataclasses(given, return_remaining_strings=True)
    if rest:
        hint = did_you_mean(rest[0].lstrip("-").partition("=")[0], known, "--") if rest[0].startswith("-") else ""
        raise ValueError(f"The argument {rest[0]!r} is not known.{hint} --help lists all.")
    return tuple(found)


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


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {prefix}{close[0]}?" if close else ""


def run_or_exit(call, *args, traceback: bool = False, **named):
    """What the call returns; an error that the user can fix ends the script in one line, with the exit status 2."""
    try:
        return call(*args, **named)
    except (OSError, ValueError, ImportError) as error:
        if traceback:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
