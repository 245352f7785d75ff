"""MoeSumm against its baselines and ablations on real data: in domain, zero-shot and few-shot, with small models.

    python benchmarks/moesumm_quality.py --data PATH --work runs/moesumm_quality        # PATH/summarization/*/*.jsonl

No pretrained summariser is at hand, so a small BART is first taught to denoise the documents of six data sets. Each system
then starts from it and takes the same steps on the same mix of mail, news and papers: MoeSumm; the backbone on the mix, on
the mix for as long as MoeSumm's two passes take, and on one data set; FlatMoE; MoeSumm without dataset information, without
the margin loss, and with deputies that start at random. Radiology reports, chats and consultations are for zero-shot (the
main expert alone) and few-shot (10 and 100 rows; deputies and selectors, of a backbone all weights). The learning rates of
few-shot are chosen on rows that stand in no test, four for either, by the first seed's MoeSumm and backbone. Three seeds,
beams of four, the scripts of examples/moesumm. What lies in the work folder is not made again. Two hours on two cores.
Against the way the authors' code trains:

    python benchmarks/moesumm_quality.py --data PATH --work FOLDER --name moesumm_authors --baseline moesumm \
        --systems moesumm "authors' settings" "margin of the last layer" --few_systems --settings in_domain
"""

import argparse
import glob
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import write

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples" / "moesumm"

IN_DOMAIN = {"mail": "aeslc", "news": "inshorts_news", "papers": "scitldr"}
OUT_OF_DOMAIN = {"radiology": "radiology_indiana", "chat": "samsum", "consultation": "mts_dialog"}
ALSO_READ = {"stories": "cnn_dailymail", "broadcasts": "bbc_news", "medicine": "sumpubmed"}  # before, for denoising
SINGLE = "news"  # what the backbone of one data set stands on in zero-shot and few-shot
FEW = (10, 100)
ALL_WEIGHTS = "all weights"  # MoeSumm's own models, of which few-shot trains everything and not the deputies alone
SYSTEMS = ("moesumm", "mix", "mix twice as long", "single", "flat_moe", "no_dataset", "no_margin", "random start")
SYSTEMS += (ALL_WEIGHTS,)
# How the authors' code trains, and what it leaves out for P_main; as arguments of train.py.
AUTHORS = {
    "authors' settings": {
        "margin_loss_coef": 10,
        "label_smoothing": 0.1,
        "deputy_output_std": 0.02,
        "max_grad_norm": 0.1,
    },
    "margin of the last layer": {"margin_main": "last_layer"},
}
SETTINGS = ("in_domain", "zero_shot")
LONGER = ("moesumm", "mix")  # also adapted for three times as many steps
BACKBONES = ("mix", "mix twice as long", "single")
RATES = {"moesumm": (2e-3, 5e-3, 1e-2, 2e-2), "mix": (2e-4, 5e-4, 1e-3, 2e-3)}  # of deputies alone, of all weights
HELD_OUT = 100  # rows that a rate is judged by
READING = {"max_source_length": 128, "max_target_length": 64}
WRITING = {"summary_length": 64, "num_beams": 4, "generation_batch_size": 32}
TRAINING = {
    "per_device_train_batch_size": 16,
    "learning_rate": 5e-4,
    "warmup_steps": 60,
    "weight_decay": 0.01,
    "save_strategy": "no",
    "eval_strategy": "no",
    "logging_steps": 50,
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
}


