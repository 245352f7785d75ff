"""Draws keyphrases.svg: the paragraph of the README with its keyphrases marked, and each word underlined by its expert.

python docs/images/draw_keyphrases.py
"""

import textwrap
from html import escape
from pathlib import Path

import spacy
from transformers import pipeline

import lexperts  # noqa: F401  registers the pipeline
from keyphrase_tools.specialisation import token_experts

FOLDER = Path(__file__).resolve().parent
COLOURS = ("#0969da", "#bc4c00", "#1a7f37", "#8250df")  # of the experts
COLUMNS, SIZE, LINE, MARGIN = 92, 15, 34, 24  # characters per line; pixels
WIDTH = 0.6 * SIZE  # of a character; textLength makes every font as wide


def spans_of(text: str) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]], int]:
    """(start, end) of each mention of a keyphrase, (start, end, expert) of each word, and the number of experts."""
    extract = pipeline("keyphrase-extraction")
    tokens = token_experts(extract.model, extract.tokenizer, [text], spacy.blank("en"))
    marks = [(m["start"], m["end"]) for phrase in extract(text) for m in phrase["mentions"]]
    tokens_of_words = tokens[~tokens["is_punctuation"]]
    words = list(tokens_of_words[["start", "end", "expert"]].itertuples(index=False, name=None))
    return marks, words, tokens.attrs["num_experts"]


def render_svg(text: str) -> str:
    """The picture of a text."""
    marks, words, experts = spans_of(text)
    lines = textwrap.wrap(text, COLUMNS)
    assert " ".join(lines) == text, "the text has line breaks or double spaces"
    width, height = 2 * MARGIN + COLUMNS * WIDTH, 2 * MARGIN + LINE * (len(lines) + 1) - 6
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img" '
        f'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="{SIZE}">',
        "<title>A paragraph with its keyphrases marked, and each word underlined in the colour of its expert</title>",
        '<rect width="100%" height="100%" rx="8" fill="#ffffff"/>',
    ]
    start = 0
    for number, line in enumerate(lines):
        y, end = MARGIN + LINE * number + 16, start + len(line)

        def box(first: int, last: int, top: float, height: int, fill: str, start=start) -> str:
            x, length = MARGIN + WIDTH * (first - start), WIDTH * (last - first)
            return f'<rect x="{x:.1f}" y="{top}" width="{length:.1f}" height="{height}" rx="2" fill="{fill}"/>'

        for first, last in marks:
            if max(first, start) < min(last, end):
                parts.append(box(max(first, start), min(last, end), y - 16, 22, "#ffe58f"))
        parts += [box(first, last, y + 7, 2, COLOURS[expert]) for first, last, expert in words if start <= first < end]
        parts.append(
            f'<text x="{MARGIN}" y="{y}" fill="#1f2328" textLength="{WIDTH * len(line):.1f}">{escape(line)}</text>'
        )
        start = end + 1
    y = height - MARGIN
    parts += [
        f'<rect x="{MARGIN}" y="{y - 13}" width="40" height="17" rx="2" fill="#ffe58f"/>',
        f'<text x="{MARGIN + 48}" y="{y}" font-size="13" fill="#57606a">keyphrase</text>',
    ]
    for expert in range(experts):
        x = MARGIN + 150 + 120 * expert
        parts += [
            f'<rect x="{x}" y="{y - 5}" width="24" height="3" fill="{COLOURS[expert]}"/>',
            f'<text x="{x + 32}" y="{y}" font-size="13" fill="#57606a">expert {expert + 1}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    paragraph = (FOLDER.parents[1] / "examples" / "corpus" / "paragraph.txt").read_text(encoding="utf-8").strip()
    (FOLDER / "keyphrases.svg").write_text(render_svg(paragraph), encoding="utf-8")
    print(f"wrote {FOLDER / 'keyphrases.svg'}")
