"""The `--help` of a recipe's command, and its configurations; nothing here imports torch."""

import ast
import dataclasses
import shutil
import textwrap
import types
import typing
from importlib import import_module
from importlib.resources import files

from run_tools.errors import UserError, did_you_mean

TRAINING = "transformers.TrainingArguments"  # a name in place of the class, whose import takes seconds
COLUMN = 36  # where the help texts start


def config_names(recipe: str, module: str) -> tuple[str, ...]:
    """The configurations that come with a command, such as `minilm_cpu`."""
    return import_module(f"lexperts.recipes.{recipe}.arguments").CONFIGS.get(module, ())


def read_config(recipe: str, module: str, name: str) -> str:
    """The text of a configuration. Raises a `UserError` for an unknown name."""
    check_config(name, config_names(recipe, module))
    return (files(f"lexperts.recipes.{recipe}") / f"{name}.yml").read_text(encoding="utf-8")


def check_config(name: str, names: tuple[str, ...]) -> None:
    """Raises a `UserError` for an unknown configuration; the known ones are named."""
    if name not in names:
        known = did_you_mean(name, names) if names else " No configurations come with this command."
        raise UserError(f"There is no configuration {name!r}.{known} A YAML file's name ends in .yml.")


def type_name(kind) -> str:
    """list[str] -> "TEXT ...", bool -> "true|false"."""
    names = {str: "TEXT", int: "INT", float: "FLOAT", bool: "true|false"}
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    if typing.get_origin(kind) is list:
        return f"{type_name(typing.get_args(kind)[0])} ..."
    if typing.get_origin(kind) is typing.Literal:
        return "|".join(map(str, typing.get_args(kind)))
    return names.get(kind, getattr(kind, "__name__", str(kind)).upper())


def default_of(field: dataclasses.Field) -> str:
    """The default of a field as one would type it, "" if it has none."""
    default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    if default is None or default is dataclasses.MISSING:
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    return " ".join(map(str, default)) if isinstance(default, list) else str(default)


def option_lines(field: dataclasses.Field, kind, width: int) -> str:
    """`  --name TYPE   help (default: value)` of one field of a dataclass."""
    required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    default = default_of(field)
    text = field.metadata.get("help", "") + (" (required)" if required else f" (default: {default})" if default else "")
    head, indent = f"  --{field.name} {type_name(kind)}", " " * COLUMN
    lines = textwrap.wrap(text, max(40, width - COLUMN)) or [""]
    first = f"{head:<{COLUMN}}{lines[0]}" if len(head) < COLUMN - 1 else f"{head}\n{indent}{lines[0]}"
    return "\n".join([first, *(indent + line for line in lines[1:])])


def format_help(command: str, recipe: str, module: str, kinds: tuple) -> str:
    """What `COMMAND --help` prints: the module's docstring, its options, its configurations."""
    width = min(120, shutil.get_terminal_size((120, 24)).columns)
    names = config_names(recipe, module)
    parts = [f"Usage: {command} [CONFIG] [OPTIONS]"]
    source = (files(f"lexperts.recipes.{recipe}") / f"{module}.py").read_text(encoding="utf-8")  # not imported
    parts.append(ast.get_docstring(ast.parse(source)) or "")
    lines = []
    for kind in kinds:
        if kind != TRAINING:
            hints = typing.get_type_hints(kind)
            lines += [option_lines(field, hints[field.name], width) for field in dataclasses.fields(kind)]
    if names:
        lines.append(f"{'  --show-config NAME':<{COLUMN}}print a configuration, to save and edit it")
    lines.append(f"{'  --debug':<{COLUMN}}show the traceback of an error")
    lines.append(f"{'  -h, --help':<{COLUMN}}show this message")
    parts.append("Options:\n" + "\n".join(lines))
    if TRAINING in kinds:
        parts.append(
            "All options of transformers.TrainingArguments are accepted too, such as --output_dir, --learning_rate, "
            "--num_train_epochs, --per_device_train_batch_size. --help-all lists them."
        )
    known = f", or one of: {', '.join(names)}" if names else ""
    parts.append(f"CONFIG is a YAML file of options{known}. Options on the command line win.")
    return "\n\n".join(parts)