class Work:
    """The folder of a run: where everything lies, and how scripts are called."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.folder = options, Path(options.work).resolve()
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def call(self, script: str, log: str, **arguments) -> None:
        """Runs an example; what it prints is in logs/."""
        given = []
        for name, value in arguments.items():
            values = value if isinstance(value, (list, tuple)) else [value]
            given += [f"--{name}", *map(str, values)]
        environment = os.environ | {"OMP_NUM_THREADS": str(self.options.threads), "HF_HUB_OFFLINE": "1"}
        start = time.perf_counter()
        with (self.folder / "logs" / f"{log}.log").open("a", encoding="utf-8") as file:
            command = [sys.executable, str(EXAMPLES / script), *given]
            done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        if done.returncode:
            raise RuntimeError(f"{script} failed: see {self.folder / 'logs' / log}.log")
        print(f"{log}: {script} in {time.perf_counter() - start:.0f} s", flush=True)

    def places(self, names, data: str = "data") -> list[str]:
        return [f"{name}={self / data / name}" for name in names]


def copy_data(work: Work) -> None:
    """The first rows of each data set; a set without a train split lends its validation split for it."""
    for name, source in (IN_DOMAIN | OUT_OF_DOMAIN | ALSO_READ).items():
        folder, origin = work / "data" / name, Path(work.options.data) / "summarization" / source
        if (folder / "test.jsonl").exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        train = origin / "train.jsonl"
        shutil.copy(train if train.exists() else origin / "validation.jsonl", folder / "train.jsonl")
        rows = (origin / "test.jsonl").read_text(encoding="utf-8").split("\n")[: work.options.test_rows]
        (folder / "test.jsonl").write_text("\n".join(rows), encoding="utf-8")
    for name in OUT_OF_DOMAIN:
        folder = work / "data_for_rates" / name
        folder.mkdir(parents=True, exist_ok=True)
        rows = (work / "data" / name / "train.jsonl").read_text(encoding="utf-8").strip("\n").split("\n")
        (folder / "train.jsonl").write_text("\n".join(rows[:-HELD_OUT]), encoding="utf-8")
        (folder / "test.jsonl").write_text("\n".join(rows[-HELD_OUT:]), encoding="utf-8")


def pretrain(work: Work) -> None:
    if (work / "backbone" / "losses.json").exists():
        return
    sizes = {"d_model": 128, "layers": 3, "heads": 4, "ffn_dim": 512, "vocab_size": 4096, "positions": 256, "piece": 60}
    training = TRAINING | {
        "max_steps": work.options.denoising_steps,
        "learning_rate": 1e-3,
        "warmup_steps": 50,
        "seed": 0,
    }
    places = work.places(IN_DOMAIN | ALSO_READ)
    work.call("pretrain.py", "backbone", datasets=places, output_dir=work / "backbone", **sizes, **training)


def variant_of(system: str) -> dict:
    """A system as arguments of train.py."""
    if system in BACKBONES:
        return {"variant": "backbone"}
    if system == "random start":
        return {"variant": "moesumm", "deputy_output_std": 0.02}
    if system in AUTHORS:
        return {"variant": "moesumm", **AUTHORS[system]}
    return {"variant": system}


def train(work: Work, system: str, seed: int) -> None:
    """Trains a system; the backbone of single data sets is three models, with as many steps together as the others."""
    sizes = {name: sum(1 for _ in (work / "data" / name / "train.jsonl").open(encoding="utf-8")) for name in IN_DOMAIN}
    for name in IN_DOMAIN if system == "single" else [None]:
        folder = model_of(work, system, seed, name)
        if (folder / "log.json").exists():
            continue
        steps = work.options.steps * (2 if system == "mix twice as long" else 1)
        if name:
            steps = round(steps * sizes[name] / sum(sizes.values()))
        work.call(
            "train.py",
            folder.name,
            model_name_or_path=work / "backbone",
            datasets=work.places([name] if name else IN_DOMAIN),
            output_dir=folder,
            max_steps=steps,
            deputy_size=work.options.deputy_size,
            seed=seed,
            **READING,
            **TRAINING,
            **variant_of(system),
        )


def model_of(work: Work, system: str, seed: int, name: str | None) -> Path:
    return work / "models" / "-".join(filter(None, (file_name(system), name, str(seed))))


def file_name(system: str) -> str:
    return system.replace(" ", "_").replace("'", "")


def summarize(work: Work, system: str, seed: int) -> None:
    """In domain and zero-shot, with the models as they are."""
    for name in IN_DOMAIN if system == "single" else [None]:
        model = model_of(work, system, seed, name)
        for setting, sets in (("in_domain", [name] if name else list(IN_DOMAIN)), ("zero_shot", list(OUT_OF_DOMAIN))):
            if setting not in work.options.settings or (setting == "zero_shot" and name not in (None, SINGLE)):
                continue
            # FlatMoE has no main expert: what it does without dataset information is all that it does
            folder = work / "summaries" / setting / f"{file_name(system)}-{seed}"
            if all((folder / "x" / f"{one}.jsonl").exists() for one in sets):
                continue
            zero = {"zero_shot": True} if setting == "zero_shot" else {}
            work.call(
                "evaluate.py",
                f"{model.name}-{setting}",
                systems=f"x={model}",
                datasets=work.places(sets),
                output_dir=folder,
                **zero,
                **WRITING,
            )


def adapt(work: Work, system: str, seed: int) -> None:
    """Few-shot, other rows for each seed; where all weights are trained, at the backbone's rate."""
    all_weights = system in (*BACKBONES, ALL_WEIGHTS)
    chosen = json.loads((work / "rates.json").read_text(encoding="utf-8"))["mix" if all_weights else "moesumm"]
    for times in (1, 3) if system in LONGER else (1,):
        for rows in FEW:
            folder = work / "summaries" / few_shot_name(rows, times) / f"{file_name(system)}-{seed}"
            draws = work.options.draws
            few_shot(work, system, seed, rows, chosen[str(rows)], folder, "data", 100 * seed, draws, times)


