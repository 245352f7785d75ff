"""pipeline("moe-summarization") and its engine: texts of any length, alone and in a batch, by our models and stock ones."""

import copy
import json

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model
from torch import nn
from transformers import (
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    NoRepeatNGramLogitsProcessor,
    T5Config,
    T5ForConditionalGeneration,
    TextStreamer,
    pipeline,
)

from modeling_moesumm import MoeSummarizationPipeline, format_prompt
from modeling_moesumm.generation_moesumm import REPETITION, OfSummary, Summarizer
from tests.modeling_moesumm.conftest import one_of_each, tiny_backbone
from tests.modeling_moesumm.summaries import POSITIONS, Copying, small_tokenizer, story, summaries_by, writing_moesumm

TEXTS = [story(12), story(25, 1), story(45, 3), "The river rose.", "Bridge"]
NAMES = ["news", None, "papers", "letters", None]


def tokens(tokenizer, text):
    return len(tokenizer(text, verbose=False)["input_ids"])


def pipeline_of(model, tokenizer, **options):
    options = {"max_length": 12, **options}
    return pipeline("moe-summarization", model=model, tokenizer=tokenizer, device="cpu", **options)


@pytest.fixture(scope="module")
def summarize(model, tokenizer):
    return pipeline_of(model, tokenizer)


def texts_of(found):
    return [entry["summary_text"] for entry in found]


@pytest.mark.parametrize(
    "backbone, options", [("bart", {}), ("pegasus", {"num_beams": 3}), ("llama", {"min_length": 9})]
)
def test_a_text_has_the_same_summary_alone_and_in_a_batch(backbone, tokenizer, options):
    model, options = writing_moesumm(tokenizer, backbone), {"max_length": 14, **options}
    together = summaries_by(model, TEXTS, tokenizer, dataset=NAMES, batch_size=4, **options)
    pairs = zip(TEXTS, NAMES, strict=True)
    assert together == [summaries_by(model, text, tokenizer, dataset=name, **options) for text, name in pairs]
    assert together == summaries_by(model, TEXTS, tokenizer, dataset=NAMES, batch_size=64, **options)
    assert len(set(together)) > 3 and together != summaries_by(model, TEXTS, tokenizer, **options)


def test_answers_are_dictionaries_and_datasets_are_given_when_it_is_made_or_called(summarize, model, tokenizer):
    plain = summaries_by(model, TEXTS, tokenizer, max_length=12)
    assert summarize(TEXTS) == [{"summary_text": summary} for summary in plain]
    assert summarize(TEXTS[0]) == summarize(TEXTS[:1]) == [{"summary_text": plain[0]}] and summarize([]) == []
    expected = summaries_by(model, TEXTS, tokenizer, dataset=NAMES, max_length=12)
    column = Dataset.from_dict({"dataset": NAMES})["dataset"]
    assert texts_of(summarize(TEXTS, dataset=NAMES)) == texts_of(summarize(TEXTS, dataset=column)) == expected
    assert texts_of(summarize(iter(TEXTS), dataset=iter(NAMES))) == expected != plain
    news = pipeline_of(model, tokenizer, dataset="news")
    assert texts_of(news(TEXTS)) == summaries_by(model, TEXTS, tokenizer, dataset="news", max_length=12)
    assert texts_of(news(TEXTS, dataset=None)) == texts_of(news(TEXTS, main_expert_only=True)) == plain
    adapted = copy.deepcopy(model)
    adapter = pipeline_of(get_peft_model(adapted, adapted.lora_config(r=2)), tokenizer)
    assert isinstance(adapter, MoeSummarizationPipeline) and texts_of(adapter(TEXTS, dataset=NAMES)) == expected


