"""What mixtures of a real Llama keep of what each of their experts has learned.

    python benchmarks/modular_experts.py --data PATH --work FOLDER      # PATH/summarization/*, PATH/keyphrases/stackexchange; hours on two cores
    python benchmarks/modular_experts.py --data PATH --work FOLDER --seeds 42 43 44 --only ridge "dense, mean"

Experts of SmolLM2-135M (pip install ./models/smollm2) are trained on one domain each, MLPs only unless they are called whole, 60 steps of
1,024 tokens. They are merged with gates that `compose` offers, with nothing trained. The controls have the same base: a dense model whose
MLPs are the mean of the experts', a dense model trained on all domains together for as many steps as all experts, and
Branch-Train-MiX (Sukhbaatar et al. 2024), which trains everything after merging whole experts.

Losses are nats per token over the first 128 tokens of held-out texts; `kept` is (base - model) / (base - own expert), the mean over domains.
Trained experts stay in the folder of --work and are used again.
"""

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from common import make_parser, write
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

import merge_tools
from run_tools.packaged import find_packaged

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
CHARACTERS = {"train": 300_000, "validation": 120_000}  # of a domain
WINDOW, STEPS, PROMPTS = 128, 60, 16
MLP = ".mlp."
TOKENS = 24 * 576  # of an expert for its gates, three times the default
MORE = "ridge of 24 tokens per dimension"
RANKS = (16, 64, 128)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# label -> keys of the recipe
MIXTURES = {
    **{f"{mode}, top {k}": {"gate_mode": mode, "experts_per_token": k} for mode in ("random", "hidden", "ridge") for k in (1, 2)},
    f"{MORE}, top 2": {"gate_mode": "ridge", "gate_tokens": TOKENS},
    f"{MORE}, one expert per text": {
        "gate_mode": "ridge", "gate_tokens": TOKENS, "experts_per_token": 1, "routing_policy": "sequence_hard", "format": "lexicon",
    },
    **{f"ridge, top 2, rank {rank}": {"gate_mode": "ridge", "rank": rank} for rank in RANKS},
}  # fmt: skip


def read_texts(data: Path, domain: str, split: str) -> list[str]:
    """A domain's texts in a random order that is always the same, up to a number of characters."""
    folder, field = (DOMAINS | UNSEEN)[domain]
    rows = [json.loads(line) for line in (data / folder / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]
    texts, size = [], 0
    for i in np.random.default_rng(0).permutation(len(rows)):
        text = " ".join(filter(None, (rows[i].get("title", "") if field == "text" else "", rows[i][field].strip())))
        if text and size < CHARACTERS[split]:
            texts.append(text)
            size += len(text)
    return texts


def train(model, tokenizer, texts: Iterable[str], folder: Path, steps: int, seed: int) -> None:
    """Trains the parameters of a model that are not frozen on windows of texts."""
    joined = [i for text in texts for i in (*tokenizer(text, verbose=False)["input_ids"], tokenizer.eos_token_id)]
    parts = [joined[start : start + WINDOW] for start in range(0, len(joined), WINDOW)]
    windows = [{"input_ids": part, "labels": part} for part in parts if len(part) > 1]
    arguments = TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=3e-4,
        bf16=True,
        use_cpu=DEVICE == "cpu",
        seed=seed,
        save_strategy="no",
        report_to="none",
    )
    collator = DataCollatorForSeq2Seq(tokenizer)
    Trainer(model, arguments, train_dataset=Dataset.from_list(windows), data_collator=collator).train()


@torch.no_grad()
def nats_of(model, windows: list[list[int]]) -> float:
    """The negative log-likelihood of all windows."""
    model.eval().to(DEVICE)
    total = 0.0
    for ids in windows:
        batch = torch.tensor([ids], device=DEVICE)
        total += float(model(input_ids=batch, labels=batch).loss) * (len(ids) - 1)
    return total


