"""Builds the wheel: adds the modules of Lexperts that the runtime imports, those of `run_tools` as a package inside.

pip wheel --no-deps ./lite
"""

import ast
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PACKAGE = "lexperts_lite"
HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FLOOR = "run_tools"


def imports_of(path: Path) -> Iterator[str]:
    """What a module imports from, such as "run_tools.errors". The package has the modules of `keyphrase_tools` at its top."""
    folders = path.parent.relative_to(ROOT).parts
    package = folders if folders[0] == FLOOR else ("keyphrase_tools",)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            parents = package[: len(package) - node.level + 1] if node.level else ()
            yield ".".join((*parents, node.module))


def shared_modules() -> dict[str, Path]:
    """The files of Lexperts that the package imports, directly or through each other, by their places in it."""
    found: dict[str, Path] = {}
    own = sorted((HERE / PACKAGE).glob("*.py"))
    pending = own.copy()
    while pending:
        for name in imports_of(pending.pop()):
            path = ROOT / f"{name.replace('.', '/')}.py"
            place = f"{name.removeprefix('keyphrase_tools.').replace('.', '/')}.py"
            is_shared = name.startswith(("keyphrase_tools.", f"{FLOOR}.")) and path.exists()
            if is_shared and place not in found and HERE / PACKAGE / place not in own:
                found[place] = path
                pending.append(path)
    packages = {f"{place.rpartition('/')[0]}/__init__.py" for place in found if place.startswith(FLOOR)}
    return found | {place: ROOT / place for place in packages}


class BuildWithModules(build_py):
    """Adds the shared modules to the package that is built."""

    def run(self):
        """Builds the package, copies the modules, and lets all of them find `run_tools` inside."""
        super().run()
        folder = Path(self.build_lib) / PACKAGE
        for place, path in shared_modules().items():
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / place)
        for path in folder.glob("*.py"):
            code = path.read_text(encoding="utf-8")
            path.write_text(re.sub(rf"^( *from ){FLOOR}\.", rf"\1.{FLOOR}.", code, flags=re.M), encoding="utf-8")


if __name__ == "__main__":
    setup(cmdclass={"build_py": BuildWithModules})
