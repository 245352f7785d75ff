"""Do mixtures over a real Llama define better than dense models? LM-Lexicon on SmolLM2-135M, dictionary by dictionary.

    pip install ./models/smollm2
    python benchmarks/lexicon_smollm2.py --data PATH --work FOLDER --systems --packaged   # the default model alone: minutes
    python benchmarks/lexicon_smollm2.py --data PATH --work FOLDER --systems --packaged --test_rows 500 --best_of 8 \
        --rewards gold nearest --policies token_top1 sequence_soft sequence_hard --name lexicon_smollm2_policies  # two hours
    python benchmarks/lexicon_smollm2.py --data PATH --work FOLDER                        # WordNet: hours on two cores
    python benchmarks/lexicon_smollm2.py --data PATH --work FOLDER --dictionaries oxford urban --systems main experts_1 \\
        --rows 5000 --test_rows 1000 --name lexicon_smollm2_dictionaries                  # a part of other dictionaries
    python benchmarks/lexicon_smollm2.py --data PATH --work FOLDER --gpu --at_once 9 --jobs 4 \\
        --dictionaries wordnet oxford urban --seeds 42 84 21 --name lexicon_smollm2_gpu   # on a GPU

`lexperts define run smollm2` with named changes (`ablations.yml`), greedy definitions of the test rows: `main` is the recipe, a model that
was fine-tuned on all rows and experts that start from it; `experts_1` the same training without a split, a dense model; `paper` has
experts that start from SmolLM2 itself, as in the paper. `prompted` is SmolLM2 without training, with examples in the prompt, as a
conversation. The default model can also be read with other policies of routing, and give the best of several samples, by their likelihood
or by a reward that prefers gold definitions (as in the paper) or the samples nearest to them. No term is in two splits of a dictionary,
and no definition in WordNet's. The intervals of scores and of differences from the dense model are bootstrapped over rows. `all` are the
three dictionaries together, tested on the rows of all.
"""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from common import Record, check_same_settings, evaluated, first_rows, make_parser, run_lexperts

from run_tools.files import write_file

DICTIONARIES = ("wordnet", "oxford", "urban")
DENSE, PROMPTED = "experts_1", "prompted"
DEFAULT = "lexicon-smollm2"  # the packaged model
POLICIES = {
    "token_top1": {"experts_per_token": 1},
    "sequence_soft": {"routing_policy": "sequence_soft"},
    "sequence_hard": {"routing_policy": "sequence_hard"},
}
REWARD = {
    "samples": 4, "kept": 1, "max_new_tokens": 32, "sampling_batch_size": 64, "num_train_epochs": 1, "learning_rate": 2e-5,
    "per_device_train_batch_size": 16, "lr_scheduler_type": "linear", "warmup_steps": 0.1, "bf16": True, "eval_strategy": "no",
    "save_strategy": "no", "use_cpu": True, "report_to": "none", "logging_steps": 10, "seed": 42,
}  # fmt: skip
SYSTEMS = ("main", DENSE, "paper")
SPLITS = ("train", "validation", "test")


def rows_of(options, name: str) -> dict[str, list[Path]]:
    """The files of each split: with the first rows, where fewer were asked for."""
    counts, found = {"train": options.rows, "validation": options.test_rows, "test": options.test_rows}, {}
    for split in SPLITS:
        parts = DICTIONARIES if name == "all" else (name,)
        found[split] = [options.data / "definitions" / part / f"{split}.jsonl" for part in parts]
        if count := counts[split]:
            names = (options.work / "data" / str(count) / f"{part}-{split}.jsonl" for part in parts)
            found[split] = [first_rows(*both, count) for both in zip(found[split], names, strict=True)]
    return found


