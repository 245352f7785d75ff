"""The summarizer: texts of any length, alone and in a batch, with lengths in tokens and as fractions."""

import re
import time

import pytest
import torch
from transformers import GenerationConfig

from modeling_moesumm.generation_moesumm import Summarizer
from modeling_moesumm.sentences_moesumm import last_sentence_end
from tests.modeling_moesumm.summaries import (
    POSITIONS,
    Copying,
    small_tokenizer,
    story,
    summaries_by,
    trained,
    writing_moesumm,
)


def tokens(tokenizer, text):
    return len(tokenizer(text, verbose=False)["input_ids"])


def ends_well(text):
    return last_sentence_end(text) == len(text) > 0


TEXTS = [story(12), story(25, 1), story(80, 2), "The river rose.", story(45, 3), "Bridge"]
NAMES = ["news", None, "papers", "letters", "news", None]


# ---- batches and datasets


@pytest.mark.parametrize(
    "backbone, options",
    [("bart", {}), ("pegasus", {"num_beams": 3}), ("mbart", {"max_length": 0.5, "min_length": 0.2, "num_beams": 2})],
)
def test_a_text_has_the_same_summary_alone_and_in_a_batch(backbone, tokenizer, options):
    model = writing_moesumm(tokenizer, backbone)
    options = {"max_length": 14, **options}
    together = summaries_by(model, TEXTS, tokenizer, dataset=NAMES, batch_size=4, **options)
    alone = [
        summaries_by(model, text, tokenizer, dataset=name, **options) for text, name in zip(TEXTS, NAMES, strict=True)
    ]
    assert together == alone
    assert len(set(together)) > 3
    assert together == summaries_by(model, TEXTS, tokenizer, dataset=NAMES, batch_size=64, **options)


def test_each_text_is_written_by_its_own_dataset(model, tokenizer):
    text = story(20, 5)
    by_name = {
        name: summaries_by(model, text, tokenizer, dataset=name, max_length=20) for name in ("news", "papers", None)
    }
    assert len(set(by_name.values())) == 3
    names = [None, "papers", "news", None]
    assert summaries_by(model, [text] * 4, tokenizer, dataset=names, max_length=20) == [by_name[name] for name in names]
    assert summaries_by(model, [text] * 2, tokenizer, dataset="news", max_length=20) == [by_name["news"]] * 2
    assert summaries_by(model, text, tokenizer, dataset=["papers"], max_length=20) == by_name["papers"]
    assert summaries_by(model, text, tokenizer, dataset="news", main_expert_only=True, max_length=20) == by_name[None]


def test_a_short_text_is_what_generate_writes_up_to_a_sentence_end(model, tokenizer):
    inputs = tokenizer(TEXTS[1], return_tensors="pt")
    inputs.pop("token_type_ids", None)
    ids = model.generate(**inputs, dataset="news", max_length=20, min_length=4, num_beams=3)
    written = tokenizer.decode(ids[0], skip_special_tokens=True)
    summary = summaries_by(model, TEXTS[1], tokenizer, dataset="news", max_length=20, min_length=4, num_beams=3)
    assert written.startswith(summary.removesuffix("…")) and summary


def test_a_model_in_train_mode_writes_as_in_eval_mode_and_stays_in_it(model, tokenizer):
    expected = summaries_by(model, TEXTS, tokenizer, dataset=NAMES, max_length=16)
    noisy = trained(model)
    noisy.backbone.base_model.encoder.eval()
    assert summaries_by(noisy, TEXTS, tokenizer, dataset=NAMES, max_length=16) == expected
    assert noisy.training and not noisy.backbone.base_model.encoder.training


# ---- lengths


def test_lengths_in_tokens_are_handed_on(tokenizer):
    copying = Copying()
    Summarizer(copying, tokenizer, max_length=20, min_length=5)([story(10), "River."])
    assert [row[2:] for row in copying.rows()] == [(5, 20), (5, 20)]
    assert copying.calls[0].max_length == 20 and copying.calls[0].options["num_beams"] == 4


