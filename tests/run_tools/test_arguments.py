"""Options of dataclasses, from a YAML file and the command line."""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal

import pytest

from lexperts.recipes import TRAIN
from run_tools.arguments import option, parse, print_help, required
from run_tools.errors import UserError


@dataclass(kw_only=True)
class Options:
    """Options of every type."""

    names: list[str] = required("names")
    size: int | None = option(None, "a number")
    kind: Literal["one", "two"] = option("one", "a choice, 50% of the time")
    lora: bool = option(True, "a switch")
    rate: float = option(0.1, "a rate")


def write(folder: Path, text: str) -> str:
    (folder / "own.yml").write_text(text)
    return str(folder / "own.yml")


def test_options_win_over_the_file_and_the_file_over_defaults(tmp_path):
    file = write(tmp_path, "names: [a, b]\nsize: 3\nlora: false\nrate: 2.0e-3\nkind: null\n_files: {x: y}\n")
    (found,), given = parse([Options], [file, "--size=-4", "--names", "c"], tmp_path)
    assert found == Options(names=["c"], size=-4, lora=False, rate=2e-3)
    assert given == {"names": ["c"], "size": -4, "lora": False, "rate": 2e-3}
    assert parse([Options], ["own", "--lora"], tmp_path)[0][0].lora is True  # by the name of a configuration
    assert parse([Options], ["--names", "x", "--no-lora"], tmp_path)[0][0] == Options(names=["x"], lora=False)


@pytest.mark.parametrize(
    "text, argv, fragment",
    [
        ("", ["--names", "a", "--kind", "three"], "'three'"),
        ("", ["--size", "1"], "--names"),
        ("", ["--names", "a", "--nam", "b"], "'--nam'"),  # no abbreviations
        ("names: [a]\nsiez: 1", ["own.yml"], "'siez'"),
        ("names: [a]\nsize: many", ["own.yml"], "'many'"),
        ("names: [a]", ["owm"], "'own'"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(text, argv, fragment, tmp_path):
    file = write(tmp_path, text)
    with pytest.raises(UserError) as error:
        parse([Options], [file if word == "own.yml" else word for word in argv], tmp_path)
    assert fragment in str(error.value) and "\n" not in str(error.value)


def test_help_shows_defaults_choices_and_configurations(tmp_path, capsys):
    write(tmp_path, "size: 1")
    assert print_help(["--help"], "lexperts train x", "What it does.", [Options], tmp_path)
    text = capsys.readouterr().out
    shown = (
        "What it does.",
        "lexperts train x [CONFIG] [OPTIONS]",
        "50% of the time (default: one)",
        "{one,two}",
        "own",
    )
    assert all(part in text for part in shown)
    assert not print_help(["--names", "a"], "lexperts train x", "", [Options], tmp_path)


@pytest.mark.parametrize(
    "recipe, path",
    [(name, path) for name in sorted({command.recipe for command in TRAIN.values()})
     for path in sorted((Path(__file__).parents[2] / "lexperts" / "recipes" / name).glob("*.yml"))],
    ids=lambda value: getattr(value, "stem", value),
)  # fmt: skip
def test_the_keys_of_every_configuration_are_options(recipe, path):
    arguments = import_module(f"lexperts.recipes.{recipe}.arguments")
    package, name = getattr(arguments, "TRAINING", ("transformers", "TrainingArguments"))
    training, errors = getattr(import_module(package), name), []
    for classes in arguments.ARGUMENTS.values():  # a recipe may have several, and a configuration is for one of them
        try:
            parse([*classes, training], [str(path), "--bf16", "false", *needed(classes)], path.parent)
        except UserError as error:
            errors.append(str(error))
    assert len(errors) < len(arguments.ARGUMENTS), errors


def needed(classes) -> list[str]:
    """Options that have no default and are not in configurations."""
    names = {name for cls in classes for name in cls.__dataclass_fields__}
    given = {"datasets": "a=b", "train_files": "a", "model_name_or_path": "a"}
    return [word for name in names & given.keys() for word in (f"--{name.replace('_', '-')}", given[name])]
