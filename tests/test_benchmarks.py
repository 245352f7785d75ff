"""Benchmarks reuse rows and runs only if they were made with the same settings, data and versions."""

import importlib.util
import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [
    path for path in sorted((ROOT / "benchmarks").glob("*.py")) if "\ndef main()" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_shows_its_options(script, monkeypatch, capsys):
    if script.stem == "hypernet_crf":
        pytest.importorskip("torch_struct")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(script), run_name="__main__")
    assert end.value.code == 0 and "--help" in capsys.readouterr().out


def test_results_are_of_clean_commits():
    files = (ROOT / "benchmarks" / "results").glob("*.json")
    records = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in files}
    changed = [name for name, record in records.items() if "changes" in str(record["commit"])]
    assert len(records) > 50 and not changed


@pytest.fixture(name="common")
def fixture_common(tmp_path, monkeypatch):
    """benchmarks/common.py with a results folder of its own."""
    spec = importlib.util.spec_from_file_location("benchmarks_common", ROOT / "benchmarks" / "common.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "benchmarks" / "results")
    monkeypatch.setenv("LEXPERTS_COMMIT", "abc1234")
    return module


@pytest.fixture(name="record")
def fixture_record(common):
    record = common.Record("quality", epochs=10, rates=(0.1, 0.2))
    record.add({"system": "a", "seed": 0, "score": 1.5})
    return record


def test_a_record_with_the_same_settings_finds_its_rows(common, record):
    again = common.Record("quality", epochs=10, rates=(0.1, 0.2))
    row = again.find(system="a", seed=0)
    assert row["score"] == 1.5 and row["commit"] == "abc1234"
    assert again.find(system="a", seed=1) is None


def test_a_record_with_other_settings_is_an_error(common, record):
    with pytest.raises(ValueError, match="epochs=10 before, 2 now") as error:
        common.Record("quality", epochs=2, rates=(0.1, 0.2))
    assert all(option in str(error.value) for option in ("quality.json", "--overwrite", "--name"))
    with pytest.raises(ValueError, match=r"rates=\[0.1, 0.2\] before, \[0.1\] now"):
        common.Record("quality", epochs=10, rates=(0.1,))


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_a_record_of_other_versions_is_an_error(common, record, package):
    content = json.loads(record.path.read_text(encoding="utf-8"))
    content["versions"][package] = "0.9"
    record.path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match=f"{package}='0.9' before"):
        common.Record("quality", epochs=10, rates=(0.1, 0.2))


def test_a_setting_that_was_not_recorded_is_reported(common, record, capsys):
    common.Record("quality", epochs=10, rates=(0.1, 0.2), device="cpu")
    assert "device" in capsys.readouterr().out


def test_overwrite_starts_a_record_without_rows(common, record):
    assert common.Record("quality", overwrite=True, epochs=2).rows() == []


def test_remove_drops_the_rows_of_a_key_only(common, record):
    record.add({"system": "b", "seed": 0})
    record.remove(system="a")
    assert [row["system"] for row in record.rows()] == ["b"]


def test_replace_measures_again_what_has_another_setting(common, record):
    measured = []

    def measure(system, seed, limit):
        measured.append((system, limit))
        return {"score": 2.5}

    for limit in (50, 50, None):
        record.replace(measure, [{"system": "b", "seed": 0, "limit": limit}], "limit")
    assert measured == [("b", 50), ("b", None)]
    assert [(row["system"], row.get("limit")) for row in record.rows()] == [("a", None), ("b", None)]


@pytest.fixture(name="run")
def fixture_run(common, tmp_path):
    """A finished run, and a function that checks whether it may be reused."""
    data, folder = tmp_path / "train.jsonl", tmp_path / "work" / "vanilla [1]"
    data.write_text('{"text": "one"}\n', encoding="utf-8")

    def check(overwrite=False, **changes):
        settings = {"train_files": data, "learning_rate": 0.1, "output_dir": folder, **changes}
        common.check_same_settings(folder, settings, overwrite)

    check()
    folder.mkdir()
    (folder / "results.json").write_text("{}", encoding="utf-8")
    return folder, data, check


def test_a_run_with_the_same_settings_is_reused(run):
    folder, data, check = run
    check(output_dir="elsewhere", disable_tqdm=True)
    assert (folder / "results.json").exists()
    moved = data.rename(data.with_name("moved.jsonl"))
    check(train_files=moved)


