"""What experts specialise in: Cramer's V against its formula, tokens and their experts, the table, the plot and the page."""

import html.parser
import math

import numpy as np
import pandas as pd
import pytest
import spacy
import torch
from scipy.stats.contingency import association

from keyphrase_tools.specialisation import (
    CATEGORIES,
    cramers_v,
    cramers_v_of_table,
    expert_specialisation,
    expert_usage,
    specialisation,
    token_experts,
)
from keyphrase_tools.specialisation_report import COLOURS, expert_page, plot_specialisation

TEXTS = [
    "Graph cuts segment the images, and the network learns 12 cuts.",
    "Deep graph\n\nnetworks (of images).",
    "",
    "cut",
]


@pytest.fixture(scope="module")
def blank():
    return spacy.blank("en")


@pytest.fixture(scope="module")
def annotated():
    """Parts of speech and entities by rules, which need no trained weights."""
    nlp = spacy.blank("en")
    tagger = nlp.add_pipe("attribute_ruler")
    tagger.add(patterns=[[{}]], attrs={"POS": "NOUN"})
    tagger.add(patterns=[[{"IS_PUNCT": True}]], attrs={"POS": "PUNCT"})
    nlp.add_pipe("entity_ruler").add_patterns([{"label": "METHOD", "pattern": "Graph cuts"}])
    return nlp


@pytest.fixture(scope="module")
def model(tiny_seke):
    torch.manual_seed(0)
    return tiny_seke("bert", num_experts=3, num_experts_per_tok=2).eval()


@pytest.fixture(scope="module")
def tokens(model, tiny_tokenizer, annotated):
    return token_experts(model, tiny_tokenizer, TEXTS, annotated)


def by_hand(table):
    """Bergsma (2013) from the counts, in plain steps."""
    n, (r, c) = table.sum(), table.shape
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / n
    chi2 = ((table - expected) ** 2 / expected).sum()
    phi2 = max(0, chi2 / n - (r - 1) * (c - 1) / (n - 1))
    return math.sqrt(phi2 / min(r - (r - 1) ** 2 / (n - 1) - 1, c - (c - 1) ** 2 / (n - 1) - 1))


@pytest.mark.parametrize("counts", [[[30, 2], [4, 25]], [[10, 3, 1], [2, 12, 4]], [[5, 1], [1, 7], [9, 2]]])
def test_cramers_v_is_the_formula(counts):
    counts = np.array(counts)
    a, b = ([k for row in np.ndindex(counts.shape) for k in [row[side]] * counts[row]] for side in (0, 1))
    assert cramers_v(a, b) == pytest.approx(by_hand(counts), abs=1e-12)
    assert cramers_v(b, a) == pytest.approx(by_hand(counts), abs=1e-12)


def test_the_correction_takes_the_bias_away():
    """Of independent variables with many values the plain statistic is far from 0, the corrected one is not."""
    generator = np.random.default_rng(0)
    a, b = generator.integers(0, 4, 400), generator.integers(0, 90, 400)
    shuffled = [generator.permutation(a) for _ in range(20)]
    assert np.mean([cramers_v(x, b) for x in shuffled]) < 0.15
    assert np.mean([association(pd.crosstab(x, b)) for x in shuffled]) > 0.4  # Cramer's own
    assert cramers_v(a, a) == pytest.approx(1) and cramers_v(a, ["same"] * 400) == 0
    assert math.isnan(cramers_v(a, [None] * 400))
    assert cramers_v([*a, 3], [*a, None]) == pytest.approx(1)  # a missing value says nothing


def test_rows_and_columns_without_counts_are_ignored():
    table, padded = np.array([[30, 2], [4, 25]]), np.zeros((3, 3))
    padded[::2, ::2] = table
    assert cramers_v_of_table(padded) == pytest.approx(cramers_v_of_table(table)) == by_hand(table)
    for alike in ([[50, 0], [70, 0]], [[50, 3]], [[6, 4], [12, 8]]):
        assert cramers_v_of_table(np.array(alike)) == 0


def test_a_token_has_the_expert_that_the_router_prefers(tokens, model, tiny_tokenizer, annotated):
    assert list(tokens["document"].unique()) == [0, 1, 3]  # the empty one has none
    for number, text in enumerate(TEXTS):
        own = tokens[tokens["document"] == number]
        assert [text[t.start : t.end].lower() for t in own.itertuples()] == list(own["word"])
        if own.empty:
            continue
        encoded = tiny_tokenizer(text, return_offsets_mapping=True, return_tensors="pt")
        offsets = encoded.pop("offset_mapping")[0].tolist()
        with torch.no_grad():
            outputs = model(**encoded)
        gates = outputs.router_logits[0].softmax(-1)
        for token in own.itertuples():
            place = next(i for i, (start, end) in enumerate(offsets) if start <= token.start < end)
            assert token.expert == int(gates[place].argmax())
            assert token.weight == pytest.approx(float(gates[place].max()), abs=1e-6)
            entropy = -float((gates[place] * gates[place].log2()).sum())
            assert token.entropy == pytest.approx(entropy, abs=1e-5)
            assert token.label == "OBI"[int(outputs.logits[0, place].argmax())]
    first = tokens[tokens["document"] == 0].set_index("word")
    assert (
        first.loc[",", "is_punctuation"] and first.loc["and", "is_stopword"] and not first.loc["images", "is_stopword"]
    )
    assert first.loc[",", "pos"] == "PUNCT" and first.loc["images", "pos"] == "NOUN"
    assert first.loc["graph", "is_entity"] and first.loc["graph", "entity_type"] == "METHOD"
    assert not first.loc["images", "is_entity"] and first.loc["images", "entity_type"] == "none"


