"""The one parser of the recipes, over the arguments of every command."""

import dataclasses
import re
from dataclasses import MISSING
from pathlib import Path

import pytest
import torch
import yaml

from lexperts import recipes
from lexperts.cli import build_app
from lexperts.recipes import DEFINE, TRAIN
from lexperts.recipes.common.arguments import command, load_classes, make_parser, parse_command
from lexperts.recipes.common.configurations import config_names, read_config
from run_tools.errors import UserError
from run_tools.options import list_options

COMMANDS = sorted({(command.recipe, command.module) for group in (TRAIN, DEFINE) for command in group.values()})
CASES = [command for command in COMMANDS if command != ("lexicon", "run")]  # which is tested with its recipe


def required_by(recipe, module) -> dict:
    """A value of each option that a command requires."""
    options = make_parser(recipe, module).options.values()
    required = [one for one in options if one.default is MISSING or one.name == "train_files"]
    values = {one.name: ["a=b"] if one.is_list else "x.jsonl" for one in required}
    return values | ({"from_scratch": {}} if module == "train_expert" else {})


def as_yaml(settings: dict) -> str:
    return "".join(f"{name}: {value}\n" for name, value in settings.items())


def refused(capsys, recipe, module, *argv) -> str:
    """The one line on the standard error with which a command line is refused."""
    with pytest.raises(SystemExit) as ended:
        command(recipe, module, pytest.fail)(list(map(str, argv)))
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1
    return error


@pytest.mark.parametrize("recipe, module", CASES, ids=lambda value: value)
def test_null_means_not_set_and_unknown_or_repeated_keys_are_errors(recipe, module, tmp_path, capsys):
    optional = next(one.name for one in make_parser(recipe, module).options.values() if one.default is None)
    settings, path = required_by(recipe, module) | {optional: "null"}, tmp_path / "settings.yml"
    path.write_text(as_yaml(settings))
    groups = parse_command(recipe, module, [str(path)])
    assert [getattr(group, optional) for group in groups if hasattr(group, optional)] == [None]
    path.write_text(as_yaml({**settings, "output_dri": "x"}))
    assert "'output_dri'" in (error := refused(capsys, recipe, module, path)) and "'output" in error
    path.write_text(as_yaml(settings) * 2)
    error = refused(capsys, recipe, module, path)
    assert f"line {1 + len(settings)}" in error and repr(next(iter(settings))) in error


