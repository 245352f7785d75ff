"""pipeline("moe-summarization")."""

import copy
import json

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model
from transformers import AutoModelForSeq2SeqLM, T5Config, T5ForConditionalGeneration, pipeline

from modeling_moesumm import MoeSummarizationPipeline
from tests.modeling_moesumm.summaries import story, summaries_by

TEXTS = [story(12), story(25, 1), story(70, 2), "The river rose."]
NAMES = ["news", None, "papers", "news"]


@pytest.fixture(scope="module")
def summarize(model, tokenizer):
    return pipeline("moe-summarization", model=model, tokenizer=tokenizer, device="cpu", max_length=12)


def texts_of(found):
    return [entry["summary_text"] for entry in found]


def test_answers_have_the_form_of_the_former_summarization_pipeline(summarize, model, tokenizer):
    expected = summaries_by(model, TEXTS, tokenizer, max_length=12)
    assert summarize(TEXTS) == [{"summary_text": summary} for summary in expected]
    assert summarize(TEXTS[0]) == [{"summary_text": expected[0]}]
    assert summarize(TEXTS[:1]) == summarize(TEXTS[0]) and summarize([]) == []
    assert isinstance(summarize, MoeSummarizationPipeline)


def test_an_adapter_takes_the_options_of_its_model(summarize, model, tokenizer):
    adapted = copy.deepcopy(model)
    wrapped = get_peft_model(adapted, adapted.lora_config(r=2))
    adapter = pipeline("moe-summarization", model=wrapped, tokenizer=tokenizer, device="cpu", max_length=12)
    options = {"dataset": "news", "main_expert_only": True}
    assert adapter(TEXTS[0], **options) == summarize(TEXTS[0], **options) == summarize(TEXTS[0])


def test_datasets_are_given_when_it_is_made_or_called(summarize, model, tokenizer):
    expected = summaries_by(model, TEXTS, tokenizer, dataset=NAMES, max_length=12)
    assert texts_of(summarize(TEXTS, dataset=NAMES)) == expected
    column = Dataset.from_dict({"dataset": NAMES})["dataset"]
    assert texts_of(summarize(TEXTS, dataset=column)) == expected
    assert texts_of(summarize(iter(TEXTS), dataset=iter(NAMES))) == expected
    assert texts_of(summarize(TEXTS, dataset=NAMES, batch_size=1)) == expected
    news = pipeline("moe-summarization", model=model, tokenizer=tokenizer, device="cpu", max_length=12, dataset="news")
    assert texts_of(news(TEXTS)) == summaries_by(model, TEXTS, tokenizer, dataset="news", max_length=12)
    assert news(TEXTS, dataset=None) == summarize(TEXTS) != news(TEXTS)


def test_options_of_the_call_go_over_those_of_the_pipeline(summarize, model, tokenizer):
    texts = TEXTS[:2]
    made = pipeline(
        "moe-summarization", model=model, tokenizer=tokenizer, device="cpu", max_length=30, num_beams=2, batch_size=3
    )
    for options in (
        {"max_length": 12},
        {"max_length": 0.5, "min_length": 0.1},
        {"num_beams": 1},
        {"main_expert_only": True},
    ):
        expected = summaries_by(model, texts, tokenizer, **{"max_length": 30, "num_beams": 2, **options})
        assert texts_of(made(texts, **options)) == expected
    expected = summaries_by(model, texts, tokenizer, max_new_tokens=9, num_beams=2)
    assert texts_of(made(texts, max_new_tokens=9)) == expected
    assert made(texts) != summarize(texts)
    made = pipeline("moe-summarization", model=model, tokenizer=tokenizer, device="cpu", max_new_tokens=30)
    assert made(texts[:2], max_length=12) == summarize(texts)