@one_of_each
def test_a_short_text_is_what_generate_writes_up_to_a_sentence_end(backbone, tokenizer):
    model, options = writing_moesumm(tokenizer, backbone), {"max_new_tokens": 9, "min_new_tokens": 3, "num_beams": 3}
    ids = tokenizer(TEXTS[0], return_tensors="pt")["input_ids"]
    if backbone == "llama":
        ids = tokenizer(format_prompt(TEXTS[0], model.config), return_tensors="pt")["input_ids"][:, :-1]
    written = model.generate(ids, dataset="news", **options)[0, ids.shape[1] if backbone == "llama" else 0 :]
    summary = summaries_by(model, TEXTS[0], tokenizer, dataset="news", **options)
    assert tokenizer.decode(written, skip_special_tokens=True).startswith(summary.removesuffix("…")) and summary


def test_a_model_in_train_mode_writes_as_in_eval_mode_and_stays_in_it(tokenizer):
    model = writing_moesumm(tokenizer)
    expected = summaries_by(model, TEXTS, tokenizer, dataset=NAMES, max_length=16)
    for module in model.train().modules():
        if isinstance(module, nn.Dropout) or isinstance(getattr(module, "dropout", None), float):
            module.p = module.dropout = 0.5
    assert summaries_by(model, TEXTS, tokenizer, dataset=NAMES, max_length=16) == expected and model.training


def test_decoders_and_stock_models_work_too(summarize, model, tokenizer, tmp_path):
    stock = AutoModelForSeq2SeqLM.from_config(model.config.text_config).eval()
    stock.load_state_dict(model.backbone.state_dict(), strict=False)
    stock.generation_config = model.generation_config
    pipeline_of(stock, tokenizer).save_pretrained(tmp_path)  # a stock checkpoint, without code of ours
    assert not list(tmp_path.glob("*.py"))
    assert "custom_pipelines" not in json.loads((tmp_path / "config.json").read_text())
    opened = pipeline_of(str(tmp_path), None)
    assert opened(TEXTS) == opened(TEXTS, dataset=[None] * 5) == summarize(TEXTS)
    with pytest.raises(ValueError, match="dataset='news'.*'bart'"):
        opened(TEXTS, dataset="news")
    plain, options = tiny_backbone("llama", vocab_size=len(tokenizer)), {"num_beams": 1, "eos_token_id": 2}
    decoder = pipeline_of(writing_moesumm(tokenizer, "llama"), tokenizer)
    assert pipeline_of(plain, tokenizer)(TEXTS, pad_token_id=1, **options) == decoder(TEXTS, **options)


@pytest.mark.parametrize("limit, most", [(int(1e30), 512), (600, 600), (100, 100)])
def test_relative_positions_are_limited_by_the_tokenizer_or_512(limit, most, tokenizer):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    stock = T5ForConditionalGeneration(T5Config(vocab_size=len(tokenizer), **sizes)).eval()
    limited, widths = copy.deepcopy(tokenizer), []
    limited.model_max_length = limit
    note = lambda module, args, inputs: widths.append(inputs["input_ids"].shape[1])  # noqa: E731
    stock.get_encoder().register_forward_pre_hook(note, with_kwargs=True)
    pipeline_of(stock, limited, max_length=4, num_beams=1)(" ".join(TEXTS) * 10)
    assert 0.7 * most < max(widths) <= most


def test_models_answer_in_a_reduced_precision_and_refuse_to_at_nan(model, tokenizer):
    half, broken = AutoModelForSeq2SeqLM.from_config(model.config, dtype=torch.bfloat16), copy.deepcopy(model)
    assert len(pipeline_of(half, tokenizer)(["\ud800 river 🙂 \u0000.", "?! --- ' 🙂"])) == 2  # whatever the signs
    next(parameter for name, parameter in broken.named_parameters() if "fc1" in name).data.fill_(torch.nan)
    with pytest.raises(ValueError, match="NaN"):
        pipeline_of(broken, tokenizer)(TEXTS)


CONFIG = GenerationConfig(max_new_tokens=11, num_beams=3)


