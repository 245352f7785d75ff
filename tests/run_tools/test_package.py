"""The lowest floor: what its modules import, and versions."""

import subprocess
import sys
from pathlib import Path

import run_tools
from run_tools.versions import package_version, package_versions

ROOT = Path(run_tools.__file__).parent


def test_no_module_imports_torch_or_an_extra():
    files = (path.relative_to(ROOT.parent).with_suffix("") for path in ROOT.rglob("*.py"))
    names = ", ".join(".".join(file.parts).removesuffix(".__init__") for file in files)
    heavy = {"torch", "transformers", "ray", "pyarrow", "pandas", "numpy"}
    code = f"import sys, {names}\nprint(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_versions_of_packages():
    assert package_versions(("pytest", "no-such-package")) == {
        "pytest": package_version("pytest"),
        "no-such-package": "unknown",
    }
