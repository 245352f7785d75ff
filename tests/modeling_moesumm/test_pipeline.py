"""pipeline("moe-summarization") and, where it is asked for, pipeline("summarization")."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from datasets import Dataset
from transformers import AutoModelForSeq2SeqLM, pipeline
from transformers.pipelines import PIPELINE_REGISTRY

import modeling_moesumm
from modeling_moesumm import MoeSummarizationPipeline
from tests.modeling_moesumm.summaries import small_tokenizer, story, writing_moesumm
from tests.modeling_moesumm.test_hub import BLOCKED, run

TEXTS = [story(12), story(25, 1), story(70, 2), "The river rose."]
NAMES = ["news", None, "papers", "news"]


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return writing_moesumm(tokenizer)


@pytest.fixture(scope="module")
def summarize(model, tokenizer):
    return pipeline("moe-summarization", model=model, tokenizer=tokenizer, device="cpu", max_length=12)


def texts_of(found):
    return [entry["summary_text"] for entry in found]


def test_answers_have_the_form_that_people_remember(summarize, model, tokenizer):
    expected = model.summarize(TEXTS, tokenizer, max_length=12)
    assert summarize(TEXTS) == [{"summary_text": summary} for summary in expected]
    assert summarize(TEXTS[0]) == [{"summary_text": expected[0]}]
    assert summarize(TEXTS[:1]) == summarize(TEXTS[0]) and summarize([]) == []
    assert isinstance(summarize, MoeSummarizationPipeline)


def test_the_readmes_lines_run_as_they_stand(tokenizer, tmp_path, monkeypatch):
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    code = next(block for block in re.findall(r"```python\n(.*?)```", readme, re.S) if "moe-summarization" in block)
    model = writing_moesumm(tokenizer, datasets=["news", "mail"])
    model.generation_config.max_length = 12
    pipeline("moe-summarization", model=model, tokenizer=tokenizer).save_pretrained(tmp_path / "runs" / "moesumm")
    monkeypatch.chdir(tmp_path)
    namespace = {}
    exec(code, namespace)
    assert namespace["summarize"]("The river rose.")[0].keys() == {"summary_text"}


def test_columns_give_lists_and_generators_give_iterators(summarize):
    expected = summarize(TEXTS)
    assert summarize(Dataset.from_dict({"document": TEXTS})["document"]) == expected
    assert summarize(tuple(TEXTS)) == expected
    read = []
    found = summarize((read.append(text) or text for text in TEXTS * 40), batch_size=1)
    assert not isinstance(found, list) and next(found) == expected[0]
    assert len(read) == 16  # as it is asked for
    assert [next(found) for _ in range(7)] == (expected * 2)[1:8]


def test_datasets_are_given_when_it_is_made_or_called(summarize, model, tokenizer):
    expected = model.summarize(TEXTS, tokenizer, dataset=NAMES, max_length=12)
    assert texts_of(summarize(TEXTS, dataset=NAMES)) == expected
    column = Dataset.from_dict({"dataset": NAMES})["dataset"]
    assert texts_of(summarize(TEXTS, dataset=column)) == expected
    assert texts_of(summarize(iter(TEXTS), dataset=iter(NAMES))) == expected
    assert texts_of(summarize(TEXTS, dataset=NAMES, batch_size=1)) == expected
    news = pipeline("moe-summarization", model=model, tokenizer=tokenizer, device="cpu", max_length=12, dataset="news")
    assert texts_of(news(TEXTS)) == model.summarize(TEXTS, tokenizer, dataset="news", max_length=12)
    assert news(TEXTS, dataset=None) == summarize(TEXTS) != news(TEXTS)


def test_options_of_the_call_go_over_those_of_the_pipeline(summarize, model, tokenizer):
    made = pipeline(
        "moe-summarization", model=model, tokenizer=tokenizer, device="cpu", max_length=30, num_beams=2, batch_size=3
    )
    for options in (
        {"max_length": 12},
        {"max_length": 0.5, "min_length": 0.1},
        {"num_beams": 1},
        {"main_expert_only": True},
    ):
        expected = model.summarize(TEXTS, tokenizer, **{"max_length": 30, "num_beams": 2, **options})
        assert texts_of(made(TEXTS, **options)) == expected
    expected = model.summarize(TEXTS, tokenizer, max_new_tokens=9, num_beams=2)
    assert texts_of(made(TEXTS, max_new_tokens=9)) == expected
    assert made(TEXTS) != summarize(TEXTS)
    made = pipeline("moe-summarization", model=model, tokenizer=tokenizer, device="cpu", max_new_tokens=30)
    assert made(TEXTS[:2], max_length=12) == summarize(TEXTS[:2])


def test_long_texts_are_read_in_windows_or_as_is_asked(summarize, model, tokenizer):
    long = TEXTS[2]
    assert texts_of(summarize(long)) == [model.summarize(long, tokenizer, max_length=12)]
    cut = summarize(long, on_long="truncate")
    assert summarize(long, truncation=True) == cut != summarize(long)
    assert summarize(long, truncation=False) == summarize(long)
    with pytest.raises(ValueError, match="Text 0 has .* tokens, and the model reads 40. Use on_long='window'"):
        summarize(long, on_long="error")
    with pytest.raises(ValueError, match="Text 130 has "):
        list(summarize((text for text in ["River."] * 130 + [long]), on_long="error"))


@pytest.mark.parametrize(
    "given, options, kind, message",
    [
        (3, {}, TypeError, "moe-summarization reads a text or an iterable of texts, not a int: 3"),
        ({"document": "River."}, {}, TypeError, "not a dict"),
        (["River.", ""], {}, ValueError, "Text 1 is empty"),
        (["River.", None], {}, TypeError, "Text 1 is a NoneType"),
        (
            "River.",
            {"dataset": "radio"},
            ValueError,
            "'radio' is not known to this model, which knows 'news', 'letters'",
        ),
        (
            ["River."],
            {"dataset": ["news", "news"]},
            ValueError,
            "dataset has 2 names for 1 texts. Pass one name a text",
        ),
        ("River.", {"max_length": 41}, ValueError, "max_length=41: the decoder has positions for 40"),
        ("River.", {"return_tensors": True}, ValueError, "return_tensors was given: moe-summarization returns texts"),
        ("River.", {"truncation": True, "on_long": "error"}, ValueError, "truncation=True with on_long='error'"),
        ("River.", {"batch_size": 0}, ValueError, "batch_size=0"),
        ("River.", {"max_lenght": 10}, ValueError, "max_lenght"),
    ],
)
def test_bad_input_is_refused_with_the_mend(summarize, given, options, kind, message):
    with pytest.raises(kind, match=message):
        summarize(given, **options)


def test_too_few_names_for_a_generator_are_refused(summarize):
    with pytest.raises(ValueError, match="dataset has 1 names for a batch of 2 rows"):
        list(summarize(iter(TEXTS[:2]), dataset=iter(["news"])))


def test_a_stock_model_works_too(summarize, model, tokenizer, tmp_path):
    stock = AutoModelForSeq2SeqLM.from_config(model.config.text_config).eval()
    stock.load_state_dict(model.backbone.state_dict(), strict=False)
    stock.generation_config = model.generation_config
    stock.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    opened = pipeline("moe-summarization", model=str(tmp_path), device="cpu", max_length=12)
    assert opened(TEXTS) == summarize(TEXTS)

    opened.save_pretrained(tmp_path / "again")  # a stock checkpoint, without code of ours
    assert not list((tmp_path / "again").glob("*.py"))
    assert "custom_pipelines" not in json.loads((tmp_path / "again" / "config.json").read_text())
    again = pipeline("moe-summarization", model=str(tmp_path / "again"), device="cpu", max_length=12)
    assert again(TEXTS) == summarize(TEXTS)


def test_models_answer_in_a_reduced_precision(model, tokenizer):
    half = AutoModelForSeq2SeqLM.from_config(model.config, dtype=torch.bfloat16)
    found = pipeline("moe-summarization", model=half, tokenizer=tokenizer, device="cpu", max_length=12)(TEXTS[:2])
    assert len(found) == 2


# ---- the old name


CARRIED = """
import json, sys
from transformers import pipeline
texts, names, found = json.loads(sys.argv[3]), ["news", None, "papers", "news"], []
for task, folder in (("moe-summarization", sys.argv[2]), ("summarization", sys.argv[4]), (None, sys.argv[2])):
    made = pipeline(task, model=folder, device="cpu", trust_remote_code=True)
    found.append([made(texts, dataset=names, max_length=12), type(made).__module__, type(made.model).__module__])
