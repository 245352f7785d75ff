"""MoeSumm against its baselines and ablations on real data: in domain, zero-shot and few-shot, with small models.

    python benchmarks/moesumm_quality.py --data PATH --work runs/moesumm_quality        # PATH/summarization/*/*.jsonl

No pretrained summariser is available offline, so a small BART is first trained to denoise the documents of six data sets.
Each system then starts from it and trains for the same number of steps on the same mix of mail, news and papers: MoeSumm; the
backbone on the mix, on the mix for as long as MoeSumm's two passes take, and on one data set; FlatMoE; MoeSumm without dataset
information, without the margin loss, and with randomly initialised deputies. Radiology reports, chats and consultations are
for zero-shot (main expert only) and few-shot (10 and 100 rows; deputies and selectors, or all weights of a backbone). The
learning rates of few-shot are chosen among four on held-out rows, with the first seed's MoeSumm and backbone. Three seeds,
four beams, by `lexperts train moesumm`. Finished runs in the work folder are reused if their settings, data and versions are the
same. Two hours on two cores.
The comparison with the training of the authors' code:

    python benchmarks/moesumm_quality.py --data PATH --work FOLDER --name moesumm_authors --baseline moesumm \
        --systems moesumm "authors' settings" "margin of the last layer" --few_systems --settings in_domain
"""

import glob
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import check_same_settings, evaluated, make_parser, run_once, write

IN_DOMAIN = {"mail": "aeslc", "news": "inshorts_news", "papers": "scitldr"}
OUT_OF_DOMAIN = {"radiology": "radiology_indiana", "chat": "samsum", "consultation": "mts_dialog"}
DENOISING_ONLY = {"stories": "cnn_dailymail", "broadcasts": "bbc_news", "medicine": "sumpubmed"}
SINGLE = "news"  # the data set of the single-dataset backbone in zero-shot and few-shot
FEW = (10, 100)
ALL_WEIGHTS = "all weights"  # MoeSumm with few-shot training of all weights, not only of deputies
SYSTEMS = ("moesumm", "mix", "mix twice as long", "single", "flat_moe", "no_dataset", "no_margin", "random start")
SYSTEMS += (ALL_WEIGHTS,)
# Training in the authors' code, and its P_main, as options of `lexperts train moesumm`.
AUTHORS = {
    "authors' settings": {
        "margin_loss_coef": 10,
        "label_smoothing": 0.1,
        "deputy_init_std": 0.02,
        "max_grad_norm": 0.1,
    },
    "margin of the last layer": {"margin_main": "last_layer"},
}
SETTINGS = ("in_domain", "zero_shot")
LONGER = ("moesumm", "mix")  # also adapted for three times as many steps
BACKBONES = ("mix", "mix twice as long", "single")
RATES = {"moesumm": (2e-3, 5e-3, 1e-2, 2e-2), "mix": (2e-4, 5e-4, 1e-3, 2e-3)}  # for deputies, for all weights
HELD_OUT = 100  # rows to choose a rate
LENGTHS = {"max_source_length": 128, "max_target_length": 64}
GENERATION = {"summary_length": 64, "num_beams": 4, "generation_batch_size": 32}
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
    """The folder of a run, and calls of the recipe's commands."""

    def __init__(self, options):
        self.options, self.folder = options, options.work
        self.folder.mkdir(parents=True, exist_ok=True)

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def run(self, *command, output: Path, done: str | list[str], options: dict, **compared) -> None:
        """Runs a command of the recipe unless it has finished. `datasets` is a dictionary of folders."""
        settings = {"overwrite": self.options.overwrite, "threads": self.options.threads}
        if folders := options.get("datasets"):
            options = options | {"datasets": [f"{name}={folder}" for name, folder in folders.items()]}
            compared["datasets"] = folders
        run_once(*command, output=output, done=done, options=options, **settings, **compared)

    def datasets(self, names, data: str = "data") -> dict[str, Path]:
        """The folders of data sets."""
        return {name: self / data / name for name in names}


def copy_data(work: Work) -> None:
    """The first rows of each data set; the validation split replaces a missing train split."""
    for name, source in (IN_DOMAIN | OUT_OF_DOMAIN | DENOISING_ONLY).items():
        folder, origin = work / "data" / name, work.options.data / "summarization" / source
        train, test = origin / "train.jsonl", origin / "test.jsonl"
        train = train if train.exists() else origin / "validation.jsonl"
        settings = {"train": train, "test": test, "test_rows": work.options.test_rows}
        check_same_settings(folder, settings, work.options.overwrite)
        if (folder / "test.jsonl").exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(train, folder / "train.jsonl")
        rows = test.read_text(encoding="utf-8").split("\n")[: work.options.test_rows]
        (folder / "test.jsonl").write_text("\n".join(rows), encoding="utf-8")
    for name in OUT_OF_DOMAIN:
        folder = work / "data_for_rates" / name
        folder.mkdir(parents=True, exist_ok=True)
        rows = (work / "data" / name / "train.jsonl").read_text(encoding="utf-8").strip("\n").split("\n")
        (folder / "train.jsonl").write_text("\n".join(rows[:-HELD_OUT]), encoding="utf-8")
        (folder / "test.jsonl").write_text("\n".join(rows[-HELD_OUT:]), encoding="utf-8")


