"""Which mean of the weights that are not routed, and which gates, keep most of what experts learned? Perplexity, three seeds.

    python benchmarks/merge_means.py --data PATH --work FOLDER      # PATH/definitions/{wordnet,oxford,urban}/*.jsonl

A new Llama with 1.8 M parameters besides its embeddings is trained on three dictionaries by `lexperts train`, and then fine-tuned
on each of them. The experts are merged by `average: base`, `mean`, `ties`, `dare` and with `attention: routed`, before and after
the gates are tuned with frozen experts, and by the mean with gates that are random or those of centroids. The control is a dense
model that is trained from the same base on all rows, for as many steps as all experts and the tuning together. Seeds change the
order of the rows in every training but that of the base, and what DARE drops. The densities are chosen on validation rows.

Everything in the work folder is reused if its settings, data and versions are the same, so an interrupted run resumes.
"""

import json
import statistics
from pathlib import Path

import torch
import yaml
from common import check_same_settings, make_parser, run_once, write
from safetensors.torch import load_file, save_file
from timing import describe
from transformers import AutoModelForCausalLM, AutoTokenizer

import merge_tools
import modeling_lexicon  # noqa: F401  (registers LexiconForCausalLM)
from lexperts.recipes.common.configurations import read_config
from lexperts.recipes.common.perplexity import definition_losses, perplexity
from lexperts.recipes.lexicon.training import tokenize_rows
from modeling_lexicon.data_lexicon import DataCollatorForDefinitions, format_prompt
from run_tools.definition_rows import load_definition_rows

CONFIG = "small_cpu"  # of lexperts/recipes/lexicon
MAX_LENGTH = 64
BATCH = 8
PROMPTS = 64  # of an expert, for its row of the gates
DOMAINS = ("wordnet", "oxford", "urban")
SPLITS = ("train", "validation", "test")
MIXTURES = {
    "base": {"average": "base"},
    "mean": {"average": "mean"},
    "ties": {"average": "ties"},
    "dare": {"average": "dare"},
    "routed attention": {"average": "mean", "attention": "routed"},
    "mean, random gates": {"average": "mean", "gate_mode": "random"},
    "mean, centroid gates": {"average": "mean", "gate_mode": "centroid"},
}  # per token, top 2 of 3; the gates are those of prompts unless named, and only these are tuned
BY_DOMAIN = {
    "one expert per row, mean": {"average": "mean"},
    "one expert per row, routed attention": {"average": "mean", "attention": "routed"},
}  # each row by its dictionary, without a gate


class Rows:
    """The rows of a split as ids, shuffled once; `count` is the number of rows of each domain."""

    def __init__(self, split: str, files: dict[str, Path], tokenizer, count: int):
        self.split, self.files, self.rows = split, files, []
        for k, file in enumerate(files.values()):
            rows = load_definition_rows(file)[0]
            order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
            self.rows += [{**rows[i], "domain": k} for i in order[:count]]
        self.columns, _ = tokenize_rows(self.rows, tokenizer, MAX_LENGTH)
        self.domains = torch.tensor(self.columns.pop("domain_ids"))
        self.collator = DataCollatorForDefinitions(tokenizer)


class Experiment:
    """Trains, merges and measures, and reuses what an earlier run has finished."""

    def __init__(self, options):
        self.options, self.work = options, options.work
        (self.work / "scores").mkdir(parents=True, exist_ok=True)
        folder = options.data.resolve() / "definitions"
        self.files = {split: {name: folder / name / f"{split}.jsonl" for name in DOMAINS} for split in SPLITS}
        self.base = self.train("base", None, DOMAINS, options.base_steps, options.base_lr, 42)
        self.tokenizer = AutoTokenizer.from_pretrained(self.base)
        self.validation, self.test = (
            Rows(split, self.files[split], self.tokenizer, getattr(options, f"{split}_rows")) for split in SPLITS[1:]
        )

    def train(self, name: str, start: Path | None, domains, steps: int, rate: float, seed: int, gates=False) -> Path:
        """A new model, or one that starts from another: the whole of it trained on domains, or its gates."""
        output = self.work / name
        settings = {"train_files": [self.files["train"][name] for name in domains]}
        settings |= {"max_steps": steps, "learning_rate": rate, "seed": seed, "max_length": MAX_LENGTH}
        settings |= {"per_device_train_batch_size": BATCH, "eval_strategy": "no", "save_strategy": "no"}
        if start:
            config = yaml.safe_load(read_config("lexicon", "train_expert", CONFIG))
            omitted = ("from_scratch", "num_train_epochs", "output_dir", "save_total_limit")
            settings = {key: value for key, value in config.items() if key not in omitted} | settings
            settings |= {"model_name_or_path": start, "train": "gates" if gates else "all"}
        command = ("lexicon-router" if gates else "lexicon-expert", *(() if start else (CONFIG,)))
        run = {"done": "results.json", "overwrite": self.options.overwrite, "threads": self.options.jobs}
        run_once("train", *command, output=output, options=settings | {"disable_tqdm": True}, **run)
        return output

    def has(self, result: Path, **settings) -> bool:
        """Whether an earlier run has finished a file or folder, with the same settings."""
        check_same_settings(result, settings, self.options.overwrite)
        return (result / "model.safetensors").exists() or result.is_file()

    def experts(self, seed: int) -> dict[str, Path]:
        """One expert per domain."""
        steps, rate = self.options.expert_steps, self.options.expert_lr
        return {name: self.train(f"s{seed}_{name}", self.base, [name], steps, rate, seed) for name in DOMAINS}

    def texts_of(self, domain: str, count: int | None = None) -> list[str]:
        """The prompts of a domain's training rows."""
        rows, bos = load_definition_rows(self.files["train"][domain])[0][:count], self.tokenizer.bos_token
        return [bos + format_prompt(row["term"], row["context"]) for row in rows]

    def mixture(self, seed: int, name: str, policy: str = "token", **keys) -> Path:
        """The experts of a seed, merged; each of them has the texts that its gates are made from."""
        output, experts = self.work / f"s{seed}_{name.replace(' ', '_').replace(',', '')}", []
        gate_mode = keys.pop("gate_mode", "router_input") if policy == "token" else "none"
        for domain, folder in self.experts(seed).items():
            expert = {"source_model": str(folder), "name": domain}
            if gate_mode == "router_input":
                expert["positive_prompts"] = self.texts_of(domain, PROMPTS)
            if gate_mode == "centroid":
                samples = self.work / f"samples_{domain}.jsonl"
                lines = (json.dumps({"text": text}) + "\n" for text in self.texts_of(domain))
                samples.write_text("".join(lines), encoding="utf-8")
                expert["samples"] = str(samples)
            experts.append(expert)
        recipe = {"base_model": str(self.base), "experts": experts, "experts_per_token": 2, "dtype": "float32"}
        recipe |= {"gate_mode": gate_mode, "routing_policy": policy, "seed": seed, **keys}
        if not self.has(output, recipe=recipe, sources=[self.base, *self.experts(seed).values()]):
            merge_tools.compose(recipe, output)
        return output

    def losses(self, model: Path, rows: Rows, by_domain: bool = False) -> torch.Tensor:
        """Nats and number of tokens of each row `(N, 2)`, cached in the work folder."""
        cached = self.work / "scores" / f"{model.name}_{rows.split}.safetensors"
        settings = {"model": model / "model.safetensors", "rows": rows.files, "count": len(rows.rows)}
        if not self.has(cached, **settings, by_domain=by_domain):
            loaded = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
            columns = {**rows.columns, "domain_ids": rows.domains.tolist()} if by_domain else rows.columns
            save_file({"losses": definition_losses(loaded, columns, rows.collator)}, cached)
        return load_file(cached)["losses"]

    def select_density(self, seed: int, average: str) -> dict[float, float]:
        """The perplexity of validation rows for each density."""
        scores = {}
        for density in self.options.densities:
            mixture = self.mixture(seed, f"{average}_{density}", average=average, density=density)
            scores[density] = perplexity(self.losses(mixture, self.validation))
        return scores