def test_a_run_with_other_settings_or_data_is_an_error(run):
    _, data, check = run
    with pytest.raises(ValueError, match="learning_rate=0.1 before, 0.5 now") as error:
        check(learning_rate=0.5)
    assert all(part in str(error.value) for part in ("vanilla [1]", "--work", "--overwrite"))
    data.write_text('{"text": "two"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="train_files"):
        check()


def test_a_run_of_other_versions_or_without_a_record_is_an_error(run, common, monkeypatch):
    folder, _, check = run
    with monkeypatch.context() as patch:
        patch.setattr(common, "relevant_versions", lambda: {"torch": "0.9"})
        with pytest.raises(ValueError, match=r"versions.torch=\S+ before, '0.9' now"):
            check()
    folder.with_name(f"{folder.name}.settings.json").unlink()
    with pytest.raises(ValueError, match="without a record"):
        check()


def test_overwrite_removes_that_run_only(run):
    folder, _, check = run
    other = folder.with_name("other")
    other.mkdir()
    check(overwrite=True, learning_rate=0.5)
    assert other.exists() and not folder.exists()


def test_a_setting_that_only_one_run_has_is_an_error(run):
    _, _, check = run
    with pytest.raises(ValueError, match=r"max_rows=\(not given\) before, 5 now"):
        check(max_rows=5)


@pytest.fixture(name="run_seke")
def fixture_run_seke(common, tmp_path, monkeypatch):
    """A function that calls `run_once`, and the command lines that it started."""
    commands, folder = [], tmp_path / "work" / "moe"

    def complete_run(words, **_):
        commands.append(words)
        folder.mkdir(exist_ok=True)
        (folder / "results.json").write_text("{}", encoding="utf-8")
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(common, "subprocess", SimpleNamespace(run=complete_run, STDOUT=None))

    def call(config="minilm_cpu", overwrite=False, **options):
        run = {"output": folder, "done": "results.json", "options": options, "overwrite": overwrite}
        common.run_once("train", "seke", config, **run)

    return call, commands


def test_a_finished_run_is_not_repeated(run_seke):
    call, commands = run_seke
    for _ in range(2):
        call(seed=1, train_files=["a", "b"])
    assert [words[2:] for words in commands] == [
        ["lexperts", "train", "seke", "minilm_cpu", "--seed", "1", "--train_files", "a", "b", *commands[0][-2:]]
    ]
    with pytest.raises(ValueError, match="seed=1 before, 2 now"):
        call(seed=2, train_files=["a", "b"])


def test_another_configuration_is_an_error(run_seke, tmp_path):
    call, commands = run_seke
    config = tmp_path / "mine.yml"
    for text in ("seed: 1", "seed: 2"):
        config.write_text(text, encoding="utf-8")
        if not commands:
            call(config)
    with pytest.raises(ValueError, match="config="):
        call(config)


def test_overwrite_repeats_a_run_once_per_process(run_seke):
    call, commands = run_seke
    call(seed=1)
    for _ in range(2):
        call(seed=2, overwrite=True)
    assert len(commands) == 2


def test_parts_are_timed_in_turns_and_replace_their_own_rows(benchmark_module, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LEXPERTS_COMMIT", "abc1234")
    timing, common = benchmark_module("timing"), benchmark_module("common")
    monkeypatch.setattr(common, "RESULTS", tmp_path / "benchmarks" / "results")
    called = []

    def measure(options):
        candidates = {name: lambda name=name: called.append(name) for name in ("slow", "fast")}
        yield timing.compare(candidates, options.rounds, size=len(called))

    parser = timing.speed_parser("Doc.", ("head", "tail"))
    for only in ([], ["--only", "tail"]):
        options = parser.parse_args(["--rounds", "2", *only])
        timing.measure_parts(options, "speed", {"head": measure, "tail": measure}, texts=3)
    assert called == ["slow", "fast"] * 9  # three parts, each with a warm-up and two rounds
    record = json.loads((tmp_path / "benchmarks" / "results" / "speed.json").read_text(encoding="utf-8"))
    assert record["settings"] == {"rounds": 2, "device": "cpu", "texts": 3}
    assert [(row["what"], row["size"]) for row in record["results"]] == [("head", 0), ("tail", 12)]
    assert len(record["results"][0]["times"]["slow"]["rounds_ms"]) == 2
    assert "size 12   slow" in capsys.readouterr().out