class Study:
    """Trains the experts of a seed, merges them, and scores every model on all domains."""

    def __init__(
        self, data: Path, work: Path, seed: int, texts: int = 40, steps: int = STEPS, base: Path | None = None
    ):
        self.work, self.seed, self.steps = work, seed, steps
        self.base = base or Path(find_packaged("smollm2"))
        self.tokenizer = AutoTokenizer.from_pretrained(self.base)
        self.texts = {name: read_texts(data, name, "train") for name in DOMAINS}
        work.mkdir(parents=True, exist_ok=True)
        for name, own in self.texts.items():
            lines = "".join(json.dumps({"text": text}) + "\n" for text in own)
            (work / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        self.windows = {}
        for name in DOMAINS | UNSEEN:
            ids = [self.tokenizer(text)["input_ids"][:WINDOW] for text in read_texts(data, name, "validation")[:texts]]
            self.windows[name] = [window for window in ids if len(window) > 1]
        self.own: dict[str, tuple[float, float]] = {}  # domain -> nats of the base and of its own expert

    def expert(self, name: str, domains: list[str], steps: int | None = None, whole: bool = False) -> Path:
        """A model that is trained on some domains, MLPs only or whole."""
        folder = self.work / f"s{self.seed}_{'whole_' if whole else ''}{name}"
        if not (folder / "config.json").exists():
            torch.manual_seed(self.seed)
            model = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32)
            for parameter, weight in model.named_parameters():
                weight.requires_grad = whole or MLP in parameter
            texts = [text for domain in domains for text in self.texts[domain]]
            train(model, self.tokenizer, texts, folder, steps or self.steps, self.seed)
            model.to(torch.bfloat16).save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
        return folder

    def row(self, model: Path | torch.nn.Module) -> dict:
        """The mean share of the experts' gain that a model keeps, of each domain, and the change of the loss on unseen texts."""
        opened = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16) if isinstance(model, Path) else model
        nats = {name: nats_of(opened, windows) for name, windows in self.windows.items()}
        if not self.own:
            base = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.bfloat16)
            for name, windows in self.windows.items():
                own = base if name in UNSEEN else AutoModelForCausalLM.from_pretrained(
                    self.expert(name, [name]), dtype=torch.bfloat16
                )  # fmt: skip
                self.own[name] = nats_of(base, windows), nats_of(own, windows)
        kept = {}
        for name in DOMAINS:
            before, expert = self.own[name]
            kept[name] = (before - nats[name]) / (before - expert)
        unseen = float(np.mean([nats[name] / self.own[name][0] - 1 for name in UNSEEN]))
        return {"kept": round(float(np.mean(list(kept.values()))), 4), "unseen": round(unseen, 4), "domains": kept}

    def compose(self, whole: bool = False, **keys) -> Path:
        """A mixture of the experts; its samples are their training texts."""
        output, specs = self.work / f"s{self.seed}_mixture", []
        for name in DOMAINS:
            prompts = [
                self.tokenizer.decode(self.tokenizer(text)["input_ids"][:WINDOW]) for text in self.texts[name][:PROMPTS]
            ]
            spec = {"source_model": str(self.expert(name, [name], whole=whole)), "name": name}
            specs.append({**spec, "samples": str(self.work / f"{name}.jsonl"), "positive_prompts": prompts})
        shutil.rmtree(output, ignore_errors=True)
        recipe = {
            "base_model": str(self.base),
            "average": "base",
            "experts": specs,
            "experts_per_token": 2,
            "seed": self.seed,
        }
        merge_tools.compose(recipe | keys, output)
        return output

    def mean(self) -> torch.nn.Module:
        """A dense model whose MLPs are the mean of the experts'."""
        model, *experts = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
            for folder in (self.base, *(self.expert(name, [name]) for name in DOMAINS))
        )
        weights = [expert.state_dict() for expert in experts]
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if MLP in name:
                    weight.copy_(torch.stack([expert[name].float() for expert in weights]).mean(0))
        return model

    def branch_train_mix(self) -> torch.nn.Module:
        """Whole experts, the mean of what is shared, and everything trained on."""
        output = self.compose(whole=True, gate_mode="random", average="mean")
        model = AutoModelForCausalLM.from_pretrained(output, output_router_logits=True, dtype=torch.float32)
        texts = [text for own in self.texts.values() for text in own]
        train(model, self.tokenizer, texts, self.work / "training", self.steps, self.seed)
        return model.to(torch.bfloat16)

    def models(self) -> dict[str, Callable[[], Path | torch.nn.Module]]:
        """Label -> makes the model."""
        mixtures = {label: lambda keys=keys: self.compose(**keys) for label, keys in MIXTURES.items()}
        return {
            "base": lambda: self.base,
            "dense, mean of the MLPs": self.mean,
            **mixtures,
            "dense, all domains together": lambda: self.expert("joint", list(DOMAINS), self.steps * len(DOMAINS)),
            "Branch-Train-MiX": self.branch_train_mix,
        }


def main(argv: list[str] | None = None) -> None:
    """Measures the models; each row is written at once and replaces the earlier one of the same model and seed."""
    parser = make_parser(__doc__, "modular_experts_seeds", "summarization/ and keyphrases/")
    parser.add_argument("--work", type=Path, required=True, help="folder for experts and mixtures")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("--only", nargs="+", default=[""], help="labels of models that begin with one of these")
    options = parser.parse_args(argv)
    for seed in options.seeds:
        study = Study(options.data, options.work.resolve(), seed)
        for label, make in study.models().items():
            if label.startswith(tuple(options.only)):
                row = study.row(make())
                print(f"{label:55}{row['kept']:8.1%}{row['unseen']:+8.1%}", flush=True)
                write(options.name, [{"model": label, "seed": seed, **row}], key=("model", "seed"), steps=STEPS)


if __name__ == "__main__":
    main()
