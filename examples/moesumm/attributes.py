"""Data sets in numbers, from their texts and from counts of tokens: what their summaries are like (Grusky et al. 2018), how
much a data set decides about the deputies, and data sets as points of a plane.

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

from modeling_moesumm.texts_moesumm import sentence_spans

ATTRIBUTES = ("coverage", "density", "compression")
LENGTHS = ("words a summary", "words a sentence")
MUCH = 0.8  # of the tokens: more than that for one deputy is warned of
WORD = re.compile(r"\w+(?:['’]\w+)*")
# where a label may stand, in points from its dot: beside it, then higher or lower
OFFSETS = [(side * 8, level * 12) for level in (0, 1, -1, 2, -2, 3, -3, 4, -4, 5, -5, 6, -6) for side in (1, -1)]


def words_of(text: str) -> list[str]:
    """In lower case, without signs."""
    return WORD.findall(text.lower())


def fragments(document: list[str], summary: list[str]) -> list[int]:
    """Words of each extractive fragment: F(A, S) of Grusky et al. 2018, Figure 3.

    From the summary's beginning on, the longest run of words that the document has as well is a fragment, and the search
    goes on behind it. As in the paper, the document is read on from the end of a match: one that begins inside another
    match of the same words is not seen.
    """
    places: dict[str, list[int]] = {}
    for j, word in enumerate(document):
        places.setdefault(word, []).append(j)
    found, i = [], 0
    while i < len(summary):
        longest, behind = 0, 0
        for j in places.get(summary[i], ()):
            if j < behind:
                continue
            length = 1
            while (
                i + length < len(summary) and j + length < len(document) and summary[i + length] == document[j + length]
            ):
                length += 1
            longest, behind = max(longest, length), j + length
        if longest:
            found.append(longest)
        i += max(longest, 1)
    return found


def attributes(document: str, summary: str) -> tuple[float, float, float] | None:
    """Coverage sum|f| / |S|, density sum|f|^2 / |S|, compression |A| / |S|; `None` for a summary without words."""
    A, S = words_of(document), words_of(summary)
    if not S:
        return None
    sizes = fragments(A, S)
    return sum(sizes) / len(S), sum(size**2 for size in sizes) / len(S), len(A) / len(S)


def mean_attributes(name: str, rows: list[dict]) -> dict[str, float]:
    """The means over a data set's texts.

    Raises:
        ValueError: where no summary has a word.
    """
    found = [values for row in rows if (values := attributes(row["document"], row["summary"]))]
    if not found:
        raise ValueError(f"{name} has no summary with a word in it, only signs: there is nothing to measure.")
    return {"texts": len(found), **dict(zip(ATTRIBUTES, np.mean(found, axis=0).tolist(), strict=True))}


def mean_words(texts: list[str]) -> dict[str, float]:
    words = sum(len(text.split()) for text in texts)
    sentences = sum(len(sentence_spans(text)) for text in texts)
    return dict(zip(LENGTHS, (words / len(texts), words / max(sentences, 1)), strict=True))


def standardised(features: np.ndarray) -> np.ndarray:
    """(E, F) -> each column with mean 0 and deviation 1; 0 where all rows have the same."""
    centred, deviation = features - features.mean(0), features.std(0)
    same = deviation <= 1e-12 * np.abs(features).max(0)
    return np.where(same, 0.0, centred / np.where(same, 1.0, deviation))


def project(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(E, F) -> the first two principal components (E, 2), and the share of the variance on each (2,); 0 if all are alike."""
    if np.allclose(features, features[0], atol=1e-9):
        return np.zeros((len(features), 2)), np.zeros(2)
    pca = PCA(n_components=2, svd_solver="full")
    return pca.fit_transform(features), pca.explained_variance_ratio_


