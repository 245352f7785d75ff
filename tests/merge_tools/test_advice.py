"""What is usual elsewhere, and what is left out by mistake: one line that names the value and the fix."""

import shutil

import pytest
from safetensors.torch import load_file, save_file

from merge_tools import MergeError, add, compose, tune
from merge_tools.preflight import check

from .conftest import edit_json, recipe_of, save_adapter
from .corruptions import MODEL, copied, shard
from .test_edit import expert_of, mixture


@pytest.fixture
def pair(tmp_path, experts):
    return copied(experts(2), tmp_path / "experts")


def renamed(prefix):
    """A change that puts a prefix before the names of all tensors."""

    def change(folder):
        save_file({prefix + name: t for name, t in load_file(folder / MODEL).items()}, folder / MODEL)

    return change


def without_index(folder):
    shard(folder)
    (folder / "model.safetensors.index.json").unlink()


def renamed_file(name):
    return lambda folder: (folder / MODEL).rename(folder / name)


def as_cache(folder):
    """The folder becomes one of the Hub's cache."""
    inner = folder / "snapshots" / "abc"
    inner.mkdir(parents=True)
    for path in [path for path in folder.iterdir() if path.is_file()]:
        path.rename(inner / path.name)


# Change to a source -> what the error names.
FOLDERS = {
    "shards": (without_index, ["model-00001-of-00002.safetensors", "model.safetensors.index.json too"]),
    "another name": (renamed_file("consolidated.safetensors"), ["consolidated.safetensors", "save_pretrained()"]),
    "GGUF": (renamed_file("model.gguf"), ["model.gguf", "gguf_file"]),
    "pickled": (renamed_file("pytorch_model.bin"), ["pytorch_model.bin", "Pickled"]),
    "DDP": (renamed("module."), ["'module.", "model.module.save_pretrained"]),
    "compiled": (renamed("_orig_mod."), ["'_orig_mod.", "model._orig_mod.save_pretrained"]),
    "compiled and wrapped": (renamed("module._orig_mod."), ["'module._orig_mod.", "save_pretrained"]),
    "quantised": (
        lambda folder: edit_json(folder / "config.json", quantization_config={"load_in_4bit": True}),
        ["quantization_config", "bfloat16"],
    ),
}


def errors_of(recipe):
    return [finding.message for finding in check(recipe).errors]


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_that_are_nearly_right(name, pair):
    change, parts = FOLDERS[name]
    change(pair[1])
    errors = errors_of(recipe_of(pair))
    assert len(errors) == 1 and "\n" not in errors[0] and all(part in errors[0] for part in parts), errors


def test_folders_of_the_cache(pair, tmp_path):
    cached = tmp_path / "hub" / "models--org--m"
    shutil.copytree(pair[1], cached)
    as_cache(cached)
    (one,) = errors_of(recipe_of([pair[0], cached]))
    assert "org/m" in one and str(cached / "snapshots" / "abc") in one
    for root in (tmp_path / "hub", tmp_path):
        (other,) = errors_of(recipe_of([pair[0], root]))
        assert "Hub's cache" in other and "org/m" in other
    assert check(recipe_of([pair[0], {"source_model": str(cached / "snapshots" / "abc"), "name": "m"}])).ok


def test_a_quantised_base(pair, tmp_path):
    named = "unsloth/Llama-3.2-1B-unsloth-bnb-4bit"
    folder = save_adapter(tmp_path / "adapter", named)
    error, *others = errors_of(recipe_of([folder, pair[1]]))
    assert named in error and "base_model" in error and "such as unsloth/Llama-3.2-1B." in error and not others
    assert check(recipe_of([folder, pair[1]], base_model=str(pair[0]))).ok


def test_add_names_its_own_options(experts, tmp_path):
    folders = experts(3)
    mixture(tmp_path / "texts", folders[:2], gate_mode="hidden")
    with pytest.raises(MergeError, match=r"gate_mode hidden.*--prompt") as error:
        add(tmp_path / "texts", folders[2], tmp_path / "out")
    assert "base_model" not in str(error.value) and "random" not in str(error.value)
    (tmp_path / "texts.txt").write_text("the owl\nthe sea\n")
    specs = [{"source_model": str(f), "samples": str(tmp_path / "texts.txt")} for f in folders[:2]]
    compose({"experts": specs, "gate_mode": "centroid"}, tmp_path / "samples")
    with pytest.raises(MergeError, match=r"gate_mode centroid.*--samples"):
        add(tmp_path / "samples", folders[2], tmp_path / "out")
    with pytest.raises(MergeError, match=r"'birds' already.*--name"):
        add(tmp_path / "texts", expert_of(folders[0]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tuning_on_few_texts_and_adding_to_tuned_gates(experts, tmp_path):
    folders = experts(3)
    mixture(tmp_path / "two", folders[:2], gate_mode="hidden")
    for name, count in (("few", 4), ("many", 60)):
        (tmp_path / f"{name}.txt").write_text(
            "".join(f"the {'a' * (i % 9)} sea {'b' * (i // 9)}\n" for i in range(count))
        )
    domains = {"birds": tmp_path / "few.txt", "ships": tmp_path / "many.txt"}
    warnings = tune(tmp_path / "two", tmp_path / "tuned", domains, steps=1)["warnings"]
    assert len(warnings) == 1 and "birds" in warnings[0] and "1 text," in warnings[0] and "holdout" in warnings[0]
    assert (
        tune(tmp_path / "two", tmp_path / "again", domains, steps=1, holdout=0.9)["warnings"][0].count("3 texts") == 1
    )
    before = add(tmp_path / "two", expert_of(folders[2]), tmp_path / "other")["warnings"]
    *same, warning = add(tmp_path / "tuned", expert_of(folders[2]), tmp_path / "three")["warnings"]
    assert "tools" in warning and f"lexperts merge tune {tmp_path / 'three'}" in warning and same == before
