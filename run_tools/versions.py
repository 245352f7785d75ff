"""Our version, and those of other installed packages."""

__version__ = "0.2.0"  # of lexperts; setup.cfg reads it from here


def package_version(name: str) -> str:
    """The version of an installed distribution, "unknown" for others."""
    from importlib.metadata import PackageNotFoundError, version  # 20 ms, which `--help` does not wait for

    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def package_versions(names) -> dict[str, str]:
    """The version of each distribution."""
    return {name: package_version(name) for name in names}
