"""Odd and hostile YAML: a value, or an error of one line that names the file."""

import datetime

import pytest

from run_tools.errors import UserError
from run_tools.yaml_files import check_names, parse_yaml, read_yaml

LINKS = "\n".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]" for before, name in zip("abcde", "bcdef", strict=True)
)


@pytest.mark.parametrize(
    "text, line",
    [
        ("a: " + "[" * 105_000 + "]" * 105_000, 1),  # 210 kB
        ("a: " + "{a: " * 3_000, 1),
        ("".join(" " * depth + "- \n" for depth in range(600)), 51),
        ("a: !!python/object/apply:os.system [ls]", 1),
        ("a: !mine x", 1),
        ("a: *b", 1),
        (f"a: &a [{', '.join('x' * 10)}]\n{LINKS}", None),
        ("a: &a [*a]", None),
        (f"a: &a {{x: 1}}\n{LINKS.replace(' [', ' {<<: [').replace(']', ']}')}", None),
        ('a: "\\ud800"', 1),
        ("<<: 5", 1),
        ("? [a]\n: 1", 1),
        ("a: {b: 1, b: 2}", 1),
        ("a: 1\n---\nb: 2", 2),
        ("%YAML 9.9\n---\na: 1", 1),
        ("a:\n\t- b", 2),
        ("[a", None),
        ("a: 2020-99-99", 1),
        ("b: 1\na: " + "9" * 5_000, 2),
        ("b: 1\na: !!bool x", 2),
        ("a: !!int x", 1),
        ("a: \0", None),
    ],
)
def test_what_is_not_read_is_one_line(text, line):
    with pytest.raises(UserError) as found:
        parse_yaml(text, "file.yml")
    message = str(found.value)
    assert message.startswith("file.yml ") and "\n" not in message and len(message) < 300
    assert line is None or f"(line {line})" in message


def test_values_and_names(tmp_path):
    text = "a: .nan\nb: 2020-01-01\nc: &c {d: 1}\ne: {<<: *c}\n"
    values = parse_yaml(text, "x")
    assert values["a"] != values["a"] and values["b"] == datetime.date(2020, 1, 1) and values["e"] == {"d": 1}
    for key in ("1", "~", "yes", "2020-01-01"):
        with pytest.raises(UserError, match="not known"):
            check_names(parse_yaml(f"{key}: 1", "x"), "x", ["seed"])
    for content in ("", "- a", "5"):
        (tmp_path / "x.yml").write_text(content)
        with pytest.raises(UserError, match="mapping"):
            read_yaml(tmp_path / "x.yml")
    (tmp_path / "x.yml").write_text("# " + "x" * 2_000_000)
    with pytest.raises(UserError, match="2,000,002 bytes"):
        read_yaml(tmp_path / "x.yml")
    with pytest.raises(UserError, match="is a folder"):
        read_yaml(tmp_path)
