"""Assembles what the keyphrase demo of the documentation runs on in `build/demo`: libraries from npm, lexperts-lite, and its model.

    python docs/demo/assemble.py     # `make docs` runs it; needs Node.js and npm

Python for browsers is Pyodide. Its own packages, numpy and regex, are not on npm: they come from Pyodide's server, or where that cannot
be reached from a wheel on PyPI that contains them, and must have the hashes of Pyodide's lock file.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path
from urllib.parse import urljoin

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "demo"
LIBRARIES = (  # of node_modules
    "@huggingface/tokenizers/dist/tokenizers.min.mjs", "onnxruntime-web/dist/ort.wasm.bundle.min.mjs",
    "onnxruntime-web/dist/ort-wasm-simd-threaded.mjs", "onnxruntime-web/dist/ort-wasm-simd-threaded.wasm",
    "pyodide/pyodide.mjs", "pyodide/pyodide.asm.mjs", "pyodide/pyodide.asm.wasm", "pyodide/python_stdlib.zip",
)  # fmt: skip
PACKAGES = ("numpy", "regex")
SERVER = "https://cdn.jsdelivr.net/pyodide/v{version}/full/"
INDEX, MIRROR = "https://pypi.org/simple/open-webui/", "open_webui-0.12.4-py3-none-any.whl"  # contains Pyodide 314.0.3


def from_server(name: str, version: str) -> bytes:
    """A package from Pyodide's server."""
    with urllib.request.urlopen(SERVER.format(version=version) + name, timeout=20) as response:
        return response.read()


def from_mirror(name: str) -> bytes:
    """A package out of the wheel on PyPI, of which only this part is read."""
    from remotezip import RemoteZip

    with urllib.request.urlopen(INDEX, timeout=60) as response:
        links = re.findall(r'href="([^"#]+)', response.read().decode())
    with RemoteZip(urljoin(INDEX, next(link for link in links if link.endswith(MIRROR)))) as archive:
        return archive.read(next(path for path in archive.namelist() if path.endswith(f"/{name}")))


def fetch_packages(lock: dict, version: str, folder: Path) -> None:
    """Writes Pyodide's packages to a folder that has them not yet.

    Raises:
        ValueError: if one is not that of the lock file.
    """
    for entry in (lock["packages"][name] for name in PACKAGES):
        path = folder / entry["file_name"]
        if path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == entry["sha256"]:
            continue
        try:
            data = from_server(path.name, version)
        except OSError:
            data = from_mirror(path.name)
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise ValueError(f"{path.name} has not the hash of Pyodide's lock file.")
        path.write_bytes(data)


def write_modules(lib: Path) -> None:
    """Writes lexperts_lite.zip, the modules of the distribution, and the folder of its small model: in onnxruntime-web the default one rounds otherwise."""
    shutil.copytree(ROOT / "lexperts_lite" / "tiny", lib / "model", dirs_exist_ok=True)
    with zipfile.ZipFile(lib / "lexperts_lite.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for pattern in ("lexperts_lite/*.py", "lexperts_lite/model/tokenizer.json", "run_tools/*.py"):
            for path in sorted(ROOT.glob(pattern)):
                archive.write(path, path.relative_to(ROOT).as_posix())


def example(size: int) -> str:
    """The demo's first text with its keyphrases, as JSON, which the page shows before it loads `size` bytes."""
    text = (ROOT / "examples" / "corpus" / "paragraph.txt").read_text(encoding="utf-8").strip()
    code = "import json, sys; from lexperts_lite import KeyphraseExtractor; print(json.dumps(KeyphraseExtractor('tiny')(sys.argv[1])))"
    command, environment = [sys.executable, "-c", code, text], os.environ | {"PYTHONPATH": str(ROOT)}
    found = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.dumps({"text": text, "phrases": json.loads(found.stdout), "bytes": size}, ensure_ascii=False)


def install_libraries(npm: Path, lib: Path) -> None:
    """Installs the libraries from npm, and copies what the page loads of them, Pyodide's packages, and their names."""
    npm.mkdir(exist_ok=True)
    shutil.copyfile(HERE / "package.json", npm / "package.json")
    subprocess.run(["npm", "install", "--silent", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=npm, check=True)
    for name in LIBRARIES:
        shutil.copyfile(npm / "node_modules" / name, lib / Path(name).name)
    lock = json.loads((npm / "node_modules/pyodide/pyodide-lock.json").read_text(encoding="utf-8"))
    version = json.loads((npm / "package.json").read_text(encoding="utf-8"))["dependencies"]["pyodide"]
    fetch_packages(lock, version, lib)
    (lib / "wheels.json").write_text(json.dumps([lock["packages"][name]["file_name"] for name in PACKAGES]))
    (lib / "pyodide-lock.json").write_text(json.dumps(lock | {"packages": {}}))


def main() -> None:
    """Assembles the folder, again each time but for what was downloaded."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=BUILD)
    output = parser.parse_args().output
    lib, npm = output / "lib", output.with_name("demo-npm")
    lib.mkdir(parents=True, exist_ok=True)
    install_libraries(npm, lib)
    write_modules(lib)
    subprocess.run(["node", HERE / "snapshot.mjs", npm / "node_modules", lib], check=True)
    size = sum(path.stat().st_size for path in lib.rglob("*") if path.is_file())
    (output / "example.json").write_text(example(size), encoding="utf-8")
    print(f"{output}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