@pytest.mark.parametrize(
    "settings, options, lengths, beams",
    [
        ({}, {}, (0, POSITIONS), 4),
        ({"positions": 600}, {"num_beams": 2}, (0, 256), 2),
        ({"max_length": 30, "min_length": 7, "num_beams": 6}, {}, (7, 30), None),
        ({"max_new_tokens": 30, "min_new_tokens": 7}, {"temperature": 2.0}, (8, 31), None),
        ({"max_length": 30, "min_length": 20}, {"max_new_tokens": 9}, (10, 10), 4),
        ({"max_length": 30}, {"generation_config": CONFIG}, (0, 12), 3),
        ({}, {"max_length": 9, "generation_config": CONFIG}, (0, 9), 3),
    ],
)
def test_options_are_those_of_the_call_then_the_models_then_defaults(settings, options, lengths, beams, tokenizer):
    copying = Copying(**settings)
    Summarizer(copying, tokenizer, **options)([story(10), "River."])
    assert [row[2:] for row in copying.rows()] == [lengths] * 2
    written = copying.calls[0].options
    assert written.get("num_beams") == beams and written["do_sample"] == ("temperature" in options)


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


def test_sampling_is_asked_for_and_reproducible(tokenizer):
    model = writing_moesumm(tokenizer)
    model.generation_config.update(do_sample=True, temperature=1.5, top_p=0.9, top_k=0)
    for options in ({}, {"num_beams": 2}, {"generation_config": GenerationConfig(num_beams=1)}):
        assert len({str(summaries_by(model, TEXTS, tokenizer, max_length=18, **options)) for _ in "ab"}) == 1

    def sampled(seed):
        torch.manual_seed(seed)
        return summaries_by(model, TEXTS, tokenizer, temperature=1.5, max_length=18, min_length=10)

    assert sampled(0) == sampled(0) != sampled(1)


def test_a_decoders_options_against_repetition_count_the_summary_alone(tokenizer, monkeypatch):
    ids, scores = torch.tensor([[7, 8, 9, 1, 5, 6, 5]]), torch.zeros(1, 12)
    processor, again = NoRepeatNGramLogitsProcessor(2), torch.tensor([[7, 8, 9, 1, 7]])
    assert OfSummary(processor, 4)(ids, scores.clone())[0].isinf().nonzero().flatten().tolist() == [6]  # after 5 came 6
    assert not OfSummary(processor, 4)(again, scores.clone()).isinf().any()
    assert processor(again, scores.clone())[0, 8].isinf()  # what `generate` would do
    model, calls = writing_moesumm(tokenizer, "llama"), []
    generate = model.generate
    monkeypatch.setattr(model, "generate", lambda **given: calls.append(given) or generate(**given))
    for name, value in (("no_repeat_ngram_size", 2), ("repetition_penalty", 1.3)):
        Summarizer(model, tokenizer, max_length=12, **{name: value})(TEXTS[3:4])
        setattr(model.generation_config, name, value)
        Summarizer(model, tokenizer, max_length=12)(TEXTS[3:4])
        setattr(model.generation_config, name, None)
        for given in calls[-2:]:
            (own,) = (one for one in given["logits_processor"] if isinstance(one, OfSummary))
            assert given[name] == REPETITION[name][0] and isinstance(own.processor, REPETITION[name][1])
            assert own.prompt_length == given["input_ids"].shape[1]


def test_a_stream_has_no_special_tokens(summarize, tokenizer, capsys):
    summarize(TEXTS[0], num_beams=1, streamer=TextStreamer(tokenizer), dataset="news")
    assert "</s>" not in (written := capsys.readouterr().out) and written.strip()


def test_windows_are_read_whole_in_order_and_with_their_dataset(tokenizer):
    copying, text = Copying(share=0.2), story(100, 4)
    summary, *_ = Summarizer(copying, tokenizer, batch_size=4)([text, "Left on water."], ["letters", None])
    names = {tokenizer.decode(ids, skip_special_tokens=True): name for ids, name, *_ in copying.rows()}
    windows = sorted((window for window in names if window in text), key=text.index)
    assert " ".join(windows) == text and len(windows) > 2 and all(window.endswith(".") for window in windows)
    assert {names[window] for window in windows} == {"letters"} and names["Left on water."] is None
    parts = [part for window in windows if (part := " ".join(window.split()[:2])) in summary]
    assert len(parts) == len(windows) and parts == sorted(parts, key=summary.index)
    sizes = [len(ids) for ids, *_ in copying.rows() if len(ids) > 10]
    assert sizes == sorted(sizes, reverse=True)


