"""What a mixture keeps of its experts: the loss of base, experts and mixture on texts of each domain."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from run_tools.errors import expand_user
from run_tools.files import write_file
from run_tools.model_options import gpu_or_cpu

from .card import with_evaluation
from .checkpoints import Source
from .errors import MergeError
from .mixture import Mixture
from .routing import open_mixture
from .texts import read_texts
from .tuning import text_of_row

MAX_TEXTS = 200  # of a domain: enough to see an effect, and read in minutes
RESAMPLES = 1000
INTERVAL = (2.5, 97.5)  # percentiles of the resampled values
SEED = 0
DIGITS = 4


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
    base: np.ndarray = field(default_factory=lambda: np.zeros(0))
    mixture: np.ndarray = field(default_factory=lambda: np.zeros(0))
    experts: dict[str, np.ndarray] = field(default_factory=dict)

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
            "texts": count,
            "tokens": total,
            "expert": self.expert,
            "base": rounded(self.base.sum() / total),
            "experts": {name: rounded(nats.sum() / total) for name, nats in self.experts.items()},
            "mixture": rounded(self.mixture.sum() / total),
            "change": measure(self.change),
            "kept": measure(self.kept) if gains else None,
        }


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
    card: bool = False,
    on_model: Callable[[str], None] = lambda name: None,
) -> dict[str, Any]:
    """Compares a mixture with its base and its experts, which are opened one after another.

    Args:
        mixture: a mixture of merge-experts.
        domains: name of a domain -> a `.jsonl` file (rows with `text`, or with `term`, `context` and `definition`) or a `.txt` file
            with one text per line, none of which an expert was trained on. A domain with the name of an expert is that
            expert's own.
        max_length: tokens of a window, at most those of the mixture's context; longer texts are cut into windows.
        max_texts: different texts of a domain that are read, spread evenly over its file; every model reads each of them.
        sources: name of an expert, or "base" -> the folder where it is now, for those that were moved.
        device: such as "cuda"; by default a GPU if there is one.
        card: write the losses into the mixture's README.md, as a section that the next evaluation replaces.
        on_model: is told the name of each model before it is opened.

    Returns:
        `domains`: name -> `texts`, `tokens`, `expert`; the nats per token of `base`, `experts` (by name) and `mixture`; `change`, how
        much larger the mixture's loss is than the base's; and for an expert's own domain `kept`, the share of the expert's gain
        over the base that the mixture keeps. `change` and `kept` have a `value` and a bootstrap `interval` (95%) over texts. And
        `kept`, the mean over domains.

    Raises:
        MergeError: if a model or a file cannot be read, or a loss is not finite.
    """
    if not domains:
        raise MergeError("No domain was given. Give one or more: --domain NAME=FILE.")
    if max_length < 2:
        raise MergeError(f"max_length must be at least 2, got {max_length}.")
    if max_texts < 1:
        raise MergeError(f"max_texts must be at least 1, got {max_texts}.")
    opened = Mixture.open(mixture, sources)
    if not opened.gated:
        raise MergeError(
            f"{opened.folder} has no gate, so it cannot route texts (gate_mode: none). Compose it with another gate_mode."
        )
    texts = {name: read_domain(Path(path), max_texts) for name, path in domains.items()}
    base, experts = opened.open_base(), opened.open_experts()
    device = device or gpu_or_cpu()
    on_model("mixture")
    model, tokenizer = open_mixture(opened.folder)
    windows = windows_of_domains(tokenizer, texts, min(max_length, model.config.max_position_embeddings))
    check_vocabularies(windows, [base, *experts])
    found = {
        name: DomainLosses(
            np.array([sum(len(w) - 1 for w in text) for text in own]), name if name in opened.names else None
        )
        for name, own in windows.items()
    }

    def losses(model, name: str) -> dict[str, np.ndarray]:
        model.to(device)
        nats = {domain: nats_of_texts(model, own) for domain, own in windows.items()}
        if bad := [domain for domain, values in nats.items() if not np.isfinite(values).all()]:
            raise MergeError(f"The loss of {name} on the domain {bad[0]!r} is not finite. Use an earlier checkpoint.")
        return nats

    for domain, nats in losses(model, "the mixture").items():
        found[domain].mixture = nats
    on_model("base")
    for domain, nats in losses(open_dense(base), "the base").items():
        found[domain].base = nats
    for expert in experts:
        on_model(expert.name)
        for domain, nats in losses(open_dense(expert), expert.name).items():
            found[domain].experts[expert.name] = nats
    reports = {name: domain.report() for name, domain in found.items()}
    kept = [report["kept"]["value"] for report in reports.values() if report["kept"]]
    result = {"experts": opened.names, "domains": reports, "kept": rounded(np.mean(kept)) if kept else None}
    if card:
        path = opened.folder / "README.md"
        write_file(path, with_evaluation(path.read_text(encoding="utf-8") if path.is_file() else "", result))
    return result


def windows_of_domains(tokenizer, texts: Mapping[str, list[str]], max_length: int) -> dict[str, list[list[list[int]]]]:
    """Name of a domain -> its texts as windows of token ids, without texts of a single token."""
    from .gate_training import cut_windows

    found = {name: [cut_windows(tokenizer, [text], max_length) for text in own] for name, own in texts.items()}
    found = {name: [text for text in own if text] for name, own in found.items()}
    if empty := [name for name, own in found.items() if not own]:
        raise MergeError(f"The texts of the domain {empty[0]!r} are too short to predict anything. Give longer ones.")
    return found


def check_vocabularies(windows: Mapping[str, list[list[list[int]]]], sources: list[Source]) -> None:
    """Raises a `MergeError` for a token that a model has no embedding for, if an expert has added it."""
    last = max(max(window) for own in windows.values() for text in own for window in text)
    for source in sources:
        if last >= (rows := source.shape.vocab_size):
            raise MergeError(
                f"The texts have the token {last}, but the embeddings of {source.name} have {rows} rows. Leave out texts with tokens "
                "that some experts do not have."
            )


def read_domain(path: Path, limit: int = MAX_TEXTS) -> list[str]:
    """The different texts of a file, at most so many, spread evenly over it."""
    path = expand_user(path)
    if not path.is_file():
        raise MergeError(f"The file {str(path)!r} does not exist. Give a .jsonl or .txt file.")
    texts = list(
        dict.fromkeys(t.strip() for t in read_texts(path, text_of_row, "text, or term, context and definition"))
    )
    if not texts:
        raise MergeError(f"{path} has no texts. Add some.")
    chosen = np.linspace(0, len(texts) - 1, min(len(texts), limit)).round().astype(int)
    return [texts[i] for i in chosen]


def open_dense(source: Source):
    """A dense model, or an adapter over one, in eval mode."""
    from transformers import AutoModelForCausalLM

    from run_tools.model_loading import open_model

    model = open_model(AutoModelForCausalLM, source.checkpoint.folder).eval()
    if source.adapter is None:
        return model
    from peft import PeftModel

    return PeftModel.from_pretrained(model, source.folder).eval()


def nats_of_texts(model, texts: list[list[list[int]]]) -> np.ndarray:
    """(N,): the negative log-likelihood of each text, given as windows of token ids."""
    from .gate_training import nats_of_windows

    windows = [window for text in texts for window in text]
    owners = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
    return np.bincount(owners, weights=nats_of_windows(model, windows), minlength=len(texts))


def plot_losses(result: dict[str, Any], path: str | Path) -> None:
    """Draws the result of `evaluate` into an image file: a line from the loss of the base to that of its own expert for each domain,
    with the mixture on it. Raises an `ImportError` without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("The plot needs matplotlib. Install it with: pip install 'lexperts[merge]'") from error
    domains = result["domains"]
    figure = Figure(figsize=(7, 1.4 + 0.45 * len(domains)), layout="constrained")
    axis = figure.subplots()
    for y, (name, row) in enumerate(domains.items()):
        own = row["experts"].get(name)
        axis.hlines(
            y, min(row["base"], row["mixture"] if own is None else own), row["base"], color="0.8", linewidth=5, zorder=1
        )
        points = [
            ("base", row["base"], "0.45", "o"),
            ("own expert", own, "C0", "o"),
            ("mixture", row["mixture"], "C1", "D"),
        ]
        for label, x, colour, marker in points:
            if x is not None:
                axis.scatter(x, y, color=colour, marker=marker, zorder=2, label=label if y == 0 else None)
        if row["kept"]:
            axis.annotate(
                f"keeps {row['kept']['value']:.0%}", (row["mixture"], y), (0, 7), textcoords="offset points", fontsize=8
            )
    axis.set_yticks(range(len(domains)), list(domains))
    axis.set_ylim(len(domains) - 0.4, -0.8)
    axis.set_xlabel("loss on held-out texts (nats per token)")
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
