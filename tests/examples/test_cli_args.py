"""The one parser of the recipes, through each script that uses it."""

import sys

import pytest

from tests.examples.scripts import scripts_of

# folder, script, what it requires, an option that may be missing
SCRIPTS = (
    ("seke", "train", {"output_dir": "x"}, "start_from"),
    ("hypernet", "train_keyphrases", {"output_dir": "x"}, "dataset_name"),
    ("hypernet", "train_classification", {"output_dir": "x"}, "dataset_name"),
    ("hypernet", "train_qa", {"output_dir": "x"}, "dataset_name"),
    ("exhird", "prepare", {"output_dir": "x"}, "pieces"),
    ("exhird", "train", {"output_dir": "x"}, "data"),
    ("exhird", "evaluate", {"model": "x", "test_files": ["a=b"]}, "output_dir"),
    ("moesumm", "pretrain", {"output_dir": "x", "datasets": ["a=b"]}, "document_column"),
    ("moesumm", "train", {"output_dir": "x", "datasets": ["a=b"], "model_name_or_path": "x"}, "document_column"),
    ("moesumm", "evaluate", {"systems": ["a=b"]}, "bertscore_model"),
    ("lexicon", "train_expert", {"output_dir": "x", "train_files": ["a"], "from_scratch": {}}, "model_name_or_path"),
    ("lexicon", "tune_router", {"output_dir": "x", "train_files": ["a"], "model_name_or_path": "x"}, "hub_model_id"),
    ("lexicon", "train_reward", {"output_dir": "x", "train_files": ["a"], "model_name_or_path": "x", "reward_base": "x"}, "run_name"),
    ("lexicon", "generate", {"output": "x.jsonl", "test_files": ["a"], "model_name_or_path": "x"}, "reward_model"),
    ("lexicon", "in_context", {"output": "x.jsonl", "test_files": ["a"], "train_files": ["a"], "model_name_or_path": "x"}, "embedder"),
    ("lexicon", "evaluate", {"output_dir": "x", "files": ["a=b"]}, "baseline"),
    ("lexicon", "prepare", {"output_dir": "x", "sources": ["a=b"]}, "term_column"),
)  # fmt: skip


class Parsed(Exception):
    """Carries what a script's parser returned, before the script does anything with it."""


def parse(script, monkeypatch, *given):
    real = script.parse_arguments

    def stop(*arguments):
        raise Parsed(real(*arguments))

    monkeypatch.setattr(script, "parse_arguments", stop)
    monkeypatch.setattr(sys, "argv", ["script", *map(str, given)])
    try:
        script.main()
    except Parsed as parsed:
        return parsed.args[0]


def as_yaml(settings: dict) -> str:
    return "".join(f"{name}: {value}\n" for name, value in settings.items())


@pytest.mark.parametrize(
    "folder, name, required, optional", SCRIPTS, ids=lambda value: value if type(value) is str else ""
)
def test_null_means_not_set_and_what_is_unknown_or_given_twice_is_an_error(
    folder, name, required, optional, tmp_path, monkeypatch, capsys
):
    recipe = tmp_path / "recipe.yml"
    with scripts_of(folder, name) as scripts:
        script = getattr(scripts, name)
        recipe.write_text(as_yaml({**required, optional: "null"}))
        kept = [holder for holder in parse(script, monkeypatch, recipe) if hasattr(holder, optional)]
        assert [getattr(holder, optional) for holder in kept] == [None]
        for settings, said in (
            (as_yaml({**required, "trackback": "true"}), "'trackback' is not known. Did you mean traceback?"),
            (as_yaml(required) * 2, f"line {1 + len(required)}: the key {next(iter(required))!r} occurs twice"),
        ):
            recipe.write_text(settings)
            with pytest.raises(SystemExit) as ended:
                parse(script, monkeypatch, recipe)
            error = capsys.readouterr().err
            assert ended.value.code == 2 and said in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "content, given, said",
    [
        ("- a\n", (), "is not a mapping. Write one setting per line"),
        ("a: [\n", (), "is not valid YAML"),
        ("seed: 1\nlr_scheduler_kwargs: {a: 1, a: 2}\n", (), "line 2: the key 'a' occurs twice"),
        ("seed: 1\n", ("--learning_rat", 1), "'--learning_rat' is not known. Did you mean --learning_rate?"),
        ("seed: 1\n", ("more.yml",), "'more.yml' is not known. --help lists all."),
        (None, (), "No such file"),
    ],
)
def test_what_is_wrong_with_a_recipe_is_named(content, given, said, tmp_path, monkeypatch, capsys):
    recipe = tmp_path / "recipe.yml"
    if content:
        recipe.write_text(content)
    with scripts_of("seke", "train") as scripts, pytest.raises(SystemExit) as ended:
        parse(scripts.train, monkeypatch, recipe, *given)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and said in error and error.count("\n") == 1
