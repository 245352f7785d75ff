"""Time, processor time and memory of merging experts, compared with copying the same bytes and with mergekit.

    python benchmarks/merge_speed.py --work FOLDER --mergekit FOLDER2 --mergoo FOLDER3      # about 25 minutes, 25 GB of disk
    python benchmarks/merge_speed.py --work FOLDER --mergekit FOLDER2 --mergoo FOLDER3 --shape 1b --conditions cached-quiet --rounds 3
    python benchmarks/merge_speed.py --work FOLDER --candidates floor base --name merge_speed_part
    python benchmarks/merge_speed.py --work FOLDER --mergekit FOLDER2 --name merge_gates --shape smollm2 1b --smollm2 FOLDER4
        --candidates base mergekit hidden mergekit-hidden --conditions cached-quiet --rounds 3

FOLDER receives the experts (random weights; reused if shape and versions are the same, and removed before those of the next
shape; those of `smollm2` are the model in FOLDER4 with other MLPs). The other folders are virtual environments with mergekit and mergoo, created if missing: the same torch as here, then mergekit
0.1.5, which installs transformers 5, or mergoo 0.0.10 and transformers 4.44.2. Each candidate is timed as a whole process; its processor time is user and system time of the
process and its children. Before each run the last output is removed and the disk is synced. Conditions:

    cached-quiet   the sources are read once before, so that they are in the page cache
    cached-busy    the same, while another process keeps one core busy
    cold-quiet     the sources are dropped from the page cache before (posix_fadvise, POSIX_FADV_DONTNEED)
    cold-busy      both

Every run adds a row to benchmarks/results/NAME.json. An interrupted benchmark continues with the rows that are missing.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from common import Record, add_record_arguments
from merge_candidates import (
    CANDIDATES,
    SHAPES,
    bytes_of,
    commands,
    make_experts,
    mergekit_environment,
    mergoo_environment,
)

ROOT = Path(__file__).resolve().parent.parent
CONDITIONS = ("cached-quiet", "cached-busy", "cold-quiet", "cold-busy")


def family(pid: int) -> list[int]:
    """The process and all its descendants."""
    try:
        tasks = [t.read_text(encoding="utf-8") for t in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return [pid]
    return [pid, *(p for child in " ".join(tasks).split() for p in family(int(child)))]


def memory(pid: int) -> tuple[int, int]:
    """Resident memory of the process and its descendants in KiB: anonymous, and total including mapped files."""
    anonymous = total = 0
    for member in family(pid):
        try:
            lines = Path(f"/proc/{member}/status").read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        anonymous += int(fields.get("RssAnon", "0 kB").split()[0])
        total += int(fields.get("VmRSS", "0 kB").split()[0])
    return anonymous, total


def run(command: list[str], log: Path) -> dict:
    """Runs a command. Returns seconds to its exit, its processor time, seconds until all data is on disk, and peak memory.

    Memory is in MiB, sampled every 20 ms.
    """
    peaks, done = [0, 0], threading.Event()

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
        code = process.returncode = os.waitstatus_to_exitcode(status)
        done.set()
        watcher.join()
    os.sync()
    durable = time.perf_counter() - start
    if code:
        raise RuntimeError(
            f"{' '.join(command[:4])} ... exited with status {code}:\n" + log.read_text(encoding="utf-8")[-2000:]
        )
    anonymous, total = (peak / 1024 for peak in peaks)
    return {
        "seconds": seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "durable_seconds": durable,
        "anonymous_mib": anonymous,
        "total_mib": total,
    }


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


def remove(out: Path):
    """Removes the output of a candidate: a file of the floor, a folder of the others."""
    if out.is_dir():
        shutil.rmtree(out)
    else:
        out.unlink(missing_ok=True)


def prepare_cache(experts: list[Path], cold: bool):
    """Reads all weights, so that they are in the page cache, or drops them from it."""
    buffer = bytearray(1 << 24)
    for expert in experts:
        with open(expert / "model.safetensors", "rb", buffering=0) as file:
            if cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while not cold and file.readinto(buffer):
                pass


def bytes_in(out: Path) -> int:
    """Size of the weights."""
    return sum(f.stat().st_size for f in out.glob("*.safetensors")) if out.is_dir() else out.stat().st_size


def measure(shape: str, todo: dict[str, list[str]], experts: list[Path], folder: Path, args, record: Record):
    """Runs all candidates in turn in each condition, `rounds` times, and adds a row for each run that has none."""
    out = folder / "out"
    for condition in conditions_of(shape, args.conditions):
        for index in range(args.rounds):
            for name, command in todo.items():
                key = {"shape": shape, "condition": condition, "round": index, "candidate": name}
                if record.find(**key):
                    continue
                remove(out)
                os.sync()
                prepare_cache(experts, condition.startswith("cold"))
                with busy_core(condition.endswith("busy")):
                    result = run(command, folder / f"{name}.log")
                sizes = {} if name == "check" else {"output_bytes": bytes_in(out)}
                record.add({**key, "experts": len(experts), **result, **sizes})
                shown = ", ".join(f"{key} {value:,.1f}" for key, value in result.items())
                print(f"{shape} {condition} round {index + 1}  {name:9} {shown}", flush=True)
                if args.check_outputs and name in ("base", "mean"):
                    verify = [sys.executable, __file__, "--verify", out, name, *experts]
                    subprocess.run(list(map(str, verify)), check=True)
    remove(out)


def conditions_of(shape: str, chosen: list[str] | None) -> list[str]:
    """The conditions of a shape: all four for the first, two for others, unless some are chosen."""
    return chosen or list(CONDITIONS if shape == "1b" else CONDITIONS[::2])


def verify(out: str, average: str, experts: list[str]):
    """Checks that the mixture opens as a Mixtral without missing keys and has the experts' values. Runs as a process."""
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    if type(model).__name__ != "MixtralForCausalLM" or any(info.values()):
        raise SystemExit(f"{type(model).__name__} with {info}; expected a complete MixtralForCausalLM.")
    files = [safe_open(Path(expert) / "model.safetensors", "pt") for expert in experts]

    def check_equal(name: str, actual: torch.Tensor, expected: torch.Tensor):
        if not torch.equal(actual, expected):
            raise SystemExit(f"{name} differs between the mixture and the experts.")

    layers = model.model.layers
    for layer in {0, len(layers) // 2, len(layers) - 1}:
        prefix, mixed = f"model.layers.{layer}", layers[layer]
        for e, file in enumerate(files):
            gate, up, down = (file.get_tensor(f"{prefix}.mlp.{n}_proj.weight") for n in ("gate", "up", "down"))
            check_equal(f"{prefix} expert {e} w1, w3", mixed.mlp.experts.gate_up_proj[e], torch.cat([gate, up]))
            check_equal(f"{prefix} expert {e} w2", mixed.mlp.experts.down_proj[e], down)
        sources = [file.get_tensor(f"{prefix}.self_attn.q_proj.weight") for file in files]
        expected = sources[0] if average == "base" else torch.stack([s.float() for s in sources]).mean(0).bfloat16()
        check_equal(f"{prefix} q_proj", mixed.self_attn.q_proj.weight, expected)
    tied = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    print(f"verified: average {average}, {len(files)} experts, MixtralForCausalLM, {'tied' if tied else 'untied'} head")


def summary(rows: list[dict], rounds: int):
    """Prints medians, peak memory, and the ratios to the floor and to mergekit of each candidate."""
    groups: dict[tuple, dict[str, list[dict]]] = {}
    for row in rows:
        if row["round"] < rounds:
            groups.setdefault((row["shape"], row["condition"]), {}).setdefault(row["candidate"], []).append(row)
    for (shape, condition), candidates in groups.items():

        def median(name: str, field: str, candidates=candidates) -> float:
            return statistics.median(row[field] for row in candidates[name]) if name in candidates else float("nan")

        for name in candidates:
            seconds, cpu = median(name, "seconds"), median(name, "cpu_seconds")
            floor, theirs, their_cpu = (
                median("floor", "seconds"),
                median("mergekit", "seconds"),
                median("mergekit", "cpu_seconds"),
            )
            print(
                f"{shape:8} {condition:12} {name:9} {seconds:7.1f} s {cpu:7.1f} s of processor time, "
                f"{median(name, 'anonymous_mib'):7,.0f} MiB; {seconds / floor:5.2f}x the floor, "
                f"{seconds / theirs:5.2f}x mergekit's time, {cpu / their_cpu:5.2f}x its processor time"
            )


def main():
    """Runs the benchmark and writes its results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, help="folder on the disk to measure, with 25 GB of free space")
    parser.add_argument("--mergekit", type=Path, help="virtual environment of mergekit; created if missing")
    parser.add_argument("--mergoo", type=Path, help="virtual environment of mergoo; created if missing")
    parser.add_argument("--smollm2", type=Path, help="folder with SmolLM2-135M, for the shape smollm2")
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["1b", "8b-wide"])
    parser.add_argument("--candidates", nargs="+", choices=CANDIDATES, default=list(CANDIDATES))
    parser.add_argument(
        "--conditions", nargs="+", choices=CONDITIONS, help="default: all for 1b, without busy for others"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--check-outputs", action="store_true", help="open the outputs and compare them with the experts"
    )
    parser.add_argument("--keep", action="store_true", help="keep the experts of the last shape for another run")
    add_record_arguments(parser, "merge_speed")
    parser.add_argument("--verify", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.verify:
        return verify(args.verify[0], args.verify[1], args.verify[2:])
    peers = {"mergekit": args.mergekit, "mergekit-hidden": args.mergekit, "mergoo": args.mergoo}
    names = [name for name in CANDIDATES if name in args.candidates]  # the floor first: the others are compared with it
    if not args.work or any(name in names and not folder for name, folder in peers.items()):
        parser.error("--work is required, and so are --mergekit and --mergoo if they are candidates")
    if "smollm2" in args.shape and not args.smollm2:
        parser.error("--shape smollm2 needs --smollm2")
    work, peers = args.work.absolute(), {name: folder and folder.absolute() for name, folder in peers.items()}
    print("Run this on an idle machine: other processes and disk writes change the results.", flush=True)
    makers = {"mergekit": mergekit_environment, "mergoo": mergoo_environment}
    versions = {name: make(peers[name]) if peers[name] else None for name, make in makers.items()}
    record = Record(args.name, overwrite=args.overwrite, **versions)
    for i, shape in enumerate(args.shape):
        for earlier in args.shape[:i]:
            shutil.rmtree(work / earlier, ignore_errors=True)
        folder, sizes = work / shape, SHAPES[shape]
        experts = make_experts(folder, sizes, args.overwrite, args.smollm2 if shape == "smollm2" else None)
        todo = commands(names, experts, folder, sizes, peers)
        print(f"{shape}: {len(experts)} experts, {bytes_of(sizes, len(experts)) / 1e9:.2f} GB to write", flush=True)
        measure(shape, todo, experts, folder, args, record)
    if not args.keep:
        shutil.rmtree(work / args.shape[-1], ignore_errors=True)
    summary(record.rows(), args.rounds)


if __name__ == "__main__":
    main()
