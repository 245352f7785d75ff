"""What the app computes and writes, without a browser: readings at any threshold, marks, YAKE's phrases, the command."""

import copy
import re

import pytest
from transformers import pipeline
from typer.testing import CliRunner

from keyphrase_tools.phrase_features import NAMES, NAMES_WITH_SHAPE
from lexperts.app import AppSettings
from lexperts.app.marks import experts_html, keyphrases_html, message_html, yake_html
from lexperts.app.reading import Reader
from lexperts.app.yake_reader import find_mentions
from lexperts.cli import build_app
from tests.keyphrase_tools.known_answers import random_text

TEXT = random_text(150, seed=0)  # several windows
HOSTILE = '<script>alert(1)</script> graph cuts & "networks" ${7*7} {{7*7}} <img src=x onerror=alert(2)> learning'
RANKER = {"bias": -1.0, "gold": 1.2, **{name: 0.1 * i for i, name in enumerate(NAMES)}}
RANKER_OF_SHAPES = {**RANKER, **{name: 0.1 * i for i, name in enumerate(NAMES_WITH_SHAPE)}}


@pytest.fixture(scope="module")
def extract(tiny_seke, tiny_tokenizer):
    """A pipeline whose model has experts and styles."""
    model = tiny_seke(styles=["tags", "words"], num_experts=3)
    model.classifier.weight.data *= 30
    return pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer)


def with_ranker(extract, ranker=RANKER, **rankers):
    """The same model with a ranker, and classes of words for it."""
    model = copy.deepcopy(extract.model)
    model.config.keyphrase_ranker, model.config.style_rankers = ranker, rankers
    model.config.keyphrase_word_classes = {
        name: [(7 * i * k % 11 - 5) / 10 for i in range(model.config.hidden_size + 1)]
        for k, name in enumerate(("other", "modifier", "noun"), start=2)
    }
    return pipeline("keyphrase-extraction", model=model, tokenizer=extract.tokenizer)


@pytest.mark.parametrize("style", [None, "tags"])
def test_one_pass_reads_the_probabilities_and_the_experts_of_each_word(extract, style):
    reading = Reader(extract).read(TEXT, style)
    ((words, p),) = extract.read_words([TEXT], style=style)
    assert reading._block.documents[0].words == words and (reading._block.probabilities.document(0) == p).all()
    assert [TEXT[start:end] for start, end, _ in reading.experts] == [word for word, _, _ in words]
    assert reading.num_experts == 3 and len({expert for _, _, expert in reading.experts}) > 1


def test_a_model_without_experts_has_none(tiny_seke, tiny_tokenizer):
    model = tiny_seke(use_moe=False)
    reading = Reader(pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer)).read(TEXT)
    assert reading.num_experts == 0 and reading.experts == []


def test_a_threshold_selects_without_the_model_as_the_pipeline_would(extract):
    reading = Reader(extract).read(TEXT)
    assert reading.keyphrases() == extract(TEXT, top_k=200)
    extract.model.forward, forward = None, extract.model.forward
    try:
        found = {threshold: reading.keyphrases(threshold) for threshold in (0.3, 0.9)}
    finally:
        extract.model.forward = forward
    for threshold, phrases in found.items():
        assert phrases == extract(TEXT, top_k=200, threshold=threshold)
    assert found[0.3] != found[0.9]


@pytest.mark.parametrize("style", [None, "words"])
@pytest.mark.parametrize("ranker", [RANKER, RANKER_OF_SHAPES], ids=["words", "shapes"])
def test_a_ranker_gives_scores_among_which_the_threshold_selects(extract, ranker, style):
    ranked = with_ranker(extract, ranker, words={**ranker, "bias": 0.5})
    reader, options = Reader(ranked), {} if style is None else {"style": style}
    assert reader.ranks and reader.styles == ["tags", "words"]
    reading = reader.read(TEXT, style)
    assert reading.keyphrases() == ranked(TEXT, top_k=None, **options)
    least = reading.keyphrases()[2]["score"]
    assert reading.keyphrases(least) == ranked(TEXT, top_k=200, min_score=least, **options)
    assert len(reading.keyphrases(0.01)) >= len(reading.keyphrases(least)) >= 3


def test_an_unknown_style_is_refused(extract):
    with pytest.raises(ValueError, match="colour"):
        Reader(extract).read(TEXT, "colour")


def test_the_html_holds_the_text_and_no_tag_of_it(extract):
    reading = Reader(extract).read(HOSTILE)
    phrases = [{"keyphrase": HOSTILE, "score": 1.0, "mentions": [{"start": 0, "end": len(HOSTILE)}]}]
    pages = [
        keyphrases_html(reading, 0.01, 50),
        experts_html(reading),
        yake_html(HOSTILE, phrases),
        message_html(HOSTILE),
    ]
    for html in pages:
        assert "<script" not in html and "<img" not in html and "&lt;" in html
    marked = re.sub(r"<sup>.*?</sup>", "", re.search(r'<p class="lx-text">(.*?)</p>', pages[0]).group(1))
    plain = re.sub(r"<[^>]*>", "", marked)
    assert plain.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", '"').replace("&amp;", "&") == HOSTILE


def test_marks_show_rank_and_score_and_experts_more_than_a_colour(extract):
    reading = Reader(extract).read(TEXT)
    phrases = reading.keyphrases()
    html = keyphrases_html(reading, None, 5)
    assert f"{len(phrases)} found, the 5 best shown" in html and html.count('<th scope="row">') == 5
    assert f"{phrases[0]['score']:.2f}" in html and "keyphrase </span>1</sup>" in html
    assert "Lower the threshold" in keyphrases_html(Reader(extract).read("; ..."), 0.99)
    shares = [int(share) for share in re.findall(r"<strong>(\d+)%", experts_html(reading))]
    assert len(shares) == 3 and sum(shares) == pytest.approx(100, abs=2)


def test_yakes_phrases_are_found_in_any_case_and_as_whole_words():
    text = "Graph\ncuts; graph cutsy, GRAPH CUTS."
    assert [text[m["start"] : m["end"]] for m in find_mentions(text, "graph cuts")] == ["Graph\ncuts", "GRAPH CUTS"]


def test_the_command_has_help_and_checks_its_limits():
    done = CliRunner().invoke(build_app(), ["app", "--help"])
    assert done.exit_code == 0 and "lexperts app --mixture" in done.output
    assert CliRunner().invoke(build_app(), ["app", "--max-characters", "0"]).exit_code == 2
    with pytest.raises(ValueError, match="max_characters=0"):
        AppSettings(max_characters=0)
