"""The page of marked keyphrases."""

from html.parser import HTMLParser

import pytest

from keyphrase_tools.html_page import render_page

TEXT = 'Graph cuts <b>solve</b> "graph cuts" & cuts'


def phrase(keyphrase: str, score: float, *spans: tuple[int, int]) -> dict:
    return {"keyphrase": keyphrase, "score": score, "mentions": [{"start": a, "end": b} for a, b in spans]}


class Marks(HTMLParser):
    """Collects the text of paragraphs and of marks."""

    def __init__(self, page: str):
        super().__init__()
        self.open, self.paragraphs, self.marks, self.tags = [], [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.append(tag)
        if tag == "p":
            self.paragraphs.append("")
        if tag == "mark":
            self.marks.append(("", dict(attrs)["title"]))

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data):
        if "p" in self.open:
            self.paragraphs[-1] += data
        if "mark" in self.open:
            text, title = self.marks[-1]
            self.marks[-1] = (text + data, title)


def test_every_mention_is_marked_and_the_text_is_unchanged():
    phrases = [phrase("Graph cuts", 0.9, (0, 10), (26, 36)), phrase("cuts", 0.4, (6, 10), (32, 36), (39 + 1, 44))]
    page = Marks(render_page([TEXT, "no <script>"], [phrases, []], ["a & b", "c"]))
    assert page.paragraphs == [TEXT, "no <script>"] and "script" not in page.tags and "b" not in page.tags
    assert [text for text, _ in page.marks] == [TEXT[0:10], TEXT[26:36], TEXT[40:44]]
    assert page.marks[0][1] == "Graph cuts: 0.90" and page.marks[2][1] == "cuts: 0.40"


def test_a_name_is_needed_for_each_text():
    with pytest.raises(ValueError):
        render_page(["a", "b"], [[], []], ["one"])


def test_documents_with_titles_are_marked_in_both_fields(extract):
    documents = [
        {"title": "Graph cuts <b>", "text": "  A graph & graph cuts"},
        {"title": None, "text": "graph cuts"},
        "graph cuts",
    ]
    found = extract(documents, top_k=None)
    marks = Marks(render_page(documents, found))
    shown = ["Graph cuts <b>", "  A graph & graph cuts", "graph cuts", "graph cuts"]
    assert marks.paragraphs == shown
    by_hand = phrase("graph cuts", 0.5) | {
        "mentions": [{"start": 2, "end": 7, "field": "title"}, {"start": 3, "end": 6, "field": "text"}]
    }
    assert [
        text for text, _ in Marks(render_page([{"title": "0123456789", "text": "abcdefghi"}], [[by_hand]])).marks
    ] == ["23456", "def"]


def test_candidates_that_do_not_occur_are_listed(extract):
    found = extract("A graph.", candidates=["graph", "energy"])
    page = render_page(["A graph."], [found])
    assert [text for text, _ in Marks(page).marks] == ["graph"] and "energy" in page


def test_the_page_is_as_wide_as_a_phone():
    assert '<meta name="viewport" content="width=device-width' in render_page([], [])