def few_shot_name(rows: int, times: int) -> str:
    return f"few_shot_{rows}" + (f"_x{times}" if times > 1 else "")


def few_shot(work, system, seed, rows, rate, folder, data, data_seed, draws, times=1) -> None:
    """Adapts a model to each set outside its domain, draw after draw, and writes the test split's summaries."""
    if all(
        (folder / f"draw_{draw}" / f"{name}-{rows}.jsonl").exists() for name in OUT_OF_DOMAIN for draw in range(draws)
    ):
        return
    of = "moesumm" if system == ALL_WEIGHTS else system
    model = model_of(work, of, seed, SINGLE if of == "single" else None)
    training = TRAINING | {
        "learning_rate": rate,
        "deputies_only": system != ALL_WEIGHTS,
        "warmup_steps": 0,
        "per_device_train_batch_size": 10,
        "lr_scheduler_type": "constant",
    }
    work.call(
        "train.py",
        f"{file_name(system)}-{seed}-{data}-{rows}-{rate:g}",
        setting="few_shot",
        model_name_or_path=model,
        datasets=work.places(OUT_OF_DOMAIN, data),
        output_dir=folder,
        few_shot_rows=rows,
        draws=draws,
        max_steps=times * work.options.few_steps,
        seed=data_seed,
        **READING,
        **WRITING,
        **training,
    )


def choose_rates(work: Work, pool: ThreadPoolExecutor) -> dict:
    """The learning rates of few-shot, of deputies alone and of all weights; rates.json has each one's mean ROUGE."""
    if (work / "rates.json").exists():
        return json.loads((work / "rates.json").read_text(encoding="utf-8"))
    seed = work.options.seeds[0]
    list(pool.map(lambda system: train(work, system, seed), RATES))
    trials = [(system, rows, rate) for system, rates in RATES.items() for rows in FEW for rate in rates]
    tried = dict(zip(trials, pool.map(lambda trial: trial_of(work, seed, *trial), trials), strict=True))
    chosen: dict = {"tried": [{"system": s, "rows": r, "rate": rate, "mean R": v} for (s, r, rate), v in tried.items()]}
    for system, rates in RATES.items():
        chosen[system] = {rows: max(rates, key=lambda rate: tried[system, rows, rate]) for rows in FEW}
    (work / "rates.json").write_text(json.dumps(chosen, indent=1), encoding="utf-8")
    return json.loads((work / "rates.json").read_text(encoding="utf-8"))