@pytest.mark.parametrize("longest, shortest", [(0.5, 0.25), (0.5, 3), (20, 0.25), (0.5, None)])
def test_lengths_as_shares_follow_each_text(tokenizer, longest, shortest):
    copying, texts = Copying(), [story(28), story(20, 1), "Fast."]
    Summarizer(copying, tokenizer, max_length=longest, min_length=shortest)(texts)
    for ids, _, low, high in copying.rows():
        n = len(ids) - 2
        assert high == (max(8, int(0.5 * n)) if longest == 0.5 else 20)
        assert low == min(high, {0.25: int(0.25 * n), 3: 3, None: 0}[shortest])


def test_a_model_keeps_to_the_lengths_of_each_row(model, tokenizer):
    texts = [story(28), story(18, 1), story(24, 2)]
    write = Summarizer(model, tokenizer, max_length=0.5, min_length=0.5, num_beams=2)
    lengths = []
    write.decode = lambda ids, longest: (
        lengths.append((next(i for i, t in enumerate(ids) if i and t == 2) + 1, longest)) or "."
    )
    write(texts)
    # BART's </s> is at index 0 too: start, summary and end are counted
    assert lengths == [(length, length) for length, _ in lengths] and len(set(lengths)) == 3


def test_lengths_default_to_the_models_and_then_to_256(tokenizer):
    def lengths_of(copying, **options):
        Summarizer(copying, tokenizer, **options)(["River."])
        return next(copying.rows())[2:]

    assert lengths_of(Copying()) == (0, POSITIONS)
    assert lengths_of(Copying(positions=600)) == (0, 256)
    assert lengths_of(Copying(max_length=30, min_length=7)) == (7, 30)
    assert lengths_of(Copying(max_new_tokens=30, min_new_tokens=7)) == (8, 31)
    assert lengths_of(Copying(max_length=30), max_new_tokens=10) == (0, 11)
    assert lengths_of(Copying(max_length=30), generation_config=GenerationConfig(max_length=12, num_beams=2)) == (0, 12)
    assert lengths_of(Copying(), max_length=9, generation_config=GenerationConfig(max_new_tokens=20)) == (0, 9)
    assert lengths_of(Copying(max_length=30, min_length=20), max_length=10) == (10, 10)
    assert lengths_of(Copying(max_length=300)) == (0, POSITIONS)


def test_beams_default_to_four(tokenizer):
    def beams(copying, **options):
        Summarizer(copying, tokenizer, **options)(["River."])
        return copying.calls[0].options.get("num_beams")

    assert beams(Copying()) == 4 and beams(Copying(), num_beams=2) == 2
    assert beams(Copying(num_beams=6)) is None and beams(Copying(), do_sample=True) is None
    assert beams(Copying(), generation_config=GenerationConfig(num_beams=3)) == 3


def test_sampling_is_reproducible_and_keeps_the_lengths(model, tokenizer):
    def sampled(seed):
        torch.manual_seed(seed)
        return summaries_by(model, TEXTS, tokenizer, do_sample=True, top_k=1000, max_length=18, min_length=10)

    assert sampled(0) == sampled(0) != sampled(1)


def test_a_model_that_samples_by_default_writes_the_same_summary_each_time(model, tokenizer):
    model.generation_config.update(do_sample=True, temperature=1.5, top_p=0.9, top_k=0)
    for options in ({}, {"num_beams": 2}, {"generation_config": GenerationConfig(num_beams=1)}):
        found = [summaries_by(model, TEXTS, tokenizer, max_length=18, **options) for _ in range(2)]
        assert found[0] == found[1] and found[0] == [
            summaries_by(model, text, tokenizer, max_length=18, **options) for text in TEXTS
        ]
    torch.manual_seed(0)
    sampled = [summaries_by(model, TEXTS, tokenizer, do_sample=True, max_length=18) for _ in range(2)]
    assert sampled[0] != sampled[1]


def test_a_min_length_above_the_models_maximum_is_an_error(model, tokenizer):
    model.generation_config.update(max_length=9)
    with pytest.raises(ValueError, match="min_length=30 exceeds the model's max_length=9. Pass a max_length"):
        Summarizer(model, tokenizer, min_length=30)
    assert Summarizer(model, tokenizer, min_length=12, max_length=14).max_length == 14


