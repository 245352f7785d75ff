"""Time, processor time and memory of merging experts, compared with copying the same bytes and with mergekit.

    python benchmarks/merge_speed.py --work FOLDER --mergekit ENVIRONMENT      # about 15 minutes, 25 GB of disk
    python benchmarks/merge_speed.py --work FOLDER --mergekit ENVIRONMENT --shape 1b --conditions cached-quiet --rounds 3
    python benchmarks/merge_speed.py --work FOLDER --candidates floor base --name merge_speed_part

FOLDER receives the experts (random weights; reused if shape and versions are the same, and removed before those of the next
shape). ENVIRONMENT is a virtual environment with mergekit, created if missing: the same torch as here, then mergekit 0.1.5,
which installs transformers 5. Each candidate is timed as a whole process; its processor time is user and system time of the
process and its children. Before each run the last output is removed and the disk is synced. Conditions:

    cached-quiet   the sources are read once before, so that they are in the page cache
    cached-busy    the same, while another process keeps one core busy
    cold-quiet     the sources are dropped from the page cache before (posix_fadvise, POSIX_FADV_DONTNEED)
    cold-busy      both

Every run adds a row to benchmarks/results/NAME.json. An interrupted benchmark continues with the rows that are missing.
"""

import argparse
import json
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
from common import Record, add_record_arguments, check_same_settings
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
MERGEKIT = "0.1.5"
CANDIDATES = ("floor", "base", "no-verify", "mean", "ties", "mergekit", "check")
CONDITIONS = ("cached-quiet", "cached-busy", "cold-quiet", "cold-busy")
VOCABULARY, SPECIAL = 128256, 256
# Llama-3.2-1B's shape; Llama-3-8B's width with 2 layers and a tied head, so that 8 experts fit on a disk of 25 GB; a small one
SHAPES = {
    "1b": {"hidden": 2048, "intermediate": 8192, "layers": 16, "head_dim": 64, "tied": True, "experts": 4},
    "8b-wide": {"hidden": 4096, "intermediate": 14336, "layers": 2, "head_dim": 128, "tied": True, "experts": 8},
    "small": {"hidden": 2048, "intermediate": 8192, "layers": 2, "head_dim": 64, "tied": True, "experts": 4},
}
HEADS, KV_HEADS = 32, 8
# only copies the bytes: a lower bound for any merge on this disk
FLOOR = """
import os, sys
target = os.open(sys.argv[1], os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
left = int(sys.argv[2])
for path in sys.argv[3:]:
    source = os.open(path, os.O_RDONLY)
    while left and (copied := os.copy_file_range(source, target, left)):
        left -= copied
os.fsync(target)
sys.exit(left > 0)
"""


# Experts


def config_of(shape: dict) -> dict:
    """config.json in the Hub's spelling for Llama 3."""
    rope = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": VOCABULARY - SPECIAL,
        "eos_token_id": VOCABULARY - SPECIAL + 1,
        "head_dim": shape["head_dim"],
        "hidden_act": "silu",
        "hidden_size": shape["hidden"],
        "initializer_range": 0.02,
        "intermediate_size": shape["intermediate"],
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": HEADS,
        "num_hidden_layers": shape["layers"],
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-05,
        "rope_scaling": rope,
        "rope_theta": 500000.0,
        "tie_word_embeddings": shape["tied"],
        "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY,
    }