def pretrain(work: Work) -> None:
    """Trains the small BART."""
    sizes = {"d_model": 128, "layers": 3, "heads": 4, "ffn_dim": 512, "vocab_size": 4096, "positions": 256}
    sizes["segment_words"] = 60
    training = {"max_steps": work.options.denoising_steps, "learning_rate": 1e-3, "warmup_steps": 50, "seed": 0}
    options = {"datasets": work.datasets(IN_DOMAIN | DENOISING_ONLY), **sizes, **TRAINING, **training}
    work.run("train", "moesumm-backbone", output=work / "backbone", done="losses.json", options=options)


def variant_of(system: str) -> dict:
    """The options of `lexperts train moesumm` for a system."""
    options = AUTHORS | {"random start": {"deputy_init_std": 0.02}} | dict.fromkeys(BACKBONES, {"variant": "backbone"})
    return {"variant": "moesumm", **options[system]} if system in options else {"variant": system}


def train(work: Work, system: str, seed: int) -> None:
    """Trains a system; "single" is three models, with as many steps together as the others."""
    sizes = {name: sum(1 for _ in (work / "data" / name / "train.jsonl").open(encoding="utf-8")) for name in IN_DOMAIN}
    for name in IN_DOMAIN if system == "single" else [None]:
        steps = work.options.steps * (2 if system == "mix twice as long" else 1)
        if name:
            steps = round(steps * sizes[name] / sum(sizes.values()))
        options = {
            "model_name_or_path": work / "backbone",
            "datasets": work.datasets([name] if name else IN_DOMAIN),
            "max_steps": steps,
            "deputy_intermediate_size": work.options.deputy_intermediate_size,
            "seed": seed,
        } | LENGTHS | TRAINING | variant_of(system)  # fmt: skip
        work.run("train", "moesumm", output=model_of(work, system, seed, name), done="log.json", options=options)


def model_of(work: Work, system: str, seed: int, name: str | None) -> Path:
    """The folder of a trained model."""
    return work / "models" / "-".join(filter(None, (file_name(system), name, str(seed))))


def file_name(system: str) -> str:
    """A system's name in file names."""
    return system.replace(" ", "_").replace("'", "")


def summarize(work: Work, system: str, seed: int) -> None:
    """In domain and zero-shot, without further training."""
    for name in IN_DOMAIN if system == "single" else [None]:
        model = model_of(work, system, seed, name)
        for setting, sets in (("in_domain", [name] if name else list(IN_DOMAIN)), ("zero_shot", list(OUT_OF_DOMAIN))):
            if setting not in work.options.settings or (setting == "zero_shot" and name not in (None, SINGLE)):
                continue
            options = {"systems": f"x={model}", "datasets": work.datasets(sets), **GENERATION}
            options |= {"zero_shot": True} if setting == "zero_shot" else {}
            folder = work / "summaries" / setting / model.name
            done = [f"x/{one}.jsonl" for one in sets]
            work.run("evaluate", "moesumm", output=folder, done=done, options=options, systems=model)


def adapt(work: Work, system: str, seed: int, rates: dict) -> None:
    """Few-shot, with different rows for each seed; training of all weights uses the backbone's learning rate."""
    all_weights = system in (*BACKBONES, ALL_WEIGHTS)
    chosen = rates["mix" if all_weights else "moesumm"]
    for times in (1, 3) if system in LONGER else (1,):
        for rows in FEW:
            folder = work / "summaries" / few_shot_name(rows, times) / f"{file_name(system)}-{seed}"
            draws = work.options.draws
            few_shot(work, system, seed, rows, chosen[str(rows)], folder, "data", 100 * seed, draws, times)


def few_shot_name(rows: int, times: int) -> str:
    """A few-shot setting's name in file names."""
    return f"few_shot_{rows}" + (f"_x{times}" if times > 1 else "")


def few_shot(work, system, seed, rows, rate, folder, data, data_seed, draws, times=1) -> None:
    """Adapts a model to each out-of-domain set for each sample of rows, and summarises the test split."""
    base = "moesumm" if system == ALL_WEIGHTS else system
    options = TRAINING | LENGTHS | GENERATION | {
        "setting": "few_shot",
        "model_name_or_path": model_of(work, base, seed, SINGLE if base == "single" else None),
        "datasets": work.datasets(OUT_OF_DOMAIN, data),
        "few_shot_rows": rows,
        "draws": draws,
        "max_steps": times * work.options.few_steps,
        "seed": data_seed,
        "learning_rate": rate,
        "deputies_only": system != ALL_WEIGHTS,
        "warmup_steps": 0,
        "per_device_train_batch_size": 10,
        "lr_scheduler_type": "constant",
    }  # fmt: skip
    done = [f"draw_{draw}/{name}-{rows}.jsonl" for name in OUT_OF_DOMAIN for draw in range(draws)]
    work.run("train", "moesumm", output=folder, done=done, options=options)


