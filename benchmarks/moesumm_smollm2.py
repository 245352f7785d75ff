"""Does expertise separation help a real Llama? MoeSumm over SmolLM2 in domain, zero-shot and few-shot, against dense models and LoRA.

    pip install ./models/smollm2 ./models/moesumm-smollm2
    python benchmarks/moesumm_smollm2.py --data PATH --work FOLDER --systems default prompted lead --test_rows 200 --no_zero_shot
    python benchmarks/moesumm_smollm2.py --data PATH --work FOLDER --rows 400 --test_rows 100     # hours on two cores
    python benchmarks/moesumm_smollm2.py --data PATH --work FOLDER --gpu --seeds 42 84 21         # on a GPU

All systems read the same rows once, in the recipe's way (`smollm2_cpu.yml`); only the weights that are trained and their learning rate
differ. `deputies` is MoeSumm with an unchanged main expert, as the default model; `moesumm` trains the main expert, too, as the paper;
`no_margin` is the latter without the margin loss; `mix` the backbone on all sets, `single` and `lora` one model per set; `flat_moe` has experts
of full size and no main expert. `prompted` is SmolLM2-135M-Instruct without training, asked in a conversation, `lead` the first words of a
text, as many as a summary of its set has on average. Zero-shot is
on sets that none was trained on, by the main expert alone; few-shot trains deputies and selectors, or all weights of a backbone,
on a few of their rows. Greedy summaries. Intervals of differences, from `mix` or else from `prompted`, are bootstrapped over documents.
"""

import glob
import json
from functools import partial
from pathlib import Path

import torch
from common import evaluated, first_rows, make_parser, run_once, write

from run_tools.packaged import find_packaged

IN_DOMAIN = {"papers": "scitldr", "clinic": "mts_dialog"}
OTHERS = {"mail": "aeslc", "news": "inshorts_news"}  # with --all_sets also in domain
NEW = {"dialogues": "samsum", "radiology": "radiology_indiana"}  # for zero-shot and few-shot
DEFAULT, PROMPTED, LEAD, BASELINE = "default", "prompted", "lead", "mix"
ALL = {"train": "all", "learning_rate": 1e-4}
SMALL = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}  # two passes of 8 rows need 15 GB
SYSTEMS = {
    "deputies": {"train": "deputies", "learning_rate": 1e-3},
    "moesumm": ALL | {"deputy_lr_factor": 10} | SMALL,
    "no_margin": ALL | {"deputy_lr_factor": 10, "variant": "no_margin"},
    "flat_moe": ALL | {"variant": "flat_moe"},
    "mix": ALL | {"variant": "backbone"},
    "single": ALL | {"variant": "backbone"},
    "lora": {"train": "all", "variant": "backbone", "lora_r": 16, "learning_rate": 1e-3},
}
PER_SET = ("single", "lora")
FEW = {"deputies": {"learning_rate": 1e-3}, "moesumm": {"learning_rate": 1e-3}, "mix": {"learning_rate": 1e-4}}
GENERATION = {"summary_length": 96, "num_beams": 1, "generation_batch_size": 16}
REQUESTS = {
    "papers": "Summarize this abstract in one sentence.",
    "clinic": "Write the note of the doctor for this conversation.",
    "mail": "Write the subject line of this mail.",
    "news": "Summarize this article in 60 words.",
    "dialogues": "Summarize this conversation in one or two sentences.",
    "radiology": "Write the impression for these findings.",
}


def file_of(options, name: str, split: str) -> Path:
    """The rows of a set; validation replaces a missing train split."""
    folder = options.data / "summarization" / (IN_DOMAIN | OTHERS | NEW)[name]
    return folder / f"{split}.jsonl" if (folder / f"{split}.jsonl").exists() else folder / "validation.jsonl"


def folders(options) -> dict[str, Path]:
    """Folders with the first rows of each set: as many as were asked for, for training and for tests."""
    found = {}
    for name in IN_DOMAIN | OTHERS | NEW:
        found[name] = options.work / "data" / name
        for split, count in (("train", options.rows), ("test", options.test_rows)):
            first_rows(file_of(options, name, split), found[name] / f"{split}.jsonl", count)
    return found


def train(options, sets: dict[str, Path], system: str, seed: int) -> dict[str, Path]:
    """Trains a system -> for each set of its domain the folder of the model."""
    given = SYSTEMS[system] | {"seed": seed, "eval_strategy": "no", "save_strategy": "no", "use_cpu": not options.gpu}
    parts = [[name] for name in options.in_domain] if system in PER_SET else [options.in_domain]
    models = {}
    for part in parts:
        folder = options.work / "models" / "-".join([system, *(part if system in PER_SET else []), str(seed)])
        places = {name: sets[name] for name in part}
        settings = given | {"datasets": [f"{name}={place}" for name, place in places.items()]}
        run = {"output": folder, "done": "log.json", "options": settings, "datasets": places}
        run_once("train", "moesumm", "smollm2_cpu", threads=options.threads, overwrite=options.overwrite, **run)
        models |= dict.fromkeys(part, folder)
    return models


