"""What the deputies of a MoeSumm model do, on the test splits of data sets that it knows (MoeSumm, Sect. 5.2).

    python examples/moesumm/analyse.py --model runs/moesumm --datasets mail=data/mail news=data/news \
        --output_dir runs/analysis

Each part gives tables (CSV) and plots (PNG) in the output folder; --parts takes some of them. Deputies count from 0.

- shares: of the tokens that each deputy receives, by data set, side and layer, and their mean gate (Figure 3, Table 7).
  The decoder reads the reference summaries; padding is not counted. Every layer has deputies of its own, so that deputy 0
  of one layer has nothing in common with deputy 0 of another: shares of all layers together can be even where each layer
  is one-sided. Cramer's V says how much the data set decides about the deputy, layer by layer: 0 nothing, 1 all.
- forced: summaries of the same texts by each deputy alone, by the model's own choice, and by the main expert without
  deputies: their length and ROUGE. The summaries are kept; interrupted, the same command goes on.
- lengths: words of a summary against the limit of decoding, with and without deputies (Figure 5a). They are counted as
  they were written, before one that ran into the limit is cut at its last sentence end.
- attributes: coverage, density and compression (Grusky et al. 2018) of each data set beside the shares of its deputies,
  and both as points of a plane (Figure 4; the shares of all layers of both sides, by PCA).
"""

import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import numpy as np
import pandas as pd
import torch
from attributes import LENGTHS, compare_data_sets, mean_words, plot_projections, say_unevenness, shares_of, unevenness
from cli_args import parse_arguments, run_or_exit
from datasets import Dataset
from matplotlib import colormaps
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from run_folder import fingerprint
from scores import rouge
from sources import DataArguments, named, one_split, read_sources
from summaries import CHUNK, SummaryFile, Writing, open_summariser, read_summaries
from tqdm import tqdm
from transformers import AutoConfig

from keyphrase_tools.opening import opening
from modeling_moesumm import MoeSummCollator, MoeSummConfig
from modeling_moesumm.summarizing_moesumm import Summarizer

PARTS = ("shares", "forced", "lengths", "attributes")
SIDES = ("encoder", "decoder")
OWN, MAIN, REFERENCE = "own choice", "main expert alone", "reference"
ALL = "all together"
ROUGE = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
# Okabe and Ito's, told apart by colour-blind readers
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")


@dataclass
class AnalysisArguments:
    model: str = field(metadata={"help": "folder or Hub id of a MoeSumm model"})
    datasets: list[str] = field(metadata={"help": "name=PLACE, as in train.py; names that the model knows"})
    document_column: str | None = field(default=None, metadata={"help": "otherwise found among the usual names"})
    summary_column: str | None = field(default=None, metadata={"help": "likewise"})
    split: str = field(default="test", metadata={"help": "that is read"})
    max_rows: int | None = field(default=200, metadata={"help": "texts of each data set, the first ones"})
    parts: list[str] = field(default_factory=lambda: list(PARTS), metadata={"help": " ".join(PARTS)})
    output_dir: str = field(default="runs/analysis", metadata={"help": "for tables, plots and summaries"})
    num_beams: int = field(default=4, metadata={"help": "of the beam search"})
    summary_length: int | None = field(
        default=None, metadata={"help": "tokens of a summary, at most; otherwise what the model was saved with, or 256"}
    )
    batch_size: int = field(default=8, metadata={"help": "texts that are read at once"})
    traceback: bool = field(default=False, metadata={"help": "show the traceback of an error"})

    def __post_init__(self):
        unknown = [part for part in self.parts if part not in PARTS]
        if unknown:
            raise ValueError(f"--parts {unknown[0]!r} is not known. Use some of {', '.join(PARTS)}.")


def check_model(config, args: AnalysisArguments):
    """Raises a `ValueError` for a model without deputies, and for data sets that it does not know."""
    if not isinstance(config, MoeSummConfig):
        raise ValueError(
            f"{args.model} is a {config.model_type!r} model, which has no deputies. Pass a MoeSumm model, as train.py "
            "makes one."
        )
    names = [named(given, "--datasets")[0] for given in args.datasets]
    unknown = [name for name in names if name not in config.datasets]
    if unknown:
        raise ValueError(
            f"{args.model} does not know {', '.join(map(repr, unknown))}, only {', '.join(map(repr, config.datasets))}. "
            "Name each data set as it was named in training."
        )


