"""Which mean of the weights that are not routed keeps most of what the experts learned? Perplexity per domain, three seeds.

    python benchmarks/merge_means.py --data PATH --work runs/merge_means   # PATH/definitions/{wordnet,oxford,urban}/*.jsonl

A new Llama with 1.8 M parameters besides its embeddings is trained on three dictionaries, and then fine-tuned on each of
them. The experts are merged by `average: base`, `mean`, `ties`, `dare` and with `attention: routed`, before and after the
gates are tuned with frozen experts. The control is a dense model that is trained from the same base on all rows, for as many
steps as all experts and the tuning together. Seeds change the order of the rows in every training but that of the base, and
what DARE drops. The densities are chosen on validation rows.

Everything in the work folder is reused if its settings, data and versions are the same, so an interrupted run resumes.
"""

import argparse
import math
import statistics
import time
from pathlib import Path

import torch
import yaml
from common import add_record_arguments, check_same_settings, write
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

import merge_tools
import modeling_lexicon  # noqa: F401  (registers LexiconForCausalLM)
from lexperts.recipes.common.configurations import read_config
from lexperts.recipes.lexicon.perplexity import definition_losses, perplexity
from lexperts.recipes.lexicon.train_expert import new_model, train_tokenizer
from lexperts.recipes.lexicon.training import tokenize_rows
from merge_tools.gate_training import freeze_all_but_gates
from modeling_lexicon.data_lexicon import DataCollatorForDefinitions, format_prompt, load_definition_rows

MAX_LENGTH = 64
BATCH = 8
PROMPTS = 64  # of an expert, for its row of the gates
DOMAINS = ("wordnet", "oxford", "urban")
MEANS = {
    "base": {"average": "base"},
    "mean": {"average": "mean"},
    "ties": {"average": "ties"},
    "dare": {"average": "dare"},
    "routed attention": {"average": "mean", "attention": "routed"},
}  # per token, top 2 of 3
BY_DOMAIN = {
    "one expert per row, mean": {"average": "mean"},
    "one expert per row, routed attention": {"average": "mean", "attention": "routed"},
}  # each row by its dictionary, without a gate


class Rows:
    """The rows of one domain or of all as ids, shuffled once; `count` is the number of rows of each domain."""

    def __init__(self, data: Path, tokenizer, split: str, domain: str = "all", count: int | None = None):
        self.name = f"{split}_{domain}"
        self.files = [data / "definitions" / name / f"{split}.jsonl" for name in DOMAINS if domain in ("all", name)]
        self.rows = []
        for file in self.files:
            rows, k = load_definition_rows(file)[0], DOMAINS.index(file.parent.name)
            order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
            self.rows += [{**rows[i], "domain": k} for i in order[:count]]
        self.columns, _ = tokenize_rows(self.rows, tokenizer, MAX_LENGTH)
        self.domains = torch.tensor(self.columns.pop("domain_ids"))
        self.collator = DataCollatorForDefinitions(tokenizer)

    def batches(self, steps: int, seed: int):
        """`steps` batches of rows of similar length, in a random order."""
        generator = torch.Generator().manual_seed(seed)
        ids, labels = self.columns["input_ids"], self.columns["labels"]
        while steps > 0:
            order = torch.randperm(len(ids), generator=generator).tolist()
            size = 50 * BATCH
            order = [
                i for k in range(0, len(order), size) for i in sorted(order[k : k + size], key=lambda i: len(ids[i]))
            ]
            batches = [order[k : k + BATCH] for k in range(0, len(order) - BATCH + 1, BATCH)]
            for b in torch.randperm(len(batches), generator=generator).tolist()[:steps]:
                yield self.collator([{"input_ids": ids[i], "labels": labels[i]} for i in batches[b]])
            steps -= len(batches)


