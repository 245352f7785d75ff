"""pipeline("keyphrase-extraction"): long documents, any labels, models and tokenizers."""

import copy
import re

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BertForTokenClassification, pipeline

from keyphrase_tools import KeyphraseExtractionPipeline
from keyphrase_tools.token_classifiers import known_limit
from lexperts_lite.decoding import read_labels
from tests.keyphrase_tools.known_answers import LETTERS, Lookup, assert_same, names, random_text

# ---- long documents


@pytest.mark.parametrize(
    "words, max_length, overlap",
    [(300, None, None), (300, 20, 6), (101, 13, 0), (250, 17, 5), (61, 17, 5), (64, 20, 9)],
)
def test_a_word_is_read_in_the_window_where_it_stands_furthest_from_a_cut(lookup, words, max_length, overlap):
    letters = [LETTERS[(7 * i) % 25] for i in range(words)]  # one piece a word
    extract = lookup(by_place=True)
    room, shared = (max_length or 64) - 2, 16 if overlap is None else overlap
    begins = [0]
    while begins[-1] + room < words:
        begins.append(begins[-1] + room - shared)
    ids = extract.tokenizer.convert_tokens_to_ids(letters)
    labels_of_words = []
    for word in range(words):
        best = None
        for begin in begins:
            if begin <= word < begin + room:
                to_cut = [word - begin] * (begin > 0) + [begin + room - 1 - word] * (begin + room < words)
                if best is None or min(to_cut, default=words) > best[0]:
                    best = min(to_cut, default=words), word - begin + 1
        waves = torch.stack([torch.sin(torch.tensor(best[1]) * n) for n in (1.0, 2.0, 3.0)]) * 5
        labels_of_words.append((extract.model.table[ids[word]].detach() + waves).argmax().item())
    text = " ".join(letters)
    answer = extract(text, top_k=None, max_length=max_length, overlap=overlap)
    covered = {place // 2 for p in answer for m in p["mentions"] for place in range(m["start"], m["end"], 2)}
    assert covered == {word for word, label in enumerate(labels_of_words) if label}
    begun = {m["start"] // 2 for p in answer for m in p["mentions"]}
    assert begun == {
        w
        for w, label in enumerate(labels_of_words)
        if label == 1 or (label == 2 and (w == 0 or not labels_of_words[w - 1]))
    }


def test_where_windows_do_not_matter_a_long_document_reads_as_its_parts(lookup):
    extract = lookup()  # looks at nothing but the word itself
    part = "x bx ix and p in jx, b "
    offsets = [len(part) * i for i in range(60)]
    long = extract(part * 60, top_k=None)
    assert names(long) == names(extract(part, top_k=None))
    for phrase, short in zip(long, extract(part), strict=True):
        places = [m["start"] + offset for offset in offsets for m in short["mentions"]]
        assert [m["start"] for m in phrase["mentions"]] == places
    assert_same([extract(part * 60, max_length=9, overlap=3, top_k=None)], [long])


# ---- models and tokenizers


@pytest.mark.parametrize(
    "id2label, tags",
    [
        ({0: "O", 1: "B", 2: "I"}, [0, 1, 2]),
        ({0: "O", 1: "B-KEY", 2: "I-KEY"}, [0, 1, 2]),
        ({0: "B", 1: "I", 2: "O"}, [1, 2, 0]),
        ({0: "I_KEY", 1: "b_key", 2: "outside"}, [2, 1, 0]),
        ({0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC", 4: "I-LOC"}, [0, 1, 2, 1, 2]),
        ({2: "I", 0: "O", 1: "B"}, [0, 1, 2]),
    ],
)
def test_labels_are_read_with_and_without_types(id2label, tags):
    assert read_labels(id2label) == tags


@pytest.mark.parametrize(
    "names",
    [
        ["LABEL_0", "LABEL_1", "LABEL_2"],
        ["O", "B"],
        ["O", "I-KEY"],
        ["B", "I"],
        ["O", "PERSON", "PLACE"],
        ["O", "B", "I", "S"],
    ],
)
def test_labels_that_are_not_b_i_and_o_are_named(backbone_config, tiny_tokenizer, names):
    config = backbone_config("bert", id2label=dict(enumerate(names)))
    labels = re.escape(", ".join(map(repr, names)))
    with pytest.raises(ValueError, match=f"The model's labels are {labels}: .*model.config.id2label = "):
        pipeline("keyphrase-extraction", model=BertForTokenClassification(config), tokenizer=tiny_tokenizer)


def test_probabilities_of_one_tag_with_several_types_are_added(backbone_config, tiny_tokenizer):
    config = backbone_config("bert", id2label=dict(enumerate(["O", "B-PER", "I-PER", "B-LOC", "I-LOC"])))
    model = Lookup(config, tiny_tokenizer)
    model.table = nn.Parameter(torch.tensor([[2.0, 1.9, 0.0, 1.9, 0.0]]).repeat(config.vocab_size, 1))
    (phrase,) = pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer)("graph")
    weights = np.exp([2.0, 1.9, 0.0, 1.9, 0.0])
    assert phrase["score"] == pytest.approx((weights[1] + weights[3]) / weights.sum(), abs=1e-6)


def test_a_stock_token_classifier_works_too(backbone_config, tiny_tokenizer, tmp_path):
    torch.manual_seed(0)
    model = BertForTokenClassification(backbone_config("bert", id2label={0: "O", 1: "B-KEY", 2: "I-KEY"})).eval()
    model.classifier.weight.data *= 30
    extract = pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer)
    answer = extract(random_text(40))
    assert len(answer) == 10
    model.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    assert pipeline("keyphrase-extraction", model=str(tmp_path))(random_text(40)) == answer
    # negative control: other weights, other phrases
    model.classifier.weight.data *= -1
    assert names(extract(random_text(40))) != names(answer)


def test_a_window_is_as_long_as_both_tokenizer_and_model_allow(backbone_config, tiny_tokenizer):
    wide = copy.deepcopy(tiny_tokenizer)
    wide.model_max_length = int(1e30)
    short = copy.deepcopy(tiny_tokenizer)
    short.model_max_length = 20
    model = BertForTokenClassification(backbone_config("bert", id2label={0: "O", 1: "B", 2: "I"}))
    assert [known_limit(tokenizer, model) for tokenizer in (tiny_tokenizer, wide, short)] == [64, 64, 20]
    padded = BertForTokenClassification(backbone_config("bert", max_position_embeddings=40))
    padded.bert.embeddings.position_embeddings.padding_idx = 1  # as RoBERTa's, which count from 2
    assert known_limit(wide, padded) == 38
    answer = KeyphraseExtractionPipeline(model, wide)(random_text(200), top_k=None)
    assert max(phrase["end"] for phrase in answer) > 500  # characters, far beyond the first window
    # asking for more than the model has places for reads as many as it has
    assert_same([KeyphraseExtractionPipeline(model, wide)(random_text(200), top_k=None, max_length=512)], [answer])


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