def recipe(options, name: str, system: str, seed: int) -> Path:
    """Runs the recipe with a named change -> the file of definitions. Runs of one seed share their steps."""
    rows, output = rows_of(options, name), options.work / name / f"{system}-{seed}.jsonl"
    settings = {"data": rows, "system": system, "seed": seed, "gpu": options.gpu}
    check_same_settings(output, settings, options.overwrite)
    if output.exists():
        return output
    files = {f"{split}_files": [str(path) for path in paths] for split, paths in rows.items()}
    changes = {"seed": seed, "best": None, "evaluate": None, **files}
    if options.gpu:
        has_shared = not system.startswith(("paper", "dense"))
        for section in ("expert", "shared_finetune") if has_shared else ("expert",):
            changes |= {f"{section}.use_cpu": False, f"{section}.per_device_eval_batch_size": 16}
        changes["plain.batch_size"] = 128
    given = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    work, log = options.work / name / str(seed), output.with_suffix(".log")
    more = {"work_dir": work, "set": given, "ablation": system, "jobs": options.jobs}
    run_lexperts("define", "run", "smollm2", log=log, threads=options.threads, **more)
    report = json.loads((work / ("run.json" if system == "main" else f"run.{system}.json")).read_text(encoding="utf-8"))
    (folder,) = (Path(step["folder"]) for step in report["steps"] if step["name"] == "plain")
    write_file(output, (folder / "out" / "definitions.jsonl").read_text(encoding="utf-8"))
    return output


def prompted(options, name: str) -> dict[str, Path]:
    """Definitions by SmolLM2 with examples in the prompt -> the file of each number of examples."""
    rows, output = rows_of(options, name), options.work / name / "prompted.jsonl"
    given = {"train_files": rows["train"], "test_files": rows["test"], "shots": options.shots, "output": output}
    given |= {"batch_size": 32, "max_new_tokens": 32, "dtype": "bfloat16", "chat": "true"}
    log = options.work / name / "prompted.log"
    run_lexperts("define", "in-context", log=log, threads=options.threads, model_name_or_path="smollm2", **given)
    return {
        f"{PROMPTED}, {shots} examples": output.with_name(f"prompted.shots{shots}.jsonl") for shots in options.shots
    }


def reward_model(options, name: str, chosen: str) -> Path:
    """A reward model that reads samples of the packaged model for a random part of the training rows -> its folder."""
    folder, rows = options.work / name / f"reward-{chosen}", options.work / name / "reward-train.jsonl"
    lines = [line for path in rows_of(options, name)["train"] for line in path.read_text(encoding="utf-8").splitlines()]
    rows.parent.mkdir(parents=True, exist_ok=True)
    rows.write_text("\n".join(random.Random(42).sample(lines, options.reward_rows)) + "\n", encoding="utf-8")
    given = {"model_name_or_path": DEFAULT, "reward_base": "smollm2", "chosen": chosen, "train_files": rows} | REWARD
    run_lexperts(
        "train", "lexicon-reward", log=folder.with_suffix(".log"), threads=options.threads, **given, output_dir=folder
    )
    return folder


def packaged(options, name: str) -> dict[str, Path]:
    """Definitions by the packaged model, greedy, also with other policies, and the best of several samples -> the file of each.
    `lexicon_gguf.py` measures its speed.
    """
    folder, files = options.work / name, {DEFAULT: "default"}
    runs: dict[str, dict] = {"default": {}}
    for policy in options.policies:
        files[f"{DEFAULT}, {policy}"] = f"default-{policy}"
        runs[f"default-{policy}"] = POLICIES[policy]
    if options.best_of:
        counts = sorted({1, 2, 4, options.best_of})
        runs["default-samples"] = {"best_of": options.best_of, "curve": counts, "scorer": "likelihood"}
        files |= {f"{DEFAULT}, best of {n}": f"default-samples.best{n}" for n in counts}
        for chosen in options.rewards:
            reward = reward_model(options, name, chosen)
            runs[f"default-{chosen}"] = {"best_of": options.best_of, "scorer": "reward", "reward_model": reward}
            files[f"{DEFAULT}, best of {options.best_of} by a reward for {chosen}"] = f"default-{chosen}"
    folder.mkdir(parents=True, exist_ok=True)
    given = {"model_name_or_path": DEFAULT, "test_files": rows_of(options, name)["test"], "batch_size": 64}
    for run, changes in runs.items():
        more = {"output": folder / f"{run}.jsonl", "max_new_tokens": 32, **changes}
        run_lexperts("define", "generate", log=folder / f"{run}.log", threads=options.threads, **given, **more)
    return {system: folder / f"{file}.jsonl" for system, file in files.items()}