def fit(model, rows: Rows, steps: int, rate: float, seed: int) -> None:
    """AdamW with warm-up over 5% of the steps and a cosine; trains the parameters that require gradients."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    warmup = max(1, steps // 20)
    scale = lambda i: min((i + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * i / steps))  # noqa: E731
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, scale)
    model.train()
    for batch in rows.batches(steps, seed):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


class Experiment:
    """Trains, merges and measures, and reuses what an earlier run has finished."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.data, self.work = options, options.data, options.work
        (self.work / "scores").mkdir(parents=True, exist_ok=True)
        self.fields = yaml.safe_load(read_config("lexicon", "train_expert", "small_cpu"))["from_scratch"]
        self.base = self.make_base()
        self.tokenizer = AutoTokenizer.from_pretrained(self.base)
        self.train = {name: Rows(self.data, self.tokenizer, "train", name) for name in (*DOMAINS, "all")}
        self.validation = Rows(self.data, self.tokenizer, "validation", count=options.validation_rows)
        self.test = Rows(self.data, self.tokenizer, "test", count=options.test_rows)

    def has(self, result: Path, **settings) -> bool:
        """Whether an earlier run has finished a file or folder, with the same settings."""
        check_same_settings(result, settings, self.options.overwrite)
        return (result / "model.safetensors").exists() or result.is_file()

    def make_base(self) -> Path:
        """A Llama from random weights, and its tokenizer."""
        options, output = self.options, self.work / "base"
        files = [self.data / "definitions" / name / "train.jsonl" for name in DOMAINS]
        settings = {"rows": files, "fields": self.fields, "steps": options.base_steps, "rate": options.base_lr}
        if not self.has(output, **settings):
            tokenizer = train_tokenizer(load_definition_rows(files)[0], self.fields["vocab_size"])
            model = new_model(self.fields, None, tokenizer, 42)
            fit(model, Rows(self.data, tokenizer, "train"), options.base_steps, options.base_lr, 42)
            save(model, tokenizer, output)
        return output

    def trained(self, name: str, start: Path, domain: str, steps: int, rate: float, seed: int, gates=False) -> Path:
        """A model that starts from another one: the whole of it trained on a domain, or its gates on all rows."""
        output, rows = self.work / name, self.train[domain]
        settings = {"start": start, "rows": rows.files, "steps": steps, "rate": rate, "seed": seed, "gates": gates}
        if not self.has(output, **settings):
            began = time.perf_counter()
            model = AutoModelForCausalLM.from_pretrained(start, dtype="float32")
            set_seed(seed)
            if gates:
                freeze_all_but_gates(model)
            fit(model, rows, steps, rate, seed)
            save(model, self.tokenizer, output)
            print(f"{name}: {steps} steps, {time.perf_counter() - began:.0f} s", flush=True)
        return output

    def experts(self, seed: int) -> list[Path]:
        """One expert per domain."""
        steps, rate = self.options.expert_steps, self.options.expert_lr
        return [self.trained(f"s{seed}_{domain}", self.base, domain, steps, rate, seed) for domain in DOMAINS]

    def mixture(self, seed: int, name: str, policy: str = "token", **keys) -> Path:
        """The experts of a seed, merged."""
        output, experts = self.work / f"s{seed}_{name.replace(' ', '_').replace(',', '')}", []
        for domain, folder in zip(DOMAINS, self.experts(seed), strict=True):
            expert = {"source_model": str(folder), "name": domain}
            if policy == "token":
                rows, bos = self.train[domain].rows[:PROMPTS], self.tokenizer.bos_token
                expert["positive_prompts"] = [bos + format_prompt(r["term"], r["context"]) for r in rows]
            experts.append(expert)
        recipe = {"base_model": str(self.base), "experts": experts, "experts_per_token": 2, "dtype": "float32"}
        recipe |= {
            "gate_mode": "router_input" if policy == "token" else "none",
            "routing_policy": policy,
            "seed": seed,
            **keys,
        }
        if not self.has(output, recipe=recipe, sources=[self.base, *self.experts(seed)]):
            merge_tools.compose(recipe, output)
        return output

    def losses(self, model: Path, rows: Rows, by_domain: bool = False) -> torch.Tensor:
        """Nats and number of tokens of each row `(N, 2)`, cached in the work folder."""
        cached = self.work / "scores" / f"{model.name}_{rows.name}.safetensors"
        settings = {"model": model / "model.safetensors", "rows": rows.files, "count": len(rows.rows)}
        if not self.has(cached, **settings, by_domain=by_domain):
            loaded = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
            columns = {**rows.columns, "domain_ids": rows.domains.tolist()} if by_domain else rows.columns
            save_file({"losses": definition_losses(loaded, columns, rows.collator)}, cached)
        return load_file(cached)["losses"]

    def select_density(self, seed: int, average: str) -> tuple[float, dict[str, float]]:
        """The density with the lowest perplexity of validation rows, and the perplexity for each."""
        scores = {}
        for density in self.options.densities:
            mixture = self.mixture(seed, f"{average}_{density}", average=average, density=density)
            scores[density] = perplexity(self.losses(mixture, self.validation))
        return min(scores, key=scores.get), {str(density): score for density, score in scores.items()}