@pytest.mark.parametrize("recipe, module", COMMANDS, ids=lambda value: value)
def test_the_help_names_every_option(recipe, module, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_command(recipe, module, ["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and "Options:" in text
    assert "lexperts " in text
    for cls in load_classes(recipe, module, with_training=False):
        for one in list_options(cls):
            assert re.search(rf"{one.flag}(?![\w-])", text) and len(one.help) > 10, one.name


CONFIGURATIONS = [(*command, name) for command in COMMANDS for name in config_names(*command)]


def test_every_yaml_file_is_a_configuration_of_one_command():
    files = {(path.parent.name, path.stem) for path in Path(recipes.__file__).parent.glob("*/*.yml")}
    configurations = [(recipe, name) for recipe, _, name in CONFIGURATIONS]
    assert sorted(configurations) == sorted(files)


@pytest.mark.parametrize("recipe, module, name", CONFIGURATIONS, ids=lambda value: value)
def test_every_configuration_is_read_by_its_command(recipe, module, name):
    required = {key: value for key, value in required_by(recipe, module).items() if key != "from_scratch"}
    argv = [
        part
        for key, value in required.items()
        for part in (f"--{key}", *([value] if isinstance(value, str) else value))
    ]
    fsdp = ["--fsdp-config", "{}"] if recipe == "lexicon" else []
    groups = parse_command(recipe, module, [name, *argv, "--use-cpu", "true", "--bf16", "false", *fsdp])
    options = {field.name: getattr(group, field.name) for group in groups for field in dataclasses.fields(group)}
    settings = yaml.safe_load(read_config(recipe, module, name))
    assert settings.keys() <= options.keys() and options["learning_rate"] == settings["learning_rate"]


@pytest.mark.parametrize(
    "content, argv, expected",
    [
        ("- a\n", (), "mapping"),
        ("a: [\n", (), "not valid YAML"),
        ("seed: 1\nlr_scheduler_kwargs: {a: 1, a: 2}\n", (), "duplicate key 'a' (line 2)"),
        ("seed: 1\n", ("--learning-rat", 1), "'--learning-rate'?"),
        ("seed: 1\n", ("more.yml",), "'more.yml'"),
        ("seed: 1\n", ("--learning-rate", "fast"), "--learning-rate 'fast' is not a number"),
        (None, (), "does not exist"),
    ],
)
def test_errors_name_the_key_and_the_line(content, argv, expected, tmp_path, capsys):
    path = tmp_path / "settings.yml"
    if content:
        path.write_text(content)
    assert expected in refused(capsys, "seke", "train", path, *argv)


@pytest.mark.parametrize(
    "line, expected",
    [
        ("exclude: []", []), ("exclude: [a]", ["a"]), ("keep_splits: true", None), ("exclude: a", ["a"]),
        ("seed: [1]", "is a list"), ("seed: {a: 1}", "holds a dict"), ("seed: 2020-01-01", "holds a date"),
        ("seed: .nan", "not a whole number"), ("seed: true", "put true in quotes"), ("exclude: [[a]]", "holds a list"),
        ("exclude: [!!binary aGVsbG8=]", "holds a bytes"), ("1: 2", "the key 1 is not known"),
    ],
)  # fmt: skip
def test_values_of_yaml_have_the_type_of_the_option(line, expected, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    path = tmp_path / "settings.yml"
    path.write_text(f"output_dir: out\nsources: [a={tmp_path}/rows.jsonl]\n{line}\n")
    if isinstance(expected, str):
        assert expected in refused(capsys, "lexicon", "prepare", path)
    else:
        (args,) = parse_command("lexicon", "prepare", [str(path)])
        assert args.keep_splits if expected is None else args.exclude == expected


def test_a_folder_does_not_shadow_a_configuration(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "minilm_cpu").mkdir()
    (tmp_path / "mine").mkdir()
    assert parse_command("seke", "train", ["minilm_cpu", "--output-dir", "x"])[1].max_length == 256
    assert "'mine'" in refused(capsys, "seke", "train", "mine")


def test_a_configuration_is_found_by_its_name_and_the_command_line_wins(tmp_path, capsys):
    for name in config_names("seke", "train"):
        groups = parse_command("seke", "train", [name, "--use-cpu", "true", "--max-length", "99", "--output-dir", "x"])
        options = {field.name: getattr(group, field.name) for group in groups for field in dataclasses.fields(group)}
        assert options["max_length"] == 99 and options["output_dir"] == "x"
        assert options["learning_rate"] == {"default_base": 5e-5, "distill": 1e-3}.get(name, 2e-4)
    assert "minilm_cpu" in refused(capsys, "seke", "train", "minilm_cup")
    with pytest.raises(SystemExit):
        parse_command("seke", "train", ["--show-config", "minilm_cpu"])
    path = tmp_path / "copied.yml"
    path.write_text(capsys.readouterr().out)
    assert parse_command("seke", "train", [str(path)])[1].max_length == 256


@pytest.mark.parametrize("separator", ["-", "_"])
def test_options_are_written_with_hyphens_or_underscores(separator, capsys):
    words = [word.replace("-", separator) for word in ("max-length=99", "no-use-moe", "test-every-epoch")]
    model, data, *_ = parse_command("seke", "train", [f"--{word}" for word in words])
    assert (data.max_length, model.use_moe, data.test_every_epoch) == (99, False, True)
    with pytest.raises(SystemExit):
        build_app()(["define", "terms", f"--best{separator}of", "0", "rows.jsonl", "out.jsonl"])
    assert "--best-of '0'" in capsys.readouterr().err


def test_all_options_are_listed_on_request(capsys):
    with pytest.raises(SystemExit):
        parse_command("seke", "train", ["--help_all"])
    text = capsys.readouterr().out
    assert "--learning-rate FLOAT" in text and "--max-length INT" in text and text.count("--debug") == 1


def test_debug_raises_an_error_of_an_option():
    with pytest.raises(UserError, match="--max-length 'x'"):
        command("seke", "train", pytest.fail)(["--max-length", "x", "--debug"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_recipe_for_a_gpu_names_the_option_for_a_cpu(monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    with pytest.raises(UserError, match="bf16: true needs a GPU .* --use-cpu true"):
        parse_command("lexicon", "train_expert", ["llama3_8b", "--train-files", "x.jsonl"])
