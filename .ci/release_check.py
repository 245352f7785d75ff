"""A release rehearsal: builds the distributions, checks what is in them, and tries the wheels in fresh environments.

    python .ci/release_check.py                       # everything; needs pip and about 10 minutes; `oldest` on Python 3.11 alone
    python .ci/release_check.py --only dist           # build and check the files in dist/
    python .ci/release_check.py --only newest         # the wheels with the versions of constraints.txt; a list of all components
    python .ci/release_check.py --only lite           # lexperts-lite alone
    python .ci/release_check.py --only oldest --torch 2.13.0     # the lower bounds of setup.cfg, but this torch
    python .ci/release_check.py --only bounds         # print those lower bounds as constraints
    python .ci/release_check.py --tag v0.2.0          # everything, and the tag agrees with setup.cfg and CHANGELOG.md

The environments are folders of build/release, made again each time. `make release-check` runs this.
"""

import argparse
import json
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
SOURCES = (ROOT / "lite", *sorted(path.parent for path in ROOT.glob("models/*/pyproject.toml")))  # of the other wheels
STAGES = {  # checks of smoke.py and their extras
    "bare": (),
    "merge": ("merge",),
    "full": ("keyphrases", "merge", "serve", "train"),
    "smollm2": ("smollm2",),
}
# what the wheels of models hold
CONTENTS = {
    "lexperts_lite": ("model/onnx/model_int8.onnx", "model/tokenizer.json", "ranking.py"),
    "lexperts_seke_minilm": ("config.json", "model.safetensors", "tokenizer.json"),
    "lexperts_seke_tiny": ("config.json", "model.safetensors", "tokenizer.json"),
    "lexperts_smollm2": ("SmolLM2-135M-Instruct.Q4_1.gguf",),
    **{
        f"lexperts_{name}_smollm2": ("config.json", "generation_config.json", "trained.safetensors")
        for name in ("lexicon", "moesumm", "exhird")
    },
}
BOUNDED = ("merge", "serve", "train", "offline")  # extras whose lower bounds are tested
PACKAGES = {"keyphrase_tools", "lexperts", "merge_tools", "run_tools", *(path.name for path in ROOT.glob("modeling_*"))}
FORBIDDEN = re.compile(r"(^|/)(tests|benchmarks|shared|\.venv|\.git|runs)/|\.(pyc|jsonl|safetensors|bin|pt)$")
MAX_BYTES = 2_000_000  # of the wheel of lexperts; weights and data would exceed it


def run(*command, **options) -> None:
    """Runs a command, which must succeed."""
    print("$", *command, flush=True)
    subprocess.run([str(word) for word in command], check=True, **options)


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


def fail_if(wrong: bool | set[str], message: str) -> None:
    """Ends with an error, which lists what is wrong."""
    if wrong:
        raise SystemExit(f"{message}." if isinstance(wrong, bool) else f"{message}: {', '.join(sorted(wrong))}")


def check_contents() -> None:
    """The wheel has the tracked files of the packages, the licence, and nothing else; the sdist can build it."""
    path = wheel_of("lexperts")
    with zipfile.ZipFile(path) as file:
        names = set(file.namelist())
        (metadata,) = (file.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    tracked = subprocess.run(["git", "ls-files", *PACKAGES], cwd=ROOT, check=True, capture_output=True, text=True)
    expected = set(tracked.stdout.split())
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
    for name, files in CONTENTS.items():
        with zipfile.ZipFile(wheel_of(name)) as file:
            fail_if({f"{name}/{one}" for one in files} - set(file.namelist()), f"the wheel of {name} lacks")
    print(f"{path.name}: {len(names)} files, {path.stat().st_size / 1e3:,.0f} kB; the contents are right")


def read_setup() -> ConfigParser:
    """setup.cfg."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    return setup


def lower_bounds(torch: str | None) -> list[str]:
    """The requirements of setup.cfg with `>=` turned into `==`, with another torch if one is given."""
    setup = read_setup()
    lines = setup["options"]["install_requires"].splitlines()
    for extra in BOUNDED:
        lines += setup["options.extras_require"][extra].splitlines()
    bounds = {line.strip().replace(">=", "==") for line in lines if line.strip() and not line.startswith("#")}
    return sorted(f"torch=={torch}" if torch and bound.startswith("torch==") else bound for bound in bounds)


def check_tag(tag: str) -> None:
    """The version of setup.cfg is the tag's, and CHANGELOG.md has a dated section for it."""
    version = read_setup()["metadata"]["version"]
    fail_if(tag != f"v{version}", f"The tag {tag} is not v{version}, the version in setup.cfg. Change one of them")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    dated = re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changes, re.M)
    fail_if(not dated, f"CHANGELOG.md has no line '## [{version}] - YYYY-MM-DD'. Write the date of the release there")


