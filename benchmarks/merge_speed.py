"""How long does composing four experts take, and how much memory, against copying as many bytes and against mergekit?

    python benchmarks/merge_speed.py --work FOLDER --mergekit ENVIRONMENT                        # 15 minutes, 18 GB
    python benchmarks/merge_speed.py --work FOLDER --mergekit ENVIRONMENT --shape 1b 8b-thin     # twice that
    python benchmarks/merge_speed.py --work FOLDER --candidates floor base --name merge_speed_part

FOLDER receives the experts (random weights, made once, and removed before those of the next shape); ENVIRONMENT is a
virtual environment with mergekit, made if missing: the torch measured here first and alone, then mergekit 0.1.5, which
takes transformers 5 with it. Each candidate is a whole process, from its start to its exit; before each one the last
output is removed, the disk is synced and the experts are read once, so that all find them in the page cache alike.
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
from pathlib import Path

import torch
from common import write
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
MERGEKIT = "0.1.5"
CANDIDATES = ("floor", "base", "mean", "mergekit", "check")
VOCABULARY, SPECIAL = 128256, 256
# Llama-3.2-1B; and Llama-3-8B's width in 4 layers, with 3 experts where 4 would not fit into 20 GB with their mixture
SHAPES = {
    "1b": {"hidden": 2048, "intermediate": 8192, "layers": 16, "head_dim": 64, "tied": True, "experts": 4},
    "8b-thin": {"hidden": 4096, "intermediate": 14336, "layers": 4, "head_dim": 128, "tied": False, "experts": 3},
}
HEADS, KV_HEADS = 32, 8
# nothing but copying: what any composition must at least do, on this disk, today
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
    """Every tensor of one expert and its size, in the file's order."""
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
    """As large as Llama 3's: 128,000 pieces with their merges, of one, two and three bytes, and 256 special tokens."""
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


