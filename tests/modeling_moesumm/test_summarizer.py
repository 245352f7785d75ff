"""The summarizer: texts of any length, alone and in a batch, by models with an encoder and by decoders."""

import time

import pytest
import torch
from torch import nn
from transformers import GenerationConfig, NoRepeatNGramLogitsProcessor

from modeling_moesumm import format_prompt
from modeling_moesumm.generation_moesumm import REPETITION, OfSummary, Summarizer
from tests.modeling_moesumm.summaries import (
    POSITIONS,
    Copying,
    small_tokenizer,
    story,
    summaries_by,
    writing_moesumm,
)


def tokens(tokenizer, text):
    return len(tokenizer(text, verbose=False)["input_ids"])


TEXTS = [story(12), story(25, 1), story(80, 2), "The river rose.", story(45, 3), "Bridge"]
NAMES = ["news", None, "papers", "letters", "news", None]


# --- batches and datasets ---


@pytest.mark.parametrize(
    "backbone, options",
    [("bart", {}), ("pegasus", {"num_beams": 3}), ("llama", {}), ("llama", {"num_beams": 2, "min_length": 9})],
)
def test_a_text_has_the_same_summary_alone_and_in_a_batch(backbone, tokenizer, options):
    model = writing_moesumm(tokenizer, backbone)
    options = {"max_length": 14, **options}
    together = summaries_by(model, TEXTS, tokenizer, dataset=NAMES, batch_size=4, **options)
    pairs = zip(TEXTS, NAMES, strict=True)
    assert together == [summaries_by(model, text, tokenizer, dataset=name, **options) for text, name in pairs]
    assert together == summaries_by(model, TEXTS, tokenizer, dataset=NAMES, batch_size=64, **options)
    assert len(set(together)) > 3 and together != summaries_by(model, TEXTS, tokenizer, **options)


def test_each_text_is_written_by_its_own_dataset(model, tokenizer):
    text, names = story(20, 5), [None, "papers", "news", None]
    of = {name: summaries_by(model, text, tokenizer, dataset=name, max_length=20) for name in ("news", "papers", None)}
    assert len(set(of.values())) == 3
    assert summaries_by(model, [text] * 4, tokenizer, dataset=names, max_length=20) == [of[name] for name in names]
    assert summaries_by(model, text, tokenizer, dataset="news", main_expert_only=True, max_length=20) == of[None]


@pytest.mark.parametrize("backbone", ["bart", "llama"])
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


# --- options ---


CONFIG = GenerationConfig(max_new_tokens=11, num_beams=3)


@pytest.mark.parametrize(
    "settings, options, lengths, beams",
    [
        ({}, {}, (0, POSITIONS), 4),
        ({"positions": 600}, {"num_beams": 2}, (0, 256), 2),
        ({"max_length": 30, "min_length": 7, "num_beams": 6}, {}, (7, 30), None),
        ({"max_new_tokens": 30, "min_new_tokens": 7}, {"do_sample": True}, (8, 31), None),
        ({"max_length": 30, "min_length": 20}, {"max_new_tokens": 9}, (10, 10), 4),
        ({"max_length": 300}, {"min_length": 5}, (5, POSITIONS), 4),
        ({"max_length": 30}, {"generation_config": CONFIG}, (0, 12), 3),
        ({}, {"max_length": 9, "generation_config": CONFIG}, (0, 9), 3),
    ],
)
def test_options_are_those_of_the_call_then_the_models_then_defaults(settings, options, lengths, beams, tokenizer):
    copying = Copying(**settings)
    Summarizer(copying, tokenizer, **options)([story(10), "River."])
    assert [row[2:] for row in copying.rows()] == [lengths] * 2
    assert copying.calls[0].options.get("num_beams") == beams


