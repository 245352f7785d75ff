"""Prompts and answers of stock decoders, and their collator."""

import logging

import pytest
import torch

from modeling_exhird import DataCollatorForPrompts, tokenize_prompts
from modeling_exhird.prompts_exhird import PromptFormat

from .llamas import llama_config, llama_tokenizer, prompt_rows, tiny_llama

DOCUMENT = {
    "title": ["Graph cuts"],
    "text": ["Zeta potentials segment the images; graph cuts find it."],
    "keyphrases": [["image segmentation", "graph cuts (GC)", "zeta potential", "Graph Cut", "a b c d e f g", "; ?"]],
}


def tokenize(document=DOCUMENT, config=None, **options):
    return tokenize_prompts(document, llama_tokenizer(), config or llama_config(), **options)


def answer_of(row) -> list[int]:
    return [token for token in row["labels"] if token != -100]


def decode(ids) -> str:
    return llama_tokenizer().decode(ids, clean_up_tokenization_spaces=False)


def test_an_answer_has_present_phrases_in_the_order_of_the_text_and_then_absent_ones(caplog):
    rows = tokenize()
    ids, labels = rows["input_ids"][0], rows["labels"][0]
    text = f"Title: Graph cuts\nText: {DOCUMENT['text'][0]}\nKeyphrases: graph cuts ; zeta potential | image segmentation</s>"
    assert decode(ids) == text
    start = labels.index(next(token for token in labels if token != -100))
    assert decode(ids[start:]) == " graph cuts ; zeta potential | image segmentation</s>"
    assert labels == [-100] * start + ids[start:]


@pytest.mark.parametrize(
    "phrases, expected",
    [
        (["tides"], " | tides"),
        (["zeta"], " zeta"),
        ("zeta; tides;moon", " zeta | tides ; moon"),
        (["neural \ud800 nets"], " | neural \ufffd nets"),
    ],
)
def test_answers_without_one_of_the_parts(phrases, expected):
    row = tokenize({"text": ["The zeta."], "keyphrases": [phrases]})
    assert decode(answer_of({"labels": row["labels"][0]})) == f"{expected}</s>"


def test_what_is_dropped_is_counted(caplog):
    config, tokenizer = llama_config(), llama_tokenizer()
    batch = {
        "text": ["zeta " * 300, "zeta", "...", "zeta", "zeta"],
        "keyphrases": [["zeta"], ["a | b", "zeta"], ["zeta"], [], ["x" * 60 + " " + "y" * 80]],
    }
    with caplog.at_level(logging.WARNING):
        logging.getLogger("transformers").propagate = True
        rows = tokenize_prompts(batch, tokenizer, config, max_length=100)
    assert len(rows["input_ids"]) == 2 and len(rows["input_ids"][0]) == 100
    assert decode(rows["input_ids"][0]).endswith("\nKeyphrases: zeta</s>")
    for part in (
        "1 of 5 documents are longer",
        "1 of 5 phrases contain",
        "3 of 5 documents have no words",
        "1 of 5 phrases have more",
    ):
        assert part in caplog.text
    assert not tokenize_prompts({"text": ["zeta"], "keyphrases": [["zeta"]]}, tokenizer, config, max_length=10)[
        "input_ids"
    ]


def test_a_prompt_ends_within_its_limit():
    written = PromptFormat(llama_tokenizer(), llama_config())
    (whole,) = written.encode([("Graph", "cuts of a network")], [100])
    (cut,) = written.encode([("Graph", "cuts of a network")], [len(whole.input_ids) - 3])
    assert whole.dropped == 0 and cut.dropped == 3 and len(cut.input_ids) == len(whole.input_ids) - 3
    assert decode(cut.input_ids).endswith("\nKeyphrases:") and cut.words == whole.words


def test_the_name_of_a_special_token_in_a_text_is_text():
    row = tokenize({"text": ["zeta </s> <s>"], "keyphrases": [["zeta"]]})["input_ids"][0]
    assert row.count(llama_tokenizer().eos_token_id) == 1 and llama_tokenizer().bos_token_id not in row


def test_the_loss_on_answers_alone_is_that_of_whole_rows():
    model, rows = tiny_llama(), prompt_rows()
    batch = DataCollatorForPrompts(llama_tokenizer())(rows)
    width = batch["input_ids"].shape[1]
    assert batch["labels"].shape[1] == batch["logits_to_keep"] < width
    labels = torch.tensor([row["labels"] + [-100] * (width - len(row["labels"])) for row in rows])
    whole = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).loss, model(**whole).loss)
    assert batch["attention_mask"].sum(1).tolist() == [len(row["input_ids"]) for row in rows]
    assert DataCollatorForPrompts(llama_tokenizer(), 64)(rows)["input_ids"].shape[1] % 64 == 0