def writers(config: MoeSummConfig) -> dict[str, dict]:
    """Who writes summaries -> the option that makes it so; FlatMoE has no main expert."""
    deputies = {f"deputy {i}": {"force_deputy": i} for i in range(config.num_deputies)}
    return {OWN: {}, **deputies} | ({MAIN: {"main_expert_only": True}} if config.main_expert else {})


# --- measuring ---


@torch.no_grad()
def count_tokens(name: str, rows: Dataset, model, tokenizer, batch_size: int) -> pd.DataFrame:
    """A row for each side, layer and deputy, with the real tokens that took it, and their gates' sum."""
    collator = MoeSummCollator(tokenizer, model, on_long="truncate")
    N, sums = model.config.num_deputies, dict.fromkeys(SIDES, 0.0)
    by_length = sorted(rows, key=lambda row: len(row["document"]), reverse=True)
    for start in tqdm(range(0, len(rows), batch_size), desc=f"{name}, shares", unit="batch"):
        batch = {key: x.to(model.device) for key, x in collator(by_length[start : start + batch_size]).items()}
        labels = batch.pop("labels")
        targets = model.prepare_decoder_input_ids_from_labels(labels)
        outputs = model(**batch, decoder_input_ids=targets, output_deputies=True, use_cache=False)
        for side, real in zip(SIDES, (batch["attention_mask"] > 0, labels != -100), strict=True):
            layers = zip(outputs[f"{side}_deputies"], outputs[f"{side}_gates"], strict=True)
            sums[side] += np.stack([tokens_and_gates(deputy[real], gate[real], N) for deputy, gate in layers])
    return pd.DataFrame(
        {"data set": name, "side": side, "layer": layer, "deputy": i, "tokens": int(tokens), "gates": gates}
        for side in SIDES
        for layer, found in enumerate(sums[side])  # (2, N)
        for i, (tokens, gates) in enumerate(found.T)
    )


def tokens_and_gates(deputy: torch.Tensor, gate: torch.Tensor, N: int) -> np.ndarray:
    """n tokens' deputy and gate (n,) -> how many each deputy has, and their gates' sum, (2, N)."""
    tokens = torch.bincount(deputy, minlength=N)
    return np.stack([tokens.cpu(), torch.bincount(deputy, gate.double(), minlength=N).cpu()])


def limits_up_to(longest: int) -> list[int]:
    """16, 32, 64 and so on, and the last of all."""
    powers = [2**k for k in range(4, 31)]
    return [*(limit for limit in powers if limit < longest), longest]


class UncutSummarizer(Summarizer):
    """Its summaries stay as they were written also where the limit stopped them; `stopped` counts these."""

    stopped = 0

    def read(self, ids: list[int], longest: int) -> str:
        ends = [place for place, token in enumerate(ids) if place and token in self.eos]
        self.stopped += not ends or ends[0] + 1 >= longest
        return super().read(ids, longest + 1)  # as if there were room


