"""Specialisation to look at: tables, Cramér's V as a heat map, and a document in the colours of its tokens' experts."""

from html import escape
from pathlib import Path

from .specialisation import expert_usage, specialisation

# Okabe and Ito's colours, which most eyes tell apart; beyond eight, hues at equal distances
COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#0072B2", "#D55E00", "#999999")

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 17px/1.9 Georgia, serif; color: #1a1a1a; background: #fff; max-width: 46em; margin: 2em auto; padding: 0 1em; }}
h1 {{ font-size: 1.3em; }}
.legend, .note {{ font: 14px/1.8 system-ui, sans-serif; }}
.legend > span {{ margin-right: 1.2em; white-space: nowrap; }}
.text {{ white-space: pre-wrap; }}
.text span, .swatch {{ border-radius: 3px; padding: 1px 2px; color: #000; }}
.key {{ text-decoration: underline 2px; text-underline-offset: 4px; }}
{rules}
</style>
</head>
<body>
<h1>{title}</h1>
<p class="legend">{legend}</p>
<p class="text">{text}</p>
<p class="note">A token has the colour of the expert that the router prefers for it, paler where the weight is smaller; point at
it to read both. Underlined is what the model takes into keyphrases.</p>
</body>
</html>
"""


def colour(expert: int, num_experts: int) -> str:
    """A CSS colour."""
    if num_experts <= len(COLOURS):
        return COLOURS[expert]
    return f"hsl({360 * expert / num_experts:.0f} 70% 65%)"


def plot_specialisation(table, path: str | Path, title: str = "What experts specialise in"):
    """Draws a table of `specialisation` as a heat map, categories by experts, and saves it.

    Raises:
        ImportError: without matplotlib.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("A plot needs matplotlib. Install it with: pip install lexperts[analysis]") from error
    columns = ["all" if name == "experts" else f"expert {name}" for name in table.columns]
    figure = Figure(figsize=(2.2 + 0.85 * len(columns), 1.4 + 0.45 * len(table)), layout="constrained")
    axes = figure.subplots()
    values = table.to_numpy(dtype=float)
    image = axes.imshow(values, cmap=colormaps["viridis"].with_extremes(bad="#e8e8e8"), vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(table)), table.index)
    axes.set_title(title)
    axes.axvline(0.5, color="white", linewidth=3)
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            known = value == value
            said = f"{value:.2f}" if known else "unknown"
            shade = "black" if not known or value > 0.6 else "white"
            axes.text(j, i, said, ha="center", va="center", color=shade, fontsize=9 if known else 7)
    figure.colorbar(image, ax=axes, label="Cramér's V, bias-corrected")
    figure.savefig(path, dpi=150)


def expert_page(tokens, text: str, path: str | Path, document: int = 0, title: str = "Which expert reads what") -> None:
    """Writes one document as an HTML page of its own, each token coloured by its expert.

    Args:
        tokens: of `token_experts`.
        text: the document.
        document: its number among those.

    Raises:
        ValueError: for a document of which there are no tokens.
    """
    own = tokens[tokens["document"] == document]
    if own.empty:
        raise ValueError(
            f"There are no tokens of document {document}; there are those of {tokens['document'].nunique()}."
        )
    E, parts, end = tokens.attrs["num_experts"], [], 0
    for token in own.itertuples():
        parts.append(escape(text[end : token.start]))
        kind = f"e{token.expert}" + (" key" if token.label != "O" else "")
        said = f"expert {token.expert}, weight {token.weight:.2f}, label {token.label}"
        percent = round(100 * (0.25 + 0.75 * token.weight))
        style = f"background: color-mix(in srgb, var(--e{token.expert}) {percent}%, white)"
        word = escape(text[token.start : token.end])
        parts.append(f'<span class="{kind}" style="{style}" title="{said}">{word}</span>')
        end = token.end
    parts.append(escape(text[end:]))
    own.attrs = tokens.attrs
    shares = expert_usage(own)["share"]
    legend = "".join(
        f'<span><span class="swatch" style="background: var(--e{e})">expert {e}</span> {100 * shares[e]:.0f}%</span>'
        for e in range(E)
    )
    rules = ":root {" + " ".join(f"--e{e}: {colour(e, E)};" for e in range(E)) + " }"
    page = PAGE.format(title=escape(title), legend=legend, text="".join(parts), rules=rules)
    Path(path).write_text(page, encoding="utf-8")


def write_views(tokens, texts: list[str], folder: str | Path, page: int = 0) -> str:
    """Writes specialisation.csv, usage.csv, specialisation.png and document.html, and says what is in the tables.

    Args:
        tokens: of `token_experts`.
        texts: the documents.
        page: number of the one that is shown in colours.
    """
    table, usage, folder = specialisation(tokens), expert_usage(tokens), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    table.to_csv(folder / "specialisation.csv")
    usage.to_csv(folder / "usage.csv")
    plot_specialisation(table, folder / "specialisation.png")
    expert_page(tokens, texts[page], folder / "document.html", document=page)
    entropy, shares = (usage.attrs[name] for name in ("entropy", "entropy_of_shares"))
    return (
        f"Cramér's V, bias-corrected, {len(tokens):,} tokens of {len(texts):,} documents:\n{table.round(3).to_string()}\n\n"
        f"{usage.round(3).to_string()}\n"
        f"The router's entropy: {entropy:.2f} bits a token; {shares:.2f} bits of the shares.\n"
        f"The tables, specialisation.png and document.html are in {folder}."
    )