def shares_of(counts: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Counts, added up over what is not named -> each deputy's share of the tokens, and their mean gate."""
    found = counts.groupby([*by, "deputy"], sort=False)[["tokens", "gates"]].sum().reset_index()
    total = found.groupby(by)["tokens"].transform("sum") if by else found["tokens"].sum()
    found["share"] = found["tokens"] / total
    found["mean gate"] = found.pop("gates") / found["tokens"]
    return found if "layer" in by else found.rename(columns={"tokens": "tokens of all layers"})


def cramers_v(table: np.ndarray) -> float:
    """Counts (R, C) -> V without its bias (Bergsma 2013): 0 for rows that are alike, 1 for rows that share no column."""
    table = table[:, table.sum(0) > 0]
    n, sizes = table.sum(), np.array(table.shape)
    if len(table) < 2:
        return math.nan
    expected = table.sum(1, keepdims=True) * table.sum(0) / n
    phi2 = ((table - expected) ** 2 / expected).sum() / n - (sizes - 1).prod() / (n - 1)
    room = (sizes - 1 - (sizes - 1) ** 2 / (n - 1)).min()
    return min(math.sqrt(max(phi2, 0.0) / room), 1.0) if room > 0 else 0.0


def unevenness(counts: pd.DataFrame) -> pd.DataFrame:
    """Of each layer Cramer's V of data set and deputy, and the deputy that most tokens of all data sets take."""
    rows = []
    for (side, layer), found in counts.groupby(["side", "layer"], sort=False):
        table = found.pivot(index="data set", columns="deputy", values="tokens").to_numpy(float)  # (E, N)
        shares = table.sum(0) / table.sum()
        largest = {"largest share": shares.max(), "of deputy": int(shares.argmax())}
        rows.append({"side": side, "layer": layer, "Cramer's V": cramers_v(table), **largest})
    return pd.DataFrame(rows)


def say_unevenness(overall: pd.DataFrame, uneven: pd.DataFrame) -> str:
    shares = overall[overall["side"] == "both"].set_index("deputy")["share"]
    text = [f"Largest share of all tokens: {shares.max():.0%}, deputy {shares.idxmax()}."]
    v = uneven["Cramer's V"]
    if v.notna().all():
        most = uneven.loc[v.idxmax()]
        text.append(
            f"Cramer's V of data set and deputy (0 to 1): {v.mean():.2f}, the mean over layers; {v.min():.2f} to "
            f"{v.max():.2f}, most in {most['side']} layer {most['layer']}."
        )
    else:
        text.append("There is one data set: how much the data set decides about the deputy cannot be said.")
    if len(shares) > 1 and shares.max() > MUCH:
        text.append(f"warning: one deputy takes {shares.max():.0%} of all tokens.")
    taken = uneven[uneven["largest share"] > MUCH] if len(shares) > 1 else uneven[:0]
    if len(taken):
        where = ", ".join(f"{side} {layer}" for side, layer in zip(taken["side"], taken["layer"], strict=True))
        text.append(f"warning: in {len(taken)} of {len(uneven)} layers one deputy takes more than {MUCH:.0%}: {where}.")
    return "\n".join(text)


def compare_data_sets(test: dict[str, list[dict]], counts: pd.DataFrame) -> tuple[pd.DataFrame, dict]:
    """Each data set's attributes beside its deputies' shares, and both projected, by titles; fewer than three are not."""
    measured = {name: mean_attributes(name, rows) for name, rows in tqdm(test.items(), desc="attributes")}
    frame = pd.DataFrame({"data set": name, **values} for name, values in measured.items())
    shares = shares_of(counts, ["data set"]).pivot(index="data set", columns="deputy", values="share")
    for i in shares:
        frame[f"share of deputy {i}"] = shares.loc[frame["data set"], i].to_numpy()
    if len(frame) < 3:
        return frame, {}
    layers = shares_of(counts, ["data set", "side", "layer"])
    table = layers.pivot(index="data set", columns=["side", "layer", "deputy"], values="share")
    projections = {
        "coverage, density, compression": project(standardised(frame[list(ATTRIBUTES)].to_numpy())),
        "shares of the deputies in all layers": project(table.loc[frame["data set"]].to_numpy()),
    }
    for what, (points, _) in zip(("attributes", "shares"), projections.values(), strict=True):
        frame[[f"{what}, component 1", f"{what}, component 2"]] = points
    return frame, projections


def plot_projections(path: Path, names: list[str], panels: dict[str, tuple[np.ndarray, np.ndarray]]):
    """Side by side what `project` gave, under these titles."""
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
    figure.suptitle("Which data sets are alike, by what they are and by the deputies they use")
    figure.draw_without_rendering()  # the axes get their places, which labels go by
    figure.set_layout_engine("none")
    for axis, (points, _) in zip(axes, panels.values(), strict=True):
        label_points(axis, points, names)
    figure.savefig(path, dpi=150)


def label_points(axis, points: np.ndarray, names: list[str]) -> list[Bbox]:
    """Writes a name beside each of the points (E, 2), none over another name or dot -> where they stand, in pixels.

    The figure must have been drawn once: until then its axes have neither places nor limits.
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
            box = place(text, offset, renderer)
            free = not any(box.overlaps(other) for other in (*boxes, *dots))
            fits = inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1
            candidates.append((free, fits, offset))
        best = max(candidates, key=lambda candidate: candidate[:2])  # the first of the best
        boxes.append(place(text, best[2], renderer))
    return boxes


def place(text, offset: tuple[int, int], renderer) -> Bbox:
    """Moves a label there; its box is that of the words, without the line to the dot."""
    text.xyann = offset
    text.arrow_patch.set_visible(offset[1] != 0)
    text.set_horizontalalignment("left" if offset[0] > 0 else "right")
    text.update_positions(renderer)
    return Text.get_window_extent(text, renderer)