class Analysis:
    """A model, the texts, and the four parts; each writes its files and returns what is to be said."""

    def __init__(self, args: AnalysisArguments):
        with opening("--model", args.model):
            config = AutoConfig.from_pretrained(args.model)
        check_model(config, args)
        self.args, self.output = args, Path(args.output_dir)
        data = DataArguments(args.datasets, args.document_column, args.summary_column, max_rows=args.max_rows)
        self.test = one_split(read_sources(data), args.split, data)
        self.model, self.tokenizer = open_summariser(args.model)
        # refuses lengths and batches that cannot be, before anything is written
        write = Summarizer(self.model, self.tokenizer, args.summary_length, batch_size=args.batch_size)
        self.summary_length = write.longest
        self.output.mkdir(parents=True, exist_ok=True)

    def write(self, frame: pd.DataFrame, name: str):
        frame.to_csv(self.output / name, index=False)

    @cached_property
    def counts(self) -> pd.DataFrame:
        options = (self.model, self.tokenizer, self.args.batch_size)
        return pd.concat([count_tokens(name, rows, *options) for name, rows in self.test.items()], ignore_index=True)

    def shares(self) -> str:
        layers = shares_of(self.counts, ["data set", "side", "layer"])
        both = pd.concat([self.counts, self.counts.assign(side="both")])
        sets, overall = shares_of(both, ["data set", "side"]), shares_of(both, ["side"])
        uneven = unevenness(self.counts)
        self.write(layers, "shares.csv")
        self.write(sets, "shares_by_data_set.csv")
        self.write(overall, "shares_overall.csv")
        self.write(uneven, "unevenness.csv")
        plot_shares(self.output / "shares.png", sets, overall)
        plot_layers(self.output / "shares_by_layer.png", layers)
        table = pd.concat([sets, overall.assign(**{"data set": ALL})]).assign(share=lambda f: 100 * f["share"])
        table = table.pivot_table(index=["data set", "side"], columns="deputy", values="share", sort=False)
        table = table.rename(columns="deputy {}".format).reset_index()
        text = table.to_markdown(index=False, floatfmt=".1f")
        return f"Per cent of the tokens that each deputy receives\n\n{text}\n\n{say_unevenness(overall, uneven)}"

    def forced(self) -> str:
        args, rows = self.args, []
        writing = Writing(
            args.num_beams, self.summary_length, on_long="truncate", generation_batch_size=args.batch_size
        )
        for name, texts in self.test.items():
            for who, options in writers(self.model.config).items():
                path = self.output / "summaries" / f"{name}-{who.replace(' ', '_')}.jsonl"
                file = SummaryFile(path, texts, writing, fingerprint(args.model), name, **options)
                file.write(self.model, self.tokenizer)
                predictions, references = read_summaries(path)
                found = rouge(predictions, references)
                scores = {title: found[metric].mean() for metric, title in ROUGE.items()}
                own = {"data set": name, "summaries by": who, "texts": len(texts)}
                rows.append({**own, **mean_words(predictions), **scores})
            own = {"data set": name, "summaries by": REFERENCE, "texts": len(texts)}
            rows.append({**own, **mean_words(texts["summary"])})
        frame = pd.DataFrame(rows)
        self.write(frame, "forced.csv")
        plot_forced(self.output / "forced.png", frame)
        shown = frame.astype(object).where(frame.notna(), None)  # references have no ROUGE
        text = shown.to_markdown(index=False, floatfmt=".2f", missingval="")
        return f"Summaries by each deputy alone (ROUGE: F1 in per cent, stemmed words)\n\n{text}"

    def lengths(self) -> str:
        rows = []
        options = {who: given for who, given in writers(self.model.config).items() if who in (OWN, MAIN)}
        limits = limits_up_to(self.summary_length)
        total = sum(map(len, self.test.values())) * len(options) * len(limits)
        with tqdm(total=total, desc="lengths", unit="text") as bar:
            for name, texts in self.test.items():
                for who, given in options.items():
                    for limit in limits:
                        own = {"data set": name, "summaries by": who, "limit in tokens": limit}
                        rows.append(own | self.length(name, texts, limit, given, bar))
        frame = pd.DataFrame(rows)
        references = {name: mean_words(texts["summary"]) for name, texts in self.test.items()}
        frame["words a reference"] = frame["data set"].map({n: words[LENGTHS[0]] for n, words in references.items()})
        self.write(frame, "lengths.csv")
        plot_lengths(self.output / "lengths.png", frame)
        table = frame.pivot_table(
            index=["data set", "summaries by"], columns="limit in tokens", values=LENGTHS[0], sort=False
        )
        text = table.rename(columns="limit {}".format).reset_index().to_markdown(index=False, floatfmt=".1f")
        return f"Words a summary against the limit of decoding, in tokens\n\n{text}"

    def length(self, name: str, texts: Dataset, limit: int, options: dict, bar) -> dict[str, float]:
        size = self.args.batch_size
        options = {"num_beams": self.args.num_beams, "on_long": "truncate", "batch_size": size, **options}
        summarize, written = UncutSummarizer(self.model, self.tokenizer, limit, **options), []
        for start in range(0, len(texts), CHUNK * size):
            chunk = texts[start : start + CHUNK * size]["document"]
            written += summarize(chunk, name, first=start)
            bar.update(len(chunk))
        return {
            LENGTHS[0]: mean_words(written)[LENGTHS[0]],
            "share stopped by the limit": summarize.stopped / len(texts),
        }

    def attributes(self) -> str:
        frame, projections = compare_data_sets(self.test, self.counts)
        said = "There are fewer than three data sets: no projection of them says anything, and none was drawn."
        if projections:
            plot_projections(self.output / "attributes.png", list(frame["data set"]), projections)
            said = "The data sets as points of a plane: attributes.png"
        self.write(frame, "attributes.csv")
        shown = frame[[column for column in frame if "component" not in column]]
        return f"Attributes of the data sets\n\n{shown.to_markdown(index=False, floatfmt='.2f')}\n\n{said}"


