"""Statistics of data sets: attributes of their summaries (Grusky et al. 2018), the association of data sets and deputies, and
projections to a plane.

Letters: A a document and S its summary, as words; |f| the words of a fragment; E data sets, F features of each.
"""

import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from sklearn.decomposition import PCA
from tqdm import tqdm

from keyphrase_tools.specialisation import cramers_v_of_table
from modeling_moesumm.sentences_moesumm import sentence_spans

ATTRIBUTES = ("coverage", "density", "compression")
LENGTHS = ("words a summary", "words a sentence")  # columns of tables
MAX_SHARE = 0.8  # a deputy with a larger share of the tokens causes a warning
WORD = re.compile(r"\w+(?:['’]\w+)*")
# possible positions of a label, in points from its dot: beside it, then higher or lower
OFFSETS = [(side * 8, level * 12) for level in (0, 1, -1, 2, -2, 3, -3, 4, -4, 5, -5, 6, -6) for side in (1, -1)]


def words_of(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation."""
    return WORD.findall(text.lower())


def fragments(document: list[str], summary: list[str]) -> list[int]:
    """The numbers of words of the extractive fragments: F(A, S) of Grusky et al. 2018, Figure 3.

    From the beginning of the summary, the longest run of words that also occurs in the document is a fragment, and the search
    continues after it. As in the paper, the document is searched from the end of a match, so a match that begins inside another
    match of the same words is not found.
    """
    positions: dict[str, list[int]] = {}
    for j, word in enumerate(document):
        positions.setdefault(word, []).append(j)
    sizes, i = [], 0
    while i < len(summary):
        longest, end = 0, 0
        for j in positions.get(summary[i], ()):
            if j < end:
                continue
            length = 1
            while (
                i + length < len(summary) and j + length < len(document) and summary[i + length] == document[j + length]
            ):
                length += 1
            longest, end = max(longest, length), j + length
        if longest:
            sizes.append(longest)
        i += max(longest, 1)
    return sizes


def attributes(document: str, summary: str) -> tuple[float, float, float] | None:
    """Coverage sum|f| / |S|, density sum|f|^2 / |S|, compression |A| / |S|; `None` for a summary without words."""
    A, S = words_of(document), words_of(summary)
    if not S:
        return None
    sizes = fragments(A, S)
    return sum(sizes) / len(S), sum(size**2 for size in sizes) / len(S), len(A) / len(S)


def mean_attributes(name: str, rows: list[dict]) -> dict[str, float]:
    """The means over the texts of a data set; raises a `ValueError` if no summary contains a word."""
    values = [triple for row in rows if (triple := attributes(row["document"], row["summary"]))]
    if not values:
        raise ValueError(f"{name} has no summaries with words. Leave it out, or check its summary column.")
    return {"texts": len(values), **dict(zip(ATTRIBUTES, np.mean(values, axis=0).tolist(), strict=True))}


def mean_words(texts: list[str]) -> dict[str, float]:
    """Words per text and per sentence."""
    words = sum(len(text.split()) for text in texts)
    sentences = sum(len(sentence_spans(text)) for text in texts)
    return dict(zip(LENGTHS, (words / len(texts), words / max(sentences, 1)), strict=True))


def standardised(features: np.ndarray) -> np.ndarray:
    """Features `(E, F)` with mean 0 and standard deviation 1 in each column; constant columns are 0."""
    centred, deviation = features - features.mean(0), features.std(0)
    same = deviation <= 1e-12 * np.abs(features).max(0)
    return np.where(same, 0.0, centred / np.where(same, 1.0, deviation))


def project(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first two principal components `(E, 2)` of `(E, F)`, and their shares of the variance `(2,)`; 0 for equal rows."""
    if np.allclose(features, features[0], atol=1e-9):
        return np.zeros((len(features), 2)), np.zeros(2)
    pca = PCA(n_components=2, svd_solver="full")
    return pca.fit_transform(features), pca.explained_variance_ratio_


def deputy_shares(counts: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Each deputy's share of the tokens and their mean gate, for each combination of the columns `by`."""
    table = counts.groupby([*by, "deputy"], sort=False)[["tokens", "gates"]].sum().reset_index()
    total = table.groupby(by)["tokens"].transform("sum") if by else table["tokens"].sum()
    table["share"] = table["tokens"] / total
    table["mean gate"] = table.pop("gates") / table["tokens"]
    return table if "layer" in by else table.rename(columns={"tokens": "tokens of all layers"})


def cramers_v(table: np.ndarray) -> float:
    """Cramer's V of a contingency table `(R, C)`, from 0 to 1, with the bias correction of Bergsma (2013)."""
    return min(cramers_v_of_table(table), 1.0) if len(table) > 1 else math.nan


def unevenness(counts: pd.DataFrame) -> pd.DataFrame:
    """For each layer, Cramer's V of data set and deputy, and the deputy with the largest share of the tokens."""
    rows = []
    for (side, layer), group in counts.groupby(["side", "layer"], sort=False):
        table = group.pivot(index="data set", columns="deputy", values="tokens").to_numpy(float)  # (E, N)
        shares = table.sum(0) / table.sum()
        largest = {"largest share": shares.max(), "of deputy": int(shares.argmax())}
        rows.append({"side": side, "layer": layer, "Cramer's V": cramers_v(table), **largest})
    return pd.DataFrame(rows)


def describe_unevenness(overall: pd.DataFrame, uneven: pd.DataFrame) -> str:
    """A summary of the shares and of Cramer's V, with warnings about one-sided layers."""
    shares = overall[overall["side"] == "both"].set_index("deputy")["share"]
    text = [f"Largest share of all tokens: {shares.max():.0%}, deputy {shares.idxmax()}."]
    v = uneven["Cramer's V"]
    if v.notna().all():
        most = uneven.loc[v.idxmax()]
        text.append(
            f"Cramer's V of data set and deputy (0 to 1): mean over layers {v.mean():.2f}, {v.min():.2f} to {v.max():.2f}, "
            f"highest in {most['side']} layer {most['layer']}."
        )
    else:
        text.append("Cramer's V needs at least two data sets.")
    if len(shares) > 1 and shares.max() > MAX_SHARE:
        text.append(f"warning: one deputy receives {shares.max():.0%} of all tokens.")
    one_sided = uneven[uneven["largest share"] > MAX_SHARE] if len(shares) > 1 else uneven[:0]
    if len(one_sided):
        names = [f"{side} {layer}" for side, layer in zip(one_sided["side"], one_sided["layer"], strict=True)]
        layers = f"in {len(one_sided)} of {len(uneven)} layers"
        text.append(f"warning: {layers} one deputy receives more than {MAX_SHARE:.0%}: {', '.join(names)}.")
    return "\n".join(text)


def compare_data_sets(test: dict[str, list[dict]], counts: pd.DataFrame) -> tuple[pd.DataFrame, dict]:
    """Each data set's attributes and shares of deputies, and projections of both by title, for three data sets or more."""
    measured = {name: mean_attributes(name, rows) for name, rows in tqdm(test.items(), desc="attributes")}
    frame = pd.DataFrame({"data set": name, **values} for name, values in measured.items())
    shares = deputy_shares(counts, ["data set"]).pivot(index="data set", columns="deputy", values="share")
    for i in shares:
        frame[f"share of deputy {i}"] = shares.loc[frame["data set"], i].to_numpy()
    if len(frame) < 3:
        return frame, {}
    layers = deputy_shares(counts, ["data set", "side", "layer"])
    table = layers.pivot(index="data set", columns=["side", "layer", "deputy"], values="share")
    projections = {
        "coverage, density, compression": project(standardised(frame[list(ATTRIBUTES)].to_numpy())),
        "shares of the deputies in all layers": project(table.loc[frame["data set"]].to_numpy()),
    }
    for what, (points, _) in zip(("attributes", "shares"), projections.values(), strict=True):
        frame[[f"{what}, component 1", f"{what}, component 2"]] = points
    return frame, projections


def plot_projections(path: Path, names: list[str], panels: dict[str, tuple[np.ndarray, np.ndarray]]):
    """Plots results of `project` side by side, under their titles."""
    figure = Figure(figsize=(5.2 * len(panels), 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, (points, explained)) in zip(axes, panels.items(), strict=True):
        axis.scatter(*points.T, s=36, color="#0072B2", zorder=3)
        axis.axhline(0, color="0.88", linewidth=0.8, zorder=0)
        axis.axvline(0, color="0.88", linewidth=0.8, zorder=0)
        axis.set_title(title)
        axis.set_xlabel(f"first component, {explained[0]:.0%} of the variance")
        axis.set_ylabel(f"second component, {explained[1]:.0%}")
        axis.margins(0.3)
        axis.set_aspect("equal", adjustable="datalim")
    figure.suptitle("Similarity of data sets by attributes and by deputies")
    figure.draw_without_rendering()  # computes the positions of the axes
    figure.set_layout_engine("none")
    for axis, (points, _) in zip(axes, panels.values(), strict=True):
        label_points(axis, points, names)
    figure.savefig(path, dpi=150)


def label_points(axis, points: np.ndarray, names: list[str]) -> list[Bbox]:
    """Writes a name beside each of the points `(E, 2)`, without overlaps if possible; returns the boxes in pixels.

    The figure must have been drawn once, since the axes have no position and limits before.
    """
    renderer = axis.figure.canvas.get_renderer()
    inside = axis.get_window_extent(renderer).padded(-4)
    dots = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in axis.transData.transform(points)]
    line = {"arrowstyle": "-", "color": "0.6", "linewidth": 0.7, "shrinkA": 0, "shrinkB": 3}
    boxes: list[Bbox] = []
    for point, name in zip(points, names, strict=True):
        text = axis.annotate(name, point, (8, 0), textcoords="offset points", fontsize=9, va="center", arrowprops=line)
        candidates = []
        for offset in OFFSETS:
            box = move_label(text, offset, renderer)
            free = not any(box.overlaps(other) for other in (*boxes, *dots))
            fits = inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1
            candidates.append((free, fits, offset))
        best = max(candidates, key=lambda candidate: candidate[:2])  # the first of the best
        boxes.append(move_label(text, best[2], renderer))
    return boxes


def move_label(text, offset: tuple[int, int], renderer) -> Bbox:
    """Moves a label; returns the box of its text, without the line to the dot."""
    text.xyann = offset
    text.arrow_patch.set_visible(offset[1] != 0)
    text.set_horizontalalignment("left" if offset[0] > 0 else "right")
    text.update_positions(renderer)
    return Text.get_window_extent(text, renderer)
