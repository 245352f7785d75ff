"""The configurations that come with a recipe's command, such as `minilm_cpu`: YAML files in the recipe's folder."""

from importlib import import_module
from pathlib import Path

from run_tools.errors import UserError, did_you_mean


def config_names(recipe: str, module: str) -> tuple[str, ...]:
    """The configurations that come with a command."""
    return import_module(f"lexperts.recipes.{recipe}.arguments").CONFIGS.get(module, ())


def read_config(recipe: str, module: str, name: str) -> str:
    """The text of a configuration. Raises a `UserError` for an unknown name."""
    return config_file(recipe, module, name).read_text(encoding="utf-8")


def config_file(recipe: str, module: str, name: str) -> Path:
    """The file of a configuration. Raises a `UserError` for an unknown name; the known ones are named."""
    if name not in (names := config_names(recipe, module)):
        known = did_you_mean(name, names) if names else " No configurations come with this command."
        raise UserError(f"{name!r} is not a configuration.{known} A YAML file's name ends in .yml.")
    return Path(__file__).parents[1] / recipe / f"{name}.yml"


def find_config(given: str, recipe: str, module: str) -> Path:
    """The YAML file of a path, or of the name of a configuration that comes with the command."""
    path = Path(given)
    if path.is_file() or path.suffix in (".yml", ".yaml"):
        return path
    return config_file(recipe, module, given)