# --- plots ---


def palette(number: int) -> list[str]:
    if number <= len(COLOURS):
        return list(COLOURS[:number])
    return [to_hex(colormaps["viridis"](i / (number - 1))) for i in range(number)]


def ink(colour) -> str:
    """What can be read on this colour."""
    return "black" if np.dot(to_rgb(colour), (0.299, 0.587, 0.114)) > 0.5 else "white"


def save(figure: Figure, path: Path, title: str):
    """With the legend of the first panel below, if it has one."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 7), frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def plot_shares(path: Path, sets: pd.DataFrame, overall: pd.DataFrame):
    """Stacked bars, a panel a side, a bar a data set."""
    table = pd.concat([sets, overall.assign(**{"data set": ALL})])
    names, N = list(table["data set"].unique()), overall["deputy"].nunique()
    figure = Figure(figsize=(10, 1.7 + 0.45 * len(names)), layout="constrained")
    axes = figure.subplots(1, len(SIDES), sharey=True)
    for axis, side in zip(axes, SIDES, strict=True):
        values = table[table["side"] == side].pivot(index="data set", columns="deputy", values="share").loc[names]
        left = np.zeros(len(names))
        for i, colour in enumerate(palette(N)):
            shares = 100 * values[i].to_numpy()
            axis.barh(names, shares, left=left, color=colour, label=f"deputy {i}", edgecolor="white", height=0.75)
            for y, (share, start) in enumerate(zip(shares, left, strict=True)):
                if share >= 7:
                    text = {"ha": "center", "va": "center", "color": ink(colour), "fontsize": 9}
                    axis.text(start + share / 2, y, f"{share:.0f}", **text)
            left += shares
        axis.set(title=side, xlim=(0, 100), xlabel="per cent of the tokens, all layers")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    save(figure, path, "Share of the tokens that each deputy receives")


def plot_layers(path: Path, layers: pd.DataFrame):
    """A heat map a deputy: data sets and layers."""
    names, N = list(layers["data set"].unique()), layers["deputy"].nunique()
    depth = {side: layers.loc[layers["side"] == side, "layer"].nunique() for side in SIDES}
    columns = [(side, layer) for side in SIDES for layer in range(depth[side])]
    size = (max(3 + 0.48 * len(columns), 5), 1.4 + N * (0.7 + 0.34 * len(names)))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(N, 1, sharex=True, squeeze=False)[:, 0]
    for i, axis in enumerate(axes):
        own = layers[layers["deputy"] == i].pivot(index="data set", columns=["side", "layer"], values="share")
        values = 100 * own.loc[names, columns].to_numpy()  # (E, layers of both sides)
        image = axis.imshow(values, vmin=0, vmax=100, cmap="cividis", aspect="auto")
        for (y, x), value in np.ndenumerate(values):
            colour = ink(image.cmap(value / 100)[:3])
            axis.text(x, y, f"{value:.0f}", ha="center", va="center", color=colour, fontsize=8)
        axis.axvline(depth["encoder"] - 0.5, color="white", linewidth=3)
        axis.set_yticks(range(len(names)), names)
        axis.set_title(f"deputy {i}", loc="left", fontsize=10)
    axes[-1].set_xticks(range(len(columns)), [f"{side[0]}{layer}" for side, layer in columns])
    axes[-1].set_xlabel("layer (e encoder, d decoder)")
    figure.colorbar(image, ax=list(axes), label="per cent of the layer's tokens", aspect=12 * N)
    save(figure, path, "Share of the tokens by layer")


def plot_forced(path: Path, frame: pd.DataFrame):
    """A panel a measure, a group of bars a data set; references as black lines."""
    names = list(frame["data set"].unique())
    who = [name for name in frame["summaries by"].unique() if name != REFERENCE]
    deputies = [name for name in who if name not in (OWN, MAIN)]
    colours = {OWN: "#333333", **dict(zip(deputies, palette(len(deputies)), strict=True)), MAIN: "#BBBBBB"}
    measures, height = [*LENGTHS, *ROUGE.values()], 0.8 / len(who)
    figure = Figure(figsize=(13, 1.8 + 0.17 * len(names) * (len(who) + 1)), layout="constrained")
    axes = figure.subplots(1, len(measures), sharey=True)
    for axis, measure in zip(axes, measures, strict=True):
        table = frame.pivot(index="data set", columns="summaries by", values=measure).loc[names]
        for k, name in enumerate(who):
            y = np.arange(len(names)) + (k - (len(who) - 1) / 2) * height
            axis.barh(y, table[name], height, color=colours[name], label=name)
        if measure in LENGTHS:
            y = np.arange(len(names))
            axis.vlines(table[REFERENCE], y - 0.44, y + 0.44, color="black", linewidth=2, label=REFERENCE)
        axis.set_title(measure, fontsize=10)
        axis.margins(y=0.02)
        axis.set_xlim(0, 1.05 * max(table.max(axis=None), 1))
        axis.set_xlabel("words" if measure in LENGTHS else "F1, per cent")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    save(figure, path, "Summaries with one deputy forced on all tokens")


def plot_lengths(path: Path, frame: pd.DataFrame):
    """A panel a data set, a line for each of those who write."""
    names, limits = list(frame["data set"].unique()), sorted(frame["limit in tokens"].unique())
    # the last limit stands near the one before, unless it is a power of 2
    labels = [str(a) if b > 1.4 * a else "" for a, b in zip(limits, [*limits[1:], 2 * limits[-1]], strict=True)]
    wide = min(len(names), 3)
    high = -(-len(names) // wide)
    figure = Figure(figsize=(max(3.6 * wide, 5), 1.4 + 2.6 * high), layout="constrained")
    axes = list(figure.subplots(high, wide, squeeze=False).flat)
    for axis, name in zip(axes, names, strict=False):
        own = frame[frame["data set"] == name]
        for who, colour, marker in ((OWN, COLOURS[0], "o"), (MAIN, COLOURS[1], "s")):
            line = own[own["summaries by"] == who]
            if len(line):
                label = "with deputies" if who == OWN else MAIN
                axis.plot(line["limit in tokens"], line[LENGTHS[0]], color=colour, marker=marker, label=label)
        axis.axhline(own["words a reference"].iloc[0], color="0.4", linestyle="--", label="references")
        axis.set_xscale("log", base=2)
        axis.set_xticks(limits, labels)
        axis.minorticks_off()
        axis.set(xlabel="limit of decoding, tokens", ylabel=LENGTHS[0])
        axis.set_title(name, fontsize=10)
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[len(names) :]:
        axis.set_visible(False)
    save(figure, path, "Length of the summaries against the limit of decoding")


def run(args: AnalysisArguments):
    analysis = Analysis(args)
    for part in PARTS:
        if part in args.parts:
            print(f"\n{getattr(analysis, part)()}", flush=True)
    print(f"\nTables and plots are in {analysis.output}")


def main():
    (args,) = parse_arguments((AnalysisArguments,), __doc__)
    run_or_exit(run, args, traceback=args.traceback)


if __name__ == "__main__":
    main()
