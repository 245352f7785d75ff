"""Builds the wheel: adds the modules of keyphrase_tools that the runtime imports, as they are.

pip wheel --no-deps ./lite
"""

import ast
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PACKAGE = "lexperts_lite"
HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "keyphrase_tools"


def shared_modules() -> list[Path]:
    """The files of keyphrase_tools that the package imports, directly or through each other."""
    found: dict[str, Path] = {}
    pending = sorted((HERE / PACKAGE).glob("*.py"))
    while pending:
        for node in ast.walk(ast.parse(pending.pop().read_text(encoding="utf-8"))):
            name = node.module if isinstance(node, ast.ImportFrom) and node.level == 1 else None
            path = SOURCE / f"{name}.py"
            if name and name not in found and path.exists() and not (HERE / PACKAGE / f"{name}.py").exists():
                found[name] = path
                pending.append(path)
    return sorted(found.values())


class BuildWithModules(build_py):
    """Adds the shared modules to the package that is built."""

    def run(self):
        """Builds the package, then copies the modules."""
        super().run()
        folder = Path(self.build_lib) / PACKAGE
        folder.mkdir(parents=True, exist_ok=True)
        for path in shared_modules():
            shutil.copyfile(path, folder / path.name)


if __name__ == "__main__":
    setup(cmdclass={"build_py": BuildWithModules})
