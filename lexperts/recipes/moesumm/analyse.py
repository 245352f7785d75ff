r"""Shows what the deputies of a MoeSumm model specialise in, on test splits of its datasets (MoeSumm, Sect. 5.2).

    lexperts evaluate moesumm-deputies --model runs/moesumm --datasets mail=data/mail news=data/news \
        --output-dir runs/analysis

Each part writes tables (CSV) and plots (PNG) to the output folder; --parts selects some. Deputies are counted from 0.

- shares: the share of tokens that each deputy receives, by data set, side and layer, and their mean gate (Figure 3, Table 7).
  The decoder reads the reference summaries; padding is not counted. Deputy 0 of one layer is unrelated to deputy 0 of another
  layer, so shares over all layers can be even although each layer is one-sided. Cramer's V measures for each layer how strongly
  deputy and data set are associated: 0 not at all, 1 completely.
- forced: summaries of the same texts by each deputy, by the model's own routing, and by the main expert without deputies, with
  their lengths and ROUGE. The summaries are kept; an interrupted command resumes when it is started again.
- lengths: words of a summary against the decoding limit, with and without deputies (Figure 5a), counted before a summary that
  reached the limit is cut at its last sentence end.
- attributes: coverage, density and compression (Grusky et al. 2018) of each data set beside the shares of its deputies, and
  both projected to a plane by PCA (Figure 4; the shares of all layers of both sides).
"""

from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from datasets import Dataset
from matplotlib import colormaps
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from tqdm import tqdm

from keyphrase_tools.loading import describe_load_errors
from modeling_moesumm import DataCollatorForMoeSumm, MoeSummConfig
from modeling_moesumm.generation_moesumm import Summarizer
from run_tools.errors import RESUME
from run_tools.fingerprints import fingerprint
from run_tools.model_loading import open_config

from ..common.arguments import command, parse_name_place
from .arguments import PARTS, AnalysisArguments, DataArguments, GenerationArguments
from .attributes import (
    LENGTHS,
    compare_data_sets,
    deputy_shares,
    describe_unevenness,
    mean_words,
    plot_projections,
    unevenness,
)
from .data import load_sources, require_split
from .scores import rouge
from .summary_file import CHUNK, SummaryFile, load_summarizer, read_summaries

SIDES = ("encoder", "decoder")
ROUTED, MAIN, REFERENCE = "own choice", "main expert alone", "reference"
ALL = "all together"
ROUGE = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
# the palette of Okabe and Ito, for colour-blind readers
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")


def check_model(config, args: AnalysisArguments):
    """Raises a `ValueError` for a model without deputies, and for data sets that it does not have."""
    if not isinstance(config, MoeSummConfig):
        raise ValueError(
            f"--model {args.model} is a {config.model_type!r} model, which has no deputies. Use a MoeSumm model."
        )
    names = [parse_name_place(source, "--datasets")[0] for source in args.datasets]
    unknown = [name for name in names if name not in config.datasets]
    if unknown:
        raise ValueError(
            f"--model {args.model} has no datasets {', '.join(map(repr, unknown))}, only "
            f"{', '.join(map(repr, config.datasets))}. Use the names from training."
        )


def routing_options(config: MoeSummConfig) -> dict[str, dict]:
    """Options of generation for the model's own routing, each deputy, and the main expert, which FlatMoE does not have."""
    deputies = {f"deputy {i}": {"deputy_id": i} for i in range(config.num_deputies)}
    return {ROUTED: {}, **deputies} | ({MAIN: {"main_expert_only": True}} if config.main_expert else {})


# --- measuring ---


@torch.no_grad()
def count_tokens(name: str, rows: Dataset, model, tokenizer, batch_size: int) -> pd.DataFrame:
    """A row for each side, layer and deputy, with the number of its tokens without padding, and the sum of their gates."""
    collator = DataCollatorForMoeSumm(tokenizer, model, on_long="truncate")
    N, sums = model.config.num_deputies, dict.fromkeys(SIDES, 0.0)
    by_length = sorted(rows, key=lambda row: len(row["document"]), reverse=True)
    for start in tqdm(range(0, len(rows), batch_size), desc=f"{name}, shares", unit="batch"):
        batch = {key: x.to(model.device) for key, x in collator(by_length[start : start + batch_size]).items()}
        labels = batch.pop("labels")
        targets = model.prepare_decoder_input_ids_from_labels(labels)
        outputs = model(**batch, decoder_input_ids=targets, output_router_indices=True, use_cache=False)
        for side, real in zip(SIDES, (batch["attention_mask"] > 0, labels != -100), strict=True):
            layers = zip(outputs[f"{side}_expert_indices"], outputs[f"{side}_expert_weights"], strict=True)
            sums[side] += np.stack([tokens_and_gates(deputy[real], gate[real], N) for deputy, gate in layers])
    return pd.DataFrame(
        {"data set": name, "side": side, "layer": layer, "deputy": i, "tokens": int(tokens), "gates": gates}
        for side in SIDES
        for layer, sums_of_layer in enumerate(sums[side])  # (2, N)
        for i, (tokens, gates) in enumerate(sums_of_layer.T)
    )


