"""A mixture with a damaged configuration or record raises MergeError in every command."""

import json
import shutil

import pytest

import merge_tools
from merge_tools import MergeError


@pytest.fixture(scope="module")
def mixture(experts, tmp_path_factory):
    out = tmp_path_factory.mktemp("damaged") / "mixture"
    merge_tools.compose({"experts": [str(folder) for folder in experts(2)]}, out)
    return out


def damaged(mixture, folder, file, change):
    shutil.copytree(mixture, folder)
    content = json.loads((folder / file).read_text())
    change(content)
    (folder / file).write_text(json.dumps(content))
    return folder


DAMAGE = {
    "no recipe": ("merge_record.json", lambda content: content.pop("recipe")),
    "no experts": ("merge_record.json", lambda content: content.pop("experts")),
    "experts that are numbers": ("merge_record.json", lambda content: content.update(experts=[1, 2])),
    "an expert without files": ("merge_record.json", lambda content: content["experts"][0].update(files=[])),
    "files without a size": ("merge_record.json", lambda content: content["experts"][0]["files"][0].pop("bytes")),
    "a recipe of one expert": ("merge_record.json", lambda content: content["recipe"]["experts"].pop()),
    "a size that is a word": ("config.json", lambda content: content.update(hidden_size="wide")),
    "no layers": ("config.json", lambda content: content.pop("num_hidden_layers")),
    "rope that is a list": ("config.json", lambda content: content.update(rope_parameters=[1])),
    "more layers than tensors": ("config.json", lambda content: content.update(num_hidden_layers=9)),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("command", ["inspect", "verify", "extract", "export"])
def test_a_damaged_mixture_raises_a_merge_error(mixture, tmp_path, damage, command):
    folder = damaged(mixture, tmp_path / "mixture", *DAMAGE[damage])
    out = tmp_path / "out"
    calls = {
        "inspect": lambda folder: merge_tools.inspect(folder),
        "verify": lambda folder: merge_tools.verify(folder),
        "extract": lambda folder: merge_tools.extract(folder, merge_tools.inspect(mixture)["experts"][0]["name"], out),
        "export": lambda folder: merge_tools.export(folder, out, "lexicon"),
    }
    with pytest.raises(MergeError):
        calls[command](folder)
    assert not out.exists()
    calls[command](mixture)  # negative control


def paths_of(value, path=()):
    """The path of every value in a record, and of the first of every list."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths_of(inner, (*path, key))


def test_any_value_of_another_type_in_the_record_is_named(mixture, tmp_path):
    """Where a value of that type is refused at all, the error names the record."""
    folder, refused = tmp_path / "mixture", 0
    shutil.copytree(mixture, folder)
    record = json.loads((folder / "merge_record.json").read_text())
    for path in list(paths_of(record))[1:]:
        for value in (None, 5, "x", [], {}, [[1]]):
            changed = json.loads(json.dumps(record))
            inner = changed
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = value
            (folder / "merge_record.json").write_text(json.dumps(changed))
            try:
                merge_tools.inspect(folder)
            except MergeError as error:
                assert "merge_record.json" in str(error) and "\n" not in str(error), (path, value)
                refused += 1
    assert refused > 100
    (folder / "merge_record.json").write_text("[]")
    with pytest.raises(MergeError, match="merge_record.json is damaged.* list.*compose"):
        merge_tools.verify(folder)