def choose_rates(work: Work, pool: ThreadPoolExecutor) -> dict:
    """The learning rates of few-shot, for deputies and for all weights, with the mean ROUGE of each under `tried`."""
    seed = work.options.seeds[0]
    list(pool.map(lambda system: train(work, system, seed), RATES))
    trials = [(system, rows, rate) for system, rates in RATES.items() for rows in FEW for rate in rates]
    tried = dict(zip(trials, pool.map(lambda trial: trial_of(work, seed, *trial), trials), strict=True))
    chosen: dict = {"tried": [{"system": s, "rows": r, "rate": rate, "mean R": v} for (s, r, rate), v in tried.items()]}
    for system, rates in RATES.items():
        chosen[system] = {str(rows): max(rates, key=lambda rate: tried[system, rows, rate]) for rows in FEW}
    return chosen


def trial_of(work: Work, seed: int, system: str, rows: int, rate: float) -> float:
    """Mean ROUGE on the held-out rows, for one sample of training rows."""
    folder = work / "rates" / f"{system}-{rows}-{rate:g}"
    few_shot(work, system, seed, rows, rate, folder, "data_for_rates", 7, draws=1)
    summaries = folder / "draw_0"
    options = {"systems": f"{system}={summaries}", "only": f"*-{rows}"}
    work.run("evaluate", "moesumm", output=folder / "scores", done="scores.json", options=options, systems=summaries)
    table = json.loads((folder / "scores" / "scores.json").read_text(encoding="utf-8"))["scores"]
    return next(row["mean R"] for row in table if row["data set"] == "mean of all")


def run_one(work: Work, system: str, seed: int, rates: dict | None) -> None:
    """Trains and tests a system in all settings."""
    if system != ALL_WEIGHTS:
        train(work, system, seed)
        summarize(work, system, seed)
    if system in work.options.few_systems:
        adapt(work, system, seed, rates)


def score(work: Work) -> list[dict]:
    """The table of each setting, with the differences from the baseline."""
    settings = {"in domain": ("in_domain", "*/x"), "zero-shot": ("zero_shot", "*/x")}
    for times, words in ((1, ""), (3, ", three times as long")):
        settings |= {f"few-shot, {rows} rows{words}": (few_shot_name(rows, times), "*/draw_*") for rows in FEW}
    results = []
    for setting, (folder, runs) in settings.items():
        patterns = {name: work / "summaries" / folder / f"{file_name(name)}-{runs}" for name in work.options.systems}
        systems = [f"{name}={pattern}" for name, pattern in patterns.items() if glob.glob(str(pattern))]
        if not any(one.startswith(f"{work.options.baseline}=") for one in systems):
            continue
        output = work / "scores" / setting
        options = {"systems": systems, "baseline": work.options.baseline, "threads": work.options.threads}
        scores = evaluated("moesumm", output, log=work / "scores.log", **options)
        print(f"\n{setting}\n\n{(output / 'scores.md').read_text(encoding='utf-8')}", flush=True)
        results.append({"setting": setting, **scores})
    return results


def main():
    """Runs what is missing in the work folder, and writes the scores."""
    parser = make_parser(__doc__, "moesumm_quality", "summarization/", work=True)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--systems", nargs="+", choices=[*SYSTEMS, *AUTHORS], default=list(SYSTEMS))
    parser.add_argument("--baseline", choices=SYSTEMS, default="mix", help="system that the others are compared with")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="besides few-shot")
    few = [system for system in SYSTEMS if system != "random start"]
    parser.add_argument("--few_systems", nargs="*", choices=SYSTEMS, default=few, help="systems in few-shot")
    numbers = {"steps": 400, "denoising_steps": 2500, "few_steps": 40, "draws": 1, "deputy_intermediate_size": 64}
    for name, value in {**numbers, "test_rows": 200, "threads": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=value, help="default: %(default)s")
    work = Work(parser.parse_args())
    copy_data(work)
    pretrain(work)
    with ThreadPoolExecutor(work.options.jobs) as pool:
        rates = choose_rates(work, pool) if work.options.few_systems else None
        pairs = [(system, seed) for seed in work.options.seeds for system in work.options.systems]
        for run in [pool.submit(run_one, work, *pair, rates) for pair in pairs]:
            run.result()
    settings = {k: v for k, v in vars(work.options).items() if k not in ("data", "work", "name", "overwrite")}
    settings |= {"few_rates": rates, "training": TRAINING, "reading": LENGTHS, "writing": GENERATION}
    write(work.options.name, score(work), **settings)


if __name__ == "__main__":
    main()