def baseline_of(systems) -> str | None:
    """The system from which differences are given."""
    return next((name for name in (DENSE, DEFAULT) if name in systems), None)


def measure(options, dictionary: str) -> dict:
    """The scores of all systems on a dictionary, and their differences from the dense model."""
    name = dictionary
    systems = {system: [recipe(options, name, system, seed) for seed in options.seeds] for system in options.systems}
    if options.prompted:
        systems |= {system: [path] for system, path in prompted(options, name).items()}
    if options.packaged:
        systems |= {system: [path] for system, path in packaged(options, name).items()}
    files = [f"{system}={path}" for system, paths in systems.items() for path in paths]
    output = options.work / name / "scores"
    given = {"files": files, "metrics": ["bleu", "rouge"]} | (
        {"baseline": baseline} if (baseline := baseline_of(systems)) else {}
    )
    scores = evaluated("definitions", output, log=output.with_suffix(".log"), **given)
    for system, own in scores["systems"].items():
        print(name, system, {m: round(value["mean"], 2) for m, value in own["context"].items()}, flush=True)
    return {key: scores[key] for key in ("rows", "systems", "tests", "metrics")}


def main():
    """Runs what is missing in the results."""
    parser = make_parser(__doc__, "lexicon_smollm2", "definitions/", work=True)
    parser.add_argument("--dictionaries", nargs="+", choices=(*DICTIONARIES, "all"), default=["wordnet"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    parser.add_argument("--rows", type=int, help="training rows of each dictionary; by default all")
    parser.add_argument(
        "--test_rows", type=int, help="rows for validation and tests of each dictionary; by default all"
    )
    parser.add_argument("--systems", nargs="*", default=list(SYSTEMS), help="named changes of the recipe")
    parser.add_argument("--packaged", action="store_true", help="also the default model, as installed")
    parser.add_argument("--policies", nargs="*", choices=tuple(POLICIES), default=[], help="of routing, for that model")
    parser.add_argument("--best_of", type=int, help="also the best of so many samples, of that model")
    parser.add_argument(
        "--rewards", nargs="*", choices=("gold", "nearest"), default=[], help="that also choose among them"
    )
    parser.add_argument("--reward_rows", type=int, default=600, help="training rows of a reward")
    parser.add_argument("--prompted", action="store_true", help="also SmolLM2 without training")
    parser.add_argument("--shots", type=int, nargs="+", default=[0, 4], help="examples in the prompt")
    parser.add_argument("--threads", type=int, help="threads of each process; by default torch's choice")
    parser.add_argument("--at_once", type=int, default=1, help="runs of the recipe at the same time, each with --jobs")
    parser.add_argument("--gpu", action="store_true", help="train on the GPU; otherwise on the CPU")
    options = parser.parse_args()
    torch.set_num_threads(options.threads or torch.get_num_threads())  # here, too, and as the results will say
    settings = {name: getattr(options, name) for name in ("seeds", "systems", "rows", "test_rows", "gpu")}
    shots = options.shots if options.prompted else []
    settings |= {"policies": options.policies} if options.policies else {}
    settings |= {"best_of": options.best_of} if options.best_of else {}
    settings |= {"rewards": options.rewards, "reward_rows": options.reward_rows} if options.rewards else {}
    record = Record(options.name, overwrite=options.overwrite, **settings, shots=shots)
    pending = [name for name in options.dictionaries if not record.find(dictionary=name)]
    runs = [(name, system, seed) for seed in options.seeds for system in options.systems for name in pending]
    with ThreadPoolExecutor(options.at_once) as pool:
        list(pool.map(lambda run: recipe(options, *run), runs))
    record.complete(partial(measure, options), [{"dictionary": name} for name in pending])


if __name__ == "__main__":
    main()
