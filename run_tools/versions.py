"""Versions of the installed packages, as records and messages state them."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

UNKNOWN = "unknown"  # of a package that is not installed, such as a plain copy of our files


def package_version(name: str = "lexperts") -> str:
    """The version of an installed distribution, `UNKNOWN` for others."""
    try:
        return version(name)
    except PackageNotFoundError:
        return UNKNOWN


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """The version of each distribution."""
    return {name: package_version(name) for name in names}
