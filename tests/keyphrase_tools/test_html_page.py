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
