"""Command lines that start in a second: this package imports no model, which `import keyphrase_tools` does."""

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    """The version of the installed distribution, "unknown" for a plain copy of the files."""
    try:
        return version("lexperts")
    except PackageNotFoundError:
        return "unknown"
