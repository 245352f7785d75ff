"""pipeline("moe-summarization")."""

import copy
import json

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model
from transformers import AutoModelForSeq2SeqLM, T5Config, T5ForConditionalGeneration, pipeline

from modeling_moesumm import MoeSummarizationPipeline
from tests.modeling_moesumm.conftest import tiny_backbone
from tests.modeling_moesumm.summaries import story, summaries_by, writing_moesumm

TEXTS = [story(12), story(25, 1), story(70, 2), "The river rose."]
NAMES = ["news", None, "papers", "news"]


def pipeline_of(model, tokenizer, **options):
    return pipeline(
        "moe-summarization", model=model, tokenizer=tokenizer, device="cpu", **{"max_length": 12, **options}
    )


@pytest.fixture(scope="module")
def summarize(model, tokenizer):
    return pipeline_of(model, tokenizer)


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
    adapter = pipeline_of(get_peft_model(adapted, adapted.lora_config(r=2)), tokenizer)
    options = {"dataset": "news", "main_expert_only": True}
    assert adapter(TEXTS[0], **options) == summarize(TEXTS[0], **options) == summarize(TEXTS[0])


def test_datasets_are_given_when_it_is_made_or_called(summarize, model, tokenizer):
    expected = summaries_by(model, TEXTS, tokenizer, dataset=NAMES, max_length=12)
    column = Dataset.from_dict({"dataset": NAMES})["dataset"]
    assert texts_of(summarize(TEXTS, dataset=NAMES)) == texts_of(summarize(TEXTS, dataset=column)) == expected
    assert texts_of(summarize(iter(TEXTS), dataset=iter(NAMES))) == expected
    assert texts_of(summarize(TEXTS, dataset=NAMES, batch_size=1)) == expected
    news = pipeline_of(model, tokenizer, dataset="news")
    assert texts_of(news(TEXTS)) == summaries_by(model, TEXTS, tokenizer, dataset="news", max_length=12)
    assert news(TEXTS, dataset=None) == summarize(TEXTS) != news(TEXTS)


def test_options_of_the_call_go_over_those_of_the_pipeline(summarize, model, tokenizer):
    made, texts = pipeline_of(model, tokenizer, max_length=30, num_beams=2, batch_size=3), TEXTS[:2]
    for options in ({"max_length": 12}, {"num_beams": 1}, {"main_expert_only": True}, {"on_long": "truncate"}):
        expected = summaries_by(model, texts, tokenizer, **{"max_length": 30, "num_beams": 2, **options})
        assert texts_of(made(texts, **options)) == expected
    assert texts_of(made(texts, max_new_tokens=9)) == summaries_by(model, texts, tokenizer, max_length=10, num_beams=2)
    made = pipeline_of(model, tokenizer, max_length=None, max_new_tokens=30)
    assert made(texts, max_length=12) == summarize(texts) != made(texts)
    with pytest.raises(ValueError, match="Text 130 has "):
        list(summarize((text for text in ["River."] * 130 + TEXTS[2:3]), on_long="error"))


def test_decoders_and_stock_models_work_too(summarize, model, tokenizer, tmp_path):
    stock = AutoModelForSeq2SeqLM.from_config(model.config.text_config).eval()
    stock.load_state_dict(model.backbone.state_dict(), strict=False)
    stock.generation_config = model.generation_config
    pipeline_of(stock, tokenizer).save_pretrained(tmp_path)  # a stock checkpoint, without code of ours
    assert not list(tmp_path.glob("*.py"))
    assert "custom_pipelines" not in json.loads((tmp_path / "config.json").read_text())
    opened = pipeline("moe-summarization", model=str(tmp_path), device="cpu", max_length=12)
    assert opened(TEXTS) == opened(TEXTS, dataset=[None] * 4) == summarize(TEXTS)
    with pytest.raises(ValueError, match="dataset='news'.*'bart'"):
        opened(TEXTS, dataset="news")
    decoder = writing_moesumm(tokenizer, "llama")
    decoder.save_pretrained(tmp_path / "decoder")
    tokenizer.save_pretrained(tmp_path / "decoder")
    opened = pipeline("moe-summarization", model=str(tmp_path / "decoder"), device="cpu", max_length=12)
    assert texts_of(opened(TEXTS, dataset=NAMES)) == summaries_by(decoder, TEXTS, tokenizer, NAMES, max_length=12)
    plain = tiny_backbone("llama", vocab_size=len(tokenizer))
    options = {"num_beams": 1, "eos_token_id": 2, "pad_token_id": 1}
    assert pipeline_of(plain, tokenizer)(TEXTS, **options) == opened(TEXTS, **options)


@pytest.mark.parametrize("limit, most", [(int(1e30), 512), (600, 600), (100, 100)])
def test_relative_positions_are_limited_by_the_tokenizer_or_512(limit, most, tokenizer):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    stock = T5ForConditionalGeneration(T5Config(vocab_size=len(tokenizer), **sizes)).eval()
    limited, widths = copy.deepcopy(tokenizer), []
    limited.model_max_length = limit
    note = lambda module, args, inputs: widths.append(inputs["input_ids"].shape[1])  # noqa: E731
    stock.get_encoder().register_forward_pre_hook(note, with_kwargs=True)
    pipeline_of(stock, limited, max_length=4, num_beams=1)(" ".join(TEXTS) * 40)
    assert 0.7 * most < max(widths) <= most


def test_models_answer_in_a_reduced_precision_and_refuse_to_at_nan(model, tokenizer):
    half, broken = AutoModelForSeq2SeqLM.from_config(model.config, dtype=torch.bfloat16), copy.deepcopy(model)
    assert len(pipeline_of(half, tokenizer)(TEXTS[:2])) == 2
    next(parameter for name, parameter in broken.named_parameters() if "fc1" in name).data.fill_(torch.nan)
    with pytest.raises(ValueError, match="NaN"):
        pipeline_of(broken, tokenizer)(TEXTS)
