"""The app in headless Chromium, with the default model and no network: what a visitor sees, types, uploads and gets."""

import json
import re
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("gradio", reason="the extra app is not installed")
playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
pytest.importorskip("lexperts_seke_minilm", reason="the default model is not installed")

from transformers import pipeline  # noqa: E402

import merge_tools  # noqa: E402
from lexperts.app import AppSettings, launch  # noqa: E402
from lexperts.app.page import open_reader  # noqa: E402
from lexperts.app.samples import SAMPLES  # noqa: E402
from tests.merge_tools.conftest import save_expert  # noqa: E402

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
LIMIT = 2_000
pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason="Chromium is not installed")
expect = playwright.expect
expect.set_options(timeout=60_000)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A folder with a mixture of two tiny Llamas."""
    folder = tmp_path_factory.mktemp("merge")
    experts = [save_expert(folder / name, seed=i) for i, name in enumerate(("law", "medicine"))]
    recipe = {"base_model": str(experts[0]), "gate_mode": "random"}
    recipe["experts"] = [{"source_model": str(path)} for path in experts]
    merge_tools.compose(recipe, folder / "mixture")
    return folder / "mixture"


@pytest.fixture(scope="module")
def app(mixture):
    """The address of the app."""
    settings = AppSettings(mixture=mixture, max_characters=LIMIT)
    page = launch(settings, wait=False, reader=open_reader(settings))
    yield page.local_url
    page.close()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def visit(browser, app):
    """visit(width) -> a page of that width with the app, and the list of addresses elsewhere that it asked for."""
    context = browser.new_context(viewport={"width": 1200, "height": 900}, accept_downloads=True)
    page, elsewhere = context.new_page(), []
    page.on("request", lambda r: None if r.url.startswith((app, "data:", "blob:")) else elsewhere.append(r.url))
    page.goto(app)
    expect(page.locator("#lx-ours mark").first).to_be_visible()
    yield page, elsewhere
    context.close()


@pytest.fixture
def page(visit):
    page = visit[0]
    page.get_by_role("tab", name="One text").click()
    return page


def type_text(page, text):
    """Types a text, and waits until it is read."""
    page.get_by_label("Text", exact=True).first.fill(text)
    expect(page.locator("#lx-ours .lx-text")).to_contain_text(text.split()[-1])


def rows(page):
    return page.locator("#lx-ours tbody tr")


@pytest.fixture(scope="module")
def expected():
    """expected(**options) -> how many keyphrases the pipeline finds in the first sample."""
    extract = pipeline("keyphrase-extraction")
    return lambda **options: len(extract(SAMPLES["Tidal power"], **options))


def test_it_opens_with_marks_scores_experts_and_yake_and_asks_nobody_else(visit, page, expected):
    expect(rows(page)).to_have_count(expected())
    assert re.search(r"tidal barrage\s*0\.\d\d\s*\d", page.locator("#lx-ours tbody").inner_text())
    expect(page.locator("#lx-experts .lx-legend li")).to_have_count(4)
    expect(page.locator("#lx-yake")).to_contain_text(re.compile("lower is better|pip install yake"))
    assert visit[1] == []


def test_typing_shows_other_marks_and_html_in_a_text_stays_text(page):
    page.on("dialog", lambda dialog: pytest.fail(f"a script ran: {dialog.message}"))
    type_text(
        page,
        "<script>alert(1)</script><img src=x onerror=alert(2)> ${7*7} {{7*7}} Graph cuts segment medical images quickly.",
    )
    expect(page.locator("#lx-ours mark").first).to_be_visible()
    text = page.locator("#lx-ours .lx-text").inner_text()
    assert "<script>alert(1)</script>" in text and "${7*7} {{7*7}}" in text and "49" not in text
    assert page.locator("#lx-ours script, #lx-ours img, #lx-experts img, #lx-yake img").count() == 0
    page.get_by_label("Text", exact=True).first.fill("")
    expect(page.locator("#lx-ours")).to_contain_text("Type or paste")


def test_the_threshold_is_live_and_works_by_keyboard(page, expected):
    page.get_by_role("button", name="Sample: Tidal power").click()
    expect(rows(page)).to_have_count(expected())
    slider = page.locator("#lx-threshold input[type=range]")
    expect(slider).to_be_disabled()
    page.get_by_label("Let the model choose how many").uncheck()
    expect(slider).to_be_enabled()
    slider.focus()
    for _ in range(10):
        slider.press("ArrowLeft")
    expect(page.locator("#lx-ours")).to_contain_text("threshold of 0.10")
    scores = [float(score) for score in page.locator("#lx-ours td.lx-score").all_inner_texts()]
    assert expected() < len(scores) == expected(top_k=200, min_score=0.1) and min(scores) >= 0.1
    page.get_by_label("Let the model choose how many").check()
    expect(rows(page)).to_have_count(expected())


def test_a_style_reads_the_text_again(page):
    before = page.locator("#lx-ours tbody").inner_text()
    page.get_by_label("tags", exact=True).check()
    expect(page.locator("#lx-ours tbody")).not_to_have_text(before, use_inner_text=True)
    page.get_by_label("any", exact=True).check()
    expect(page.locator("#lx-ours tbody")).to_have_text(re.compile("tidal"), use_inner_text=True)


def test_a_text_file_is_opened_and_a_bad_or_long_one_is_refused(page, tmp_path):
    files = {"good.txt": b"Opened from a file: sparse graph networks.", "latin.txt": "é".encode("latin-1") * 9}
    files |= {"long.txt": b"graph " * LIMIT}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    upload, message = page.get_by_test_id("Open a text file-upload-button"), page.locator("#lx-message [role=alert]")
    upload.set_input_files(tmp_path / "good.txt")
    expect(page.locator("#lx-ours .lx-text")).to_contain_text("sparse graph networks")
    upload.set_input_files(tmp_path / "latin.txt")
    expect(message).to_contain_text("UTF-8")
    upload.set_input_files(tmp_path / "long.txt")
    expect(message).to_contain_text("2,000")
    page.get_by_label("Text", exact=True).first.fill("word " * 500)
    expect(message).to_contain_text("2,500 characters; the limit is 2,000")


@pytest.mark.skipif(
    find_spec("lexperts_lexicon_smollm2") is None, reason="the models are not installed: make test does"
)
def test_the_models_over_smollm2_have_tabs_that_answer(page):
    for tab, element, button, expected in (
        ("Definitions", "#lx-definition", "Define", "electric current"),
        ("Summaries", "#lx-summary", "Summarise", "by the deputies of papers"),
        ("Tags", "#lx-tags", "Write tags", "log"),
    ):
        page.get_by_role("tab", name=tab).click()
        page.get_by_role("button", name=button).click()
        expect(page.locator(element)).to_contain_text(expected)
    page.get_by_label("Question", exact=True).fill(" ")
    page.get_by_role("button", name="Write tags").click()
    expect(page.locator("#lx-tags-message")).to_contain_text("The text is empty")


def test_the_routing_of_the_mixture_is_drawn(page):
    page.get_by_role("tab", name="Mixture").click()
    expect(page.locator("#lx-routing .lx-legend")).to_contain_text("medicine")
    cells = page.locator("#lx-routing td").all_inner_texts()
    assert cells and set(cells) <= {"1", "2"}


def test_a_path_on_the_server_is_not_read(app, visit):
    with urllib.request.urlopen(f"{app}config") as answer:
        config = json.load(answer)
    uploads = [d for d in config["dependencies"] if [t[1] for t in d["targets"]] == ["upload"]]
    assert len(uploads) == 2
    for dependency in uploads:
        file = {"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}}
        body = json.dumps({"data": [file], "fn_index": dependency["id"], "session_hash": "x"}).encode()
        request = urllib.request.Request(f"{app}gradio_api/run/predict", body, {"Content-Type": "application/json"})
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request)
        assert b"root:" not in refused.value.read()
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"{app}gradio_api/file=/etc/passwd")


def test_a_narrow_screen_needs_no_sideways_scrolling(browser, app):
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto(app)
    expect(page.locator("#lx-ours mark").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    expect(page.locator("#lx-threshold")).not_to_be_visible()  # settings are collapsed
    page.close()