def try_wheel(name: str, torch: str, constraints: Path) -> None:
    """Installs the wheels in a fresh environment and runs `smoke.py` there, without extras and then with some."""
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = (python, "-m", "pip", "install", "-q", "--disable-pip-version-check")
    shutil.copy(ROOT / "examples" / "corpus" / "paragraph.txt", folder)
    smoke = (python, "-P", shutil.copy(ROOT / ".ci" / "smoke.py", folder))
    run(*pip, f"torch=={torch}", "-c", constraints)  # alone: what asks for it later finds it there
    for stage, extras in STAGES.items():
        suffix = f"[{','.join(extras)}]" if extras else ""
        run(*pip, "-c", constraints, "--find-links", DIST, f"{wheel_of('lexperts')}{suffix}")
        run(*pip[:3], "check")
        run(*smoke, stage, cwd=folder)
    run(
        python,
        "-m",
        "pip",
        "freeze",
        "--exclude",
        "lexperts",
        stdout=(WORK / f"{name}.txt").open("w", encoding="utf-8"),
    )


def list_components(name: str) -> None:
    """Writes what an environment holds into build/release/NAME.cdx.json (CycloneDX), without local paths."""
    path = WORK / f"{name}.cdx.json"
    python = WORK / name / "bin" / "python"
    run(sys.executable, "-m", "cyclonedx_py", "environment", python, "--output-reproducible", "-o", path)
    bill = json.loads(path.read_text(encoding="utf-8"))
    for part in bill["components"]:
        links = [link for link in part.pop("externalReferences", []) if not link["url"].startswith("file:")]
        part.update({"externalReferences": links} if links else {})
    fail_if(not any(part["name"] == "lexperts" for part in bill["components"]), f"{path.name} lacks lexperts")
    path.write_text(json.dumps(bill, indent=1) + "\n", encoding="utf-8")
    print(f"{path.name}: {len(bill['components'])} components")


def try_lite() -> None:
    """Installs lexperts-lite alone in a fresh environment and runs `smoke.py` there."""
    folder = WORK / "lite"
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    for file in ("examples/corpus/paragraph.txt", ".ci/smoke.py"):
        shutil.copy(ROOT / file, folder)
    run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", wheel_of("lexperts_lite"))
    run(python, "-P", "smoke.py", "lite", cwd=folder)


def oldest_python() -> tuple[int, ...]:
    """The version in `python_requires = >=3.11`."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    return tuple(map(int, setup["options"]["python_requires"].removeprefix(">=").split(".")))


def pinned_torch(lines: list[str]) -> str:
    """The version in `torch==2.13.0`."""
    return next(line for line in lines if line.startswith("torch==")).partition("==")[2]


def main() -> None:
    """Runs the parts that `--only` names, by default all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", choices=("dist", "newest", "lite", "oldest", "bounds"), help="by default all but bounds"
    )
    parser.add_argument("--torch", help="the torch of `oldest` and `bounds`, instead of the lower bound")
    parser.add_argument("--tag", help="the tag of the release, such as v0.2.0")
    args = parser.parse_args()
    bounds = lower_bounds(args.torch)
    if args.only == "bounds":
        print("\n".join(bounds))
        return
    if args.tag:
        check_tag(args.tag)
    if args.only in (None, "dist"):
        build()
        check_contents()
    WORK.mkdir(parents=True, exist_ok=True)
    if args.only in (None, "newest"):
        newest = ROOT / "constraints.txt"
        try_wheel("newest", pinned_torch(newest.read_text(encoding="utf-8").splitlines()), newest)
        list_components("newest")
    if args.only in (None, "lite"):
        try_lite()
    if args.only is None and sys.version_info[:2] != oldest_python():
        print("The lower bounds are for the oldest Python: newer ones have no wheels of some of these versions.")
    elif args.only in (None, "oldest"):
        oldest = WORK / "lower_bounds.txt"
        oldest.write_text("\n".join(bounds) + "\n", encoding="utf-8")
        try_wheel("oldest", pinned_torch(bounds), oldest)
    print("The release check passed.")


if __name__ == "__main__":
    main()
