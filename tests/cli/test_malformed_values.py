"""Every malformed value of every option of every command: one line, exit status 2, nothing loaded, written or removed.

The options, their types and their valid values are those that the commands declare.
"""

import json
import os
import shutil
import typing
from types import SimpleNamespace

import pytest
import typer
from transformers import PreTrainedModel

import merge_tools
from lexperts.cli import build_app
from lexperts.recipes import DEFINE, EVALUATE, TRAIN
from lexperts.recipes.common.arguments import load_classes, make_parser
from run_tools.option_values import LARGEST, Limits
from run_tools.options import list_options
from tests.merge_tools.conftest import experts, recipe_of  # noqa: F401  (a fixture)
from tests.recipes.helpers import run_main, write_rows

APP = typer.main.get_command(build_app())
ROW = {
    "id": 1, "title": "a", "text": "graph cuts solve problems", "keyphrases": ["graph cuts"], "label": "b", "term": "cut",
    "context": "the cut", "definition": "a part", "generated": "a piece", "document": "One. Two.", "summary": "One.",
    "question": "what", "answers": {"text": ["cuts"], "answer_start": [6]},
}  # fmt: skip
TEXTS = ("", "a\0b", "a\x1b[31mb")  # an option left empty, and control characters
NOT_INTS = ("banana", "", "1.5", "nan", "1e5", "[1]", "9" * 30, "-" + "9" * 30, "1,000", "{}")
NOT_FLOATS = ("banana", "", "nan", "inf", "-inf", "1e999", "[1]", "0,5")
TASKS = {**{f"train {n}": c for n, c in TRAIN.items()}, **{f"evaluate {n}": c for n, c in EVALUATE.items()}}
TASKS |= {f"define {n}": c for n, c in DEFINE.items()}


def malformed_numbers(kind, limits: Limits) -> list[str]:
    """Values that are not of the type, or out of range."""
    values = list(NOT_INTS if kind is int else NOT_FLOATS)
    if limits.least is not None:
        values += [f"{limits.least - 1:g}", "-1000000"]
    if limits.above is not None:
        values += [f"{limits.above:g}", f"{limits.above - 1:g}"]
    if limits.below is not None:
        values.append(f"{limits.below:g}")
    if limits.most is not None:
        values.append(f"{limits.most + 1:.15g}")
    elif kind is int:
        values.append(str(LARGEST + 1))
    return values


def malformed_places(kind: str, at) -> list[str]:
    """Texts that name nothing of a kind of `option_kinds.KINDS`."""
    absent, folder, file = f"{at.folder}/absent.jsonl", str(at.empty), str(at.rows)
    if kind.startswith("NAME="):
        own = [absent, folder] if kind == "NAME=FILE" else [absent]
        return ["banana", "=a", "a=", *(f"a={one}" for one in own)]
    return {
        "file": [absent, folder, f"{file}/x"],
        "named file": [absent, folder, f"a={absent}"],
        "folder": [absent, file],
        "place": [absent],
        "model": [absent, folder, file, "a b", "a/b/c", "no/such-model"],
        "embedder": [absent, file, "a b"],
        "output folder": [file, f"{file}/x"],
        "output file": [folder, f"{file}/x.jsonl"],
        "checkpoint": [absent, file],
        "language": ["banana", "German"],
        "tracker": ["banana", "[wandb]"],
        "repository": ["a b", "a/b/c", "a--b"],
        "json": ["banana", "[1]", "{", "1"],
    }[kind]


# recipes


def plain_type(hint):
    """The type of a value: list[int] | None -> int."""
    parts = [part for part in typing.get_args(hint) if part is not type(None)]
    return plain_type(parts[0]) if parts and typing.get_origin(hint) is not typing.Literal else hint


def malformed(hint, limits: Limits, kind: str, at) -> list[str]:
    """Malformed values of an option."""
    plain = plain_type(hint)
    if typing.get_origin(plain) is typing.Literal:
        limits = Limits(choices=typing.get_args(plain))
    if limits.choices:
        return ["banana", "", "[a]", limits.choices[0] + "x", limits.choices[0].upper() + " "]
    if plain is bool:
        return ["banana", "", "2", "nan", "[true]"]
    if plain in (int, float):
        return malformed_numbers(plain, limits)
    return [*TEXTS, *(malformed_places(kind, at) if kind else [])]


# what each recipe needs
RECIPES = {
    "train seke": ("train_files", "output_dir"),
    "train exhird": ("train_files", "validation_files", "output_dir"),
    "train hypernet-keyphrases": ("train_files", "output_dir"),
    "train hypernet-classes": ("train_files", "output_dir"),
    "train hypernet-qa": ("train_files", "output_dir"),
    "train moesumm": ("model_name_or_path", "datasets", "output_dir"),
    "train expert": ("model_name_or_path", "train_files", "output_dir"),
    "train lexicon-expert": ("model_name_or_path", "train_files", "output_dir"),
    "train lexicon-router": ("model_name_or_path", "train_files", "output_dir"),
    "evaluate exhird": ("model", "test_files=NAME", "output_dir"),
    "evaluate moesumm": ("systems", "output_dir"),
    "evaluate definitions": ("files", "output_dir"),
    "define prepare": ("sources", "output_dir"),
    "define generate": ("model_name_or_path", "test_files", "output"),
}