def test_what_is_together_too_long_is_summarised_once_more(tokenizer, caplog):
    copying, text = Copying(), story(150, 6)
    summary = Summarizer(copying, tokenizer, max_length=20, min_length=10, batch_size=64)([text])[0]
    (first, (last,)) = [call.input_ids for call in copying.calls]
    assert tokens(tokenizer, summary) <= 20
    assert [row[2:] for row in copying.rows()] == [(2, max(38 // len(first), 8))] * len(first) + [(10, 20)]
    assert len(first) > 3 and len(last) <= POSITIONS and not caplog.text
    tiny = small_tokenizer()
    tiny.model_max_length = 12
    assert Summarizer(Copying(), tiny, max_length=12)([story(300)])
    assert "1 of 1 joined summaries of windows have more than 10 tokens: their end is not read" in caplog.text


@one_of_each
def test_long_texts_are_refused_or_cut_where_that_is_asked_for(backbone, tokenizer, caplog):
    model, text, options = writing_moesumm(tokenizer, backbone), story(200, 9), {"max_length": 12}
    with pytest.raises(ValueError, match=r"Text 1 has \d+ tokens"):
        summaries_by(model, ["River.", text], tokenizer, on_long="error", **options)
    made = Summarizer(model, tokenizer, **options)
    size, windows = made.window_size, made.make_windows([text], 0)[0]
    assert len(windows) > 2 and max(map(len, windows)) <= size
    assert size == POSITIONS - len(made.format) - (11 if backbone == "llama" else 0)  # of a decoder, with the summary
    beginning = tokenizer.decode(tokenizer(text, verbose=False)["input_ids"][1 : 1 + size])
    whole = summaries_by(model, [beginning], tokenizer, on_long="error", **options)  # it just fits
    assert summaries_by(model, [text], tokenizer, on_long="truncate", **options) == whole
    assert f"1 of 1 texts have more than {size} tokens" in caplog.text
    assert summaries_by(model, [text], tokenizer, **options) != whole


def test_a_summary_that_ran_into_its_limit_ends_at_a_sentence_end_and_nothing_is_written_twice(tokenizer):
    copying, text = Copying(), "The river rose fast. People left the bridge and met on foot."
    for given, length, expected in (
        (text, 10, "The river rose fast."), (text, 6, "The river…"), (text, 40, text),
        ("People left the river", 40, "People left the river"),  # what ended by itself is unchanged
        (f"{text} The river rose fast.", 40, text),
    ):  # fmt: skip
        assert Summarizer(copying, tokenizer, max_length=length)([given]) == [expected]
    write = Summarizer(copying, tokenizer)
    write.tokenizer = type("Tokenizer", (), {"decode": lambda *_, **__: "the river.<n>the bridge."})()
    assert write.decode([2, 5, 6], 100) == "the river.\nthe bridge."  # PEGASUS's line breaks


@pytest.mark.parametrize(
    "text, reason",
    [("Fast.", "hardly a word"), ("🙂", "hardly a word"), ("Der Rat tagte am Montag und floh am Abend aus der Stadt", "not to be English"),
     ("BP was 145/95, HR 88, SpO2 97%, temp 37.2°C. HbA1c is 7.4%, LDL 3.1 mmol/L. We start a new drug.", ""), (story(12), "")],
)  # fmt: skip
def test_what_is_no_text_of_the_models_language_is_answered_with_a_warning(text, reason, tokenizer, caplog):
    Summarizer(Copying(), tokenizer)([text])
    assert (reason in caplog.text) if reason else not caplog.text
