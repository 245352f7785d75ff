"""What a person might get wrong in a recipe or a source: an error of one line that names it, and nothing is written."""

import shutil

import pytest
import torch
import yaml

from merge_tools import compose
from merge_tools.sources import INDEX
from run_tools.errors import UserError

from .conftest import edit_json, edit_tensors, recipe_of, save_expert

with open(__file__.replace(".py", ".yml"), encoding="utf-8") as file:
    CASES = yaml.safe_load(file)


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    root = tmp_path_factory.mktemp("originals")
    return [save_expert(root / name, seed) for seed, name in enumerate(("birds", "ships", "tools"))]


@pytest.fixture
def folders(originals, tmp_path):
    """Copies of three experts, to be changed."""
    return [shutil.copytree(folder, tmp_path / "experts" / folder.name) for folder in originals]


def assert_refused(tmp_path, recipe, *fragments):
    with pytest.raises(UserError) as error:
        compose(recipe, tmp_path / "out")
    message = str(error.value)
    assert all(str(fragment) in message for fragment in fragments) and "\n" not in message, message
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("case", CASES["recipes"], ids=lambda case: str(case["recipe"])[:60])
def test_recipes(case, folders, tmp_path):
    given = yaml.safe_load(str(yaml.safe_dump(case["recipe"])).replace("EXPERTS", str(tmp_path / "experts")))
    (tmp_path / "recipe.yml").write_text(yaml.safe_dump({**recipe_of(folders), **given}))
    assert_refused(tmp_path, tmp_path / "recipe.yml", *case["names"])


@pytest.mark.parametrize("case", CASES["configs"], ids=lambda case: str(case["config"])[:60])
def test_configurations(case, folders, tmp_path):
    for folder in folders if case.get("of") == "all" else folders[1:2]:
        edit_json(folder / "config.json", **case["config"])
    assert_refused(tmp_path, recipe_of(folders), *case["names"])


NORM, DOWN = "model.norm.weight", "model.layers.1.mlp.down_proj.weight"
TENSORS = {
    "missing": (lambda t: t.pop(DOWN), (DOWN, "no such tensor")),
    "another shape": (lambda t: t.update({DOWN: torch.zeros(32, 60)}), (DOWN, "[32, 60]", "[32, 64]")),
    "unknown": (lambda t: t.update({"model.extra": torch.zeros(2)}), ("model.extra",)),
    "of a wrapped model": (lambda t: t.update({f"_orig_mod.{n}": t.pop(n) for n in list(t)}), ("_orig_mod.",)),
    "with NaN": (lambda t: t[DOWN].view(-1)[-1:].fill_(float("nan")), ("ships", "NaN")),
    "quantised": (lambda t: t.update({DOWN: torch.zeros(32, 64, dtype=torch.int8)}), (DOWN, "I8")),
    "a bias of an MLP": (lambda t: t.update({"model.layers.0.mlp.up_proj.bias": torch.zeros(64)}), ("up_proj.bias",)),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors(case, folders, tmp_path):
    change, names = TENSORS[case]
    edit_tensors(folders[1], change)
    assert_refused(tmp_path, recipe_of(folders), "ships", *names)


def test_a_base_that_lacks_a_tensor_of_its_configuration_is_named(folders, tmp_path):
    """All sources agree, so only the configuration shows it: a model with random weights would open."""
    for folder in folders:
        edit_tensors(folder, lambda tensors: tensors.pop(NORM))
    assert_refused(tmp_path, recipe_of(folders), "birds", NORM)


def test_values_that_exceed_the_range_of_the_output(folders, tmp_path):
    edit_tensors(folders[2], lambda tensors: tensors[DOWN].view(-1)[:1].fill_(1e6))
    assert_refused(tmp_path, recipe_of(folders, dtype="float16"), "tools", "range of F16")


TWO_SHARDS = '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
FILES = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors"),
    "pickled weights": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "pytorch_model.bin"),
    "a Git LFS pointer": (lambda f: (f / "model.safetensors").write_text("version https://git-lfs"), "cannot be read"),
    "two sets of weights": (lambda f: (f / INDEX).write_text("{}"), "has both"),
    "no configuration": (lambda f: (f / "config.json").unlink(), "config.json cannot be read"),
    "no folder": (lambda f: f.rename(f.with_name("shops")), "Did you mean"),
    "a broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), "no tokenizer that can be opened"),
    "another tokenizer": (
        lambda f: edit_json(f / "tokenizer.json", normalizer={"type": "NFC"}),
        "normalizer, so that texts have other ids. To write that of birds anyway, write tokenizer: base",
    ),
    "a missing shard": (
        lambda f: (f / "model.safetensors").rename(f / "model-1.safetensors") and (f / INDEX).write_text(TWO_SHARDS),
        "model-2.safetensors",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_files(case, folders, tmp_path):
    change, fragment = FILES[case]
    change(folders[1])
    assert_refused(tmp_path, recipe_of(folders), "ships", fragment)


def test_a_link_out_of_a_source_is_not_followed(folders, tmp_path):
    """What is copied into a mixture may be published."""
    (tmp_path / "secret.txt").write_text("{}")
    (folders[0] / "generation_config.json").unlink()
    (folders[0] / "generation_config.json").symlink_to(tmp_path / "secret.txt")
    assert_refused(tmp_path, recipe_of(folders), "generation_config.json", "secret.txt")


def test_an_output_that_is_not_free_stays_as_it_is(folders, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for place, fragment in (("taken", "not empty"), ("file", "not empty")):
        with pytest.raises(UserError, match=fragment):
            compose(recipe_of(folders), tmp_path / place)
    assert (tmp_path / "taken" / "notes.txt").read_text() == (tmp_path / "file").read_text() == "mine"