def tensors_of(shape: dict) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of one expert, in the order of the file."""
    d, i, kv = shape["hidden"], shape["intermediate"], KV_HEADS * shape["head_dim"]
    one_layer = {
        "input_layernorm": (d,),
        "mlp.down_proj": (d, i),
        "mlp.gate_proj": (i, d),
        "mlp.up_proj": (i, d),
        "post_attention_layernorm": (d,),
        "self_attn.k_proj": (kv, d),
        "self_attn.o_proj": (d, d),
        "self_attn.q_proj": (d, d),
        "self_attn.v_proj": (kv, d),
    }
    sizes = {} if shape["tied"] else {"lm_head.weight": (VOCABULARY, d)}
    sizes["model.embed_tokens.weight"] = (VOCABULARY, d)
    for layer in range(shape["layers"]):
        sizes |= {f"model.layers.{layer}.{name}.weight": size for name, size in one_layer.items()}
    return sizes | {"model.norm.weight": (d,)}


def bytes_of(shape: dict, experts: int) -> int:
    """Bytes of a mixture's tensors in bf16; of one expert's for experts=1."""
    sizes = {name: 2 * torch.Size(size).numel() for name, size in tensors_of(shape).items()}
    routed = sum(count for name, count in sizes.items() if ".mlp." in name)
    gates = 2 * experts * shape["hidden"] * shape["layers"] if experts > 1 else 0
    return sum(sizes.values()) + (experts - 1) * routed + gates


def write_weights(path: Path, shape: dict, seed: int):
    """model.safetensors of N(0, 0.02), norms around 1; 64 MB of it in memory at a time."""
    sizes, header, end = tensors_of(shape), {"__metadata__": {"format": "pt"}}, 0
    for name, size in sizes.items():
        start, end = end, end + 2 * torch.Size(size).numel()
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    generator, part = torch.Generator().manual_seed(seed), 1 << 24
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, size in sizes.items():
            left, mean = torch.Size(size).numel(), float("norm" in name)
            while left:
                values = torch.empty(min(left, part)).normal_(mean, 0.02, generator=generator)
                values.bfloat16().view(torch.uint8).numpy().tofile(file)
                left -= len(values)


def write_tokenizer(folder: Path):
    """A tokenizer as large as Llama 3's: 128,000 tokens of one to three bytes with their merges, and 256 special tokens."""
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in signs for b in signs]
    triples = [(a + b, c) for a, b in pairs for c in signs[:1]]
    merges = (pairs + triples)[: VOCABULARY - SPECIAL - len(signs)]
    pieces = signs + [a + b for a, b in merges]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_{i}|>" for i in range(SPECIAL - 2))]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[1])
    if len(fast) != VOCABULARY:
        raise RuntimeError(f"The tokenizer has {len(fast)} tokens and the model {VOCABULARY}.")
    fast.save_pretrained(folder)


def make_experts(folder: Path, shape: dict, overwrite: bool) -> list[Path]:
    """Creates the missing experts, each under another name until it is complete. Returns their folders.

    Raises:
        SettingsMismatchError: if existing experts were made with another shape or other versions.
    """
    experts = [folder / f"expert_{i}" for i in range(shape["experts"])]
    folder.mkdir(parents=True, exist_ok=True)
    for seed, expert in enumerate(experts):
        check_same_settings(expert, {"config": config_of(shape), "seed": seed}, overwrite)
    missing = sum(not expert.exists() for expert in experts)
    needed, free = missing * bytes_of(shape, 1) + bytes_of(shape, len(experts)), shutil.disk_usage(folder).free
    if free < 1.05 * needed:
        raise SystemExit(
            f"{folder} has {free / 1e9:.1f} GB free, but {needed / 1e9:.1f} GB are needed. Use another --work folder."
        )
    for seed, expert in enumerate(experts):
        if expert.exists():
            continue
        print(f"making {expert.name}, {bytes_of(shape, 1) / 1e9:.2f} GB", flush=True)
        unfinished = folder / f"unfinished_{seed}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        (unfinished / "config.json").write_text(json.dumps(config_of(shape), indent=2) + "\n", encoding="utf-8")
        write_tokenizer(unfinished)
        write_weights(unfinished / "model.safetensors", shape, seed)
        unfinished.rename(expert)
    return experts


def linked(experts: list[Path], count: int) -> list[Path]:
    """`count` experts: the given ones, and hard links to their files under other names."""
    more = [experts[0].parent / f"linked_{i}" for i in range(count - len(experts))]
    for i, folder in enumerate(more):
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier run
        shutil.copytree(experts[i % len(experts)], folder, copy_function=os.link)
    return experts + more


# Candidates


def recipe(experts: list[Path], path: Path, **more) -> Path:
    """Writes a recipe that both mergekit and merge-experts read (JSON is YAML)."""
    sources = [{"source_model": str(expert)} for expert in experts]
    settings = {"gate_mode": "random", "experts_per_token": 2, "dtype": "bfloat16", **more}
    path.write_text(
        json.dumps({"base_model": str(experts[0]), "experts": sources, **settings}, indent=1), encoding="utf-8"
    )
    return path