def save(model, tokenizer, output: Path) -> None:
    """Saves a model; the weights last, so that a folder with weights is complete."""
    tokenizer.save_pretrained(output)
    model.save_pretrained(output)


def measure_seed(experiment: Experiment, seed: int) -> dict:
    """All rows of the table for one seed."""
    options, test, rows = experiment.options, experiment.test, {}

    def add(label: str, losses: torch.Tensor) -> None:
        domains = {name: perplexity(losses[test.domains == k]) for k, name in enumerate(DOMAINS)}
        rows[label] = {"all": perplexity(losses), **domains}
        print(f"seed {seed}  {label:46}" + "".join(f"{value:8.1f}" for value in rows[label].values()), flush=True)

    add("dense base", experiment.losses(experiment.base, test))
    experts = [experiment.losses(folder, test) for folder in experiment.experts(seed)]
    add("dense experts, each row by its own", torch.stack(experts)[test.domains, torch.arange(len(test.domains))])
    chosen, validation = {}, {}
    for name, keys in MEANS.items():
        if name in ("ties", "dare"):
            chosen[name], validation[name] = experiment.select_density(seed, name)
            mixture = experiment.mixture(seed, f"{name}_{chosen[name]}", density=chosen[name], **keys)
        else:
            mixture = experiment.mixture(seed, name, **keys)
        add(name, experiment.losses(mixture, test))
        tuned = experiment.trained(
            f"{mixture.name}_tuned", mixture, "all", options.tune_steps, options.gate_lr, seed, gates=True
        )
        add(f"{name}, gates tuned", experiment.losses(tuned, test))
    for name, keys in BY_DOMAIN.items():
        add(name, experiment.losses(experiment.mixture(seed, name, "domain", **keys), test, by_domain=True))
    steps = len(DOMAINS) * options.expert_steps + options.tune_steps
    control = experiment.trained(f"s{seed}_control", experiment.base, "all", steps, options.expert_lr, seed)
    add("dense control, equal compute", experiment.losses(control, test))
    return {"seed": seed, "perplexity": rows, "densities": chosen, "validation": validation}


def main():
    """Runs the benchmark and writes its results after each seed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with definitions/")
    parser.add_argument("--work", type=Path, default=Path("runs/merge_means"), help="folder for models and scores")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--densities", type=float, nargs="+", default=[0.2, 0.5, 0.8], help="of TIES and DARE")
    parser.add_argument("--base_steps", type=int, default=1000)
    parser.add_argument("--base_lr", type=float, default=2e-3)
    parser.add_argument("--expert_steps", type=int, default=200)
    parser.add_argument("--expert_lr", type=float, default=1e-3)
    parser.add_argument("--tune_steps", type=int, default=80)
    parser.add_argument("--gate_lr", type=float, default=3e-3)
    parser.add_argument("--validation_rows", type=int, default=100)
    parser.add_argument("--test_rows", type=int, default=300)
    parser.add_argument("--until", choices=["experts", "merge"], default="merge", help="the last step")
    add_record_arguments(parser, "merge_means")
    args = parser.parse_args()
    experiment, results = Experiment(args), []
    for seed in args.seeds:
        experiment.experts(seed)
    if args.until == "experts":
        return
    unrecorded = ("data", "work", "until", "name", "overwrite")
    settings = {name: value for name, value in vars(args).items() if name not in unrecorded}
    for seed in args.seeds:
        results.append(measure_seed(experiment, seed))
        write(args.name, results, domains=DOMAINS, max_length=MAX_LENGTH, batch=BATCH, **settings)
    for label in results[0]["perplexity"]:
        values = [result["perplexity"][label]["all"] for result in results]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        print(f"{label:46}{statistics.mean(values):8.2f} +- {spread:.2f}")


if __name__ == "__main__":
    main()
