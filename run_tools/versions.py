"""Our version, and those of other installed packages, as records and messages state them."""

from collections.abc import Iterable

__version__ = "0.2.0"  # of lexperts; setup.cfg reads it from here
UNKNOWN = "unknown"  # of a package that is not installed


def package_version(name: str) -> str:
    """The version of an installed distribution, `UNKNOWN` for others."""
    from importlib.metadata import PackageNotFoundError, version  # 20 ms, which `--help` does not wait for

    try:
        return version(name)
    except PackageNotFoundError:
        return UNKNOWN


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """The version of each distribution."""
    return {name: package_version(name) for name in names}