def trial_of(work: Work, seed: int, system: str, rows: int, rate: float) -> float:
    """Mean ROUGE of one draw's summaries of the held-out rows."""
    folder = work / "rates" / f"{system}-{rows}-{rate:g}"
    few_shot(work, system, seed, rows, rate, folder, "data_for_rates", 7, draws=1)
    place = f"{system}={folder / 'draw_0'}"
    work.call("evaluate.py", "rates", systems=place, output_dir=folder / "scores", only=f"*-{rows}")
    table = json.loads((folder / "scores" / "scores.json").read_text(encoding="utf-8"))["scores"]
    return next(row["mean R"] for row in table if row["data set"] == "mean of all")


def run_one(work: Work, system: str, seed: int) -> None:
    if system != ALL_WEIGHTS:
        train(work, system, seed)
        summarize(work, system, seed)
    if system in work.options.few_systems:
        adapt(work, system, seed)


def score(work: Work) -> list[dict]:
    """Every setting's table, and each system against the backbone on the mix."""
    settings = {"in domain": ("in_domain", "*/x"), "zero-shot": ("zero_shot", "*/x")}
    for times, words in ((1, ""), (3, ", three times as long")):
        settings |= {f"few-shot, {rows} rows{words}": (few_shot_name(rows, times), "*/draw_*") for rows in FEW}
    results = []
    for setting, (folder, runs) in settings.items():
        places = {name: work / "summaries" / folder / f"{file_name(name)}-{runs}" for name in work.options.systems}
        there = [f"{name}={place}" for name, place in places.items() if glob.glob(str(place))]
        if not any(one.startswith(f"{work.options.baseline}=") for one in there):
            continue
        output = work / "scores" / setting
        work.call("evaluate.py", "scores", systems=there, baseline=work.options.baseline, output_dir=output)
        print(f"\n{setting}\n\n{(output / 'scores.md').read_text(encoding='utf-8')}", flush=True)
        results.append({"setting": setting, **json.loads((output / "scores.json").read_text(encoding="utf-8"))})
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--work", required=True)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--systems", nargs="+", choices=[*SYSTEMS, *AUTHORS], default=list(SYSTEMS))
    parser.add_argument("--baseline", choices=SYSTEMS, default="mix", help="what the others are tested against")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="beside few-shot")
    parser.add_argument(
        "--few_systems", nargs="*", choices=SYSTEMS, default=[s for s in SYSTEMS if s != "random start"]
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--denoising_steps", type=int, default=2500)
    parser.add_argument("--few_steps", type=int, default=40)
    parser.add_argument("--draws", type=int, default=1, help="for each seed")
    parser.add_argument("--deputy_size", type=int, default=64)
    parser.add_argument("--test_rows", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=2, help="scripts that run at once")
    parser.add_argument("--threads", type=int, default=1, help="of each")
    parser.add_argument("--name", default="moesumm_quality", help="of the file in results/")
    work = Work(parser.parse_args())
    copy_data(work)
    pretrain(work)
    with ThreadPoolExecutor(work.options.jobs) as pool:
        rates = choose_rates(work, pool) if work.options.few_systems else None
        runs = [
            pool.submit(run_one, work, system, seed) for seed in work.options.seeds for system in work.options.systems
        ]
        for run in runs:
            run.result()
    settings = {name: value for name, value in vars(work.options).items() if name not in ("data", "work", "name")}
    write(
        work.options.name, score(work), **settings, few_rates=rates, training=TRAINING, reading=READING, writing=WRITING
    )


if __name__ == "__main__":
    main()