@pytest.fixture(scope="module")
def at(tmp_path_factory):
    """Files and folders that exist, and a working directory that stays empty."""
    folder = tmp_path_factory.mktemp("inputs")
    at = SimpleNamespace(folder=folder, empty=folder / "empty", model=folder / "model", data=folder / "data")
    at.work = tmp_path_factory.mktemp("work")
    at.empty.mkdir()
    at.model.mkdir()
    (at.model / "config.json").write_text(json.dumps({"model_type": "bert"}))
    at.rows = write_rows(folder / "rows.jsonl", [{**ROW, "text": f"{ROW['text']} {i}", "id": i} for i in range(8)])
    for split in ("train", "validation", "test"):
        write_rows(at.data / f"{split}.jsonl", [ROW] * 4)
    at.text = folder / "text.txt"
    at.text.write_text(ROW["text"])
    return at


@pytest.fixture(autouse=True)
def nothing_is_loaded(at, monkeypatch):
    """Loading a model, or starting the app, is recorded and ends a command."""
    at.loaded = []

    def fail(*_, **__):
        at.loaded.append(True)
        raise AssertionError("a model was loaded before the options were checked")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", fail)
    monkeypatch.setattr("lexperts.app.launch", fail)
    monkeypatch.chdir(at.work)


def value_of(name: str, at) -> tuple[str, list[str]]:
    """The option and a valid value of what a recipe needs."""
    option = name.partition("=")[0]
    named = f"a={at.rows}"
    special = {"datasets": named, "files": named, "sources": named, "systems": f"a={at.model}", "config": "small"}
    special |= {"output": "out.jsonl", "data": at.data} | dict.fromkeys(("output_dir", "work_dir"), "out")
    if name == "test_files=NAME":
        value = named
    elif option in special:
        value = special[option]
    else:
        value = at.rows if option.endswith("files") else at.model
    return f"--{option}", str(value)


def snapshot(*folders) -> list:
    """The names, sizes and times of everything below folders."""
    entries = []
    for folder in folders:
        for root, _, files in os.walk(folder):
            entries += [
                (root, *((n, os.stat(f"{root}/{n}").st_size, os.stat(f"{root}/{n}").st_mtime_ns) for n in files))
            ]
    return sorted(entries)


def complaint(arguments: list[str], names: tuple[str, ...], value: str, at, before) -> str | None:
    """How a command line with a malformed value does not end as it should; `None` if it does."""
    done = run_main(APP.main, *arguments)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    shown = repr(value.partition("=")[2] or value)[1:20].rstrip("'\"")
    if at.loaded:
        problem = f"a model was loaded {at.loaded.clear() or ''}"
    elif done.returncode != 2:
        problem = f"exit status {done.returncode}"
    elif len(lines) != 1 or "Traceback" in done.stdout + done.stderr:
        problem = f"{len(lines)} lines"
    elif len(lines[0]) > 600 or not lines[0].isprintable():
        problem = "a long line, or a control character"
    elif not any(name in lines[0].replace("-", "_") for name in names) and not (value and shown in lines[0]):
        problem = "neither the option nor the value is named"
    elif snapshot(at.folder, at.work) != before:
        problem = f"written: {os.listdir(at.work)}"
    else:
        return None
    return f"{names[0]}={value[:40]!r}: {problem}: {done.stderr[-300:]!r}"


def check(name: str, cases, base, at, metavars: dict = {}) -> None:  # noqa: B006
    """Tries all values of all options; `cases` has options with values, `base` makes the command line of an option's value."""
    before, failed, count = snapshot(at.folder, at.work), [], 0
    for option, values in cases:
        for value in values:
            count += 1
            arguments = [*name.split(), *base(option, value)]
            if problem := complaint(arguments, (option, *metavars.get(option, ())), value, at, before):
                failed.append(problem)
    print(f"{name}: {count} values of {len(cases)} options", end=" ")
    assert not failed, f"{len(failed)} of {count}:\n" + "\n".join(failed)


@pytest.mark.parametrize("name", TASKS)
def test_recipes(name, at):
    command = TASKS[name]
    options = make_parser(command.recipe, command.module).options
    if name != "train seke":  # the options of transformers are the same in each
        own = {one.name for cls in load_classes(command.recipe, command.module, False) for one in list_options(cls)}
        options = {option: options[option] for option in own}
    needed = dict(value_of(one, at) for one in RECIPES[name])
    cases = [
        (option, malformed(one.type, one.limits, "json" if one.type is dict else one.kind, at))
        for option, one in options.items()
    ]
    cases += [(f"{option}x", ["1"]) for option in options]

    def base(option, value):
        given = {**needed, f"--{option}": value}
        if option == "from_scratch":
            del given["--model_name_or_path"]
        return [f"{key}={one}" for key, one in given.items()]

    check(name, cases, base, at)