def test_long_texts_are_split_truncated_or_refused(summarize, model, tokenizer, caplog):
    long = TEXTS[2]
    assert texts_of(summarize(long)) == [summaries_by(model, long, tokenizer, max_length=12)]
    cut = summarize(long, on_long="truncate")
    assert "1 of 1 texts have more than 38 tokens: their end is not read" in caplog.text
    assert summarize(long, truncation=True) == cut != summarize(long)
    assert summarize(long, truncation=False) == summarize(long)
    with pytest.raises(ValueError, match="Text 0 has .* 40 positions.*on_long='window'"):
        summarize(long, on_long="error")
    with pytest.raises(ValueError, match="Text 130 has "):
        list(summarize((text for text in ["River."] * 130 + [long]), on_long="error"))


@pytest.mark.parametrize(
    "given, options, kind, message",
    [
        (3, {}, TypeError, r"got 3 \(int\)"),
        ({"document": "River."}, {}, TypeError, r"\(dict\)"),
        (["River.", ""], {}, ValueError, "Text 1 is empty"),
        (["River.", "Bridge.", "  \n\t "], {}, ValueError, "Text 2 is empty"),
        (["River.", b"River."], {}, TypeError, "Text 1 .* bytes"),
        (["River.", None], {}, TypeError, "Text 1 .* NoneType"),
        ("River.", {"dataset": "radio"}, ValueError, "dataset='radio'.*'news', 'letters'"),
        (["River."], {"dataset": ["news", "news"]}, ValueError, "dataset has 2 names for 1 texts"),
        ("River.", {"max_length": 41}, ValueError, "max_length=41 .* 40 positions"),
        ("River.", {"return_tensors": True}, ValueError, "return_tensors"),
        ("River.", {"truncation": True, "on_long": "error"}, ValueError, "truncation=True with on_long='error'"),
        ("River.", {"batch_size": 0}, ValueError, "batch_size=0"),
        ("River.", {"max_lenght": 10}, ValueError, "max_lenght"),
    ],
)
def test_bad_input_is_refused(summarize, given, options, kind, message):
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
    assert opened(TEXTS) == opened(TEXTS, dataset=[None] * 4) == summarize(TEXTS)
    with pytest.raises(ValueError, match="dataset='news'.*'bart'"):
        opened(TEXTS, dataset="news")

    opened.save_pretrained(tmp_path / "again")  # a stock checkpoint, without code of ours
    assert not list((tmp_path / "again").glob("*.py"))
    assert "custom_pipelines" not in json.loads((tmp_path / "again" / "config.json").read_text())
    again = pipeline("moe-summarization", model=str(tmp_path / "again"), device="cpu", max_length=12)
    assert again(TEXTS) == summarize(TEXTS)


@pytest.mark.parametrize("limit, most", [(int(1e30), 512), (600, 600), (100, 100)])
def test_relative_positions_are_limited_by_the_tokenizer_or_512(limit, most, tokenizer):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    stock = T5ForConditionalGeneration(T5Config(vocab_size=len(tokenizer), **sizes)).eval()
    limited, widths = copy.deepcopy(tokenizer), []
    limited.model_max_length = limit
    note = lambda module, args, inputs: widths.append(inputs["input_ids"].shape[1])  # noqa: E731
    stock.get_encoder().register_forward_pre_hook(note, with_kwargs=True)
    run = pipeline("moe-summarization", model=stock, tokenizer=limited, device="cpu", max_length=4, num_beams=1)
    run(" ".join(TEXTS) * 40)
    assert 0.7 * most < max(widths) <= most


def test_models_answer_in_a_reduced_precision(model, tokenizer):
    half = AutoModelForSeq2SeqLM.from_config(model.config, dtype=torch.bfloat16)
    found = pipeline("moe-summarization", model=half, tokenizer=tokenizer, device="cpu", max_length=12)(TEXTS[:2])
    assert len(found) == 2


def test_probabilities_that_are_nan_are_an_error(model, tokenizer):
    broken = copy.deepcopy(model)
    next(parameter for name, parameter in broken.named_parameters() if "fc1" in name).data.fill_(torch.nan)
    with pytest.raises(ValueError, match="NaN. Check its weights"):
        pipeline("moe-summarization", model=broken, tokenizer=tokenizer, device="cpu", max_length=12)(TEXTS)
