"""Prompts and answers of stock decoders, and their collator."""

import logging

import torch

from modeling_exhird import DataCollatorForPrompts, tokenize_prompts

from .llamas import llama_config, llama_tokenizer, prompt_format, prompt_rows, tiny_llama

DOCUMENT = {
    "title": ["Graph cuts"],
    "text": ["Zeta potentials segment the images; graph cuts find it."],
    "keyphrases": [["image segmentation", "graph cuts (GC)", "zeta potential", "Graph Cut", "a b c d e f g", "; ?"]],
}


def tokenize(document, **options):
    return tokenize_prompts(document, llama_tokenizer(), llama_config(), **options)


def decode(ids) -> str:
    return llama_tokenizer().decode(ids, clean_up_tokenization_spaces=False)


def test_an_answer_has_present_phrases_in_the_order_of_the_text_and_then_absent_ones():
    rows = tokenize(DOCUMENT)
    ids, labels = rows["input_ids"][0], rows["labels"][0]
    answer = " graph cuts ; zeta potential | image segmentation</s>"
    assert decode(ids) == f"Title: Graph cuts\nText: {DOCUMENT['text'][0]}\nKeyphrases:{answer}"
    start = next(i for i, token in enumerate(labels) if token != -100)
    assert decode(ids[start:]) == answer and labels == [-100] * start + ids[start:]
    for phrases, expected in (
        (["tides"], " | tides"),
        (["zeta"], " zeta"),
        ("zeta; tides;moon", " zeta | tides ; moon"),
        (["neural \ud800 nets"], " | neural \ufffd nets"),
    ):
        (row,) = tokenize({"text": ["The zeta </s> <s>."], "keyphrases": [phrases]})["labels"]
        assert decode([token for token in row if token != -100]) == f"{expected}</s>"  # the text's marks are text


def test_what_is_dropped_is_counted(caplog):
    batch = {
        "text": ["zeta " * 300, "zeta", "...", "zeta", "zeta"],
        "keyphrases": [["zeta"], ["a | b", "zeta"], ["zeta"], [], ["x" * 60 + " " + "y" * 80]],
    }
    logging.getLogger("transformers").propagate = True
    with caplog.at_level(logging.WARNING):
        rows = tokenize(batch, max_length=100)
    assert len(rows["input_ids"]) == 2 and len(rows["input_ids"][0]) == 100
    assert decode(rows["input_ids"][0]).endswith("\nKeyphrases: zeta</s>")
    for part in ("1 of 5 documents", "1 of 5 phrases contain", "3 of 5 documents", "1 of 5 phrases have"):
        assert part in caplog.text
    assert not tokenize({"text": ["zeta"], "keyphrases": [["zeta"]]}, max_length=10)["input_ids"]


def test_a_prompt_ends_within_its_limit():
    written = prompt_format(tiny_llama())
    (whole,) = written.encode([("Graph", "cuts of a network")], [100])
    (cut,) = written.encode([("Graph", "cuts of a network")], [len(whole.input_ids) - 3])
    assert whole.dropped == 0 and cut.dropped == 3 and len(cut.input_ids) == len(whole.input_ids) - 3
    assert decode(cut.input_ids).endswith("\nKeyphrases:") and cut.words == whole.words


def test_known_keyphrases_are_found_as_titles_write_them():
    model = tiny_llama()
    known = "np complete; rubiks cube; xbox DIGIT; DIGIT froyo; j k rowling; neural network; graph; new; c"
    model.config.keyphrase_generation = model.config.keyphrase_generation | {"known_keyphrases": known}
    for title, found in (
        ("Is it NP-complete?", ["NP-complete"]), ("A Rubik's Cube", ["Rubik's Cube"]), ("Xbox 360 on 2.2 Froyo", ["Xbox 360", "2.2 Froyo"]),
        ("J. K. Rowling’s style", ["J. K. Rowling"]), ("Neural\n networks", ["Neural\n networks"]), ("CS news of graphing C++", []),
    ):  # fmt: skip
        assert prompt_format(model).known_in(title) == found


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