# commands of typer

PLACES = {  # what a text or a path names, by the name of the argument or option
    **dict.fromkeys(("config", "candidates", "evaluation", "calibration", "samples", "predictions", "gold", "files"), "file"),
    **dict.fromkeys(("source", "data", "expert_path"), "place"), **dict.fromkeys(("folder", "mixture"), "folder"),
    **dict.fromkeys(("model", "reward_model"), "model"), "out": "output folder",
    **dict.fromkeys(("output", "plot"), "output file"), "converter": "file", "embedder": "embedder",
}  # fmt: skip
FOLDERS = (("keyphrases export", "output"),)
# texts of which "banana" is not one, too
CHOSEN = (
    "device", "max_length", "allow", "format", "expert", "encoding", "delimiter", "domain", "engine", "method", "host",
)  # fmt: skip


def typer_commands():
    """ "merge compose" -> the command."""
    for group, command in APP.commands.items():
        for name, own in (getattr(command, "commands", None) or {"": command}).items():
            if f"{group} {name}".strip() not in TASKS:
                yield f"{group} {name}".strip(), own


COMMANDS = dict(typer_commands())


@pytest.fixture(scope="module")
def merged(at, experts):  # noqa: F811
    """A recipe of three experts and its mixture."""
    at.recipe, at.mixture = at.folder / "recipe.yml", at.folder / "mixture"
    at.recipe.write_text(json.dumps(recipe_of(experts(3))))
    merge_tools.compose(at.recipe, at.mixture)
    return at


def valid_value(name: str, parameter, at) -> list[str]:
    """A valid value of what a command requires."""
    values = {
        "config": at.recipe, "out": "out", "output": "out.jsonl", "model": at.model,
        "folder": at.mixture, "source": at.model if name == "merge add" else at.rows, "predictions": at.rows, "gold": at.rows, "files": at.text, "text": "a",
        "domain": f"a={at.rows}", "expert": "birds", "data": at.rows, "format": "lexicon", "term": "bank", "context": "a bank",
    }  # fmt: skip
    return [str(values[parameter.name])]


def malformed_of(name: str, parameter, at) -> list[str]:
    """Malformed values of an argument or option of a command."""
    hint, limits = parameter.type_descriptor.annotation, Limits(least=parameter.min, most=parameter.max)
    if plain_type(hint) in (int, float) or typing.get_origin(plain_type(hint)) is typing.Literal:
        return malformed(hint, limits, "", at)
    kind = PLACES.get(parameter.name, "")
    kind = "output folder" if (name, parameter.name) in FOLDERS else kind
    if (name, parameter.name) == ("merge verify", "moved"):
        return [*TEXTS, "banana", "=a", "birds=", f"banana={at.model}", f"birds={at.folder}/absent"]
    known = parameter.name in CHOSEN and (name, parameter.name) != ("merge route", "domain")  # known to the model only
    return [*TEXTS, *(malformed_places(kind, at) if kind else []), *["banana"] * known]


@pytest.mark.parametrize("name", COMMANDS)
def test_commands(name, at, merged):
    parameters = [p for p in COMMANDS[name].params if plain_type(p.type_descriptor.annotation) is not bool]
    more = {"merge cluster": ["--method", "tfidf"]}.get(name, [])

    def base(option, value):
        arguments = list(more)
        for p in parameters:
            given = [value] if p.name == option else valid_value(name, p, at) if p.required else []
            if p.param_type_name == "argument":
                arguments += given
            else:
                for one in given:
                    arguments += [f"{p.opts[0]}={one}"] if p.opts[0].startswith("--") else [p.opts[0], one]
        return [*arguments, *[f"--{option}=1"] * (option.endswith("x") and option not in {p.name for p in parameters})]

    cases = [(p.name, malformed_of(name, p, at)) for p in parameters]
    cases += [(f"{p.name}x", [""]) for p in parameters if p.param_type_name == "option"]
    check(name, cases, base, at, {p.name: [p.metavar or p.name, *(o.lstrip("-") for o in p.opts)] for p in parameters})


def test_a_value_that_passes_is_a_complaint(at, merged):
    before = snapshot(at.folder, at.work)
    assert "exit status 0" in complaint(["merge", "inspect", str(at.mixture)], ("folder",), "x", at, before)
    extract = ["merge", "extract", str(at.mixture), "out", "--expert", "birds"]
    assert "exit status 0" in complaint(extract, ("out",), "x", at, before) and (at.work / "out").is_dir()
    shutil.rmtree(at.work / "out")
