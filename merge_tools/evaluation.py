"""What a mixture keeps of its experts: the loss of base, experts and mixture on texts of each domain."""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from run_tools.errors import UserError
from run_tools.loading import open_model, open_tokenizer

from .mixture import Mixture
from .texts import read_domain

MAX_TEXTS = 200  # of a domain: enough to see an effect, and read in minutes
RESAMPLES = 1000
INTERVAL = (2.5, 97.5)  # percentiles of the resampled values
SEED = 0
DIGITS = 4
BATCH_TOKENS = 4096  # of a forward pass, with padding
Windows = list[list[int]]  # token ids of pieces of a text


@dataclass
class DomainLosses:
    """The losses of all models on the texts of one domain, as the negative log-likelihood of each text in nats, (N,).

    Attributes:
        tokens: (N,), the predicted tokens of each text.
        expert: the name of the expert of this domain, or `None`.
        base, mixture: nats of the two.
        experts: name -> nats.
    """

    tokens: np.ndarray
    expert: str | None
    base: np.ndarray
    mixture: np.ndarray
    experts: dict[str, np.ndarray]

    def kept(self, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        """The share of the expert's gain that the mixture keeps, (base - mixture) / (base - expert), on the texts of `rows`.

        Tokens weigh alike, so it is the same for sums of nats as for nats per token.
        """
        base, mixture, expert = (n[rows].sum(-1) for n in (self.base, self.mixture, self.experts[self.expert or ""]))
        return (base - mixture) / (base - expert)

    def change(self, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        """How much larger the mixture's loss is than the base's, as a share of it."""
        return self.mixture[rows].sum(-1) / self.base[rows].sum(-1) - 1

    def report(self) -> dict[str, Any]:
        """The losses; `kept` if the expert is better than the base, and `change`, each with an interval over the texts."""
        count, total = len(self.tokens), int(self.tokens.sum())
        rows = np.random.default_rng(SEED).integers(count, size=(RESAMPLES, count))
        gains = self.expert is not None and self.experts[self.expert].sum() < self.base.sum()

        def measure(of: Callable) -> dict[str, Any]:
            low, high = np.percentile(of(rows), INTERVAL)
            return {"value": rounded(of()), "interval": [rounded(low), rounded(high)]}

        return {
            "texts": count, "tokens": total, "expert": self.expert,
            "base": rounded(self.base.sum() / total), "mixture": rounded(self.mixture.sum() / total),
            "experts": {name: rounded(nats.sum() / total) for name, nats in self.experts.items()},
            "change": measure(self.change), "kept": measure(self.kept) if gains else None,
        }  # fmt: skip


def rounded(value: Any) -> float:
    """A number for a report."""
    return round(float(value), DIGITS)


def evaluate(
    mixture: str | Path,
    domains: Mapping[str, str | Path],
    *,
    max_length: int = 512,
    max_texts: int = MAX_TEXTS,
    sources: Mapping[str, str | Path] | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """Compares a mixture with its base and its experts, which are opened one after another.

    Args:
        mixture: a mixture of Lexperts.
        domains: name of a domain -> a `.jsonl` file (rows with `text`, or with `term`, `context` and `definition`) or a `.txt` file
            with one text per line, none of which an expert was trained on. A domain with the name of an expert is its own.
        max_length: tokens of a window, at most those of the mixture's context; longer texts are cut into windows.
        max_texts: different texts of a domain that are read, spread evenly over its file.
        sources: name of an expert, or "base" -> the folder where it is now, for those that were moved.
        device: such as "cuda"; by default a GPU if there is one.

    Returns:
        `domains`: name -> `texts`, `tokens`, `expert`; the nats per token of `base`, `experts` (by name) and `mixture`; `change`, how
        much larger the mixture's loss is than the base's; and for an expert's own domain `kept`, the share of the expert's gain
        over the base that the mixture keeps. `change` and `kept` have a `value` and a bootstrap `interval` (95%) over texts. And
        `kept`, the mean over domains.

    Raises:
        UserError: if a model or a file cannot be read, or a loss is not finite.
    """
    opened = Mixture(mixture, sources)
    if not opened.gates():
        raise UserError(f"{opened.folder} has no gate. Compose it with another gate_mode than none.")
    texts = {name: spread(read_domain(path), max_texts) for name, path in domains.items()}
    models = [opened.source, *(opened.open_source(name) for name in ("base", *opened.names))]
    length = min(max_length, opened.source.config.max_position_embeddings)
    windows = cut_domains(open_tokenizer(opened.folder), texts, length)
    last = max(max(window) for own in windows.values() for text in own for window in text)
    for model in models:
        if last >= (rows := model.specs["model.embed_tokens.weight"][1][0]):
            raise UserError(f"The texts have the token {last}, but the embeddings of {model.name} have {rows} rows.")
    folders = tqdm(dict.fromkeys(model.folder for model in models), desc="losses", unit="model", disable=None)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    nats = {folder: losses_of(folder, windows, device) for folder in folders}
    found = {}
    for name, own in windows.items():
        of_mixture, of_base, *of_experts = (nats[model.folder][name] for model in models)
        experts, expert = dict(zip(opened.names, of_experts, strict=True)), name if name in opened.names else None
        found[name] = DomainLosses(tokens_of_texts(own), expert, of_base, of_mixture, experts).report()
    kept = [report["kept"]["value"] for report in found.values() if report["kept"]]
    return {"experts": opened.names, "domains": found, "kept": rounded(np.mean(kept)) if kept else None}


def spread(texts: list[str], limit: int) -> list[str]:
    """At most `limit` of the texts, spread evenly over them."""
    return [texts[i] for i in np.linspace(0, len(texts) - 1, min(len(texts), limit)).round().astype(int)]


def losses_of(folder: Path, windows: Mapping[str, list[Windows]], device: str) -> dict[str, np.ndarray]:
    """Name of a domain -> the nats of its texts under the model in a folder."""
    from transformers import AutoModelForCausalLM

    model = open_model(AutoModelForCausalLM, folder).to(device)
    return {domain: nats_of_texts(model, own) for domain, own in windows.items()}


def cut_domains(tokenizer, texts: Mapping[str, list[str]], max_length: int) -> dict[str, list[Windows]]:
    """Name of a domain -> its texts, each as windows of at most `max_length` tokens.

    Windows of one token are left out, because nothing is predicted from them, and so are texts without longer ones. Raises a
    `UserError` for no domain, and for one without texts that are left.
    """
    if not texts:
        raise UserError("No domain was given. Give one or more: --domain NAME=FILE.")
    found = {}
    for name, own in texts.items():
        ids = [tokenizer(text.strip(), verbose=False)["input_ids"] for text in own]
        windows = [[text[i : i + max_length] for i in range(0, len(text), max_length)] for text in ids]
        found[name] = [kept for text in windows if (kept := [window for window in text if len(window) > 1])]
        if not found[name]:
            raise UserError(f"The texts of the domain {name!r} are too short to predict anything. Give longer ones.")
        if short := len(own) - len(found[name]):
            warnings.warn(f"{short} texts of the domain {name!r} have one token only, and do not count.", stacklevel=3)
    return found


def pad(windows: Windows) -> dict[str, torch.Tensor]:
    """A batch of windows, padded on the right; labels are the ids, without a loss on padding."""
    width = max(map(len, windows))
    mask = torch.tensor([[1] * len(window) + [0] * (width - len(window)) for window in windows])
    ids = torch.tensor([window + [0] * (width - len(window)) for window in windows])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@torch.no_grad()
def nats_of_texts(model, texts: list[Windows]) -> np.ndarray:
    """(N,): the negative log-likelihood of each text, summed over all tokens of its windows but the first of each."""
    model.eval()
    nats = np.zeros(len(texts))
    left = sorted(((window, i) for i, text in enumerate(texts) for window in text), key=lambda pair: -len(pair[0]))
    while left:
        count = max(BATCH_TOKENS // len(left[0][0]), 1)
        chosen, left = left[:count], left[count:]
        batch = {name: tensor.to(model.device) for name, tensor in pad([window for window, _ in chosen]).items()}
        labels = batch.pop("labels")[:, 1:]
        logits = model(**batch, use_cache=False).logits[:, :-1]
        for (_, i), row, own in zip(chosen, logits, labels, strict=True):
            nats[i] += cross_entropy(row.float(), own, reduction="sum").item()
    if not np.isfinite(nats).all():
        raise UserError(f"A loss of {model.name_or_path} is not finite. Use an earlier checkpoint.")
    return nats


def tokens_of_texts(texts: list[Windows]) -> np.ndarray:
    """(N,): the number of predicted tokens of each text."""
    return np.array([sum(len(window) - 1 for window in text) for text in texts])


def perplexities(model, domains: Mapping[str, list[Windows]]) -> dict[str, float]:
    """Perplexity of the texts of each domain, and of all of them together."""
    sums = {name: (nats_of_texts(model, own).sum(), tokens_of_texts(own).sum()) for name, own in domains.items()}
    sums["all"] = np.sum(list(sums.values()), axis=0)
    return {name: math.exp(min(nats / tokens, 700)) for name, (nats, tokens) in sums.items()}
