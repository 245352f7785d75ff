"""Options against repetition, in summaries by a decoder: they count the summary and not the document before it."""

import pytest
import torch
from transformers import NoRepeatNGramLogitsProcessor

from modeling_moesumm.generation_moesumm import REPETITION, OfSummary, Summarizer
from tests.tools import save_tiny_llama


def test_n_grams_of_the_document_may_be_written_and_those_of_the_summary_may_not():
    ids, scores = torch.tensor([[7, 8, 9, 1, 5, 6, 5]]), torch.zeros(1, 12)
    processor = NoRepeatNGramLogitsProcessor(2)
    assert OfSummary(processor, 4)(ids, scores.clone())[0].isinf().nonzero().flatten().tolist() == [6]  # after 5 came 6
    again = torch.tensor([[7, 8, 9, 1, 7]])
    assert not OfSummary(processor, 4)(again, scores.clone()).isinf().any()
    assert processor(again, scores.clone())[0, 8].isinf()  # what `generate` would do
    assert not OfSummary(processor, 4)(again[:, :4], scores.clone()).isinf().any()


@pytest.mark.parametrize("name, value", [("no_repeat_ngram_size", 2), ("repetition_penalty", 1.3)])
@pytest.mark.parametrize("place", ["call", "model"])
def test_a_summariser_applies_them_itself(name, value, place, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    save_tiny_llama(tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    options = {name: value} if place == "call" else {}
    if place == "model":
        setattr(model.generation_config, name, value)
    calls, generate = [], model.generate
    monkeypatch.setattr(model, "generate", lambda **given: calls.append(given) or generate(**given))
    texts = ["the graph cut", "a graph of the network"]
    Summarizer(model, tokenizer, max_length=12, num_beams=1, **options)(texts)
    (given,) = calls
    off, processor = REPETITION[name]
    (own,) = (one for one in given["logits_processor"] if isinstance(one, OfSummary))
    assert given[name] == off and isinstance(own.processor, processor)
    assert own.prompt_length == given["input_ids"].shape[1]