def tokens_and_gates(deputy: torch.Tensor, gate: torch.Tensor, N: int) -> np.ndarray:
    """The number of tokens and the sum of the gates of each deputy `(2, N)`, for deputies and gates of tokens `(n,)`."""
    tokens = torch.bincount(deputy, minlength=N)
    return np.stack([tokens.cpu(), torch.bincount(deputy, gate.double(), minlength=N).cpu()])


def limits_up_to(longest: int) -> list[int]:
    """16, 32, 64 and so on, up to and including `longest`."""
    powers = [2**k for k in range(4, 31)]
    return [*(limit for limit in powers if limit < longest), longest]


class UncutSummarizer(Summarizer):
    """Does not cut summaries that reached the length limit; `num_stopped` counts them."""

    num_stopped = 0

    def decode(self, ids: list[int], max_length: int) -> str:
        """The whole text of generated tokens."""
        ends = [index for index, token in enumerate(ids) if index and token in self.eos]
        self.num_stopped += not ends or ends[0] + 1 >= max_length
        return super().decode(ids, max_length + 1)


class Analysis:
    """A model, the texts, and the four parts of the analysis; each writes its files and returns its table as text."""

    def __init__(self, args: AnalysisArguments):
        with describe_load_errors("--model", args.model):
            config = open_config(args.model)
        check_model(config, args)
        self.args, self.output = args, Path(args.output_dir)
        data = DataArguments(args.datasets, args.document_column, args.summary_column, max_rows=args.max_rows)
        self.test = require_split(load_sources(data), args.split, data)
        self.model, self.tokenizer = load_summarizer(args.model)
        # raises errors for invalid lengths and batch sizes before anything is written
        summarizer = Summarizer(self.model, self.tokenizer, args.summary_length, batch_size=args.batch_size)
        self.summary_length = summarizer.max_length
        self.output.mkdir(parents=True, exist_ok=True)

    def write(self, frame: pd.DataFrame, name: str):
        """Writes a table to the output folder."""
        frame.to_csv(self.output / name, index=False)

    @cached_property
    def counts(self) -> pd.DataFrame:
        """The tokens of each deputy."""
        options = (self.model, self.tokenizer, self.args.batch_size)
        return pd.concat([count_tokens(name, rows, *options) for name, rows in self.test.items()], ignore_index=True)

    def shares(self) -> str:
        """The shares of the deputies."""
        layers = deputy_shares(self.counts, ["data set", "side", "layer"])
        both = pd.concat([self.counts, self.counts.assign(side="both")])
        sets, overall = deputy_shares(both, ["data set", "side"]), deputy_shares(both, ["side"])
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
        return f"Per cent of the tokens that each deputy receives\n\n{text}\n\n{describe_unevenness(overall, uneven)}"

    def forced(self) -> str:
        """Summaries by each deputy."""
        args, rows = self.args, []
        generation_args = GenerationArguments(
            args.num_beams, self.summary_length, on_long="truncate", generation_batch_size=args.batch_size
        )
        for name, texts in self.test.items():
            for routing, options in routing_options(self.model.config).items():
                path = self.output / "summaries" / f"{name}-{routing.replace(' ', '_')}.jsonl"
                file = SummaryFile(path, texts, generation_args, fingerprint(args.model), name, **options)
                file.write_summaries(self.model, self.tokenizer)
                predictions, references = read_summaries(path)
                scores = rouge(predictions, references)
                means = {title: scores[metric].mean() for metric, title in ROUGE.items()}
                labels = {"data set": name, "summaries by": routing, "texts": len(texts)}
                rows.append({**labels, **mean_words(predictions), **means})
            labels = {"data set": name, "summaries by": REFERENCE, "texts": len(texts)}
            rows.append({**labels, **mean_words(texts["summary"])})
        frame = pd.DataFrame(rows)
        self.write(frame, "forced.csv")
        plot_forced(self.output / "forced.png", frame)
        cells = frame.astype(object).where(frame.notna(), None)  # references have no ROUGE
        text = cells.to_markdown(index=False, floatfmt=".2f", missingval="")
        return f"Summaries by each deputy (ROUGE: F1 in per cent, stemmed words)\n\n{text}"

    def lengths(self) -> str:
        """Lengths of summaries against the decoding limit."""
        rows, options = [], routing_options(self.model.config)
        options = {routing: options[routing] for routing in (ROUTED, MAIN) if routing in options}
        limits = limits_up_to(self.summary_length)
        total = sum(map(len, self.test.values())) * len(options) * len(limits)
        with tqdm(total=total, desc="lengths", unit="text") as bar:
            for name, texts in self.test.items():
                for routing, kwargs in options.items():
                    for limit in limits:
                        labels = {"data set": name, "summaries by": routing, "limit in tokens": limit}
                        rows.append(labels | self.mean_length(name, texts, limit, kwargs, bar))
        frame = pd.DataFrame(rows)
        references = {name: mean_words(texts["summary"]) for name, texts in self.test.items()}
        frame["words a reference"] = frame["data set"].map({n: words[LENGTHS[0]] for n, words in references.items()})
        self.write(frame, "lengths.csv")
        plot_lengths(self.output / "lengths.png", frame)
        table = frame.pivot_table(
            index=["data set", "summaries by"], columns="limit in tokens", values=LENGTHS[0], sort=False
        )
        text = table.rename(columns="limit {}".format).reset_index().to_markdown(index=False, floatfmt=".1f")
        return f"Words per summary by decoding limit in tokens\n\n{text}"

    def mean_length(self, name: str, texts: Dataset, limit: int, options: dict, bar) -> dict[str, float]:
        """Words per summary with this limit, and the share of summaries that reached it."""
        size = self.args.batch_size
        options = {"num_beams": self.args.num_beams, "on_long": "truncate", "batch_size": size, **options}
        summarize, summaries = UncutSummarizer(self.model, self.tokenizer, limit, **options), []
        for start in range(0, len(texts), CHUNK * size):
            chunk = texts[start : start + CHUNK * size]["document"]
            summaries += summarize(chunk, name, first=start)
            bar.update(len(chunk))
        stopped = summarize.num_stopped / len(texts)
        return {LENGTHS[0]: mean_words(summaries)[LENGTHS[0]], "share stopped by the limit": stopped}

    def attributes(self) -> str:
        """Attributes of the data sets."""
        frame, projections = compare_data_sets(self.test, self.counts)
        note = "A projection needs at least three data sets."
        if projections:
            plot_projections(self.output / "attributes.png", list(frame["data set"]), projections)
            note = "The projection of the data sets is in attributes.png."
        self.write(frame, "attributes.csv")
        table = frame[[column for column in frame if "component" not in column]]
        return f"Attributes of the data sets\n\n{table.to_markdown(index=False, floatfmt='.2f')}\n\n{note}"


