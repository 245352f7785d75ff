"""Rows and batches of decoders, and their summaries by the pipeline."""

from collections import Counter

import pytest
import torch
from datasets import Dataset
from torch.testing import assert_close
from transformers import pipeline

from modeling_moesumm import DataCollatorForCausalMoeSumm, format_prompt, tokenize_summaries
from modeling_moesumm.generation_moesumm import Summarizer
from modeling_moesumm.prompts_moesumm import PLAIN, PromptFormat, leading_tokens
from tests.modeling_moesumm.conftest import tiny_backbone
from tests.modeling_moesumm.summaries import POSITIONS, small_tokenizer, story, summaries_by, writing_moesumm

ROWS = [
    {"document": "The river rose fast.", "summary": "River rose.", "dataset": "news"},
    {"document": "A bridge fell on foot and People left.", "summary": "Bridge fell fast.", "dataset": "papers"},
    {"document": "The council met.", "summary": "Council met.", "dataset": None},
]
TEXTS = [story(12), story(25, 1), story(60, 2), "The river rose."]
NAMES = ["news", None, "papers", "letters"]


@pytest.fixture(scope="module")
def model(tokenizer):
    return writing_moesumm(tokenizer, "llama")


def collator_of(tokenizer, model, **options):
    return DataCollatorForCausalMoeSumm(tokenizer, model, **{"max_target_length": 16, **options})


# --- rows -----------------------------------------------------------------------------------------------------------


def test_a_row_is_bos_document_prompt_summary_and_eos_with_labels_for_the_summary(tokenizer, model):
    batch = {name: [row[name] for row in ROWS] for name in ("document", "summary")}
    columns = tokenize_summaries(batch, tokenizer, max_length=POSITIONS, max_target_length=16, config=model.config)
    for row, ids, labels in zip(ROWS, columns["input_ids"], columns["labels"], strict=True):
        prompt = tokenizer(format_prompt(row["document"], model.config))["input_ids"][:-1]  # without its EOS
        summary = tokenizer(row["summary"], **PLAIN)["input_ids"]
        assert ids == [*prompt, *summary, 2] and prompt[0] == 0
        assert labels == [-100] * len(prompt) + [*summary, 2]
    assert columns["documents_left_out"] == columns["summaries_left_out"] == [0, 0, 0]
    assert leading_tokens(small_tokenizer()) == [0]


def test_long_rows_lose_the_ends_of_document_and_summary_never_the_prompt(tokenizer, model):
    prompt = PromptFormat.of(tokenizer, model.config)
    for summary, kept in (("river", 2), (story(30, 3), 16), (None, 0)):
        batch = {"document": [story(60)], "summary": [summary]}
        columns = tokenize_summaries(batch, tokenizer, POSITIONS, 16)
        (ids,), (labels,) = columns["input_ids"], columns["labels"]
        room = POSITIONS - (kept or 16) - len(prompt)
        document = tokenizer(story(60), **PLAIN)["input_ids"]
        assert len(ids) == POSITIONS - (0 if kept else 16)
        assert ids[: len(ids) - kept] == prompt.join(document[:room])
        assert sum(label != -100 for label in labels) == kept and (not kept or ids[-1] == 2)
        assert columns["documents_left_out"] == [len(document) - room]
        length = 0 if summary is None else len(tokenizer(summary, **PLAIN)["input_ids"])
        assert columns["summaries_left_out"] == [max(length - 15, 0)]
    with pytest.raises(ValueError, match=r"max_length=20 leaves no room.*max_target_length"):
        tokenize_summaries({"document": ["a"], "summary": ["a"]}, tokenizer, 20, 16)
    unmarked = small_tokenizer()
    unmarked.eos_token = None
    with pytest.raises(ValueError, match="eos_token=None"):
        tokenize_summaries({"document": ["a"], "summary": ["a"]}, unmarked, POSITIONS, 16)


# --- batches --------------------------------------------------------------------------------------------------------


def test_texts_and_tokenised_rows_make_the_same_batch(tokenizer, model):
    expected = collator_of(tokenizer, model)(ROWS)
    assert set(expected) == {"input_ids", "attention_mask", "labels", "dataset_ids"}
    assert expected["dataset_ids"].tolist() == [0, 2, -1]
    assert (expected["labels"][:, -1] == 2).all()  # padded on the left
    assert (expected["attention_mask"].sum(1) < expected["input_ids"].shape[1]).any()
    options = {"tokenizer": tokenizer, "max_length": POSITIONS, "max_target_length": 16, "config": model.config}
    mapped = Dataset.from_list(ROWS).map(tokenize_summaries, batched=True, fn_kwargs=options)
    found = collator_of(tokenizer, model)(list(mapped))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    loss = model(**expected).loss
    assert not torch.equal(model(**{**expected, "dataset_ids": torch.tensor([1, 2, -1])}).loss, loss)
    prompts = collator_of(tokenizer, model)([{"document": row["document"]} for row in ROWS])
    assert set(prompts) == {"input_ids", "attention_mask", "dataset_ids"}
    assert model.generate(**prompts, max_new_tokens=3).shape == (3, prompts["input_ids"].shape[1] + 3)
    assert collator_of(tokenizer, model, pad_to_multiple_of=8)(ROWS)["input_ids"].shape[1] % 8 == 0


