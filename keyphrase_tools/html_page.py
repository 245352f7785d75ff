"""Pages of texts with marked keyphrases: each is one HTML file without scripts."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="lexperts">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
<header>
<h1>{title}</h1>
Each list has the best keyphrases of a text and their scores; in the text they are marked, the stronger the better.
</header>
{body}
<footer>
<h2>Next</h2>
Your own texts: <code>lexperts keyphrases show article.txt</code>. Many documents: <code>lexperts keyphrases extract documents.jsonl
keyphrases.jsonl</code>. While you type: <code>lexperts app</code>.
</footer>
</body>
</html>
"""
STYLE = """
body { font: 16px/1.6 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1c1c1e; }
h2 { font-size: 1.1rem; margin-top: 2.5rem; border-top: 1px solid #ddd; padding-top: 1rem; }
mark { background: rgb(255 190 60 / var(--strength)); border-bottom: 2px solid #d98200; color: inherit; border-radius: 2px; }
ol { columns: 2 16rem; font-size: .9rem; color: #333; }
ol span { color: #666; }
code { background: #f2f2f4; padding: .1em .3em; border-radius: 3px; }
p.title { font-weight: 600; }
p.title, p.text { white-space: pre-wrap; }
p { overflow-wrap: anywhere; }
""".strip()


def free_mentions(phrases: Sequence[Mapping], field: str = "text") -> list[tuple[int, int, int]]:
    """(start, end, index of the phrase) of mentions, in text order; where mentions overlap, that of the earlier phrase.

    Args:
        phrases: of a document, best first.
        field: "title" or "text". A mention without a field is in the text.
    """
    taken: list[tuple[int, int, int]] = []
    covered: set[int] = set()
    for index, phrase in enumerate(phrases):
        for mention in phrase["mentions"]:
            places = range(mention["start"], mention["end"])
            if mention.get("field", "text") == field and covered.isdisjoint(places):
                covered.update(places)
                taken.append((mention["start"], mention["end"], index))
    return sorted(taken)


def is_page(path: Path) -> bool:
    """Whether a file is a page of this module, which may be replaced by another one."""
    start = PAGE[: PAGE.index("<title>")].encode()
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(start)) == start


def render_page(
    texts: Sequence[str | Mapping],
    keyphrases: Sequence[Sequence[Mapping]],
    names: Sequence[str] | None = None,
    title: str = "Keyphrases",
) -> str:
    """An HTML page with the mentions of each document's keyphrases marked, the stronger the better their score.

    Args:
        texts: the documents, as they were passed to the pipeline: texts, or `{"title": ..., "text": ...}`.
        keyphrases: the pipeline's result for each document.
        names: headings; by default "Document 1" and so on.
        title: of the page.
    """
    names = names or [f"Document {number}" for number in range(1, len(texts) + 1)]
    sections = []
    for name, document, phrases in zip(names, texts, keyphrases, strict=True):
        fields = {"text": document} if isinstance(document, str) else document
        items = "\n".join(f"<li>{escape(p['keyphrase'])} <span>{_describe(p)}</span></li>" for p in phrases)
        paragraphs = [
            f'<p class="{field}">{mark_mentions(fields[field], phrases, field)}</p>'
            for field in ("title", "text")
            if fields.get(field)
        ]
        sections.append("\n".join([f"<h2>{escape(name)}</h2>\n<ol>\n{items}\n</ol>", *paragraphs]))
    return PAGE.format(title=escape(title), style=STYLE, body="\n".join(sections))


def _describe(phrase: Mapping) -> str:
    """The score of a keyphrase and the number of its mentions; a candidate that does not occur has neither."""
    return "absent" if phrase["score"] is None else f"{phrase['score']:.2f}, {len(phrase['mentions'])} ×"


def mark_mentions(text: str, phrases: Sequence[Mapping], field: str = "text") -> str:
    """The escaped text of a field with `<mark>` around each mention of keyphrases, best first."""
    parts, position = [], 0
    for start, end, index in free_mentions(phrases, field):
        strength = f"{0.15 + 0.7 * phrases[index]['score']:.2f}"
        note = escape(f"{phrases[index]['keyphrase']}: {phrases[index]['score']:.2f}")
        mark = f'<mark style="--strength: {strength}" title="{note}">{escape(text[start:end])}</mark>'
        parts += [escape(text[position:start]), mark]
        position = end
    return "".join([*parts, escape(text[position:])])
