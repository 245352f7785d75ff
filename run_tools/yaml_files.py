"""YAML files of options, read safely: no aliases, no types of Python, and errors name the file and the line."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from .errors import UserError, did_you_mean, one_line, short_repr


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        OSError: if the file cannot be read.
        UserError: if it is not valid YAML, has an alias or a key twice, or holds anything but a mapping.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent, index):
            if self.check_event(yaml.AliasEvent):
                refuse("aliases are not supported", self.peek_event())
            return super().compose_node(parent, index)

        def construct_mapping(self, node, deep=False):
            seen = set()
            for key, _ in node.value:
                if str(key.value) in seen:  # PyYAML would take the last
                    refuse(f"duplicate key {key.value!r}", key)
                seen.add(str(key.value))
            return super().construct_mapping(node, deep)

        def construct_object(self, node, deep=False):
            try:
                return super().construct_object(node, deep)
            except (ValueError, KeyError, OverflowError):  # KeyError: of `!!bool x`
                refuse(f"{short_repr(node.value)} is not a valid {node.tag.rpartition(':')[2]}", node)

    def refuse(problem, node):
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)

    try:
        with open(path, encoding="utf-8-sig") as file:
            content = yaml.load(file, Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" (line {mark.line + 1})" if mark else ""
        raise UserError(f"{path} is not valid YAML: {error.problem or error.context}{line}.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid YAML: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no mapping of options. Write one per line, such as seed: 1.")
    return content


def check_names(content: dict, where: str, known: Collection[str]) -> None:
    """Raises a `UserError` for a key that is not known, with the closest known one."""
    for name in content:
        if name not in known:
            raise UserError(f"{where}: the key {short_repr(name)} is not known.{did_you_mean(str(name), known)}")
