"""A web page that shows documents with their keyphrases marked: one file without scripts, opened in any browser."""

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
body {{ font: 16px/1.6 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1c1c1e; }}
h2 {{ font-size: 1.1rem; margin-top: 2.5rem; border-top: 1px solid #ddd; padding-top: 1rem; }}
mark {{ background: rgb(255 190 60 / var(--strength)); border-bottom: 2px solid #d98200; color: inherit; border-radius: 2px; }}
ol {{ columns: 2 16rem; font-size: .9rem; color: #333; }}
ol span {{ color: #777; }}
p.title {{ font-weight: 600; }}
p {{ white-space: pre-wrap; overflow-wrap: anywhere; }}
</style>
</head>
<body>
<h1>{title}</h1>
{documents}
</body>
</html>
"""


def is_page(path: Path) -> bool:
    """Whether a file is a page of `render_page`, which may be replaced by another one."""
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
    sections = [
        f"<h2>{escape(name)}</h2>\n<ol>\n{list_items(phrases)}\n</ol>\n{mark_document(document, phrases)}"
        for name, document, phrases in zip(names, texts, keyphrases, strict=True)
    ]
    return PAGE.format(title=escape(title), documents="\n".join(sections))


def list_items(phrases: Sequence[Mapping]) -> str:
    """The keyphrases with their scores as items of a list; a candidate that does not occur has neither."""
    return "\n".join(f"<li>{escape(phrase['keyphrase'])} <span>{describe(phrase)}</span></li>" for phrase in phrases)


def describe(phrase: Mapping) -> str:
    """The score of a keyphrase and the number of its mentions."""
    return "absent" if phrase["score"] is None else f"{phrase['score']:.2f}, {len(phrase['mentions'])} ×"


def mark_document(document: str | Mapping, phrases: Sequence[Mapping]) -> str:
    """The paragraphs of a document: its text, after its title if it has one."""
    if isinstance(document, str):
        return f"<p>{mark_mentions(document, phrases)}</p>"
    fields = [field for field in ("title", "text") if document.get(field)]
    return "\n".join(f'<p class="{field}">{mark_mentions(document[field], phrases, field)}</p>' for field in fields)


def mark_mentions(text: str, phrases: Sequence[Mapping], field: str = "text") -> str:
    """The escaped text with `<mark>` around each mention; where mentions overlap, the better phrase is marked.

    Args:
        text: of a document, or of one of its fields.
        phrases: of the document.
        field: "title" or "text". A mention without a field is in the text.
    """
    taken: list[tuple[int, int, Mapping]] = []
    present = [phrase for phrase in phrases if phrase["score"] is not None]
    for phrase in sorted(present, key=lambda phrase: -phrase["score"]):
        for mention in phrase["mentions"]:
            start, end = mention["start"], mention["end"]
            is_here = mention.get("field", "text") == field
            if is_here and all(end <= other or start >= other_end for other, other_end, _ in taken):
                taken.append((start, end, phrase))
    parts, position = [], 0
    for start, end, phrase in sorted(taken, key=lambda span: span[0]):
        strength, note = f"{0.15 + 0.7 * phrase['score']:.2f}", f"{phrase['keyphrase']}: {phrase['score']:.2f}"
        parts.append(escape(text[position:start]))
        parts.append(f'<mark style="--strength: {strength}" title="{escape(note)}">{escape(text[start:end])}</mark>')
        position = end
    return "".join([*parts, escape(text[position:])])