def test_neither_batches_nor_company_nor_windows_change_it(tokens, model, tiny_tokenizer, annotated):
    for size in (1, 2):
        again = token_experts(model, tiny_tokenizer, iter(TEXTS), annotated, batch_size=size)
        assert again[["document", "start", "expert", "label"]].equals(tokens[["document", "start", "expert", "label"]])
        assert np.allclose(again["weight"], tokens["weight"], atol=1e-5)
    long = " ".join(TEXTS[:2] * 30)
    found = token_experts(model, tiny_tokenizer, [long], annotated)
    assert len(found) == 30 * tokens["document"].isin([0, 1]).sum()


def test_the_models_own_threshold_decides_the_labels(model, tiny_tokenizer, blank):
    model.config.keyphrase_threshold = 1e-6
    try:
        assert set(token_experts(model, tiny_tokenizer, TEXTS, blank)["label"]) <= {"B", "I"}
    finally:
        model.config.keyphrase_threshold = None


def test_a_blank_pipeline_leaves_what_it_does_not_know_missing(model, tiny_tokenizer, blank, tokens):
    found = token_experts(model, tiny_tokenizer, TEXTS, blank)
    assert found[["pos", "is_entity", "entity_type"]].isna().all(axis=None)
    table = expert_specialisation(model, tiny_tokenizer, TEXTS, blank)
    assert list(table.index) == list(CATEGORIES.values()) and list(table.columns) == ["experts", 0, 1, 2]
    assert table.loc[["POS", "bin. NE", "NE"]].isna().all(axis=None)
    known = table.drop(index=["POS", "bin. NE", "NE"])
    assert known.notna().all(axis=None) and ((known >= 0) & (known <= 1)).all(axis=None)
    assert specialisation(tokens).loc["POS"].notna().all()


def made(experts, words):
    frame = pd.DataFrame({"expert": experts, "word": words, "document": 0, "weight": 0.5, "entropy": 1.0})
    for name in CATEGORIES:
        frame[name] = frame["word"] if name == "word" else None
    frame.attrs["num_experts"] = 3
    return frame


def test_an_expert_with_words_of_its_own_stands_out():
    table = specialisation(made([0, 1, 0, 1] * 50, ["a", "b", "a", "c"] * 50))
    assert table.loc["Words", "experts"] == pytest.approx(1, abs=1e-2)
    assert table.loc["Words", 2] == 0  # no token prefers it


def test_usage_counts_tokens_and_says_how_sure_the_router_is():
    usage = expert_usage(made([0, 0, 0, 1], "abcd"))
    assert list(usage["tokens"]) == [3, 1, 0] and list(usage["share"]) == [0.75, 0.25, 0]
    assert usage.attrs["entropy"] == 1 and usage.attrs["entropy_of_shares"] == pytest.approx(0.8113, abs=1e-4)


class Page(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.inside, self.text, self.spans = False, "", []

    def handle_starttag(self, tag, attrs):
        self.inside |= ("class", "text") in attrs
        if self.inside and tag == "span":
            self.spans.append(dict(attrs))

    def handle_endtag(self, tag):
        self.inside &= tag != "p"

    def handle_data(self, data):
        self.text += data * self.inside


def test_the_page_has_the_text_and_each_tokens_expert(model, tiny_tokenizer, blank, tmp_path):
    text = 'Graph <b>cuts</b> & "networks"\n of the images'
    tokens = token_experts(model, tiny_tokenizer, ["cut", text], blank)
    expert_page(tokens, text, tmp_path / "page.html", document=1)
    page, own = Page(), tokens[tokens["document"] == 1]
    page.feed((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert page.text == text and len(page.spans) == len(own)
    for span, token in zip(page.spans, own.itertuples(), strict=True):
        assert span["title"].startswith(f"expert {token.expert}, weight {token.weight:.2f}, label {token.label}")
        assert ("key" in span["class"]) == (token.label != "O")
    with pytest.raises(ValueError, match="document=7 has no tokens"):
        expert_page(tokens, text, tmp_path / "none.html", document=7)


def test_many_experts_have_colours_of_their_own():
    from keyphrase_tools.specialisation_report import colour

    for E in (2, len(COLOURS), 20):
        assert len({colour(e, E) for e in range(E)}) == E


def test_the_plot_is_drawn(tokens, model, tiny_tokenizer, blank, tmp_path):
    from matplotlib.image import imread

    for number, table in enumerate(
        (specialisation(tokens), expert_specialisation(model, tiny_tokenizer, TEXTS, blank))
    ):
        plot_specialisation(table, tmp_path / f"{number}.png")
        assert imread(tmp_path / f"{number}.png").std() > 0.05


def test_what_cannot_be_read_is_named(tiny_seke, model, tiny_tokenizer, blank):
    with pytest.raises(ValueError, match="SekeForTokenClassification.*use_moe=True"):
        token_experts(tiny_seke("bert", use_moe=False), tiny_tokenizer, TEXTS, blank)
    with pytest.raises(TypeError, match=r"documents is a string"):
        token_experts(model, tiny_tokenizer, TEXTS[0], blank)
    nothing = token_experts(model, tiny_tokenizer, [], blank)
    assert nothing.empty and nothing.attrs["num_experts"] == 3
    assert specialisation(nothing).isna().all(axis=None) and (expert_usage(nothing)["share"] == 0).all()