def summarize(options, models: dict[str, Path], sets: dict[str, Path], folder: Path, **more) -> None:
    """The summaries of the test rows of each set, by the model for it, as FOLDER/x/SET.jsonl."""
    for model in set(models.values()):
        names = [name for name, own in models.items() if own == model]
        settings = {"systems": f"x={model}", "datasets": [f"{name}={sets[name]}" for name in names]} | GENERATION | more
        run = {"output": folder, "done": [f"x/{name}.jsonl" for name in names], "options": settings}
        compared = {"systems": model, "datasets": {name: sets[name] for name in names}}
        run["output"] = folder if len(set(models.values())) == 1 else folder / names[0]
        run_once("evaluate", "moesumm", threads=options.threads, overwrite=options.overwrite, **run, **compared)
        for name in names:
            (folder / "x").mkdir(exist_ok=True)
            source = run["output"] / "x" / f"{name}.jsonl"
            (folder / "x" / f"{name}.jsonl").write_bytes(source.read_bytes())


def prompt(options, sets: dict[str, Path], folder: Path) -> None:
    """The summaries of SmolLM2-135M-Instruct, asked in a conversation; at most the first 1,500 tokens of a text."""
    from tqdm import tqdm
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from run_tools.pretrained import unpacked

    place = unpacked("smollm2")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(place, dtype="auto"), AutoTokenizer.from_pretrained(place)
    model.to("cuda" if options.gpu else "cpu").eval()
    tokenizer.padding_side = "left"
    for name, data in sets.items():
        output = folder / "x" / f"{name}.jsonl"
        if output.exists():
            continue
        rows = read_rows(data / "test.jsonl")
        texts = [tokenizer.decode(tokenizer(row["document"])["input_ids"][:1500]) for row in rows]
        requests = [[{"role": "user", "content": f"{REQUESTS[name]}\n\n{text}"}] for text in texts]
        prompts = [tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) for turn in requests]
        order, answers = sorted(range(len(rows)), key=lambda i: len(prompts[i])), [""] * len(rows)
        for start in tqdm(range(0, len(rows), 16), desc=f"prompted, {name}"):
            chosen = order[start : start + 16]
            batch = tokenizer([prompts[i] for i in chosen], return_tensors="pt", padding=True, add_special_tokens=False)
            with torch.inference_mode():
                ids = model.generate(**batch.to(model.device), max_new_tokens=96, do_sample=False)
            found = tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
            for i, answer in zip(chosen, found, strict=True):
                answers[i] = answer.strip()
        save(output, rows, answers)


