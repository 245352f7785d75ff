"""A release rehearsal: builds the distributions, checks what is in them, and tries the wheels in fresh environments.

    python .ci/release_check.py                       # everything; needs pip and about 10 minutes
    python .ci/release_check.py --only dist           # build and check the files in dist/
    python .ci/release_check.py --only newest         # the wheel with the versions of constraints.txt
    python .ci/release_check.py --only oldest --torch 2.13.0     # the lower bounds of setup.cfg, but this torch

The environments are folders of build/release, made anew each time. `make release-check` runs this.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST, WORK = ROOT / "dist", ROOT / "build" / "release"
MODEL = ROOT / "models" / "seke-minilm"
EXTRAS = ("train", "serve")
PACKAGES = {"keyphrase_tools", "lexperts", "merge_tools", *(path.name for path in ROOT.glob("modeling_*"))}
FORBIDDEN = re.compile(r"(^|/)(tests|benchmarks|shared|\.venv|\.git|runs)/|\.(pyc|jsonl|safetensors|bin|pt)$")
MAX_BYTES = 2_000_000  # of the wheel of lexperts; weights and data would exceed it


def run(*command, **options) -> None:
    """Runs a command, which must succeed."""
    print("$", *command, flush=True)
    subprocess.run([str(word) for word in command], check=True, **options)


def build() -> None:
    """Writes the sdist and the wheel of lexperts and of the default model to dist/."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", DIST, ROOT)
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", DIST, MODEL)
    run(sys.executable, "-m", "twine", "check", "--strict", *sorted(DIST.iterdir()))


def wheel_of(name: str) -> Path:
    """The wheel in dist/."""
    (path,) = DIST.glob(f"{name}-*.whl")
    return path


def fail_if(wrong, message: str) -> None:
    """Ends with an error that lists what is wrong."""
    if wrong:
        raise SystemExit(f"{message}: {', '.join(sorted(wrong)) if not isinstance(wrong, bool) else ''}")


def check_contents() -> None:
    """The wheel has all modules, recipes and licences, and no tests, data or weights; the sdist can build it."""
    path = wheel_of("lexperts")
    with zipfile.ZipFile(path) as file:
        names = set(file.namelist())
        (metadata,) = (file.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    tracked = subprocess.run(["git", "ls-files", *PACKAGES], cwd=ROOT, check=True, capture_output=True, text=True)
    expected = {name for name in tracked.stdout.split() if name.endswith((".py", ".yml", "py.typed"))}
    fail_if(expected - names, f"{path.name} lacks")
    fail_if({f"{name}/py.typed" for name in PACKAGES} - names, f"{path.name} lacks")
    info = {name for name in names if ".dist-info/" in name}
    fail_if({name for name in names - info if name not in expected}, f"{path.name} has files that are not tracked")
    fail_if({name for name in names - info if FORBIDDEN.search(name)}, f"{path.name} should not have")
    fail_if(not any(name.endswith("licenses/LICENSE") for name in info), f"{path.name} has no licence")
    fail_if("License-Expression: Apache-2.0" not in metadata, "METADATA names no licence")
    fail_if(path.stat().st_size > MAX_BYTES, f"{path.name} has {path.stat().st_size:,} bytes, more than {MAX_BYTES:,}")
    (source,) = DIST.glob("lexperts-*.tar.gz")
    with tarfile.open(source) as file:
        inside = {name.partition("/")[2] for name in file.getnames()}
    fail_if((expected | {"LICENSE", "README.md", "setup.cfg", "pyproject.toml"}) - inside, f"{source.name} lacks")
    model = wheel_of("lexperts_seke_minilm")
    with zipfile.ZipFile(model) as file:
        inside = set(file.namelist())
    fail_if({f"lexperts_seke_minilm/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json")} - inside,
            f"{model.name} lacks")  # fmt: skip
    print(f"{path.name}: {len(names)} files, {path.stat().st_size / 1e3:,.0f} kB; {source.name}; {model.name}: as they should be")


def lower_bounds(extras: tuple[str, ...]) -> list[str]:
    """The requirements of setup.cfg with `>=` turned into `==`."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = setup["options"]["install_requires"].splitlines()
    for extra in extras:
        lines += setup["options.extras_require"][extra].splitlines()
    return sorted({line.strip().replace(">=", "==") for line in lines if line.strip() and not line.startswith("#")})


def try_wheel(name: str, torch: str, constraints: Path) -> None:
    """Installs the wheels in a fresh environment and runs `smoke.py` there, without extras and with some."""
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = (python, "-m", "pip", "install", "-q", "--disable-pip-version-check")
    smoke = (python, "-P", shutil.copy(ROOT / ".ci" / "smoke.py", folder))
    run(*pip, f"torch=={torch}", "-c", constraints)  # alone: what asks for it later finds it there
    run(*pip, "-c", constraints, wheel_of("lexperts"))
    run(*smoke, "bare", cwd=folder)
    run(*pip, "-c", constraints, f"{wheel_of('lexperts')}[{','.join(EXTRAS)}]", wheel_of("lexperts_seke_minilm"))
    run(*pip[:3], "check")
    run(*smoke, "full", cwd=folder)
    run(python, "-m", "pip", "freeze", "--exclude", "lexperts", stdout=(WORK / f"{name}.txt").open("w", encoding="utf-8"))


def pinned_torch(lines: list[str]) -> str:
    """The version in `torch==2.13.0`."""
    return next(line for line in lines if line.startswith("torch==")).partition("==")[2]


def main() -> None:
    """Runs the parts that `--only` names, by default all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("dist", "newest", "oldest"), nargs="+", default=("dist", "newest", "oldest"))
    parser.add_argument("--torch", help="the torch of `oldest`, where the oldest supported one has no small wheel")
    args = parser.parse_args()
    if "dist" in args.only:
        build()
        check_contents()
    WORK.mkdir(parents=True, exist_ok=True)
    if "newest" in args.only:
        newest = ROOT / "constraints.txt"
        try_wheel("newest", pinned_torch(newest.read_text(encoding="utf-8").splitlines()), newest)
    if "oldest" in args.only:
        lines = lower_bounds(EXTRAS)
        torch = args.torch or pinned_torch(lines)
        oldest = WORK / "lower_bounds.txt"
        lines = [f"torch=={torch}" if line.startswith("torch==") else line for line in lines]
        oldest.write_text("\n".join(lines) + "\n", encoding="utf-8")
        try_wheel("oldest", torch, oldest)
    print("the release can be made")


if __name__ == "__main__":
    main()