print("FOUND" + json.dumps(found))
"""


@pytest.fixture
def old_name(monkeypatch):
    """Whatever is registered is forgotten afterwards."""
    monkeypatch.setattr(PIPELINE_REGISTRY, "supported_tasks", dict(PIPELINE_REGISTRY.supported_tasks))
    monkeypatch.setattr(transformers.pipelines, "REMOVED_TASKS", dict(transformers.pipelines.REMOVED_TASKS))


def test_the_old_name_works_where_it_is_asked_for(old_name, summarize, model, tokenizer, caplog):
    given = {"model": model, "tokenizer": tokenizer, "device": "cpu"}
    with pytest.raises(KeyError, match="removed"):
        pipeline("summarization", **given)
    modeling_moesumm.enable_summarization_task()
    modeling_moesumm.enable_summarization_task()
    assert "already registered" not in caplog.text
    old = pipeline("summarization", **given)
    options = {"max_length": 12, "min_length": 2, "do_sample": False}
    assert type(old).__name__ == "SummarizationPipeline" and old(TEXTS, **options) == summarize(TEXTS, **options)
    assert type(pipeline("moe-summarization", **given)) is MoeSummarizationPipeline
    with pytest.raises(KeyError, match="removed"):
        pipeline("translation", **given)


def test_checkpoints_that_pipelines_saved_open_without_the_project(old_name, summarize, model, tokenizer, tmp_path):
    modeling_moesumm.enable_summarization_task()
    old, new = tmp_path / "old", tmp_path / "new"
    pipeline("summarization", model=model, tokenizer=tokenizer, device="cpu").save_pretrained(old)
    summarize.save_pretrained(new)
    for folder, task, kind in (
        (old, "summarization", "SummarizationPipeline"),
        (new, "moe-summarization", "MoeSummarizationPipeline"),
    ):
        promised = json.loads((folder / "config.json").read_text())["custom_pipelines"]
        assert list(promised) == [task] and promised[task]["impl"] == f"pipeline_moesumm.{kind}"
        parts = ("pipeline", "summarizing", "texts", "modeling", "configuration", "layers")
        assert {f"{part}_moesumm.py" for part in parts} <= {path.name for path in folder.iterdir()}
    expected = summarize(TEXTS, dataset=NAMES)
    for answer, *modules in run(BLOCKED + CARRIED, "flag", new, json.dumps(TEXTS), old, folder=tmp_path / "b"):
        assert answer == expected and all(module.startswith("transformers_modules.") for module in modules)
    # where the package is imported, no flag is needed
    assert pipeline("moe-summarization", model=str(new), device="cpu", max_length=12)(TEXTS, dataset=NAMES) == expected


def test_the_public_names_are_there():
    for name in modeling_moesumm.__all__:
        assert getattr(modeling_moesumm, name).__doc__
