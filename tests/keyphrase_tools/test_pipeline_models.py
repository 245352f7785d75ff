"""pipeline("keyphrase-extraction"): long documents, any labels, models and tokenizers."""

import copy
import re

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BertForTokenClassification, pipeline

from keyphrase_tools.token_classifiers import known_limit
from lexperts_lite.decoding import read_labels

from .known_answers import LETTERS, Lookup, assert_same, random_text


@pytest.mark.parametrize("words, max_length, overlap", [(300, None, None), (101, 13, 0), (61, 17, 5)])
def test_a_word_is_read_in_the_window_where_it_is_furthest_from_a_cut(lookup, words, max_length, overlap):
    letters = [LETTERS[(7 * i) % 25] for i in range(words)]  # one piece per word
    extract = lookup(by_place=True)
    room = (max_length or 64) - 2
    step = room - (16 if overlap is None else overlap)
    begins = [0, *(begin + step for begin in range(0, words - room, step))]

    def distance(word, begin):
        to_cut = [word - begin] * (begin > 0) + [begin + room - 1 - word] * (begin + room < words)
        return min(to_cut, default=words)

    logits = extract.model.table[extract.tokenizer.convert_tokens_to_ids(letters)].detach()
    for word in range(words):
        begin = max((b for b in begins if b <= word < b + room), key=lambda b: (distance(word, b), -b))
        logits[word] += torch.stack([torch.sin(torch.tensor(word - begin + 1) * n) for n in (1.0, 2.0, 3.0)]) * 5
    labels = logits.argmax(-1).tolist()
    answer = extract(" ".join(letters), top_k=None, max_length=max_length, overlap=overlap)
    mentions = [mention for phrase in answer for mention in phrase["mentions"]]
    covered = {place // 2 for m in mentions for place in range(m["start"], m["end"], 2)}
    assert covered == {word for word, label in enumerate(labels) if label}
    begun = {w for w, label in enumerate(labels) if label == 1 or (label == 2 and not (w and labels[w - 1]))}
    assert {mention["start"] // 2 for mention in mentions} == begun


# ---- models and tokenizers


@pytest.mark.parametrize("id2label, tags", [
    ({0: "O", 1: "B", 2: "I"}, [0, 1, 2]), ({0: "B-KEY", 1: "I-KEY", 2: "O"}, [1, 2, 0]), ({0: "I_KEY", 1: "b_key", 2: "outside"}, [2, 1, 0]),
    ({0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC", 4: "I-LOC"}, [0, 1, 2, 1, 2]), ({2: "I", 0: "O", 1: "B"}, [0, 1, 2]),
])  # fmt: skip
def test_labels_are_read_with_and_without_types(id2label, tags):
    assert read_labels(id2label) == tags


@pytest.mark.parametrize(
    "names", [["LABEL_0", "LABEL_1", "LABEL_2"], ["O", "I-KEY"], ["B", "I"], ["O", "B", "I", "S"]], ids=str
)
def test_labels_that_are_not_b_i_and_o_are_named(backbone_config, tiny_tokenizer, names):
    config = backbone_config("bert", id2label=dict(enumerate(names)))
    with pytest.raises(ValueError, match=re.escape(", ".join(map(repr, names)))):
        pipeline("keyphrase-extraction", model=BertForTokenClassification(config), tokenizer=tiny_tokenizer)


def test_probabilities_of_one_tag_with_several_types_are_added(backbone_config, tiny_tokenizer):
    config = backbone_config("bert", id2label=dict(enumerate(["O", "B-PER", "I-PER", "B-LOC", "I-LOC"])))
    model = Lookup(config, tiny_tokenizer)
    model.table = nn.Parameter(torch.tensor([[2.0, 1.9, 0.0, 1.9, 0.0]]).repeat(config.vocab_size, 1))
    (phrase,) = pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer)("graph")
    weights = np.exp([2.0, 1.9, 0.0, 1.9, 0.0])
    assert phrase["score"] == pytest.approx((weights[1] + weights[3]) / weights.sum(), abs=1e-6)


def test_a_stock_token_classifier_works_in_windows_of_its_limit(backbone_config, tiny_tokenizer, tmp_path):
    torch.manual_seed(0)
    model = BertForTokenClassification(backbone_config("bert", id2label={0: "O", 1: "B-KEY", 2: "I-KEY"})).eval()
    model.classifier.weight.data *= 30
    wide = copy.deepcopy(tiny_tokenizer)
    wide.model_max_length = int(1e30)
    extract, text = pipeline("keyphrase-extraction", model=model, tokenizer=wide, top_k=None), random_text(200)
    answer = extract(text)
    assert max(phrase["end"] for phrase in answer) > 500  # characters, far beyond the first window
    # asking for more than the model has places for reads as many as it has
    assert_same([extract(text, max_length=512)], [answer])
    extract.save_pretrained(tmp_path)
    assert pipeline("keyphrase-extraction", model=str(tmp_path), top_k=None)(text) == answer
    padded = BertForTokenClassification(backbone_config("bert", max_position_embeddings=40))
    padded.bert.embeddings.position_embeddings.padding_idx = 1  # as RoBERTa's, which count from 2
    assert known_limit(wide, padded) == 38


def test_the_models_own_threshold_is_used_unless_the_call_names_one(tiny_seke, tiny_tokenizer):
    model = tiny_seke()
    text = "the graph cut of the network is the problem of learning in graph networks"
    extract = pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer)
    by_labels, strict, generous = extract(text), extract(text, threshold=0.99), extract(text, threshold=0.01)
    assert strict == [] and generous and generous != by_labels
    model.config.keyphrase_threshold = 0.01
    assert extract(text) == generous and extract(text, threshold=0.99) == strict
    model.config.keyphrase_threshold = None
    assert extract(text) == by_labels


def test_probabilities_that_are_nan_are_an_error(sharp_seke, tiny_tokenizer):
    model = sharp_seke()
    model.classifier.weight.data.fill_(torch.nan)
    extract = pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer)
    with pytest.raises(ValueError, match="of document 0 are NaN. Check its weights"):
        extract(["the graph cuts", "the network"])
