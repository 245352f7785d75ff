"""The lowest floor: what its modules import."""

import subprocess
import sys
from pathlib import Path

import run_tools

ROOT = Path(run_tools.__file__).parent


def test_no_module_imports_torch_or_an_extra():
    files = (path.relative_to(ROOT.parent).with_suffix("") for path in ROOT.rglob("*.py"))
    names = ", ".join(".".join(file.parts).removesuffix(".__init__") for file in files)
    heavy = {"torch", "transformers", "ray", "pyarrow", "pandas", "numpy"}
    code = f"import sys, {names}\nprint(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
