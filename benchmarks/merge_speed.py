"""Time, processor time and memory of merging experts, compared with copying the same bytes and with mergekit.

    python -m venv FOLDER2 && FOLDER2/bin/pip install torch==2.13.0 && FOLDER2/bin/pip install mergekit==0.1.5
    python -m venv FOLDER3 && FOLDER3/bin/pip install torch==2.13.0 && FOLDER3/bin/pip install transformers==4.44.2 peft==0.12.0 \
        accelerate sentencepiece protobuf tqdm && FOLDER3/bin/pip install --no-deps mergoo==0.0.10
    python benchmarks/merge_speed.py --work FOLDER --mergekit FOLDER2 --mergoo FOLDER3      # about 25 minutes, 25 GB of disk
    python benchmarks/merge_speed.py --work FOLDER --candidates floor base --name merge_speed_part
    python benchmarks/merge_speed.py --work FOLDER --mergekit FOLDER2 --name merge_gates --shape smollm2 1b --smollm2 FOLDER4
        --candidates base mergekit hidden mergekit-hidden --conditions cached-quiet --rounds 3

FOLDER receives the experts (random weights; reused if shape and versions are the same, and removed before those of the next
shape; those of `smollm2` are the model in FOLDER4 with other MLPs). The other folders are virtual environments with mergekit and
mergoo, and with the torch of this environment. Each candidate is timed as a whole process; its processor time is user and system time of
the process and its children. Before each run the last output is removed and the disk is synced. Conditions:

    cached-quiet   the sources are read once before, so that they are in the page cache
    cached-busy    the same, while another process keeps one core busy
    cold-quiet     the sources are dropped from the page cache before (posix_fadvise, POSIX_FADV_DONTNEED)
    cold-busy      both

Every run adds a row to benchmarks/results/NAME.json. An interrupted benchmark continues with the rows that are missing.
"""

import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
from common import Record, make_parser
from merge_candidates import CANDIDATES, SHAPES, bytes_of, commands, make_experts, versions_of
from timing import describe

ROOT = Path(__file__).resolve().parent.parent
CONDITIONS = ("cached-quiet", "cached-busy", "cold-quiet", "cold-busy")


def memory(pid: int) -> tuple[float, float]:
    """Resident memory of the process and its descendants in MiB: anonymous, and total including mapped files."""
    anonymous = total = 0
    with suppress(psutil.Error):
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            with suppress(psutil.Error):
                used = process.memory_info()
                anonymous, total = anonymous + used.rss - used.shared, total + used.rss
    return anonymous / 2**20, total / 2**20


def run(command: list[str], log: Path) -> dict:
    """Runs a command. Returns seconds to its exit, its processor time, seconds until all data is on disk, and peak memory.

    Memory is in MiB, sampled every 20 ms.
    """
    peaks, done = [0.0, 0.0], threading.Event()

    def watch(pid):
        while not done.is_set():
            peaks[:] = map(max, peaks, memory(pid))
            done.wait(0.02)

    with open(log, "w", encoding="utf-8") as file:
        start = time.perf_counter()
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
        watcher = threading.Thread(target=watch, args=(process.pid,))
        watcher.start()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        done.set()
        watcher.join()
    os.sync()
    durable = time.perf_counter() - start
    if process.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} ... failed: {log.read_text(encoding='utf-8')[-2000:]}")
    times = {"seconds": seconds, "cpu_seconds": usage.ru_utime + usage.ru_stime, "durable_seconds": durable}
    return times | {"anonymous_mib": peaks[0], "total_mib": peaks[1]}


@contextmanager
def busy_core(busy: bool):
    """Keeps the last core busy with another process."""
    if not busy:
        yield
        return
    pin = f"import os; os.sched_setaffinity(0, {{{(os.cpu_count() or 1) - 1}}})\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", pin])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def prepare_cache(experts: list[Path], cold: bool):
    """Reads all weights, so that they are in the page cache, or drops them from it."""
    buffer = bytearray(1 << 24)
    for expert in experts:
        with open(expert / "model.safetensors", "rb", buffering=0) as file:
            if cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while not cold and file.readinto(buffer):
                pass


def measure(
    todo: dict, experts: list[Path], folder: Path, shape: str, condition: str, round: int, candidate: str
) -> dict:
    """One run of a candidate. The output is a file of the floor, and a folder of the others."""
    out = folder / "out"
    shutil.rmtree(out) if out.is_dir() else out.unlink(missing_ok=True)
    os.sync()
    prepare_cache(experts, condition.startswith("cold"))
    with busy_core(condition.endswith("busy")):
        row = run(todo[candidate], folder / f"{candidate}.log")
    if candidate != "check":
        files = out.glob("*.safetensors") if out.is_dir() else [out]
        row["output_bytes"] = sum(file.stat().st_size for file in files)
    print(f"{shape} {condition} round {round + 1}  {candidate:9} {describe(row)}", flush=True)
    return {"experts": len(experts), **row}


def main():
    """Runs the benchmark and writes its results."""
    parser = make_parser(__doc__, "merge_speed")
    parser.add_argument("--work", type=Path, required=True, help="folder on the disk to measure, with 25 GB free")
    parser.add_argument("--mergekit", type=Path, help="virtual environment of mergekit")
    parser.add_argument("--mergoo", type=Path, help="virtual environment of mergoo")
    parser.add_argument("--smollm2", type=Path, help="folder with SmolLM2-135M, for the shape smollm2")
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["1b", "8b-wide"])
    parser.add_argument("--candidates", nargs="+", choices=CANDIDATES, default=list(CANDIDATES))
    parser.add_argument(
        "--conditions", nargs="+", choices=CONDITIONS, help="default: all for 1b, no busy ones for others"
    )
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    names = [name for name in CANDIDATES if name in args.candidates]  # the floor first: the others are compared with it
    peers = {name: folder.absolute() for name in ("mergekit", "mergoo") if (folder := getattr(args, name))}
    if missing := {"mergekit", "mergoo"} & {name.removesuffix("-hidden") for name in names} - peers.keys():
        parser.error(
            f"the candidates {', '.join(sorted(missing))} need an environment; leave them out with --candidates"
        )
    if "smollm2" in args.shape and not args.smollm2:
        parser.error("--shape smollm2 needs --smollm2")
    print("Run this on an idle machine: other processes and disk writes change the results.", flush=True)
    record = Record(args.name, overwrite=args.overwrite, **{name: versions_of(name, peers[name]) for name in peers})
    for shape in args.shape:
        folder, sizes = args.work.absolute() / shape, SHAPES[shape]
        experts = make_experts(folder, sizes, args.overwrite, args.smollm2 if shape == "smollm2" else None)
        todo = commands(names, experts, folder, sizes, peers)
        print(f"{shape}: {len(experts)} experts, {bytes_of(sizes, len(experts)) / 1e9:.2f} GB to write", flush=True)
        conditions = args.conditions or (CONDITIONS if shape == "1b" else CONDITIONS[::2])
        places = [
            (condition, number, name) for condition in conditions for number in range(args.rounds) for name in names
        ]
        keys = ("shape", "condition", "round", "candidate")
        record.complete(
            partial(measure, todo, experts, folder), [dict(zip(keys, (shape, *p), strict=True)) for p in places]
        )
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
