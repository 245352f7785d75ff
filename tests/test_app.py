# needs: app
"""The demo app: what its tabs compute and refuse, its API, and where its page comes from."""

import re
from urllib.request import urlopen

import gradio as gr
import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError
from transformers import pipeline

import merge_tools
from lexperts.app import Answers, highlight, launch, open_mixture
from tests.keyphrase_tools.known_answers import random_text
from tests.merge_tools.conftest import save_expert

# emoji, one of three code points, a combining character, HTML, a line break, and several windows
TEXT = f"👩‍🔬 🎉 cafe\u0301s <img src=x onerror=alert(1)> &amp; graph\ncuts: {random_text(150, seed=0)}"


@pytest.fixture(scope="module")
def extract(tiny_seke, tiny_tokenizer):
    """A pipeline whose model has experts and styles."""
    model = tiny_seke(styles=["tags", "words"], num_experts=3)
    model.classifier.weight.data *= 30
    return pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("merge")
    experts = [{"source_model": str(save_expert(folder / name, seed=i))} for i, name in enumerate(("law", "medicine"))]
    recipe = {"base_model": experts[0]["source_model"], "gate_mode": "random", "experts": experts}
    merge_tools.compose(recipe, folder / "mixture")
    return folder / "mixture"


@pytest.fixture(scope="module")
def app(folder, mixture):
    page = launch(str(folder), mixture=mixture, max_characters=2_000, wait=False)
    yield page.local_url
    page.close()


def marks_of(marked: dict, text: str) -> list[tuple[str, str]]:
    """The marks that the page shows in a text, of which it loses nothing."""
    tokens = [(token.token, token.class_or_confidence) for token in gr.HighlightedText().postprocess(marked).root]
    assert "".join(token for token, _ in tokens) == text
    return [(token, label) for token, label in tokens if label]


@pytest.mark.parametrize("options", [{"top_k": 50}, {"style": "tags", "top_k": 5}, {"min_score": 0.6, "top_k": 9}])
def test_the_keyphrases_of_the_pipeline_are_listed_and_marked(extract, options):
    expected = extract(TEXT, **options)
    style, lowest, at_most = (options.get(name, 0) for name in ("style", "min_score", "top_k"))
    marked, rows = Answers(extract).keyphrases(TEXT, False, style, lowest, at_most)
    assert rows == [[i, phrase["keyphrase"], round(phrase["score"], 3)] for i, phrase in enumerate(expected, start=1)]
    places = [{TEXT[m["start"] : m["end"]] for m in phrase["mentions"]} for phrase in expected]
    found = [token in places[int(rank) - 1] for token, rank in marks_of(marked, TEXT)]
    assert found and all(found)


def test_of_marks_that_overlap_the_longest_is_shown():
    marks, text = [(4, 8, "1"), (0, 8, "2"), (8, 8, "3"), (9, 12, "4"), (10, 13, "5"), (8, 10, "6")], "tall oak, old"
    assert marks_of(highlight(text, marks), text) == [("tall oak", "2"), (" ol", "4")]


def test_a_lone_surrogate_which_no_response_can_hold_is_an_unknown_character(extract):
    answers = Answers(extract)
    for tab in (lambda text: answers.keyphrases(text, False, "", 0, 9), answers.experts):
        assert tab("graph \ud800 cuts")[0]["text"] == "graph \ufffd cuts"


def test_a_term_that_its_context_lacks_is_a_warning(extract, monkeypatch):
    answers, warned = Answers(extract), []
    answers.default_pipeline = lambda task: lambda row: {"definition": "", "score": 0}
    monkeypatch.setattr(gr, "Warning", lambda message: warned.append(term))
    for term, context in (("art", "a party"), ("mouse", "The mice ran."), ("ice-cream", "an ice cream")):
        answers.define(term, context)
    assert warned == ["art"]


def test_each_word_has_its_expert(extract, tiny_seke):
    marked, means = Answers(extract).experts(TEXT)
    block = extract.read([TEXT], gates=True)
    best = [f"expert {expert + 1}" for expert in block.gates[0].argmax(1)]
    assert [label for _, label in marks_of(marked, TEXT)] == best and len(set(best)) > 1
    assert list(means["weight"]) == pytest.approx(block.gates[0].mean(0)) and set(means["layer"]) == {"keyphrase model"}
    extract = pipeline("keyphrase-extraction", model=tiny_seke(use_moe=False), tokenizer=extract.tokenizer)
    assert Answers(extract).expert_names == []


def test_each_token_has_its_expert_of_a_mixture(extract, mixture):
    text = "the court 🎉 café fever"
    (routing,) = merge_tools.route(mixture, [text])
    marked, means = Answers(extract, open_mixture(mixture)).experts(text)
    table = means.pivot(index="layer", columns="expert", values="weight")
    assert list(table) == ["law", "medicine"] and table.to_numpy() == pytest.approx(routing.load(), abs=1e-6)
    law, medicine = ((routing.weights * (routing.experts == e)).sum((0, 2))[1:] for e in range(2))  # without <s>
    assert [label == "medicine" for _, label in marks_of(marked, text)] == list(medicine > law)


@pytest.mark.parametrize(
    "tab, values, named",
    [
        ("define", (" ", "a bank"), "term is empty"),
        ("keyphrases", ("a" * 41, False, "", 0, 10), "41 characters.*40"),
        ("keyphrases", ("graph", False, "colour", 0, 10), "colour"),
        ("keyphrases", ("graph", True, "", 0, 10), "pip install"),
        ("experts", ("a" * 41,), "41 characters.*40"),
    ],
)
def test_what_a_visitor_can_fix_is_named_in_one_line(extract, monkeypatch, tab, values, named):
    monkeypatch.setattr("run_tools.packaged.find_spec", lambda name: None)  # the models over SmolLM2 are not installed
    with pytest.raises(gr.Error, match=named) as refused:
        getattr(Answers(extract, max_characters=40), tab)(*values)
    assert "\n" not in refused.value.message


def test_programs_can_call_the_page(app):
    client = Client(app, verbose=False)
    marked, table = client.predict(TEXT, False, "", 0, 10, api_name="/keyphrases")
    assert "".join(token["token"] for token in marked) == TEXT and len(table["data"]) == 10
    with pytest.raises(AppError, match="2,001"):
        client.predict("a" * 2_001, api_name="/experts")


def test_nothing_is_loaded_from_elsewhere(app):
    """The page's fonts, scripts and styles. In its description are addresses that a browser does not open."""
    content = "".join(urlopen(app + name).read().decode() for name in ("", "config", "theme.css"))
    assert "127.0.0.1" in content and '"analytics_enabled":false' in content
    assert re.findall(r"""(?:src=|href=|url\(|import |stylesheets":\[)["']?https?://(?!127)[^"')]*""", content) == []
