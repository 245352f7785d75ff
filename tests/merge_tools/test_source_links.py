"""Symbolic links in the folder of a source: none leads out of it, apart from the Hub cache's to its own files."""

import os
import shutil

import pytest

from merge_tools import MergeError, compose, inspect, verify

from .conftest import contents, recipe_of, save_adapter
from .corruptions import MODEL, copied, refused, shard

NAMES = [
    "tokenizer.model",
    "chat_template.jinja",
    "config.json",
    "tokenizer.json",
    "generation_config.json",
    "README.md",
    "anchor_gates.tensors",
]


@pytest.fixture
def pair(tmp_path, experts):
    return copied(experts(2), tmp_path / "experts")


def move_out(file, to):
    """Leaves a link where a file was, to the file in another folder."""
    to.parent.mkdir(parents=True, exist_ok=True)
    if file.exists():
        shutil.move(file, to)
    else:
        to.write_text("secret")
    file.parent.mkdir(exist_ok=True)
    file.symlink_to(to)


@pytest.mark.parametrize("name", [*NAMES, MODEL, "additional_chat_templates/rag.jinja"])
def test_a_link_out_of_a_source_is_refused(name, pair, tmp_path):
    move_out(pair[1] / name, tmp_path / "elsewhere" / "target")
    refused(tmp_path, recipe_of(pair), f"{name} is a link to .*target")


@pytest.mark.parametrize("name", ["model-00001-of-00003.safetensors", "additional_chat_templates"])
def test_a_link_to_a_shard_or_a_folder_elsewhere_is_refused(name, pair, tmp_path):
    shard(pair[1])
    (pair[1] / "additional_chat_templates").mkdir()
    name = next((path.name for path in pair[1].glob("model-*") if name.startswith("model")), name)
    move_out(pair[1] / name, tmp_path / "elsewhere" / "target")
    refused(tmp_path, recipe_of(pair), f"{name} is a link to .*target")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "chat_template.jinja"])
def test_a_link_out_of_an_adapter_is_refused(name, pair, tmp_path):
    folder = save_adapter(tmp_path / "experts" / "one", pair[0])
    move_out(folder / name, tmp_path / "elsewhere" / "target")
    refused(tmp_path, recipe_of([pair[0], folder]), f"{name} is a link to .*target")


def test_a_link_out_of_a_mixture_is_refused(pair, tmp_path):
    compose(recipe_of(pair), tmp_path / "out")
    assert verify(tmp_path / "out")["ok"]
    move_out(tmp_path / "out" / "chat_template.jinja", tmp_path / "elsewhere" / "target")
    for read in (verify, inspect):
        with pytest.raises(MergeError, match="chat_template.jinja is a link to"):
            read(tmp_path / "out")


def test_links_within_a_folder_and_to_a_folder_are_followed(pair, tmp_path):
    compose(recipe_of(pair), tmp_path / "plain")
    (pair[0] / "stored").mkdir()
    for name in (MODEL, "tokenizer.json"):
        shutil.move(pair[0] / name, pair[0] / "stored" / name)
        (pair[0] / name).symlink_to(f"stored/{name}")
    (pair[0] / "notes.log").symlink_to("/dev/null")  # is not read
    os.rename(pair[0], tmp_path / "real")
    pair[0].symlink_to(tmp_path / "real")
    compose(recipe_of(pair), tmp_path / "out")
    assert contents(tmp_path / "out")[MODEL] == contents(tmp_path / "plain")[MODEL]


def cached(folder, root, repository="models--me--birds"):
    """A folder as the Hub cache stores it: links of a snapshot to its blobs."""
    snapshot = root / repository / "snapshots" / "1234"
    snapshot.mkdir(parents=True)
    (root / repository / "blobs").mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.move(file, root / repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    return snapshot


def test_links_of_the_hub_cache_into_its_blobs_are_followed(pair, tmp_path):
    compose(recipe_of(pair), tmp_path / "plain")
    snapshot = cached(pair[0], tmp_path / "hub")
    recipe = recipe_of([{"source_model": str(snapshot), "name": pair[0].name}, pair[1]])
    compose(recipe, tmp_path / "out")
    assert contents(tmp_path / "out")[MODEL] == contents(tmp_path / "plain")[MODEL]
    other = tmp_path / "hub" / "models--me--other" / "blobs" / "1"
    move_out(snapshot / "chat_template.jinja", other)
    refused(tmp_path, recipe, "chat_template.jinja is a link to .*models--me--other")
    (snapshot / "chat_template.jinja").unlink()
    blob = tmp_path / "hub" / "models--me--birds" / "blobs" / "secret"
    blob.symlink_to("/etc/hostname")
    (snapshot / "chat_template.jinja").symlink_to(blob)
    refused(tmp_path, recipe, "chat_template.jinja is a link to /etc/hostname")
