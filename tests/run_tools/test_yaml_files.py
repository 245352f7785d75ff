"""Odd and hostile YAML: a value, or an error of one line that names the file."""

import datetime

import pytest

from run_tools.errors import UserError
from run_tools.yaml_files import check_names, read_yaml


@pytest.fixture
def read(tmp_path):
    def read(text):
        (tmp_path / "file.yml").write_text(text, encoding="utf-8")
        return read_yaml(tmp_path / "file.yml")

    return read


@pytest.mark.parametrize(
    "text, line",
    [
        ("a: " + "[" * 105_000 + "]" * 105_000, None),  # 210 kB
        ("a: " + "{a: " * 3_000, None),
        ("".join(" " * depth + "- \n" for depth in range(600)), None),
        ("a: !!python/object/apply:os.system [ls]", 1),
        ("a: !mine x", 1),
        ("a: *b", 1),
        ("a: &a [x]\nb: *a", 2),
        ("a: &a [*a]", 1),
        ("a: &a {x: 1}\nb: {<<: *a}", 2),
        ("<<: 5", 1),
        ("? [a]\n: 1", 1),
        ("a: {b: 1, b: 2}", 1),
        ("a: 1\nb: 1\na: 2", 3),
        ("a: 1\n---\nb: 2", 2),
        ("%YAML 9.9\n---\na: 1", 1),
        ("a:\n\t- b", 2),
        ("[a", None),
        ("a: 2020-99-99", 1),
        ("b: 1\na: " + "9" * 5_000, 2),
        ("b: 1\na: !!bool x", 2),
        ("a: !!int x", 1),
        ("a: \0", None),
        ("", None),
        ("- a", None),
        ("5", None),
    ],
)
def test_what_is_not_read_is_one_line(read, text, line):
    with pytest.raises(UserError) as found:
        read(text)
    message = str(found.value)
    assert "file.yml " in message and "\n" not in message and len(message) < 400
    assert line is None or f"(line {line})" in message


def test_values_and_names(read, tmp_path):
    values = read("\ufeffa: .nan\nb: 2020-01-01\nc: &c {d: 1}\n")
    assert values["a"] != values["a"] and values["b"] == datetime.date(2020, 1, 1) and values["c"] == {"d": 1}
    for key, message in (("1", "1"), ("~", "None"), ("yes", "True"), ("sead", "'sead'.*Did you mean 'seed'")):
        with pytest.raises(UserError, match=f"x: .*{message}"):
            check_names(read(f"{key}: 1"), "x", ["seed", "model"])
    with pytest.raises(OSError, match="folder"):
        read_yaml(tmp_path / "folder")