# --- plots ---


def palette(number: int) -> list[str]:
    """Colours of the deputies."""
    if number <= len(COLOURS):
        return list(COLOURS[:number])
    return [to_hex(colormaps["viridis"](i / (number - 1))) for i in range(number)]


def text_colour(background) -> str:
    """Black or white, whichever is readable on the background."""
    return "black" if np.dot(to_rgb(background), (0.299, 0.587, 0.114)) > 0.5 else "white"


def save(figure: Figure, path: Path, title: str):
    """Saves a figure, with the legend of the first panel below, if it has one."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 7), frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def plot_shares(path: Path, sets: pd.DataFrame, overall: pd.DataFrame):
    """Stacked bars: one panel per side, one bar per data set."""
    table = pd.concat([sets, overall.assign(**{"data set": ALL})])
    names, N = list(table["data set"].unique()), overall["deputy"].nunique()
    figure = Figure(figsize=(10, 1.7 + 0.45 * len(names)), layout="constrained")
    axes = figure.subplots(1, len(SIDES), sharey=True)
    for axis, side in zip(axes, SIDES, strict=True):
        values = table[table["side"] == side].pivot(index="data set", columns="deputy", values="share").loc[names]
        left = np.zeros(len(names))
        for i, colour in enumerate(palette(N)):
            shares = 100 * values[i].to_numpy()
            style = {"color": colour, "label": f"deputy {i}", "edgecolor": "white", "height": 0.75}
            bars, labels = axis.barh(names, shares, left=left, **style), [f"{s:.0f}" if s >= 7 else "" for s in shares]
            axis.bar_label(bars, labels, label_type="center", color=text_colour(colour), fontsize=9)
            left += shares
        axis.set(title=side, xlim=(0, 100), xlabel="per cent of the tokens, all layers")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    save(figure, path, "Share of the tokens that each deputy receives")


def plot_layers(path: Path, layers: pd.DataFrame):
    """Heat maps: one per deputy, of data sets and layers."""
    names, N = list(layers["data set"].unique()), layers["deputy"].nunique()
    depth = {side: layers.loc[layers["side"] == side, "layer"].nunique() for side in SIDES}
    columns = [(side, layer) for side in SIDES for layer in range(depth[side])]
    size = (max(3 + 0.48 * len(columns), 5), 1.4 + N * (0.7 + 0.34 * len(names)))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(N, 1, sharex=True, squeeze=False)[:, 0]
    for i, axis in enumerate(axes):
        table = layers[layers["deputy"] == i].pivot(index="data set", columns=["side", "layer"], values="share")
        values = 100 * table.loc[names, columns].to_numpy()  # (E, layers of both sides)
        image = axis.imshow(values, vmin=0, vmax=100, cmap="cividis", aspect="auto")
        for (y, x), value in np.ndenumerate(values):
            colour = text_colour(image.cmap(value / 100)[:3])
            axis.text(x, y, f"{value:.0f}", ha="center", va="center", color=colour, fontsize=8)
        axis.axvline(depth["encoder"] - 0.5, color="white", linewidth=3)
        axis.set_yticks(range(len(names)), names)
        axis.set_title(f"deputy {i}", loc="left", fontsize=10)
    axes[-1].set_xticks(range(len(columns)), [f"{side[0]}{layer}" for side, layer in columns])
    axes[-1].set_xlabel("layer (e encoder, d decoder)")
    figure.colorbar(image, ax=list(axes), label="per cent of the layer's tokens", aspect=12 * N)
    save(figure, path, "Share of the tokens by layer")


def plot_forced(path: Path, frame: pd.DataFrame):
    """Bars: one panel per measure, one group per data set; references are black lines."""
    names = list(frame["data set"].unique())
    routings = [name for name in frame["summaries by"].unique() if name != REFERENCE]
    deputies = [name for name in routings if name not in (ROUTED, MAIN)]
    colours = {ROUTED: "#333333", **dict(zip(deputies, palette(len(deputies)), strict=True)), MAIN: "#BBBBBB"}
    measures, height = [*LENGTHS, *ROUGE.values()], 0.8 / len(routings)
    figure = Figure(figsize=(13, 1.8 + 0.17 * len(names) * (len(routings) + 1)), layout="constrained")
    axes = figure.subplots(1, len(measures), sharey=True)
    for axis, measure in zip(axes, measures, strict=True):
        table = frame.pivot(index="data set", columns="summaries by", values=measure).loc[names]
        for k, name in enumerate(routings):
            y = np.arange(len(names)) + (k - (len(routings) - 1) / 2) * height
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
    """Lines: one panel per data set, with and without deputies."""
    names, limits = list(frame["data set"].unique()), sorted(frame["limit in tokens"].unique())
    # a label too close to the next one is left out
    labels = [str(a) if b > 1.4 * a else "" for a, b in zip(limits, [*limits[1:], 2 * limits[-1]], strict=True)]
    wide = min(len(names), 3)
    high = -(-len(names) // wide)
    figure = Figure(figsize=(max(3.6 * wide, 5), 1.4 + 2.6 * high), layout="constrained")
    axes = list(figure.subplots(high, wide, squeeze=False).flat)
    for axis, name in zip(axes, names, strict=False):
        rows = frame[frame["data set"] == name]
        for routing, colour, marker in ((ROUTED, COLOURS[0], "o"), (MAIN, COLOURS[1], "s")):
            line = rows[rows["summaries by"] == routing]
            if len(line):
                label = "with deputies" if routing == ROUTED else MAIN
                axis.plot(line["limit in tokens"], line[LENGTHS[0]], color=colour, marker=marker, label=label)
        axis.axhline(rows["words a reference"].iloc[0], color="0.4", linestyle="--", label="references")
        axis.set_xscale("log", base=2)
        axis.set_xticks(limits, labels)
        axis.minorticks_off()
        axis.set(xlabel="decoding limit, tokens", ylabel=LENGTHS[0])
        axis.set_title(name, fontsize=10)
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[len(names) :]:
        axis.set_visible(False)
    save(figure, path, "Length of summaries by decoding limit")


def run(args: AnalysisArguments):
    """Runs the parts."""
    analysis = Analysis(args)
    for part in PARTS:
        if part in args.parts:
            print(f"\n{getattr(analysis, part)()}", flush=True)
    print(f"\nTables and plots are in {analysis.output}")


main = command("moesumm", "analyse", run, RESUME)
