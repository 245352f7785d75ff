"""Files: fingerprints are equal for equal content only, differences of settings are named, odd YAML is an error of one line."""

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from run_tools.errors import UserError
from run_tools.files import differences, fingerprint, read_yaml, write_file


@pytest.fixture
def model(tmp_path):
    for name in ("config.json", "model.safetensors", "onnx/model.onnx", "checkpoint-5/config.json", "results.json"):
        (tmp_path / "model" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "model" / name).write_text(name)
    return tmp_path / "model"


def test_a_model_is_the_same_wherever_it_is_and_whatever_lies_beside_it(model):
    before = fingerprint(model)
    for name in ("checkpoint-5/config.json", "README.md", ".cache", "__init__.py"):
        (model / name).write_text("new")
    (model.parent / "other").mkdir()
    assert before == fingerprint(model.rename(model.parent / "other" / "model")) and before.startswith("model, ")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "onnx/model.onnx", "new.json"])
def test_another_content_is_another_model(model, name):
    before = fingerprint(model), fingerprint(model / "config.json")
    (model / name).write_text("new")
    assert fingerprint(model) != before[0]
    assert (fingerprint(model / "config.json") != before[1]) == (name == "config.json")


def test_a_repository_is_known_by_its_commit(tmp_path, monkeypatch):
    def download(name, file):
        if name == "owner/gone":
            raise OSError(f"{name} is not found")
        return str(tmp_path / "snapshots" / ("1" * 40) / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert fingerprint("owner/name") == f"owner/name, commit {'1' * 40}" and fingerprint("owner/gone") == "owner/gone"


SETTINGS = st.dictionaries(st.sampled_from("abc"), st.integers(0, 2) | st.none())


@given(SETTINGS, SETTINGS)
def test_each_setting_that_differs_is_named(before, now):
    names = [name for name in "abc" if before.get(name) != now.get(name)]
    found = differences(before, now)
    inner = differences({"x": before}, {"x": now})
    assert [change.removeprefix("x.") for change in inner.split("; ")] == found.split("; ")
    assert sorted(change.partition("=")[0] for change in found.split("; ") if change) == names
    assert all(f"{name}={before.get(name)} before, {now.get(name)} now" in found for name in names)


@pytest.fixture
def read(tmp_path):
    def read(text):
        (tmp_path / "file.yml").write_text(text, encoding="utf-8")
        return read_yaml(tmp_path / "file.yml")

    return read


@pytest.mark.parametrize(
    "text, line",
    [
        ("a: " + "[" * 2_000 + "]" * 2_000, None),
        ("".join(" " * depth + "- \n" for depth in range(600)), None),
        ("a: !!python/object/apply:os.system [ls]", 1),
        ("a: *b", 1),
        ("a: {b: 1, b: 2}", 1),
        ("a: 1\nb: 1\na: 2", 3),
        ("a: 1\n---\nb: 2", 2),
        ("[a", None),
        ("b: 1\na: " + "9" * 5_000, 2),
        ("a: !!int x", 1),
        ("a: \0", None),
        ("", None),
    ],
)
def test_what_is_not_read_is_one_line(read, text, line):
    with pytest.raises(UserError) as found:
        read(text)
    message = str(found.value)
    assert "file.yml " in message and "\n" not in message and len(message) < 500
    assert line is None or f"line {line}, " in message


def test_values_are_those_of_yaml(read, tmp_path):
    values = read("\ufeffb: 2020-01-01\nc: &c {d: 1}\ne: *c\n")
    assert values["b"] == datetime.date(2020, 1, 1) and values["c"] == values["e"] == {"d": 1}
    with pytest.raises(OSError, match="folder"):
        read_yaml(tmp_path / "folder")


def test_a_disk_that_refuses_leaves_the_file_as_it_was_and_nothing_beside_it(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("old")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(5, "refused")))
    with pytest.raises(OSError, match="refused"):
        write_file(tmp_path / "a", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "old")]