def make_experts(folder: Path, shape: dict) -> list[Path]:
    """The experts' folders; made where they are not yet there, under another name until they are whole."""
    experts = [folder / f"expert_{i}" for i in range(shape["experts"])]
    folder.mkdir(parents=True, exist_ok=True)
    missing = sum(not expert.exists() for expert in experts)
    needed, free = missing * bytes_of(shape, 1) + bytes_of(shape, len(experts)), shutil.disk_usage(folder).free
    if free < 1.05 * needed:
        raise SystemExit(
            f"{folder} has {free / 1e9:.1f} GB free, and {needed / 1e9:.1f} GB are needed: use another --work."
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
    """`count` experts: these, and hard links to their files under other names."""
    more = [experts[0].parent / f"linked_{i}" for i in range(count - len(experts))]
    for i, folder in enumerate(more):
        if not folder.exists():
            shutil.copytree(experts[i % len(experts)], folder, copy_function=os.link)
    return experts + more


# Candidates


def recipe(experts: list[Path], path: Path, **more) -> Path:
    """A recipe of both mergekit's and ours: JSON is YAML."""
    sources = [{"source_model": str(expert)} for expert in experts]
    settings = {"gate_mode": "random", "experts_per_token": 2, "dtype": "bfloat16", **more}
    path.write_text(
        json.dumps({"base_model": str(experts[0]), "experts": sources, **settings}, indent=1), encoding="utf-8"
    )
    return path


def mergekit_environment(folder: Path) -> dict[str, str]:
    """Makes the environment if mergekit-moe is not in it -> the versions of what matters there."""
    python = folder / "bin" / "python"
    if not (folder / "bin" / "mergekit-moe").exists():
        print(f"making an environment with mergekit {MERGEKIT}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        for package in (f"torch=={torch.__version__.split('+')[0]}", f"mergekit=={MERGEKIT}"):
            subprocess.run([python, "-m", "pip", "install", "-q", package], check=True)
    names = ("mergekit", "torch", "transformers", "safetensors")
    show = f"import json; from importlib.metadata import version; print(json.dumps({{n: version(n) for n in {names}}}))"
    return json.loads(subprocess.check_output([python, "-c", show], text=True))


def commands(asked: list[str], experts: list[Path], folder: Path, shape: dict, mergekit: Path | None) -> dict:
    """What to run for each candidate asked for; every one but `check` writes folder/out."""
    out, ours = folder / "out", [sys.executable, "-m", "merge_tools.cli"]
    found = {}
    for name in asked:
        if name == "floor":
            count = bytes_of(shape, len(experts))
            found[name] = [sys.executable, "-c", FLOOR, out, count, *(e / "model.safetensors" for e in experts)]
        elif name == "mergekit":
            tool = mergekit / "bin" / "mergekit-moe"
            found[name] = [tool, recipe(experts, folder / "mergekit.yml"), out]
        elif name == "check":
            found[name] = [*ours, "check", recipe(linked(experts, 8), folder / "check.yml")]
        else:
            found[name] = [*ours, "compose", recipe(experts, folder / f"{name}.yml", average=name), out]
    return {name: list(map(str, command)) for name, command in found.items()}


# Measuring


def family(pid: int) -> list[int]:
    """The process and all that it has started."""
    try:
        tasks = [t.read_text(encoding="utf-8") for t in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return [pid]
    return [pid, *(p for child in " ".join(tasks).split() for p in family(int(child)))]


def memory(pid: int) -> tuple[int, int]:
    """Resident KiB now, of the process and its children: anonymous, and all with the mapped files."""
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
    """Seconds to the exit, seconds until all is on the disk, and the peaks of memory in MiB, looked at every 20 ms."""
    peaks, done = [0, 0], threading.Event()

    def look(pid):
        while not done.is_set():
            peaks[:] = map(max, peaks, memory(pid))
            done.wait(0.02)

    with open(log, "w", encoding="utf-8") as file:
        start = time.perf_counter()
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
        watcher = threading.Thread(target=look, args=(process.pid,))
        watcher.start()
        code = process.wait()
        seconds = time.perf_counter() - start
        done.set()
        watcher.join()
    os.sync()
    durable = time.perf_counter() - start
    if code:
        raise RuntimeError(f"{' '.join(command[:4])} ... left with {code}:\n" + log.read_text(encoding="utf-8")[-2000:])
    anonymous, total = (peak / 1024 for peak in peaks)
    return {"seconds": seconds, "durable_seconds": durable, "anonymous_mib": anonymous, "total_mib": total}


def remove(out: Path):
    """Whatever a candidate left: the floor a file, the others a folder."""
    if out.is_dir():
        shutil.rmtree(out)
    else:
        out.unlink(missing_ok=True)


def read_once(experts: list[Path]):
    buffer = bytearray(1 << 24)
    for expert in experts:
        with open(expert / "model.safetensors", "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def bytes_in(out: Path) -> int:
    return sum(f.stat().st_size for f in out.glob("*.safetensors")) if out.is_dir() else out.stat().st_size


def measure(todo: dict[str, list[str]], experts: list[Path], folder: Path, rounds: int) -> dict[str, list[dict]]:
    """Rounds A B C, A B C, ... -> every run of every candidate; ours are verified after their first."""
    out, runs = folder / "out", {name: [] for name in todo}
    for turn in range(rounds):
        for name, command in todo.items():
            remove(out)
            read_once(experts)
            os.sync()
            found = run(command, folder / f"{name}.log")
            runs[name].append(found)
            shown = ", ".join(f"{key} {value:,.1f}" for key, value in found.items())
            print(f"round {turn + 1}  {name:9} {shown}", flush=True)
            if name != "check" and turn == 0:
                found["output_bytes"] = bytes_in(out)
            if name in ("base", "mean") and turn == 0:
                verify = [sys.executable, __file__, "--verify", out, name, *experts]
                subprocess.run(list(map(str, verify)), check=True)
    remove(out)
    return runs


def verify(out: str, average: str, experts: list[str]):
    """The mixture opens as a stock Mixtral, whole, and holds the experts' own numbers. In a process of its own."""
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    if type(model).__name__ != "MixtralForCausalLM" or any(info.values()):
        raise SystemExit(f"{type(model).__name__} with {info}: not a whole MixtralForCausalLM.")
    files = [safe_open(Path(expert) / "model.safetensors", "pt") for expert in experts]

    def demand(name: str, found: torch.Tensor, wanted: torch.Tensor):
        if not torch.equal(found, wanted):
            raise SystemExit(f"{name} in the mixture is not what the experts have.")

    layers = model.model.layers
    for layer in {0, len(layers) // 2, len(layers) - 1}:
        place, mixed = f"model.layers.{layer}", layers[layer]
        for e, file in enumerate(files):
            gate, up, down = (file.get_tensor(f"{place}.mlp.{n}_proj.weight") for n in ("gate", "up", "down"))
            demand(f"{place} expert {e} w1, w3", mixed.mlp.experts.gate_up_proj[e], torch.cat([gate, up]))
            demand(f"{place} expert {e} w2", mixed.mlp.experts.down_proj[e], down)
        sources = [file.get_tensor(f"{place}.self_attn.q_proj.weight") for file in files]
        wanted = sources[0] if average == "base" else torch.stack([s.float() for s in sources]).mean(0).bfloat16()
        demand(f"{place} q_proj", mixed.self_attn.q_proj.weight, wanted)
    tied = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    print(f"verified: average {average}, {len(files)} experts, stock Mixtral, head {'tied' if tied else 'of its own'}")


def summary(runs: dict[str, list[dict]]) -> dict[str, dict]:
    """Medians of the seconds, the highest peak of memory, and times the floor."""
    table = {}
    for name, found in runs.items():
        row = {f"median_{key}": statistics.median(r[key] for r in found) for key in ("seconds", "durable_seconds")}
        row |= {f"peak_{key}": max(r[key] for r in found) for key in ("anonymous_mib", "total_mib")}
        if "floor" in table and name != "check":
            row["times_floor"] = row["median_seconds"] / table["floor"]["median_seconds"]
        table[name] = {**row, "rounds": found}
        ratio = f"{row['times_floor']:.2f}x the floor" if "times_floor" in row else ""
        print(
            f"{name:9} {row['median_seconds']:7.1f} s   peak {row['peak_anonymous_mib']:7,.0f} MiB anonymous, "
            f"{row['peak_total_mib']:7,.0f} MiB in all   {ratio}"
        )
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, help="a folder on the disk to be measured, with 20 GB free")
    parser.add_argument("--mergekit", type=Path, help="mergekit's virtual environment; made if missing")
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["1b"])
    parser.add_argument("--candidates", nargs="+", choices=CANDIDATES, default=list(CANDIDATES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--name", default="merge_speed", help="of the file in results/; another one for a part")
    parser.add_argument("--verify", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.verify:
        return verify(args.verify[0], args.verify[1], args.verify[2:])
    if not args.work or ("mergekit" in args.candidates and not args.mergekit):
        parser.error("--work FOLDER is needed, and --mergekit ENVIRONMENT where mergekit is a candidate")
    work, mergekit = args.work.absolute(), args.mergekit and args.mergekit.absolute()
    print("The machine should be idle: what else runs now, or writes to this disk, is measured too.", flush=True)
    asked = [name for name in CANDIDATES if name in args.candidates]  # the floor first, as the others' measure
    versions = mergekit_environment(mergekit) if "mergekit" in asked else None
    results = {}
    for i, shape in enumerate(args.shape):
        for earlier in args.shape[:i]:
            shutil.rmtree(work / earlier, ignore_errors=True)
        folder, sizes = work / shape, SHAPES[shape]
        experts = make_experts(folder, sizes)
        todo = commands(asked, experts, folder, sizes, mergekit)
        print(f"{shape}: {len(experts)} experts, {bytes_of(sizes, len(experts)) / 1e9:.2f} GB to write", flush=True)
        found = summary(measure(todo, experts, folder, args.rounds))
        bytes_there = {"input_bytes": len(experts) * bytes_of(sizes, 1), "output_bytes": bytes_of(sizes, len(experts))}
        results[shape] = {**sizes, **bytes_there, "candidates": found}
    write(args.name, results, rounds=args.rounds, mergekit=versions)


if __name__ == "__main__":
    main()
