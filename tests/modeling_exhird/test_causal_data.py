"""Prompts and answers of a decoder, their collator, and the pipeline's keyphrases."""

import copy
import logging

import pytest
import torch
from transformers import pipeline

import lexperts  # noqa: F401  (registers the pipelines)
from modeling_exhird import DataCollatorForPrompts, ExhirdForCausalLM, ExhirdForKeyphraseGeneration, tokenize_prompts
from modeling_exhird.causal_data_exhird import CausalKeyphraseGenerator, PromptFormat
from run_tools.loading import PipelineLoadingError

from .causal import causal_rows, causal_tokenizer, fitted, tiny_causal
from .conftest import DOCUMENTS

DOCUMENT = {
    "title": ["Graph cuts"],
    "text": ["Zeta potentials segment the images; graph cuts find it."],
    "keyphrases": [["image segmentation", "graph cuts (GC)", "zeta potential", "Graph Cut", "a b c d e f g", "; ?"]],
}


def tokenize(document=DOCUMENT, config=None, **options):
    return tokenize_prompts(document, causal_tokenizer(), config or tiny_causal().config, **options)


def answer_of(row) -> list[int]:
    return [token for token in row["labels"] if token != -100]


def decode(ids) -> str:
    return causal_tokenizer().decode(ids, clean_up_tokenization_spaces=False)


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
    config, tokenizer = tiny_causal().config, causal_tokenizer()
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
        "1 of 5 keyphrases contain",
        "3 of 5 documents have no words",
        "1 of 5 keyphrases have more",
    ):
        assert part in caplog.text
    assert not tokenize_prompts({"text": ["zeta"], "keyphrases": [["zeta"]]}, tokenizer, config, max_length=10)[
        "input_ids"
    ]


def test_a_prompt_ends_within_its_limit():
    written = PromptFormat(causal_tokenizer(), tiny_causal().config)
    (whole,) = written.encode([("Graph", "cuts of a network")], [100])
    (cut,) = written.encode([("Graph", "cuts of a network")], [len(whole.input_ids) - 3])
    assert whole.dropped == 0 and cut.dropped == 3 and len(cut.input_ids) == len(whole.input_ids) - 3
    assert decode(cut.input_ids).endswith("\nKeyphrases:") and cut.words == whole.words
    with pytest.raises(ValueError, match="max_source_length"):
        written.encode([(None, "a")], [2])


def test_the_name_of_a_special_token_in_a_text_is_text():
    row = tokenize({"text": ["zeta </s> <s>"], "keyphrases": [["zeta"]]})["input_ids"][0]
    assert row.count(causal_tokenizer().eos_token_id) == 1 and causal_tokenizer().bos_token_id not in row


def test_the_loss_on_answers_alone_is_the_same():
    model, rows = tiny_causal(), causal_rows()
    every, answers = (DataCollatorForPrompts(causal_tokenizer(), answers_only=only)(rows) for only in (False, True))
    assert answers["labels"].shape[1] == answers["logits_to_keep"] < every["labels"].shape[1]
    with torch.no_grad():
        torch.testing.assert_close(model(**answers).loss, model(**every).loss)
        assert model(**answers).logits.shape[1] == answers["logits_to_keep"]
    assert every["attention_mask"].sum(1).tolist() == [len(row["input_ids"]) for row in rows]


@pytest.fixture(scope="module")
def generate():
    return pipeline("keyphrase-generation", model=fitted(), tokenizer=causal_tokenizer(), device="cpu")


def documents():
    return [{"title": t, "text": x} for t, x in zip(DOCUMENTS["title"], DOCUMENTS["text"], strict=True)]


def without_scores(phrases):
    return [{name: value for name, value in phrase.items() if name != "score"} for phrase in phrases]


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"exclusion_window": -1}])
def test_the_pipeline_finds_phrases_with_offsets_and_scores(generate, options):
    results = generate(documents(), **options)
    found = [phrase for phrases in results for phrase in phrases]
    assert any(phrase["present"] for phrase in found) and any(not phrase["present"] for phrase in found)
    for document, phrases in zip(documents(), results, strict=True):
        for phrase in phrases:
            assert 0 < phrase["score"] <= 1
            if phrase["present"]:
                text = document[phrase.get("field", "text")]
                assert text[phrase["start"] : phrase["end"]] == phrase["keyphrase"]
            else:
                assert phrase["start"] is phrase["end"] is None and phrase["keyphrase"]
        assert ("field" in phrases[0]) == bool(document["title"] and phrases[0]["present"])
    for document, phrases in zip(documents(), results, strict=True):
        alone = generate(document, **options)
        assert without_scores(alone) == without_scores(phrases)
        assert [p["score"] for p in alone] == pytest.approx([p["score"] for p in phrases], rel=1e-2)
    assert generate("", **options) == generate("...", **options) == []