def test_a_generation_config_for_several_summaries_is_an_error(model, tokenizer):
    given = {"num_beams": 2, "num_return_sequences": 2}
    for options in (given, {"generation_config": GenerationConfig(**given)}):
        with pytest.raises(ValueError, match="num_return_sequences is not supported"):
            Summarizer(model, tokenizer, **options)
    config = GenerationConfig(num_beams=2, num_return_sequences=1, return_dict_in_generate=True)
    assert Summarizer(model, tokenizer, generation_config=config)(["River."])


# ---- texts longer than the encoder


def test_windows_are_read_in_order_and_merged_in_order(tokenizer):
    copying, text = Copying(), story(100, 4)
    summary = Summarizer(copying, tokenizer, max_length=0.5)([text])[0]
    read = [tokenizer.decode(ids, skip_special_tokens=True) for ids, *_ in copying.rows()]
    read.sort(key=text.index)
    assert " ".join(read) == text and len(read) > 2
    assert all(ends_well(window) for window in read)
    places = [text.find(part.strip(" …")) for part in re.split(r"(?<=[.…]) ", summary)]
    assert places == sorted(places) and places[0] == 0 and len(places) >= len(read)


def test_windows_of_all_texts_are_read_together_sorted_by_length(tokenizer):
    copying = Copying(share=0.2)
    Summarizer(copying, tokenizer, max_length=0.9, batch_size=4)([story(100), story(5, 1), story(90, 2), story(30, 3)])
    sizes = [len(ids) for ids, *_ in copying.rows()]
    assert sizes == sorted(sizes, reverse=True) and len(copying.calls) == -(-len(sizes) // 4)


def test_names_go_with_their_windows(tokenizer):
    copying, texts = Copying(share=0.2), [story(100), "Left on water.", "p q r s. " * 30]
    Summarizer(copying, tokenizer, max_length=0.9)(texts, ["news", None, "letters"])
    for ids, name, *_ in copying.rows():
        window = tokenizer.decode(ids, skip_special_tokens=True)
        assert name == ("letters" if "p q" in window else None if window == "Left on water." else "news")


def test_what_is_together_too_long_is_summarised_again(tokenizer):
    copying, text = Copying(), story(1000, 6)
    summary = Summarizer(copying, tokenizer, max_length=20, min_length=10, batch_size=64)([text])[0]
    assert 0 < tokens(tokenizer, summary) <= 20 and ends_well(summary)
    assert len(copying.calls) >= 3
    *_, (_, _, shortest, longest) = copying.rows()
    assert (shortest, longest) == (10, 20)
    # each window's summary is at most half a window, so that it comes to an end
    assert all(longest <= 20 for *_, longest in copying.rows())


def test_with_a_share_the_windows_have_their_shares_and_are_not_read_again(tokenizer):
    copying, text = Copying(share=0.3), story(300, 6)
    summary = Summarizer(copying, tokenizer, max_length=0.6, batch_size=64)([text])[0]
    total = sum(len(ids) - 2 for ids, *_ in copying.rows())
    assert total == tokens(tokenizer, text) - 2
    assert POSITIONS < tokens(tokenizer, summary) < 0.6 * total


def test_a_model_that_does_not_get_shorter_is_stopped_with_a_warning(tokenizer, caplog):
    copying = Copying()
    tiny = small_tokenizer()
    tiny.model_max_length = 8  # six tokens are read, eight are written
    copying.generate = lambda input_ids, **_: torch.tensor([[2, 0, 100, 100, 100, 66, 2]] * len(input_ids))
    summary = Summarizer(copying, tiny, max_length=12)([story(60)])[0]
    assert tokens(tokenizer, summary) <= 12
    assert "text 0" in caplog.text and "12 tokens" in caplog.text


@pytest.mark.parametrize("text", [story(5000, 8), "river " * 5000], ids=["sentences", "no sentence end"])
def test_5000_words_are_summarised_and_refused_where_that_is_asked_for(text, model, tokenizer):
    summary = summaries_by(model, text, tokenizer, dataset="news", max_length=20, batch_size=128)
    assert 0 < tokens(tokenizer, summary) <= 20 + 3
    size = tokens(tokenizer, text)
    message = f"Text 1 has {size:,} tokens.* 40 positions.*on_long='window'.*on_long='truncate'"
    with pytest.raises(ValueError, match=message):
        summaries_by(model, ["River.", text], tokenizer, on_long="error")
    exact = tokenizer.decode(tokenizer(text, verbose=False)["input_ids"][1:39])
    assert tokens(tokenizer, exact) == 40
    assert summaries_by(model, [exact], tokenizer, on_long="error", max_length=16) == summaries_by(
        model, [exact], tokenizer, max_length=16
    )


def test_a_cut_text_is_summarised_as_its_beginning(model, tokenizer):
    text = story(200, 9)
    beginning = tokenizer.decode(tokenizer(text, verbose=False)["input_ids"][1:39])
    cut = summaries_by(model, [text], tokenizer, on_long="truncate", max_length=16)
    assert cut == summaries_by(model, [beginning], tokenizer, max_length=16)
    assert cut != summaries_by(model, [text], tokenizer, max_length=16)


def test_100000_words_are_read_to_the_end(tokenizer):
    copying, text = Copying(positions=1024), story(100_000, 10)
    tokenizer = small_tokenizer()
    tokenizer.model_max_length = 1024
    start = time.perf_counter()
    summary = Summarizer(copying, tokenizer, max_length=60, batch_size=64)([text])[0]
    assert time.perf_counter() - start < 20
    assert 0 < tokens(tokenizer, summary) <= 60 and ends_well(summary)
    first = [ids for call in copying.calls for ids in call.attention_mask.sum(1).tolist()]
    assert sum(first) > tokens(tokenizer, text)


# ---- sentence ends


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
    ids = tokenizer("the river.<n>the bridge.")["input_ids"]
    write.tokenizer = type("Tokenizer", (), {"decode": lambda *_, **__: "the river.<n>the bridge."})()
    assert write.decode([2, *ids], 100) == "the river.\nthe bridge."


# ---- bad input


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_length": 41}, "max_length=41 .* 40 positions. Use max_length=40"),
        ({"max_new_tokens": 40}, "max_length=41 .* 40 positions"),
        ({"min_length": 50}, "min_length=50 .* 40 positions"),
        ({"max_length": 10, "min_length": 11}, "min_length=11 exceeds max_length=10"),
        ({"max_length": 0.1, "min_length": 0.2}, "min_length=0.2 exceeds max_length=0.1"),
        ({"max_length": 1.5}, "max_length=1.5"),
        ({"max_length": 0}, "max_length=0 "),
        ({"max_length": True}, "max_length=True"),
        ({"min_length": -1}, "min_length=-1"),
        ({"min_length": "long"}, "min_length='long'"),
        ({"max_length": 10, "max_new_tokens": 10}, "Both max_length and max_new_tokens"),
        ({"on_long": "cut"}, "on_long='cut'.*'window', 'error', 'truncate'"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"num_return_sequences": 2, "num_beams": 2}, "num_return_sequences"),
        ({"dataset_ids": torch.tensor([0])}, "dataset_ids"),
        ({"dataset": "radio"}, "dataset='radio'.*'news', 'letters', 'papers'"),
        ({"dataset": ["news"]}, "dataset has 1 names for a batch of 2 rows"),
        ({"dataset": ["news", "newz"]}, "dataset='newz'.*Did you mean 'news'"),
        ({"num_beems": 2}, "num_beems"),
    ],
)
def test_invalid_options_are_refused(model, tokenizer, options, message):
    with pytest.raises(ValueError, match=message):
        summaries_by(model, ["River.", "Bridge."], tokenizer, **options)


def test_a_text_without_tokens_is_refused_by_number(tokenizer):
    dropping = small_tokenizer()
    dropping.backend_tokenizer.normalizer = __import__("tokenizers").normalizers.Replace("~", "")
    with pytest.raises(ValueError, match="Text 1 has no tokens: '~~'"):
        Summarizer(Copying(), dropping)(["River.", "~~"])
    assert Summarizer(Copying(), dropping, max_length=0.9)(["The river. " + "~" * 50])


def test_signs_that_no_tokenizer_reads_do_no_harm(model, tokenizer):
    assert len(summaries_by(model, ["\ud800 river 🙂 \u0000.", "?! --- ' 🙂"], tokenizer, max_length=10)) == 2
