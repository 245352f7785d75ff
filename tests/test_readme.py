"""The README's Python: every name of every block is known, and the blocks run as written on tiny models."""

import ast
import builtins
import importlib
import re
import shutil
from pathlib import Path

import pytest
import yaml
from transformers import pipeline

import merge_tools
from tests.merge_tools.conftest import save_expert
from tests.modeling_moesumm.conftest import tiny_moesumm
from tests.test_model_cards import tiny_model, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)
TINY = {  # a checkpoint that the README assumes -> a tiny one
    "runs/quickstart/seke-minilm": ("keyphrase-extraction", "seke"),
    "runs/hypernet-minilm": ("keyphrase-extraction", "hypernet"),
    "runs/hypernet-squad": ("extractive-qa", "hypernet-qa"),
    "runs/keyphrases": ("keyphrase-generation", "exhird"),
    "runs/moesumm": ("moe-summarization", "moesumm"),
}


def unknown_names(code: str) -> set[str]:
    """Names that a block reads and neither binds nor imports."""
    names = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)]
    bound = {node.id for node in names if not isinstance(node.ctx, ast.Load)} | set(dir(builtins))
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            bound |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return {node.id for node in names} - bound


def missing_imports(code: str) -> list[str]:
    """What a block imports, or reads from a module that it imports, and is not there."""
    modules, missing = {}, []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            modules |= {alias.name: importlib.import_module(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            missing += [f"{node.module}.{alias.name}" for alias in node.names if not hasattr(module, alias.name)]
    for dotted in re.findall(r"[\w.]+", code):
        if dotted.split(".")[0] in modules and not is_there(dotted):
            missing.append(dotted)
    return missing


def is_there(dotted: str) -> bool:
    first, *rest = dotted.strip(".").split(".")
    value = importlib.import_module(first)
    for name in rest:
        if not hasattr(value, name):
            return False
        value = getattr(value, name)
    return True


def block_with(part: str) -> str:
    (block,) = [block for block in BLOCKS if part in block]
    return block


def test_the_checks_find_what_they_are_for():
    assert unknown_names("x = [y for y in z]\nprint(x, torch.ones(1))") == {"z", "torch"}
    assert missing_imports("import merge_tools\nfrom pathlib import Psth\nmerge_tools.compse(1)") == [
        "pathlib.Psth", "merge_tools.compse",
    ]  # fmt: skip


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split("\n")[0][:50])
def test_every_block_stands_for_itself(block):
    assert unknown_names(block) == set() and missing_imports(block) == []


def test_what_the_text_names_is_there():
    packages = "keyphrase_tools|merge_tools|lexperts_cli|modeling_[a-z]+"
    named = set(re.findall(rf"(?<![\w/])(?:{packages})(?:\.\w+)+", README)) - {"lexperts_cli.keyphrases"}
    assert len(named) > 4 and [name for name in named if not is_there(name)] == []


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the checkpoints that the README assumes."""
    folder = tmp_path_factory.mktemp("readme")
    for name, (task, kind) in TINY.items():
        model, tokenizer = tiny_model(kind)
        if kind == "moesumm":
            model, tokenizer = tiny_moesumm(datasets=["news", "mail"]), tiny_tokenizer()
        pipeline(task, model=model, tokenizer=tokenizer).save_pretrained(folder / name)
    shutil.copytree(ROOT / "examples" / "corpus", folder / "examples" / "corpus")
    for seed, name in enumerate(("llama-base", "llama-law", "llama-medicine")):
        save_expert(folder / name, seed)
    return folder


def run(code: str) -> dict:
    """Runs a block as a notebook does -> its names, and `_` the values of its expressions."""
    space = {"_": []}
    for statement in ast.parse(code).body:
        part = ast.unparse(statement)
        if isinstance(statement, ast.Expr):
            space["_"].append(eval(part, space))
        else:
            exec(part, space)
    return space


def test_keyphrases_are_extracted_by_the_lines_of_the_readme(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    run(block_with("is_split_into_words"))
    one, several, *of_each, titled, words = map(ast.literal_eval, capsys.readouterr().out.splitlines())
    assert one and [phrases[0] for phrases in several[:1]] == one[:1] and len(several) == len(of_each) == 2
    assert all(phrase["field"] in ("title", "text") for phrase in titled) and titled and words
    assert run(block_with("# a paragraph about tidal power"))["_"]


@pytest.mark.parametrize("part", ["moe-summarization", "extractive-qa", "keyphrase-generation"])
def test_other_pipelines_run_by_the_lines_of_the_readme(part, place, monkeypatch):
    monkeypatch.chdir(place)
    space = run(block_with(f'pipeline("{part}"'))
    assert space["_"] or space.get("answer")


def test_a_recipe_of_the_readme_is_composed_and_opened_by_its_lines(place, monkeypatch):
    monkeypatch.chdir(place)
    (recipe,) = (block for block in re.findall(r"```yaml\n(.*?)```", README, re.S) if "experts:" in block)
    (place / "mixture.yml").write_text(recipe, encoding="utf-8")
    assert yaml.safe_load(recipe)["gate_mode"] == "hidden"
    merge_tools.compose("mixture.yml", "mixture")
    assert run(block_with('from_pretrained("mixture")'))["model"].config.model_type == "mixtral"
    space = run(block_with("merge_tools.load_experts("))
    assert space["_"][0].shape[0] == 1
