"""The page of marked keyphrases."""

import re
from html import unescape

from keyphrase_tools.html_page import render_page

TEXT = 'Graph cuts <b>solve</b> "graph cuts" & cuts'


def phrase(keyphrase: str, score: float, *spans: tuple[int, int, str]) -> dict:
    mentions = [{"start": a, "end": b} | ({"field": field[0]} if field else {}) for a, b, *field in spans]
    return {"keyphrase": keyphrase, "score": score, "mentions": mentions}


def parse(page: str) -> tuple[list, list]:
    """The texts of a page's paragraphs and marks, with the notes of these."""
    paragraphs = re.findall(r'<p class="t[a-z]+">(.*?)</p>', page, re.DOTALL)
    marks = re.findall(r'<mark style="[^"]+" title="([^"]+)">([^<]*)</mark>', page)
    texts = [unescape(re.sub("</?mark[^>]*>", "", paragraph)) for paragraph in paragraphs]
    return texts, [(unescape(text), unescape(note)) for note, text in marks]


def test_every_mention_is_marked_and_the_text_is_unchanged():
    phrases = [phrase("Graph cuts", 0.9, (0, 10), (26, 36)), phrase("cuts", 0.4, (6, 10), (32, 36), (40, 44))]
    html = render_page([TEXT, "no <script>"], [phrases, []], ["a & b", "c"])
    assert not re.search("<script|<b>|a & b", html)
    shown = [(TEXT[0:10], "Graph cuts: 0.90"), (TEXT[26:36], "Graph cuts: 0.90"), (TEXT[40:44], "cuts: 0.40")]
    assert parse(html) == ([TEXT, "no <script>"], shown)


def test_fields_are_marked_each_in_its_paragraph(extract):
    documents = [{"title": "Graph <b>", "text": "  A graph & cuts"}, {"title": None, "text": "graph cuts"}, "cuts"]
    paragraphs, _ = parse(render_page(documents, extract(documents, top_k=None)))
    assert paragraphs == ["Graph <b>", "  A graph & cuts", "graph cuts", "cuts"]
    by_hand = phrase("graph cuts", 0.5, (2, 7, "title"), (3, 6, "text"))
    _, marks = parse(render_page([{"title": "0123456789", "text": "abcdefghi"}], [[by_hand]]))
    assert [text for text, _ in marks] == ["23456", "def"]


def test_candidates_that_do_not_occur_are_listed(extract):
    page = render_page(["A graph."], [extract("A graph.", candidates=["graph", "energy"])])
    assert [text for text, _ in parse(page)[1]] == ["graph"] and "energy" in page