def test_the_task_opens_both_kinds_of_models(generate, tiny_exhird, tokenizer_for, tmp_path):
    generate.save_pretrained(tmp_path / "decoder")
    for part in (tiny_exhird("bigru"), tokenizer_for("bigru")):
        part.save_pretrained(tmp_path / "encoder")
    opened = {name: pipeline("keyphrase-generation", model=str(tmp_path / name)) for name in ("decoder", "encoder")}
    assert type(opened["decoder"].model) is ExhirdForCausalLM
    assert type(opened["encoder"].model) is ExhirdForKeyphraseGeneration
    for found, expected in zip(opened["decoder"](documents()), generate(documents()), strict=True):
        assert [phrase["keyphrase"] for phrase in found] == [phrase["keyphrase"] for phrase in expected]
        assert [phrase["score"] for phrase in found] == pytest.approx(
            [phrase["score"] for phrase in expected], abs=1e-5
        )
    weights = tmp_path / "decoder" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(PipelineLoadingError, match="header"):
        pipeline("keyphrase-generation", model=str(tmp_path / "decoder"))


def test_duplicates_by_stems_are_dropped():
    """And phrases without a letter or digit; numbers in absent phrases are kept."""
    generator, tokenizer = CausalKeyphraseGenerator(fitted(), causal_tokenizer()), causal_tokenizer()
    (source,) = generator.encode([(None, "Graph cuts of 3 networks")])
    texts = [" graph cut ;", " graph cuts ;", " ... ;", " 12 networks |", " tides</s>"]
    rows = [tokenizer(text)["input_ids"] for text in texts]
    rows = [row + [tokenizer.pad_token_id] * (20 - len(row)) for row in rows]
    found = generator.postprocess(rows, [0.0, -1.0, -1.0, -2.0, -3.0], source, (None, "Graph cuts of 3 networks"))
    assert [phrase["keyphrase"] for phrase in found] == ["Graph cuts", "12 networks", "tides"]
    assert [phrase["present"] for phrase in found] == [True, False, False]
    (three,) = generator.postprocess(
        [tokenizer(" 3 network ;")["input_ids"]], [0.0], source, (None, "Graph cuts of 3 networks")
    )
    assert three["keyphrase"] == "3 networks" and three["present"]


def test_signs_of_a_generated_phrase_belong_to_it():
    generator, tokenizer = CausalKeyphraseGenerator(fitted(), causal_tokenizer()), causal_tokenizer()
    document = (None, "Does (c++11) need AT&T in C++?")
    (source,) = generator.encode([document])
    rows = [tokenizer(f" {text} ;")["input_ids"] for text in ("c++", "c#", "at&t", "c")]
    rows = [row + [tokenizer.pad_token_id] * (20 - len(row)) for row in rows]
    found = generator.postprocess(rows, [0.0] * 4, source, document)
    assert [(phrase["keyphrase"], phrase["start"]) for phrase in found] == [
        ("C++", 26),
        ("c#", None),
        ("AT&T", 18),
        ("c", 6),
    ]


def test_a_text_that_is_not_read_to_its_end_is_counted(generate, caplog):
    with caplog.at_level(logging.WARNING):
        logging.getLogger("transformers").propagate = True
        generate("zeta " * 400)
    assert "1 of 1 documents have more than max_source_length=128 tokens" in caplog.text


def test_a_tokenizer_of_another_model_is_named():
    with pytest.raises(ValueError, match="The tokenizer has"):
        CausalKeyphraseGenerator(tiny_causal(changes={"vocab_size": 300}), causal_tokenizer())


def test_probabilities_that_are_nan_are_an_error():
    model = copy.deepcopy(fitted())
    model.backbone.model.norm.weight.data.fill_(torch.nan)
    generate = pipeline("keyphrase-generation", model=model, tokenizer=causal_tokenizer(), device="cpu")
    with pytest.raises(ValueError, match="NaN. Check its weights"):
        generate(documents()[0])
