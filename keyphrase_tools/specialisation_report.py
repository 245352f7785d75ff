"""Reports on specialisation: tables, Cramér's V as a heat map, and a document coloured by its tokens' experts."""

from html import escape
from pathlib import Path

from .html_page import PAGE, mark_spans
from .specialisation import expert_usage, specialisation

# the colour-blind-safe palette of Okabe and Ito; for more than eight experts, equidistant hues
COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#0072B2", "#D55E00", "#999999")

STYLE = """
body { font: 17px/1.9 Georgia, serif; color: #1a1a1a; background: #fff; max-width: 46em; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.3em; }
.legend, .note { font: 14px/1.8 system-ui, sans-serif; }
.legend > span { margin-right: 1.2em; white-space: nowrap; }
.text { white-space: pre-wrap; }
.text span, .swatch { border-radius: 3px; padding: 1px 2px; color: #000; }
.key { text-decoration: underline 2px; text-underline-offset: 4px; }
"""
BODY = """<p class="legend">{legend}</p>
<p class="text">{text}</p>
<p class="note">Each token has the colour of its preferred expert, paler for a smaller probability; hover over it to see both.
Words that the model labels as parts of keyphrases are underlined.</p>"""


def colour(expert: int, num_experts: int) -> str:
    """The CSS colour of an expert."""
    if num_experts <= len(COLOURS):
        return COLOURS[expert]
    return f"hsl({360 * expert / num_experts:.0f} 70% 65%)"


def plot_specialisation(table, path: str | Path, title: str = "What experts specialise in"):
    """Saves the result of `specialisation` as a heat map, categories by experts.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Plots need matplotlib. Install it with: pip install 'lexperts[analysis]'") from error
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
            label = f"{value:.2f}" if known else "unknown"
            shade = "black" if not known or value > 0.6 else "white"
            axes.text(j, i, label, ha="center", va="center", color=shade, fontsize=9 if known else 7)
    figure.colorbar(image, ax=axes, label="Cramér's V, bias-corrected")
    figure.savefig(path, dpi=150)


def expert_page(tokens, text: str, path: str | Path, document: int = 0, title: str = "Which expert reads what") -> None:
    """Writes one document as an HTML page, each token coloured by its expert.

    Args:
        tokens: the result of `token_experts`.
        text: the document.
        path: the file to write.
        document: the document's index in `tokens`.
        title: the title of the page.

    Raises:
        ValueError: if `tokens` has none of this document.
    """
    document_tokens = tokens[tokens["document"] == document]
    if document_tokens.empty:
        raise ValueError(
            f"document={document} has no tokens. Use the index of one of the {tokens['document'].nunique()} documents."
        )
    E, spans = tokens.attrs["num_experts"], []
    for token in document_tokens.itertuples():
        css_class = f"e{token.expert}" + (" key" if token.label != "O" else "")
        tooltip = f"expert {token.expert}, weight {token.weight:.2f}, label {token.label}"
        percent = round(100 * (0.25 + 0.75 * token.weight))
        style = f"background: color-mix(in srgb, var(--e{token.expert}) {percent}%, white)"
        before = f'<span class="{css_class}" style="{style}" title="{tooltip}">'
        spans.append((token.start, token.end, before, "</span>"))
    document_tokens.attrs = tokens.attrs
    shares = expert_usage(document_tokens)["share"]
    legend = "".join(
        f'<span><span class="swatch" style="background: var(--e{e})">expert {e}</span> {100 * shares[e]:.0f}%</span>'
        for e in range(E)
    )
    rules = ":root {" + " ".join(f"--e{e}: {colour(e, E)};" for e in range(E)) + " }"
    body = BODY.format(legend=legend, text=mark_spans(text, spans))
    page = PAGE.format(title=escape(title), style=STYLE + rules, body=body)
    Path(path).write_text(page, encoding="utf-8")


def write_report(tokens, texts: list[str], folder: str | Path, page: int = 0) -> str:
    """Writes specialisation.csv, usage.csv, specialisation.png and document.html.

    Args:
        tokens: the result of `token_experts`.
        texts: the documents.
        folder: the folder to write to.
        page: index of the document that is shown in colours.

    Returns:
        The tables as text.
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
        f"Router entropy: {entropy:.2f} bits per token; entropy of the shares: {shares:.2f} bits.\n"
        f"Wrote specialisation.csv, usage.csv, specialisation.png and document.html to {folder}."
    )
