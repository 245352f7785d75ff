"""How the settings of two runs differ."""

from collections.abc import Mapping

from .errors import short_repr


class NotGiven:
    """A setting that has no value."""

    def __repr__(self) -> str:
        return "(not given)"


NOT_GIVEN = NotGiven()


def find_changes(before: Mapping, now: Mapping, *, shared: bool = False) -> dict[str, str]:
    """The settings that differ by name, nested ones as "outer.inner", each with a message such as "top_k=2 before, 3 now".

    Fingerprints are equal if their content is, whatever its name. If `model` differs, its parts are left out.

    Args:
        shared: compare only the settings that both have.
    """
    changes: dict[str, str] = {}
    for name in before if shared else {**before, **now}:
        if shared and name not in now:
            continue
        old, new = before.get(name, NOT_GIVEN), now.get(name, NOT_GIVEN)
        if isinstance(old, dict) and isinstance(new, dict) and not {"name"} & {*old, *new}:
            changes |= {f"{name}.{inner}": f"{name}.{change}" for inner, change in find_changes(old, new).items()}
        elif not is_same(old, new):
            changes[name] = f"{name}={show_setting(old)} before, {show_setting(new)} now"
    if "model" in changes:
        return {name: change for name, change in changes.items() if not name.startswith(("tokenizer", "config."))}
    return changes


def differences(before: Mapping, now: Mapping, *, shared: bool = False) -> str:
    """The settings that differ as one text, "" if none does; see `find_changes`."""
    return "; ".join(find_changes(before, now, shared=shared).values())


def is_same(before, now) -> bool:
    """Whether two settings are equal; fingerprints, as those of `run_tools.fingerprints`, are if their content is."""
    if isinstance(before, list) and isinstance(now, list):
        return len(before) == len(now) and all(map(is_same, before, now))
    if isinstance(before, dict) and isinstance(now, dict) and "name" in before and "name" in now:
        if before.get("as") != now.get("as"):
            return False
        if "sha256" in before or "sha256" in now:
            return before.get("sha256") == now.get("sha256")
        commits = before.get("commit"), now.get("commit")
        return before["name"] == now["name"] and (None in commits or commits[0] == commits[1])
    return before == now


def show_setting(value) -> str:
    """A setting for a message; fingerprints as their name and the first digits of their hash."""
    if isinstance(value, list):
        return f"[{', '.join(map(show_setting, value))}]"
    if isinstance(value, dict) and "name" in value:
        identity = (value.get("sha256") or value.get("commit") or "")[:8]
        identity = ", ".join(filter(None, (value.get("state"), identity)))  # what a reader can compare, first
        name = f"{value['as']}={value['name']}" if "as" in value else str(value["name"])
        return name + (f" ({identity})" if identity else "")
    return short_repr(value)