def test_answers_only_has_the_same_losses_from_fewer_positions(tokenizer, model):
    whole, answers = (collator_of(tokenizer, model, answers_only=only)(ROWS) for only in (False, True))
    K = answers["logits_to_keep"]
    assert answers["labels"].shape == (3, K) and whole["labels"].shape[1] > K
    assert (whole["labels"][:, :-K] == -100).all() and (answers["labels"][:, 0] == -100).all()
    expected, found = model(**whole), model(**answers)
    assert found.logits.shape[1] == K
    assert_close((found.loss, found.margin_loss), (expected.loss, expected.margin_loss))


def test_rows_that_are_too_long_are_refused_or_cut_and_counted(tokenizer, model, caplog):
    long = [{**ROWS[0], "document": story(80)}, {**ROWS[1], "summary": story(40)}, ROWS[2]]
    for row, kind in zip(long[:2], ("documents", "summaries"), strict=True):
        with pytest.raises(ValueError, match=rf"{kind}, more than \d+.*on_long='truncate'"):
            collator_of(tokenizer, model)([row])
    collator = collator_of(tokenizer, model, on_long="truncate")
    batch = collator(long)
    assert batch["input_ids"].shape[1] == POSITIONS == collator.limits["documents"]
    assert collator.truncated_rows == Counter(rows=3, documents=1, summaries=1)
    assert "1 of the documents of 3 rows were truncated to 40 tokens" in caplog.text
    for options, message in (
        ({"max_length": 99}, "max_length=99"),
        ({"max_target_length": 1}, "max_target_length=1"),
        ({"on_long": "cut"}, "on_long='cut'"),
    ):
        with pytest.raises(ValueError, match=message):
            collator_of(tokenizer, model, **options)
    for row in ({"document": " "}, {"document": "a", "summary": ""}, {"input_ids": [1, 2], "labels": [1]}):
        with pytest.raises(ValueError, match=r"Row 0 .*(neither a text|1 labels)"):
            collator_of(tokenizer, model)([row])


# --- summaries ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"max_length": 0.4, "min_length": 0.2, "num_beams": 2}])
def test_a_text_has_the_same_summary_alone_and_in_a_batch(options, tokenizer, model):
    options = {"max_length": 14, **options}
    together = summaries_by(model, TEXTS, tokenizer, dataset=NAMES, batch_size=4, **options)
    pairs = zip(TEXTS, NAMES, strict=True)
    assert together == [summaries_by(model, text, tokenizer, dataset=name, **options) for text, name in pairs]
    assert len(set(together)) == 4
    assert together != summaries_by(model, TEXTS, tokenizer, dataset=None, **options)


def test_a_short_text_is_what_generate_writes(tokenizer, model):
    ids = tokenizer(format_prompt(TEXTS[0], model.config), return_tensors="pt")["input_ids"][:, :-1]
    written = model.generate(ids, dataset="news", max_new_tokens=9, min_new_tokens=3, num_beams=3)
    written = tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)
    options = {"max_new_tokens": 9, "min_new_tokens": 3, "num_beams": 3}
    summary = summaries_by(model, TEXTS[0], tokenizer, dataset="news", **options)
    assert written.startswith(summary.removesuffix("…")) and summary


def test_windows_leave_room_for_the_prompt_and_the_summary(tokenizer, model):
    prompt = PromptFormat.of(tokenizer, model.config)

    def windows_of(text, **options):
        summarizer = Summarizer(model, tokenizer, max_length=14, **options)
        summarizer.sources = {}
        return summarizer.make_windows({0: text}, ["news"], {}, 0)

    windows = windows_of(story(60, 2))
    assert len(windows) > 2
    for window in windows:
        assert window.ids[-len(prompt.suffix) :] == prompt.suffix
        assert len(window.ids) + window.max_length - 1 <= POSITIONS
    (cut,) = windows_of(story(60), on_long="truncate")
    assert len(cut.ids) + 13 == POSITIONS and cut.ids[-len(prompt.suffix) :] == prompt.suffix
    with pytest.raises(ValueError, match=r"Text 0 has .* the model has .* positions for them"):
        summaries_by(model, story(60), tokenizer, max_length=14, on_long="error")
    with pytest.raises(ValueError, match=r"max_length=40 exceeds"):
        Summarizer(model, tokenizer, max_length=40)


def test_the_pipeline_opens_both_kinds_and_stock_decoders(tokenizer, model, tmp_path):
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    summarize = pipeline("moe-summarization", model=str(tmp_path), device="cpu", max_length=12, num_beams=1)
    assert type(summarize.model) is type(model)
    expected = summaries_by(model, TEXTS, tokenizer, dataset=NAMES, max_length=12, num_beams=1)
    assert summarize(TEXTS, dataset=NAMES) == [{"summary_text": summary} for summary in expected]
    stock = tiny_backbone("llama", vocab_size=len(tokenizer))
    options = {"max_length": 12, "num_beams": 1}
    plain = pipeline("moe-summarization", model=stock, tokenizer=tokenizer, device="cpu", **options)
    alone = summaries_by(model, TEXTS, tokenizer, **options)
    assert [entry["summary_text"] for entry in plain(TEXTS)] == alone