def lead(options, sets: dict[str, Path], folder: Path) -> None:
    """The first words of each test row, as many as the training summaries of its set have on average."""
    for name, data in sets.items():
        train, rows = read_rows(data / "train.jsonl"), read_rows(data / "test.jsonl")
        count = round(sum(len(row["summary"].split()) for row in train) / len(train))
        save(folder / "x" / f"{name}.jsonl", rows, [" ".join(row["document"].split()[:count]) for row in rows])


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def save(path: Path, rows: list[dict], answers: list[str]) -> None:
    """Writes summaries as `lexperts evaluate moesumm` does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pairs = [{"summary": row["summary"], "prediction": one} for row, one in zip(rows, answers, strict=True)]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")


def few_name(rows: int, factor: float) -> str:
    """The folder of a few-shot setting."""
    return f"few_{rows}" + (f"_x{factor:g}" if factor != 1 else "")


def adapt(options, sets: dict[str, Path], system: str, seed: int, rows: int, factor: float) -> None:
    """Few-shot: a system after training on a few rows of each new set, and its summaries."""
    model = options.work / "models" / f"{system}-{seed}"
    folder = options.work / "summaries" / few_name(rows, factor) / f"{system}-{seed}"
    new = {name: sets[name] for name in NEW}
    settings = GENERATION | {"learning_rate": FEW[system]["learning_rate"] * factor} | {
        "setting": "few_shot", "model_name_or_path": model, "train": "all", "few_shot_rows": rows, "draws": options.draws,
        "datasets": [f"{name}={place}" for name, place in new.items()], "seed": seed, "use_cpu": not options.gpu,
        "num_train_epochs": 5, "train_sampling_strategy": "random",
    }  # fmt: skip
    done = [f"draw_{draw}/{name}-{rows}.jsonl" for name in NEW for draw in range(options.draws)]
    run = {"output": folder, "done": done, "options": settings, "datasets": new, "model_name_or_path": model}
    run_once("train", "moesumm", "smollm2_cpu", threads=options.threads, overwrite=options.overwrite, **run)


UNTRAINED = {PROMPTED: prompt, LEAD: lead}


def run_system(options, sets: dict[str, Path], system: str, seed: int) -> None:
    """Trains and tests a system in all settings."""
    summaries, own = options.work / "summaries", {name: sets[name] for name in options.in_domain}
    new = {name: sets[name] for name in NEW}
    name = f"{system}-{seed}"
    if system in UNTRAINED:
        UNTRAINED[system](options, own, summaries / "in_domain" / name)
        if options.zero_shot:
            UNTRAINED[system](options, new, summaries / "zero_shot" / name)
        return
    models = (
        dict.fromkeys(own, Path(find_packaged("moesumm-smollm2")))
        if system == DEFAULT
        else train(options, sets, system, seed)
    )
    summarize(options, models, own, summaries / "in_domain" / name)
    if options.zero_shot and system not in (*PER_SET, DEFAULT):
        model = next(iter(models.values()))
        summarize(options, dict.fromkeys(new, model), new, summaries / "zero_shot" / name, zero_shot=True)
    for rows in options.few_rows if system in FEW else []:
        for factor in options.few_factors:
            adapt(options, sets, system, seed, rows, factor)


def score(options) -> list[dict]:
    """The table of each setting, with the differences from the baseline where it was run."""
    settings = {"in domain": ("in_domain", "*/x"), "zero-shot": ("zero_shot", "*/x")}
    for rows in options.few_rows:
        for factor in options.few_factors:
            rates = f", learning rates × {factor:g}" if factor != 1 else ""
            settings[f"few-shot, {rows} rows{rates}"] = few_name(rows, factor), "*/draw_*"
    results = []
    for setting, (folder, runs) in settings.items():
        patterns = {name: options.work / "summaries" / folder / f"{name}-{runs}" for name in (*options.systems,)}
        systems = {name: f"{name}={pattern}" for name, pattern in patterns.items() if glob.glob(str(pattern))}
        if not systems:
            continue
        output = options.work / "scores" / setting
        given = {"systems": list(systems.values()), "log": options.work / "scores.log", "threads": options.threads}
        given |= {"baseline": baseline} if (baseline := baseline_of(systems)) else {}
        scores = evaluated("moesumm", output, **given)
        print(f"\n{setting}\n\n{(output / 'scores.md').read_text(encoding='utf-8')}", flush=True)
        results.append({"setting": setting, **scores})
    return results


def baseline_of(systems) -> str | None:
    """The system from which differences are given."""
    return next((name for name in (BASELINE, PROMPTED) if name in systems), None)


def main():
    """Runs what is missing in the work folder, and writes the scores."""
    from concurrent.futures import ThreadPoolExecutor

    parser = make_parser(__doc__, "moesumm_smollm2", "summarization/", work=True)
    names = (DEFAULT, *UNTRAINED, *SYSTEMS)
    parser.add_argument("--systems", nargs="+", choices=names, default=list(names))
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    parser.add_argument("--all_sets", action="store_true", help="mail and news in domain, too")
    parser.add_argument("--rows", type=int, help="training rows of each set; by default all")
    parser.add_argument("--test_rows", type=int, help="test rows of each set; by default all")
    parser.add_argument("--no_zero_shot", dest="zero_shot", action="store_false", help="in domain and few-shot only")
    parser.add_argument("--few_rows", type=int, nargs="*", default=[10, 100], help="rows for few-shot")
    parser.add_argument("--few_factors", type=float, nargs="+", default=[1], help="of the learning rates for few-shot")
    parser.add_argument("--draws", type=int, default=1, help="samples of rows for few-shot")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process")
    parser.add_argument("--gpu", action="store_true", help="train on the GPU; otherwise on the CPU")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)  # here, too, and as the results will say
    options.in_domain = list(IN_DOMAIN | (OTHERS if options.all_sets else {}))
    sets = folders(options)
    with ThreadPoolExecutor(options.jobs) as pool:
        pairs = [(system, options.seeds[0]) for system in options.systems if system not in SYSTEMS]
        pairs += [(system, seed) for seed in options.seeds for system in options.systems if system in SYSTEMS]
        for run in [pool.submit(partial(run_system, options, sets), *pair) for pair in pairs]:
            run.result()
    settings = {
        name: getattr(options, name)
        for name in (
            "systems",
            "seeds",
            "rows",
            "test_rows",
            "few_rows",
            "few_factors",
            "draws",
            "in_domain",
            "zero_shot",
        )
    }
    settings["baseline"] = baseline_of(options.systems)
    write(options.name, score(options), **settings, training=SYSTEMS, few_training=FEW, writing=GENERATION)


if __name__ == "__main__":
    main()
