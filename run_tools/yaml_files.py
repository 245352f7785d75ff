"""YAML files of options: a safe loader with limits, whose errors name the file and the line."""

from pathlib import Path
from typing import Any

from .errors import UserError, did_you_mean, short_reason, short_repr

LARGEST_FILE = 1 << 20  # bytes
LARGEST_TREE = 100_000  # values, with every alias expanded
DEEPEST_TREE = 50  # levels


def read_yaml(path: str | Path, *, kind: str = "file", example: str = "learning_rate: 2.0e-4") -> dict[str, Any]:
    """The mapping in a YAML file.

    Args:
        kind: what the file is, for messages, such as "recipe".
        example: a valid line, for messages.

    Raises:
        UserError: if the file is missing, too large or nested too deeply, is not valid YAML, has a key twice or one that is not a
            text, or holds anything but a mapping.
        ImportError: if PyYAML is not installed.
    """
    path = Path(path)
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise UserError(f"The {kind} {str(path)!r} {problem}. Give a YAML file.")
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise UserError(f"{path} has {path.stat().st_size:,} bytes; a {kind} has at most {LARGEST_FILE:,}.")
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not valid UTF-8 at byte {error.start + 1}. Save it as UTF-8.") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    content = parse_yaml(text, str(path))
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no mapping of options. Write one per line, such as {example}.")
    return content


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text; `where` names it in messages. Raises as `read_yaml`, but any value is valid."""
    try:
        import yaml
    except ImportError as error:
        raise ImportError("YAML files need PyYAML. Install it with: pip install pyyaml") from error

    loader_class: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C, ten times as fast

    class UniqueKeyLoader(loader_class):
        """Refuses a mapping that has a key twice, of which PyYAML would silently take the last."""

        def construct_mapping(self, node, deep=False):
            seen: set[str] = set()
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise yaml.constructor.ConstructorError(None, None, "a key must be a text", key.start_mark)
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key.value!r}", key.start_mark)
                seen.add(key.value)
            return super().construct_mapping(node, deep)

        def construct_object(self, node, deep=False):
            try:
                return super().construct_object(node, deep)
            except (ValueError, KeyError, OverflowError) as error:  # KeyError: of `!!bool x`
                kind = node.tag.rpartition(":")[2]
                problem = f"{short_repr(node.value)} is not a valid {kind}; put a text into quotes"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error

    try:
        check_depth(yaml, yaml.parse(text, loader_class), where)
        loader = UniqueKeyLoader(text)
        node = loader.get_single_node()
        if count_nodes(node, {}) > LARGEST_TREE:
            raise UserError(f"{where} has more than {LARGEST_TREE:,} values once its aliases are expanded. Shorten it.")
        return loader.construct_document(node) if node else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" (line {mark.line + 1})" if mark else ""
        raise UserError(f"{where} is not valid YAML: {error.problem or error.context}{line}.") from error
    except UserError:
        raise
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise UserError(f"{where} cannot be read as YAML: {short_reason(error)}.") from error


def check_depth(yaml, events, where: str) -> None:
    """Raises a `UserError` for a text that is nested too deeply, before its tree is built."""
    depth = 0
    for event in events:
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST_TREE:
            line = event.start_mark.line + 1
            raise UserError(f"{where} is nested more than {DEEPEST_TREE} levels deep (line {line}). Flatten it.")


def count_nodes(node, known: dict[int, int]) -> int:
    """The number of values below a YAML node, with every alias expanded; more than allowed if it contains itself."""
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = LARGEST_TREE + 1  # until it is known: met again below itself
    value = getattr(node, "value", None)
    children = (
        [child for item in value for child in (item if isinstance(item, tuple) else (item,))]
        if isinstance(value, list)
        else []
    )
    known[id(node)] = 1 + sum(count_nodes(child, known) for child in children)
    return known[id(node)]


def check_names(content: dict, where: str, known) -> None:
    """Raises a `UserError` for a key that is not known, with the closest known one."""
    for name in content:
        if name not in known:
            raise UserError(f"{where}: the key {short_repr(name)} is not known.{did_you_mean(str(name), known)}")
