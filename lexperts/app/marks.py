"""HTML of what was read in a text. All text of users is escaped here, or by `html_page.mark_spans`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape

from keyphrase_tools.html_page import free_mentions, mark_spans

from .reading import Reading

KINDS = 8  # experts with a colour and an underline of their own


def text_html(text: str, phrases: Sequence[Mapping], strengths: Sequence[float]) -> str:
    """The text with each mention marked, and the rank of its keyphrase after it.

    Args:
        strengths: of the colour of each phrase, from 0 to 1.
    """
    spans = []
    for start, end, index in free_mentions(phrases):
        rank = f'<sup><span class="lx-hidden"> keyphrase </span>{index + 1}</sup></mark>'
        spans.append((start, end, f'<mark style="--strength:{strengths[index]:.2f}">', rank))
    return f'<p class="lx-text">{mark_spans(text, spans)}</p>'


def list_html(phrases: Sequence[Mapping], digits: int = 2, bars: bool = True) -> str:
    """A table of keyphrases, best first, each with its score, which is also drawn as a bar."""
    rows = [
        f'<tr><td class="lx-rank">{rank}</td><th scope="row">{escape(phrase["keyphrase"])}</th>'
        f'<td class="lx-score">{phrase["score"]:.{digits}f}{bar(phrase["score"]) if bars else ""}</td>'
        f'<td class="lx-count">{len(phrase["mentions"])}</td></tr>'
        for rank, phrase in enumerate(phrases, start=1)
    ]
    return (
        '<table class="lx-list"><thead><tr><th scope="col" class="lx-rank">#</th><th scope="col">keyphrase</th>'
        '<th scope="col" class="lx-score">score</th><th scope="col" class="lx-count">mentions</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def css_class(expert: int) -> str:
    """The classes of an expert's colour and underline."""
    return f"lx-expert lx-expert-{expert % KINDS}"


def bar(share: float) -> str:
    """A bar from 0 to 1."""
    return f'<span class="lx-bar" style="--strength:{share:.2f}"></span>'


def section(title: str, content: str, note: str = "") -> str:
    """A titled part of the page."""
    note = f'<p class="lx-note">{note}</p>' if note else ""
    return f'<section class="lx-card"><h2>{title}</h2>{note}{content}</section>'


def keyphrases_html(reading: Reading | None, threshold: float | None = None, top_k: int = 10) -> str:
    """The text with its keyphrases marked, and their list."""
    if reading is None:
        return section("Keyphrases", '<p class="lx-note">Type or paste a text.</p>')
    found = reading.keyphrases(threshold)
    phrases = found[:top_k]
    if not phrases:
        lower = "Lower the threshold" if threshold is not None else "Set a threshold, or paste a longer text"
        return section("Keyphrases", f'<p class="lx-note">None found. {lower}.</p>{text_html(reading.text, [], [])}')
    content = text_html(reading.text, phrases, [phrase["score"] for phrase in phrases]) + list_html(phrases)
    limit = "" if threshold is None else f" at a threshold of {threshold:.2f}"
    shown = f", the {len(phrases)} best shown" if len(found) > len(phrases) else ""
    return section(
        "Keyphrases", content, f"{len(found)} found{limit}{shown}. A score is a probability: higher is better."
    )


def yake_html(text: str, phrases: Sequence[Mapping]) -> str:
    """The text as YAKE reads it."""
    content = text_html(text, phrases, [0.5] * len(phrases)) + list_html(phrases, digits=3, bars=False)
    return section(
        "YAKE, for comparison", content, f"Its best {len(phrases)}. Its scores are weights: lower is better."
    )


def experts_html(reading: Reading | None) -> str:
    """Each word in the colour and with the underline of the expert that has the largest weight on it."""
    if reading is None or not reading.experts:
        reason = "This model has no experts." if reading is not None and not reading.num_experts else "No text yet."
        return section("Experts", f'<p class="lx-note">{reason}</p>')
    words: dict[int, Counter] = {}
    for start, end, expert in reading.experts:
        word = reading.text[start:end]
        words.setdefault(expert, Counter())[word.lower()] += any(map(str.isalnum, word))
    spans = [(start, end, f'<span class="{css_class(expert)}">', "</span>") for start, end, expert in reading.experts]
    legend = []
    for expert in range(reading.num_experts):
        of_expert = words.get(expert, Counter())
        share = sum(e == expert for _, _, e in reading.experts) / len(reading.experts)
        examples = ", ".join(escape(word) for word, count in of_expert.most_common(8) if count)
        legend.append(
            f'<li><span class="{css_class(expert)}">expert {expert + 1}</span> '
            f"<strong>{share:.0%}</strong> of the words{f': {examples}' if examples else ''}</li>"
        )
    marked = mark_spans(reading.text, spans)
    content = f'<ul class="lx-legend">{"".join(legend)}</ul><p class="lx-text">{marked}</p>'
    note = "The model's router sends each word to several experts. Its colour and underline show the one with the largest weight."
    return section("Who reads what", content, note)


def message_html(message: str = "", kind: str = "error") -> str:
    """A message that screen readers announce; nothing without one."""
    role = "alert" if kind == "error" else "status"
    return f'<p class="lx-{kind}" role="{role}">{escape(message)}</p>' if message else ""