def measure_seed(experiment: Experiment, seed: int) -> dict:
    """All rows of the table for one seed."""
    options, test, rows = experiment.options, experiment.test, {}

    def add(label: str, losses: torch.Tensor) -> None:
        domains = {name: perplexity(losses[test.domains == k]) for k, name in enumerate(DOMAINS)}
        rows[label] = {"all": perplexity(losses), **domains}
        print(f"seed {seed}, {label}: {describe(rows[label])}", flush=True)

    add("dense base", experiment.losses(experiment.base, test))
    experts = [experiment.losses(folder, test) for folder in experiment.experts(seed).values()]
    add("dense experts, each row by its own", torch.stack(experts)[test.domains, torch.arange(len(test.domains))])
    chosen, validation = {}, {}
    for name, keys in MIXTURES.items():
        if name in ("ties", "dare"):
            tried = experiment.select_density(seed, name)
            chosen[name], validation[name] = min(tried, key=tried.get), {str(k): v for k, v in tried.items()}
            mixture = experiment.mixture(seed, f"{name}_{chosen[name]}", density=chosen[name], **keys)
        else:
            mixture = experiment.mixture(seed, name, **keys)
        add(name, experiment.losses(mixture, test))
        if "gate_mode" not in keys:
            gates = (f"{mixture.name}_tuned", mixture, DOMAINS, options.tune_steps, options.gate_lr, seed)
            add(f"{name}, gates tuned", experiment.losses(experiment.train(*gates, gates=True), test))
    for name, keys in BY_DOMAIN.items():
        add(name, experiment.losses(experiment.mixture(seed, name, "domain", **keys), test, by_domain=True))
    steps = len(DOMAINS) * options.expert_steps + options.tune_steps
    control = experiment.train(f"s{seed}_control", experiment.base, DOMAINS, steps, options.expert_lr, seed)
    add("dense control, equal compute", experiment.losses(control, test))
    return {"seed": seed, "perplexity": rows, "densities": chosen, "validation": validation}


def main():
    """Runs the benchmark and writes its results after each seed."""
    parser = make_parser(__doc__, "merge_means", "definitions/", work=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--densities", type=float, nargs="+", default=[0.2, 0.5, 0.8], help="of TIES and DARE")
    steps = {"base_steps": 1000, "expert_steps": 200, "tune_steps": 80, "validation_rows": 100, "test_rows": 300}
    for name, value in {**steps, "base_lr": 2e-3, "expert_lr": 1e-3, "gate_lr": 3e-3}.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help="default: %(default)s")
    options = parser.parse_args()
    experiment, results = Experiment(options), []
    unrecorded = ("data", "work", "name", "overwrite", "jobs")
    settings = {name: value for name, value in vars(options).items() if name not in unrecorded}
    for seed in options.seeds:
        results.append(measure_seed(experiment, seed))
        write(options.name, results, domains=DOMAINS, max_length=MAX_LENGTH, batch=BATCH, **settings)
    for label in results[0]["perplexity"]:
        values = [result["perplexity"][label]["all"] for result in results]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        print(f"{label:46}{statistics.mean(values):8.2f} +- {spread:.2f}")


if __name__ == "__main__":
    main()