def test_sampling_is_asked_for_and_reproducible(tokenizer):
    model = writing_moesumm(tokenizer)
    model.generation_config.update(do_sample=True, temperature=1.5, top_p=0.9, top_k=0)
    for options in ({}, {"num_beams": 2}, {"generation_config": GenerationConfig(num_beams=1)}):
        found = [summaries_by(model, TEXTS, tokenizer, max_length=18, **options) for _ in range(2)]
        assert found[0] == found[1]

    def sampled(seed):
        torch.manual_seed(seed)
        return summaries_by(model, TEXTS, tokenizer, do_sample=True, max_length=18, min_length=10)

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


# --- texts longer than the model ---


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


def test_a_text_of_very_many_windows_is_read_with_a_warning_of_what_is_not(tokenizer, caplog):
    copying, text = Copying(positions=1024), story(100_000, 10)
    tokenizer = small_tokenizer()
    tokenizer.model_max_length = 1024
    start = time.perf_counter()
    summary = Summarizer(copying, tokenizer, max_length=60, batch_size=64)([text])[0]
    assert time.perf_counter() - start < 20
    assert 0 < tokens(tokenizer, summary) <= 60 and len(copying.calls) > 2 and not caplog.text
    assert sum(len(ids) for ids, *_ in copying.rows()) > tokens(tokenizer, text)
    tiny = small_tokenizer()
    tiny.model_max_length = 12
    assert Summarizer(Copying(), tiny, max_length=12)([story(300)])
    assert "1 of 1 joined summaries of windows have more than 10 tokens: their end is not read" in caplog.text


def test_a_decoders_windows_leave_room_for_the_prompt_and_the_summary(tokenizer):
    model = writing_moesumm(tokenizer, "llama")
    summarizer = Summarizer(model, tokenizer, max_length=14)
    windows = summarizer.make_windows([story(60, 2)], 0)[0]
    room = POSITIONS - len(summarizer.format) - 13
    assert len(windows) > 2 and max(map(len, windows)) <= room == summarizer.window_size
    (cut,) = Summarizer(model, tokenizer, max_length=14, on_long="truncate").make_windows([story(60)], 0)[0]
    assert len(cut) == room


@pytest.mark.parametrize("backbone", ["bart", "llama"])
def test_long_texts_are_refused_or_cut_where_that_is_asked_for(backbone, tokenizer, caplog):
    model, text, options = writing_moesumm(tokenizer, backbone), story(200, 9), {"max_length": 12}
    with pytest.raises(ValueError, match=r"Text 1 has \d+ tokens"):
        summaries_by(model, ["River.", text], tokenizer, on_long="error", **options)
    size = Summarizer(model, tokenizer, **options).window_size
    beginning = tokenizer.decode(tokenizer(text, verbose=False)["input_ids"][1 : 1 + size])
    whole = summaries_by(model, [beginning], tokenizer, on_long="error", **options)  # it just fits
    assert summaries_by(model, [text], tokenizer, on_long="truncate", **options) == whole
    assert f"1 of 1 texts have more than {size} tokens" in caplog.text
    assert summaries_by(model, [text], tokenizer, **options) != whole


# --- what is written ---


def test_a_summary_that_ran_into_its_limit_ends_at_a_sentence_end(tokenizer):
    copying = Copying()
    text = "The river rose fast. People left the bridge and met on foot."
    assert Summarizer(copying, tokenizer, max_length=10)([text]) == ["The river rose fast."]
    assert Summarizer(copying, tokenizer, max_length=6)([text]) == ["The river…"]
    assert Summarizer(copying, tokenizer, max_length=40)([text]) == [text]
    # what ended by itself is unchanged
    assert Summarizer(copying, tokenizer, max_length=40)(["People left the river"]) == ["People left the river"]


def test_pegasus_line_breaks_are_line_breaks(tokenizer):
    write = Summarizer(Copying(), tokenizer)
    write.tokenizer = type("Tokenizer", (), {"decode": lambda *_, **__: "the river.<n>the bridge."})()
    assert write.decode([2, 5, 6], 100) == "the river.\nthe bridge."


def test_signs_that_no_tokenizer_reads_do_no_harm(model, tokenizer):
    assert len(summaries_by(model, ["\ud800 river 🙂 \u0000.", "?! --- ' 🙂"], tokenizer, max_length=10)) == 2