def mergekit_environment(folder: Path) -> dict[str, str]:
    """Creates the environment if it has no mergekit-moe. Returns the versions of its packages.

    Raises:
        SystemExit: if it exists with another version of mergekit or torch.
    """
    python = folder / "bin" / "python"
    if not (folder / "bin" / "mergekit-moe").exists():
        print(f"creating an environment with mergekit {MERGEKIT}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        for package in (f"torch=={torch.__version__.split('+')[0]}", f"mergekit=={MERGEKIT}"):
            subprocess.run([python, "-m", "pip", "install", "-q", package], check=True)
    names = ("mergekit", "torch", "transformers", "safetensors")
    show = f"import json; from importlib.metadata import version; print(json.dumps({{n: version(n) for n in {names}}}))"
    versions = json.loads(subprocess.check_output([python, "-c", show], text=True))
    for package, expected in (("mergekit", MERGEKIT), ("torch", torch.__version__)):
        if versions[package].split("+")[0] != expected.split("+")[0]:
            raise SystemExit(
                f"{folder} has {package} {versions[package]}, not {expected}. Use another --mergekit folder."
            )
    return versions


def knows_ties() -> bool:
    """Whether recipes accept `average: ties`."""
    from merge_tools.recipe import AVERAGES

    return "ties" in AVERAGES


def commands(names: list[str], experts: list[Path], folder: Path, shape: dict, mergekit: Path | None) -> dict:
    """The command of each candidate; all but `check` write folder/out."""
    out, ours = folder / "out", [sys.executable, "-m", "lexperts", "merge"]
    candidates = {}
    for name in names:
        if name == "floor":
            count = bytes_of(shape, len(experts))
            candidates[name] = [sys.executable, "-c", FLOOR, out, count, *(e / "model.safetensors" for e in experts)]
        elif name == "mergekit":
            tool = mergekit / "bin" / "mergekit-moe"
            candidates[name] = [tool, recipe(experts, folder / "mergekit.yml"), out]
        elif name == "check":
            candidates[name] = [*ours, "check", recipe(linked(experts, 8), folder / "check.yml")]
        elif name == "no-verify":
            candidates[name] = [
                *ours,
                "compose",
                recipe(experts, folder / "base.yml", average="base"),
                out,
                "--no-verify",
            ]
        else:
            candidates[name] = [*ours, "compose", recipe(experts, folder / f"{name}.yml", average=name), out]
    return {name: list(map(str, command)) for name, command in candidates.items()}


# Measuring


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
    if not args.work or ("mergekit" in args.candidates and not args.mergekit):
        parser.error("--work is required, and --mergekit if mergekit is a candidate")
    work, mergekit = args.work.absolute(), args.mergekit and args.mergekit.absolute()
    print("Run this on an idle machine: other processes and disk writes change the results.", flush=True)
    names = [name for name in CANDIDATES if name in args.candidates]  # the floor first: the others are compared with it
    if "ties" in names and not knows_ties():
        print("note: recipes do not accept average: ties, so it is not measured", flush=True)
        names.remove("ties")
    versions = mergekit_environment(mergekit) if "mergekit" in names else None
    record = Record(args.name, overwrite=args.overwrite, mergekit=versions)
    for i, shape in enumerate(args.shape):
        for earlier in args.shape[:i]:
            shutil.rmtree(work / earlier, ignore_errors=True)
        folder, sizes = work / shape, SHAPES[shape]
        experts = make_experts(folder, sizes, args.overwrite)
        todo = commands(names, experts, folder, sizes, mergekit)
        print(f"{shape}: {len(experts)} experts, {bytes_of(sizes, len(experts)) / 1e9:.2f} GB to write", flush=True)
        measure(shape, todo, experts, folder, args, record)
    if not args.keep:
        shutil.rmtree(work / args.shape[-1], ignore_errors=True)
    summary(record.rows(), args.rounds)


if __name__ == "__main__":
    main()
